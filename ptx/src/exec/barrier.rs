//! Barriers of a block (PTX ISA 9.7.13.1): by warps, each counting as 32 threads.

use crate::fault::FaultKind;

/// What a barrier's current phase knows.
#[derive(Debug, Clone, Default)]
struct Barrier {
    arrived: u32,
    /// Threads that it waits for; `None`: all of the block.
    count: Option<Option<u32>>,
    /// Warps that wait.
    waiting: Vec<usize>,
}

/// A block's sixteen.
#[derive(Debug, Default)]
pub(crate) struct Barriers {
    all: [Barrier; 16],
}

impl Barriers {
    /// A warp comes, and waits if it does not only arrive.
    pub fn arrive(
        &mut self,
        id: u32,
        count: Option<u32>,
        warp: usize,
        waits: bool,
        warps: u32,
    ) -> Result<(), FaultKind> {
        let fault = |problem: String| FaultKind::Barrier { id, problem };
        let barrier = self.all.get_mut(id as usize).ok_or_else(|| fault("there are 16".into()))?;
        if let Some(count) = count
            && (count == 0 || !count.is_multiple_of(32) || count > warps * 32)
        {
            return Err(fault(format!("{count} threads of a block of {}", warps * 32)));
        }
        let expected = *barrier.count.get_or_insert(count);
        if expected != count {
            return Err(fault(format!("waits for {expected:?} threads, and this warp says {count:?}")));
        }
        barrier.arrived += 32;
        if waits {
            barrier.waiting.push(warp);
        }
        Ok(())
    }

    /// The warps that go on, if the barrier is complete. `all`: warps of the block.
    pub fn complete(&mut self, id: u32, all: u32) -> Vec<usize> {
        let barrier = &mut self.all[id as usize];
        let wanted = match barrier.count {
            None => return Vec::new(),
            Some(count) => count.unwrap_or(all * 32),
        };
        if barrier.arrived < wanted {
            return Vec::new();
        }
        std::mem::take(barrier).waiting
    }

    /// The barriers at which warps wait for all others.
    pub fn of_all(&self) -> Vec<u32> {
        let waits = |b: &&Barrier| b.count == Some(None) && !b.waiting.is_empty();
        (0..16).filter(|id| self.all.get(*id as usize).as_ref().is_some_and(waits)).collect()
    }

    /// What is waited for, for people.
    pub fn describe(&self) -> String {
        let waiting = self.all.iter().enumerate().filter(|(_, b)| !b.waiting.is_empty());
        let each = waiting.map(|(id, b)| {
            let wanted = b.count.flatten().map_or("all".into(), |count| count.to_string());
            format!("barrier {id}: warps {:?} wait, {} of {wanted} threads came", b.waiting, b.arrived)
        });
        each.collect::<Vec<_>>().join("; ")
    }
}
