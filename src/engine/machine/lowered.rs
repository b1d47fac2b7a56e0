//! Programs, lowered once for each structure of a step.
//!
//! Two steps have the same structure if their groups are as many and as long, go the same way and want the same: then their
//! programs differ in positions and pages only, which are no part of the operations but of the step's lists. Where pages
//! move, they are, and every step is lowered anew.

use std::collections::HashMap;
use std::sync::Arc;

use super::segments::{Segment, segments};
use crate::program::{
    Flow, Iteration, Kind, Kv, Op, Phase, Placement, Program, Side, SubBatch, Unit, Wants, check, lower,
    waits,
};
use crate::{Error, Result};

/// Programs that are kept at least; more, while they have at most [`MOST_OPS`] operations in all.
const MOST: usize = 64;
const MOST_OPS: usize = 16 << 10;

/// A program, and what its issue needs to know.
pub(super) struct Lowered {
    pub program: Program,
    /// For each operation, the earlier ones that come first. Empty where one unit takes all in order.
    pub waits: Vec<Vec<usize>>,
    /// Whether an operation of another unit waits for it.
    pub awaited: Vec<bool>,
    /// The sub-batches.
    pub parts: Vec<PartFacts>,
    /// What can be recorded.
    pub segments: Vec<Segment>,
    /// The unit of all operations, if it is one.
    pub one_unit: Option<Unit>,
    /// Layers where cohorts may join.
    pub joins: Vec<u32>,
    /// For each sub-batch that is a cohort, the last operation of the host that outlives the step.
    pub last_detached: Vec<Option<usize>>,
}

/// What a program says of a sub-batch.
pub(super) struct PartFacts {
    /// Whether the device has anything to do with it.
    pub on_device: bool,
    /// Whether the host has.
    pub on_host: bool,
    /// First rows of attentions on the device, row 0 aside.
    pub cuts: Vec<usize>,
    /// After the last keys and values only the host computes, all rows in one operation.
    pub alone: bool,
}

/// What programs of the same structure have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Structure {
    flow: Flow,
    pick: bool,
    /// Phase, rows, rows with logits, whether keys and values are on the host: of the groups of each sub-batch.
    sub_batches: Vec<Vec<(Phase, u32, Wants, bool)>>,
    /// Where each is parked.
    at: Vec<Option<u32>>,
}

impl Structure {
    /// `None` where pages move.
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
    /// Each with the step that used it last.
    known: HashMap<Structure, (Arc<Lowered>, u64)>,
    /// Operations of all of them.
    ops: usize,
    steps: u64,
}

impl Programs {
    /// The program of a step.
    ///
    /// # Errors
    /// A step that cannot be lowered.
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
        // The device's lane has an order of its own, and so has a host alone; beside a device, the host has not.
        let in_order = one_unit.is_some_and(|unit| unit == Unit::Gpu || !placement.uses(Side::Device));
        let waits = if in_order { Vec::new() } else { waits(&program) };
        let mut awaited = vec![false; ops.len()];
        for (at, waits) in waits.iter().enumerate() {
            for &w in waits {
                awaited[w] |= ops[w].unit != ops[at].unit;
            }
        }
        let parts = iteration.sub_batches.iter().enumerate();
        let parts = parts.map(|(b, s)| PartFacts::new(&program, b as u8, s.rows() as usize)).collect();
        let rows: Vec<u32> = iteration.sub_batches.iter().map(SubBatch::rows).collect();
        let segments = segments(&program, &waits, &awaited, placement, &rows);
        let last =
            |b: usize| ops.iter().rposition(|op| op.sub_batch as usize == b && program.is_detached(op));
        let last_detached = (0..iteration.sub_batches.len()).map(last).collect();
        let joins = program.ops.iter().filter(|op| op.kind == Kind::Join).filter_map(|op| op.layer).collect();
        // Programs are kept; what their operations read and write has been looked at, but for pages.
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

    /// The earlier operations that the one at `at` waits for.
    pub fn waits(&self, at: usize) -> &[usize] {
        self.waits.get(at).map_or(&[], Vec::as_slice)
    }
}

impl PartFacts {
    fn new(program: &Program, sub_batch: u8, rows: usize) -> PartFacts {
        let ops: Vec<&Op> = program.ops.iter().filter(|op| op.sub_batch == sub_batch).collect();
        let mut cuts: Vec<usize> = ops
            .iter()
            .filter(|op| op.unit == Unit::Gpu && matches!(op.kind, Kind::Attend { .. }))
            .flat_map(|op| [op.rows.start as usize, op.rows.end as usize])
            .filter(|&cut| cut > 0 && cut < rows)
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        // Dropping rows renumbers those that stay, for all operations of the sub-batch from then on: so only where those
        // are one of each kind, and read nothing that has a row for each row of the step.
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
        PartFacts { on_device, on_host, cuts, alone }
    }
}
