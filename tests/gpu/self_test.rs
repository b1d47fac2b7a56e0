//! The self-test of `tandem doctor --gpu` on this machine's GPU, or on the stand-in for its driver: by the host emulation, or by nvcc's
//! text for the GPU whose part it plays.

use crate::support::gpu::{self, is_stand_in};
use tandem::device::{self, Kind, Verdict};

/// Kernels that no check launches, since the device has better ones for everything that they do.
fn left_out(sm: u32) -> &'static [&'static str] {
    match sm {
        // Copies to shared memory behind the products, which a T4 lacks.
        80.. => &["gemm_f16_128x128_sync", "gemm_f16_128x64_sync"],
        _ => &[],
    }
}

#[test]
fn every_kernel_is_right_and_none_is_left_out() {
    // Of an older GPU than there is the doctor knows nothing.
    if !gpu::wanted("cuda") || std::env::var_os("TANDEM_TEST_SM").is_some_and(|sm| !sm.is_empty()) {
        return;
    }
    let Some(rt) = gpu::gpu() else { return };
    let found = device::self_test(&Kind::Cuda(0), None).expect("a report");
    for group in &found.groups {
        println!("{}: {} kernels in {:.1} s", group.name, group.kernels, group.seconds);
        assert_eq!(group.outcome, Verdict::Passed, "{group:?}");
        assert!(group.checks > 0 && group.worst <= 1.0, "{group:?}");
    }
    assert_eq!(found.groups.len(), 11);
    assert_eq!(found.untested, left_out(rt.info().sm), "launched by no check");
    // The first minute of whoever installs it.
    assert!(is_stand_in(&rt.info().name) || found.seconds < 20.0, "{} s", found.seconds);
}
