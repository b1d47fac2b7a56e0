//! How the emulated accelerator behaves: size, speed, punctuality, faults.

use std::time::Duration;

/// What to emulate.
#[derive(Debug, Clone, PartialEq)]
pub struct EmulatedOptions {
    /// Bytes of its memory: no more can be allocated.
    pub memory: u64,
    /// The compute capability it claims: 75, 80, 86, 89 or 90. Also chooses which kernels it has.
    pub sm: u32,
    /// Streaming multiprocessors it claims. Few, since grids are sized by them and run on one thread.
    pub multiprocessors: u32,
    /// How slow it is.
    pub speed: Speed,
    /// With a seed, work of each lane is delayed at random, the host's jobs beside the device included, so that lanes
    /// overtake each other wherever no event orders them; copies take effect early or late.
    pub jitter: Option<u64>,
    /// With a seed, lanes have no threads: work is done while the host waits or enqueues, in an order that the seed makes
    /// ([`crate::device::turns`]). Delays and speeds mean nothing then.
    pub turns: Option<u64>,
    /// Whether work of different lanes on the same bytes is refused whenever no event orders it. Otherwise only
    /// if the other lane's work has not ended yet: for programs that learn what is done by other means, such as
    /// words in mapped memory.
    pub strict_order: bool,
    /// Work that has not ended after this long makes the device lost.
    pub watchdog: Duration,
    /// What goes wrong.
    pub faults: FaultPlan,
    /// How the real kernels are run and watched.
    pub checks: KernelChecks,
}

impl Default for EmulatedOptions {
    fn default() -> Self {
        EmulatedOptions {
            memory: 1 << 30,
            sm: 90,
            multiprocessors: 4,
            speed: Speed::default(),
            jitter: None,
            turns: None,
            strict_order: true,
            watchdog: Duration::from_secs(600),
            faults: FaultPlan::default(),
            checks: KernelChecks::default(),
        }
    }
}

/// Lower bounds on how long work takes; the default is as fast as the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// GB/s (10^9) of copies to the device.
    pub host_to_device: Option<f64>,
    /// GB/s of copies to the host.
    pub device_to_host: Option<f64>,
    /// Every launch (or replay of a graph) takes this much longer.
    pub launch: Duration,
    /// Kernels take this many times as long as they do here; below 1 changes nothing.
    pub kernel_factor: f64,
    /// Jobs of the host beside the device take this many times as long as they do here; below 1 changes nothing.
    pub host_factor: f64,
}

impl Default for Speed {
    fn default() -> Self {
        Speed {
            host_to_device: None,
            device_to_host: None,
            launch: Duration::ZERO,
            kernel_factor: 1.0,
            host_factor: 1.0,
        }
    }
}

/// Faults to inject. Counts begin at 1 and are of calls since the plan was set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// This allocation finds no memory.
    pub out_of_memory_at: Option<u64>,
    /// Allocations of more bytes than this find no memory.
    pub out_of_memory_above: Option<usize>,
    /// Pinned allocations of more bytes than this are refused (0: all).
    pub no_pinned_above: Option<usize>,
    /// The device is lost when it comes to this operation (copies, fills and launches of all lanes).
    pub lost_at: Option<u64>,
    /// This copy (in either direction, or within the device) never ends.
    pub endless_copy: Option<u64>,
    /// Silently skips every n-th wait of a lane for an event: for tests that prove that missing waits are found.
    pub forget_waits: Option<u64>,
    /// This job of the host beside the device panics.
    pub panic_host: Option<u64>,
    /// This launch is refused.
    pub refuse_launch: Option<u64>,
    /// Launches of the kernel of this name are refused.
    pub refuse_kernel: Option<String>,
}

/// Order in which the threads and blocks of a launch run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// In the order of their indices.
    Ascending,
    /// From the last one down.
    Descending,
    /// Another thread at every barrier, collective and wait.
    Random,
    /// And in the midst of loads and stores.
    Preempted,
}

/// When a kernel's asynchronous copies land, and its asynchronous matrix products read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyTiming {
    /// At once.
    AtOnce,
    /// As late as is allowed.
    AtWait,
    /// At any time that is allowed.
    Random,
}

/// How the real kernels are run and watched. Bounds and alignment of what they touch are always checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelChecks {
    /// Which order.
    pub schedule: Schedule,
    /// When copies land.
    pub copies: CopyTiming,
    /// Seed of everything random.
    pub seed: u64,
    /// Whether races in shared memory and reads of uninitialised memory are looked for.
    pub races: bool,
    /// Whether races in device memory are looked for, too.
    pub global_races: bool,
}

impl KernelChecks {
    /// As fast as the emulation goes: bounds only.
    pub const FAST: KernelChecks = KernelChecks {
        schedule: Schedule::Ascending,
        copies: CopyTiming::AtOnce,
        seed: 0,
        races: false,
        global_races: false,
    };
}

impl Default for KernelChecks {
    /// Everything checked, in order, copies as late as is allowed.
    fn default() -> Self {
        KernelChecks {
            schedule: Schedule::Ascending,
            copies: CopyTiming::AtWait,
            seed: 0,
            races: true,
            global_races: true,
        }
    }
}
