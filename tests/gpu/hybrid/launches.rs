//! Kernels of each operation are as many as predictions price (`device/launches.rs`): counted by the stand-in for the driver.

use super::bench::*;
use crate::support::fake_driver::count;
use crate::support::gpu::is_stand_in;
use tandem::device::kernels::exchange::most_blocks;
use tandem::device::{Attend, Lane, LayerPages, PageMove, Residual, RowOp, StepDesc, StepSeq};
use tandem::program::Launches;

#[test]
fn operations_have_as_many_kernels_as_they_are_priced_with() {
    each(|_, b| {
        if !is_stand_in(&b.rt.info().name) {
            return;
        }
        let seqs = [
            StepSeq { pages: A.0, first_pos: A.1, row0: 0, n_rows: 1, attend: Attend::Here },
            StepSeq { pages: B.0, first_pos: B.1, row0: 1, n_rows: 1, attend: Attend::Here },
        ];
        let desc = StepDesc { logit_rows: &[0, 1], ..b.desc(&seqs, &[1, 2]) };
        let step = b.prepare(0, &desc).unwrap();
        let (a, cx) = (&b.accel, b.context(0, &step));
        let launched = |what: &str, priced: u32, call: &dyn Fn()| {
            let before = count("cuLaunchKernel");
            call();
            assert_eq!((count("cuLaunchKernel") - before) as u32, priced, "{what}");
        };
        let add = Residual::Delta;
        launched("embed", Launches::EMBED, &|| a.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap());
        launched("qkv", Launches::PROJECT + Launches::APPEND, &|| {
            a.enqueue(&cx, b.qkv(None), cx.all()).unwrap()
        });
        // Short sequences have one part each, and nothing to merge.
        launched("attend", Launches::ATTEND - 1, &|| {
            a.enqueue(&cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, cx.all()).unwrap()
        });
        launched("out_proj", Launches::OUT, &|| a.enqueue(&cx, RowOp::OutProj(&b.layer), cx.all()).unwrap());
        launched("ffn_up", Launches::UP, &|| {
            a.enqueue(&cx, RowOp::FfnUp { layer: &b.layer, residual: add }, cx.all()).unwrap()
        });
        launched("ffn_down", Launches::DOWN, &|| a.enqueue(&cx, RowOp::FfnDown(&b.layer), cx.all()).unwrap());
        launched("logits", Launches::HEAD, &|| a.enqueue(&cx, b.logits(add), cx.all()).unwrap());
        launched("argmax", Launches::PICK, &|| a.enqueue(&cx, RowOp::Argmax, cx.all()).unwrap());
        launched("top", Launches::TOP, &|| a.top(cx.lane, &b.shape, &b.ws, &[1.0, 2.0]).unwrap());
        b.rt.synchronize_all().unwrap();
    });
}

/// Pages of many layers move in one launch of few blocks, on streams that go before the one that computes.
#[test]
fn page_moves_leave_the_multiprocessors_to_the_products() {
    each(|_, b| {
        if !is_stand_in(&b.rt.info().name) {
            return;
        }
        assert_eq!(
            (count("urgent streams"), count("normal streams")),
            (2, 1),
            "lanes that copy, lanes that compute"
        );
        let bytes = b.shape.page_bytes();
        let host = b.rt.pinned(40 * bytes).unwrap();
        // As many layers and pages as the little memory has: each page is a layer, and there are 40 on the host.
        let layers: Vec<LayerPages> = (0..40)
            .map(|l| LayerPages { device: b.kv.add(l % PAGES * bytes), host: host.device().add(l * bytes) })
            .collect();
        let pages = [PageMove { device: 0, host: 0, tokens: 32 }];
        let (launches, urgent) = (count("cuLaunchKernel"), count("urgent launches"));
        b.accel.gather_pages(Lane::DeviceToHost, &b.shape, &layers, &pages).unwrap();
        assert_eq!((count("cuLaunchKernel") - launches, count("urgent launches") - urgent), (1, 1));
        let (most, limit) =
            (count("most blocks of an urgent launch"), most_blocks(b.rt.info().multiprocessors));
        assert_eq!(most as usize, limit, "of {} there is work for", 40 * b.shape.n_kv_heads);
        assert!(limit <= 16 && limit <= (b.rt.info().multiprocessors as usize / 8).max(4));
        b.rt.synchronize_all().unwrap();
    });
}

#[test]
fn moves_take_an_eighth_of_the_multiprocessors() {
    // A small one, a laptop's 4060, T4, A10, H100.
    let blocks = [8, 24, 40, 72, 132].map(most_blocks);
    assert_eq!(blocks, [4, 4, 5, 9, 16]);
}
