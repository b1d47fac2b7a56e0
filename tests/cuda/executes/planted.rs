//! Small programs with a mistake, and without it.

use std::sync::Arc;

use crate::support::fake_driver::function;
use tandem::Result;
use tandem::device::kernels::abi::MoveRowsParams;
use tandem::device::{Buffer, DevPtr, Lane, Launch, Pinned, Runtime};

/// Given a runtime and whether to make the mistake: whether the data are right.
type Program = fn(&Arc<dyn Runtime>, bool) -> Result<bool>;

pub const PROGRAMS: &[(&str, Program)] = &[
    ("no wait between lanes", no_wait),
    ("a slot used again", slot_used_again),
    ("a write under a copy", write_under_a_copy),
    ("a read before its copy", read_before_its_copy),
    ("a changed parameter", changed_parameter),
    ("an early free, a copy", early_free_under_a_copy),
    ("an early free, a kernel", early_free_under_a_kernel),
    ("an early free of pinned memory", early_free_of_pinned_memory),
];

const N: usize = 4096;

/// Bytes of pinned memory.
///
/// # Safety
/// That nothing in flight uses them is what the programs are about: the stand-in moves single bytes beside this, and whatever is seen
/// is a value of a byte.
#[allow(clippy::mut_from_ref)] // the memory is the device's too: nobody owns it alone
unsafe fn host(pinned: &Arc<dyn Pinned>) -> &mut [u8] {
    // SAFETY: `pinned` is alive.
    unsafe { std::slice::from_raw_parts_mut(pinned.host(), pinned.len()) }
}

fn fill(pinned: &Arc<dyn Pinned>, value: u8) {
    // SAFETY: see there.
    unsafe { host(pinned) }.fill(value);
}

fn holds(rt: &Arc<dyn Runtime>, lane: Lane, at: DevPtr, len: usize, value: u8) -> Result<bool> {
    let mut got = vec![0; len];
    rt.download(lane, at, &mut got)?;
    Ok(got.iter().all(|&b| b == value))
}

/// `len` bytes, a multiple of 16, by a kernel.
pub fn rows(to: DevPtr, from: DevPtr, len: usize) -> MoveRowsParams {
    MoveRowsParams {
        src: from,
        dst: to,
        src_stride: len as u64,
        dst_stride: len as u64,
        max_rows: 1,
        n: len as u32,
        ..Default::default()
    }
}

pub fn copy_by_a_kernel(rt: &Arc<dyn Runtime>, params: &MoveRowsParams) -> Result<()> {
    // SAFETY: a struct of `abi.h`: padding is a field, so every byte is initialised; the slice covers it exactly.
    let params = unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size_of::<MoveRowsParams>())
    };
    let launch = Launch { kernel: "copy_rows_16", grid: [2, 1, 1], block: [256, 1, 1], shared: 0, params };
    rt.launch(Lane::Compute, &launch)
}

fn no_wait(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (a, b) = (Buffer::new(rt, N)?, Buffer::new(rt, N)?);
    rt.fill(Lane::Compute, a.ptr(), 1, N)?;
    // The kernel is loaded, which takes a while.
    copy_by_a_kernel(rt, &rows(b.ptr(), a.ptr(), N))?;
    rt.synchronize_all()?;
    let up = rt.pinned(N)?;
    fill(&up, 2);
    rt.upload_pinned(Lane::HostToDevice, a.ptr(), &up, 0..N)?;
    if !mistake {
        rt.wait(Lane::Compute, &rt.record(Lane::HostToDevice)?)?;
    }
    copy_by_a_kernel(rt, &rows(b.ptr(), a.ptr(), N))?;
    holds(rt, Lane::Compute, b.ptr(), N, 2)
}

fn slot_used_again(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let to = Buffer::new(rt, 8 * N)?;
    let mut slots = Vec::new();
    for _ in 0..2 {
        slots.push((rt.pinned(N)?, None));
    }
    for i in 0..8 {
        let (slot, used) = &mut slots[i % 2];
        if let Some(event) = used.take().filter(|_| !mistake) {
            rt.synchronize(&event)?;
        }
        fill(slot, 1 + i as u8);
        rt.upload_pinned(Lane::HostToDevice, to.ptr().add(i * N), slot, 0..N)?;
        *used = Some(rt.record(Lane::HostToDevice)?);
    }
    let mut right = true;
    for i in 0..8 {
        right &= holds(rt, Lane::HostToDevice, to.ptr().add(i * N), N, 1 + i as u8)?;
    }
    Ok(right)
}

fn write_under_a_copy(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (to, up) = (Buffer::new(rt, N)?, rt.pinned(N)?);
    fill(&up, 3);
    rt.upload_pinned(Lane::HostToDevice, to.ptr(), &up, 0..N)?;
    if !mistake {
        rt.synchronize(&rt.record(Lane::HostToDevice)?)?;
    }
    fill(&up, 4);
    holds(rt, Lane::HostToDevice, to.ptr(), N, 3)
}

fn read_before_its_copy(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (from, down) = (Buffer::new(rt, N)?, rt.pinned(N)?);
    rt.fill(Lane::DeviceToHost, from.ptr(), 5, N)?;
    rt.synchronize_all()?;
    // What was there before is what is to come: only poison tells the two apart.
    fill(&down, 5);
    rt.download_pinned(Lane::DeviceToHost, from.ptr(), &down, 0, N)?;
    if !mistake {
        rt.synchronize(&rt.record(Lane::DeviceToHost)?)?;
    }
    // SAFETY: see there.
    let right = unsafe { host(&down) }.iter().all(|&b| b == 5);
    rt.synchronize_all()?;
    Ok(right)
}

/// The mistake is to change the parameters of recorded work; to change what they point to is right.
fn changed_parameter(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (a, b, to) = (Buffer::new(rt, N)?, Buffer::new(rt, N)?, Buffer::new(rt, N)?);
    rt.fill(Lane::Compute, a.ptr(), 6, N)?;
    rt.fill(Lane::Compute, b.ptr(), 7, N)?;
    let mut params = rows(to.ptr(), a.ptr(), N);
    copy_by_a_kernel(rt, &params)?;
    let graph = rt.capture(&mut || copy_by_a_kernel(rt, &params))?.expect("it records");
    match mistake {
        true => params.src = b.ptr(),
        false => rt.copy(Lane::Compute, a.ptr(), b.ptr(), N)?,
    }
    rt.replay(&graph)?;
    let right = holds(rt, Lane::Compute, to.ptr(), N, 7)?;
    // The stale one ran, whenever.
    assert!(right || holds(rt, Lane::Compute, to.ptr(), N, 6)?, "neither the new data nor the old");
    std::hint::black_box(&params);
    Ok(right)
}

/// Gives memory back to the driver behind the runtime's back.
fn free_at_once(buffer: Buffer) {
    type Free = extern "C" fn(u64) -> i32;
    // SAFETY: the function has this signature.
    let code = unsafe { function::<Free>("cuMemFree_v2") }(buffer.ptr().0);
    assert_eq!(code, 0);
    std::mem::forget(buffer);
}

fn early_free_under_a_copy(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (a, b) = (Buffer::new(rt, N)?, Buffer::new(rt, N)?);
    rt.fill(Lane::HostToDevice, b.ptr(), 8, N)?;
    rt.synchronize_all()?;
    rt.fill(Lane::Compute, a.ptr(), 9, N)?;
    rt.copy(Lane::Compute, b.ptr(), a.ptr(), N)?;
    match mistake {
        true => free_at_once(a),
        false => drop(a),
    }
    holds(rt, Lane::Compute, b.ptr(), N, 9)
}

fn early_free_under_a_kernel(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (a, b) = (Buffer::new(rt, N)?, Buffer::new(rt, N)?);
    rt.fill(Lane::Compute, a.ptr(), 9, N)?;
    rt.synchronize_all()?;
    copy_by_a_kernel(rt, &rows(b.ptr(), a.ptr(), N))?;
    match mistake {
        true => free_at_once(a),
        false => drop(a),
    }
    holds(rt, Lane::Compute, b.ptr(), N, 9)
}

fn early_free_of_pinned_memory(rt: &Arc<dyn Runtime>, mistake: bool) -> Result<bool> {
    let (to, up) = (Buffer::new(rt, N)?, rt.pinned(N)?);
    fill(&up, 3);
    rt.upload_pinned(Lane::HostToDevice, to.ptr(), &up, 0..N)?;
    if mistake {
        type Free = extern "C" fn(*mut u8) -> i32;
        // SAFETY: the function has this signature.
        let code = unsafe { function::<Free>("cuMemFreeHost") }(up.host());
        assert_eq!(code, 0);
        std::mem::forget(up);
    } else {
        drop(up);
    }
    holds(rt, Lane::HostToDevice, to.ptr(), N, 3)
}
