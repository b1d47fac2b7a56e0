//! Kernels of each operation are as many as predictions price (`device/launches.rs`): counted by the stand-in for the driver.

use super::bench::*;
use crate::support::fake_driver::count;
use crate::support::gpu::is_stand_in;
use tandem::device::{Attend, Residual, StepDesc, StepSeq};
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
        launched("embed", Launches::EMBED, &|| a.embed(&cx, &b.embed, cx.all()).unwrap());
        launched("qkv", Launches::PROJECT + Launches::APPEND, &|| {
            a.qkv(&cx, &b.layer, b.kv, Residual::None, None, cx.all()).unwrap()
        });
        // Short sequences have one part each, and nothing to merge.
        launched("attend", Launches::ATTEND - 1, &|| a.attend(&cx, &b.layer, b.kv, cx.all()).unwrap());
        launched("out_proj", Launches::OUT, &|| a.out_proj(&cx, &b.layer, cx.all()).unwrap());
        launched("ffn_up", Launches::UP, &|| a.ffn_up(&cx, &b.layer, add, cx.all()).unwrap());
        launched("ffn_down", Launches::DOWN, &|| a.ffn_down(&cx, &b.layer, cx.all()).unwrap());
        launched("logits", Launches::HEAD, &|| a.logits(&cx, b.out_norm, &b.head, add, cx.all()).unwrap());
        launched("argmax", Launches::PICK, &|| a.argmax(&cx, cx.all()).unwrap());
        b.rt.synchronize_all().unwrap();
    });
}
