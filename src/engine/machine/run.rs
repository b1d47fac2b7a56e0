//! A step: lower, issue, collect.

use std::ops::Range;

use super::RealMachine;
use super::carry::{What, put_f32, put_half, take_f32, take_half};
use super::device::{lane, rows_of};
use super::host::Mail;
use super::sizes::{Mode, mode};
use crate::cache::BlockTable;
use crate::device::accelerator::{Attend, RowSpan, Step, StepDesc, StepSeq};
use crate::device::runtime::{Event, Lane};
use crate::engine::executor::Want;
use crate::engine::host::HostSeq;
use crate::engine::input::{Input, Logits};
use crate::program::{
    Cargo, Group, Iteration, Kind, Kv, Op, Phase, Program, RequestId, Side, Unit, Wants, check, lower, order,
};
use crate::{Error, Result};

/// New tokens of one sequence.
#[derive(Clone, Copy)]
struct Piece<'a> {
    slot: u32,
    pages: &'a [u32],
    first: usize,
    tokens: &'a [u32],
    wants: Wants,
}

impl Piece<'_> {
    /// Its rows `from..to`, as a piece.
    fn part(&self, from: usize, to: usize) -> Self {
        let wants = match self.wants {
            Wants::Last if to < self.tokens.len() => Wants::Nothing,
            wants => wants,
        };
        Piece { first: self.first + from, tokens: &self.tokens[from..to], wants, ..*self }
    }

    fn group(&self) -> Group {
        let decode = self.tokens.len() == 1 && self.wants != Wants::Nothing;
        Group {
            request: RequestId { slot: self.slot, generation: 0 },
            phase: if decode { Phase::Decode } else { Phase::Prefill },
            first: self.first as u32,
            tokens: self.tokens.len() as u32,
            kv: Kv::Device,
            wants: self.wants,
        }
    }
}

/// Splits the rows of `pieces` into steps of at most `most` rows of logits each.
fn steps<'a>(pieces: &[Piece<'a>], most: usize) -> Vec<Vec<Piece<'a>>> {
    let mut steps = vec![Vec::new()];
    let mut left = most;
    for piece in pieces {
        let mut from = 0;
        while from < piece.tokens.len() {
            if left == 0 {
                steps.push(Vec::new());
                left = most;
            }
            let to = match piece.wants {
                Wants::All => piece.tokens.len().min(from + left),
                _ => piece.tokens.len(),
            };
            let part = piece.part(from, to);
            left -= part.group().wanted() as usize;
            steps.last_mut().expect("one at least").push(part);
            from = to;
        }
    }
    steps
}

/// What the issue of a program keeps track of.
struct Issue {
    waits: Vec<Vec<usize>>,
    /// Whether an operation of another unit waits for it.
    awaited: Vec<bool>,
    events: Vec<Option<Event>>,
    /// Rows that have come to the host and were taken.
    landed: Vec<bool>,
    lists: Vec<(Mode, Step)>,
    /// Behind the last keys and values only the host computes, all rows in one operation.
    alone: bool,
    epoch: u32,
}

impl RealMachine {
    pub(super) fn step(&mut self, inputs: &[Input<'_>], tables: &[&BlockTable], want: Want) -> Result<()> {
        self.logits.clear();
        self.argmax.clear();
        let pieces: Vec<Piece<'_>> = inputs
            .iter()
            .zip(tables)
            .enumerate()
            .filter(|(_, (input, _))| !input.tokens.is_empty())
            .map(|(slot, (input, table))| Piece {
                slot: slot as u32,
                pages: table.pages(),
                first: table.len(),
                tokens: input.tokens,
                wants: match input.logits {
                    Logits::None => Wants::Nothing,
                    Logits::Last => Wants::Last,
                    Logits::All => Wants::All,
                },
            })
            .collect();
        if pieces.is_empty() {
            return Ok(());
        }
        for step in steps(&pieces, self.device.limits.logit_rows) {
            let runtime = self.device.runtime.clone();
            if let Some(trace) = &mut self.trace {
                trace.begin_step(&*runtime)?;
            }
            let done = self.run_pieces(&step, want);
            // Nothing is in flight afterwards, whatever happened: pages may be given to others.
            let released = self.device.release_all();
            let idle = runtime.synchronize_all();
            done.and(released).and(idle)?;
            if let Some(trace) = &mut self.trace {
                trace.end_step(&*runtime)?;
            }
        }
        Ok(())
    }

    fn run_pieces(&mut self, pieces: &[Piece<'_>], want: Want) -> Result<()> {
        let groups: Vec<Group> = pieces.iter().map(Piece::group).collect();
        let iteration = Iteration::serial(groups, want == Want::Argmax);
        let program = lower(&self.placement, &iteration)?;
        if cfg!(debug_assertions) {
            check(&program, &self.placement, &iteration).map_err(|fault| Error::usage(fault.to_string()))?;
        }
        let rows: usize = pieces.iter().map(|p| p.tokens.len()).sum();
        if rows > self.device.limits.rows {
            return Err(Error::Capacity(format!(
                "a step of {rows} rows, {} were planned for; use smaller chunks",
                self.device.limits.rows
            )));
        }
        let tokens: Vec<u32> = pieces.iter().flat_map(|p| p.tokens).copied().collect();
        let mut wanted = Vec::new();
        let mut row = 0;
        for piece in pieces {
            let n = piece.tokens.len();
            match piece.wants {
                Wants::Nothing => {}
                Wants::Last => wanted.push(row + n - 1),
                Wants::All => wanted.extend(row..row + n),
            }
            row += n;
        }
        let seqs: Vec<HostSeq<'_>> = pieces
            .iter()
            .map(|p| HostSeq {
                pages: p.pages,
                first_pos: p.first,
                n_rows: p.tokens.len(),
                tokens: HostSeq::ALL,
            })
            .collect();
        self.host.prepare(&seqs, &tokens, &wanted);
        let mut issue = self.begin(&program, pieces, &tokens, &wanted)?;
        let mut at = 0;
        while at < program.ops.len() {
            at += self.issue(&program, at, &mut issue, pieces)?;
        }
        self.collect(want, &wanted)
    }

    /// What the device has to know of the step, and who waits for whom.
    fn begin(
        &mut self,
        program: &Program,
        pieces: &[Piece<'_>],
        tokens: &[u32],
        wanted: &[usize],
    ) -> Result<Issue> {
        let ops = &program.ops;
        let waits = order::waits(program);
        let mut awaited = vec![false; ops.len()];
        for (at, waits) in waits.iter().enumerate() {
            for &w in waits {
                awaited[w] |= ops[w].unit != ops[at].unit;
            }
        }
        let rows = tokens.len();
        let mut cuts: Vec<usize> = ops
            .iter()
            .filter(|op| op.unit == Unit::Gpu && matches!(op.kind, Kind::Attend { .. }))
            .flat_map(|op| [op.rows.start as usize, op.rows.end as usize])
            .filter(|&cut| cut > 0 && cut < rows)
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let logit_rows: Vec<u32> = wanted.iter().map(|&r| r as u32).collect();
        let mut lists = Vec::new();
        let on_device = ops.iter().any(|op| op.unit == Unit::Gpu);
        for &(mode, memory) in self.device.steps.iter().filter(|_| on_device) {
            let mut row0 = 0;
            let seqs: Vec<StepSeq<'_>> = pieces
                .iter()
                .map(|p| {
                    let n_rows = p.tokens.len();
                    let side = mode[usize::from(p.group().phase == Phase::Decode)];
                    row0 += n_rows;
                    StepSeq {
                        pages: p.pages,
                        first_pos: p.first,
                        row0: row0 - n_rows,
                        n_rows,
                        attend: if side == Side::Device { Attend::Here } else { Attend::Elsewhere },
                    }
                })
                .collect();
            let desc = StepDesc {
                seqs: &seqs,
                tokens,
                logit_rows: &logit_rows,
                cuts: &cuts,
                epoch: 0,
                launch_rows: rows,
            };
            let d = &self.device;
            lists.push((mode, d.accel.prepare(Lane::Compute, &d.shape, &d.limits, &desc, memory)?));
        }
        let trimmed: Vec<&Op> = ops.iter().filter(|op| op.wanted_only).collect();
        let alone = trimmed.iter().all(|op| op.unit == Unit::Host)
            && trimmed.iter().filter(|op| op.kind == Kind::OutProj).count() == 1;
        let n = ops.len();
        Ok(Issue { waits, awaited, events: vec![None; n], landed: vec![false; n], lists, alone, epoch: 0 })
    }

    /// The lists that an operation of the device goes by.
    fn lists<'a>(&self, op: &Op, issue: &'a Issue) -> &'a Step {
        let of = op.layer.map(|l| mode(&self.placement.layers[l as usize]));
        let found = issue.lists.iter().find(|(mode, _)| of.is_none_or(|of| of == *mode));
        &found.expect("lists for every way of attending").1
    }

    /// Issues the operation at `at`, and those that are one with it; returns how many.
    fn issue(
        &mut self,
        program: &Program,
        at: usize,
        issue: &mut Issue,
        pieces: &[Piece<'_>],
    ) -> Result<usize> {
        let ops = &program.ops;
        let op = &ops[at];
        let n = fusible(ops, at);
        for i in at..at + n {
            for w in issue.waits[i].clone() {
                match (ops[w].unit, op.unit) {
                    // Computed by this thread, before.
                    (Unit::Host, _) => {}
                    (_, Unit::Host) => self.arrive(&ops[w], w, issue)?,
                    (_, unit) => {
                        let event = issue.events[w].as_ref().expect("recorded when issued");
                        self.device.runtime.wait(lane(unit), event)?;
                    }
                }
            }
        }
        let runtime = self.device.runtime.clone();
        let begun = self.trace.as_ref().map(|t| t.begin(op, &*runtime)).transpose()?;
        match (op.unit, op.kind) {
            (Unit::Host, _) => self.on_host(op, issue)?,
            (_, Kind::Stream { .. }) => self.device.fetch(op.layer.unwrap_or_default() as usize)?,
            (_, Kind::Carry { cargo, to }) => self.carry(op, cargo, to, issue)?,
            (_, Kind::PageIn { .. } | Kind::PageOut { .. }) => {
                let piece = &pieces[op.groups.start as usize];
                let tokens = match op.kind {
                    Kind::PageIn { .. } => piece.first,
                    _ => piece.first + piece.tokens.len(),
                };
                let l = op.layer.unwrap_or_default() as usize;
                let layer_bytes = self.pages.n_pages() * self.device.shape.page_bytes();
                self.device.move_staged(op, self.host.place(l), piece.pages, tokens, layer_bytes)?;
            }
            _ => {
                issue.epoch += 1;
                let epoch = issue.epoch;
                let step = self.lists(op, issue);
                match n {
                    1 => self.device.compute(op, step, epoch)?,
                    n => self.device.fused(op, &ops[at + 1], (n > 2).then(|| &ops[at + 2]), step, epoch)?,
                }
            }
        }
        if let (Some(trace), Some(begun)) = (&mut self.trace, begun) {
            trace.end(op, begun, &*runtime)?;
        }
        let awaited = (at..at + n).any(|i| issue.awaited[i]);
        if awaited && op.unit != Unit::Host {
            let event = self.device.runtime.record(lane(op.unit))?;
            issue.events[at..at + n].fill(Some(event));
        }
        Ok(n)
    }

    /// Waits for an operation of the device whose results the host needs; takes rows that it has carried here.
    fn arrive(&mut self, op: &Op, at: usize, issue: &mut Issue) -> Result<()> {
        if std::mem::replace(&mut issue.landed[at], true) {
            return Ok(());
        }
        let event = issue.events[at].as_ref().expect("recorded when issued");
        self.device.runtime.synchronize(event)?;
        let Kind::Carry { cargo, to: Side::Host } = op.kind else { return Ok(()) };
        let (what, rows) = (What::of(cargo), rows_of(op));
        let span = self.span(what, &rows);
        let first = self.span(what, &(0..rows.start)).bytes;
        let bytes = self.areas.arrived(what, first, span.bytes)?;
        let (act, ws) = (self.device.shape.act, &mut self.host.ws);
        match what {
            What::Hidden => take_f32(bytes, ws.hidden.rows_mut(rows)),
            What::Delta => take_f32(bytes, ws.delta.rows_mut(rows)),
            What::Attn => take_half(act, bytes, ws.attn.rows_mut(rows)),
            What::Act => take_half(act, bytes, ws.act.rows_mut(rows)),
            What::Qkv => unreachable!("queries, keys and values come to the host through the mailbox"),
        }
        Ok(())
    }

    /// Where rows of a cargo lie on the device.
    fn span(&self, what: What, rows: &Range<usize>) -> RowSpan {
        let (ws, shape) = (&self.device.ws, &self.device.shape);
        match what {
            What::Hidden => ws.hidden_rows(shape, rows),
            What::Delta => ws.delta_rows(shape, rows),
            What::Qkv => ws.qkv_rows(shape, rows),
            What::Attn => ws.attn_rows(shape, rows),
            What::Act => ws.act_rows(shape, rows),
        }
    }

    fn carry(&mut self, op: &Op, cargo: Cargo, to: Side, issue: &Issue) -> Result<()> {
        let (what, rows) = (What::of(cargo), rows_of(op));
        let span = self.span(what, &rows);
        let first = self.span(what, &(0..rows.start)).bytes;
        let layer = op.layer.unwrap_or_default() as usize;
        if to == Side::Host {
            if let Cargo::Hidden { pending: Some(of) } = cargo {
                let step = self.lists(op, issue);
                self.device.fold(layer, of, step, rows)?;
            }
            // Whatever made the rows is on the compute lane.
            let runtime = &self.device.runtime;
            runtime.wait(Lane::DeviceToHost, &runtime.record(Lane::Compute)?)?;
            return self.areas.fetch(what, span, first);
        }
        match cargo {
            Cargo::Hidden { pending: Some(of) } => self.host.settle(layer, of, rows.clone()),
            Cargo::Delta { of } => self.host.norm_delta(layer, of, rows.clone()),
            _ => {}
        }
        let (act, ws, shape) = (self.device.shape.act, &self.host.ws, &self.device.shape);
        self.areas.send(what, span, first, |bytes| match what {
            What::Hidden => put_f32(ws.hidden.rows(rows), bytes),
            What::Delta => put_f32(ws.delta.rows(rows), bytes),
            What::Attn => put_half(act, ws.attn.rows(rows), bytes),
            What::Act => put_half(act, ws.act.rows(rows), bytes),
            What::Qkv => {
                let (qd, kvd) = (shape.q_dim(), shape.kv_dim());
                for (r, row) in rows.zip(bytes.chunks_exact_mut(4 * shape.qkv_dim())) {
                    put_f32(ws.q.rows(r..r + 1), &mut row[..4 * qd]);
                    put_f32(ws.k.rows(r..r + 1), &mut row[4 * qd..4 * (qd + kvd)]);
                    put_f32(ws.v.rows(r..r + 1), &mut row[4 * (qd + kvd)..]);
                }
            }
        })
    }

    fn on_host(&mut self, op: &Op, issue: &Issue) -> Result<()> {
        let through_mailbox = matches!(
            op.kind,
            Kind::Append { mailbox: true, .. }
                | Kind::Attend { from_mailbox: true, .. }
                | Kind::Attend { to_mailbox: true, .. }
        );
        let mail = match through_mailbox {
            false => None,
            true => {
                let places = self.lists(op, issue).lists.published_in(&rows_of(op));
                let mailbox = self.device.mailbox.as_ref().expect("a mailbox was planned");
                Some(Mail { mailbox, shape: &self.device.shape, places })
            }
        };
        self.host.compute(op, mail.as_ref(), issue.alone, &mut self.argmax);
        Ok(())
    }

    /// The logits or tokens of the step, behind those of steps before.
    fn collect(&mut self, want: Want, wanted: &[usize]) -> Result<()> {
        if wanted.is_empty() {
            return Ok(());
        }
        let vocab = self.spec.vocab;
        if self.placement.head == Side::Host {
            if want == Want::Logits {
                self.logits.extend_from_slice(self.host.ws.logits.rows(0..wanted.len()));
            }
            return Ok(());
        }
        let (from, width) = match want {
            Want::Logits => (self.device.ws.logits, vocab),
            Want::Argmax => (self.device.ws.argmax, 1),
        };
        let mut bytes = vec![0; 4 * width * wanted.len()];
        self.device.runtime.download(Lane::Compute, from, &mut bytes)?;
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        match want {
            Want::Logits => self.logits.extend(words.map(f32::from_bits)),
            Want::Argmax => self.argmax.extend(words),
        }
        Ok(())
    }
}

/// How many operations from `at` on the accelerator does in one pass over the rows: project, append and publish.
fn fusible(ops: &[Op], at: usize) -> usize {
    let op = &ops[at];
    let with = |i: usize, is: fn(&Kind) -> bool| {
        ops.get(i)
            .is_some_and(|o| o.unit == Unit::Gpu && o.layer == op.layer && o.rows == op.rows && is(&o.kind))
    };
    if op.unit != Unit::Gpu || !matches!(op.kind, Kind::Project { .. }) {
        return 1;
    }
    match with(at + 1, |k| matches!(k, Kind::Append { .. })) {
        false => 1,
        true => 2 + usize::from(with(at + 2, |k| matches!(k, Kind::Publish { .. }))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_logits_are_shared_out_to_steps() {
        let tokens = [0; 10];
        let piece = |slot, n: usize, wants| Piece { slot, pages: &[], first: 3, tokens: &tokens[..n], wants };
        let pieces = [piece(0, 10, Wants::All), piece(1, 4, Wants::Last), piece(2, 2, Wants::Nothing)];
        let all = steps(&pieces, 4);
        let wanted: Vec<u32> = all.iter().map(|s| s.iter().map(|p| p.group().wanted()).sum()).collect();
        assert_eq!(wanted, [4, 4, 3]);
        let rows: usize = all.iter().flatten().map(|p| p.tokens.len()).sum();
        assert_eq!(rows, 16);
        assert_eq!((all[1][0].first, all[2][0].first), (7, 11));
        assert_eq!(steps(&pieces[1..2], 1).len(), 1);
    }
}
