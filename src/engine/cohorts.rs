//! Cohorts: rows of sequences on the host that advance by one layer per asynchronous step, while the device goes on
//! with its own rows (APEX §4).
//!
//! Each asynchronous [step](Engine::run) checks every parked cohort. A cohort's sequences are unchanged until its token
//! has passed all layers; then its rows have logits, and the sequences can be used like all others. Meanwhile, steps of
//! other kinds can use the sub-batches without a cohort.

use std::collections::HashMap;

use super::sequences::Engine;
use crate::program::{Iteration, RequestId, Side, Wants};
use crate::{Error, Result};

impl Engine {
    /// The layer at which a sequence's row is parked, if it is.
    pub fn parked(&self, id: RequestId) -> Option<u32> {
        self.machine.parked_at(id)
    }

    /// The sequences of each cohort that is parked, and the layer where it is.
    pub fn cohorts(&self) -> Vec<(Vec<RequestId>, u32)> {
        let all = self.machine.cohorts();
        all.map(|(_, p)| (p.groups.iter().map(|g| g.request).collect(), p.at)).collect()
    }

    /// Whether there can be cohorts: this needs a device, each layer's products after its attention on one side, and
    /// sub-batches for cohorts.
    pub fn overlaps(&self) -> bool {
        self.sub_batches() > 1 && self.machine.check_cohorts().is_ok()
    }

    /// Number of cohorts that could begin: sub-batches without a cohort, except the first.
    pub fn cohorts_free(&self) -> usize {
        self.machine.free_slots().len()
    }

    /// Returns an error for an asynchronous iteration whose cohorts cannot begin.
    pub(super) fn check_cohorts(&self, iteration: &Iteration, swaps: &[(RequestId, Side)]) -> Result<()> {
        let begin: Vec<_> = iteration.sub_batches.iter().skip(1).filter(|b| b.at.is_none()).collect();
        if begin.iter().any(|cohort| cohort.groups.is_empty()) {
            return Err(Error::usage("a cohort of no sequence"));
        }
        let free = self.cohorts_free();
        if begin.len() > free {
            return Err(Error::Capacity(format!(
                "{} cohorts are to begin, there is room for {free}: sub-batches less one, less those that are parked",
                begin.len()
            )));
        }
        let on_device = self.machine.kv_ref().sides.device;
        for group in begin.iter().flat_map(|b| &b.groups) {
            if group.tokens != 1 || group.wants != Wants::Last {
                return Err(Error::usage("rows of a cohort are single tokens that want logits"));
            }
            let moves = swaps.iter().any(|(id, _)| *id == group.request)
                || iteration.moves.iter().any(|m| m.request == group.request);
            if on_device && (self.side(group.request) != Some(Side::Host) || moves) {
                return Err(Error::usage("sequences of a cohort live on the host, and stay there"));
            }
        }
        Ok(())
    }

    /// Ends the parking of a sequence's row and of its cohort's rows, whose tokens must start over.
    pub(super) fn unpark(&mut self, id: RequestId) {
        for request in self.machine.leave(id) {
            self.release(request);
        }
    }

    /// Returns an error for sequences whose rows are parked.
    pub(super) fn check_unparked(&self, ids: impl Iterator<Item = RequestId>) -> Result<()> {
        let rows = self.machine.cohorts().flat_map(|(_, p)| p.groups.iter().map(|g| (g.request, p.at)));
        let parked: HashMap<RequestId, u32> = rows.collect();
        for id in ids {
            if let Some(layer) = parked.get(&id) {
                return Err(Error::usage(format!(
                    "sequence {} has a row parked at layer {layer}: it goes on with its cohort",
                    id.slot
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
