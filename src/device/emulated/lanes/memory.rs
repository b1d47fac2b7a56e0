//! Memory of the device, and pinned memory of the host.

use std::sync::Arc;

use super::state::{Problem, State};
use super::{Core, lock};
use crate::device::emulated::op::Span;
use crate::device::emulated::pinned::HostBytes;
use crate::device::runtime::{DevPtr, Lane, Pinned};
use crate::{Error, Result};

impl Core {
    /// Bytes that can still be allocated. Waits for the work in flight on freed memory, and counts that memory as free.
    pub fn memory_left(&self) -> Result<u64> {
        self.reap(true);
        self.alive()?;
        Ok(lock(&self.arena).left())
    }

    pub fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        self.reap(false);
        {
            let arena = lock(&self.arena);
            let mut state = lock(&self.state);
            state.alive()?;
            let faults = &mut state.faults;
            faults.allocations += 1;
            if faults.plan.out_of_memory_at == Some(faults.allocations)
                || faults.plan.out_of_memory_above.is_some_and(|most| bytes > most)
            {
                return Err(arena.no_room(bytes, " (a fault was injected)"));
            }
        }
        match self.try_alloc(bytes) {
            // Freed memory may suffice once the work in flight on it is done.
            Err(Error::Capacity(_)) => {
                self.reap(true);
                self.try_alloc(bytes)
            }
            result => result,
        }
    }

    fn try_alloc(&self, bytes: usize) -> Result<DevPtr> {
        let mut arena = lock(&self.arena);
        let mut state = lock(&self.state);
        state.alive()?;
        let ptr = arena.alloc(bytes)?;
        state.order.forget(&Span::new(ptr, bytes));
        Ok(ptr)
    }

    pub fn pinned(&self, bytes: usize) -> Result<Arc<HostBytes>> {
        {
            let mut state = lock(&self.state);
            state.alive()?;
            if state.faults.plan.no_pinned_above.is_some_and(|most| bytes > most) {
                return Err(Error::Capacity(format!(
                    "{bytes} bytes of pinned host memory are refused (a fault was injected)"
                )));
            }
        }
        Ok(self.keep(HostBytes::new(bytes)?))
    }

    /// Host memory that copies use but that the device cannot access.
    pub fn pageable(&self, bytes: usize) -> Result<Arc<HostBytes>> {
        Ok(self.keep(HostBytes::pageable(bytes)?))
    }

    fn keep(&self, memory: HostBytes) -> Arc<HostBytes> {
        let memory = Arc::new(memory);
        let mut state = lock(&self.state);
        state.pinned.retain(|_, m| m.strong_count() > 0);
        state.pinned.insert(memory.start().0, Arc::downgrade(&memory));
        state.order.forget(&Span::new(memory.start(), memory.len()));
        memory
    }

    /// Whether an address lies in pinned memory.
    pub fn is_host(&self, ptr: DevPtr) -> bool {
        lock(&self.state).pinned(&Span::new(ptr, 1)).is_some()
    }

    /// Retires the memory: it is freed after the work in flight, without waiting for that here. The next call reports
    /// errors.
    pub fn free(&self, ptr: DevPtr) {
        let retired = lock(&self.arena).retire(ptr);
        let mut state = lock(&self.state);
        if let Err(problem) = retired {
            state.owed = Some(Problem::new("emulated accelerator", problem));
            return;
        }
        let until = Lane::ALL.map(|l| state.lanes[l as usize].enqueued);
        state.retired.push((ptr, until));
        drop(state);
        self.reap(false);
    }

    /// Frees retired memory whose work is done; with `wait`, waits for the work and frees all retired memory.
    fn reap(&self, wait: bool) {
        let done = |state: &State, until: &[u64; 3]| {
            Lane::ALL.iter().all(|&l| state.lanes[l as usize].completed >= until[l as usize])
        };
        loop {
            let mut arena = lock(&self.arena);
            let mut state = lock(&self.state);
            // On a lost device, abandoned work may still touch the memory, so it stays retired.
            if state.lost.is_some() || state.retired.is_empty() {
                return;
            }
            let all = std::mem::take(&mut state.retired);
            let (free, rest): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, until)| done(&state, until));
            state.retired = rest;
            for (ptr, _) in free {
                if let Err(problem) = arena.free(ptr) {
                    state.owed = Some(Problem::new("emulated accelerator", problem));
                }
            }
            drop(arena);
            let Some(&(_, until)) = state.retired.first().filter(|_| wait) else { return };
            drop(self.wait_while(state, None, |s| !done(s, &until)));
        }
    }
}
