//! The device's memory: one reservation whose addresses the host must not use.
//!
//! Memory that is not allocated, or has never been written, holds 0xFF in every byte: NaN in every float format, and a
//! page number or count that no test uses.

use std::collections::BTreeSet;

use super::allocator::{Allocator, NoRoom, slack};
use super::program;
use crate::device::runtime::DevPtr;
use crate::{Error, Result};

/// The byte that fills memory without contents.
pub(super) const POISON: u8 = 0xFF;

/// The reservation. It does not know what is allocated in it.
pub(super) struct Memory {
    base: *mut u8,
    len: usize,
}

// SAFETY: plain memory owned by this value; `order` decides who may touch which bytes when, and each access argues it.
unsafe impl Send for Memory {}
// SAFETY: as above; `Memory` hands out raw pointers only.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize) -> Result<Memory> {
        // SAFETY: a fresh private anonymous mapping; no existing memory is affected.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::Capacity(format!(
                "emulated accelerator: {len} bytes of address space are not available"
            )));
        }
        Ok(Memory { base: base.cast(), len })
    }

    fn at(&self, offset: usize) -> DevPtr {
        DevPtr(self.base as u64 + offset as u64)
    }

    /// The offset of an address inside the reservation.
    fn offset(&self, ptr: DevPtr) -> Option<usize> {
        let offset = ptr.0.checked_sub(self.base as u64)? as usize;
        (offset < self.len).then_some(offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; lanes hold the arena while they work on it.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// The memory and what is allocated in it.
pub(super) struct Arena {
    memory: Memory,
    allocator: Allocator,
    capacity: u64,
    /// Allocations that are being freed: no new work may use them.
    retired: BTreeSet<usize>,
}

impl Arena {
    /// An arena in which `capacity` bytes can be allocated.
    pub fn new(capacity: u64) -> Result<Arena> {
        // Reserve more than twice the capacity: guards and fragmentation cost addresses, never capacity.
        let reservation = usize::try_from(capacity)
            .ok()
            .and_then(|c| c.checked_mul(2)?.checked_add(1 << 30)?.checked_next_multiple_of(1 << 21));
        let Some(reservation) = reservation else {
            return Err(Error::Capacity(format!("emulated accelerator: no {capacity} bytes of memory")));
        };
        let memory = Memory::new(reservation)?;
        Ok(Arena {
            memory,
            allocator: Allocator::new(reservation, capacity as usize),
            capacity,
            retired: BTreeSet::new(),
        })
    }

    /// Bytes that can still be allocated.
    pub fn left(&self) -> u64 {
        self.allocator.left() as u64
    }

    /// The error for an allocation that does not fit.
    pub fn no_room(&self, bytes: usize, why: &str) -> Error {
        Error::Capacity(format!(
            "emulated accelerator: {bytes} bytes asked for, {} of {} bytes are free{why}",
            self.left(),
            self.capacity
        ))
    }

    /// Allocates memory and poisons it.
    pub fn alloc(&mut self, bytes: usize) -> Result<DevPtr> {
        assert!(bytes > 0, "an allocation of no bytes");
        let start = self.allocator.take(bytes).map_err(|e| match e {
            NoRoom::Full => self.no_room(bytes, ""),
            NoRoom::Fragmented => self.no_room(bytes, ", none of their ranges is long enough"),
        })?;
        let ptr = self.memory.at(start);
        // SAFETY: the allocator gave out this range and its guard, so it lies in the reservation and no work in flight
        // uses it.
        unsafe { std::ptr::write_bytes(ptr.0 as *mut u8, POISON, bytes + slack(bytes)) };
        program::register(ptr, bytes, false);
        Ok(ptr)
    }

    /// First half of a free: no new work may use the allocation from now on.
    pub fn retire(&mut self, ptr: DevPtr) -> std::result::Result<(), String> {
        let start = self.memory.offset(ptr);
        match start.filter(|&s| self.allocator.find(s).is_some_and(|(start, _)| start == s)) {
            Some(start) if self.retired.insert(start) => Ok(()),
            _ => Err(format!("free of {:#x}, where no allocation begins (freed twice?)", ptr.0)),
        }
    }

    /// Second half of a free, once no work in flight uses the allocation: poisons the memory and reclaims it. `Err`
    /// reports writes to the guard after it.
    pub fn free(&mut self, ptr: DevPtr) -> std::result::Result<(), String> {
        let start = self.memory.offset(ptr).filter(|s| self.retired.remove(s));
        let bytes = start.and_then(|s| self.allocator.give_back(s)).expect("it was retired before");
        program::unregister(ptr);
        let begin = ptr.0 as *mut u8;
        // SAFETY: the range was allocated until now, its guard belongs to it, and no work uses it.
        let behind = unsafe { std::slice::from_raw_parts(begin.add(bytes), slack(bytes)) };
        let written = behind.iter().position(|&b| b != POISON);
        // SAFETY: as above; `behind` is not used any more.
        unsafe { std::ptr::write_bytes(begin, POISON, bytes + slack(bytes)) };
        match written {
            None => Ok(()),
            Some(at) => Err(format!(
                "{at} bytes after the end of the {bytes} bytes at {:#x} something was written",
                ptr.0
            )),
        }
    }

    /// Whether an address belongs to this device.
    pub fn holds(&self, ptr: DevPtr) -> bool {
        self.memory.offset(ptr).is_some()
    }

    /// Checks that `ptr..ptr + len` lies in one allocation. `Err` says what is there instead.
    pub fn check(&self, ptr: DevPtr, len: usize) -> std::result::Result<(), String> {
        let Some(at) = self.memory.offset(ptr) else {
            return Err(format!("{:#x} is no address of this device", ptr.0));
        };
        match self.allocator.find(at) {
            Some((start, _)) if self.retired.contains(&start) => {
                Err(format!("{:#x} is not allocated (freed before?)", ptr.0))
            }
            Some((start, bytes)) if len <= bytes - (at - start) => Ok(()),
            Some((start, bytes)) => {
                Err(format!("{len} bytes from byte {} of an allocation of {bytes} bytes", at - start))
            }
            None => Err(format!("{:#x} is not allocated (freed before?)", ptr.0)),
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for (start, _) in self.allocator.live() {
            program::unregister(self.memory.at(start));
        }
    }
}
