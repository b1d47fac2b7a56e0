//! How long work takes in emulated time.

use super::Core;
use crate::device::clock::{Rates, Work};
use crate::device::emulated::op::{CopyDirection, Op};
use crate::device::runtime::Lane;

impl Core {
    /// Accounts for enqueued work: the control thread pays for issuing it, the lane for doing it.
    pub(super) fn enter_time(&self, lane: Lane, op: &Op) {
        let Some(clock) = &self.clock else { return };
        if !matches!(op, Op::Elapse(_)) {
            clock.spend(clock.rates().device.issue);
        }
        clock.enqueue(lane, seconds(clock.rates(), op));
    }
}

/// Modelled seconds of an operation. A launch itself counts only as a launch: its caller states the time of its work in
/// a separate operation ([`Op::Elapse`]).
fn seconds(rates: &Rates, op: &Op) -> f64 {
    let memory = |bytes: usize| rates.device.seconds(Work { flops: 0, bytes: bytes as u64 });
    match op {
        Op::Elapse(seconds) => *seconds,
        Op::Graph(ops) => ops.iter().map(|op| seconds(rates, op)).sum(),
        Op::Fill { len, .. } => memory(*len),
        Op::Kernel(_) | Op::Host(_) | Op::Pages(_) | Op::Uses { .. } => 0.0,
        _ => match op.copied() {
            Some((CopyDirection::ToDevice, bytes)) => rates.upload(bytes),
            Some((CopyDirection::ToHost, bytes)) => rates.download(bytes),
            // Each byte is read and written.
            Some((CopyDirection::Within, bytes)) => memory(2 * bytes),
            None => 0.0,
        },
    }
}
