//! Pages of keys and values that move between an accelerator and the host.

use super::bench::*;
use crate::support::gpu::memory::LANE;
use tandem::Error;
use tandem::cache::PAGE_TOKENS;
use tandem::device::{Attend, Lane, LayerPages, PageMove, Residual, RowOp};

/// Out of A's pages into pinned memory on one copy lane, and back into pages that nobody has on the other: without
/// a step, and no more than the tokens that are there.
#[test]
fn pages_move_between_layouts_on_copy_lanes() {
    each(|name, b| {
        let (page, bytes) = (b.page_shape(), b.shape.page_bytes());
        let before = b.pages();
        let host = b.rt.pinned(5 * bytes).unwrap();
        // SAFETY: nothing is in flight that touches it.
        unsafe { host.host().write_bytes(0xee, host.len()) };
        let out = PageMove::of(A.0, &[4, 0, 2], A.1);
        let tokens: Vec<u32> = out.iter().map(|p| p.tokens).collect();
        assert_eq!(tokens, [32, 32, 6]);
        let back: Vec<PageMove> =
            out.iter().zip([1, 4, 7]).map(|(p, device)| PageMove { device, ..*p }).collect();
        b.accel.gather_pages(Lane::DeviceToHost, &b.shape, &[b.pages_at(host.device())], &out).unwrap();
        let there = b.rt.record(Lane::DeviceToHost).unwrap();
        b.rt.wait(Lane::HostToDevice, &there).unwrap();
        b.accel.scatter_pages(Lane::HostToDevice, &b.shape, &[b.pages_at(host.device())], &back).unwrap();
        b.rt.synchronize_all().unwrap();
        // SAFETY: all of the pinned memory, and all work is done.
        let host = u16s(unsafe { std::slice::from_raw_parts(host.host(), 5 * bytes) });
        let after = b.pages();
        for (from, to) in out.iter().zip(&back) {
            let device = &before[from.device as usize * (page.bytes() / 2)..][..page.bytes() / 2];
            let copy = &after[to.device as usize * (page.bytes() / 2)..][..page.bytes() / 2];
            page.each(|token, d, h, len| {
                assert_eq!(len, 2);
                let (d, h) = (d / 2, h / 2);
                let want = if token < from.tokens as usize { device[d] } else { 0 };
                let got = host[from.host as usize * (page.bytes() / 2) + h];
                assert_eq!(got, want, "{name}: page {} on the host, element {d}", from.device);
                assert_eq!(copy[d], want, "{name}: page {} came back, element {d}", from.device);
            });
        }
        for unused in [1, 3] {
            let own = &host[unused * (page.bytes() / 2)..][..page.bytes() / 2];
            assert!(own.iter().all(|&x| x == 0xeeee), "{name}: page {unused} of the host is nobody's");
        }
    });
}

/// One call moves the same pages of several layers, each between sides of its own.
#[test]
fn pages_of_several_layers_move_in_one_call() {
    each(|name, b| {
        let (page, bytes) = (b.page_shape(), b.shape.page_bytes());
        let before = b.pages();
        // The pages in twos are four layers, which lie on the host in another order.
        let (n, order) = (PAGES / 2, [2, 0, 3, 1]);
        let host = b.rt.pinned(PAGES * bytes).unwrap();
        let layers: Vec<LayerPages> = (0..n)
            .map(|l| LayerPages {
                device: b.kv.add(2 * l * bytes),
                host: host.device().add(2 * order[l] * bytes),
            })
            .collect();
        let moves = [(0, 1, 32), (1, 0, 9)].map(|(device, host, tokens)| PageMove { device, host, tokens });
        b.accel.gather_pages(Lane::DeviceToHost, &b.shape, &layers, &moves).unwrap();
        b.rt.synchronize_all().unwrap();
        // SAFETY: all of the pinned memory, and all work is done.
        let there = u16s(unsafe { std::slice::from_raw_parts(host.host(), PAGES * bytes) });
        for (l, m) in (0..n).flat_map(|l| moves.map(|m| (l, m))) {
            let from = &before[(2 * l + m.device as usize) * (page.bytes() / 2)..][..page.bytes() / 2];
            let to = &there[(2 * order[l] + m.host as usize) * (page.bytes() / 2)..][..page.bytes() / 2];
            page.each(|token, d, h, len| {
                assert_eq!(len, 2);
                let (d, h) = (d / 2, h / 2);
                let want = if token < m.tokens as usize { from[d] } else { 0 };
                assert_eq!(to[h], want, "{name}: layer {l}, page {}, element {d}", m.device);
            });
        }
        b.rt.fill(LANE, b.kv, 0x55, PAGES * bytes).unwrap();
        b.rt.synchronize_all().unwrap();
        b.accel.scatter_pages(Lane::HostToDevice, &b.shape, &layers, &moves).unwrap();
        b.rt.synchronize_all().unwrap();
        let after = b.pages();
        for (l, m) in (0..n).flat_map(|l| moves.map(|m| (l, m))) {
            let at = (2 * l + m.device as usize) * (page.bytes() / 2);
            page.each(|token, d, _, _| {
                let d = d / 2;
                let want = if token < m.tokens as usize { before[at + d] } else { 0 };
                assert_eq!(
                    after[at + d],
                    want,
                    "{name}: layer {l}, page {} came back, element {d}",
                    m.device
                );
            });
        }
    });
}

/// The first page that A's row sees: pages behind its window are not read.
fn first_seen(b: &Bench) -> u32 {
    let first = b.shape.window.map_or(0, |w| A.1 + 1 - w);
    A.0[first / PAGE_TOKENS]
}

/// The emulated accelerator knows which pages an operation touches, of kernels by what they declare: one that is moved while it is in
/// use is refused.
#[test]
fn a_page_in_use_does_not_move_without_an_event() {
    each(|name, b| {
        if !b.rt.watches() {
            return;
        }
        let host = b.rt.pinned(b.shape.page_bytes()).unwrap();
        let one = |device: u32| [PageMove { device, host: 0, tokens: 32 }];
        let page = |device: u32| {
            b.accel.scatter_pages(Lane::HostToDevice, &b.shape, &[b.pages_at(host.device())], &one(device))
        };
        let seen = first_seen(b);
        b.decode(Attend::Here, |_| {
            let e = page(seen).expect_err("attention reads that page");
            assert!(e.to_string().contains("no event orders the two"), "{name}: {e}");
            page(1).unwrap();
        });
        b.rt.synchronize_all().unwrap();
        page(seen).unwrap();
        b.rt.synchronize_all().unwrap();
    });
}

/// A page that is on its way to the host is not given to other rows, nor attended on the host, before it is there.
#[test]
fn a_page_is_not_used_again_before_its_copy_ends() {
    each(|name, b| {
        if !b.rt.watches() {
            return;
        }
        let bytes = b.shape.page_bytes();
        let host = b.rt.pinned(bytes).unwrap();
        let all = (host.host().cast_const(), bytes);
        let out = [PageMove { device: A.0[2], host: 0, tokens: 32 }];
        // Planted: nobody waits for the copy, and the page is another's already.
        let reuse = || b.rt.fill(Lane::Compute, b.kv.add(A.0[2] as usize * bytes), 0, bytes);
        b.accel.gather_pages(Lane::DeviceToHost, &b.shape, &[b.pages_at(host.device())], &out).unwrap();
        let e = reuse().expect_err("a page under copy");
        assert!(e.to_string().contains("no event orders the two"), "{name}: {e}");
        let e = b.rt.host_access(&[all], &[]).expect_err("the host reads a page that is on its way");
        assert!(e.to_string().contains("nobody has waited for it"), "{name}: {e}");
        b.rt.synchronize(&b.rt.record(Lane::DeviceToHost).unwrap()).unwrap();
        b.rt.host_access(&[all], &[all]).unwrap();
        reuse().unwrap();
        b.rt.synchronize_all().unwrap();
    });
}

/// Rows do not append to a page that is on its way to the host, and one that comes from there is not attended before it is here.
#[test]
fn rows_wait_for_the_copies_of_their_pages() {
    each(|name, b| {
        if !b.rt.watches() {
            return;
        }
        let host = b.rt.pinned(b.shape.page_bytes()).unwrap();
        let one = |device: u32| [PageMove { device, host: 0, tokens: 32 }];
        let refused = |e: Error| assert!(e.to_string().contains("no event orders the two"), "{name}: {e}");
        let (rows, tokens) = ([Bench::one(A, 0, Attend::Here)], [17]);
        let step = b.prepare(0, &b.desc(&rows, &tokens)).unwrap();
        let cx = b.context(0, &step);
        b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        b.accel.enqueue(&cx, RowOp::Project { layer: &b.layer, residual: Residual::None }, cx.all()).unwrap();
        // Its last page: rows that are appended go there.
        b.accel
            .gather_pages(Lane::DeviceToHost, &b.shape, &[b.pages_at(host.device())], &one(A.0[2]))
            .unwrap();
        refused(b.accel.enqueue(&cx, RowOp::Append { kv: b.kv }, cx.all()).expect_err("a page under copy"));
        refused(b.accel.enqueue(&cx, b.qkv(None), cx.all()).expect_err("a page under copy, all in one pass"));
        b.rt.wait(LANE, &b.rt.record(Lane::DeviceToHost).unwrap()).unwrap();
        b.accel.enqueue(&cx, RowOp::Append { kv: b.kv }, cx.all()).unwrap();
        // The first page that it sees comes from the host.
        let seen = one(first_seen(b));
        b.rt.wait(Lane::HostToDevice, &b.rt.record(LANE).unwrap()).unwrap();
        b.accel.scatter_pages(Lane::HostToDevice, &b.shape, &[b.pages_at(host.device())], &seen).unwrap();
        refused(
            b.accel
                .enqueue(&cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, cx.all())
                .expect_err("a page that is not here yet"),
        );
        b.rt.wait(LANE, &b.rt.record(Lane::HostToDevice).unwrap()).unwrap();
        b.accel.enqueue(&cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, cx.all()).unwrap();
        b.rt.synchronize_all().unwrap();
    });
}

/// What is recorded is declared when it is replayed, with the pages of that step.
#[test]
fn a_replay_waits_for_the_copies_of_its_pages() {
    each(|name, b| {
        let rows = [Bench::one(A, 0, Attend::Here)];
        let step = b.prepare(0, &b.desc(&rows, &[17])).unwrap();
        if !b.rt.watches() || step.graph_key.is_none() {
            return; // nothing is recorded
        }
        let cx = b.context(0, &step);
        let host = b.rt.pinned(b.shape.page_bytes()).unwrap();
        let out = [PageMove { device: A.0[2], host: 0, tokens: 32 }];
        b.accel.gather_pages(Lane::DeviceToHost, &b.shape, &[b.pages_at(host.device())], &out).unwrap();
        let recorded =
            b.rt.capture(&mut || b.accel.enqueue(&cx, RowOp::Append { kv: b.kv }, cx.all())).unwrap();
        assert!(recorded.is_some(), "{name}: what is only recorded touches nothing");
        let e = b.accel.declare_pages(&cx, b.kv, cx.all(), true).expect_err("a page under copy");
        assert!(e.to_string().contains("no event orders the two"), "{name}: {e}");
        b.rt.synchronize_all().unwrap();
        b.accel.declare_pages(&cx, b.kv, cx.all(), true).unwrap();
        b.rt.synchronize_all().unwrap();
    });
}

/// The device gets no work on pages that the host attends, or appends to, in place.
#[test]
fn a_page_that_the_host_uses_waits_for_the_host() {
    each(|name, b| {
        if !b.rt.watches() {
            return;
        }
        let bytes = b.shape.page_bytes();
        let host = b.rt.pinned(2 * bytes).unwrap();
        let page = |i: usize| (host.host().cast_const().wrapping_add(i * bytes), bytes);
        let moved = |place: u32| [PageMove { device: A.0[1], host: place, tokens: 32 }];
        let out = |place| {
            b.accel.gather_pages(Lane::DeviceToHost, &b.shape, &[b.pages_at(host.device())], &moved(place))
        };
        let back = |place| {
            b.accel.scatter_pages(Lane::HostToDevice, &b.shape, &[b.pages_at(host.device())], &moved(place))
        };
        let refused = |e: Error| assert!(e.to_string().contains("nobody has waited for it"), "{name}: {e}");
        // Attended: it may be read, too.
        let reads = b.rt.host_use(&[page(0)], &[]).expect("it watches");
        refused(out(0).expect_err("a page that the host attends"));
        back(0).unwrap();
        b.rt.synchronize_all().unwrap();
        // Appended to: neither.
        let writes = b.rt.host_use(&[], &[page(1)]).expect("it watches");
        refused(out(1).expect_err("a page that the host writes"));
        refused(back(1).expect_err("a page that the host writes"));
        drop(writes);
        out(1).unwrap();
        refused(out(0).expect_err("a page that the host still attends"));
        drop(reads);
        out(0).unwrap();
        b.rt.synchronize_all().unwrap();
    });
}

#[test]
fn moves_that_cannot_be_are_refused() {
    each(|name, b| {
        let host = b.rt.pinned(4 * b.shape.page_bytes()).unwrap();
        let page = |device, host, tokens| PageMove { device, host, tokens };
        for pages in [[page(1, 0, 33), page(2, 1, 1)], [page(1, 0, 0), page(2, 1, 1)]] {
            let e = b.accel.gather_pages(LANE, &b.shape, &[b.pages_at(host.device())], &pages).unwrap_err();
            assert!(matches!(&e, Error::Usage(m) if m.contains("1 to 32")), "{name}: {e}");
        }
        let (twice, fine) = ([page(1, 3, 9), page(2, 3, 9)], [page(1, 3, 9), page(1, 2, 9)]);
        let e = b.accel.gather_pages(LANE, &b.shape, &[b.pages_at(host.device())], &twice).unwrap_err();
        assert!(matches!(&e, Error::Usage(m) if m.contains("page 3 of the host")), "{name}: {e}");
        b.accel.gather_pages(LANE, &b.shape, &[b.pages_at(host.device())], &fine).unwrap();
        let e = b.accel.scatter_pages(LANE, &b.shape, &[b.pages_at(host.device())], &fine).unwrap_err();
        assert!(matches!(&e, Error::Usage(m) if m.contains("page 1 of the device")), "{name}: {e}");
        b.rt.synchronize_all().unwrap();
    });
}
