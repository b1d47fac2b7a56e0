//! Warps and blocks: shuffles, votes, reductions, copies, fences.

use super::*;

/// The ISA's pseudo-code of shfl, with the clamp and mask that CUDA's intrinsics pass.
fn shuffle_source(mode: &str, lane: u32, operand: u32, width: u32) -> u32 {
    let mask = (32 - width) & 31;
    let clamp = if mode == "up" { 0 } else { 31 };
    let b = operand & 31;
    let max_lane = (lane & mask) | (clamp & !mask & 31);
    let (j, valid) = match mode {
        "up" => (lane.wrapping_sub(b), lane as i32 - b as i32 >= max_lane as i32),
        "down" => (lane + b, lane + b <= max_lane),
        "bfly" => (lane ^ b, lane ^ b <= max_lane),
        _ => {
            let j = (lane & mask) | (b & !mask & 31);
            (j, j <= max_lane)
        }
    };
    if valid { j } else { lane }
}

#[test]
fn shuffles_and_votes() {
    for rt in runtimes() {
        for operand in [0, 1, 3, 7, 8, 15, 16, 31] {
            let mut words = Words::new(u64::from(operand));
            // The index of each lane may differ; of the others it is one for all.
            let input: Vec<u32> = (0..32).flat_map(|_| [words.next(), operand]).collect();
            let value = |lane: u32| input[2 * lane as usize];
            let Some(out) = run(&rt, "conformance_shuffle", WARP, &input, 32 * 11) else { continue };
            let votes = (0..32).fold(0, |v, l| v | (value(l) & 1) << l);
            let (mut sum, mut most) = (0.0, 0f32);
            for lane in 0..32 {
                sum += (value(lane) % 64) as f32;
                most = most.max((value(lane) % 64) as f32);
            }
            for lane in 0..32 {
                let out = &out[lane as usize * 11..][..11];
                for (i, mode) in ["idx", "up", "down", "bfly"].into_iter().enumerate() {
                    for (at, width) in [(i, 32), (4 + i, 8)] {
                        let want = value(shuffle_source(mode, lane, operand, width));
                        assert_eq!(out[at], want, "{mode} by {operand}, width {width}, lane {lane}");
                    }
                }
                assert_eq!(out[8], votes, "ballot");
                assert_eq!(
                    (f32::from_bits(out[9]), f32::from_bits(out[10])),
                    (sum, most),
                    "warp_sum, warp_max"
                );
            }
        }
    }
}

#[test]
fn block_reductions_and_named_barriers() {
    let mut words = Words::new(17);
    let values: Vec<f32> = (0..256).map(|_| words.small() as f32).collect();
    let input: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
    for rt in runtimes() {
        let shape = Shape { block: 256, shared: 2048, ..WARP };
        let Some(out) = run(&rt, "conformance_barriers", shape, &input, 768) else { continue };
        for (t, out) in out.chunks_exact(3).enumerate() {
            let from = (t + 64) % 256;
            let handed = if from < 128 { values[from] + values[from + 128] } else { values[from] };
            let want = [values.iter().sum(), values.iter().copied().fold(f32::MIN, f32::max), handed];
            assert_eq!(out.iter().map(|w| f32::from_bits(*w)).collect::<Vec<_>>(), want, "thread {t}");
        }
    }
}

#[test]
fn copies_fill_zeros_where_the_predicate_is_false() {
    let input: Vec<u32> = (1..=128).collect();
    for rt in runtimes() {
        let shape = Shape { shared: 512, ..WARP };
        let Some(out) = run(&rt, "conformance_copies", shape, &input, 384) else { continue };
        for lane in 0..32 {
            let from = if lane < 16 { 15 - lane } else { 47 - lane };
            let want = if from % 2 == 0 { input[from * 4..][..4].to_vec() } else { vec![0; 4] };
            assert_eq!(out[lane * 4..][..4], want, "lane {lane}");
        }
        assert_eq!(out[128..256], input, "ld_stream_16");
        assert_eq!(out[256..], input, "ld_16");
    }
}

#[test]
fn the_last_block_sees_what_all_others_released() {
    const BLOCKS: u32 = 37;
    for rt in runtimes() {
        let shape = Shape { grid: BLOCKS, shared: 16, words: 1 + BLOCKS as usize, n: BLOCKS, ..WARP };
        let words = BLOCKS as usize * 33 + 32;
        let Some(out) = run(&rt, "conformance_last_block", shape, &[0], words) else { continue };
        let (sums, seen) = out[BLOCKS as usize * 32..].split_at(32);
        for (lane, sum) in sums.iter().enumerate() {
            assert_eq!(*sum, BLOCKS * (BLOCKS + 1) / 2 * (lane as u32 + 1), "lane {lane}");
        }
        assert!(seen.iter().enumerate().all(|(b, v)| *v == b as u32 + 7), "flags: {seen:?}");
    }
}
