//! Seconds of a placement by running its programs on the virtual machine: what is predicted is what is executed.
//!
//! ```text
//! prefill   each kind of step that the prompts make (Workload::prefill_steps), lowered, run once, times how many there are
//! decode    steps at the start, the middle and the end of the answer, integrated by Simpson's rule
//! ```
//! The machine synchronises between steps, so their times add up. Within a step, operations overlap as the program's reads
//! and writes let them: streamed weights under the layer before, copies under compute, both sides' attention.
//!
//! [`price`](super::price) adds up the same costs in closed form, which is faster and finds the candidates. It differs in four
//! terms: programs carry hidden rows as f32 where the papers count 16 bits, append keys and values in an operation of its own,
//! leave out rows without logits behind the last layer's keys and values, and wait for the first streamed layer, which nothing hides.

use serde::Serialize;

use super::cost::{Costs, Group as Alike};
use super::operation::OpCosts;
use super::price::{Spilled, UnitRun, Workload, runs_of, spilled_tokens, stage_of};
use super::sizes::Sizes;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::program::virtual_machine::{Timeline, run};
use crate::program::{
    Far, Group, Iteration, Kind, Kv, Op, PerUnit, Phase, Placement, Program, RequestId, Side, Unit, Wants,
    lower,
};

/// Seconds of one kind of operation on one unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperationTime {
    /// What: `project`, `stream`…
    pub kind: &'static str,
    /// Who: `gpu`, `h2d`, `d2h`, `host`.
    pub unit: Unit,
    /// Busy seconds in the whole prefill.
    pub prefill_s: f64,
    /// Busy seconds in one decode step.
    pub decode_step_s: f64,
}

/// How busy each unit is: shares of the time, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct BusyShares {
    /// The device's compute lane.
    pub gpu: f64,
    /// Copies to the device.
    pub h2d: f64,
    /// Copies to the host.
    pub d2h: f64,
    /// The host's workers.
    pub host: f64,
    /// Time during which copies to the device and the device's compute both ran, as a share of the shorter; 1 if one is 0.
    pub overlap: f64,
}

/// A run, by its programs.
#[derive(Debug, Clone, PartialEq)]
pub struct PredictedRun {
    /// Seconds of the whole prefill.
    pub prefill: f64,
    /// Seconds of all decode steps.
    pub decode: f64,
    /// Seconds by stage; for a decode step, the mean over the answer.
    pub stages: Vec<UnitRun>,
    /// Seconds by kind and unit; for decode steps likewise.
    pub operations: Vec<OperationTime>,
    /// In prefill and in decode.
    pub busy: [BusyShares; 2],
    /// How keys and values that the device's pages cannot hold are attended in decode.
    pub spilled: Option<Spilled>,
}

impl PredictedRun {
    /// Prefill and decode.
    pub fn total(&self) -> f64 {
        self.prefill + self.decode
    }
}

/// Sums over the programs of a phase, each with a weight.
#[derive(Default)]
struct Sums {
    seconds: f64,
    /// Seconds by unit of the model: embedding, blocks, head, link.
    units: Vec<f64>,
    kinds: Vec<(&'static str, Unit, f64)>,
    busy: PerUnit<f64>,
    both: f64,
}

impl Sums {
    fn add(&mut self, program: &Program, timeline: &Timeline, layers: usize, weight: f64) {
        self.seconds += weight * timeline.seconds();
        self.units.resize(layers + 3, 0.0);
        // What finishes later than all before it moved the step on by as much: these shares add up to the step.
        let mut order: Vec<usize> = (0..timeline.spans.len()).collect();
        order.sort_by(|&a, &b| timeline.spans[a].end.total_cmp(&timeline.spans[b].end));
        let mut now = 0.0;
        for i in order {
            let (op, span) = (&program.ops[i], &timeline.spans[i]);
            self.units[unit_of(op, layers)] += weight * (span.end - now).max(0.0);
            now = span.end.max(now);
            let (name, seconds) = (op.kind.name(), weight * (span.end - span.start));
            match self.kinds.iter_mut().find(|(n, unit, _)| *n == name && *unit == op.unit) {
                Some((_, _, sum)) => *sum += seconds,
                None => self.kinds.push((name, op.unit, seconds)),
            }
            self.busy[op.unit] += seconds;
        }
        self.units[layers + 1] += weight * timeline.after;
        self.both += weight * timeline.overlap(Unit::Gpu, Unit::H2d);
    }

    fn shares(&self) -> BusyShares {
        let share = |unit| if self.seconds > 0.0 { self.busy[unit] / self.seconds } else { 0.0 };
        let less = self.busy[Unit::Gpu].min(self.busy[Unit::H2d]);
        BusyShares {
            gpu: share(Unit::Gpu),
            h2d: share(Unit::H2d),
            d2h: share(Unit::D2h),
            host: share(Unit::Host),
            overlap: if less > 0.0 { self.both / less } else { 1.0 },
        }
    }
}

/// The unit of the model that an operation belongs to; the last number is the link.
fn unit_of(op: &Op, layers: usize) -> usize {
    match (op.kind, op.layer) {
        (Kind::Carry { .. }, _) => layers + 2,
        (Kind::Embed, _) => 0,
        (_, Some(l)) => 1 + l as usize,
        (Kind::Head { .. } | Kind::Pick, None) => layers + 1,
        (_, None) => layers + 2,
    }
}

/// What `work` costs by `placement`, whose pages may hold fewer tokens than it needs.
///
/// # Errors
/// A placement that cannot be lowered: see [`lower()`].
pub fn programs(
    costs: &dyn Costs,
    sizes: &Sizes,
    placement: &Placement,
    work: &Workload,
) -> Result<PredictedRun> {
    programs_with(costs, sizes, placement, work, None)
}

/// The same, with tokens whose keys and values the device's pages cannot hold attended as `far` says; `None`: in the faster way.
///
/// # Errors
/// As [`programs`].
pub fn programs_with(
    costs: &dyn Costs,
    sizes: &Sizes,
    placement: &Placement,
    work: &Workload,
    far: Option<Far>,
) -> Result<PredictedRun> {
    let placement = &sighted(sizes, placement);
    let pricer = Pricer { costs, sizes, placement, work, far };
    let layers = placement.layers.len();
    let mut prefill = Sums::default();
    let steps = work.prefill_steps();
    for (i, &(count, group)) in steps.iter().enumerate() {
        let whole = group.past == 0 && group.rows == work.prompt;
        // Of a prompt in pieces, the last piece has logits.
        let ends = if whole {
            count
        } else if i + 1 == steps.len() {
            work.batch.min(count)
        } else {
            0
        };
        for (count, wants) in [(count - ends, Wants::Nothing), (ends, Wants::Last)] {
            if count > 0 {
                let (program, timeline, _) = pricer.step(Phase::Prefill, &group, wants)?;
                prefill.add(&program, &timeline, layers, count as f64);
            }
        }
    }
    let mut decode = Sums::default();
    let mut spilled = None;
    for (past, weight) in samples(work) {
        let (program, timeline, how) =
            pricer.step(Phase::Decode, &Alike::decode(work.batch, past), Wants::Last)?;
        decode.add(&program, &timeline, layers, weight);
        spilled = how.or(spilled);
    }
    let gen_len = work.gen_len as f64;
    decode.units.resize(layers + 3, 0.0);
    let mut stages: Vec<UnitRun> = runs_of(placement)
        .into_iter()
        .map(|(first, last)| {
            let sum = |sums: &Sums| sums.units[first..=last].iter().sum::<f64>();
            stage_of(placement, first, last, sum(&prefill), sum(&decode))
        })
        .collect();
    let link = (prefill.units[layers + 2], decode.units[layers + 2]);
    if link.0 > 0.0 || link.1 > 0.0 {
        stages.push(UnitRun {
            name: "link".into(),
            side: "link",
            units: 0,
            prefill_s: link.0,
            decode_step_s: link.1,
        });
    }
    Ok(PredictedRun {
        prefill: prefill.seconds,
        decode: gen_len * decode.seconds,
        stages,
        operations: merged(&prefill, &decode),
        busy: [prefill.shares(), decode.shares()],
        spilled,
    })
}

/// The placement with the windows of the model's blocks.
fn sighted(sizes: &Sizes, placement: &Placement) -> Placement {
    placement.clone().with_windows(sizes.blocks.iter().map(|b| b.window.map(|w| w as u32)))
}

fn merged(prefill: &Sums, decode: &Sums) -> Vec<OperationTime> {
    let mut all: Vec<OperationTime> = Vec::new();
    for (sums, phase) in [(prefill, Phase::Prefill), (decode, Phase::Decode)] {
        for &(kind, unit, seconds) in &sums.kinds {
            let at = all.iter().position(|o| o.kind == kind && o.unit == unit).unwrap_or_else(|| {
                all.push(OperationTime { kind, unit, prefill_s: 0.0, decode_step_s: 0.0 });
                all.len() - 1
            });
            match phase {
                Phase::Prefill => all[at].prefill_s = seconds,
                Phase::Decode => all[at].decode_step_s = seconds,
            }
        }
    }
    all
}

/// Tokens stored before the decode steps that are priced, with weights that sum to 1: the mean over the answer.
fn samples(work: &Workload) -> Vec<(u64, f64)> {
    let (first, last) = (work.prompt, work.prompt + work.gen_len.saturating_sub(1));
    match work.gen_len {
        0 => Vec::new(),
        1 => vec![(first, 1.0)],
        2 => vec![(first, 0.5), (last, 0.5)],
        _ => vec![(first, 1.0 / 6.0), (first.midpoint(last), 4.0 / 6.0), (last, 1.0 / 6.0)],
    }
}

struct Pricer<'a> {
    costs: &'a dyn Costs,
    sizes: &'a Sizes,
    placement: &'a Placement,
    work: &'a Workload,
    /// How spilled keys and values are attended, if that is said.
    far: Option<Far>,
}

impl Pricer<'_> {
    /// The first token on the device of sequences that attend such rows; `None` where the device has all.
    fn boundary(&self, phase: Phase, group: &Alike) -> Option<u32> {
        let spilled = spilled_tokens(self.placement, self.work, group.past);
        let page = PAGE_TOKENS as u64;
        // Whole pages, in front of the new tokens.
        let boundary = spilled.next_multiple_of(page).min(group.past / page * page);
        let attends = |l: &crate::program::LayerPlacement| {
            l.kv == Side::Device && l.policy(phase).attention() == Some(Side::Device)
        };
        (boundary > 0 && self.placement.layers.iter().any(attends)).then_some(boundary as u32)
    }

    /// Seconds of a step whose spilled keys and values are attended in place, and of one that streams them; `None` without any.
    fn both(&self, phase: Phase, group: &Alike, wants: Wants) -> Result<Option<(f64, f64)>> {
        let Some(boundary) = self.boundary(phase, group) else { return Ok(None) };
        let of = |far| -> Result<f64> {
            Ok(self.run(phase, group, wants, Kv::Split { boundary, far })?.1.seconds())
        };
        Ok(Some((of(Far::Attend)?, of(Far::Stream)?)))
    }

    /// One step, with its spilled keys and values attended in the faster way, unless another is asked for.
    fn step(
        &self,
        phase: Phase,
        group: &Alike,
        wants: Wants,
    ) -> Result<(Program, Timeline, Option<Spilled>)> {
        let Some(boundary) = self.boundary(phase, group) else {
            let (program, timeline) = self.run(phase, group, wants, Kv::Device)?;
            return Ok((program, timeline, None));
        };
        let run = |far| self.run(phase, group, wants, Kv::Split { boundary, far });
        let (split, streamed) = match self.far {
            Some(Far::Attend) => (Some(run(Far::Attend)?), None),
            Some(Far::Stream) => (None, Some(run(Far::Stream)?)),
            None => (Some(run(Far::Attend)?), Some(run(Far::Stream)?)),
        };
        Ok(match (split, streamed) {
            (Some(a), None) => (a.0, a.1, Some(Spilled::Split)),
            (Some(a), Some(b)) if a.1.seconds() <= b.1.seconds() => (a.0, a.1, Some(Spilled::Split)),
            (_, Some(b)) => (b.0, b.1, Some(Spilled::Streamed)),
            (None, None) => unreachable!("one way at least"),
        })
    }

    /// One sequence stands for all of the group.
    fn run(&self, phase: Phase, group: &Alike, wants: Wants, kv: Kv) -> Result<(Program, Timeline)> {
        let one = Group {
            request: RequestId { slot: 0, generation: 0 },
            phase,
            first: group.past as u32,
            tokens: group.rows as u32,
            kv,
            wants,
        };
        let iteration = Iteration::serial(vec![one], false);
        let prompt_rows = if phase == Phase::Prefill { group.total_rows() } else { 0 };
        let placement = &*self.placement.at_rows(prompt_rows);
        let program = lower(placement, &iteration)?;
        let costs = OpCosts::new(self.costs, self.sizes).of(&iteration).on(placement).times(group.sequences);
        let timeline = run(&program, &costs);
        Ok((program, timeline))
    }
}

/// How a placement's decode steps attend keys and values that the device's pages cannot hold, as predicted.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FarForecast {
    /// Seconds of a decode step at the end of the answer, attended on the host in place.
    pub attend_s: f64,
    /// The same, their pages streamed to the device.
    pub stream_s: f64,
    /// The faster way, from this many stored tokens of a sequence on, ascending.
    pub ways: Vec<(u64, Spilled)>,
}

/// What is predicted of keys and values that the device's pages cannot hold: `None` where it holds all.
///
/// # Errors
/// As [`programs`].
pub fn far_forecast(
    costs: &dyn Costs,
    sizes: &Sizes,
    placement: &Placement,
    work: &Workload,
) -> Result<Option<FarForecast>> {
    let placement = &sighted(sizes, placement);
    let pricer = Pricer { costs, sizes, placement, work, far: None };
    let at = |past: u64| pricer.both(Phase::Decode, &Alike::decode(work.batch, past), Wants::Last);
    let way = |past: u64| -> Result<Option<Spilled>> {
        let both = at(past)?;
        Ok(both.map(|(attend, stream)| if attend <= stream { Spilled::Split } else { Spilled::Streamed }))
    };
    let (first, last) = (work.prompt, work.prompt + work.gen_len.saturating_sub(1));
    let Some((attend_s, stream_s)) = at(last)? else { return Ok(None) };
    // Where it changes is searched between points a factor of the root of two apart.
    let mut ways: Vec<(u64, Spilled)> = Vec::new();
    let mut before = (first, way(first)?);
    ways.extend(before.1.map(|w| (first, w)));
    while before.0 < last {
        let to = (before.0 + (before.0 * 2 / 5).max(PAGE_TOKENS as u64)).min(last);
        let after = way(to)?;
        if after != before.1 {
            let (mut low, mut high) = (before.0, to);
            while high - low > PAGE_TOKENS as u64 {
                let middle = low.midpoint(high);
                if way(middle)? == before.1 { low = middle } else { high = middle }
            }
            ways.extend(after.map(|w| (high, w)));
        }
        before = (to, after);
    }
    Ok(Some(FarForecast { attend_s, stream_s, ways }))
}

#[cfg(test)]
mod tests;
