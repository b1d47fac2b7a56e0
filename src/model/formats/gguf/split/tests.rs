use std::collections::BTreeMap;
use std::io;

use proptest::prelude::*;

use super::super::write;
use super::*;
use crate::tensor::{DType, Tensor};

/// Files in memory.
type Files = BTreeMap<String, Vec<u8>>;

fn open(files: &Files, name: &str) -> Result<Gguf> {
    Gguf::open_with(Path::new(name), &mut |path| match files.get(path.to_str().unwrap()) {
        Some(bytes) => Ok(Bytes::copy_of(bytes)),
        None => Err(Error::io(path, io::Error::from(ErrorKind::NotFound))),
    })
}

fn complaint(files: &Files, name: &str) -> String {
    let said = open(files, name).expect_err("accepted").to_string();
    assert!(!said.contains('\n'), "{said:?} is more than one line");
    said
}

fn name(number: usize) -> String {
    format!("dir/m-{number:05}-of-00003.gguf")
}

fn tensor(values: &[f32]) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor::new(DType::F32, vec![values.len()], Bytes::copy_of(&bytes)).unwrap()
}

fn write_part(metadata: &Metadata, tensors: &[(&str, Tensor)]) -> Vec<u8> {
    write::to_bytes(metadata, tensors.iter().map(|(n, t)| (*n, t)))
}

/// What the metadata of file `number` would be, and its tensors.
fn part(number: usize) -> (Metadata, Vec<(&'static str, Tensor)>) {
    let all = Metadata::from([
        ("general.architecture".into(), Value::String("llama".into())),
        ("a.key".into(), Value::Uint(7)),
    ]);
    let tensors =
        [vec![("a", tensor(&[1.0])), ("b", tensor(&[2.0, 3.0]))], vec![("c", tensor(&[4.0; 9]))], vec![]];
    (metadata_of_part(&all, number, 3, 3), tensors[number].clone())
}

/// A model of three files with two tensors, one, and none.
fn sample() -> Files {
    (0..3)
        .map(|i| {
            let (metadata, tensors) = part(i);
            (name(i + 1), write_part(&metadata, &tensors))
        })
        .collect()
}

/// The sample with another file `number` (from 0).
fn with(number: usize, change: impl FnOnce(&mut Metadata, &mut Vec<(&'static str, Tensor)>)) -> Files {
    let mut files = sample();
    let (mut metadata, mut tensors) = part(number);
    change(&mut metadata, &mut tensors);
    files.insert(name(number + 1), write_part(&metadata, &tensors));
    files
}

#[test]
fn all_files_of_a_model_are_one() {
    let files = sample();
    let whole = open(&files, &name(1)).unwrap();
    assert_eq!(whole.metadata.keys().collect::<Vec<_>>(), ["a.key", "general.architecture"]);
    let found: Vec<_> = whole.tensors.iter().map(|(n, t)| (n.as_str(), &t.data[..4])).collect();
    let number = |v: f32| v.to_le_bytes();
    assert_eq!(found, [("a", &number(1.0)[..]), ("b", &number(2.0)), ("c", &number(4.0))]);
    assert_eq!((whole.files.count, whole.files.bytes), (3, files.values().map(|b| b.len() as u64).sum()));
}

/// A file that says it is the only one is a model by any name; so is one whose parts were merged, which counts none.
#[test]
fn a_file_of_one_is_whole() {
    for count in [0, 1] {
        let mut files = with(0, |m, _| _ = m.insert(COUNT.into(), Value::Uint(count)));
        let bytes = files.remove(&name(1)).unwrap();
        let whole = open(&Files::from([("any".into(), bytes)]), "any").unwrap();
        assert_eq!((whole.tensors.len(), whole.files.count), (2, 1));
    }
}

#[test]
fn files_that_do_not_fit_together_get_one_sentence() {
    let set = |key: &'static str, v: u64| {
        move |m: &mut Metadata, _: &mut Vec<_>| _ = m.insert(key.into(), Value::Uint(v))
    };
    let unset = |key: &'static str| move |m: &mut Metadata, _: &mut Vec<_>| _ = m.remove(key);
    let without = |number: usize| {
        let mut files = sample();
        files.remove(&name(number));
        files
    };
    for (files, want) in [
        (without(1), "m-00001-of-00003.gguf: entity not found"),
        (without(2), "dir/m-00002-of-00003.gguf: missing, one of the 3 files"),
        (without(3), "dir/m-00003-of-00003.gguf: missing, one of the 3 files"),
        (
            with(0, set(COUNT, 2)),
            "m-00001-of-00003.gguf: name: the first of 2 files, which are found by names like NAME-00001-of-00002",
        ),
        (
            with(0, set(COUNT, 1 << 40)),
            "m-00001-of-00003.gguf: split.count: Uint(1099511627776), wanted 2 to 1024",
        ),
        (with(0, |m, _| _ = m.insert(COUNT.into(), Value::Int(-3))), "split.count: Int(-3) is no count"),
        (with(0, set(NUMBER, 3)), "split.no: Uint(3), wanted 0 to 2"),
        (with(0, set(NUMBER, 2)), "m-00001-of-00003.gguf: file 3 of a model of 3 files; give the first"),
        (with(0, unset(NUMBER)), "split.no: missing in one of 3 files"),
        (with(0, unset(TENSORS)), "split.tensors.count: missing"),
        (with(0, set(TENSORS, u64::MAX)), "wanted 1 to 262144"),
        (with(0, set(TENSORS, 0)), "wanted 1 to 262144"),
        (
            with(1, set(NUMBER, 2)),
            "m-00002-of-00003.gguf: split.no: 2, wanted 1; are the files of one model?",
        ),
        (with(1, set(COUNT, 4)), "m-00002-of-00003.gguf: split.count: 4, wanted 3"),
        (with(1, set(TENSORS, 4)), "m-00002-of-00003.gguf: split.tensors.count: 4, wanted 3"),
        (with(2, unset(COUNT)), "m-00003-of-00003.gguf: split.count: missing"),
        (
            with(1, |m, _| _ = m.insert("general.architecture".into(), Value::String("opt".into()))),
            "m-00002-of-00003.gguf: general.architecture: opt, but the first file's is llama",
        ),
        (with(1, |_, t| t[0].0 = "b"), "m-00002-of-00003.gguf: b: an earlier file of the model has a tensor"),
        (with(1, |_, t| t.clear()), "m-00001-of-00003.gguf: split.tensors.count: 3, but its 3 files have 2"),
        (
            with(2, |_, t| t.push(("d", tensor(&[0.0])))),
            "m-00003-of-00003.gguf: split.tensors.count: 3, but there are more",
        ),
    ] {
        let said = complaint(&files, &name(1));
        assert!(said.contains(want), "{said:?} does not say {want:?}");
    }
    let damaged = with(1, |_, _| ());
    let cut = damaged[&name(2)][..100].to_vec();
    let said = complaint(&damaged.into_iter().chain([(name(2), cut)]).collect(), &name(1));
    assert!(said.starts_with("m-00002-of-00003.gguf: "), "{said}");
}

#[test]
fn a_later_file_leads_to_the_first() {
    let said = complaint(&sample(), &name(2));
    let want = "m-00002-of-00003.gguf: file 2 of a model of 3 files; give the first, m-00001-of-00003.gguf";
    assert_eq!(said, want);
}

#[test]
fn a_first_file_of_another_name_says_how_it_should_be_called() {
    let mut files = sample();
    for other in ["model.gguf", "m-1-of-3.gguf", "m-00001-of-00004.gguf", "m-00002-of-00003.gguf"] {
        let bytes = files[&name(1)].clone();
        files.insert(other.into(), bytes);
        let said = complaint(&files, other);
        assert!(said.contains("found by names like NAME-00001-of-00003.gguf"), "{other}: {said}");
    }
}

#[test]
fn names_of_parts() {
    let parsed = |s: &'static str| PartName::parse(s).map(|n| (n.stem, n.number, n.count));
    assert_eq!(parsed("m-00002-of-00003.gguf"), Some(("m", 2, 3)));
    assert_eq!(parsed("sub/a-b-of-c-00012-of-00345.gguf"), Some(("sub/a-b-of-c", 12, 345)));
    assert_eq!(PartName::parse("m-00002-of-00003.gguf").unwrap().of(1), "m-00001-of-00003.gguf");
    for bad in [
        "m.gguf",
        "m-00001-of-00003",
        "m-0001-of-00003.gguf",
        "m-00001-of-003.gguf",
        "m-00004-of-00003.gguf",
        "m-00000-of-00003.gguf",
        "m-+0001-of-00003.gguf",
        "of-00003.gguf",
        "-of-.gguf",
        "m-00001-of-0000é.gguf",
    ] {
        assert_eq!(parsed(bad), None, "{bad}");
    }
}

proptest! {
    /// Bytes that change in any of the files are refused, or give views inside the files, and never cause a panic.
    #[test]
    fn never_panics(changes in prop::collection::vec((0usize..3, 0usize..512, any::<u8>()), 1..6)) {
        let mut files = sample();
        for (number, at, v) in changes {
            let file = files.get_mut(&name(number + 1)).unwrap();
            let n = file.len();
            file[at % n] = v;
        }
        if let Ok(whole) = open(&files, &name(1)) {
            let held: usize = whole.tensors.iter().map(|(_, t)| t.data.len()).sum();
            prop_assert!(held as u64 <= 3 * whole.files.bytes);
        }
    }
}
