//! The device's memory: allocations, counted against a cap.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use super::context::{Context, Relaxed};
use super::errors::mib;
use super::release::{Dead, Release};
use crate::device::runtime::DevPtr;
use crate::{Error, Result};

/// The driver gives memory out in pieces of this size; small allocations share some.
pub(super) const GRANULE: u64 = 2 << 20;

pub(super) struct Memory {
    context: Arc<Context>,
    release: Arc<Release>,
    /// Bytes that may be in use, if capped.
    cap: Option<u64>,
    /// Whether the driver takes memory of the host where the device's is gone, instead of saying so.
    spills: bool,
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    /// Bytes of each allocation, by address.
    sizes: BTreeMap<u64, u64>,
    used: u64,
}

/// Bytes of a device with so many that plans leave to the driver: 256 MiB or 2%, an eighth of a small one. A granule at least: plans
/// count small allocations by their bytes, and the last granule that these share has room that nothing else can use.
///
/// Where memory `spills`, 1 GiB or 10%, a quarter of a small one: Windows' desktop and its programs use the same device, and what
/// they take while we run is paged out of ours.
fn reserve(total: u64, spills: bool) -> u64 {
    let most = match spills {
        false => (total / 50).max(256 << 20).min(total / 8),
        true => (total / 10).max(1 << 30).min(total / 4),
    };
    most.max(GRANULE)
}

impl Memory {
    pub fn new(context: Arc<Context>, release: Arc<Release>, cap: Option<u64>) -> Memory {
        Memory { context, release, cap, spills: super::on_wsl(), live: Mutex::default() }
    }

    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that plans may use. Waits for the work in flight on freed memory, and counts that memory as free.
    ///
    /// Without a cap some memory is left out ([`reserve`]): the driver gives it out in granules, and takes some for kernels that
    /// are loaded, their local memory, and graphs, when they are first used. Where memory spills it is left out in any case: a cap
    /// that is above what the driver has must not reach it.
    pub fn free_bytes(&self) -> Result<u64> {
        self.release.reap(true);
        let live = self.live();
        let (driver, total) = self.driver_memory()?;
        let left = driver.saturating_sub(reserve(total, self.spills));
        let driver = if self.spills { left } else { driver };
        Ok(match self.cap {
            Some(cap) => driver.min(cap.saturating_sub(self.held(&live))),
            None => left,
        })
    }

    /// Bytes that the driver counts as held by this program.
    fn held(&self, live: &Live) -> u64 {
        live.used + self.release.dead_bytes()
    }

    fn driver_free(&self) -> Result<u64> {
        Ok(self.driver_memory()?.0)
    }

    /// Bytes that the driver has free, and in all.
    fn driver_memory(&self) -> Result<(u64, u64)> {
        self.context.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; both numbers outlive the call.
        self.context.check("its memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }

    pub fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        assert!(bytes > 0, "an allocation of no bytes");
        self.release.reap(false);
        match self.try_alloc(bytes) {
            // Freed memory may suffice once the work in flight on it is done. No lock is held during that wait.
            Err(Error::Capacity(_)) => {
                self.release.reap(true);
                self.try_alloc(bytes)
            }
            result => result,
        }
    }

    fn try_alloc(&self, bytes: usize) -> Result<DevPtr> {
        let mut live = self.live();
        let wanted = bytes as u64;
        let name = &self.context.name;
        if let Some(cap) = self.cap
            && self.held(&live).saturating_add(wanted) > cap
        {
            return Err(Error::Capacity(format!(
                "{name}: {} asked for, {} of the {} granted (`gpu_memory`) are free",
                mib(wanted),
                mib(cap.saturating_sub(self.held(&live))),
                mib(cap)
            )));
        }
        // A small one may open a granule, too.
        let refused = self.spills && wanted.next_multiple_of(GRANULE) > self.driver_free()?;
        let (code, ptr) = match refused {
            true => (CUresult::CUDA_ERROR_OUT_OF_MEMORY, 0),
            false => self.driver_alloc(bytes)?,
        };
        if code == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::Capacity(format!(
                "{name}: {} asked for, {} are free ({} held by this program)",
                mib(wanted),
                mib(self.driver_free()?),
                mib(self.held(&live))
            )));
        }
        self.context.check("an allocation", code)?;
        live.sizes.insert(ptr, wanted);
        live.used += wanted;
        Ok(DevPtr(ptr))
    }

    fn driver_alloc(&self, bytes: usize) -> Result<(CUresult, u64)> {
        self.context.bind()?;
        let mut ptr = 0;
        let _relaxed = Relaxed::enter();
        // SAFETY: the context is current; the address outlives the call.
        let code = unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes) };
        Ok((code, ptr))
    }

    /// Frees memory after the work in flight. Never waits.
    pub fn free(&self, ptr: DevPtr) {
        let mut live = self.live();
        let bytes = live.sizes.remove(&ptr.0);
        let bytes = bytes.unwrap_or_else(|| panic!("free of {:#x}, where no allocation begins", ptr.0));
        // The bytes are counted as dead before they stop being counted as used.
        self.release.bury(Dead::Device(ptr.0, bytes));
        live.used -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::reserve;

    #[test]
    fn more_is_left_alone_where_memory_spills_and_never_less_than_a_granule() {
        const GIB: u64 = 1 << 30;
        for (total, plain, spilling) in [
            (80 * GIB, 80 * GIB / 50, 8 * GIB),
            (8 * GIB, 256 << 20, GIB),
            (2 * GIB, 256 << 20, GIB / 2),
            (64 << 20, 8 << 20, 16 << 20),
            (10 << 20, 2 << 20, 5 << 19),
        ] {
            assert_eq!((reserve(total, false), reserve(total, true)), (plain, spilling), "{total}");
        }
    }
}
