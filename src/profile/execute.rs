//! Running real steps by the engine, and holding the tables' predictions against them.
//!
//! All steps are ready at once, and are run in turns, a few times each, for many rounds: what else the machine does comes and
//! goes within seconds (on shared machines the last-level cache is not one's own), and is the same for steps that calibrate and for
//! steps that check. Whole steps are run without a timeline, those that calibrate then with one, for their parts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calibrate::{Calibration, Compared, Factors, Seen, StepCompared};
use super::measure::Subject;
use super::sample::{Effort, Samples};
use super::tables::{Curve, Tables};
use crate::cache::KvGeometry;
use crate::device::Accelerator;
use crate::engine::{Engine, NewTokens, Options};
use crate::host::memory_available;
use crate::plan::{Hardware, OpCosts, Sizes};
use crate::program::virtual_machine::Costs as _;
use crate::program::{Group, Iteration, Kv, Phase, Placement, RequestId, Side, Unit, Wants, lower};
use crate::{Error, Result};

/// A step that is run and predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    sequences: usize,
    rows: usize,
    past: usize,
    calibrates: bool,
}

/// The steps: those that calibrate, then those that check, at other contexts.
fn steps(context: usize, effort: Effort, side: Side) -> Vec<Step> {
    let step = |sequences, rows, past, calibrates| Step { sequences, rows, past, calibrates };
    let decode = |sequences: [usize; 2], calibrate: &[usize], check: &[usize]| -> Vec<Step> {
        let of = |pasts: &[usize], calibrates| -> Vec<Step> {
            let of = |n: usize| pasts.iter().map(move |&past| step(n, 1, past, calibrates));
            sequences.into_iter().flat_map(of).collect()
        };
        [of(calibrate, true), of(check, false)].concat()
    };
    let mut steps = match (effort, side) {
        (Effort::Quick, _) => decode([1, 2], &[15, 63], &[31, 127]),
        // How much a step takes depends on its context in a curve, where the CPU's cache holds a part of the weights.
        (Effort::Full, Side::Host) => decode([1, 4], &[31, 250, 640, 1280, 2040], &[100, 900, 1800]),
        (Effort::Full, Side::Device) => decode([1, 4], &[400], &[100, 900, 1800]),
    };
    if effort == Effort::Full {
        steps.extend([step(1, 256, 0, true), step(1, 256, 512, false)]);
    }
    steps.retain(|s| s.past + s.rows < context);
    steps
}

/// How many rounds.
fn rounds(effort: Effort) -> usize {
    match effort {
        Effort::Quick => 2,
        Effort::Full => 16,
    }
}

/// Time of a step's turn in a round, most runs in it, and time after which no further round begins (the second does).
fn enough(effort: Effort) -> (Duration, usize, Duration) {
    match effort {
        Effort::Quick => (Duration::from_millis(8), 3, Duration::from_secs(2)),
        Effort::Full => (Duration::from_millis(30), 8, Duration::from_secs(30)),
    }
}

/// How often [`calibrate`] calls `progress` on one side.
pub(super) fn count(subject: &Subject<'_>) -> u64 {
    rounds(subject.effort) as u64
}

/// Runs steps on one side, all of the model there, gives `tables` the factors that follow, and says how well they predict.
///
/// # Errors
/// No memory for the engine beside the model; a device that failed.
pub(super) fn calibrate(
    subject: &Subject<'_>,
    accelerator: Option<&Arc<dyn Accelerator>>,
    tables: &mut Tables,
    hardware: &Hardware,
    progress: &dyn Fn(),
) -> Result<Calibration> {
    let side = if accelerator.is_some() { Side::Device } else { Side::Host };
    let (mut engine, steps) = engine(subject, accelerator, side)?;
    let timed = run(&mut engine, subject, side, &steps, progress)?;
    drop(engine);
    if steps.is_empty() {
        return Ok(Calibration::default());
    }
    let sizes = Sizes::of_weights(subject.spec, subject.weights, subject.isa);
    let predicted = |tables: &Tables, step: &Step| predict(tables, hardware, &sizes, side, step);
    tables.factors.0.retain(|f| f.side != side);
    if let Some(table) = tables.side_mut(side) {
        table.once = Curve::default();
    }
    let before = tables.clone();
    let mut seen = Vec::new();
    for (step, timed) in steps.iter().zip(&timed).filter(|(s, _)| s.calibrates) {
        seen.push(timed.seen(step, predicted(tables, step)?, side));
    }
    let (factors, once) = Factors::between(&seen);
    tables.factors.0.extend(factors.0);
    if let Some(table) = tables.side_mut(side) {
        table.once = once;
    }
    let mut operations: Vec<Compared> = seen.into_iter().flat_map(|s| s.parts).collect();
    operations.sort_by(|a, b| {
        (a.rows, a.tokens, b.predicted_s).partial_cmp(&(b.rows, b.tokens, a.predicted_s)).expect("no NaN")
    });
    let mut compared = Vec::with_capacity(steps.len());
    for (step, timed) in steps.iter().zip(&timed) {
        let total =
            |t: &Tables| Ok::<f64, Error>(predicted(t, step)?.iter().map(|part| part.predicted_s).sum());
        compared.push(StepCompared {
            sequences: step.sequences as u64,
            rows: step.rows as u64,
            past: step.past as u64,
            side,
            calibrates: step.calibrates,
            predicted_s: total(&before)?,
            calibrated_s: total(tables)?,
            executed_s: timed.whole.typical(),
        });
    }
    Ok(Calibration { operations, steps: compared })
}

/// The kinds of operations of a step, all on one side, by its program and the tables; nothing is executed yet.
fn predict(
    tables: &Tables,
    hardware: &Hardware,
    sizes: &Sizes,
    side: Side,
    step: &Step,
) -> Result<Vec<Compared>> {
    let group = |slot: usize| Group {
        request: RequestId { slot: slot as u32, generation: 0 },
        phase: if step.rows == 1 { Phase::Decode } else { Phase::Prefill },
        first: step.past as u32,
        tokens: step.rows as u32,
        kv: if side == Side::Device { Kv::Device } else { Kv::Host },
        wants: Wants::Last,
    };
    let iteration = Iteration::serial((0..step.sequences).map(group).collect(), true);
    let program = lower(&Placement::all(side, sizes.layers(), usize::MAX >> 1), &iteration)?;
    let costs = tables.costs(hardware, sizes);
    let prices = OpCosts::new(&costs, sizes).of(&iteration);
    let tokens = prices.stored().unwrap_or_default();
    let mut kinds: Vec<Compared> = Vec::new();
    for op in program.ops.iter().filter(|op| op.unit == Unit::of(side)) {
        let (kind, rows, seconds) = (op.kind.name(), op.work.rows, prices.seconds(op));
        match kinds.iter_mut().find(|k| k.kind == kind && k.rows == rows) {
            Some(k) => k.predicted_s += seconds,
            None => {
                let kind = kind.to_owned();
                kinds.push(Compared { kind, side, rows, tokens, predicted_s: seconds, executed_s: 0.0 });
            }
        }
    }
    Ok(kinds)
}

/// An engine, and those of the steps that there is memory for.
fn engine(
    subject: &Subject<'_>,
    accelerator: Option<&Arc<dyn Accelerator>>,
    side: Side,
) -> Result<(Engine, Vec<Step>)> {
    let mut steps = steps(subject.spec.max_context, subject.effort, side);
    let most = |steps: &[Step], of: fn(&Step) -> usize| steps.iter().map(of).max().unwrap_or(1);
    loop {
        let mut options = Options::new(subject.isa, most(&steps, |s| s.past + s.rows + 1));
        let pages = |s: &Step| s.sequences * KvGeometry::pages_for(s.past + s.rows);
        options.pages = Some(steps.iter().map(pages).sum::<usize>().max(1));
        options.sequences = steps.iter().map(|s| s.sequences).sum::<usize>().max(1);
        options.threads = Some(subject.pool.threads());
        let (spec, weights) = (subject.spec.clone(), subject.weights);
        let made = match accelerator {
            None => fits(subject, &options).and_then(|()| Engine::new(spec, weights, &options, &|_| ())),
            Some(a) => Engine::on_accelerator(spec, weights, &options, a.clone(), "device", &|_| ()),
        };
        match (made, steps.iter().map(pages).max()) {
            // Without the largest there may be room.
            (Err(Error::Capacity(_)), Some(largest)) if steps.len() > 1 => {
                steps.retain(|s| pages(s) < largest)
            }
            (made, _) => return Ok((made?, steps)),
        }
    }
}

/// Keys and values of all steps take no more than a quarter of the memory.
fn fits(subject: &Subject<'_>, options: &Options) -> Result<()> {
    let spec = subject.spec;
    let token = 4 * spec.n_layers * spec.kv_dim();
    let bytes = options.pages.unwrap_or_default() * crate::cache::PAGE_TOKENS * token;
    match memory_available().is_none_or(|available| bytes as u64 <= available / 4) {
        true => Ok(()),
        false => Err(Error::Capacity(format!("{bytes} bytes of keys and values to calibrate"))),
    }
}

/// Runs all steps, in turns.
fn run(
    engine: &mut Engine,
    subject: &Subject<'_>,
    side: Side,
    steps: &[Step],
    progress: &dyn Fn(),
) -> Result<Vec<Timed>> {
    let (time, most, total) = enough(subject.effort);
    let mut turns = steps.iter().map(|s| Turn::new(engine, s, side)).collect::<Result<Vec<_>>>()?;
    // Neighbours read about as much, so that each finds the caches nearly as if it had run all the time.
    turns.sort_by_key(|t| t.step.sequences * (t.step.past + t.step.rows));
    let begun = Instant::now();
    for round in 0..rounds(subject.effort) {
        for turn in &mut turns {
            // Long prompts vary little: they have a few turns.
            if begun.elapsed() < total && (round < 3 || turn.step.rows == 1) || round < 2 {
                turn.take(engine, side, time, most)?;
            }
        }
        // Up, then down.
        turns.reverse();
        progress();
    }
    let ids: Vec<RequestId> = turns.iter().flat_map(|t| t.sequences.iter().copied()).collect();
    ids.into_iter().for_each(|id| engine.remove(id));
    turns.sort_by_key(|t| steps.iter().position(|s| s == t.step));
    Ok(turns.into_iter().map(|t| t.timed).collect())
}

/// Seconds of a step.
#[derive(Default)]
struct Timed {
    /// Samples of whole steps.
    whole: Samples,
    /// Samples of the operations of each kind, all layers together.
    kinds: HashMap<&'static str, Samples>,
    /// Samples of the time around and between operations, of steps with a timeline.
    once: Samples,
}

impl Timed {
    /// As calibration wants it. `parts`: as they are predicted.
    fn seen(&self, step: &Step, mut parts: Vec<Compared>, side: Side) -> Seen {
        let seconds = self.whole.typical();
        let sum: f64 = parts.iter().map(|p| p.predicted_s).sum();
        if self.kinds.is_empty() {
            // Where only the whole step was timed, all operations share its error.
            parts.iter_mut().for_each(|p| p.executed_s = seconds * p.predicted_s / sum);
            let (rows, tokens) = ((step.sequences * step.rows) as u64, parts.first().map_or(0, |p| p.tokens));
            return Seen { rows, tokens, seconds, once_s: 0.0, parts };
        }
        for part in &mut parts {
            part.executed_s = self.kinds.get(&*part.kind).map_or(0.0, Samples::typical);
        }
        let rows = (step.sequences * step.rows) as u64;
        // The last layer of a prompt goes on with the rows that want logits: of their operations the timeline is taken to say what
        // the tables say.
        let fewer: Vec<(String, f64)> =
            parts.iter().filter(|p| p.rows < rows).map(|p| (p.kind.clone(), p.predicted_s)).collect();
        for (kind, predicted_s) in fewer {
            let Some(most) = parts.iter_mut().find(|p| p.kind == kind && p.rows == rows) else { continue };
            let theirs = predicted_s.min(most.executed_s);
            most.executed_s -= theirs;
            let of_few = parts.iter_mut().filter(|p| p.kind == kind && p.rows < rows);
            of_few.for_each(|p| p.executed_s = theirs);
        }
        let executed: f64 = parts.iter().map(|p| p.executed_s).sum();
        let once_s = match side {
            Side::Host => self.once.median(),
            // Recorded graphs leave less between operations than the same step launched one by one.
            Side::Device => self.once.median().min((seconds - executed).max(0.0)),
        };
        let tokens = parts.first().map_or(0, |p| p.tokens);
        Seen { rows, tokens, seconds, once_s, parts }
    }
}

/// Sequences with their tokens stored, and the rows that a step adds to each.
struct Turn<'a> {
    step: &'a Step,
    sequences: Vec<RequestId>,
    new: Vec<Vec<u32>>,
    timed: Timed,
}

impl<'a> Turn<'a> {
    /// Stores the tokens before the step.
    fn new(engine: &mut Engine, step: &'a Step, side: Side) -> Result<Turn<'a>> {
        let vocab = engine.spec().vocab;
        let tokens = |n: usize, seed: usize| -> Vec<u32> {
            (0..n).map(|i| ((i * 7919 + seed * 104_729 + 13) % vocab) as u32).collect()
        };
        let sequences: Vec<RequestId> = (0..step.sequences).map(|_| engine.add()).collect();
        for (i, &seq) in sequences.iter().enumerate() {
            match side {
                _ if step.past == 0 => {}
                // Attention takes as long whatever the keys and values are, and computing them would take minutes.
                Side::Host => engine.store_blank(seq, step.past)?,
                Side::Device => {
                    engine.prefill(seq, &tokens(step.past, i), |_| {})?;
                }
            }
        }
        let new = (0..step.sequences).map(|i| tokens(step.rows, 1 + i)).collect();
        Ok(Turn { step, sequences, new, timed: Timed::default() })
    }

    /// Runs the step; its tokens are forgotten again. Returns the seconds.
    fn once(&self, engine: &mut Engine) -> Result<f64> {
        let inputs: Vec<NewTokens<'_>> = self
            .sequences
            .iter()
            .zip(&self.new)
            .map(|(&seq, tokens)| NewTokens { id: seq, tokens, wants: Wants::Last })
            .collect();
        let begun = Instant::now();
        engine.forward_picks(&inputs)?;
        let seconds = begun.elapsed().as_secs_f64();
        self.sequences.iter().for_each(|&s| engine.truncate(s, self.step.past));
        Ok(seconds)
    }

    /// Some runs of the whole step, then some for its parts.
    fn take(&mut self, engine: &mut Engine, side: Side, time: Duration, most: usize) -> Result<()> {
        let begun = Instant::now();
        // Caches warm up; and where steps are recorded, the second of a kind is, and the third is the first that counts.
        for run in 0..12 {
            if run < 3 && begun.elapsed() < 2 * time || begun.elapsed() < time {
                self.once(engine)?;
            }
        }
        let begun = Instant::now();
        for run in 0..most {
            if run < 2 || begun.elapsed() < time {
                let seconds = self.once(engine)?;
                self.timed.whole.push(seconds);
            }
        }
        if self.step.calibrates {
            self.parts(engine, side, time, most)?;
        }
        Ok(())
    }

    /// Runs for the parts of the step, as the engine's timeline has them.
    fn parts(&mut self, engine: &mut Engine, side: Side, time: Duration, most: usize) -> Result<()> {
        let begun = Instant::now();
        engine.trace();
        let mut whole = Vec::with_capacity(most);
        while whole.len() < 2 || whole.len() < most && begun.elapsed() < time {
            whole.push(self.once(engine)?);
        }
        let spans = engine.end_trace().map_or(Vec::new(), |t| t.spans);
        let mut kinds: HashMap<&'static str, Vec<f64>> = HashMap::new();
        let mut between = whole.clone();
        for s in spans.iter().filter(|s| s.unit == Unit::of(side)) {
            let (step, seconds) = (s.step as usize, s.end - s.start);
            if step < whole.len() {
                kinds.entry(s.name).or_insert_with(|| vec![0.0; whole.len()])[step] += seconds;
                between[step] -= seconds;
            }
        }
        // The first run after others without a timeline makes its memory.
        for (kind, seconds) in kinds {
            let samples = self.timed.kinds.entry(kind).or_default();
            seconds[1..].iter().for_each(|&s| samples.push(s));
        }
        between[1..].iter().for_each(|&s| self.timed.once.push(s.max(0.0)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_check_are_at_contexts_that_no_step_calibrates() {
        for (effort, side) in
            [(Effort::Quick, Side::Host), (Effort::Full, Side::Host), (Effort::Full, Side::Device)]
        {
            let all = steps(4096, effort, side);
            let (calibrate, check): (Vec<&Step>, Vec<&Step>) = all.iter().partition(|s| s.calibrates);
            assert!(!calibrate.is_empty() && !check.is_empty());
            assert!(check.iter().all(|c| calibrate.iter().all(|s| (s.rows, s.past) != (c.rows, c.past))));
            assert!(steps(100, effort, side).iter().all(|s| s.past + s.rows < 100));
            assert!(steps(1, effort, side).is_empty());
        }
    }

    #[test]
    fn rows_that_go_on_alone_in_the_last_layer_are_taken_out_of_their_kind() {
        let part = |rows, predicted_s| Compared {
            kind: "ffn_up".into(),
            side: Side::Host,
            rows,
            tokens: 40,
            predicted_s,
            executed_s: 0.0,
        };
        let step = Step { sequences: 1, rows: 64, past: 0, calibrates: true };
        let kinds = HashMap::from([("ffn_up", Samples::new(vec![5.0]))]);
        let timed = Timed { whole: Samples::new(vec![5.0]), kinds, once: Samples::default() };
        let seen = timed.seen(&step, vec![part(64, 8.0), part(1, 0.5)], Side::Host);
        assert_eq!([seen.parts[0].executed_s, seen.parts[1].executed_s], [4.5, 0.5]);
    }

    #[test]
    fn operations_that_were_not_timed_share_the_error_of_the_step() {
        let part = |kind: &str, predicted_s| Compared {
            kind: kind.into(),
            side: Side::Host,
            rows: 4,
            tokens: 40,
            predicted_s,
            executed_s: 0.0,
        };
        let step = Step { sequences: 4, rows: 1, past: 9, calibrates: true };
        let mut timed = Timed { whole: Samples::new(vec![8.0]), ..Timed::default() };
        let parts = vec![part("ffn_up", 3.0), part("head", 1.0)];
        let seen = timed.seen(&step, parts.clone(), Side::Host);
        let executed: Vec<f64> = seen.parts.iter().map(|p| p.executed_s).collect();
        assert_eq!((executed, seen.once_s, seen.rows, seen.tokens), (vec![6.0, 2.0], 0.0, 4, 40));
        // Parts that leave less than what is between them on a slower way to launch them.
        timed.kinds = HashMap::from([("ffn_up", Samples::new(vec![5.0])), ("head", Samples::new(vec![2.0]))]);
        timed.once = Samples::new(vec![4.0]);
        assert_eq!(timed.seen(&step, parts.clone(), Side::Device).once_s, 1.0);
        assert_eq!(timed.seen(&step, parts, Side::Host).once_s, 4.0);
    }
}
