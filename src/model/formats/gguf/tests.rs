use super::*;

fn sample() -> (Metadata, Vec<(String, Tensor)>) {
    let mut m = Metadata::new();
    m.insert("general.architecture".into(), Value::String("llama".into()));
    m.insert("a.uint".into(), Value::Uint(7));
    m.insert("a.big".into(), Value::Uint(1 << 40));
    m.insert("a.int".into(), Value::Int(-7));
    m.insert("a.float".into(), Value::Float(0.5));
    m.insert("a.double".into(), Value::Float(0.1));
    m.insert("a.bool".into(), Value::Bool(true));
    m.insert("a.bytes".into(), Value::Bytes(b"caf\xe9".to_vec()));
    m.insert("a.ints".into(), Value::ints(&[1, -2, 3]));
    m.insert("a.wide".into(), Value::ints(&[1, i64::MIN]));
    m.insert("a.floats".into(), Value::floats(&[1.5, -2.5]));
    m.insert("a.strings".into(), Value::strings(&["é".into(), String::new()]));
    m.insert("a.nested".into(), Value::arrays(&[Value::ints(&[1]), Value::strings(&[""; 0])]));
    let t = |d: DType, shape: &[usize]| {
        let n =
            shape[..shape.len() - 1].iter().product::<usize>() * d.row_bytes(shape[shape.len() - 1]).unwrap();
        Tensor::new(d, shape.to_vec(), Bytes::copy_of(&(0..n).map(|i| i as u8).collect::<Vec<_>>())).unwrap()
    };
    let tensors = vec![("x".into(), t(DType::F32, &[3])), ("y.weight".into(), t(DType::Q4_0, &[2, 64]))];
    (m, tensors)
}

fn bytes_of(m: &Metadata, t: &[(String, Tensor)]) -> Vec<u8> {
    write::to_bytes(m, t.iter().map(|(n, t)| (n.as_str(), t)))
}

fn parse(bytes: &[u8]) -> Result<Gguf> {
    Gguf::parse(Bytes::copy_of(bytes))
}

fn complaint(bytes: &[u8]) -> String {
    parse(bytes).map(|_| ()).expect_err("accepted").to_string()
}

#[test]
fn what_is_written_is_read_back() {
    let (m, t) = sample();
    let g = parse(&bytes_of(&m, &t)).unwrap();
    assert_eq!(g.version, 3);
    assert_eq!(g.metadata, m);
    assert_eq!(g.tensors.len(), t.len());
    for ((n, a), (m, b)) in g.tensors.iter().zip(&t) {
        assert_eq!((n, a.dtype, &a.shape, &a.data[..]), (m, b.dtype, &b.shape, &b.data[..]));
        assert_eq!(a.data.as_ptr() as usize % 8, 0, "aligned");
    }
}

#[test]
fn every_truncation_is_refused() {
    let (m, t) = sample();
    let bytes = bytes_of(&m, &t);
    for n in 0..bytes.len() {
        assert!(parse(&bytes[..n]).is_err(), "{n} of {} bytes were accepted", bytes.len());
    }
}

/// `GGUF`, version 3, then the given counts and tail.
fn raw(n_tensors: u64, n_kv: u64, tail: &[u8]) -> Vec<u8> {
    let mut b = b"GGUF".to_vec();
    b.extend(3u32.to_le_bytes());
    b.extend(n_tensors.to_le_bytes());
    b.extend(n_kv.to_le_bytes());
    b.extend_from_slice(tail);
    b
}

fn key(k: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    let mut b = (k.len() as u64).to_le_bytes().to_vec();
    b.extend_from_slice(k);
    b.extend(kind.to_le_bytes());
    b.extend_from_slice(value);
    b
}

fn info(name: &str, dims: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    let mut b = (name.len() as u64).to_le_bytes().to_vec();
    b.extend_from_slice(name.as_bytes());
    b.extend((dims.len() as u32).to_le_bytes());
    for d in dims {
        b.extend(d.to_le_bytes());
    }
    b.extend(ty.to_le_bytes());
    b.extend(offset.to_le_bytes());
    b
}

#[test]
fn hostile_headers_get_one_sentence() {
    let nested = {
        // array of array of array of array of u8
        let mut v = Vec::new();
        for kind in [9u32, 9, 9, 0] {
            v.extend(kind.to_le_bytes());
            v.extend(1u64.to_le_bytes());
        }
        v.push(1);
        v
    };
    let strings = |n: u64| [8u32.to_le_bytes().as_slice(), &n.to_le_bytes()].concat();
    let pad = [0u8; 256];
    let with = |i: Vec<u8>| raw(1, 0, &[i.as_slice(), &pad].concat());
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (b"PK\x03\x04".to_vec(), "does not start with `GGUF`"),
        ([b"GGUF".as_slice(), &3u32.to_be_bytes(), &[0; 16]].concat(), "big-endian"),
        ([b"GGUF".as_slice(), &9u32.to_le_bytes(), &[0; 16]].concat(), "version 9"),
        (raw(u64::MAX, 0, b""), "tensor count"),
        (raw(0, u64::MAX, b""), "metadata count"),
        (raw(0, 1, &key(b"k", 8, &u64::MAX.to_le_bytes())), "k: 18446744073709551615 entries"),
        (raw(0, 1, &key(b"k", 9, &strings(u64::MAX / 8))), "cannot fit"),
        (raw(0, 1, &key(b"k", 9, &nested)), "nested deeper"),
        (raw(0, 1, &key(b"k", 77, &pad)), "unknown metadata type 77"),
        (raw(0, 1, &key(b"\xff\xfe", 7, &[1])), "not UTF-8"),
        (raw(0, 1, &key(b"k", 7, &[2])), "bool of 2"),
        (raw(0, 2, &[key(b"k", 7, &[1]), key(b"k", 7, &[1])].concat()), "k: metadata key appears twice"),
        (raw(0, 1, &key(b"general.alignment", 4, &3u32.to_le_bytes())), "power of two"),
        (with(info("t", &[32], 99, 0)), "t: ggml type 99 is not supported"),
        (with(info("t", &[256], 15, 0)), "t: ggml type 15 (q8_k)"),
        (with(info("t", &[33], 2, 0)), "rows of 33 elements"),
        (with(info("t", &[0], 0, 0)), "a dimension of 0"),
        (with(info("t", &[1, 1, 1, 1, 1], 0, 0)), "5 dimensions"),
        (with(info("t", &[1], 0, 1)), "offset 1 is no multiple of 32"),
        (with(info("t", &[1 << 60, 1 << 60], 0, 0)), "ends beyond"),
        (with(info("t", &[1], 0, u64::MAX - 31)), "ends beyond"),
        (
            raw(2, 0, &[info("t", &[1], 0, 0), info("t", &[1], 0, 0), pad.to_vec()].concat()),
            "t: tensor name appears twice",
        ),
    ];
    for (bytes, want) in cases {
        let got = complaint(&bytes);
        assert!(got.contains(want), "{got:?} does not say {want:?}");
        assert!(!got.contains('\n'), "{got:?} is more than one line");
    }
}

mod corruption {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Files with flipped bytes, inflated lengths or a truncated end are rejected or parsed, and never cause a
        /// panic.
        #[test]
        fn never_panics(
            flips in prop::collection::vec((0usize..4096, any::<u8>()), 0..8),
            huge in prop::option::of((0usize..512, prop::sample::select(vec![u64::MAX, 1 << 63, 1 << 40, 1 << 31, 0]))),
            cut in prop::option::of(0usize..4096),
        ) {
            let (m, t) = sample();
            let mut b = bytes_of(&m, &t);
            let n = b.len();
            for (at, v) in flips {
                b[at % n] = v;
            }
            if let Some((at, v)) = huge {
                let at = at % (n - 8);
                b[at..at + 8].copy_from_slice(&v.to_le_bytes());
            }
            if let Some(c) = cut {
                b.truncate(c % n);
            }
            if let Ok(g) = parse(&b) {
                for (_, t) in &g.tensors {
                    prop_assert!(t.data.len() <= b.len());
                }
            }
        }
    }
}

/// Each type of element, at its limits, is what it is in the file.
#[test]
fn arrays_are_decoded_where_they_are_used() {
    let array = |kind: u32, n: u64, items: &[u8]| {
        let value = [&kind.to_le_bytes()[..], &n.to_le_bytes(), items].concat();
        let file = parse(&raw(0, 1, &key(b"k", 9, &value))).unwrap();
        file.metadata["k"].as_array().unwrap().clone()
    };
    let ints = |kind, n, items: &[u8]| array(kind, n, items).ints().map(|all| all.collect::<Vec<_>>());
    assert_eq!(ints(0, 2, &[0, 255]), Some(vec![0, 255]));
    assert_eq!(ints(1, 2, &[127, 255]), Some(vec![127, -1]));
    assert_eq!(ints(2, 1, &[0xff, 0xff]), Some(vec![65535]));
    assert_eq!(ints(3, 1, &[0, 0x80]), Some(vec![-32768]));
    assert_eq!(ints(5, 1, &(-7i32).to_le_bytes()), Some(vec![-7]));
    assert_eq!(ints(4, 1, &u32::MAX.to_le_bytes()), Some(vec![4294967295]));
    assert_eq!(ints(7, 2, &[0, 1]), Some(vec![0, 1]));
    assert_eq!(ints(10, 1, &u64::MAX.to_le_bytes()), Some(vec![i64::MAX]));
    assert_eq!(ints(11, 1, &i64::MIN.to_le_bytes()), Some(vec![i64::MIN]));
    assert_eq!(ints(6, 1, &[0; 4]), None);
    assert_eq!(array(12, 1, &0.1f64.to_le_bytes()).floats().unwrap().collect::<Vec<_>>(), [0.1]);
    let strings = array(8, 3, b"\x02\0\0\0\0\0\0\0\xe9a\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0b");
    assert_eq!(strings.strings().unwrap().collect::<Vec<_>>(), [&b"\xe9a"[..], b"", b"b"]);
    assert_eq!(format!("{:?}", array(0, 10, &[1; 10])), "[1, 1, 1, 1, 1, 1, 1, 1] and 2 more");
}
