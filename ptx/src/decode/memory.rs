//! Loads, stores, atomics, asynchronous copies, hints (PTX ISA 9.7.9, 9.7.13).

use super::arithmetic::class;
use super::{Decoder, Result, modifiers::Modifiers};
use crate::instruction::{Access, Atomic, AtomicOp, Op, Place};
use crate::memory::{Scope, Semantics};
use crate::syntax::{Operand, Statement};
use crate::types::{Class, Register, Type};

const SCOPES: [(&str, Scope); 4] =
    [("cta", Scope::Cta), ("cluster", Scope::Gpu), ("gpu", Scope::Gpu), ("sys", Scope::Sys)];

fn place(m: &mut Modifiers<'_>) -> Place {
    let known = [
        ("global", Place::Global),
        ("shared", Place::Shared),
        ("shared::cta", Place::Shared),
        ("local", Place::Local),
        ("param", Place::Param),
        ("const", Place::Constant),
    ];
    m.one(&known).unwrap_or(Place::Generic)
}

/// Hints of caching change no result.
fn drop_hints(m: &mut Modifiers<'_>) {
    m.drop_beginning("L1::");
    m.drop_beginning("L2::");
    for hint in ["ca", "cg", "cs", "lu", "cv", "wb", "wt"] {
        m.flag(hint);
    }
}

impl Decoder<'_> {
    pub(super) fn access(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        if m.flag("L2::cache_hint") {
            return Err("cache policies are unknown".into());
        }
        let store = name == "st";
        let constant = m.flag("nc") || name == "ldu";
        let order = m.one(&[
            ("weak", Semantics::Weak),
            ("volatile", Semantics::Volatile),
            ("relaxed", Semantics::Relaxed),
            ("acquire", Semantics::Acquire),
            ("release", Semantics::Release),
        ]);
        let scope = m.one(&SCOPES);
        let place = place(m);
        let scoped = matches!(order, Some(Semantics::Relaxed | Semantics::Acquire | Semantics::Release));
        if scoped != scope.is_some()
            || constant && (order.is_some() || place != Place::Global)
            || order == Some(if store { Semantics::Acquire } else { Semantics::Release })
        {
            return Err("this order is unknown here".into());
        }
        let semantics = if constant { Semantics::Constant } else { order.unwrap_or(Semantics::Weak) };
        drop_hints(m);
        let count = m.one(&[("v2", 2u8), ("v4", 4)]).unwrap_or(1);
        let kind = m.kind()?;
        if kind == Type::Pred || kind.bytes() * u32::from(count) > 16 {
            return Err("more than 16 bytes, or a predicate".into());
        }
        let [first, second] = self.operands(s)?;
        let (value, address) = if store { (second, first) } else { (first, second) };
        let address = self.address(address)?;
        let values = match (value, count) {
            (Operand::Vector(all), _) if all.len() == usize::from(count) => all.as_slice(),
            (_, 1) => std::slice::from_ref(value),
            _ => return Err(format!("{count} registers expected")),
        };
        let mut registers = [Register { class: Class::W32, index: 0 }; 4];
        for (register, value) in registers.iter_mut().zip(values) {
            *register = match value {
                Operand::Register(r) if r.class.bits() >= kind.bits().max(16) => *r,
                Operand::Register(_) => return Err("the register's size".into()),
                _ if store => self.read_register(value, class(kind)?)?,
                _ => return Err("a register expected".into()),
            };
        }
        let access = Access {
            place,
            bytes: kind.bytes() as u8,
            count,
            signed: kind.is_signed(),
            semantics,
            address,
            registers,
        };
        Ok(if store { Op::Store(access) } else { Op::Load(access) })
    }

    pub(super) fn atomic(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        m.one(&[("relaxed", ()), ("acquire", ()), ("release", ()), ("acq_rel", ())]);
        m.one(&SCOPES);
        let place = place(m);
        let op = m.must(&[
            ("add", AtomicOp::Add),
            ("exch", AtomicOp::Exchange),
            ("cas", AtomicOp::CompareSwap),
            ("min", AtomicOp::Min),
            ("max", AtomicOp::Max),
            ("and", AtomicOp::And),
            ("or", AtomicOp::Or),
            ("xor", AtomicOp::Xor),
            ("inc", AtomicOp::Inc),
            ("dec", AtomicOp::Dec),
        ])?;
        m.flag("noftz");
        let kind = m.kind()?;
        let float = !kind.is_integer();
        if float && op != AtomicOp::Add || matches!(op, AtomicOp::Inc | AtomicOp::Dec) && kind.bits() != 32 {
            return Err("this operation of this type".into());
        }
        let class = class(kind)?;
        let swap = op == AtomicOp::CompareSwap;
        let returns = name == "atom";
        if s.operands.len() != 2 + usize::from(swap) + usize::from(returns) {
            return Err("the number of operands".into());
        }
        let (d, rest) = if returns {
            let d = Register { class, index: self.to(&s.operands[0], class)? };
            (Some(d), &s.operands[1..])
        } else {
            (None, &s.operands[..])
        };
        let address = self.address(&rest[0])?;
        let a = self.read_register(&rest[1], class)?;
        let b = if swap { Some(self.read_register(&rest[2], class)?) } else { None };
        Ok(Op::Atomic(Box::new(Atomic { op, kind, place, address, d, a, b })))
    }

    /// cp.async
    pub(super) fn copy(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        if m.word() != Some("async") {
            return Err("`cp.async` expected".into());
        }
        if m.flag("bulk") {
            return self.bulk(m, s);
        }
        if m.flag("commit_group") {
            self.operands::<0>(s)?;
            return Ok(Op::CopyCommit);
        }
        if m.flag("wait_all") {
            self.operands::<0>(s)?;
            return Ok(Op::CopyWaitAll);
        }
        if m.flag("wait_group") {
            let [Operand::Integer(groups)] = self.operands(s)? else {
                return Err("a number of groups expected".into());
            };
            return Ok(Op::CopyWait { groups: *groups as u32 });
        }
        let all = m.must(&[("cg", false), ("ca", true)])?;
        m.must(&[("shared", ()), ("shared::cta", ())])?;
        m.must(&[("global", ())])?;
        if m.flag("L2::cache_hint") {
            return Err("cache policies are unknown".into());
        }
        drop_hints(m);
        if !matches!(s.operands.len(), 3 | 4) {
            return Err("3 or 4 operands expected".into());
        }
        let bytes = match s.operands[2] {
            Operand::Integer(16) => 16,
            Operand::Integer(bytes @ (4 | 8)) if all => bytes as u32,
            _ => return Err("16 bytes expected, or of `.ca` 4 or 8".into()),
        };
        let (to, from) = (self.address(&s.operands[0])?, self.address(&s.operands[1])?);
        let source = match s.operands.get(3) {
            Some(source) => Some(self.read(source, Class::W32)?),
            None => None,
        };
        Ok(Op::CopyAsync { to, from, bytes, source })
    }

    pub(super) fn fence(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        self.operands::<0>(s)?;
        if name == "membar" {
            let levels = [("cta", Scope::Cta), ("gl", Scope::Gpu), ("sys", Scope::Sys)];
            return Ok(Op::Fence { scope: m.must(&levels)? });
        }
        // Between ways to the same memory, which are one here.
        if m.flag("proxy") {
            m.must(&[("async", ())])?;
            m.one(&[("global", ()), ("shared::cta", ()), ("shared::cluster", ())]);
            return Ok(Op::Nothing);
        }
        m.flag("mbarrier_init");
        m.one(&[("sc", ()), ("acq_rel", ()), ("acquire", ()), ("release", ())]);
        Ok(Op::Fence { scope: m.must(&SCOPES)? })
    }

    /// setmaxnreg: registers here are as many as the text has.
    pub(super) fn max_registers(&mut self, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        m.must(&[("inc", ()), ("dec", ())])?;
        for word in ["sync", "aligned", "u32"] {
            m.must(&[(word, ())])?;
        }
        match self.operands(s)? {
            [Operand::Integer(24..=256)] => Ok(Op::Nothing),
            _ => Err("24 to 256 registers expected".into()),
        }
    }

    /// What a result does not depend on. A launch here begins when the one before has ended.
    pub(super) fn hint(&mut self, name: &str, m: &mut Modifiers<'_>, s: &Statement<'_>) -> Result<Op> {
        if name == "griddepcontrol" {
            m.must(&[("wait", ()), ("launch_dependents", ())])?;
            self.operands::<0>(s)?;
            return Ok(Op::Nothing);
        }
        place(m);
        m.one(&[("L1", ()), ("L2", ())]);
        drop_hints(m);
        match s.operands.first() {
            Some(address) => drop(self.address(address)?),
            None => return Err("an address expected".into()),
        }
        Ok(Op::Nothing)
    }
}
