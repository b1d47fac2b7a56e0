//! Runs segments of decode steps as recorded graphs, with one launch instead of a launch per kernel.
//!
//! The first time, a segment ([`segments`](super::segments)) is issued operation by operation, since a kernel's first
//! launch may load or size things, which a recording does not allow. The second time it is recorded, and from then on
//! replayed. If the device cannot record, every run is issued operation by operation.

use std::collections::HashMap;
use std::hash::Hash;

use super::RealMachine;
use super::device::launched;
use super::issue::{Issue, lists};
use super::lowered::Lowered;
use super::part::Part;
use super::segments::{GRAPH_ROWS, Segment, fusible};
use crate::device::{Graph, Lane, StepContext};
use crate::program::{Kind, Op, Phase, Unit};
use crate::{Error, Result};

/// Most segments that are remembered. A model of 80 layers has 80 beside cohorts, for each bucket of rows one set; a recorded one takes
/// some KiB of the device's memory, which the driver takes of what plans leave to it.
const MOST: usize = 1024;

/// Recorded segments by their shape and the keys of their steps.
pub(super) struct Graphs {
    known: Recent<(u64, u64), Option<Graph>>,
    /// Whether the runtime can record, known after the first attempt.
    records: bool,
}

/// `off`: steps are launched kernel by kernel, as on a device that records nothing. For measurements of what recording gains.
const VARIABLE: &str = "TANDEM_GRAPHS";

impl Default for Graphs {
    fn default() -> Graphs {
        Graphs { known: Recent::new(MOST), records: true }
    }
}

impl Graphs {
    /// None yet, and none ever if the environment says so.
    ///
    /// # Errors
    /// `TANDEM_GRAPHS` says something else than `on` or `off`.
    pub fn wanted() -> Result<Graphs> {
        let said = std::env::var(VARIABLE).unwrap_or_default();
        let records = match said.as_str() {
            "" | "on" => true,
            "off" => false,
            other => return Err(Error::Usage(format!("{VARIABLE}: {other}: use on or off"))),
        };
        Ok(Graphs { records, ..Graphs::default() })
    }
}

/// Values by key, of which those that have not been asked for longest are given up.
struct Recent<K, V> {
    most: usize,
    /// Counts questions.
    now: u64,
    /// Values, and when each was asked for last.
    all: HashMap<K, (V, u64)>,
}

impl<K: Copy + Eq + Hash, V> Recent<K, V> {
    fn new(most: usize) -> Recent<K, V> {
        Recent { most, now: 0, all: HashMap::new() }
    }

    fn get(&mut self, key: &K) -> Option<&V> {
        self.now += 1;
        let (value, used) = self.all.get_mut(key)?;
        *used = self.now;
        Some(value)
    }

    fn insert(&mut self, key: K, value: V) {
        self.now += 1;
        self.all.insert(key, (value, self.now));
        if self.all.len() > self.most {
            // An eighth at once, so that looking for them costs little.
            let mut ages: Vec<u64> = self.all.values().map(|&(_, used)| used).collect();
            let (_, &mut oldest, _) = ages.select_nth_unstable(self.most / 8);
            self.all.retain(|_, &mut (_, used)| used > oldest);
        }
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
        let idle = self.host_is_idle();
        let graph = match self.graphs.known.get(&key) {
            None => {
                self.graphs.known.insert(key, None);
                return Ok(false);
            }
            // No thread may wait for the device while it records.
            Some(None) if !idle => return Ok(false),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays_and_the_rest_is_given_up() {
        let mut recent = Recent::new(16);
        for n in 0..1000 {
            recent.insert(n, n);
            assert_eq!(recent.get(&0), Some(&0), "asked for after {n} others");
            assert_eq!(recent.get(&n), Some(&n));
            assert!(recent.all.len() <= 16);
        }
        assert!(recent.all.len() > 8 && recent.get(&500).is_none());
    }
}
