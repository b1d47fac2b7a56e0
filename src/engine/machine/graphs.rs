//! Segments of decode steps as recorded graphs: launched as one, instead of kernel by kernel.
//!
//! A segment is a longest run of operations on the device's compute lane in which none but the first waits for anything else, and
//! for none but the last anything else waits. A program all on the device is one segment. The first time, a segment is issued
//! operation by operation: what is loaded or sized with a kernel's first launch has no place in a recording. The second time
//! it is recorded, from then on replayed; where the device does not record, it never is.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use super::RealMachine;
use super::device::launched;
use super::issue::{Issue, fusible, lists};
use super::lowered::Lowered;
use super::run::Part;
use crate::Result;
use crate::device::accelerator::StepContext;
use crate::device::runtime::{Graph, Lane};
use crate::program::{Flow, Kind, Op, Phase, Placement, Program, Residence, Unit};

/// Steps of at most this many rows are recorded.
pub(super) const GRAPH_ROWS: usize = 64;

/// A shorter segment gains nothing.
const SHORTEST: usize = 4;

/// Operations that can be one graph.
pub(super) struct Segment {
    pub ops: Range<usize>,
    /// Of what is launched, but for what the step's lists say.
    shape: u64,
}

/// Recorded segments, by their shape and the keys of their steps: `None` once such a segment has run, the graph from the
/// second on.
pub(super) struct Graphs {
    known: HashMap<(u64, u64), Option<Graph>>,
    /// Whether the runtime records; learnt at the first attempt.
    records: bool,
}

impl Default for Graphs {
    fn default() -> Graphs {
        Graphs { known: HashMap::new(), records: true }
    }
}

/// The segments of a program of sub-batches with as many rows. Where cohorts may join, each layer is a segment, so that it is the
/// same one wherever they do.
pub(super) fn segments(
    program: &Program,
    waits: &[Vec<usize>],
    awaited: &[bool],
    placement: &Placement,
    rows: &[u32],
) -> Vec<Segment> {
    // The weights of a streamed layer are in one staging buffer or the other.
    let streamed = |op: &Op| {
        let layer = op.layer.map(|l| placement.layers[l as usize].weights);
        layer == Some(Residence::Streamed)
    };
    let (ops, layered) = (program.ops.as_slice(), program.flow == Flow::Async);
    let plain = |op: &Op| op.unit == Unit::Gpu && !streamed(op) && !program.is_of_cohort(op);
    let waits_for_others =
        |i: usize| waits.get(i).is_some_and(|w| w.iter().any(|&w| ops[w].unit != Unit::Gpu));
    let mut found = Vec::new();
    let mut at = 0;
    while at < ops.len() {
        if !plain(&ops[at]) {
            at += 1;
            continue;
        }
        let from = at;
        // What is one launch stays together.
        let mut n = fusible(ops, at);
        at += n;
        while at < ops.len() && plain(&ops[at]) && !(at - n..at).any(|i| awaited[i]) {
            n = fusible(ops, at);
            if (at..at + n).any(waits_for_others) || layered && ops[at].layer != ops[from].layer {
                break;
            }
            at += n;
        }
        if at - from >= SHORTEST {
            found.push(Segment { ops: from..at, shape: shape(&ops[from..at], rows) });
        }
    }
    found
}

fn shape(ops: &[Op], rows: &[u32]) -> u64 {
    let mut hash = DefaultHasher::new();
    for op in ops {
        // All rows of a sub-batch are as many as are launched, whatever their number.
        let all = op.rows == (0..rows[op.sub_batch as usize]);
        let some = (!all).then(|| op.rows.clone());
        (op.kind, op.layer, op.sub_batch, some).hash(&mut hash);
    }
    hash.finish()
}

/// Whether a step's rows are few, one a sequence, and all want a token: what is repeated.
pub(super) fn decodes(parts: &[Part<'_>]) -> bool {
    parts.iter().all(|p| {
        p.tokens.len() <= GRAPH_ROWS && p.groups.iter().all(|g| g.phase == Phase::Decode && g.tokens == 1)
    })
}

impl RealMachine {
    /// Issues a segment as a graph, if there is one or can be; says whether it did.
    pub(super) fn issue_graph(
        &mut self,
        lowered: &Lowered,
        segment: &Segment,
        issue: &mut Issue,
    ) -> Result<bool> {
        if !self.graphs.records || self.trace.is_some() {
            return Ok(false);
        }
        let Some(key) = issue.graph_key().map(|steps| (segment.shape, steps)) else { return Ok(false) };
        let graph = match self.graphs.known.get(&key) {
            None => {
                self.graphs.known.insert(key, None);
                return Ok(false);
            }
            // Nobody may wait for the device while it records.
            Some(None) if !self.host_is_idle() => return Ok(false),
            Some(known) => known.clone(),
        };
        let ops = &lowered.program.ops;
        for i in segment.ops.start..segment.ops.start + fusible(ops, segment.ops.start) {
            self.wait_for(lowered, i, issue)?;
        }
        let runtime = self.device().runtime.clone();
        let graph = match graph {
            Some(graph) => graph,
            None => {
                let recorded = runtime.capture(&mut || {
                    let mut at = segment.ops.start;
                    while at < segment.ops.end {
                        let n = fusible(ops, at);
                        self.enqueue(ops, at, n, issue)?;
                        at += n;
                    }
                    Ok(())
                })?;
                let Some(graph) = recorded else {
                    self.graphs.records = false;
                    return Ok(false);
                };
                self.graphs.known.insert(key, Some(graph.clone()));
                graph
            }
        };
        if runtime.watches() {
            self.declare_pages(&ops[segment.ops.clone()], issue)?;
        }
        self.works(Unit::Gpu)?;
        runtime.replay(&graph)?;
        self.issued(lowered, segment.ops.clone(), issue)?;
        Ok(true)
    }
}

impl RealMachine {
    /// Says which pages recorded operations touch in this step.
    fn declare_pages(&self, ops: &[Op], issue: &Issue<'_>) -> Result<()> {
        let d = self.device();
        for op in ops {
            let (staged, appends) = match op.kind {
                Kind::Append { staged, .. } => (staged, true),
                Kind::Attend { staged, .. } => (staged, false),
                _ => continue,
            };
            let step = lists(&d.modes, op, &issue.lists);
            let ws = &d.parts[op.sub_batch as usize].ws;
            let cx = StepContext { lane: Lane::Compute, shape: &d.shape, ws, step };
            let pages = d.pages(op.layer.unwrap_or_default() as usize, staged);
            d.accel.declare_pages(&cx, pages, launched(op, step), appends)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Group, Iteration, Kv, Policy, RequestId, Side, Wants, lower, order};

    fn of(placement: &Placement, decode: u32) -> (Vec<Op>, Vec<Segment>) {
        let group = |slot| Group {
            request: RequestId { slot, generation: 0 },
            phase: Phase::Decode,
            first: 40,
            tokens: 1,
            kv: Kv::Device,
            wants: Wants::Last,
        };
        let iteration = Iteration::serial((0..decode).map(group).collect(), true);
        let program = lower(placement, &iteration).unwrap();
        let waits = order::waits(&program);
        let mut awaited = vec![false; program.ops.len()];
        for (at, w) in waits.iter().enumerate() {
            w.iter().for_each(|&w| awaited[w] |= program.ops[w].unit != program.ops[at].unit);
        }
        let found = segments(&program, &waits, &awaited, placement, &[decode]);
        (program.ops, found)
    }

    #[test]
    fn a_program_all_on_the_device_is_one_segment_whatever_the_batch() {
        let placement = Placement::all(Side::Device, 5, 0);
        let (ops, one) = of(&placement, 1);
        assert_eq!((one.len(), one[0].ops.clone()), (1, 0..ops.len()));
        assert_eq!(one[0].shape, of(&placement, 7).1[0].shape);
        assert_ne!(one[0].shape, of(&Placement::all(Side::Device, 4, 0), 1).1[0].shape);
    }

    #[test]
    fn segments_end_where_the_other_side_waits() {
        // The host's blocks, then a transfer, then one segment to the end.
        let (ops, found) = of(&Placement::boundary(3, 5, 0, 0), 2);
        assert_eq!((found.len(), found[0].ops.end), (1, ops.len()));
        assert!(matches!(ops[found[0].ops.start - 1].kind, Kind::Carry { .. }));
        // Attention on the host: one between two attentions, without what the host waits for or has been waited for.
        let mut placement = Placement::all(Side::Device, 4, 0);
        for layer in &mut placement.layers {
            (layer.decode, layer.kv) = (Policy::ATTENTION_ON_HOST, Side::Host);
        }
        let (ops, found) = of(&placement, 2);
        let ends = |s: &Segment| (ops[s.ops.start].kind.name(), ops[s.ops.end - 1].kind.name());
        let between = ("out_proj", "project");
        assert_eq!(
            found.iter().map(ends).collect::<Vec<_>>(),
            [between, between, between, ("collect", "pick")]
        );
        // Of streamed layers none.
        placement.layers.iter_mut().for_each(|l| l.weights = Residence::Streamed);
        assert!(of(&placement, 2).1.is_empty());
    }
}
