//! The host emulator catches what it claims to: planted bugs (`cuda/host/bugs.cu`), in every schedule, and their
//! corrected twins are clean. And it stays safe: what must not be touched is not, whatever a kernel does.
//!
//! A binary of its own: what its planted bugs do would count as done by the kernels that other tests watch.
#![cfg(tandem_emulation)]

use std::alloc::{Layout, alloc_zeroed, dealloc};

use tandem::device::emulated::ffi::{self, Config, Copies, Failure, Stats, Threads};
use tandem::device::{DevPtr, Launch};

/// Device memory of a test: registered, with a page of canaries on either side that kernels must not touch.
struct Memory {
    base: *mut u8,
    len: usize,
}

const GUARD: usize = 4096;
const CANARY: u8 = 0xa5;

impl Memory {
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.next_multiple_of(256) + 2 * GUARD, 4096).unwrap()
    }

    fn new(words: &[u32], initialised: bool) -> Memory {
        let len = words.len() * 4;
        let layout = Memory::layout(len);
        // SAFETY: the layout has a size.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null());
        // SAFETY: all within the allocation just made: canaries, then the words between the guards.
        unsafe {
            base.write_bytes(CANARY, layout.size());
            base.add(GUARD).copy_from_nonoverlapping(words.as_ptr().cast(), len);
        }
        let memory = Memory { base, len };
        // SAFETY: mapped until `drop`, which unregisters first; `self` reads it only when nothing is launched.
        unsafe { ffi::register(memory.ptr(), len, initialised) };
        memory
    }

    fn ptr(&self) -> DevPtr {
        DevPtr(self.base as u64 + GUARD as u64)
    }

    fn words(&self) -> Vec<u32> {
        // SAFETY: `len` bytes (whole words) from GUARD on are ours, and no kernel runs.
        let bytes = unsafe { std::slice::from_raw_parts(self.base.add(GUARD), self.len) };
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn canaries_are_whole(&self) -> bool {
        let size = Memory::layout(self.len).size();
        // SAFETY: the whole allocation, and no kernel runs.
        let bytes = unsafe { std::slice::from_raw_parts(self.base, size) };
        bytes[..GUARD].iter().chain(&bytes[GUARD + self.len..]).all(|b| *b == CANARY)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        ffi::unregister(self.ptr());
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, Memory::layout(self.len)) };
    }
}

/// `BugParams` of `cuda/host/bugs.h`.
#[repr(C, align(128))]
struct BugParams {
    out: DevPtr,
    input: DevPtr,
    scratch: DevPtr,
    counter: DevPtr,
    n: u32,
    shared_words: u32,
    pad: [u8; 88],
    map: [u8; 128],
}

/// What a kernel of `bugs.cu` is launched with.
#[derive(Clone, Copy)]
struct Setup {
    blocks: u32,
    threads: u32,
    n: u32,
    out_words: usize,
    input_words: usize,
    hopper: bool,
}

const PLAIN: Setup =
    Setup { blocks: 1, threads: 128, n: 128, out_words: 128, input_words: 512, hopper: false };
const TWO_BLOCKS: Setup = Setup { blocks: 2, out_words: 256, ..PLAIN };
/// Three stages of two tiles of 64 x 64 ones; every product is 3 * 64.
const HOPPER: Setup =
    Setup { threads: 256, n: 3, out_words: 1024, input_words: 128 * 96, hopper: true, ..PLAIN };
const SHARED_WORDS: u32 = 5120;

struct Outcome {
    result: Result<(), Failure>,
    out: Vec<u32>,
    stats: Stats,
}

fn run(kernel: &str, setup: Setup, config: &Config) -> Outcome {
    let one = |i| if setup.hopper { 0x3c00_3c00 } else { i as u32 };
    let out = Memory::new(&vec![0; setup.out_words], false);
    let input = Memory::new(&(0..setup.input_words).map(one).collect::<Vec<_>>(), true);
    let (scratch, counter) = (Memory::new(&[0; 256], false), Memory::new(&[0], true));
    let map =
        if setup.hopper { ffi::tensor_map_2d(input.ptr(), 128, 192, 192, 64, 64).unwrap() } else { [0; 128] };
    let params = BugParams {
        out: out.ptr(),
        input: input.ptr(),
        scratch: scratch.ptr(),
        counter: counter.ptr(),
        n: setup.n,
        shared_words: SHARED_WORDS,
        pad: [0; 88],
        map,
    };
    // SAFETY: plain data without padding (the fields fill 256 bytes), alive through the borrow.
    let bytes =
        unsafe { std::slice::from_raw_parts((&raw const params).cast::<u8>(), size_of::<BugParams>()) };
    ffi::configure(config);
    ffi::reset_stats();
    let result = ffi::launch(&Launch {
        kernel,
        grid: [setup.blocks, 1, 1],
        block: [setup.threads, 1, 1],
        shared: SHARED_WORDS * 4,
        params: bytes,
    });
    for memory in [&out, &input, &scratch, &counter] {
        assert!(memory.canaries_are_whole(), "{kernel}, {config:?}: memory beside an allocation was changed");
    }
    Outcome { result, out: out.words(), stats: ffi::stats() }
}

/// Every order of threads, every time for copies to land, several seeds where something is random.
fn configs() -> Vec<Config> {
    let mut all = Vec::new();
    for threads in [Threads::Ascending, Threads::Descending, Threads::Random, Threads::Preempted] {
        for copies in [Copies::AtOnce, Copies::AtWait, Copies::Random] {
            let random = matches!(threads, Threads::Random | Threads::Preempted) || copies == Copies::Random;
            for seed in 0..if random { 5 } else { 1 } {
                all.push(Config { threads, copies, seed, ..Config::default() });
            }
        }
    }
    all
}

/// `bug_<name>` fails in every configuration, each time for one of these reasons; `fixed_<name>` never does.
fn caught(name: &str, setup: Setup, reasons: &[&str]) {
    for config in configs() {
        fails(name, setup, &config, reasons);
        clean(name, setup, &config);
    }
}

/// A race, which is caught whether or not somebody reads what is not there yet.
fn race(name: &str, setup: Setup, reason: &str) {
    caught(name, setup, &[UNWRITTEN, reason]);
    for config in configs() {
        fails(name, setup, &Config { uninitialised: false, ..config }, &[reason]);
    }
}

fn fails(name: &str, setup: Setup, config: &Config, reasons: &[&str]) {
    match run(&format!("bug_{name}"), setup, config).result {
        Err(Failure::Fault(why)) => {
            assert!(why.contains(&format!("kernel bug_{name}, block (")), "{why}");
            let expected = reasons.iter().any(|reason| why.contains(reason));
            assert!(expected, "bug_{name}, {config:?}: another fault than {reasons:?}: {why}");
        }
        other => panic!("bug_{name}, {config:?}: not caught: {other:?}"),
    }
}

fn clean(name: &str, setup: Setup, config: &Config) -> Outcome {
    let fixed = run(&format!("fixed_{name}"), setup, config);
    assert_eq!(fixed.result, Ok(()), "fixed_{name}, {config:?}");
    fixed
}

const UNWRITTEN: &str = "which nobody wrote";
const SHARED_RACE: &str = "shared memory that thread";

// ---------------------------------------------------------------------------------------------------------
// Races. A thread that runs too early reads what is not there yet; one that runs late is reported as a race.

#[test]
fn missing_syncthreads() {
    race("missing_syncthreads", PLAIN, SHARED_RACE);
}

#[test]
fn missing_syncwarp() {
    race("missing_syncwarp", PLAIN, SHARED_RACE);
}

#[test]
fn write_after_read() {
    race("write_after_read", PLAIN, SHARED_RACE);
}

#[test]
fn two_threads_store_one_byte() {
    race("shared_bytes", PLAIN, "race: writes shared memory that thread");
    let out = clean("shared_bytes", PLAIN, &Config::default()).out;
    assert_eq!(out, (0..128).map(|t| t / 2).collect::<Vec<_>>());
}

#[test]
fn a_named_barrier_of_the_wrong_threads() {
    race("wrong_barrier", PLAIN, SHARED_RACE);
}

#[test]
fn device_memory_between_warps() {
    race("global_race", PLAIN, "race: ");
}

#[test]
fn device_memory_between_blocks() {
    race("blocks_overlap", TWO_BLOCKS, "race between blocks: writes device memory");
    race("last_block", TWO_BLOCKS, "race between blocks: ");
}

// ---------------------------------------------------------------------------------------------------------
// Asynchronous copies.

#[test]
fn wait_for_too_few_groups() {
    caught("wait_group", PLAIN, &["while a copy to it is in flight"]);
}

#[test]
fn others_copies_need_a_barrier() {
    race("copy_without_barrier", PLAIN, SHARED_RACE);
}

#[test]
fn copies_over_what_others_read() {
    race("copy_over_reader", PLAIN, SHARED_RACE);
}

#[test]
fn zeros_from_an_address_that_is_nowhere() {
    let short = Setup { n: 508, input_words: 508, ..PLAIN };
    caught(
        "zeros_from_nowhere",
        short,
        &["cp_async_16 of no bytes from", "offset 2032 of an allocation of 2032"],
    );
    let out = clean("zeros_from_nowhere", short, &Config::default()).out;
    assert_eq!(out, (0..128).map(|t| if t < 127 { 4 * t } else { 0 }).collect::<Vec<_>>());
}

#[test]
fn exit_with_a_copy_in_flight() {
    caught("exit_in_flight", PLAIN, &["ends with 1 cp_async_16 in flight"]);
}

// ---------------------------------------------------------------------------------------------------------
// Divergence.

#[test]
fn a_barrier_that_some_threads_never_reach() {
    caught("divergent_barrier", PLAIN, &["deadlock: waits in __syncthreads; 28 of 128 threads have ended"]);
}

#[test]
fn two_barriers_are_not_one() {
    caught("two_barriers", PLAIN, &["divergent __syncthreads: other threads wait at bugs.cu:"]);
}

#[test]
fn a_shuffle_that_some_lanes_never_reach() {
    caught("divergent_shuffle", PLAIN, &["deadlock: waits in __shfl_xor_sync"]);
}

// ---------------------------------------------------------------------------------------------------------
// Addresses and values.

#[test]
fn one_element_past_the_end() {
    let short = Setup { n: 127, out_words: 127, ..PLAIN };
    caught("store_past_end", short, &["offset 508 of an allocation of 508 bytes"]);
    caught("load_past_end", Setup { n: 512, ..PLAIN }, &["offset 2048 of an allocation of 2048 bytes"]);
    caught("shared_past_end", PLAIN, &["at byte 20480 of shared memory, which ends at 20480"]);
}

#[test]
fn reads_of_what_nobody_wrote() {
    caught("uninitialised_shared", PLAIN, &["reads byte 308 of shared memory, which nobody wrote"]);
    caught("uninitialised_global", PLAIN, &[UNWRITTEN]);
}

#[test]
fn sixteen_bytes_at_a_multiple_of_four() {
    caught("misaligned", PLAIN, &["misaligned"]);
}

#[test]
fn memory_that_was_given_back() {
    let freed = Memory::new(&[0; 512], true);
    let (out, ptr) = (Memory::new(&[0; 128], false), freed.ptr());
    drop(freed);
    let params = [out.ptr(), ptr, out.ptr(), out.ptr()].map(|p| p.0.to_le_bytes()).concat();
    let params = [params, 512u32.to_le_bytes().to_vec(), vec![0; 256 - 36]].concat();
    ffi::configure(&Config::default());
    let launch = Launch {
        kernel: "fixed_load_past_end",
        grid: [1; 3],
        block: [128, 1, 1],
        shared: 0,
        params: &params,
    };
    let Err(Failure::Fault(why)) = ffi::launch(&launch) else { panic!("not caught") };
    assert!(why.contains("reads 16 bytes at 0x"), "{why}");
}

// ---------------------------------------------------------------------------------------------------------
// Counts, and the asynchronous units of sm_90a.

#[test]
fn bank_conflicts_are_counted() {
    for config in configs() {
        let bug = run("bug_bank_conflicts", PLAIN, &config);
        assert_eq!(bug.result, Ok(()));
        // Four warps, four matrices; eight rows fall on two groups of banks: three more passes each.
        assert_eq!((bug.stats.ldmatrix_phases, bug.stats.ldmatrix_conflicts), (16, 48), "{config:?}");
        let fixed = clean("bank_conflicts", PLAIN, &config);
        assert_eq!((fixed.stats.ldmatrix_phases, fixed.stats.ldmatrix_conflicts), (16, 0), "{config:?}");
    }
}

#[test]
fn a_stage_given_back_too_early() {
    for config in configs() {
        let bug = run("bug_early_release", HOPPER, &config).result;
        let Err(Failure::Fault(why)) = bug else { panic!("bug_early_release, {config:?}: {bug:?}") };
        assert!(why.contains("race: ") || why.contains("in flight"), "{config:?}: {why}");
        let fixed = clean("hopper_stage", HOPPER, &config);
        assert!(fixed.out.iter().all(|w| f32::from_bits(*w) == 192.0), "{config:?}: {:?}", &fixed.out[..8]);
        assert!(fixed.stats.async_copies == 6 && fixed.stats.mma == 4 * 4 * 3 * 2, "{:?}", fixed.stats);
    }
}

#[test]
fn stores_that_asynchronous_units_may_not_see() {
    caught("unfenced_store", PLAIN, &["stored without fence_async_shared"]);
    assert_eq!(clean("unfenced_store", PLAIN, &Config::default()).out, [32; 128]);
}

#[test]
fn accumulators_are_nothing_before_the_wait() {
    for config in configs() {
        let bug = run("bug_read_accumulators", HOPPER, &config);
        assert_eq!(bug.result, Ok(()));
        assert!(bug.out.iter().all(|w| f32::from_bits(*w).is_nan()), "{config:?}: {:?}", &bug.out[..8]);
    }
}

/// Registers belong to the tensor cores from the fence to the wait.
#[test]
fn accumulators_that_are_not_ones_own() {
    caught("wgmma_late_zeros", PLAIN, &["accumulators changed after wgmma_fence"]);
    caught("wgmma_unfenced", PLAIN, &["accumulators changed after wgmma_fence"]);
    caught("wgmma_touched", PLAIN, &["accumulators written while products were in flight"]);
    caught("reused_operand", PLAIN, &["a in registers changed while the product of bugs.cu:"]);
    // 64 + 64 and 1 + 1; 16 and the other 16, and the thread's number.
    assert_eq!(clean("wgmma_touched", PLAIN, &Config::default()).out, [128 + 2 + 128; 128]);
    let out = clean("reused_operand", PLAIN, &Config::default()).out;
    assert_eq!(out, (0..128).map(|t| 32 + t).collect::<Vec<_>>());
}

/// Without scale-d = 0 the first product adds to whatever registers held.
#[test]
fn a_first_product_that_accumulates() {
    caught("wgmma_added_to", PLAIN, &["accumulates onto registers that were discarded"]);
}

#[test]
fn a_tensor_map_in_the_middle_of_a_line() {
    let one = Setup { threads: 32, ..HOPPER };
    caught("misplaced_map", one, &["not 128-byte aligned"]);
    assert_eq!(clean("misplaced_map", one, &Config::default()).out[0], 0x3c00_3c00);
}

// ---------------------------------------------------------------------------------------------------------
// The launch itself.

#[test]
fn launches_that_are_refused() {
    let params = [0; 256];
    let launch = |kernel, grid, block, shared, len| {
        ffi::launch(&Launch { kernel, grid, block, shared, params: &params[..len] })
    };
    let refused = |outcome: Result<(), Failure>, why: &str| match outcome {
        Err(Failure::BadLaunch(text)) => assert!(text.contains(why), "{text}"),
        other => panic!("{other:?}, expected a refusal: {why}"),
    };
    let kernel = "fixed_misaligned";
    assert_eq!(launch("no_such_kernel", [1; 3], [32, 1, 1], 0, 256), Err(Failure::UnknownKernel));
    refused(launch(kernel, [1; 3], [1025, 1, 1], 0, 256), "a block of (1025, 1, 1) threads");
    refused(launch(kernel, [1; 3], [32, 32, 2], 0, 256), "a block of (32, 32, 2) threads");
    refused(launch(kernel, [1; 3], [0, 1, 1], 0, 256), "a block of (0, 1, 1) threads");
    refused(launch(kernel, [0, 1, 1], [32, 1, 1], 0, 256), "a grid of (0, 1, 1) blocks");
    refused(launch(kernel, [1, 65536, 1], [32, 1, 1], 0, 256), "a grid of (1, 65536, 1) blocks");
    refused(launch(kernel, [1; 3], [32, 1, 1], 232_449, 256), "a block has at most 232448");
    refused(launch(kernel, [1; 3], [32, 1, 1], 0, 100), "100 bytes of parameters, its struct has 256");
}

#[test]
fn errors_name_the_place() {
    let short = Setup { n: 127, out_words: 127, ..PLAIN };
    let Err(Failure::Fault(why)) = run("bug_store_past_end", short, &Config::default()).result else {
        panic!()
    };
    assert!(why.starts_with("kernel bug_store_past_end, block (0, 0, 0), thread (127, 0, 0)"), "{why}");
    // The line where binutils can look it up, the program and its offset otherwise.
    assert!(why.contains("(bugs.cu:") || why.contains("+0x"), "{why}");
    let Err(Failure::Fault(why)) = run("bug_divergent_barrier", PLAIN, &Config::default()).result else {
        panic!()
    };
    assert!(why.contains(", at bugs.cu:"), "{why}");
}

#[test]
fn more_barriers_than_the_checker_counts_to() {
    let long = Setup { threads: 32, n: 550_000, ..PLAIN };
    let out = clean("long_block", long, &Config::default()).out;
    assert_eq!(out[0], (0..550_000).fold(0u32, |sum, i| sum.wrapping_add(i)));
}

/// Faults leave nothing behind: the same thread, and others beside it, launch on.
#[test]
fn launches_beside_and_after_faults() {
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || {
                let config =
                    Config { threads: Threads::Random, copies: Copies::Random, seed, ..Config::default() };
                for _ in 0..10 {
                    assert!(run("bug_missing_syncthreads", PLAIN, &config).result.is_err());
                    let out = clean("write_after_read", PLAIN, &config).out;
                    let want = |t: u32| 6 + 4 * ((t + 32) % 128);
                    assert_eq!(out, (0..128).map(want).collect::<Vec<_>>());
                }
            });
        }
    });
}

#[test]
fn initialised_bytes_are_remembered_one_by_one() {
    let memory = Memory::new(&[0; 100], false);
    let at = |offset| memory.ptr().add(offset);
    assert!(!ffi::is_initialised(at(0), 1));
    ffi::mark_initialised(at(61), 70);
    assert!(
        ffi::is_initialised(at(61), 70)
            && !ffi::is_initialised(at(60), 2)
            && !ffi::is_initialised(at(130), 2)
    );
    ffi::mark_initialised(at(0), 400);
    assert!(ffi::is_initialised(at(0), 400));
    ffi::mark_uninitialised(at(63), 2);
    assert!(
        ffi::is_initialised(at(0), 63) && !ffi::is_initialised(at(63), 1) && ffi::is_initialised(at(65), 335)
    );
    assert!(!ffi::is_initialised(at(399), 2), "past the end");
}
