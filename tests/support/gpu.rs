//! What runs the kernels of `cuda/` on this machine, for tests: the host emulation of them, and a GPU if there is one.

#![allow(dead_code)] // each test binary uses a part of it

use std::sync::Arc;

use tandem::device::cuda::{self, CudaOptions};
use tandem::device::emulated::options::CopyTiming;
use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime, KernelChecks, Schedule};
use tandem::device::runtime::Runtime;

/// Every runtime of this machine that runs kernels; says so if there is none. A GPU counts three times: as what it is,
/// and with the kernels of a T4 and of an A10.
pub fn runtimes() -> Vec<Arc<dyn Runtime>> {
    let mut found: Vec<Arc<dyn Runtime>> = emulated(KernelChecks::default()).into_iter().collect();
    for pretend_sm in [None, Some(75), Some(80)] {
        match cuda::open(&CudaOptions { pretend_sm, ..CudaOptions::default() }) {
            Ok(gpu) => found.push(gpu),
            // What emulation shows is not shown on a GPU: said once.
            Err(e) if pretend_sm.is_none() => println!("skipped on a GPU: {e}"),
            Err(_) => {}
        }
    }
    if found.is_empty() {
        println!("skipped: {}", tandem::device::built::NO_EMULATION.unwrap_or("no kernels"));
    }
    found
}

/// The emulated one, if this build has the kernels for it.
pub fn emulated(checks: KernelChecks) -> Option<Arc<dyn Runtime>> {
    if !cfg!(tandem_emulation) {
        return None;
    }
    let options = EmulatedOptions { checks, ..EmulatedOptions::default() };
    Some(Arc::new(EmulatedRuntime::new(options).expect("an emulated accelerator starts")))
}

/// Runs `body` in every order of threads and with every timing of copies; the string names them.
pub fn for_schedules(mut body: impl FnMut(&Arc<dyn Runtime>, &str)) {
    for schedule in [Schedule::Ascending, Schedule::Descending, Schedule::Random, Schedule::Preempted] {
        for copies in [CopyTiming::AtOnce, CopyTiming::AtWait, CopyTiming::Random] {
            let checks = KernelChecks { schedule, copies, seed: 1, ..KernelChecks::default() };
            let Some(rt) = emulated(checks) else {
                println!("skipped: {}", tandem::device::built::NO_EMULATION.unwrap_or("no kernels"));
                return;
            };
            body(&rt, &format!("threads {schedule:?}, copies {copies:?}"));
        }
    }
}

/// Phases of ldmatrix (eight rows each) of all kernels while `body` ran, and how many more passes through the banks they
/// took than they need. `None` where that is not counted.
pub fn bank_conflicts(body: impl FnOnce(&Arc<dyn Runtime>)) -> Option<(u64, u64)> {
    #[cfg(tandem_emulation)]
    {
        use tandem::device::emulated::ffi;
        let totals = || {
            let all = ffi::kernels().into_iter().filter_map(ffi::kernel_stats);
            all.fold((0, 0), |(p, c), s| (p + s.ldmatrix_phases, c + s.ldmatrix_conflicts))
        };
        let rt = emulated(KernelChecks::default())?;
        let before = totals();
        body(&rt);
        rt.synchronize_all().expect("the work ends");
        let after = totals();
        Some((after.0 - before.0, after.1 - before.1))
    }
    #[cfg(not(tandem_emulation))]
    {
        let _ = body;
        println!("skipped: {}", tandem::device::built::NO_EMULATION.unwrap_or("no kernels"));
        None
    }
}

/// Numbers that repeat (xorshift64*).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// In -1..1.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Mean 0, variance 1 (a sum of twelve uniforms).
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() * 0.5
    }
}
