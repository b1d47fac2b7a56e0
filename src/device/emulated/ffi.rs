//! Safe interface to the host emulator in `cuda/host/`, which runs a kernel on the CPU and checks every access.
//!
//! Kernels may touch only memory that was [registered](register); bounds are always checked, so a launch
//! is safe whatever its parameters say. Configuration and counters belong to the calling thread.

use std::ffi::{CStr, CString, c_void};

use crate::device::runtime::{DevPtr, Launch};

mod sys {
    #![allow(missing_docs, non_camel_case_types, non_upper_case_globals, dead_code)]
    #![allow(clippy::all, clippy::undocumented_unsafe_blocks)]
    include!(concat!(env!("OUT_DIR"), "/emulator.rs"));
}

/// Order in which threads of a block, and blocks, run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// In the order of their indices.
    Ascending,
    /// From the last one down.
    Descending,
    /// Switches to a random thread at every barrier, collective and wait.
    Random,
    /// As `Random`, and also switches between loads and stores.
    Preempted,
}

/// When asynchronous copies land, and asynchronous matrix products read their operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copies {
    /// At once.
    AtOnce,
    /// As late as allowed: when the kernel waits for them.
    AtWait,
    /// At a random allowed time.
    Random,
}

/// How launches of a thread run, and what is checked besides bounds and alignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Order of threads.
    pub threads: Threads,
    /// When copies land.
    pub copies: Copies,
    /// Check for races in shared memory.
    pub races: bool,
    /// Check for races in device memory, within and between blocks.
    pub global_races: bool,
    /// Check for reads of bytes that were never written.
    pub uninitialised: bool,
    /// Seed of everything random.
    pub seed: u64,
}

impl Default for Config {
    /// All checks, ascending order, copies as late as is allowed.
    fn default() -> Self {
        Config {
            threads: Threads::Ascending,
            copies: Copies::AtWait,
            races: true,
            global_races: true,
            uninitialised: true,
            seed: 0,
        }
    }
}

/// Why a launch failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// No kernel has that name.
    UnknownKernel,
    /// The launch shape, shared memory or parameter size is wrong; nothing ran.
    BadLaunch(String),
    /// The checker stopped the kernel; the message names kernel, block, thread, source line and access.
    Fault(String),
}

/// Counters of what launches did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Kernels launched.
    pub launches: u64,
    /// Blocks run.
    pub blocks: u64,
    /// Warp-wide matrix products, in units of m16n8k16.
    pub mma: u64,
    /// Phases of ldmatrix, each of which reads eight rows.
    pub ldmatrix_phases: u64,
    /// Additional passes through the banks that these phases took.
    pub ldmatrix_conflicts: u64,
    /// Switches from thread to thread.
    pub switches: u64,
    /// Block-wide barriers.
    pub barriers: u64,
    /// Asynchronous copies.
    pub async_copies: u64,
}

impl From<sys::tandem_emu_stats> for Stats {
    fn from(s: sys::tandem_emu_stats) -> Self {
        Stats {
            launches: s.launches,
            blocks: s.blocks,
            mma: s.mma,
            ldmatrix_phases: s.ldmatrix_phases,
            ldmatrix_conflicts: s.ldmatrix_conflicts,
            switches: s.switches,
            barriers: s.barriers,
            async_copies: s.async_copies,
        }
    }
}

/// Sets how launches of this thread run from now on.
pub fn configure(config: &Config) {
    let bit = |on: bool, bit| if on { bit } else { 0 };
    let config = sys::tandem_emu_config {
        schedule: match config.threads {
            Threads::Ascending => sys::TANDEM_EMU_ASCENDING,
            Threads::Descending => sys::TANDEM_EMU_DESCENDING,
            Threads::Random => sys::TANDEM_EMU_RANDOM,
            Threads::Preempted => sys::TANDEM_EMU_PREEMPTED,
        },
        copies: match config.copies {
            Copies::AtOnce => sys::TANDEM_EMU_COPIES_AT_ONCE,
            Copies::AtWait => sys::TANDEM_EMU_COPIES_AT_WAIT,
            Copies::Random => sys::TANDEM_EMU_COPIES_RANDOM,
        },
        checks: sys::TANDEM_EMU_BOUNDS
            | bit(config.races, sys::TANDEM_EMU_RACES)
            | bit(config.global_races, sys::TANDEM_EMU_GLOBAL_RACES)
            | bit(config.uninitialised, sys::TANDEM_EMU_UNINITIALISED),
        reserved: 0,
        seed: config.seed,
    };
    // SAFETY: a pointer to a whole struct that lives through the call.
    unsafe { sys::tandem_emu_configure(&config) };
}

/// Runs a kernel to its end on this thread.
///
/// # Errors
/// See [`Failure`].
pub fn launch(launch: &Launch<'_>) -> Result<(), Failure> {
    let name = CString::new(launch.kernel).map_err(|_| Failure::UnknownKernel)?;
    let (params, len) = (launch.params.as_ptr().cast::<c_void>(), launch.params.len());
    // SAFETY: the name ends in NUL, both shapes have three numbers, `params` has `len` bytes, and the
    // emulator compares `len` with the kernel's own. Kernels touch registered memory only (bounds are
    // always on), of which `register`'s caller promised that it is mapped and not referred to.
    let status = unsafe {
        let (grid, block) = (launch.grid.as_ptr(), launch.block.as_ptr());
        sys::tandem_emu_launch(name.as_ptr(), grid, block, launch.shared, params, len)
    };
    match u32::try_from(status) {
        Ok(sys::TANDEM_EMU_OK) => Ok(()),
        Ok(sys::TANDEM_EMU_UNKNOWN_KERNEL) => Err(Failure::UnknownKernel),
        Ok(sys::TANDEM_EMU_BAD_LAUNCH) => Err(Failure::BadLaunch(last_error())),
        _ => Err(Failure::Fault(last_error())),
    }
}

fn last_error() -> String {
    // SAFETY: the emulator returns a string that lives until this thread's next launch, or NULL.
    unsafe {
        let text = sys::tandem_emu_last_error();
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// Whether there is a kernel of that name.
pub fn has_kernel(kernel: &str) -> bool {
    // SAFETY: the name ends in NUL.
    CString::new(kernel).is_ok_and(|name| unsafe { sys::tandem_emu_has_kernel(name.as_ptr()) } != 0)
}

/// The names of all kernels, sorted.
pub fn kernels() -> Vec<&'static str> {
    // SAFETY: takes nothing.
    let count = unsafe { sys::tandem_emu_kernel_count() };
    let name = |i| {
        // SAFETY: `i` is below the count, so this is the name of a kernel: a literal of the program.
        let name: &'static CStr = unsafe { CStr::from_ptr(sys::tandem_emu_kernel_name(i)) };
        name.to_str().expect("names of kernels are C identifiers")
    };
    (0..count).map(name).collect()
}

/// Lets kernels touch `len` bytes. Unless `initialised`, reading a byte before a kernel or
/// [`mark_initialised`] wrote it is a fault.
///
/// # Safety
/// The bytes are mapped, readable and writable until [`unregister`], and while a launch that can reach them runs,
/// nothing reads or writes them except other launches and code that expects concurrent access.
pub unsafe fn register(base: DevPtr, len: usize, initialised: bool) {
    // SAFETY: by this function's contract.
    unsafe { sys::tandem_emu_register(base.0 as *mut c_void, len, i32::from(initialised)) };
}

/// Forbids kernels to touch the memory registered at `base`.
pub fn unregister(base: DevPtr) {
    // SAFETY: the address is only looked up.
    unsafe { sys::tandem_emu_unregister(base.0 as *mut c_void) };
}

/// Records that the host has written these bytes. Bytes that are not registered are ignored.
pub fn mark_initialised(at: DevPtr, len: usize) {
    // SAFETY: the address is only looked up.
    unsafe { sys::tandem_emu_mark_initialised(at.0 as *mut c_void, len) };
}

/// Forgets that these bytes were written.
pub fn mark_uninitialised(at: DevPtr, len: usize) {
    // SAFETY: the address is only looked up.
    unsafe { sys::tandem_emu_mark_uninitialised(at.0 as *mut c_void, len) };
}

/// Whether all these bytes were written.
pub fn is_initialised(at: DevPtr, len: usize) -> bool {
    // SAFETY: the address is only looked up.
    unsafe { sys::tandem_emu_is_initialised(at.0 as *const c_void, len) != 0 }
}

/// Totals of this thread's launches since [`reset_stats`].
pub fn stats() -> Stats {
    let mut out = sys::tandem_emu_stats::default();
    // SAFETY: a pointer to a whole struct.
    unsafe { sys::tandem_emu_stats(&mut out) };
    out.into()
}

/// Starts counting anew.
pub fn reset_stats() {
    // SAFETY: takes nothing.
    unsafe { sys::tandem_emu_stats_reset() };
}

/// Totals of all launches of one kernel in this process.
pub fn kernel_stats(kernel: &str) -> Option<Stats> {
    let name = CString::new(kernel).ok()?;
    let mut out = sys::tandem_emu_stats::default();
    // SAFETY: the name ends in NUL, and the pointer is to a whole struct.
    let known = unsafe { sys::tandem_emu_kernel_stats(name.as_ptr(), &mut out) };
    (known != 0).then(|| out.into())
}

/// The descriptor of a matrix for bulk tensor copies; `None` if CUDA would refuse to make one.
pub fn tensor_map_2d(
    base: DevPtr,
    rows: u64,
    cols: u64,
    stride: u64,
    box_rows: u32,
    box_cols: u32,
) -> Option<[u8; 128]> {
    #[repr(align(64))]
    struct Map([u8; 128]);
    let mut map = Map([0; 128]);
    // SAFETY: `map` has the 128 aligned bytes that are written; `base` is only stored.
    let refused = unsafe {
        let to = map.0.as_mut_ptr().cast::<c_void>();
        sys::tandem_emu_tensor_map_2d(to, base.0 as *mut c_void, rows, cols, stride, box_rows, box_cols)
    };
    (refused == 0).then_some(map.0)
}
