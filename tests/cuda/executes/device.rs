//! What the stand-in does as a device, seen by small programs: each succeeds in any order.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::open;
use super::planted::{copy_by_a_kernel, rows};
use crate::support::fake_driver::{function, some_kernel};
use tandem::device::kernels::abi::MoveRowsParams;
use tandem::device::kernels::exchange::{PublishArgs, PublishSource, publish_rows};
use tandem::device::{Buffer, DevPtr, Lane, Launch};
use tandem::tensor::Half;

pub const PROGRAMS: &[(&str, fn())] = &[
    ("an event recorded again", event_recorded_again),
    ("pageable memory", pageable_memory),
    ("looking at mapped memory", looking_at_mapped_memory),
    ("around the rings", around_the_rings),
    ("memory", memory),
    ("a device's address", read_on_the_host),
    ("another executor", another_executor),
    ("out of bounds", out_of_bounds),
    ("unwritten", unwritten),
];

const N: usize = 4096;
const MIB: u64 = 1 << 20;

/// The driver's event is used for another point of another lane while a lane still waits for the earlier one. If the wait meant
/// the later one, the two lanes would wait for each other.
fn event_recorded_again() {
    let rt = open();
    let (a, b) = (Buffer::new(&rt, N).unwrap(), Buffer::new(&rt, N).unwrap());
    for round in 0..20 {
        rt.fill(Lane::Compute, a.ptr(), round, N).unwrap();
        let event = rt.record(Lane::Compute).unwrap();
        rt.wait(Lane::DeviceToHost, &event).unwrap();
        // The event is free to be used again, and is: by what comes behind the wait.
        drop(event);
        rt.copy(Lane::DeviceToHost, b.ptr(), a.ptr(), N).unwrap();
        let behind = rt.record(Lane::DeviceToHost).unwrap();
        rt.wait(Lane::Compute, &behind).unwrap();
        let mut got = [0; N];
        rt.download(Lane::Compute, b.ptr(), &mut got).unwrap();
        assert_eq!(got, [round; N]);
    }
}

fn pageable_memory() {
    let rt = open();
    let slab = rt.slab(2 * N).unwrap();
    assert!(slab.pageable().is_some());
    // SAFETY: the driver has read when a copy from pageable memory was enqueued, and written when a copy to it was.
    let host = || unsafe { std::slice::from_raw_parts_mut(slab.memory().host(), 2 * N) };
    let b = Buffer::new(&rt, N).unwrap();
    host()[..N].fill(1);
    rt.upload_pinned(Lane::HostToDevice, b.ptr(), slab.memory(), 0..N).unwrap();
    host()[..N].fill(2);
    rt.download_pinned(Lane::HostToDevice, b.ptr(), slab.memory(), N, N).unwrap();
    assert_eq!(host()[N..], [1; N]);
}

fn looking_at_mapped_memory() {
    let rt = open();
    let memory = rt.pinned(64 + N).unwrap();
    let rows = Buffer::from_bytes(&rt, Lane::Compute, &[7; N]).unwrap();
    let zero = Buffer::from_bytes(&rt, Lane::Compute, &[0; 4]).unwrap();
    let arrived = Buffer::from_bytes(&rt, Lane::Compute, &[0; 4]).unwrap();
    let none = PublishSource::default();
    for round in 1..4 {
        let publish = PublishArgs {
            sources: [PublishSource { at: rows.ptr(), stride: N, bytes: N }, none, none],
            half: Half::BF16,
            to: memory.device().add(64),
            stride: N,
            list: DevPtr::NULL,
            n_rows: DevPtr::NULL,
            max_rows: 1,
            epoch: zero.ptr(),
            epoch_add: round,
            epoch_flag: memory.device(),
            arrived: arrived.ptr(),
        };
        publish_rows(&*rt, Lane::Compute, &publish).unwrap();
        // SAFETY: aligned and in range; while it is shared with the device it is only accessed atomically.
        let flag = unsafe { &*memory.host().cast::<AtomicU32>() };
        let begun = Instant::now();
        while flag.load(Ordering::Acquire) != round {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never comes");
            std::thread::yield_now();
        }
        // SAFETY: published: the device writes them no more.
        let rows = unsafe { std::slice::from_raw_parts(memory.host().add(64), N / 2) };
        // The upper halves of the floats.
        assert_eq!(rows, [7; N / 2]);
    }
}

/// Uploads are staged in a ring, downloads land in one: neither is used again while a copy of before is to come.
fn around_the_rings() {
    let rt = open();
    let n = 20 << 20;
    let pattern = |seed: u32| -> Vec<u8> {
        (0..n as u32).map(|i| ((i ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
    };
    let buffers = [0, 1, 2, 3].map(|i| (i, Buffer::new(&rt, n).unwrap()));
    let lanes = [Lane::Compute, Lane::HostToDevice, Lane::DeviceToHost, Lane::Compute];
    for (i, b) in &buffers {
        rt.upload(lanes[*i as usize], b.ptr(), &pattern(*i)).unwrap();
    }
    for (i, b) in &buffers {
        let mut back = vec![0; n];
        rt.download(lanes[*i as usize], b.ptr(), &mut back).unwrap();
        assert!(back == pattern(*i), "buffer {i}");
    }
}

fn memory() {
    let rt = open();
    let total = rt.info().memory_total;
    // What the context takes, and what is left to the driver: an eighth of so small a device.
    let reserve = total / 8;
    let free = rt.memory_free().unwrap();
    assert_eq!(total - free, 300 * MIB + reserve);
    let three = [1, 2 * MIB as usize, 2 * MIB as usize + 1].map(|bytes| Buffer::new(&rt, bytes).unwrap());
    assert_eq!(free - rt.memory_free().unwrap(), (2 + 2 + 4) * MIB);
    drop(three);
    assert_eq!(rt.memory_free().unwrap(), free);
    // A module's code.
    let (kernel, params) = some_kernel(&*rt);
    let launch = Launch { kernel, grid: [1; 3], block: [32, 1, 1], shared: 0, params: &vec![0; params] };
    let _recorded = rt.capture(&mut || rt.launch(Lane::Compute, &launch)).unwrap();
    let code = free - rt.memory_free().unwrap();
    assert!(code > 0 && code.is_multiple_of(2 * MIB), "{code}");
    // All that is left, to the last granule, and not a byte more.
    let left = rt.memory_free().unwrap();
    let all = Buffer::new(&rt, (left + reserve) as usize).unwrap();
    assert_eq!(rt.memory_free().unwrap(), 0);
    let error = Buffer::new(&rt, 1).map(drop).unwrap_err();
    assert!(matches!(error, tandem::Error::Capacity(_)), "{error}");
    drop(all);
    assert_eq!(rt.memory_free().unwrap(), left);
}

/// Does not return.
fn read_on_the_host() {
    let rt = open();
    let b = Buffer::from_bytes(&rt, Lane::Compute, &[1; 64]).unwrap();
    rt.synchronize_all().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    println!("nothing runs");
    // SAFETY: a mistake, which the test wants to end the process: the stand-in has made the memory inaccessible.
    println!("it was {}", unsafe { (b.ptr().0 as *const u8).read_volatile() });
}

static LAUNCHED: AtomicU32 = AtomicU32::new(0);

extern "C" fn launcher(
    kernel: *const c_char,
    grid: *const u32,
    block: *const u32,
    shared: u32,
    params: *const c_void,
    len: usize,
    _why: *mut c_char,
    _room: usize,
) -> i32 {
    assert_eq!(len, size_of::<MoveRowsParams>());
    // SAFETY: as the stand-in calls it: a name, three numbers each, as many bytes of parameters as the kernel has.
    unsafe {
        assert_eq!(CStr::from_ptr(kernel), c"copy_rows_16");
        assert_eq!((*grid, *block, shared), (2, 256, 0));
        let params = params.cast::<MoveRowsParams>().read_unaligned();
        // Not what the kernel would do.
        std::ptr::write_bytes(params.dst.0 as *mut u8, 0x5a, params.n as usize);
    }
    LAUNCHED.fetch_add(1, Ordering::SeqCst);
    0
}

fn another_executor() {
    type Launcher = extern "C" fn(
        *const c_char,
        *const u32,
        *const u32,
        u32,
        *const c_void,
        usize,
        *mut c_char,
        usize,
    ) -> i32;
    let rt = open();
    let (a, b) = (Buffer::new(&rt, N).unwrap(), Buffer::new(&rt, N).unwrap());
    // SAFETY: the function has this signature.
    let set = unsafe { function::<extern "C" fn(Launcher)>("fake_set_launcher") };
    set(launcher);
    rt.fill(Lane::Compute, a.ptr(), 1, N).unwrap();
    copy_by_a_kernel(&rt, &rows(b.ptr(), a.ptr(), N)).unwrap();
    let mut got = [0; N];
    rt.download(Lane::Compute, b.ptr(), &mut got).unwrap();
    assert_eq!((got, LAUNCHED.load(Ordering::SeqCst)), ([0x5a; N], 1));
}

/// Three calls that say what the device was lost by.
fn lost(params: impl Fn(DevPtr, DevPtr) -> MoveRowsParams, written: bool) {
    let rt = open();
    let (a, b) = (Buffer::new(&rt, N).unwrap(), Buffer::new(&rt, N).unwrap());
    if written {
        rt.fill(Lane::Compute, a.ptr(), 1, N).unwrap();
    }
    copy_by_a_kernel(&rt, &params(b.ptr(), a.ptr())).unwrap();
    println!("error: {}", rt.synchronize_all().unwrap_err());
    println!("error: {}", rt.alloc(100).unwrap_err());
    println!("error: {}", rt.download(Lane::HostToDevice, a.ptr(), &mut [0; 4]).unwrap_err());
}

fn out_of_bounds() {
    lost(|to, from| rows(to, from, N + 16), true);
}

fn unwritten() {
    lost(|to, from| rows(to, from, N), false);
}
