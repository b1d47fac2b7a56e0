//! A warp: registers of 32 lanes, and which of them are where.
//!
//! Lanes that branched apart run one path at a time, the one with the least program counter first; paths that meet are
//! one again. Compilers lay code out so that this is where branches join.

use super::copies::Copies;
use super::lanes::{Doubles, Words, bits};
use super::wgmma::Products;
use crate::fault::{FaultKind, Outcome, Problem};
use crate::kernel::{Kernel, Special};
use crate::types::{Class, Register};

/// Where some lanes are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path {
    pub pc: u32,
    pub lanes: u32,
    /// Waits for other lanes to come to the same instruction.
    parked: bool,
}

/// Where a warp's threads are in the launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Position {
    pub block: [u32; 3],
    pub grid: [u32; 3],
    pub threads: [u32; 3],
    pub dynamic_shared: u32,
    pub total_shared: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Ready,
    /// At this barrier.
    Waiting(u32),
    Done,
}

pub(crate) struct Warp {
    pub words: Vec<Words>,
    pub doubles: Vec<Doubles>,
    pub predicates: Vec<u32>,
    pub number: u32,
    /// Lanes that there are.
    pub present: u32,
    /// Lanes that have not exited.
    pub live: u32,
    /// Lanes at `pc`.
    pub active: u32,
    pub pc: u32,
    others: Vec<Path>,
    /// The least program counter of the others.
    next: u32,
    pub copies: Copies,
    pub products: Products,
    /// It waits for others in a loop: its turn is over.
    pub gives_way: bool,
    /// Of each lane, one after the other.
    pub local: Vec<u8>,
    pub local_bytes: usize,
    pub state: State,
}

impl Warp {
    pub fn new(kernel: &Kernel, number: u32) -> Warp {
        let sizes = &kernel.files.sizes;
        let mut warp = Warp {
            words: vec![[0; 32]; sizes.words as usize],
            doubles: vec![[0; 32]; sizes.doubles as usize],
            predicates: vec![0; sizes.predicates as usize],
            number,
            present: 0,
            live: 0,
            active: 0,
            pc: 0,
            others: Vec::new(),
            next: u32::MAX,
            copies: Copies::default(),
            products: Products::default(),
            gives_way: false,
            local: vec![0; kernel.local_bytes as usize * 32],
            local_bytes: kernel.local_bytes as usize,
            state: State::Done,
        };
        for (value, at) in kernel.files.words() {
            warp.words[at] = [value; 32];
        }
        for (value, at) in kernel.files.doubles() {
            warp.doubles[at] = [value; 32];
        }
        for (value, at) in kernel.files.predicates() {
            warp.predicates[at] = if value { u32::MAX } else { 0 };
        }
        warp
    }

    /// Puts the warp at the beginning of a block. Registers keep what they had: a kernel may not read them unwritten.
    pub fn start(&mut self, kernel: &Kernel, position: &Position) {
        let [x, y, z] = position.threads;
        let present = (x * y * z - self.number * 32).min(32);
        self.present = u32::MAX >> (32 - present);
        self.live = self.present;
        (self.active, self.pc, self.next) = (self.live, 0, u32::MAX);
        self.others.clear();
        self.copies = Copies::default();
        self.products = Products::default();
        self.gives_way = false;
        self.local.fill(0);
        self.state = State::Ready;
        for (special, at) in kernel.files.specials() {
            let number = self.number;
            self.words[at] = std::array::from_fn(|lane| value(special, position, number, lane as u32));
        }
    }

    /// Takes the path of the least program counter, with all lanes that are there.
    ///
    /// # Errors
    /// All paths wait for each other.
    pub fn reconverge(&mut self) -> Outcome {
        if self.active != 0 {
            self.others.push(Path { pc: self.pc, lanes: self.active, parked: false });
            self.active = 0;
        }
        let ready = self.others.iter().filter(|p| !p.parked).map(|p| p.pc).min();
        let Some(pc) = ready else {
            let least = self.others.iter().min_by_key(|p| p.pc).copied();
            let Some(path) = least else { return Ok(()) };
            self.pc = path.pc;
            let kind = FaultKind::Diverged { active: path.lanes, wanted: self.live };
            return Err(Problem::of_warp(kind));
        };
        self.pc = pc;
        let mut active = 0;
        self.others.retain(|p| {
            let here = p.pc == pc;
            active |= if here { p.lanes } else { 0 };
            !here
        });
        self.active = active;
        self.next = self.others.iter().map(|p| p.pc).min().unwrap_or(u32::MAX);
        Ok(())
    }

    /// Whether another path is at or before this one.
    pub fn must_reconverge(&self) -> bool {
        self.pc >= self.next || self.active == 0
    }

    /// `taken` of the active lanes go to `target`, the rest on.
    pub fn branch(&mut self, taken: u32, target: u32) {
        let rest = self.active & !taken;
        let after = self.pc + 1;
        if rest == 0 {
            self.pc = target;
        } else if taken == 0 {
            self.pc = after;
        } else {
            self.others.push(Path { pc: target, lanes: taken, parked: false });
            self.next = self.next.min(target);
            (self.active, self.pc) = (rest, after);
        }
    }

    /// Ends these of the active lanes.
    pub fn exit(&mut self, lanes: u32) {
        self.live &= !lanes;
        self.active &= !lanes;
        self.pc += 1;
        // Those that wait for the ones that have gone look again.
        for path in &mut self.others {
            path.parked = false;
        }
        if self.live == 0 {
            self.state = State::Done;
        }
    }

    /// The active lanes wait here for others to come.
    pub fn park(&mut self) {
        self.others.push(Path { pc: self.pc, lanes: self.active, parked: true });
        self.active = 0;
    }

    /// A register's values, those of 16 and 32 bits with zeros above.
    pub fn values(&self, register: Register) -> Doubles {
        match register.class {
            Class::W64 => self.doubles[register.index as usize],
            Class::Pred => {
                let bits = self.predicates[register.index as usize];
                std::array::from_fn(|i| u64::from(bits >> i & 1))
            }
            Class::W16 | Class::W32 => self.words[register.index as usize].map(u64::from),
        }
    }

    /// Writes the low bits that the register has.
    pub fn set_values(&mut self, register: Register, values: Doubles, mask: u32) {
        let at = register.index as usize;
        match register.class {
            Class::W64 => super::lanes::put(&mut self.doubles[at], values, mask),
            Class::Pred => {
                let new = bits(|i| values[i] & 1 == 1);
                self.predicates[at] = self.predicates[at] & !mask | new & mask;
            }
            Class::W16 => super::lanes::put(&mut self.words[at], values.map(|v| v as u32 & 0xffff), mask),
            Class::W32 => super::lanes::put(&mut self.words[at], values.map(|v| v as u32), mask),
        }
    }
}

/// A special register of a lane.
fn value(special: Special, position: &Position, warp: u32, lane: u32) -> u32 {
    let [x, y, z] = position.threads;
    let thread = warp * 32 + lane;
    match special {
        Special::Tid(0) => thread % x,
        Special::Tid(1) => thread / x % y,
        Special::Tid(_) => thread / (x * y),
        Special::Ntid(axis) => position.threads[axis],
        Special::Ctaid(axis) => position.block[axis],
        Special::Nctaid(axis) => position.grid[axis],
        Special::LaneId => lane,
        Special::WarpId => warp,
        Special::NWarpId => (x * y * z).div_ceil(32),
        Special::SmId => 0,
        Special::NSmId => 1,
        Special::LaneMaskEq => 1 << lane,
        Special::LaneMaskLt => (1 << lane) - 1,
        Special::LaneMaskLe => ((2u64 << lane) - 1) as u32,
        Special::LaneMaskGt => !(((2u64 << lane) - 1) as u32),
        Special::LaneMaskGe => !((1 << lane) - 1),
        Special::DynamicShared => position.dynamic_shared,
        Special::TotalShared => position.total_shared,
    }
}
