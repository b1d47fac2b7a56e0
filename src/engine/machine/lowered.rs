//! Programs, lowered once for each structure of a step.
//!
//! Two steps have the same structure if their groups are equal in number, length, path and wanted results. Their
//! programs then differ only in positions and pages, which belong to the step's lists rather than to operations. If
//! pages move, they are part of operations, and every step is lowered anew.

use std::collections::HashMap;
use std::sync::Arc;

use super::pack::Packed;
use super::segments::{Segment, segments};
use crate::program::{
    Flow, Iteration, Kind, Kv, Op, Phase, Placement, Program, Side, SubBatch, Unit, Wants, check, lower,
    waits,
};
use crate::{Error, Result};

/// Number of programs that are always kept; more are kept while they have at most [`MOST_OPS`] operations in total.
const MOST: usize = 64;
const MOST_OPS: usize = 16 << 10;

/// A program, with the data that issuing it needs.
pub(super) struct Lowered {
    pub program: Program,
    /// For each operation, the earlier ones that it waits for. Empty if one unit runs all of them in order.
    pub waits: Vec<Vec<usize>>,
    /// For each operation, whether one of another unit waits for it.
    pub awaited: Vec<bool>,
    /// The sub-batches.
    pub parts: Vec<PartFacts>,
    /// The segments that can be recorded.
    pub segments: Vec<Segment>,
    /// The unit of all operations, if it is one.
    pub one_unit: Option<Unit>,
    /// Layers where cohorts may join.
    pub joins: Vec<u32>,
    /// For each sub-batch that is a cohort, the last operation of the host that outlives the step.
    pub last_detached: Vec<Option<usize>>,
}

/// Facts of a program about a sub-batch.
pub(super) struct PartFacts {
    /// Whether the device has operations for it.
    pub on_device: bool,
    /// Whether the host has operations for it.
    pub on_host: bool,
    /// First rows of attention operations on the device, except row 0.
    pub cuts: Vec<usize>,
    /// Whether only the host computes after the last keys and values, with all rows in one operation.
    pub alone: bool,
    /// The rows that want logits, if they are put side by side on the device.
    pub packed: Option<Packed>,
}

/// The structure of a step, which determines its program.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Structure {
    flow: Flow,
    pick: bool,
    /// For the groups of each sub-batch: phase, rows, rows with logits, whether keys and values are on the host.
    sub_batches: Vec<Vec<(Phase, u32, Wants, bool)>>,
    /// The layer at which each sub-batch is parked.
    at: Vec<Option<u32>>,
}

impl Structure {
    /// The structure of an iteration; `None` if pages move.
    fn of(iteration: &Iteration) -> Option<Structure> {
        let split = |kv: Kv| matches!(kv, Kv::Split { .. });
        let groups = || iteration.sub_batches.iter().flat_map(|s| &s.groups);
        if !iteration.moves.is_empty() || groups().any(|g| split(g.kv)) {
            return None;
        }
        let sub_batches = iteration
            .sub_batches
            .iter()
            .map(|s| s.groups.iter().map(|g| (g.phase, g.tokens, g.wants, g.kv == Kv::Host)).collect())
            .collect();
        let at = iteration.sub_batches.iter().map(|s| s.at).collect();
        Some(Structure { flow: iteration.flow, pick: iteration.pick, sub_batches, at })
    }
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct Programs {
    /// Each program with the step that used it last.
    known: HashMap<Structure, (Arc<Lowered>, u64)>,
    /// Operations of all programs.
    ops: usize,
    steps: u64,
}

impl Programs {
    /// The program of a step.
    ///
    /// # Errors
    /// If the step cannot be lowered.
    pub fn get(&mut self, placement: &Placement, iteration: &Iteration) -> Result<Arc<Lowered>> {
        self.steps += 1;
        let structure = Structure::of(iteration);
        if let Some((known, used)) = structure.as_ref().and_then(|s| self.known.get_mut(s)) {
            *used = self.steps;
            return Ok(known.clone());
        }
        let lowered = Arc::new(Lowered::new(placement, iteration)?);
        let moves = |op: &Op| matches!(op.kind, Kind::PageIn { .. } | Kind::PageOut { .. });
        if let Some(structure) = structure.filter(|_| !lowered.program.ops.iter().any(moves)) {
            self.ops += lowered.program.ops.len();
            while self.known.len() >= MOST
                && self.ops > MOST_OPS
                && let Some(oldest) = self.known.iter().min_by_key(|(_, (_, used))| *used)
            {
                let oldest = oldest.0.clone();
                let gone = self.known.remove(&oldest);
                self.ops -= gone.map_or(0, |(lowered, _)| lowered.program.ops.len());
            }
            self.known.insert(structure, (lowered.clone(), self.steps));
        }
        Ok(lowered)
    }
}

impl Lowered {
    fn new(placement: &Placement, iteration: &Iteration) -> Result<Lowered> {
        let mut program = lower(placement, iteration)?;
        if cfg!(debug_assertions) {
            check(&program, placement, iteration).map_err(|fault| Error::usage(fault.to_string()))?;
        }
        let ops = &program.ops;
        let one_unit = program.one_unit();
        // The device's lane runs in order, and so does a host alone; beside a device, the host does not.
        let in_order = one_unit.is_some_and(|unit| unit == Unit::Gpu || !placement.uses(Side::Device));
        let waits = if in_order { Vec::new() } else { waits(&program) };
        let mut awaited = vec![false; ops.len()];
        for (at, waits) in waits.iter().enumerate() {
            for &w in waits {
                awaited[w] |= ops[w].unit != ops[at].unit;
            }
        }
        let parts = iteration.sub_batches.iter().enumerate();
        let parts = parts.map(|(b, s)| PartFacts::new(&program, b as u8, s)).collect();
        let rows: Vec<u32> = iteration.sub_batches.iter().map(SubBatch::rows).collect();
        let segments = segments(&program, &waits, &awaited, placement, &rows);
        let last = |b: usize| ops.iter().rposition(|op| op.sub_batch as usize == b && op.detached);
        let last_detached = (0..iteration.sub_batches.len()).map(last).collect();
        let joins = program.ops.iter().filter(|op| op.kind == Kind::Join).filter_map(|op| op.layer).collect();
        // Programs are kept, but of their operations' reads and writes only pages are still needed.
        for op in &mut program.ops {
            if !matches!(op.kind, Kind::PageIn { .. } | Kind::PageOut { .. }) {
                (op.reads, op.writes) = (Vec::new(), Vec::new());
            }
        }
        program.ops.shrink_to_fit();
        Ok(Lowered { program, waits, awaited, parts, segments, one_unit, joins, last_detached })
    }

    /// The segment that begins with the operation at `at`.
    pub fn segment(&self, at: usize) -> Option<&Segment> {
        let found = self.segments.binary_search_by_key(&at, |s| s.ops.start);
        found.ok().map(|i| &self.segments[i])
    }

    /// The sub-batch of an operation of a cohort.
    pub fn cohort(&self, op: &Op) -> Option<u8> {
        self.program.is_of_cohort(op).then_some(op.sub_batch)
    }

    /// Whether what the transfer at `at` takes to the host is for work that outlives the step.
    pub fn goes_on(&self, at: usize) -> bool {
        let (op, behind) = (&self.program.ops[at], &self.program.ops[at + 1..]);
        let reads = |o: &&Op| o.sub_batch == op.sub_batch && o.unit == Unit::Host;
        self.cohort(op).is_some() && behind.iter().find(reads).is_some_and(|o| o.detached)
    }

    /// The earlier operations that the one at `at` waits for.
    pub fn waits(&self, at: usize) -> &[usize] {
        self.waits.get(at).map_or(&[], Vec::as_slice)
    }
}

impl PartFacts {
    fn new(program: &Program, sub_batch: u8, batch: &SubBatch) -> PartFacts {
        let rows = batch.rows() as usize;
        let ops: Vec<&Op> = program.ops.iter().filter(|op| op.sub_batch == sub_batch).collect();
        let mut cuts: Vec<usize> = ops
            .iter()
            .filter(|op| op.unit == Unit::Gpu && matches!(op.kind, Kind::Attend { .. }))
            .flat_map(|op| [op.rows.start as usize, op.rows.end as usize])
            .filter(|&cut| cut > 0 && cut < rows)
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        // Dropping rows renumbers the remaining ones for all later operations of the sub-batch. So this requires that
        // there is one of each kind, and that they read nothing with a row for each row of the step.
        let last = ops.iter().filter_map(|op| op.layer).max();
        let trimmed = || ops.iter().filter(|op| op.wanted_only);
        let one =
            |is: fn(&Kind) -> bool| ops.iter().filter(|op| op.layer == last && is(&op.kind)).count() == 1;
        let alone = trimmed().next().is_some()
            && trimmed().all(|op| op.unit == Unit::Host)
            && !trimmed().any(|op| matches!(op.kind, Kind::Attend { from_mailbox: true, .. }))
            && one(|k| matches!(k, Kind::Append { .. }))
            && one(|k| matches!(k, Kind::Attend { .. }))
            && one(|k| matches!(k, Kind::OutProj));
        let on_device = ops.iter().any(|op| op.unit == Unit::Gpu);
        let on_host = ops.iter().any(|op| op.unit == Unit::Host || matches!(op.kind, Kind::Carry { .. }));
        let packed = Packed::of(program, sub_batch, batch);
        PartFacts { on_device, on_host, cuts, alone, packed }
    }
}
