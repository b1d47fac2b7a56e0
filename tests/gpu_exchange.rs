//! Rows and pages between an accelerator and the host: everything here is exact.
#![cfg(tandem_kernels)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use support::gpu::memory::*;
use support::gpu::{self, Rng};
use tandem::cache::{BlockTable, KvDType, KvGeometry, LayerKv, PAGE_TOKENS, PagePool};
use tandem::device::accelerator::Half;
use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime, KernelChecks};
use tandem::device::kernels::elementwise::{PublishRows, RopeAppend, rope_append};
use tandem::device::kernels::exchange::*;
use tandem::device::runtime::{DevPtr, Pinned, Runtime};
use tandem::model::spec::RopePairing;

fn noise(rng: &mut Rng, n: usize) -> Vec<u8> {
    (0..n).map(|_| rng.next_u64() as u8).collect()
}

/// A word of mapped memory, as another thread of the host sees it.
fn word(memory: &dyn Pinned, at: usize) -> &AtomicU32 {
    assert!(at.is_multiple_of(4) && at + 4 <= memory.len());
    // SAFETY: in range and aligned (pinned memory is page-aligned), lives as long as `memory`, and while it is shared
    // with the device it is only accessed atomically.
    unsafe { &*memory.host().add(at).cast::<AtomicU32>() }
}

/// Bytes of mapped memory.
///
/// # Safety
/// Nobody writes them meanwhile.
unsafe fn mapped(memory: &dyn Pinned, at: usize, len: usize) -> &[u8] {
    assert!(at + len <= memory.len());
    // SAFETY: in range; no writer is the caller's promise.
    unsafe { std::slice::from_raw_parts(memory.host().add(at), len) }
}

/// Polls until the word is `value`; acquires what was written before it.
fn wait_for(word: &AtomicU32, value: u32) {
    let start = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(start.elapsed() < Duration::from_secs(60), "epoch {value} never came");
        std::thread::yield_now();
    }
}

// ---------------------------------------------------------------------------------------------------------
// Publishing.

#[derive(Debug, Clone)]
struct PublishCase {
    /// Bytes of a row of each source that go; 0: no such source.
    widths: [usize; 3],
    /// Bytes between.
    pads: [usize; 3],
    stored: usize,
    list: Option<Vec<u32>>,
    /// How many there are, if the device is to read it; then `list` may be longer.
    counted: Option<usize>,
    seed: u64,
}

fn check_publish(rt: &Arc<dyn Runtime>, c: &PublishCase) {
    let mut rng = Rng::new(c.seed);
    let max_rows = c.list.as_ref().map_or(c.stored, Vec::len);
    let rows = c.counted.map_or(max_rows, |n| n.min(max_rows));
    let strides: [usize; 3] = std::array::from_fn(|s| c.widths[s] + c.pads[s]);
    let sources: [Vec<u8>; 3] = std::array::from_fn(|s| noise(&mut rng, c.stored * strides[s]));
    let row_bytes: usize = c.widths.iter().sum();
    let stride = row_bytes + c.pads[0];

    let sources_dev = sources.each_ref().map(|s| upload(rt, s));
    let list_dev = c.list.as_ref().map(|l| upload(rt, l));
    let count_dev = c.counted.map(|n| upload(rt, &[n as u32]));
    let (epoch, arrived) = (Output::of(rt, &[u32::MAX]), Output::of(rt, &[0u32]));
    let header = 64;
    let memory = rt.pinned(header + max_rows * stride + 64).expect("pinned memory");
    // SAFETY: nothing is in flight that touches it.
    unsafe { memory.host().add(header).write_bytes(CANARY, memory.len() - header) };
    let args = Publish {
        sources: std::array::from_fn(|s| PublishSource {
            at: if c.widths[s] > 0 { sources_dev[s].ptr() } else { DevPtr::NULL },
            stride: strides[s],
            bytes: c.widths[s],
        }),
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
                    (0..3).flat_map(|s| sources[s][from * strides[s]..][..c.widths[s]].to_vec()).collect();
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

#[test]
fn listed_rows_are_there_when_their_epoch_is() {
    for rt in gpu::runtimes() {
        let c = PublishCase {
            widths: [2048, 512, 512],
            pads: [16, 0, 32],
            stored: 40,
            list: Some((0..33).map(|i| i * 11 % 40).collect()),
            counted: None,
            seed: 1,
        };
        check_publish(&rt, &c);
        check_publish(&rt, &PublishCase { widths: [0, 512, 0], ..c.clone() });
        check_publish(&rt, &PublishCase { widths: [30, 2, 34], pads: [2, 4, 0], ..c.clone() });
        check_publish(&rt, &PublishCase { list: None, ..c.clone() });
        for n in [0, 1, 32, 33, 50] {
            check_publish(&rt, &PublishCase { counted: Some(n), ..c.clone() });
        }
    }
}

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
            let (answer_at, flag_at) = (64 + 3 * width * 4, 32);
            let memory = rt.pinned(answer_at + 3 * qd * 4).expect("pinned memory");
            let publish = PublishRows {
                slots: slots_dev.ptr(),
                n: n_dev.ptr(),
                to: memory.device().add(64),
                stride: width * 4,
                f32: true,
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
                eps: 0.0,
                rope: [DevPtr::NULL; 2],
                rope_dim: 0,
                pairing: RopePairing::Half,
                row_pos: none.ptr(),
                row_slot: none.ptr(),
                q: q.ptr(),
                kv: kv.ptr(),
                kv_type,
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
                from_stride: qd * 4,
                to: attn.ptr(),
                to_stride: qd * 2,
                from_list: DevPtr::NULL,
                to_list: list.ptr(),
                n_rows: n_dev.ptr(),
                gate: ready.ptr(),
                max_rows: 4,
            };
            check_ready(&*rt, LANE, &check).expect("launch");
            convert_rows(&*rt, LANE, &collect, qd, kv_type).expect("launch");
            assert_eq!(ready.u32(), [0], "nothing is ready yet");
            assert!(attn.u16().iter().all(|v| *v == 0xffff), "nothing is collected before it is ready");

            std::thread::scope(|scope| {
                let host = scope.spawn(|| {
                    wait_for(word(&*memory, 0), 101);
                    for place in 0..3 {
                        // SAFETY: published: the device writes these rows no more.
                        let row = unsafe { mapped(&*memory, 64 + place * width * 4, width * 4) };
                        let sent = &qkv[host_rows[place] as usize * width..][..width];
                        assert_eq!(row, bytes(sent), "place {place}");
                        // SAFETY: answers have a place of their own, which the device reads only after the flag.
                        unsafe {
                            let to = memory.host().add(answer_at + place * qd * 4).cast::<f32>();
                            (0..qd).for_each(|i| to.add(i).write(sent[i] * 2.0));
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
            convert_rows(&*rt, LANE, &collect, qd, kv_type).expect("launch");
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
            f32: true,
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
            eps: 0.0,
            rope: [DevPtr::NULL; 2],
            rope_dim: 0,
            pairing: RopePairing::Half,
            row_pos: none.ptr(),
            row_slot: none.ptr(),
            q: q.ptr(),
            kv: q.ptr(),
            kv_type: Half::F16,
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

// ---------------------------------------------------------------------------------------------------------
// Copies by lists.

#[derive(Debug, Clone)]
struct MoveCase {
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

/// Bytes as they are (`convert` none: n bytes) or n floats to 16 bits.
fn check_move(rt: &Arc<dyn Runtime>, c: &MoveCase, convert: Option<Half>) {
    let mut rng = Rng::new(c.seed);
    let (from_bytes, to_bytes) = if convert.is_some() { (c.n * 4, c.n * 2) } else { (c.n, c.n) };
    let (from_stride, to_stride) = (from_bytes + c.pads[0], to_bytes + c.pads[1]);
    let source: Vec<u8> = match convert {
        Some(_) => (0..c.stored * from_stride / 4).flat_map(|_| rng.normal().to_le_bytes()).collect(),
        None => noise(&mut rng, c.stored * from_stride),
    };
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
    match convert {
        Some(t) => convert_rows(&**rt, LANE, &args, c.n, t).expect("launch"),
        None => copy_rows(&**rt, LANE, &args, c.n).expect("launch"),
    }
    let mut want = vec![CANARY; c.stored * to_stride];
    let rows = if c.gate == Some(0) { 0 } else { c.max_rows.min(c.counted.unwrap_or(u32::MAX) as usize) };
    for i in 0..rows {
        let from = c.from.as_ref().map_or(i as u32, |l| l[i]);
        let to = c.to.as_ref().map_or(i as u32, |l| l[i]);
        if from == u32::MAX || to == u32::MAX {
            continue;
        }
        let row = &source[from as usize * from_stride..][..from_bytes];
        let moved: Vec<u8> = match convert {
            None => row.to_vec(),
            Some(t) => row
                .chunks_exact(4)
                .flat_map(|b| encode(t, f32::from_le_bytes(b.try_into().unwrap())).to_le_bytes())
                .collect(),
        };
        want[to as usize * to_stride..][..to_bytes].copy_from_slice(&moved);
    }
    assert!(out.bytes() == want, "{c:?} {convert:?}");
}

fn shuffled(rng: &mut Rng, n: usize) -> Vec<u32> {
    let mut list: Vec<u32> = (0..n as u32).collect();
    for i in (1..n).rev() {
        list.swap(i, rng.below(i + 1));
    }
    list
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_publication(
        units in prop::array::uniform3(0..40usize),
        pads in prop::array::uniform3(0..3usize),
        wide in any::<bool>(),
        stored in 1..9usize,
        list in prop::option::of(prop::collection::vec(0..9u32, 1..9)),
        counted in prop::option::of(0..10usize),
        seed in any::<u64>(),
    ) {
        let unit = if wide { 16 } else { 2 };
        let list = list.map(|l| l.into_iter().map(|r| r % stored as u32).collect());
        let (widths, pads) = (units.map(|u| u * unit), pads.map(|p| p * unit));
        for rt in gpu::runtimes() {
            check_publish(&rt, &PublishCase { widths, pads, stored, list: Option::clone(&list), counted, seed });
        }
    }

    #[test]
    fn any_move(
        units in 1..70usize,
        pads in prop::array::uniform2(0..3usize),
        wide in any::<bool>(),
        convert in prop::option::of(prop_oneof![Just(Half::F16), Just(Half::BF16)]),
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
        let unit = if convert.is_some() { 4 } else if wide { 16 } else { 2 };
        let pads = pads.map(|p| p * if convert.is_some() { 16 } else { unit });
        let mut lists = [shuffled(&mut rng, stored), shuffled(&mut rng, stored)];
        if holes {
            lists[0][0] = u32::MAX;
            lists[1][stored / 2] = u32::MAX;
        }
        let [from, to] = [0, 1].map(|i| listed[i].then(|| lists[i].clone()));
        for rt in gpu::runtimes() {
            if convert.is_some_and(|t| !rt.has_kernel(&format!("convert_rows_{}", t.name()))) {
                continue;
            }
            let (from, to) = (Option::clone(&from), Option::clone(&to));
            check_move(&rt, &MoveCase { n: units * unit, pads, stored, from, to, max_rows, counted, gate, seed }, convert);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------
// Pages.

/// A layer of the host's cache with `lens` tokens in sequences of their own, and what it looks like on a device.
struct Pages {
    pool: PagePool,
    /// Page ids with how many tokens they hold, in the order of sequences.
    ids: Vec<(u32, usize)>,
    heads: usize,
    hd: usize,
}

impl Pages {
    fn new(dtype: KvDType, heads: usize, hd: usize, lens: &[usize], rng: &mut Rng) -> Pages {
        let g = KvGeometry { n_layers: 1, n_kv_heads: heads, head_dim: hd, dtype };
        let n: usize = lens.iter().map(|l| l.div_ceil(PAGE_TOKENS)).sum();
        let mut pool = PagePool::new(g, n + 1).expect("a pool");
        // A page of nobody: ids are not places.
        let _ = pool.alloc();
        let mut ids = Vec::new();
        for &len in lens {
            let mut table = BlockTable::new();
            table.reserve(&mut pool, len).expect("room");
            for pos in 0..len {
                let row: Vec<f32> = (0..2 * heads * hd).map(|_| rng.normal()).collect();
                let (k, v) = row.split_at(heads * hd);
                // SAFETY: the pool is this thread's alone.
                unsafe { pool.layer(0).append(table.pages(), pos, k, v) };
            }
            for (i, &page) in table.pages().iter().enumerate() {
                ids.push((page, (len - i * PAGE_TOKENS).min(PAGE_TOKENS)));
            }
        }
        Pages { pool, ids, heads, hd }
    }

    /// Bits of all (page, head)s of `page` in the host's layout.
    fn host(&self, page: u32) -> Vec<u16> {
        let kv: LayerKv<'_> = self.pool.layer(0);
        let len = self.heads * 2 * PAGE_TOKENS * self.hd;
        // SAFETY: heads of a page are contiguous, K before V (see `LayerKv`), and nobody writes.
        unsafe { std::slice::from_raw_parts(kv.k_ptr(page, 0), len) }.to_vec()
    }

    /// The same in the device's layout, through the oracle's accessors.
    fn device(&self, page: u32, t: Half) -> Vec<u16> {
        let kv = self.pool.layer(0);
        let mut out = Vec::new();
        for head in 0..self.heads {
            for is_v in [false, true] {
                for token in 0..PAGE_TOKENS {
                    for d in 0..self.hd {
                        let x =
                            if is_v { kv.value(page, head, token, d) } else { kv.key(page, head, token, d) };
                        out.push(encode(t, x));
                    }
                }
            }
        }
        out
    }
}

/// Pages to the host and back, through staging buffers or mapped memory.
fn check_pages(
    rt: &Arc<dyn Runtime>,
    t: Half,
    heads: usize,
    hd: usize,
    lens: &[usize],
    mapped_memory: bool,
    seed: u64,
) {
    let mut rng = Rng::new(seed);
    let dtype = if t == Half::F16 { KvDType::F16 } else { KvDType::BF16 };
    let pages = Pages::new(dtype, heads, hd, lens, &mut rng);
    let (n, page_len) = (pages.ids.len(), heads * 2 * PAGE_TOKENS * hd);
    let what = format!("{t:?}, {heads} heads of {hd}, {lens:?}, mapped {mapped_memory}");

    // On the device: other ids, and NaN wherever there is no token.
    let device_ids = shuffled(&mut rng, n + 2);
    let mut device = vec![0xffffu16; (n + 2) * page_len];
    for (i, (page, tokens)) in pages.ids.iter().enumerate() {
        let mut from = pages.device(*page, t);
        for (e, v) in from.iter_mut().enumerate() {
            if e / hd % PAGE_TOKENS >= *tokens {
                *v = 0xffff;
            }
        }
        device[device_ids[i] as usize * page_len..][..page_len].copy_from_slice(&from);
    }
    let host_ids = shuffled(&mut rng, n + 2);
    let device_kv = upload(rt, &device);
    // One entry more than there are pages, and the first is not wanted.
    let mut list: Vec<u32> = device_ids[..n + 1].to_vec();
    list[0] = u32::MAX;
    let list_dev = upload(rt, &list);
    let host_dev = upload(rt, &host_ids[..n + 1]);
    let tokens: Vec<u32> = pages.ids.iter().map(|p| p.1 as u32).chain([32]).collect();
    let (tokens_dev, n_dev) = (upload(rt, &tokens), upload(rt, &[n as u32]));
    let staging = Output::new(rt, (n + 2) * page_len * 2);
    let memory = rt.pinned((n + 2) * page_len * 2).expect("pinned memory");
    // SAFETY: nothing is in flight that touches it.
    unsafe { memory.host().write_bytes(CANARY, memory.len()) };
    let args = PageMove {
        device: device_kv.ptr(),
        host: if mapped_memory { memory.device() } else { staging.ptr() },
        device_pages: list_dev.ptr(),
        host_pages: host_dev.ptr(),
        n_tokens: tokens_dev.ptr(),
        n_pages: n_dev.ptr(),
        max_pages: n + 1,
        n_kv_heads: heads,
        head_dim: hd,
    };
    pages_to_host(&**rt, LANE, &args).expect("launch");
    rt.synchronize_all().expect("done");
    let there: Vec<u8> = if mapped_memory {
        // SAFETY: the device is done.
        unsafe { mapped(&*memory, 0, memory.len()) }.to_vec()
    } else {
        staging.bytes()
    };
    let mut want = vec![0xffffu16; (n + 2) * page_len];
    for (i, (page, _)) in pages.ids.iter().enumerate().skip(1) {
        want[host_ids[i] as usize * page_len..][..page_len].copy_from_slice(&pages.host(*page));
    }
    assert!(there == bytes(&want), "{what}: to the host");

    // Back to other places, without token counts: zeros were stored for what is not there.
    let back = Output::new(rt, (n + 2) * page_len * 2);
    let args = PageMove { device: back.ptr(), n_tokens: DevPtr::NULL, ..args };
    pages_from_host(&**rt, LANE, &args).expect("launch");
    let mut want = vec![0xffffu16; (n + 2) * page_len];
    for (i, (page, _)) in pages.ids.iter().enumerate().skip(1) {
        want[device_ids[i] as usize * page_len..][..page_len].copy_from_slice(&pages.device(*page, t));
    }
    assert!(back.bytes() == bytes(&want), "{what}: from the host");

    // And with counts, of pages whose rest is not zero: what is behind a count becomes zero.
    let few: Vec<u32> = tokens.iter().map(|t| t / 2).collect();
    let few_dev = upload(rt, &few);
    pages_from_host(&**rt, LANE, &PageMove { n_tokens: few_dev.ptr(), ..args }).expect("launch");
    for i in 1..n {
        let at = device_ids[i] as usize * page_len;
        for (e, v) in want[at..at + page_len].iter_mut().enumerate() {
            if e / hd % PAGE_TOKENS >= few[i] as usize {
                *v = 0;
            }
        }
    }
    assert!(back.bytes() == bytes(&want), "{what}: from the host, fewer tokens");
}

#[test]
fn pages_change_their_layout_and_nothing_else() {
    for rt in gpu::runtimes() {
        for t in [Half::F16, Half::BF16] {
            for hd in [16, 64, 80, 96, 128, 256] {
                check_pages(&rt, t, 2, hd, &[33, 64], hd == 80, hd as u64);
            }
            check_pages(&rt, t, 1, 48, &[1, 31, 70], true, 1);
        }
    }
}

#[test]
fn whole_pages_in_order_need_no_lists_of_the_host() {
    for rt in gpu::runtimes() {
        let mut rng = Rng::new(8);
        let pages = Pages::new(KvDType::BF16, 3, 32, &[64, 32], &mut rng);
        let page_len = 3 * 2 * PAGE_TOKENS * 32;
        let device: Vec<u16> = (0..4).flat_map(|p| pages.device(p, Half::BF16)).collect();
        let ids: Vec<u32> = pages.ids.iter().map(|p| p.0).collect();
        let (device, list) = (upload(&rt, &device), upload(&rt, &ids));
        let out = Output::new(&rt, 3 * page_len * 2);
        let args = PageMove {
            device: device.ptr(),
            host: out.ptr(),
            device_pages: list.ptr(),
            host_pages: DevPtr::NULL,
            n_tokens: DevPtr::NULL,
            n_pages: DevPtr::NULL,
            max_pages: 3,
            n_kv_heads: 3,
            head_dim: 32,
        };
        pages_to_host(&*rt, LANE, &args).expect("launch");
        let want: Vec<u16> = ids.iter().flat_map(|p| pages.host(*p)).collect();
        assert!(out.u16() == want);
    }
}

#[test]
fn every_order_of_threads_gives_the_same() {
    gpu::for_schedules(|rt, _| {
        check_pages(rt, Half::BF16, 1, 48, &[40], true, 2);
        let list = Some(vec![2, 0, 1]);
        let (widths, pads) = ([256, 64, 64], [0; 3]);
        check_publish(rt, &PublishCase { widths, pads, stored: 3, list, counted: Some(2), seed: 4 });
    });
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
        check_publish(&rt, &PublishCase { widths, pads, stored: 16, list, counted: None, seed });
    }
}
