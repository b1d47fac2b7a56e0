//! One instruction after the other.

use super::Context;
use super::lanes::{bits, map, put};
use super::together::Meeting;
use super::warp::{State, Warp};
use crate::fault::{FaultKind, Outcome, Problem};
use crate::instruction::{Clock, Op, Place};
use crate::types::{Class, Register};

/// Why a warp does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// Another warp has its turn.
    Slice,
    /// It is at a barrier.
    Barrier {
        id: u32,
        count: Option<u32>,
        arrive: bool,
    },
    Done,
}

impl Warp {
    /// Runs until something stops it.
    pub(super) fn run(&mut self, cx: &mut Context<'_>, spent: &mut u64) -> Outcome<Stop> {
        let code = &cx.kernel.code;
        for _ in 0..cx.options.turn.max(1) {
            if self.must_reconverge() {
                self.reconverge()?;
            }
            let instruction = &code[self.pc as usize];
            let mask = match instruction.guard {
                None => self.active,
                Some((p, negated)) => {
                    let p = self.predicates[p as usize];
                    self.active & if negated { !p } else { p }
                }
            };
            *spent += 1;
            cx.stats.instructions += 1;
            cx.stats.lane_instructions += u64::from(mask.count_ones());
            cx.stats.divergent += u64::from(mask != self.live);
            if let Some(budget) = cx.options.budget
                && *spent > budget
            {
                return Err(Problem::of_warp(FaultKind::Budget(budget)));
            }
            match &instruction.op {
                Op::Branch { target } => self.branch(mask, *target),
                Op::Exit => {
                    if self.has_flying(mask) {
                        let problem = "asynchronous copies or products that nobody waited for".into();
                        return Err(Problem::of_warp(FaultKind::Operand(problem)));
                    }
                    self.exit(mask);
                    if self.state == State::Done {
                        return Ok(Stop::Done);
                    }
                }
                _ if mask == 0 => self.pc += 1,
                op => {
                    if let Some(members) = members(op) {
                        let among = if cx.options.excuse_exited { self.live } else { self.present };
                        let meeting = match members {
                            Members::Named(slot) => self.meet(slot, mask, among)?,
                            Members::Block => self.gather(among, mask)?,
                            Members::All => self.gather(u32::MAX, mask)?,
                        };
                        if meeting == Meeting::Parked {
                            continue;
                        }
                    }
                    if let Op::Barrier { id, count, arrive } = op {
                        return self.barrier(*id, *count, *arrive);
                    }
                    self.execute(cx, op, mask)?;
                    self.pc += 1;
                    if std::mem::take(&mut self.gives_way) {
                        break;
                    }
                }
            }
        }
        Ok(Stop::Slice)
    }

    /// All lanes must say the same.
    fn barrier(&self, id: u32, count: Option<u32>, arrive: bool) -> Outcome<Stop> {
        let first = self.active.trailing_zeros() as usize;
        let uniform = |slot: u32| {
            let values = &self.words[slot as usize];
            let same = (0..32).all(|i| self.active >> i & 1 == 0 || values[i] == values[first]);
            let problem = || FaultKind::Operand("lanes of a warp are at different barriers".into());
            if same { Ok(values[first]) } else { Err(Problem::of_warp(problem())) }
        };
        Ok(Stop::Barrier { id: uniform(id)?, count: count.map(uniform).transpose()?, arrive })
    }

    fn execute(&mut self, cx: &mut Context<'_>, op: &Op, mask: u32) -> Outcome {
        match *op {
            Op::Move32 { d, a } => {
                let v = self.words[a as usize];
                put(&mut self.words[d as usize], v, mask);
            }
            Op::Move64 { d, a } => {
                let v = self.doubles[a as usize];
                put(&mut self.doubles[d as usize], v, mask);
            }
            Op::MovePred { d, a } => self.set_predicate(d, self.predicates[a as usize], mask),
            Op::Pack { d, ref parts } => self.pack(d, parts, mask),
            Op::Unpack { ref parts, a } => self.unpack(parts, a, mask),
            Op::Clock { d, clock: Clock::Clock | Clock::GlobalTimer } => {
                self.set_values(d, [cx.stats.instructions; 32], mask);
            }
            Op::Select { d, a, b, p } => {
                let p = self.predicates[p as usize];
                let of = |index| self.values(Register { index, ..d });
                let (a, b) = (of(a), of(b));
                let v = std::array::from_fn(|i| if p >> i & 1 == 1 { a[i] } else { b[i] });
                self.set_values(d, v, mask);
            }
            Op::Int { op, width, d, a, b } => self.int(op, width, [d, a, b], mask),
            Op::IntUnary { op, width, d, a } => self.int_unary(op, width, [d, a], mask),
            Op::Shift { op, width, d, a, by } => self.shift(op, width, [d, a, by], mask),
            Op::Count { op, wide, d, a } => self.count(op, wide, [d, a], mask),
            Op::MadLow { .. } | Op::MadHigh { .. } | Op::Wide { .. } => self.multiply(op, mask),
            Op::Triple { op, d, a, b, c } => self.triple(op, [d, a, b, c], mask),
            Op::Extract { .. } | Op::Insert { .. } => self.field(op, mask),
            Op::Logic { op, d, a, b } => {
                let (a, b) = (self.predicates[a as usize], self.predicates[b as usize]);
                self.set_predicate(d, super::compare::logic(op, a, b), mask);
            }
            Op::NotPred { d, a } => self.set_predicate(d, !self.predicates[a as usize], mask),
            Op::SetPred { ref compare, d, other } => self.set_pred(compare, d, other, mask),
            Op::Set { ref compare, float, d } => self.set(compare, float, d, mask),
            Op::Float { op, mode, d, a, b } => self.float(op, mode, [d, a, b], mask),
            Op::Fma { mode, d, a, b, c } => self.fma(mode, [d, a, b, c], mask),
            Op::FloatUnary { op, mode, d, a } => self.float_unary(op, mode, [d, a], mask),
            Op::Double { op, d, a, b } => self.double(op, [d, a, b], mask),
            Op::DoubleFma { d, a, b, c } => self.double_fma([d, a, b, c], mask),
            Op::DoubleUnary { op, d, a } => self.double_unary(op, [d, a], mask),
            Op::Half { half, d, a, b, c } => self.half(half, [d, a, b, c], mask),
            Op::Extend { d, a } => {
                let v = map(&self.words[a as usize], u64::from);
                put(&mut self.doubles[d as usize], v, mask);
            }
            Op::Low { d, a, mask: keep } => {
                let v = map(&self.doubles[a as usize], |x| x as u32 & keep);
                put(&mut self.words[d as usize], v, mask);
            }
            Op::Low32 { d, a, mask: keep } => {
                let v = map(&self.words[a as usize], |x| x & keep);
                put(&mut self.words[d as usize], v, mask);
            }
            Op::Convert(ref convert) => self.convert(convert, mask),
            Op::Load(ref access) => return self.load(cx, access, mask),
            Op::Store(ref access) => return self.store(cx, access, mask),
            Op::Atomic(ref atomic) => return self.atomic(cx, atomic, mask),
            Op::IsSpace { place, d, a } => {
                let a = self.doubles[a as usize];
                self.set_predicate(d, bits(|i| is_space(place, a[i])), mask);
            }
            Op::CopyAsync { ref to, ref from, bytes, source } => {
                return self.copy(cx, (to, from), bytes, source, mask);
            }
            Op::CopyCommit => self.commit_copies(mask),
            Op::CopyWait { groups } => return self.wait_copies(cx, Some(groups), mask),
            Op::CopyWaitAll => return self.wait_copies(cx, None, mask),
            Op::Shuffle(ref shuffle) => return self.shuffle(shuffle, mask),
            Op::Vote { mode, d, a, negated, mask: members } => {
                let yes = self.predicates[a as usize];
                self.vote(mode, d, if negated { !yes } else { yes }, members, mask);
            }
            Op::ActiveMask { d } => put(&mut self.words[d as usize], [mask; 32], mask),
            Op::Reduce { op, signed, d, a, mask: members } => self.reduce(op, signed, [d, a, members], mask),
            Op::Mma(ref mma) => {
                cx.stats.mma += 1;
                self.mma(mma);
            }
            Op::LoadMatrix { count, transposed, d, ref address } => {
                return self.load_matrix(cx, count, transposed, d, address);
            }
            Op::MoveMatrix { d, a } => self.move_matrix(d, a),
            Op::MbarrierInit { ref address, count } => return self.mbarrier_init(cx, address, count, mask),
            Op::MbarrierArrive { ref address, bytes } => {
                return self.mbarrier_arrive(cx, address, bytes, mask);
            }
            Op::MbarrierTest { d, ref address, parity } => {
                return self.mbarrier_test(cx, d, address, parity, mask);
            }
            Op::BulkCopy(ref bulk) => return self.bulk_copy(cx, bulk, mask),
            Op::Wgmma(ref wgmma) => return self.wgmma(cx, wgmma),
            Op::WgmmaCommit => self.commit_products(),
            Op::WgmmaWait { groups } => return self.wait_products(cx, groups),
            Op::Fence { scope } => cx.memory.fence(scope),
            Op::Nanosleep => std::thread::yield_now(),
            Op::Trap => return Err(Problem::of_lane(mask.trailing_zeros() as usize, FaultKind::Trap)),
            // Done before.
            Op::Branch { .. }
            | Op::Exit
            | Op::Barrier { .. }
            | Op::WarpBarrier { .. }
            | Op::WgmmaFence
            | Op::Nothing => {}
        }
        Ok(())
    }

    fn pack(&mut self, d: Register, parts: &[Register], mask: u32) {
        let width = if parts.first().is_some_and(|p| p.class == Class::W32) { 32 } else { 16 };
        let mut v = [0; 32];
        for part in parts.iter().rev() {
            let low = self.values(*part);
            v = std::array::from_fn(|i| v[i] << width | low[i]);
        }
        self.set_values(d, v, mask);
    }

    fn unpack(&mut self, parts: &[Register], a: Register, mask: u32) {
        let mut v = self.values(a);
        for part in parts {
            self.set_values(*part, v, mask);
            v = v.map(|v| v >> part.class.bits());
        }
    }
}

/// The lanes that must execute an instruction together.
enum Members {
    /// Those of a mask.
    Named(u32),
    /// All that the block has, or those of them that have not exited.
    Block,
    /// All 32.
    All,
}

fn members(op: &Op) -> Option<Members> {
    match op {
        Op::Shuffle(shuffle) => Some(Members::Named(shuffle.mask)),
        Op::Vote { mask, .. } | Op::Reduce { mask, .. } | Op::WarpBarrier { mask } => {
            Some(Members::Named(*mask))
        }
        Op::Barrier { .. } => Some(Members::Block),
        Op::Wgmma(_) | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait { .. } => Some(Members::All),
        Op::Mma(_) | Op::LoadMatrix { .. } | Op::MoveMatrix { .. } => Some(Members::All),
        _ => None,
    }
}

fn is_space(place: Place, address: u64) -> bool {
    use crate::memory::{CONSTANT_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
    let window = address & !(SHARED_WINDOW - 1);
    match place {
        Place::Shared => window == SHARED_WINDOW,
        Place::Local => window == LOCAL_WINDOW,
        Place::Param => window == PARAM_WINDOW,
        Place::Constant => window == CONSTANT_WINDOW,
        Place::Global | Place::Generic => window == 0,
    }
}
