//! Embedding: every table decodes to the reference's bits.

use super::*;
use tandem::device::kernels::quant::PackedLayout;

/// Random blocks: every bit of a quantised block but its f16 scales, which are finite; plain floats are ordinary.
fn random_table(rng: &mut Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..elements / dtype.block_len() {
        let at = out.len();
        match dtype {
            DType::F32 => out.extend(rng.normal().to_le_bytes()),
            DType::F16 => out.extend(encode(Half::F16, rng.normal()).to_le_bytes()),
            DType::BF16 => out.extend(encode(Half::BF16, rng.normal()).to_le_bytes()),
            _ => out.extend((0..dtype.block_bytes()).map(|_| rng.next_u64() as u8)),
        }
        set_scales(dtype, &mut out[at..], rng.normal(), rng.normal());
    }
    out
}

/// The types that tables may have.
fn tables() -> impl Iterator<Item = DType> {
    DType::ALL.into_iter().filter(|&d| !d.is_quantised() || PackedLayout::dtypes().any(|packed| packed == d))
}

#[derive(Debug, Clone)]
pub struct Case {
    pub dtype: DType,
    pub d: usize,
    pub vocab: usize,
    pub tokens: Option<Vec<u32>>,
    pub scale: f32,
    pub positions: Option<DType>,
    pub seed: u64,
}

pub fn check(rt: &Arc<dyn Runtime>, c: &Case) {
    let mut rng = Rng::new(c.seed);
    let table = random_table(&mut rng, c.dtype, c.vocab * c.d);
    let rows = c.tokens.as_ref().map_or(c.vocab, Vec::len);
    let (n_positions, offset) = (9, 2);
    let positions = c.positions.map(|t| (t, random_table(&mut rng, t, n_positions * c.d)));
    // Position 7 is row 9: beyond the table.
    let row_pos: Vec<u32> = (0..rows).map(|_| rng.below(n_positions - offset + 1) as u32).collect();

    let (table_dev, pos_dev) = (upload(rt, &table), upload(rt, &row_pos));
    let tokens_dev = c.tokens.as_ref().map(|t| upload(rt, t));
    let positions_dev = positions.as_ref().map(|(_, p)| upload(rt, p));
    let hidden = Output::new(rt, rows * c.d * 4);
    let args = Embed {
        tokens: at(&tokens_dev),
        table: table_dev.ptr(),
        dtype: c.dtype,
        vocab: c.vocab,
        scale: c.scale,
        positions: c.positions.map(|dtype| Positions {
            table: at(&positions_dev),
            dtype,
            n: n_positions,
            offset,
            row_pos: pos_dev.ptr(),
        }),
        hidden: hidden.ptr(),
        rows,
        d: c.d,
    };
    embed(&**rt, LANE, &args).expect("launch");

    let got = hidden.u32();
    let row_bytes = c.dtype.row_bytes(c.d).unwrap();
    for row in 0..rows {
        let token = c.tokens.as_ref().map_or(row, |t| t[row] as usize);
        let mut want = vec![0f32; c.d];
        if token < c.vocab {
            let from = &table[token * row_bytes..(token + 1) * row_bytes];
            reference::embed::embed_row(c.dtype, from, c.scale, &mut want);
            let p = row_pos[row] as usize + offset;
            if let Some((t, bytes)) = positions.as_ref().filter(|_| p < n_positions) {
                let bytes_of_row = t.row_bytes(c.d).unwrap();
                let mut add = vec![0f32; c.d];
                let from = &bytes[p * bytes_of_row..(p + 1) * bytes_of_row];
                reference::embed::embed_row(*t, from, 1.0, &mut add);
                reference::activation::add(&mut want, &add);
            }
        }
        for (i, (&g, w)) in got[row * c.d..][..c.d].iter().zip(&want).enumerate() {
            assert_eq!(g, w.to_bits(), "{c:?}, row {row}, element {i}: {} not {w}", f32::from_bits(g));
        }
    }
}

#[test]
fn every_table_decodes_to_the_bits_of_the_reference() {
    for rt in gpu::runtimes() {
        for dtype in tables() {
            for d in [256, 1024 + 256] {
                let tokens = Some(vec![3, 0, u32::MAX, 4, 5, 3]);
                let c = Case { dtype, d, vocab: 5, tokens, scale: 1.0, positions: None, seed: 1 };
                check(&rt, &c);
                check(&rt, &Case { scale: 33.941125, seed: 2, ..c });
            }
        }
    }
}

#[test]
fn rows_that_the_host_looked_up_are_taken_in_order() {
    for rt in gpu::runtimes() {
        for d in [1, 3, 64, 513] {
            let c =
                Case { dtype: DType::F32, d, vocab: 3, tokens: None, scale: 1.0, positions: None, seed: 3 };
            check(&rt, &c);
        }
    }
}

#[test]
fn learned_positions_are_added() {
    for rt in gpu::runtimes() {
        for t in [DType::F32, DType::F16, DType::BF16] {
            let tokens = Some((0..20).map(|i| i % 7).collect());
            let c =
                Case { dtype: DType::F16, d: 68, vocab: 6, tokens, scale: 1.0, positions: Some(t), seed: 4 };
            check(&rt, &c);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_embedding(
        dtype in prop::sample::select(tables().collect::<Vec<_>>()),
        blocks in 1..4usize,
        odd in 0..7usize,
        vocab in 1..6usize,
        tokens in prop::collection::vec(prop_oneof![9 => 0..7u32, 1 => Just(u32::MAX)], 0..6),
        with_positions in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let d = if dtype.is_quantised() { blocks * dtype.block_len() } else { blocks * 100 + odd };
        let positions = with_positions.then_some(DType::F16);
        for rt in gpu::runtimes() {
            let tokens = Some(tokens.clone());
            check(&rt, &Case { dtype, d, vocab, tokens, scale: 0.5, positions, seed });
        }
    }
}
