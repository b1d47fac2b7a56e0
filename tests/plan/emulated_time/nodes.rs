//! Weights on memory nodes, executed in emulated time against what is predicted.

use std::sync::Arc;

use tandem::device::{Emulation, Kind};
use tandem::plan::hardware;

use super::{executed, mid, on, options, placements, predicted};

/// Weights on the expanders of a machine with CXL: products of the CPU take as much longer as they are slower, and copies to the
/// GPU as much longer as they are slower than the link.
#[test]
fn weights_on_nodes_take_what_was_predicted() {
    let m = mid(4);
    let mut own = hardware::named("a100-spr-cxl").unwrap();
    // What is compared is memory.
    own.efficiency.hand_over_s = 0.0;
    let mut longest: f64 = 0.0;
    for nodes in [&[1][..], &[1, 2], &[0, 1, 2]] {
        let h = own.with_weights_on(nodes).unwrap();
        let kind = Kind::Timed(Emulation::Functions, Arc::new(h.clone()));
        for (name, placement) in
            placements(&m).into_iter().filter(|(n, _)| n.ends_with(" 6") || n == "stream")
        {
            let want = predicted(&m, &h, &placement, 6);
            let got = executed(&mut on(&m, &kind, &placement, &options(128)), 6);
            let here = predicted(&m, &own, &placement, 6);
            for (phase, want, got, here) in
                [("prefill", want.0, got.0, here.0), ("decode", want.1, got.1, here.1)]
            {
                let (off, slower) = (got / want - 1.0, got / here);
                let line = format!(
                    "{name} {phase}, weights on {nodes:?}: predicted {:.1} us, executed {:.1} us ({:+.1}%), {slower:.2} times as \
                     long as from the CPU's own memory",
                    1e6 * want,
                    1e6 * got,
                    100.0 * off
                );
                println!("{line}");
                assert!(off.abs() < 0.1 && slower > 0.9, "{line}");
                longest = longest.max(slower);
            }
        }
    }
    // All on the CPU reads everything at 17 GB/s instead of 260.
    assert!(longest > 10.0, "{longest}");
}
