//! Places sorted by expert, rows that go there, and what comes back.

use super::*;
use crate::support::gpu::{self, Rng};
use proptest::prelude::*;
use tandem::tensor::Half;

/// Sorts on the device, and compares with a sort.
pub fn check(
    rt: &Arc<dyn Runtime>,
    ids: &[u32],
    slots: Option<&[u32]>,
    used: usize,
    experts: usize,
    tokens: usize,
) {
    let what =
        format!("{} choices, {used} a row, of {experts} by {tokens}, slots {}", ids.len(), slots.is_some());
    let capacity = group_capacity(ids.len(), experts, tokens);
    let (ids_dev, slots_dev) = (upload(rt, ids), slots.map(|slots| upload(rt, slots)));
    let (places, rows_of) = (Output::new(rt, ids.len() * 4), Output::new(rt, ids.len() * 4));
    let groups = Output::new(rt, capacity * GROUP_BYTES);
    let args = SortArgs {
        ids: ids_dev.ptr(),
        slots: at(&slots_dev),
        places: places.ptr(),
        rows_of: rows_of.ptr(),
        groups: groups.ptr(),
        rows: ids.len() / used,
        used,
        experts,
        tokens,
    };
    super::sort(&**rt, LANE, &args).unwrap_or_else(|e| panic!("{what}: {e}"));
    let want = sorted(ids, slots, used, experts, tokens);
    assert!(places.u32() == want.places, "{what}: places {:?} instead of {:?}", places.u32(), want.places);
    assert!(rows_of.u32() == want.rows, "{what}: rows {:?} instead of {:?}", rows_of.u32(), want.rows);
    assert!(groups.u32() == list(&want.groups, capacity), "{what}: groups {:?}", groups.u32());
}

/// Choices of rows: distinct experts if there are enough, some experts more likely than others.
pub fn chosen(rng: &mut Rng, rows: usize, used: usize, experts: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..rows {
        let mut row: Vec<u32> = Vec::new();
        while row.len() < used {
            let e = rng.below(experts).min(rng.below(experts)) as u32;
            if !row.contains(&e) || experts < used {
                row.push(e);
            }
        }
        ids.extend(row);
    }
    ids
}

/// Some experts elsewhere, the others' matrices in another order.
pub fn some_slots(rng: &mut Rng, experts: usize) -> Vec<u32> {
    let mut next = experts as u32;
    let mut slot = |here: bool| {
        next -= u32::from(here);
        if here { next } else { NONE }
    };
    (0..experts).map(|_| slot(rng.below(3) > 0)).collect()
}

#[test]
fn places_are_those_of_a_sort() {
    for rt in gpu::runtimes() {
        let mut rng = Rng::new(5);
        for (rows, used, experts) in [
            (1, 1, 1),
            (1, 8, 128),
            (3, 2, 3),
            (4, 8, 60),
            (64, 8, 128),
            (65, 8, 128),
            (31, 1, 1024),
            (200, 4, 1024),
            (700, 2, 8),
            (500, 8, 256),
        ] {
            let ids = chosen(&mut rng, rows, used, experts);
            let slots = some_slots(&mut rng, experts);
            for tokens in [4, 16, 64] {
                check(&rt, &ids, None, used, experts, tokens);
                check(&rt, &ids, Some(&slots), used, experts, tokens);
            }
        }
    }
}

#[test]
fn one_expert_takes_all() {
    for rt in gpu::runtimes() {
        for (choices, experts) in [(513, 1), (300, 5), (1500, 128), (2048, 1024)] {
            for expert in [0, experts as u32 - 1] {
                check(&rt, &vec![expert; choices], None, 1, experts, 8);
            }
            // And nobody has a place.
            check(&rt, &vec![0; choices], Some(&vec![NONE; experts]), 1, experts, 8);
        }
    }
}

#[test]
fn as_many_choices_as_there_may_be() {
    for rt in gpu::runtimes() {
        let mut rng = Rng::new(6);
        for experts in [128, MOST_EXPERTS] {
            let ids: Vec<u32> = (0..MOST_CHOICES).map(|_| rng.below(experts) as u32).collect();
            check(&rt, &ids, None, 8, experts, 64);
        }
        check(&rt, &vec![3; MOST_CHOICES], None, 8, 4, 64);
    }
}

/// Sorts, copies rows to their places, and adds up what came of them: each element has 2 (used + 4) roundings at most, and
/// the sigmoid a few.
pub fn check_rows(
    rt: &Arc<dyn Runtime>,
    rows: usize,
    used: usize,
    experts: usize,
    d: usize,
    shared: bool,
    seed: u64,
) {
    let mut rng = Rng::new(seed);
    let what = format!("{rows} rows of {d}, {used} of {experts}, shared {shared}, seed {seed}");
    let ids = chosen(&mut rng, rows, used, experts);
    let slots = some_slots(&mut rng, experts);
    let s = sorted(&ids, Some(&slots), used, experts, 8);
    let places = rows * used;

    let ldx = d + 8;
    let x: Vec<u16> = (0..rows * ldx).map(|_| rng.next_u64() as u16).collect();
    let (x_dev, rows_of) = (upload(rt, &x), upload(rt, &s.rows));
    let xs = Output::new(rt, places * d * 2);
    let args = GatherArgs { rows_of: rows_of.ptr(), x: x_dev.ptr(), ldx, xs: xs.ptr(), places, d };
    gather(&**rt, LANE, &args).expect("launch");
    for (place, got) in xs.u16().chunks_exact(d).enumerate() {
        match s.rows[place] {
            NONE => assert!(got.iter().all(|&x| x == 0xffff), "{what}: place {place} of nobody"),
            row => assert_eq!(got, &x[row as usize * ldx..][..d], "{what}: place {place}"),
        }
    }

    let (out, weights) = (normals(&mut rng, places * d), normals(&mut rng, places));
    let (of_shared, gate) = (normals(&mut rng, rows * d), normals(&mut rng, rows));
    let (out_dev, weights_dev, gate_dev) = (upload(rt, &out), upload(rt, &weights), upload(rt, &gate));
    let places_dev = upload(rt, &s.places);
    let delta = if shared { Output::of(rt, &of_shared) } else { Output::new(rt, rows * d * 4) };
    let args = CombineArgs {
        out: out_dev.ptr(),
        places: places_dev.ptr(),
        weights: weights_dev.ptr(),
        shared: if shared { delta.ptr() } else { DevPtr::NULL },
        gate: gate_dev.ptr(),
        delta: delta.ptr(),
        rows,
        used,
        d,
    };
    combine(&**rt, LANE, &args).expect("launch");
    for (i, got) in delta.f32().into_iter().enumerate() {
        let (row, column) = (i / d, i % d);
        let gate = 1.0 / (1.0 + (-f64::from(gate[row])).exp());
        let mut sum = if shared { gate * f64::from(of_shared[i]) } else { 0.0 };
        let mut size = 4.0 * sum.abs();
        for j in row * used..(row + 1) * used {
            if s.places[j] != NONE {
                let part = f64::from(weights[j]) * f64::from(out[s.places[j] as usize * d + column]);
                sum += part;
                size += part.abs();
            }
        }
        let tolerance = 2.0 * (used + 4) as f64 * U * size;
        assert!(
            (f64::from(got) - sum).abs() <= tolerance,
            "{what}: row {row} column {column} is {got}, wanted {sum}"
        );
    }
}

#[test]
fn rows_go_to_their_places_and_come_back() {
    for rt in gpu::runtimes() {
        for (rows, used, experts, d) in [(1, 8, 128, 16), (5, 2, 3, 1032), (17, 4, 60, 264), (2, 1, 1, 2056)]
        {
            for shared in [false, true] {
                check_rows(&rt, rows, used, experts, d, shared, 9);
            }
        }
    }
}

/// Every order of threads: the same places, and the checker finds no race and no read of what nobody wrote.
#[test]
fn in_every_schedule() {
    gpu::for_schedules(|rt, _| {
        let mut rng = Rng::new(8);
        for (rows, used, experts) in [(3, 8, 40), (140, 4, 17)] {
            let ids = chosen(&mut rng, rows, used, experts);
            let slots = some_slots(&mut rng, experts);
            check(rt, &ids, Some(&slots), used, experts, 8);
        }
        check_rows(rt, 3, 2, 5, 24, true, 1);
        let logits = normals(&mut rng, 3 * 140);
        route::check_choice(rt, &logits, 140, 5, tandem::model::RouterWeights::OfAll);
        for rows in [3, 18] {
            let act = Half::F16;
            route::check(
                rt,
                &route::Case { act, rows, experts: 5, d: 140, pad: 0, shared: true, bias: true, seed: 2 },
            );
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn any_choices(
        rows in prop_oneof![1usize..=20, 60usize..=400],
        used in 1usize..=8,
        experts in prop_oneof![1usize..=10, 50usize..=300],
        here: bool,
        tokens in prop::sample::select(vec![4usize, 8, 16, 32, 64]),
        seed: u64,
    ) {
        for rt in gpu::runtimes() {
            let mut rng = Rng::new(seed);
            let ids = chosen(&mut rng, rows, used, experts);
            let slots = (!here).then(|| some_slots(&mut rng, experts));
            check(&rt, &ids, slots.as_deref(), used, experts, tokens);
        }
    }

    #[test]
    fn any_rows(rows in 1usize..9, used in 1usize..5, d in 1usize..40, shared: bool, seed: u64) {
        for rt in gpu::runtimes() {
            check_rows(&rt, rows, used, 6, 8 * d, shared, seed);
        }
    }
}
