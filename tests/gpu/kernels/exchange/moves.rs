//! Copies of rows by lists.

use super::*;

#[derive(Debug, Clone)]
struct Case {
    n: usize,
    pads: [usize; 2],
    stored: usize,
    from: Option<Vec<u32>>,
    to: Option<Vec<u32>>,
    max_rows: usize,
    counted: Option<u32>,
    gate: Option<u32>,
    seed: u64,
}

fn check(rt: &Arc<dyn Runtime>, c: &Case) {
    let mut rng = Rng::new(c.seed);
    let (from_stride, to_stride) = (c.n + c.pads[0], c.n + c.pads[1]);
    let source = noise(&mut rng, c.stored * from_stride);
    let source_dev = upload(rt, &source);
    let (from_dev, to_dev) = (c.from.as_ref().map(|l| upload(rt, l)), c.to.as_ref().map(|l| upload(rt, l)));
    let (count_dev, gate_dev) = (c.counted.map(|n| upload(rt, &[n])), c.gate.map(|g| upload(rt, &[g])));
    let out = Output::new(rt, c.stored * to_stride);
    let args = MoveRows {
        from: source_dev.ptr(),
        from_stride,
        to: out.ptr(),
        to_stride,
        from_list: at(&from_dev),
        to_list: at(&to_dev),
        n_rows: at(&count_dev),
        gate: at(&gate_dev),
        max_rows: c.max_rows,
    };
    copy_rows(&**rt, LANE, &args, c.n).expect("launch");
    let mut want = vec![CANARY; c.stored * to_stride];
    let rows = if c.gate == Some(0) { 0 } else { c.max_rows.min(c.counted.unwrap_or(u32::MAX) as usize) };
    for i in 0..rows {
        let from = c.from.as_ref().map_or(i as u32, |l| l[i]);
        let to = c.to.as_ref().map_or(i as u32, |l| l[i]);
        if from == u32::MAX || to == u32::MAX {
            continue;
        }
        let row = &source[from as usize * from_stride..][..c.n];
        want[to as usize * to_stride..][..c.n].copy_from_slice(row);
    }
    assert!(out.bytes() == want, "{c:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_move(
        units in 1..70usize,
        pads in prop::array::uniform2(0..3usize),
        wide in any::<bool>(),
        stored in 1..12usize,
        rows in 0..12usize,
        listed in any::<[bool; 2]>(),
        holes in any::<bool>(),
        counted in prop::option::of(0..14u32),
        gate in prop::option::of(0..3u32),
        seed in any::<u64>(),
    ) {
        let mut rng = Rng::new(seed);
        let max_rows = rows.min(stored);
        let unit = if wide { 16 } else { 2 };
        let pads = pads.map(|p| p * unit);
        let mut lists = [shuffled(&mut rng, stored), shuffled(&mut rng, stored)];
        if holes {
            lists[0][0] = u32::MAX;
            lists[1][stored / 2] = u32::MAX;
        }
        let [from, to] = [0, 1].map(|i| listed[i].then(|| lists[i].clone()));
        for rt in gpu::runtimes() {
            let (from, to) = (Option::clone(&from), Option::clone(&to));
            check(&rt, &Case { n: units * unit, pads, stored, from, to, max_rows, counted, gate, seed });
        }
    }
}
