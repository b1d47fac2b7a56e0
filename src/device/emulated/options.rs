//! Options of the emulated accelerator: size, speed, delays, faults.

use std::time::Duration;

/// Options of the emulated accelerator.
#[derive(Debug, Clone, PartialEq)]
pub struct EmulatedOptions {
    /// Bytes of its memory, which bounds all allocations together.
    pub memory: u64,
    /// The compute capability it claims: 75, 80, 86, 89 or 90. Also chooses which kernels it has.
    pub sm: u32,
    /// Streaming multiprocessors it claims. The number is small because grids are sized by it and run on one thread.
    pub multiprocessors: u32,
    /// Its speed.
    pub speed: Speed,
    /// With a seed, work of each lane, and the host's jobs that run concurrently with the device, is delayed at random,
    /// so that lanes overtake each other wherever no event orders them; copies take effect early or late.
    pub jitter: Option<u64>,
    /// With a seed, lanes have no threads: work is done while the host waits or enqueues, in an order derived from the
    /// seed ([`crate::device::turns`]). Delays and speeds then have no effect.
    pub turns: Option<u64>,
    /// Whether work of different lanes on the same bytes is refused whenever no event orders it. If false, it is
    /// refused only while the other lane's work has not ended: for programs that learn of completion by other means,
    /// such as words in mapped memory.
    pub strict_order: bool,
    /// Work that has not ended after this long makes the device lost.
    pub watchdog: Duration,
    /// Faults to inject.
    pub faults: FaultPlan,
    /// How the real kernels are run and checked.
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
    /// Factor on the time of kernels on this computer; below 1 it changes nothing.
    pub kernel_factor: f64,
    /// Factor on the time of the host's jobs that run concurrently with the device; below 1 it changes nothing.
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

/// Faults to inject. Numbers count calls since the plan was set, from 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultPlan {
    /// The allocation with this number finds no memory.
    pub out_of_memory_at: Option<u64>,
    /// Allocations of more bytes than this find no memory.
    pub out_of_memory_above: Option<usize>,
    /// Pinned allocations of more bytes than this are refused (0: all).
    pub no_pinned_above: Option<usize>,
    /// The device is lost at the operation with this number (copies, fills and launches of all lanes).
    pub lost_at: Option<u64>,
    /// The copy with this number (in either direction, or within the device) never ends.
    pub endless_copy: Option<u64>,
    /// Silently skips every n-th wait of a lane for an event, for tests that prove that missing waits are detected.
    pub forget_waits: Option<u64>,
    /// The host job with this number panics.
    pub panic_host: Option<u64>,
    /// The launch with this number is refused.
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
    /// Switches to a random thread at every barrier, collective and wait.
    Random,
    /// As `Random`, and also switches between loads and stores.
    Preempted,
}

/// When a kernel's asynchronous copies land, and its asynchronous matrix products read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyTiming {
    /// At once.
    AtOnce,
    /// As late as allowed: when the kernel waits for them.
    AtWait,
    /// At a random allowed time.
    Random,
}

/// How the real kernels are run and checked. Bounds and alignment of every access are always checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelChecks {
    /// Order of threads and blocks.
    pub schedule: Schedule,
    /// When copies land.
    pub copies: CopyTiming,
    /// Seed of everything random.
    pub seed: u64,
    /// Whether to check for races in shared memory and for reads of uninitialised memory.
    pub races: bool,
    /// Whether to check for races in device memory as well.
    pub global_races: bool,
}

impl KernelChecks {
    /// The fastest emulation: checks only bounds and alignment.
    pub const FAST: KernelChecks = KernelChecks {
        schedule: Schedule::Ascending,
        copies: CopyTiming::AtOnce,
        seed: 0,
        races: false,
        global_races: false,
    };
}

impl Default for KernelChecks {
    /// All checks; threads in ascending order, copies as late as allowed.
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
