//! Host memory for keys and values that both sides use: huge pages on the nodes of the threads that attend, page-locked for the device,
//! which is also what `tandem profile` measures attention over.

use std::sync::Arc;

use crate::Result;
use crate::device::{Pinned, Runtime};
use crate::host::{HUGE_PAGE, Pool};

/// Zeroed memory of that many bytes.
///
/// # Errors
/// If the host has not as much, or cannot lock it in a way that the device reaches it.
pub(crate) fn host_pages(runtime: &dyn Runtime, pool: &Pool, bytes: usize) -> Result<Arc<dyn Pinned>> {
    let slab = runtime.slab_touched(bytes, &|base| touch(pool, base, bytes))?;
    match slab.memory().device().is_null() && bytes > 0 {
        // Locked by the driver, or refused in a sentence.
        true => {
            drop(slab);
            runtime.pinned(bytes)
        }
        false => Ok(slab.memory().clone()),
    }
}

/// Touches fresh memory with all workers, each part by whoever comes first: attention shares pages out in the same way.
fn touch(pool: &Pool, base: *mut u8, bytes: usize) {
    /// Small pages, in case the system has no huge ones.
    const PAGE: usize = 4096;
    let base = base.expose_provenance();
    pool.run(bytes.div_ceil(HUGE_PAGE), &|part, _| {
        let to = bytes.min((part + 1) * HUGE_PAGE);
        for at in (part * HUGE_PAGE..to).step_by(PAGE) {
            // SAFETY: inside fresh zeroed memory of `bytes` bytes, of which each part is written by one thread, and nobody reads yet.
            unsafe { std::ptr::with_exposed_provenance_mut::<u8>(base + at).write_volatile(0) };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::emulated::{EmulatedOptions, EmulatedRuntime, FaultPlan};

    #[test]
    fn touching_reaches_every_page_and_changes_nothing() {
        let pool = Pool::new(2);
        for bytes in [0, 1, 4096, HUGE_PAGE + 4097, 3 * HUGE_PAGE] {
            let map = crate::host::Mapping::new(bytes, true, "a test").unwrap();
            touch(&pool, map.base(), bytes);
            // SAFETY: these bytes lie in the mapping.
            let all = unsafe { std::slice::from_raw_parts(map.base(), bytes) };
            assert!(all.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn memory_that_the_device_does_not_reach_is_refused() {
        let pool = Pool::new(1);
        let open = |faults| EmulatedRuntime::new(EmulatedOptions { faults, ..Default::default() }).unwrap();
        let memory = host_pages(&open(FaultPlan::default()), &pool, 10_000).unwrap();
        assert!(memory.len() == 10_000 && !memory.device().is_null());
        let refusing = open(FaultPlan { no_pinned_above: Some(0), ..FaultPlan::default() });
        assert!(host_pages(&refusing, &pool, 10_000).is_err());
    }
}
