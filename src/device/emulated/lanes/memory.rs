//! Memory of the device, and pinned memory of the host.

use std::sync::Arc;

use super::state::Problem;
use super::{Core, lock};
use crate::device::emulated::op::Span;
use crate::device::emulated::pinned::HostMemory;
use crate::device::runtime::{DevPtr, Pinned};
use crate::{Error, Result};

impl Core {
    pub fn memory_left(&self) -> Result<u64> {
        self.alive()?;
        Ok(lock(&self.arena).left())
    }

    pub fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        let mut arena = lock(&self.arena);
        let mut state = lock(&self.state);
        state.alive()?;
        let faults = &mut state.faults;
        faults.allocations += 1;
        if faults.plan.out_of_memory_at == Some(faults.allocations)
            || faults.plan.out_of_memory_above.is_some_and(|most| bytes > most)
        {
            return Err(arena.no_room(bytes, " (a fault was injected)"));
        }
        let ptr = arena.alloc(bytes)?;
        state.order.forget(&Span::new(ptr, bytes));
        Ok(ptr)
    }

    pub fn pinned(&self, bytes: usize) -> Result<Arc<HostMemory>> {
        {
            let mut state = lock(&self.state);
            state.alive()?;
            if state.faults.plan.no_pinned_above.is_some_and(|most| bytes > most) {
                return Err(Error::Capacity(format!(
                    "{bytes} bytes of pinned host memory are refused (a fault was injected)"
                )));
            }
        }
        let memory = Arc::new(HostMemory::new(bytes)?);
        let mut state = lock(&self.state);
        state.pinned.retain(|_, m| m.strong_count() > 0);
        state.pinned.insert(memory.device().0, Arc::downgrade(&memory));
        state.order.forget(&Span::new(memory.device(), bytes));
        Ok(memory)
    }

    /// Ends what is in flight, then frees. Trouble is told to the next call.
    pub fn free(&self, ptr: DevPtr) {
        let retired = lock(&self.arena).retire(ptr);
        let mut state = lock(&self.state);
        if let Err(problem) = retired {
            state.owed = Some(Problem::new("emulated accelerator", problem));
            return;
        }
        let until: Vec<u64> = state.lanes.iter().map(|l| l.enqueued).collect();
        state = self.wait_while(state, |s| s.lanes.iter().zip(&until).any(|(l, &n)| l.completed < n));
        if state.lost.is_some() {
            // Work that nobody waits for may still touch it: it stays retired.
            return;
        }
        drop(state);
        let mut arena = lock(&self.arena);
        if let Err(problem) = arena.free(ptr) {
            lock(&self.state).owed = Some(Problem::new("emulated accelerator", problem));
        }
    }
}
