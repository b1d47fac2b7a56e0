//! Rows that pass the sublayers in several iterations: cohorts, parked between two of them.

use std::collections::{HashMap, HashSet};

use super::tokens::{FAR, NEAR, NEW, holds, insert};
use super::{CohortStatus, Fault, Walk, walk};
use crate::program::iteration::{Flow, Iteration, RequestId};
use crate::program::op::{Kind, Op, Part, Program};
use crate::program::placement::{Placement, Side};

/// Where the rows of cohorts are between iterations: what each iteration is verified against, and what it leaves behind. So over any
/// sequence of iterations every row passes every sublayer once and in order, whenever cohorts join.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParkedRows {
    /// The layer whose attention is under way, and the position of the token.
    rows: HashMap<RequestId, (u32, u32)>,
}

impl ParkedRows {
    /// The layer at which a request's row is parked.
    pub fn at(&self, request: RequestId) -> Option<u32> {
        self.rows.get(&request).map(|&(layer, _)| layer)
    }

    /// A request has ended.
    pub fn end(&mut self, request: RequestId) {
        self.rows.remove(&request);
    }

    /// Verifies the next iteration and advances to the state it leaves. `joined` lists the parked cohorts that take part in it.
    ///
    /// # Errors
    /// The first [`Fault`]; then nothing has changed.
    pub fn next(
        &mut self,
        program: &Program,
        placement: &Placement,
        iteration: &Iteration,
        joined: &[u8],
    ) -> Result<(), Fault> {
        let wrong = |what| Fault { op: 0, name: "iteration", what };
        let mut seen = HashSet::new();
        for (b, batch) in (0u8..).zip(&iteration.sub_batches) {
            for g in &batch.groups {
                if !seen.insert(g.request) {
                    return Err(wrong(format!("request {:?} comes twice", g.request)));
                }
                let (is, said) = (self.rows.get(&g.request), batch.at.map(|at| (at, g.first)));
                if is != said.as_ref() {
                    return Err(wrong(format!(
                        "sub-batch {b}: request {:?} is parked at {is:?} (layer, token), the iteration says {said:?}",
                        g.request
                    )));
                }
            }
        }
        if let Some(m) = iteration.moves.iter().find(|m| self.rows.contains_key(&m.request)) {
            return Err(wrong(format!("pages of request {:?} move while it is parked", m.request)));
        }
        walk(program, placement, iteration, &|b| joined.contains(&b))?;
        for (b, batch) in iteration.cohorts() {
            let next = match batch.at {
                Some(at) if !joined.contains(&b) => Some(at),
                at => placement.next_stop(at),
            };
            for g in &batch.groups {
                match next {
                    Some(layer) => self.rows.insert(g.request, (layer, g.first)),
                    None => self.rows.remove(&g.request),
                };
            }
        }
        Ok(())
    }
}

impl Walk<'_> {
    /// What earlier iterations have left of parked cohorts.
    pub(super) fn parked_before(&mut self, joins: &dyn Fn(u8) -> bool) {
        let iteration = self.iteration;
        for (b, batch) in iteration.cohorts() {
            let Some(at) = batch.at else { continue };
            self.status[b as usize] = CohortStatus::Parked(joins(b));
            let on_host = self.placement.ends_on_host(at);
            let Walk { rows, tokens, .. } = self;
            let rows = &mut rows[b as usize];
            for place in 0..rows.runs().len() {
                let run = &rows.runs()[place];
                if run.is_own() {
                    let g = rows.group(run);
                    for layer in 0..=at {
                        insert(tokens.at_mut(Side::Host, layer, g.request), (g.first, g.end()));
                    }
                }
                let run = &mut rows.runs_mut()[place];
                let stored = run.stored.iter_mut().take(at as usize + 1);
                stored.for_each(|sides| sides[Side::Host as usize] |= NEW);
                for (_, state) in run.live(false) {
                    if on_host {
                        let row = &mut state.rows[Side::Host as usize];
                        (row.hidden, row.delta) = (Some(2 * at + 1), Some(2 * at + 2));
                        continue;
                    }
                    state.rows[Side::Device as usize].hidden = Some(2 * at);
                    state.mail.qkv = Some((at, true));
                    state.mail.out = Some((at, Part::Whole));
                }
            }
        }
    }

    /// Whether an operation is not carried out, since its cohort stays parked.
    pub(super) fn stays(&mut self, op: &Op) -> Result<bool, String> {
        let (b, flow) = (op.sub_batch as usize, self.iteration.flow);
        if flow != Flow::Async || b == 0 {
            return if op.kind == Kind::Join { Err("of no cohort".into()) } else { Ok(false) };
        }
        let at = self.iteration.sub_batches[b].at;
        match (op.kind, self.status[b]) {
            (Kind::Join, CohortStatus::Parked(joins))
                if op.layer == at.map(|at| self.placement.joins_behind(at)) =>
            {
                self.status[b] = if joins { CohortStatus::Runs } else { CohortStatus::Stays };
                Ok(!joins)
            }
            (Kind::Join, _) => Err(format!("at layer {:?}, its cohort is parked at {at:?}", op.layer)),
            (_, CohortStatus::Parked(_)) => Err("its cohort is parked and has not joined".into()),
            (_, status) => Ok(status == CohortStatus::Stays),
        }
    }

    /// The layer that the sub-batch's rows are to be parked at when the iteration is over, if they are a cohort's that has not come to
    /// the end.
    pub(super) fn parked_after(&self, b: usize) -> Option<u32> {
        if self.iteration.flow != Flow::Async || b == 0 {
            return None;
        }
        match (self.iteration.sub_batches[b].at, self.status[b]) {
            (Some(at), status) if status != CohortStatus::Runs => Some(at),
            (at, _) => self.placement.next_stop(at),
        }
    }

    /// Whether the rows of cohort `b` are parked at layer `at` as [`Walk::parked_before`] expects them.
    pub(super) fn is_parked(&self, b: usize, at: u32) -> Result<(), String> {
        if let CohortStatus::Parked(_) = self.status[b] {
            return Err(format!("nobody has looked whether cohort {b} can join"));
        }
        let on_host = self.placement.ends_on_host(at);
        let side = if on_host { Side::Host } else { Side::Device };
        for run in self.rows[b].runs() {
            for (r, state) in run.states(false) {
                let row = &state.rows[side as usize];
                let is_there = match on_host {
                    true => (row.hidden, row.delta) == (Some(2 * at + 1), Some(2 * at + 2)),
                    false => {
                        let attended = state.mail.out == Some((at, Part::Whole));
                        attended && (row.hidden, row.delta) == (Some(2 * at), None)
                    }
                };
                if !is_there {
                    return Err(format!(
                        "row {r} of cohort {b} is not parked at layer {at}: the residual stream is {:?} there",
                        row.hidden
                    ));
                }
            }
            let g = self.rows[b].group(run);
            for l in 0..self.placement.layers.len() as u32 {
                let range = (0, if l <= at { g.end() } else { g.first });
                let cells = FAR | NEAR | if l <= at { NEW } else { 0 };
                let cells = run.cells().of_these(cells);
                let there = match run.is_own() {
                    true => holds(self.tokens.at(Side::Host, l, g.request), range),
                    false => run.stored[l as usize][Side::Host as usize] & cells == cells,
                };
                if !there {
                    return Err(format!(
                        "request {:?}, layer {l}: keys and values of tokens {range:?} are not all on the host",
                        g.request
                    ));
                }
            }
        }
        Ok(())
    }
}
