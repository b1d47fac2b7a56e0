//! Publish and collect, over and over: one race in a hundred thousand hand-overs is one wrong token in an hour.

use super::*;

/// Rounds on a device, where one takes some 30 µs, and in host emulation, where it takes milliseconds.
const ROUNDS: (u32, u32) = (100_000, 40);
const ROWS: usize = 4;
const WIDTH: usize = 512;

/// What the host answers in round `r`: integers that both 16-bit types hold, another sum every round.
fn answer(r: u32, i: usize) -> f32 {
    let mixed =
        (r.wrapping_mul(0x9e37_79b1) ^ (i as u32).wrapping_mul(0x85eb_ca77)).wrapping_mul(0xc2b2_ae3d);
    (mixed >> 16) as f32 % 127.0 - 63.0
}

/// Position-dependent: rows or words that change places change it.
fn checksum(words: impl Iterator<Item = u16>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3))
}

/// The device publishes what it collected in the round before; the host compares it with what it had answered, answers
/// anew, and says so. Nothing else orders the two but the epochs.
#[test]
fn every_round_of_publish_and_collect_carries_its_own_rows() {
    for rt in gpu::runtimes() {
        let rounds = gpu::count(&rt, ROUNDS);
        for half in publish::types(&rt) {
            // There in 16 bits, back in 32: what comes back is published in the next round.
            let (row, back, answers) = (WIDTH * 2, WIDTH * 4, ROWS * WIDTH);
            let (to, from) = (64, 64 + ROWS * row);
            let memory = rt.pinned(from + ROWS * back).expect("pinned memory");
            let rows = Output::of(&rt, &vec![0f32; answers]);
            let (zero, arrived) = (Output::of(&rt, &[0u32]), Output::of(&rt, &[0u32]));
            let ready = Output::of(&rt, &[0u32]);
            let (published, answered) = (word(&*memory, 0), word(&*memory, 32));
            let publish = PublishArgs {
                sources: [
                    PublishSource { at: rows.ptr(), stride: back, bytes: back },
                    PublishSource::default(),
                    PublishSource::default(),
                ],
                half,
                to: memory.device().add(to),
                stride: row,
                list: DevPtr::NULL,
                n_rows: DevPtr::NULL,
                max_rows: ROWS,
                epoch: zero.ptr(),
                epoch_add: 0,
                epoch_flag: memory.device(),
                arrived: arrived.ptr(),
            };
            let check = CheckReady {
                epoch_flag: memory.device().add(32),
                epoch: zero.ptr(),
                epoch_add: 0,
                ready: ready.ptr(),
            };
            let collect = MoveRows {
                from: memory.device().add(from),
                from_stride: back,
                to: rows.ptr(),
                to_stride: back,
                from_list: DevPtr::NULL,
                to_list: DevPtr::NULL,
                n_rows: DevPtr::NULL,
                gate: ready.ptr(),
                max_rows: ROWS,
            };
            let mut want = checksum(std::iter::repeat_n(0, answers));
            for r in 1..=rounds {
                publish_rows(&*rt, LANE, &PublishArgs { epoch_add: r, ..publish }).expect("launch");
                wait_for(published, r);
                // SAFETY: published: the device writes these rows no more until the next round is launched.
                let got = unsafe { mapped(&*memory, to, ROWS * row) };
                let got = checksum(got.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])));
                assert_eq!(got, want, "{}: round {r} of {rounds}", rt.info().name);
                for i in 0..answers {
                    // SAFETY: inside; the device reads answers only in `collect`, and that of the round before ended
                    // before this round was published.
                    unsafe { memory.host().add(from).cast::<f32>().add(i).write(answer(r, i)) };
                }
                want = checksum((0..answers).map(|i| encode(half, answer(r, i))));
                answered.store(r, Ordering::Release);
                check_ready(&*rt, LANE, &CheckReady { epoch_add: r, ..check }).expect("launch");
                copy_rows(&*rt, LANE, &collect, back).expect("launch");
            }
            let last = checksum(rows.f32().into_iter().map(|x| encode(half, x)));
            assert_eq!(last, want, "{}: the last round", rt.info().name);
            println!("{} {}: {rounds} rounds", rt.info().name, half.name());
        }
    }
}
