//! Runs segments of decode steps as recorded graphs, with one launch instead of a launch per kernel.
//!
//! The first time, a segment ([`segments`](super::segments)) is issued operation by operation, since a kernel's first
//! launch may load or size things, which a recording does not allow. The second time it is recorded, and from then on
//! replayed. If the device cannot record, every run is issued operation by operation.

use std::collections::HashMap;

use super::RealMachine;
use super::device::launched;
use super::issue::{Issue, lists};
use super::lowered::Lowered;
use super::part::Part;
use super::segments::{GRAPH_ROWS, Segment, fusible};
use crate::Result;
use crate::device::{Graph, Lane, StepContext};
use crate::program::{Kind, Op, Phase, Unit};

/// Recorded segments by their shape and the keys of their steps: `None` after the first run of a segment, its graph
/// from the second run on.
pub(super) struct Graphs {
    known: HashMap<(u64, u64), Option<Graph>>,
    /// Whether the runtime can record, known after the first attempt.
    records: bool,
}

impl Default for Graphs {
    fn default() -> Graphs {
        Graphs { known: HashMap::new(), records: true }
    }
}

/// Whether a step has a shape that repeats: few rows, one per sequence, all of which want a token.
pub(super) fn decodes(parts: &[Part<'_>]) -> bool {
    parts.iter().all(|p| {
        p.tokens.len() <= GRAPH_ROWS && p.groups.iter().all(|g| g.phase == Phase::Decode && g.tokens == 1)
    })
}

impl RealMachine {
    /// Issues a segment as a graph, if one exists or can be made; returns whether it did.
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
            // No thread may wait for the device while it records.
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
                        self.enqueue(lowered, at, n, issue)?;
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
    /// Declares which pages recorded operations touch in this step.
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
