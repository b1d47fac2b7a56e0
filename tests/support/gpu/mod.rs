//! What runs the kernels of `cuda/` on this machine, for tests: their host emulation, and a GPU if there is one.
//!
//! `TANDEM_TEST_DEVICE=cuda` takes the GPU alone (and fails without one), `=emulated` the emulation alone;
//! `TANDEM_TEST_SM=75` makes a GPU take the kernels of an older one.

#[cfg(tandem_kernels)]
pub mod linear;
pub mod memory;
pub mod turn;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tandem::device::cuda::{self, CudaOptions, CudaRuntime};
use tandem::device::emulated::{
    CopyTiming, EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, KernelChecks, Schedule,
};
use tandem::device::{Accelerator, DeviceInfo, Runtime, on_kernels};
use tandem::tensor::Half;

/// Whether the environment asks for this device: `cuda` or `emulated`.
pub fn wanted(device: &str) -> bool {
    match std::env::var("TANDEM_TEST_DEVICE").as_deref() {
        Err(_) | Ok("" | "all") => true,
        Ok(name @ ("cuda" | "emulated")) => name == device,
        Ok(other) => panic!("TANDEM_TEST_DEVICE={other}: not cuda, emulated or all"),
    }
}

/// Every runtime of this machine that runs kernels; says so if there is none.
pub fn runtimes() -> Vec<Arc<dyn Runtime>> {
    let mut found: Vec<Arc<dyn Runtime>> = Vec::new();
    if wanted("emulated") {
        match emulated(KernelChecks::default()) {
            Some(rt) => found.push(rt),
            None => no_emulation(),
        }
    }
    if wanted("cuda") {
        found.extend(gpu());
    }
    found
}

fn no_emulation() {
    println!("skipped: {}", tandem::device::built::NO_EMULATION.unwrap_or("no kernels"));
}

/// This machine's GPU, for this thread alone until it lets go of it ([`turn`]).
pub fn gpu() -> Option<Arc<dyn Runtime>> {
    turn::Turn::take(|| opened().map(|rt| rt as Arc<dyn Runtime>))
}

/// One for all tests of a program: loading modules takes a while.
fn opened() -> Option<Arc<CudaRuntime>> {
    static GPU: OnceLock<Result<Arc<CudaRuntime>, String>> = OnceLock::new();
    let sm = std::env::var("TANDEM_TEST_SM").ok().filter(|v| !v.is_empty());
    let sm = sm.map(|v| v.parse().unwrap_or_else(|_| panic!("TANDEM_TEST_SM={v}: not a number")));
    let found = GPU.get_or_init(|| {
        let options = CudaOptions { pretend_sm: sm, ..CudaOptions::default() };
        let opened = cuda::open(&options).map_err(|e| e.to_string());
        if opened.as_ref().is_ok_and(|rt| is_stand_in(&rt.info().name)) {
            super::ptx_executor::install();
        }
        opened
    });
    match found {
        Ok(rt) => Some(rt.clone()),
        Err(why) if std::env::var("TANDEM_TEST_DEVICE").as_deref() == Ok("cuda") => panic!("{why}"),
        Err(why) => {
            static ONCE: std::sync::Once = std::sync::Once::new();
            ONCE.call_once(|| println!("skipped: on a GPU: {why}"));
            None
        }
    }
}

/// The host emulation, if this build has the kernels for it.
pub fn emulated(checks: KernelChecks) -> Option<Arc<dyn Runtime>> {
    let options = EmulatedOptions { checks, ..EmulatedOptions::default() };
    let start = || Arc::new(EmulatedRuntime::new(options).expect("an emulated accelerator starts"));
    cfg!(tandem_emulation).then(|| start() as Arc<dyn Runtime>)
}

/// Whether a device is the stand-in for the driver (`support/fake_cuda/`).
pub fn is_stand_in(name: &str) -> bool {
    name.starts_with("Fake ")
}

/// Whether kernels run in host emulation there, a thousand times slower: without a driver, or on the stand-in for one.
pub fn on_the_host(info: &DeviceInfo) -> bool {
    info.driver == 0 || is_stand_in(&info.name)
}

/// How often to repeat something: so often on a device, so often in host emulation.
pub fn count<T>(rt: &Arc<dyn Runtime>, (on_device, emulated): (T, T)) -> T {
    if on_the_host(rt.info()) { emulated } else { on_device }
}

/// What properties of engines are tested on: plain functions on the host, with delays; where only a GPU is asked for, its kernels.
pub fn an_accelerator() -> Arc<dyn Accelerator> {
    if !wanted("emulated")
        && let Some(rt) = gpu()
    {
        return on_kernels(rt).expect("a runtime with kernels");
    }
    let options = EmulatedOptions { jitter: Some(1), ..EmulatedOptions::default() };
    Arc::new(EmulatedAccelerator::new(Arc::new(EmulatedRuntime::new(options).expect("it starts"))))
}

/// The type of keys and values: `wanted`, or f16 on a GPU that has no bf16 (a T4).
pub fn kv(accel: &Arc<dyn Accelerator>, wanted: Half) -> Half {
    let info = accel.runtime().info();
    if info.driver != 0 && info.sm < 80 { Half::F16 } else { wanted }
}

/// How many cases of a property: fewer where kernels run in host emulation (`TANDEM_FAKE_CASES`, 2).
pub fn cases(accel: &Arc<dyn Accelerator>, otherwise: u32) -> u32 {
    if !is_stand_in(&accel.runtime().info().name) {
        return otherwise;
    }
    std::env::var("TANDEM_FAKE_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2)
}

/// Runs `body` in every order of threads and with every timing of copies; the string names them.
pub fn for_schedules(mut body: impl FnMut(&Arc<dyn Runtime>, &str)) {
    if !wanted("emulated") {
        println!("skipped: schedules are the emulation's, which TANDEM_TEST_DEVICE leaves out");
        return;
    }
    for schedule in [Schedule::Ascending, Schedule::Descending, Schedule::Random, Schedule::Preempted] {
        for copies in [CopyTiming::AtOnce, CopyTiming::AtWait, CopyTiming::Random] {
            let checks = KernelChecks { schedule, copies, seed: 1, ..KernelChecks::default() };
            let Some(rt) = emulated(checks) else { return no_emulation() };
            body(&rt, &format!("threads {schedule:?}, copies {copies:?}"));
        }
    }
}

/// Phases of ldmatrix (eight rows each) of kernels with `family` in their names while `body` ran, and how many more
/// passes through the banks they took than they need. `None` where that is not counted.
pub fn bank_conflicts(family: &str, body: impl FnOnce(&Arc<dyn Runtime>)) -> Option<(u64, u64)> {
    // Kernels are counted for the whole process: one at a time. A test that asserts no conflicts of a family holds for what
    // runs of it beside the test, too.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let rt = if wanted("emulated") { emulated(KernelChecks::default()) } else { None };
    let Some(rt) = rt else {
        no_emulation();
        return None;
    };
    let before = ldmatrix_totals(family);
    body(&rt);
    rt.synchronize_all().expect("the work ends");
    let after = ldmatrix_totals(family);
    Some((after.0 - before.0, after.1 - before.1))
}

#[cfg(tandem_emulation)]
fn ldmatrix_totals(family: &str) -> (u64, u64) {
    use tandem::device::emulated::ffi;
    let of = ffi::kernels().into_iter().filter(|name| name.contains(family));
    of.filter_map(ffi::kernel_stats)
        .fold((0, 0), |(p, c), s| (p + s.ldmatrix_phases, c + s.ldmatrix_conflicts))
}

#[cfg(not(tandem_emulation))]
fn ldmatrix_totals(_family: &str) -> (u64, u64) {
    (0, 0)
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

    /// Mean 0, variance 1 (a sum of twelve uniforms, of variance 1/3 each).
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() * 0.5
    }
}
