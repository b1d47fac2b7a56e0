//! The way of an output that the host computes: seen ready, then collected.

use super::*;

/// The whole way of APEX: rows leave with q, k, v; the host answers; the answer is seen ready and collected.
#[test]
fn a_round_trip_through_mapped_memory() {
    for rt in gpu::runtimes() {
        for kv_type in halves(&rt, |t| format!("rope_append_{t}")) {
            let (rows, n_heads, hd) = (6usize, 2usize, 32usize);
            let (qd, width) = (n_heads * hd, (n_heads + 2) * hd);
            let mut rng = Rng::new(3);
            let qkv: Vec<f32> = (0..rows * width).map(|_| rng.normal()).collect();
            // Rows 1, 3 and 4 are the host's.
            let (slots, host_rows) = ([-1i32, 2, -1, 0, 1, -1], [3u32, 4, 1]);
            let (qkv_dev, slots_dev) = (upload(&rt, &qkv), upload(&rt, &slots));
            let (n_dev, epoch, none) =
                (upload(&rt, &[3u32]), upload(&rt, &[100u32]), upload(&rt, &[-1i32; 6]));
            let (arrived, q) = (Output::of(&rt, &[0u32]), Output::new(&rt, rows * qd * 2));
            let kv = Output::new(&rt, 2 * 64 * hd * 2);
            let attn = Output::new(&rt, rows * qd * 2);
            let (answer_at, flag_at) = (64 + 3 * width * 2, 32);
            let memory = rt.pinned(answer_at + 3 * qd * 2).expect("pinned memory");
            let publish = PublishRows {
                slots: slots_dev.ptr(),
                n: n_dev.ptr(),
                to: memory.device().add(64),
                stride: width * 2,
                epoch: epoch.ptr(),
                epoch_add: 1,
                epoch_flag: memory.device(),
                arrived: arrived.ptr(),
            };
            let append = RopeAppend {
                qkv: qkv_dev.ptr(),
                bias: DevPtr::NULL,
                q_norm: DevPtr::NULL,
                k_norm: DevPtr::NULL,
                norms: QkNorm::PerHead,
                eps: 0.0,
                rope: [DevPtr::NULL; 2],
                rope_dim: 0,
                pairing: RopePairing::Half,
                row_pos: none.ptr(),
                row_slot: none.ptr(),
                finished: DevPtr::NULL,
                q: q.ptr(),
                kv: kv.ptr(),
                kv_type: kv_type.into(),
                publish: Some(publish),
                rows,
                ld: width,
                n_heads,
                n_kv_heads: 1,
                head_dim: hd,
            };
            let ready = Output::of(&rt, &[7u32]);
            let check = CheckReady {
                epoch_flag: memory.device().add(flag_at),
                epoch: epoch.ptr(),
                epoch_add: 1,
                ready: ready.ptr(),
            };
            let list = upload(&rt, &host_rows);
            let collect = MoveRows {
                from: memory.device().add(answer_at),
                from_stride: qd * 2,
                to: attn.ptr(),
                to_stride: qd * 2,
                from_list: DevPtr::NULL,
                to_list: list.ptr(),
                n_rows: n_dev.ptr(),
                gate: ready.ptr(),
                max_rows: 4,
            };
            check_ready(&*rt, LANE, &check).expect("launch");
            copy_rows(&*rt, LANE, &collect, qd * 2).expect("launch");
            assert_eq!(ready.u32(), [0], "nothing is ready yet");
            assert!(attn.u16().iter().all(|v| *v == 0xffff), "nothing is collected before it is ready");

            std::thread::scope(|scope| {
                let host = scope.spawn(|| {
                    wait_for(word(&*memory, 0), 101);
                    for place in 0..3 {
                        // SAFETY: published: the device writes these rows no more.
                        let row = unsafe { mapped(&*memory, 64 + place * width * 2, width * 2) };
                        let sent = &qkv[host_rows[place] as usize * width..][..width];
                        let halves: Vec<u16> = sent.iter().map(|&x| encode(kv_type, x)).collect();
                        assert_eq!(row, bytes(&halves), "place {place}");
                        // SAFETY: answers have a place of their own, which the device reads only after the flag.
                        unsafe {
                            let to = memory.host().add(answer_at + place * qd * 2).cast::<u16>();
                            (0..qd).for_each(|i| to.add(i).write(encode(kv_type, sent[i] * 2.0)));
                        }
                    }
                    word(&*memory, flag_at).store(101, Ordering::Release);
                });
                // In two sub-batches: the epoch follows the second, though both publish.
                let second = RopeAppend {
                    qkv: append.qkv.add(2 * width * 4),
                    row_pos: append.row_pos.add(2 * 4),
                    row_slot: append.row_slot.add(2 * 4),
                    q: append.q.add(2 * qd * 2),
                    publish: Some(PublishRows { slots: publish.slots.add(2 * 4), ..publish }),
                    rows: rows - 2,
                    ..append
                };
                rope_append(&*rt, LANE, &RopeAppend { rows: 2, ..append }).expect("launch");
                rt.synchronize_all().expect("done");
                assert_eq!(word(&*memory, 0).load(Ordering::Acquire), 0, "an epoch before its last rows");
                rope_append(&*rt, LANE, &second).expect("launch");
                host.join().expect("the host's part");
            });
            check_ready(&*rt, LANE, &check).expect("launch");
            copy_rows(&*rt, LANE, &collect, qd * 2).expect("launch");
            assert_eq!(ready.u32(), [1]);
            for (i, got) in attn.u16().into_iter().enumerate() {
                let row = i / qd;
                let want =
                    if slots[row] >= 0 { encode(kv_type, qkv[row * width + i % qd] * 2.0) } else { 0xffff };
                assert_eq!(got, want, "row {row}, element {}", i % qd);
            }
            assert!(kv.bytes().iter().all(|b| *b == CANARY), "no row was to be appended");
        }
    }
}

#[test]
fn readiness_is_a_distance_that_wraps_around() {
    for rt in gpu::runtimes() {
        let memory = rt.pinned(4).expect("pinned memory");
        for (flag, epoch, add, want) in [
            (0u32, 1u32, 0u32, 0u32),
            (1, 1, 0, 1),
            (9, 1, 0, 1),
            (9, 5, 5, 0),
            (3, u32::MAX, 4, 1),
            (u32::MAX, u32::MAX, 1, 0),
            (2, u32::MAX - 3, 1, 1),
        ] {
            word(&*memory, 0).store(flag, Ordering::Release);
            let epoch_dev = upload(&rt, &[epoch]);
            let ready = Output::new(&rt, 4);
            let args = CheckReady {
                epoch_flag: memory.device(),
                epoch: epoch_dev.ptr(),
                epoch_add: add,
                ready: ready.ptr(),
            };
            check_ready(&*rt, LANE, &args).expect("launch");
            assert_eq!(ready.u32(), [want], "at {flag}, waiting for {epoch} + {add}");
        }
    }
}
