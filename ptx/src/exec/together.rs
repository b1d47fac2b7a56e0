//! What lanes do together: shuffles, votes, reductions (PTX ISA 9.7.9.6, 9.7.13).

use super::atomic::apply;
use super::lanes::{Words, lanes, put};
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem};
use crate::instruction::{AtomicOp, Shuffle, ShuffleMode, Slot, VoteMode};
use crate::types::{Register, Type};

/// Whether the lanes that an instruction needs are here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meeting {
    Complete,
    /// The active lanes wait.
    Parked,
}

impl Warp {
    /// All lanes that the active ones name, of those `among` which are waited for, must execute this too.
    pub(super) fn meet(&mut self, members: Slot, mask: u32, among: u32) -> Outcome<Meeting> {
        let members = &self.words[members as usize];
        let mut wanted = 0;
        for lane in lanes(mask) {
            if members[lane] >> lane & 1 == 0 {
                let kind = FaultKind::Operand(format!("the mask {:#x} is without the lane", members[lane]));
                return Err(Problem::of_lane(lane, kind));
            }
            wanted |= members[lane];
        }
        self.gather(wanted & among, mask)
    }

    /// `wanted` lanes must execute this.
    pub(super) fn gather(&mut self, wanted: u32, mask: u32) -> Outcome<Meeting> {
        let missing = wanted & !mask;
        if missing == 0 {
            return Ok(Meeting::Complete);
        }
        if missing & self.active != 0 || missing & !self.live != 0 {
            // They are here, and their predicate is false; or they have exited.
            return Err(Problem::of_warp(FaultKind::Diverged { active: mask, wanted }));
        }
        self.park();
        Ok(Meeting::Parked)
    }

    pub(super) fn shuffle(&mut self, s: &Shuffle, mask: u32) -> Outcome {
        let (b, c) = (self.words[s.b as usize], self.words[s.c as usize]);
        let members = self.words[s.mask as usize];
        let a = self.words[s.a as usize];
        let mut v: Words = [0; 32];
        let mut valid = 0;
        for lane in lanes(mask) {
            let (own, by, segment) = (lane as i32, (b[lane] & 31) as i32, (c[lane] >> 8 & 31) as i32);
            let last = own & segment | (c[lane] & 31) as i32 & !segment;
            let (from, within) = match s.mode {
                ShuffleMode::Up => (own - by, own - by >= last),
                ShuffleMode::Down => (own + by, own + by <= last),
                ShuffleMode::Butterfly => (own ^ by, own ^ by <= last),
                ShuffleMode::Index => {
                    let from = own & segment | by & !segment;
                    (from, from <= last)
                }
            };
            let from = if within { from as usize } else { lane };
            if mask & members[lane] & 1 << from == 0 {
                let kind = FaultKind::Operand(format!("lane {from} is read, which does not take part"));
                return Err(Problem::of_lane(lane, kind));
            }
            v[lane] = a[from];
            valid |= u32::from(within) << lane;
        }
        put(&mut self.words[s.d as usize], v, mask);
        if let Some(p) = s.valid {
            self.set_predicate(p, valid, mask);
        }
        Ok(())
    }

    pub(super) fn vote(&mut self, mode: VoteMode, d: Register, yes: u32, members: Slot, mask: u32) {
        let members = self.words[members as usize];
        let v = std::array::from_fn(|lane| {
            let voters = members[lane] & mask;
            u64::from(match mode {
                VoteMode::All => u32::from(yes & voters == voters),
                VoteMode::Any => u32::from(yes & voters != 0),
                VoteMode::Uniform => u32::from(yes & voters == voters || yes & voters == 0),
                VoteMode::Ballot => yes & voters,
            })
        });
        self.set_values(d, v, mask);
    }

    pub(super) fn reduce(&mut self, op: AtomicOp, signed: bool, [d, a, members]: [Slot; 3], mask: u32) {
        let (a, members) = (self.words[a as usize], self.words[members as usize]);
        let kind = if signed { Type::Signed(32) } else { Type::Unsigned(32) };
        let v = std::array::from_fn(|lane| {
            let values = lanes(members[lane] & mask).map(|i| u64::from(a[i]));
            values.reduce(|x, y| apply(op, kind, x, y, 0)).unwrap_or_default() as u32
        });
        put(&mut self.words[d as usize], v, mask);
    }
}
