//! What sm_90a keeps in flight (`cuda/conformance_pipeline_sm90a.cu`): groups of wgmma that overlap, sums that are read
//! and stages that are overwritten meanwhile, rings that go round.

use super::matrices::{Matrices, a_16};
use super::sm90a::{accumulators, check_product, swizzled};
use super::*;

/// A step's operands as they lie in shared memory: a [64][64], b [n][64], swizzled.
fn stage(half: Half, n: usize, m: &Matrices) -> Vec<u32> {
    let mut words = vec![0; (8192 + 128 * n) / 4];
    for k in 0..64 {
        for row in 0..64 {
            set_half(&mut words, swizzled(row, 2 * k) / 2, half.bits(m.a[row][k]));
        }
        for col in 0..n {
            set_half(&mut words[2048..], swizzled(col, 2 * k) / 2, half.bits(m.b[k][col]));
        }
    }
    words
}

/// Integers so small that sums over all steps stay exact.
fn matrices(n: usize, k: usize, seed: u64) -> Matrices {
    let mut words = Words::new(seed);
    Matrices::new(64, n, k, || f64::from(words.small()))
}

#[test]
fn a_stage_is_overwritten_as_soon_as_wait_one_allows() {
    for rt in runtimes() {
        for (half, n) in [(Half::F16, 256), (Half::Bf16, 128)] {
            for steps in [1, 2, 3, 7] {
                let m = matrices(n, 64 * steps, (n + steps) as u64);
                let mut input = Vec::new();
                for step in 0..steps {
                    let k = 64 * step..64 * (step + 1);
                    let a = m.a.iter().map(|row| row[k.clone()].to_vec()).collect();
                    input.extend(stage(half, n, &Matrices { a, b: m.b[k].to_vec(), c: vec![] }));
                }
                input.extend(accumulators(n, &m));
                let name = format!("conformance_wait_one_{}_n{n}_sm90a", half.name());
                let shared = 2 * (8192 + 128 * n as u32);
                let shape = Shape { block: 128, shared, n: steps as u32, ..WARP };
                let Some(out) = run(&rt, &name, shape, &input, 64 * n) else { continue };
                check_product(&format!("{name}, {steps} steps"), &out, n, &m);
            }
        }
    }
}

#[test]
fn sums_of_a_finished_group_are_read_while_the_next_one_runs() {
    const KERNEL: &str = "conformance_two_groups_bf16_n64_sm90a";
    let n = 64;
    let groups = [matrices(n, 64, 31), matrices(n, 64, 32)];
    let mut input: Vec<u32> = groups.iter().flat_map(|m| stage(Half::Bf16, n, m)).collect();
    input.extend(groups.iter().flat_map(|m| accumulators(n, m)));
    for rt in runtimes() {
        let shape = Shape { block: 128, shared: 2 * (8192 + 128 * n as u32), ..WARP };
        let Some(out) = run(&rt, KERNEL, shape, &input, 2 * 64 * n) else { continue };
        for (i, (out, m)) in out.chunks_exact(64 * n).zip(&groups).enumerate() {
            check_product(&format!("{KERNEL}, group {i}"), out, n, m);
        }
    }
}

#[test]
fn four_steps_of_a_in_registers_beside_128_sums() {
    let n = 256;
    for rt in runtimes() {
        for half in [Half::F16, Half::Bf16] {
            let m = matrices(n, 64, 41);
            let mut input = vec![0; 128 * 16 + 4 * 8 * n];
            for t in 0..128 {
                for i in 0..32 {
                    let (row, k) = a_16(t % 32, i % 8);
                    set_half(&mut input[t * 16..], i, half.bits(m.a[t / 32 * 16 + row][i / 8 * 16 + k]));
                }
            }
            for k in 0..64 {
                for col in 0..n {
                    let at = k / 16 * 32 * n + col / 64 * 2048 + swizzled(k % 16, col % 64 * 2);
                    set_half(&mut input[128 * 16..], at / 2, half.bits(m.b[k][col]));
                }
            }
            input.extend(accumulators(n, &m));
            let name = format!("conformance_steps_ra_{}_n{n}_sm90a", half.name());
            let shape = Shape { block: 128, shared: 128 * n as u32, ..WARP };
            let Some(out) = run(&rt, &name, shape, &input, 64 * n) else { continue };
            check_product(&name, &out, n, &m);
        }
    }
}

#[test]
fn a_ring_of_bulk_copies_goes_round() {
    const KERNEL: &str = "conformance_ring_sm90a";
    // Four stages: part of a round, whole ones, and two and more with a rest.
    for steps in [1usize, 4, 9, 17] {
        let mut words = Words::new(steps as u64);
        let matrix: Vec<u32> = (0..steps * 256).map(|_| words.next()).collect();
        for rt in runtimes() {
            if !rt.has_kernel(KERNEL) {
                println!("skipped: {} has no {KERNEL}", rt.info().name);
                continue;
            }
            let from = Buffer::from_bytes(&rt, Lane::Compute, &bytes_of(&matrix)).unwrap();
            let out = Buffer::new(&rt, steps * 1024).unwrap();
            let rows = 8 * steps as u64;
            let params = ConformanceTmaParams {
                map: TensorMap { bytes: rt.tensor_map_2d(from.ptr(), rows, 64, 64, 8, 64).unwrap() },
                out: out.ptr(),
                y: rows as i32,
                box_rows: 8,
                box_cols: 64,
                ..Default::default()
            };
            launch(&rt, KERNEL, &Shape { block: 96, shared: 4096 + 64, ..WARP }, params.bytes());
            let mut got = vec![0; steps * 1024];
            rt.download(Lane::Compute, out.ptr(), &mut got).unwrap();
            for (i, got) in words_of(&got).into_iter().enumerate() {
                // Word i of the dump holds what the swizzle put there: rows of 32 words, chunks of four.
                let (row, word) = (i / 32, i % 32);
                let column = ((word / 4) ^ (row % 8)) * 4 + word % 4;
                assert_eq!(
                    got,
                    matrix[row * 32 + column],
                    "{steps} steps: step {}, word {}",
                    i / 256,
                    i % 256
                );
            }
        }
    }
}
