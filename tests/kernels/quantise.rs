//! Activations as int8: every tier gives the bits of the reference, and the reference what its definition promises.

use proptest::prelude::*;
use tandem::reference::quantise::{Int8Row, quantise_row};
use tandem::simd::{Isa, Kernels};

/// The buffers of a row, filled with what must not survive.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    q: Vec<i8>,
    floats: [Vec<f32>; 3],
    sums: [Vec<i32>; 2],
}

impl Row {
    fn of(k: usize) -> Row {
        let n = k.next_multiple_of(64);
        Row {
            q: vec![99; n],
            floats: [32, 32, 16].map(|per| vec![7e7; n / per]),
            sums: [32, 16].map(|per| vec![77; n / per]),
        }
    }

    fn slices(&mut self) -> Int8Row<'_> {
        let [d, sum32, sum16] = &mut self.floats;
        let [minus32, minus16] = &mut self.sums;
        Int8Row { q: &mut self.q, d, sum32, sum16, minus32, minus16 }
    }

    fn value(&self, i: usize) -> f64 {
        self.floats[0][i / 32] as f64 * self.q[i] as f64
    }
}

fn check(x: &[f32]) {
    let mut want = [Row::of(x.len()), Row::of(x.len())];
    let [plane, fine] = &mut want;
    quantise_row(x, plane.slices(), Some(fine.slices()));
    for (i, &v) in x.iter().enumerate() {
        // Half a step and the roundings of f32; and half a step of the second plane, whose range is half a step of the first.
        let step = want[0].floats[0][i / 32] as f64;
        let tiny = 1e-36;
        let (one, both) = (want[0].value(i), want[0].value(i) + want[1].value(i));
        assert!((one - v as f64).abs() <= step * 0.5001 + tiny, "element {i} of {x:?} became {one}");
        assert!(
            (both - v as f64).abs() <= step * 1.01 / 2.0 / 254.0 + tiny,
            "element {i}: {v} became {both}"
        );
    }
    for row in &want {
        for b in 0..row.floats[0].len() {
            let halves: [i32; 2] =
                std::array::from_fn(|h| row.q[b * 32 + h * 16..][..16].iter().map(|&q| q as i32).sum());
            let d = row.floats[0][b];
            assert_eq!(row.floats[1][b], d * (halves[0] + halves[1]) as f32, "sum of block {b}");
            assert_eq!(row.floats[2][2 * b..][..2], halves.map(|s| d * s as f32), "half sums of block {b}");
            assert_eq!(row.sums[0][b], -(halves[0] + halves[1]), "negated sum of block {b}");
            assert_eq!(row.sums[1][2 * b..][..2], halves.map(|s| -s), "negated half sums of block {b}");
        }
        assert!(row.q[x.len()..].iter().all(|&q| q == 0), "padding of {x:?}");
    }
    for isa in Isa::supported() {
        let k = Kernels::for_isa(isa);
        let mut got = [Row::of(x.len()), Row::of(x.len())];
        let [plane, fine] = &mut got;
        k.quantise_row(x, plane.slices(), Some(fine.slices()));
        assert_eq!(got, want, "{isa}: {x:?}");
        let mut alone = Row::of(x.len());
        k.quantise_row(x, alone.slices(), None);
        assert_eq!(alone, want[0], "{isa}, one plane: {x:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_tier_gives_the_bits_of_the_reference(
        n in 0usize..300,
        seed in any::<u64>(),
        exponent in -140i32..120,
        sparse in any::<bool>(),
    ) {
        let mut s = seed | 1;
        let x: Vec<f32> = (0..n).map(|i| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            let v = ((s >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * (exponent as f32).exp2();
            if sparse && (i / 32) % 3 != 0 { 0.0 } else { v }
        }).collect();
        check(&x);
    }
}

#[test]
fn ties_extremes_and_every_length_around_the_blocks() {
    for isa in Isa::ALL {
        if let Some(why) = isa.missing() {
            println!("skipped: {isa}: {why}");
        }
    }
    for n in [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 127, 128, 129, 576] {
        // Multiples of half a step: rounding of ties shows.
        check(&(0..n).map(|i| (i as f32 - 127.0) * 0.5).collect::<Vec<_>>());
        check(&(0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.037).collect::<Vec<_>>());
        check(&vec![-0.0; n]);
        check(&vec![f32::MAX; n]);
        check(&vec![-f32::MIN_POSITIVE; n]);
        check(&vec![f32::from_bits(1); n]);
    }
}

#[test]
#[should_panic(expected = "quantise_row: x has 65 elements, row has 2 blocks")]
fn rows_that_are_too_short_are_refused() {
    Kernels::for_isa(Isa::best()).quantise_row(&[0.0; 65], Row::of(64).slices(), None);
}
