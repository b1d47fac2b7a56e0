//! Running real steps by the engine, and holding the tables' predictions against them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::calibrate::{Calibration, Compared, Factors, StepCompared};
use super::measure::Subject;
use super::sample::{Effort, Samples};
use super::tables::Tables;
use crate::Result;
use crate::device::accelerator::Accelerator;
use crate::engine::{Engine, Input, Logits, Options, SeqId};
use crate::plan::{Hardware, OpCosts, Sizes};
use crate::program::virtual_machine::Costs as _;
use crate::program::{Group, Iteration, Kv, Phase, Placement, RequestId, Side, Unit, Wants, lower};

/// A step that is run and predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    sequences: usize,
    rows: usize,
    past: usize,
    calibrates: bool,
}

/// What of a step was timed.
struct Timed {
    /// Of the whole step.
    seconds: f64,
    /// Of the operations of each kind, all layers together, where the engine times them.
    kinds: HashMap<String, f64>,
}

impl Timed {
    /// Makes the parts add up to the whole, which was timed apart from them.
    fn fit(&mut self) {
        let parts: f64 = self.kinds.values().sum();
        if parts > self.seconds {
            // The machine was slower while the parts were timed.
            self.kinds.values_mut().for_each(|part| *part *= self.seconds / parts);
        } else if let Some(embed) = self.kinds.get_mut("embed") {
            // Between operations, and before the first: what a step takes once is counted with the embedding.
            *embed += self.seconds - parts;
        }
    }
}

/// The steps: those that calibrate, then those that check, at other contexts.
fn steps(context: usize, effort: Effort) -> Vec<Step> {
    let step = |sequences, rows, past, calibrates| Step { sequences, rows, past, calibrates };
    let mut steps = match effort {
        Effort::Quick => {
            vec![step(1, 1, 63, true), step(2, 1, 63, true), step(1, 1, 127, false), step(2, 1, 31, false)]
        }
        Effort::Full => {
            let mut all = vec![step(1, 1, 400, true), step(4, 1, 400, true), step(1, 256, 0, true)];
            for sequences in [1, 4] {
                all.extend([100, 900, 1800].map(|past| step(sequences, 1, past, false)));
            }
            all.push(step(1, 256, 512, false));
            all
        }
    };
    steps.retain(|s| s.past + s.rows < context);
    steps
}

/// How many steps of a subject are run on one side.
pub(super) fn count(subject: &Subject<'_>) -> u64 {
    steps(subject.spec.max_context, subject.effort).len() as u64
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
    let steps = steps(subject.spec.max_context, subject.effort);
    if steps.is_empty() {
        return Ok(Calibration::default());
    }
    let sizes = Sizes::of_weights(subject.spec, subject.weights, subject.isa);
    let predicted = |tables: &Tables, step: &Step| predict(tables, hardware, &sizes, side, step);
    let mut engine = engine(subject, accelerator, &steps)?;
    let mut executed = Vec::with_capacity(steps.len());
    for step in &steps {
        let mut ready = Ready::new(&mut engine, step)?;
        let seconds = ready.whole(subject.effort)?.typical();
        ready.done();
        executed.push(Timed { seconds, kinds: HashMap::new() });
        progress();
    }
    // A timeline takes time itself: whole steps come first, then the parts of those that calibrate.
    for (step, timed) in steps.iter().zip(&mut executed).filter(|(s, _)| s.calibrates) {
        let mut ready = Ready::new(&mut engine, step)?;
        timed.kinds = ready.operations(side, runs(subject.effort))?;
        ready.done();
        timed.fit();
    }
    drop(engine);
    let mut operations = Vec::new();
    for (step, timed) in steps.iter().zip(&executed).filter(|(s, _)| s.calibrates) {
        let by_kind = predicted(tables, step)?;
        let sum: f64 = by_kind.values().sum();
        for (kind, predicted_s) in by_kind {
            // Where only the whole step was timed, all operations share its error.
            let executed_s = match timed.kinds.is_empty() {
                true => timed.seconds * predicted_s / sum,
                false => timed.kinds.get(kind).copied().unwrap_or(0.0),
            };
            let rows = (step.sequences * step.rows) as u64;
            operations.push(Compared { kind: kind.to_owned(), side, rows, predicted_s, executed_s });
        }
    }
    operations.sort_by(|a, b| (a.rows, b.predicted_s).partial_cmp(&(b.rows, a.predicted_s)).expect("no NaN"));
    let before = tables.clone();
    tables.factors.0.retain(|f| f.side != side);
    tables.factors.0.extend(Factors::between(&operations).0);
    let mut compared = Vec::with_capacity(steps.len());
    for (step, timed) in steps.iter().zip(&executed) {
        let total = |t: &Tables| Ok::<f64, crate::Error>(predicted(t, step)?.values().sum());
        compared.push(StepCompared {
            sequences: step.sequences as u64,
            rows: step.rows as u64,
            past: step.past as u64,
            side,
            calibrates: step.calibrates,
            predicted_s: total(&before)?,
            calibrated_s: total(tables)?,
            executed_s: timed.seconds,
        });
    }
    Ok(Calibration { operations, steps: compared })
}

/// Seconds of each kind of operation of a step, all on one side, by its program and the tables.
fn predict(
    tables: &Tables,
    hardware: &Hardware,
    sizes: &Sizes,
    side: Side,
    step: &Step,
) -> Result<HashMap<&'static str, f64>> {
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
    let mut kinds: HashMap<&'static str, f64> = HashMap::new();
    for op in program.ops.iter().filter(|op| op.unit == Unit::of(side)) {
        *kinds.entry(op.kind.name()).or_default() += prices.seconds(op);
    }
    Ok(kinds)
}

fn engine(
    subject: &Subject<'_>,
    accelerator: Option<&Arc<dyn Accelerator>>,
    steps: &[Step],
) -> Result<Engine> {
    let most = |of: fn(&Step) -> usize| steps.iter().map(of).max().unwrap_or(1);
    let mut options = Options::new(subject.isa, most(|s| s.past + s.rows + 1));
    options.sequences = most(|s| s.sequences);
    options.logits = options.sequences;
    options.threads = Some(subject.pool.threads());
    let (spec, weights) = (subject.spec.clone(), subject.weights);
    match accelerator {
        None => Engine::new(spec, weights, &options, &|_| ()),
        Some(a) => Engine::on_accelerator(spec, weights, &options, a.clone(), "device", &|_| ()),
    }
}

/// Time for one step, and most runs of it.
fn enough(effort: Effort) -> (Duration, usize) {
    match effort {
        Effort::Quick => (Duration::from_millis(40), 8),
        Effort::Full => (Duration::from_millis(1200), 60),
    }
}

/// Runs of a step whose operations are timed.
fn runs(effort: Effort) -> usize {
    match effort {
        Effort::Quick => 4,
        Effort::Full => 24,
    }
}

/// Sequences with their tokens stored, and the rows that a step adds to each.
struct Ready<'a> {
    engine: &'a mut Engine,
    step: &'a Step,
    sequences: Vec<SeqId>,
    new: Vec<Vec<u32>>,
}

impl<'a> Ready<'a> {
    /// Stores the tokens before the step.
    fn new(engine: &'a mut Engine, step: &'a Step) -> Result<Ready<'a>> {
        let vocab = engine.spec().vocab;
        let tokens = |n: usize, seed: usize| -> Vec<u32> {
            (0..n).map(|i| ((i * 7919 + seed * 104_729 + 13) % vocab) as u32).collect()
        };
        let sequences: Vec<SeqId> = (0..step.sequences).map(|_| engine.add()).collect();
        for (i, &seq) in sequences.iter().enumerate() {
            if step.past > 0 {
                engine.prefill(seq, &tokens(step.past, i), |_| {})?;
            }
        }
        let new = (0..step.sequences).map(|i| tokens(step.rows, 1 + i)).collect();
        Ok(Ready { engine, step, sequences, new })
    }

    /// Ends the sequences.
    fn done(self) {
        let Ready { engine, sequences, .. } = self;
        sequences.into_iter().for_each(|s| engine.remove(s));
    }

    /// Runs the step; its tokens are forgotten again. Returns the seconds.
    fn once(&mut self) -> Result<f64> {
        let inputs: Vec<Input<'_>> = self
            .sequences
            .iter()
            .zip(&self.new)
            .map(|(&seq, tokens)| Input { seq, tokens, logits: Logits::Last })
            .collect();
        let begun = Instant::now();
        self.engine.forward_greedy(&inputs)?;
        let seconds = begun.elapsed().as_secs_f64();
        self.sequences.iter().for_each(|&s| self.engine.truncate(s, self.step.past));
        Ok(seconds)
    }

    /// Seconds of the whole step, after warm-ups.
    fn whole(&mut self, effort: Effort) -> Result<Samples> {
        // Where steps are recorded, the second of a kind is; the third is the first that counts.
        for _ in 0..3 {
            self.once()?;
        }
        let ((time, most), begun, mut samples) = (enough(effort), Instant::now(), Samples::default());
        while samples.len() < 3 || begun.elapsed() < time && samples.len() < most {
            samples.push(self.once()?);
        }
        Ok(samples)
    }

    /// Seconds of the operations of each kind, all layers together, as the engine's timeline has them.
    fn operations(&mut self, side: Side, runs: usize) -> Result<HashMap<String, f64>> {
        self.engine.trace();
        for _ in 0..runs {
            self.once()?;
        }
        let spans = self.engine.timeline().map_or(Vec::new(), |t| t.spans);
        let mut steps: HashMap<&str, Vec<f64>> = HashMap::new();
        for s in spans.iter().filter(|s| s.unit == Unit::of(side)) {
            let of = steps.entry(s.name).or_insert_with(|| vec![0.0; runs]);
            if let Some(sum) = of.get_mut(s.step as usize) {
                *sum += s.end - s.start;
            }
        }
        Ok(steps.into_iter().map(|(kind, of)| (kind.to_owned(), Samples::new(of).typical())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_whole() {
        for (seconds, want) in [(4.0, [1.0, 3.0]), (10.0, [4.0, 6.0])] {
            let kinds = HashMap::from([("embed".to_owned(), 2.0), ("head".to_owned(), 6.0)]);
            let mut timed = Timed { seconds, kinds };
            timed.fit();
            assert_eq!([timed.kinds["embed"], timed.kinds["head"]], want);
        }
    }
}
