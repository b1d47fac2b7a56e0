//! Rows that a device publishes for the host to see, and the epoch that says when they are there.

use super::*;

#[derive(Debug, Clone)]
pub struct Case {
    /// Bytes of a row of each source, multiples of eight floats; 0: no such source.
    pub widths: [usize; 3],
    /// Bytes between.
    pub pads: [usize; 3],
    pub stored: usize,
    pub list: Option<Vec<u32>>,
    pub half: Half,
    /// How many there are, if the device is to read it; then `list` may be longer.
    pub counted: Option<usize>,
    pub seed: u64,
}

pub fn check(rt: &Arc<dyn Runtime>, c: &Case) {
    let mut rng = Rng::new(c.seed);
    let max_rows = c.list.as_ref().map_or(c.stored, Vec::len);
    let rows = c.counted.map_or(max_rows, |n| n.min(max_rows));
    let strides: [usize; 3] = std::array::from_fn(|s| c.widths[s] + c.pads[s]);
    // Any bits are floats, but a NaN keeps no payload when it is rounded.
    let any_float = |rng: &mut Rng| match f32::from_bits(rng.next_u64() as u32) {
        x if x.is_nan() => rng.normal(),
        x => x,
    };
    let sources: [Vec<u8>; 3] = std::array::from_fn(|s| {
        (0..c.stored * strides[s] / 4).flat_map(|_| any_float(&mut rng).to_le_bytes()).collect()
    });
    let sent = |row: &[u8]| -> Vec<u8> {
        let floats = row.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        floats.flat_map(|x| encode(c.half, x).to_le_bytes()).collect()
    };
    let row_bytes = c.widths.iter().sum::<usize>() / 2;
    let stride = row_bytes + c.pads[0];

    let sources_dev = sources.each_ref().map(|s| upload(rt, s));
    let list_dev = c.list.as_ref().map(|l| upload(rt, l));
    let count_dev = c.counted.map(|n| upload(rt, &[n as u32]));
    let (epoch, arrived) = (Output::of(rt, &[u32::MAX]), Output::of(rt, &[0u32]));
    let header = 64;
    let memory = rt.pinned(header + max_rows * stride + 64).expect("pinned memory");
    // SAFETY: nothing is in flight that touches it.
    unsafe { memory.host().add(header).write_bytes(CANARY, memory.len() - header) };
    let args = PublishArgs {
        sources: std::array::from_fn(|s| PublishSource {
            at: if c.widths[s] > 0 { sources_dev[s].ptr() } else { DevPtr::NULL },
            stride: strides[s],
            bytes: c.widths[s],
        }),
        half: c.half,
        to: memory.device().add(header),
        stride,
        list: at(&list_dev),
        n_rows: at(&count_dev),
        max_rows,
        epoch: epoch.ptr(),
        epoch_add: 3,
        epoch_flag: memory.device(),
        arrived: arrived.ptr(),
    };
    // The host looks on while the device works: once the epoch is there, so is every row.
    std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            wait_for(word(&*memory, 0), 2);
            // SAFETY: the device has published: it writes no more until the next launch, after this thread ended.
            let got = unsafe { mapped(&*memory, header, memory.len() - header) };
            for place in 0..max_rows {
                let (row, tail) = got[place * stride..(place + 1) * stride].split_at(row_bytes);
                assert!(tail.iter().all(|b| *b == CANARY), "{c:?}: written behind place {place}");
                if place >= rows {
                    assert!(row.iter().all(|b| *b == CANARY), "{c:?}: place {place} of {rows} was written");
                    continue;
                }
                let from = c.list.as_ref().map_or(place, |l| l[place] as usize);
                let want: Vec<u8> =
                    (0..3).flat_map(|s| sent(&sources[s][from * strides[s]..][..c.widths[s]])).collect();
                assert!(row == want, "{c:?}: place {place}");
            }
            assert!(got[max_rows * stride..].iter().all(|b| *b == CANARY), "{c:?}: written behind the last");
        });
        publish_rows(&**rt, LANE, &args).expect("launch");
        host.join().expect("the host's checks");
    });
    // Another epoch: the counter is back at zero.
    rt.upload(LANE, epoch.ptr(), &10u32.to_le_bytes()).expect("upload");
    publish_rows(&**rt, LANE, &args).expect("launch");
    assert_eq!(arrived.u32(), [0]);
    assert_eq!(word(&*memory, 0).load(Ordering::Acquire), 13);
}

/// The types that a device publishes in.
pub fn types(rt: &Arc<dyn Runtime>) -> Vec<Half> {
    halves(rt, |t| format!("publish_rows_{t}"))
}

#[test]
fn listed_rows_are_there_when_their_epoch_is() {
    for rt in gpu::runtimes() {
        for half in types(&rt) {
            let c = Case {
                widths: [2048, 512, 512],
                pads: [16, 0, 32],
                stored: 40,
                list: Some((0..33).map(|i| i * 11 % 40).collect()),
                half,
                counted: None,
                seed: 1,
            };
            check(&rt, &c);
            check(&rt, &Case { widths: [0, 512, 0], ..c.clone() });
            check(&rt, &Case { widths: [32, 0, 0], pads: [16; 3], ..c.clone() });
            check(&rt, &Case { list: None, ..c.clone() });
            for n in [0, 1, 32, 33, 50] {
                check(&rt, &Case { counted: Some(n), ..c.clone() });
            }
        }
    }
}

#[test]
fn an_epoch_is_announced_even_if_no_row_is_published() {
    for rt in gpu::runtimes() {
        let (qkv, none) = (upload(&rt, &[0f32; 3 * 3 * 16]), upload(&rt, &[-1i32; 3]));
        let (zero, epoch) = (upload(&rt, &[0u32]), upload(&rt, &[5u32]));
        let (q, arrived) = (Output::new(&rt, 3 * 32), Output::of(&rt, &[0u32]));
        let memory = rt.pinned(64).expect("pinned memory");
        let publish = PublishRows {
            slots: none.ptr(),
            n: zero.ptr(),
            to: memory.device(),
            stride: 64 * 3,
            epoch: epoch.ptr(),
            epoch_add: 4,
            epoch_flag: memory.device(),
            arrived: arrived.ptr(),
        };
        let args = RopeAppend {
            qkv: qkv.ptr(),
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
            kv: q.ptr(),
            kv_type: KvType::F16,
            publish: Some(publish),
            rows: 3,
            ld: 48,
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: 16,
        };
        rope_append(&*rt, LANE, &args).expect("launch");
        wait_for(word(&*memory, 0), 9);
        assert!(q.u16().iter().all(|v| *v == 0));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_publication(
        units in prop::array::uniform3(0..40usize),
        pads in prop::array::uniform3(0..3usize),
        stored in 1..9usize,
        list in prop::option::of(prop::collection::vec(0..9u32, 1..9)),
        counted in prop::option::of(0..10usize),
        seed in any::<u64>(),
    ) {
        let list = list.map(|l| l.into_iter().map(|r| r % stored as u32).collect());
        let (widths, pads) = (units.map(|u| u * 32), pads.map(|p| p * 16));
        for rt in gpu::runtimes() {
            for half in types(&rt) {
                check(&rt, &Case { widths, pads, stored, list: Option::clone(&list), half, counted, seed });
            }
        }
    }
}

/// A device that is late: the epoch must not overtake the rows, whatever the host sees first.
#[test]
fn the_epoch_is_never_early_on_a_jittery_device() {
    if !cfg!(tandem_emulation) {
        println!("skipped: no kernels built for the host");
        return;
    }
    for seed in 0..4 {
        let options = EmulatedOptions {
            jitter: Some(seed),
            checks: KernelChecks { seed, ..KernelChecks::default() },
            ..EmulatedOptions::default()
        };
        let rt: Arc<dyn Runtime> = Arc::new(EmulatedRuntime::new(options).expect("an emulated accelerator"));
        let list = Some((0..16).rev().collect());
        let (widths, pads) = ([128, 32, 32], [16; 3]);
        check(&rt, &Case { widths, pads, stored: 16, list, half: Half::F16, counted: None, seed });
    }
}
