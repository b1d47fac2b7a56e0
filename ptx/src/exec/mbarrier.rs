//! Barriers in shared memory that count arrivals and bytes (PTX ISA 9.7.13.15).
//!
//! A phase ends when the pending arrivals and the announced bytes are both zero; the next one begins at once. The 64 bits
//! are opaque to kernels: phase, arrivals of a phase, pending arrivals, bytes, and a mark.

use super::Context;
use super::access::align;
use super::lanes::{bits, lanes};
use super::spaces::Shared;
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem, Space};
use crate::instruction::{Address, Slot};

struct State {
    phase: bool,
    count: u64,
    pending: u64,
    /// Announced and not yet there.
    bytes: i64,
}

const MARK: u64 = 1 << 63;
const MOST: u64 = (1 << 20) - 1;

impl State {
    fn load(shared: &Shared, address: u64) -> Result<State, FaultKind> {
        align(Space::Shared, address, 8)?;
        let mut word = [0; 8];
        shared.read(address, &mut word)?;
        let word = u64::from_le_bytes(word);
        if word & MARK == 0 {
            return Err(FaultKind::Operand(format!("no mbarrier is at {address:#x}")));
        }
        let bytes = ((word << 1) as i64) >> 43;
        Ok(State { phase: word & 1 == 1, count: word >> 1 & MOST, pending: word >> 21 & MOST, bytes })
    }

    /// Ends the phase if it is complete.
    fn store(mut self, shared: &mut Shared, address: u64) -> Result<(), FaultKind> {
        if self.pending == 0 && self.bytes == 0 {
            self.phase = !self.phase;
            self.pending = self.count;
        }
        let bytes = self.bytes as u64 & ((1 << 21) - 1);
        let word = MARK | bytes << 42 | self.pending << 21 | self.count << 1 | u64::from(self.phase);
        shared.write(address, &word.to_le_bytes())
    }
}

/// Bytes of a bulk copy are there.
pub(super) fn bytes_arrived(shared: &mut Shared, address: u64, bytes: u32) -> Result<(), FaultKind> {
    let mut state = State::load(shared, address)?;
    state.bytes -= i64::from(bytes);
    state.store(shared, address)
}

fn arrive(shared: &mut Shared, address: u64, bytes: u32) -> Result<(), FaultKind> {
    let mut state = State::load(shared, address)?;
    state.pending = state.pending.checked_sub(1).ok_or_else(|| {
        FaultKind::Operand(format!("more arrivals than the {} of a phase at {address:#x}", state.count))
    })?;
    state.bytes += i64::from(bytes);
    state.store(shared, address)
}

impl Warp {
    pub(super) fn mbarrier_init(
        &mut self,
        cx: &mut Context<'_>,
        address: &Address,
        count: Slot,
        mask: u32,
    ) -> Outcome {
        let addresses = self.addresses(address);
        for lane in lanes(mask) {
            let count = u64::from(self.words[count as usize][lane]);
            let done = align(Space::Shared, addresses[lane], 8).and_then(|()| {
                if count == 0 || count > MOST {
                    return Err(FaultKind::Operand(format!("an mbarrier of {count} arrivals")));
                }
                State { phase: false, count, pending: count, bytes: 0 }.store(&mut cx.shared, addresses[lane])
            });
            done.map_err(|kind| Problem::of_lane(lane, kind))?;
        }
        Ok(())
    }

    /// One arrival of each lane, which announces `bytes` with it.
    pub(super) fn mbarrier_arrive(
        &mut self,
        cx: &mut Context<'_>,
        address: &Address,
        bytes: Option<Slot>,
        mask: u32,
    ) -> Outcome {
        let addresses = self.addresses(address);
        for lane in lanes(mask) {
            let bytes = bytes.map_or(0, |b| self.words[b as usize][lane]);
            arrive(&mut cx.shared, addresses[lane], bytes).map_err(|kind| Problem::of_lane(lane, kind))?;
        }
        Ok(())
    }

    /// Whether the phase of this parity has ended. Copies that it waits for land here, as late as they may.
    pub(super) fn mbarrier_test(
        &mut self,
        cx: &mut Context<'_>,
        d: Slot,
        address: &Address,
        parity: Slot,
        mask: u32,
    ) -> Outcome {
        let addresses = self.addresses(address);
        let mut ended = [false; 32];
        for lane in lanes(mask) {
            let at = addresses[lane];
            let parity = self.words[parity as usize][lane] & 1 == 1;
            let mut test = || -> Result<bool, FaultKind> {
                if State::load(&cx.shared, at)?.phase == parity {
                    super::bulk::land_for(cx, at)?;
                }
                Ok(State::load(&cx.shared, at)?.phase != parity)
            };
            ended[lane] = test().map_err(|kind| Problem::of_lane(lane, kind))?;
        }
        let ended = bits(|lane| ended[lane]);
        // Whoever is waited for must have a turn.
        self.gives_way |= ended & mask != mask;
        self.set_predicate(d, ended, mask);
        Ok(())
    }
}
