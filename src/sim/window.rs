//! A few steps of a simulation, operation by operation.
//!
//! Up to the window the simulation goes by its own [`SimClock`]; in it, every iteration is lowered for all layers and run on the virtual
//! machine, which says what each operation takes, who joins and what is left to the next iteration. So the picture agrees with
//! itself, and differs from the report by what a few layers leave out of a whole model's step.

use super::clock::{Lap, SimClock};
use crate::Result;
use crate::plan::{OpCosts, Predictor};
use crate::program::virtual_machine::{Advance, Carried, run_from};
use crate::program::{Flow, Iteration, Kind, Program, Unit, lower};
use crate::timeline::{StepWindow, Timeline, Traced};

/// See the [module](self).
pub(super) struct WindowRecorder<'a> {
    predictor: &'a Predictor,
    window: StepWindow,
    /// Tokens of all requests.
    tokens: u64,
    /// When recording began, and what the last step has left behind and when it ended; from then on.
    state: Option<(f64, Carried, f64)>,
    steps: u32,
    timeline: Timeline,
}

impl<'a> WindowRecorder<'a> {
    pub fn new(predictor: &'a Predictor, window: StepWindow, tokens: u64) -> WindowRecorder<'a> {
        WindowRecorder { predictor, window, tokens, state: None, steps: 0, timeline: Timeline::default() }
    }

    /// Whether the iteration that begins at `now`, after `made` tokens, is recorded.
    pub fn records(&self, now: f64, made: u64) -> bool {
        self.state.is_some() || self.window.begins(now, made, self.tokens)
    }

    /// Whether there are as many steps as were asked for.
    pub fn is_done(&self) -> bool {
        self.steps >= self.window.recorded()
    }

    /// The steps that are shown.
    pub fn timeline(&self) -> Timeline {
        self.window.cut(&self.timeline)
    }

    /// Runs an iteration that begins at `now`; `clock` says what was under way before the first.
    pub fn run(&mut self, iteration: &Iteration, now: f64, clock: &SimClock<'_>) -> Result<Lap> {
        let placement = self.predictor.placement();
        let (begun, carried) = match self.state.take() {
            Some((begun, carried, ended)) => (begun, carried.later(now - ended)),
            None => (now, clock.carried(now)),
        };
        let program = lower(placement, iteration)?;
        let advance = self.predictor.ask(|costs| {
            let costs = OpCosts::new(costs, self.predictor.sizes()).of(iteration).on(placement);
            run_from(&program, iteration, &costs, &carried)
        });
        self.note(&program, &advance, now - begun);
        let lap = lap(iteration, &advance, placement.layers.len() as u32);
        self.state = Some((begun, advance.carried, now + lap.seconds));
        self.steps += 1;
        Ok(lap)
    }

    /// Pages that change sides alone, before the next step.
    pub fn copies(&mut self, lap: &Lap, now: f64) {
        let Some((begun, ..)) = self.state else { return };
        let (start, step) = (now - begun, self.steps);
        for (name, unit, seconds) in [("page_out", Unit::D2h, lap.d2h), ("page_in", Unit::H2d, lap.h2d)] {
            if seconds > 0.0 {
                let (layer, rows, sub_batch, cohort, end) = (None, 0, 0, None, start + seconds);
                self.timeline.spans.push(Traced {
                    name,
                    unit,
                    layer,
                    rows,
                    sub_batch,
                    cohort,
                    step,
                    start,
                    end,
                });
            }
        }
    }

    fn note(&mut self, program: &Program, advance: &Advance, at: f64) {
        let step = self.steps;
        let spans = advance.timeline.spans.iter().filter_map(|span| {
            let op = &program.ops[span.op];
            let cohort = program.is_of_cohort(op).then_some(op.sub_batch);
            let joined = cohort.is_none_or(|c| advance.joined.contains(&c));
            let name = match op.kind {
                Kind::Join if joined => "join",
                Kind::Join => "parked",
                kind if span.end > span.start => kind.name(),
                // Of a cohort that stays parked.
                _ => return None,
            };
            let rows = op.rows.end - op.rows.start;
            let (start, end) = (at + span.start, at + span.end);
            let (unit, layer, sub_batch) = (span.unit, op.layer, op.sub_batch);
            Some(Traced { name, unit, layer, rows, sub_batch, cohort, step, start, end })
        });
        self.timeline.spans.extend(spans);
    }
}

/// What the loop is told of it.
fn lap(iteration: &Iteration, advance: &Advance, layers: u32) -> Lap {
    let of = |(b, batch): (u8, &crate::program::SubBatch)| {
        let advanced = batch.at.is_none() || advance.joined.contains(&b);
        let next = batch.at.map_or(0, |l| l + 1);
        match (iteration.flow == Flow::Async && b > 0 && !batch.groups.is_empty(), advanced) {
            (false, _) => None,
            (true, false) => batch.at,
            (true, true) => (next < layers).then_some(next),
        }
    };
    let parked: Vec<Option<u32>> = (0u8..).zip(&iteration.sub_batches).map(of).collect();
    let stay =
        iteration.cohorts().filter(|(b, batch)| batch.at.is_some() && !advance.joined.contains(b)).count();
    let cohorts = iteration.cohorts().count() as u32;
    Lap {
        seconds: advance.timeline.seconds(),
        parked,
        cohorts,
        advanced: cohorts - stay as u32,
        ..Lap::default()
    }
}
