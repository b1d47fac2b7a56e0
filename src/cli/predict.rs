//! Predicts times for the choice of a placement: the machine, the work, and the presentation.

use std::sync::Arc;

use serde_json::{Value, json};
use tandem::Error;
use tandem::device::{DeviceInfo, Kind};
use tandem::engine::{Among, Choice, Considered, Options, Prices, Sizes, Timed, choose_by_time};
use tandem::model::LoadedModel;
use tandem::plan::{
    self, CostSource, Costs, FarForecast, Hardware, Predictor, Spilled, StepTimes, Strategy as System,
    Uncached, Workload, programs,
};
use tandem::profile::{
    ModelIdentity, Tables, Timings, estimate, estimate_cpu, measured_hardware, measured_tables,
    similar_device,
};
use tandem::program::Placement;
use tandem::sched;
use tandem::simd::Isa;

use super::args::EngineArgs;
use super::figures;
use super::progress::{self, megabytes};

/// The work of a run, as far as known in advance.
#[derive(Debug, Clone, Copy)]
pub struct Use {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Decode steps.
    pub gen_len: usize,
    /// Sequences.
    pub batch: usize,
}

/// The data that predictions are based on.
struct Basis {
    hardware: Hardware,
    /// Timings of the real kernels, if this model was profiled here.
    tables: Option<Tables>,
    /// The machine whose times these are, if not this machine.
    whose: Option<String>,
    from: String,
}

/// The machine with this device, or without one: from `--hardware`, from a measurement, or from a quick probe; with weights on
/// the nodes of `--weights-node`, if anything is known of them. `None`, after a message, if there are no figures.
fn basis(
    args: &EngineArgs,
    model: &LoadedModel,
    device: Option<(&Kind, &DeviceInfo)>,
) -> tandem::Result<Option<Basis>> {
    let Some(basis) = figures_of(args, model, device)? else { return Ok(None) };
    if basis.hardware.weights.is_some() {
        return Ok(Some(basis));
    }
    let hardware = args.with_weights(&basis.hardware).unwrap_or_else(|_| {
        progress::note(
            "--weights-node: the speed of these nodes is not known, and predictions take weights to be in the CPU's own \
             memory; tandem profile measures it",
        );
        basis.hardware.clone()
    });
    Ok(Some(Basis { hardware, ..basis }))
}

/// The same with all weights in the CPU's own memory.
fn figures_of(
    args: &EngineArgs,
    model: &LoadedModel,
    device: Option<(&Kind, &DeviceInfo)>,
) -> tandem::Result<Option<Basis>> {
    if args.hardware != "auto" {
        let model = ModelIdentity::of(&model.spec, &model.weights, &model.source);
        let found = figures::hardware(&args.hardware, Some(&model));
        let (hardware, tables) = found.map_err(|e| match e.downcast::<Error>() {
            Ok(e) => e,
            Err(e) => Error::usage(e.to_string()),
        })?;
        if let (None, Some((_, info))) = (hardware.accelerator, device) {
            return Err(Error::usage(format!(
                "--hardware {}: describes no GPU, and this is to run on {}",
                args.hardware, info.name
            )));
        }
        let from = format!("--hardware {}", args.hardware);
        let whose = Some(hardware.name.clone());
        return Ok(Some(Basis { hardware, tables, whose, from }));
    }
    if let Some(machine) = args.timed_machine() {
        let (hardware, name) = (Hardware::clone(&machine), machine.name.clone());
        let from = format!("the machine of --device emulated:{name}");
        return Ok(Some(Basis { hardware, tables: None, whose: Some(name), from }));
    }
    let info = device.map(|(_, info)| info);
    let there = |h: &Hardware| info.is_none() || h.accelerator.is_some();
    if let Some(hardware) = measured_hardware(info).filter(there) {
        let tables = measured_tables(info, &model.spec, &model.weights, &model.source);
        let from = match tables {
            Some(_) => "timings of this model on this machine",
            None => "limits measured on this machine",
        };
        return Ok(Some(Basis { hardware, tables, whose: None, from: from.into() }));
    }
    let threads = args.threads.map(|t| t as usize);
    let Some(info) = info else {
        let from = "a probe of this CPU; tandem profile measures".to_owned();
        let probed = estimate_cpu(threads);
        return Ok(probed.map(|hardware| Basis { hardware, tables: None, whose: None, from }));
    };
    match estimate(info, threads) {
        Some(hardware) => {
            let like = similar_device(info).unwrap_or_default();
            let from = format!("a probe of this CPU and the figures of {like}; tandem profile measures");
            // An emulated device stands in for another machine's GPU.
            let whose = (info.driver == 0).then(|| format!("the GPU of {like}"));
            Ok(Some(Basis { hardware, tables: None, whose, from }))
        }
        None => {
            progress::note(&format!(
                "no figures of {}: choosing by memory alone (tandem profile measures, --hardware names a description)",
                info.name
            ));
            Ok(None)
        }
    }
}

/// The fastest placement that fits, and its predicted time; `None` if nothing can be predicted, or nothing fits.
///
/// # Errors
/// If the hardware description cannot be read or has no GPU, or the user fixed something that the model does not have.
pub fn fastest(
    args: &EngineArgs,
    model: &LoadedModel,
    device: (&Kind, &DeviceInfo),
    options: &Options,
    sizes: &Sizes,
    among: Among,
    work: Use,
) -> tandem::Result<Option<Prediction>> {
    let Some(basis) = basis(args, model, Some(device))? else { return Ok(None) };
    let post_norms = model.spec.post_norms;
    predict(basis, model, options, work, |costs, model, work| {
        choose_by_time(sizes, among, &Prices { costs, model, work, post_norms })
    })
}

/// Predictions for schedulers of requests on two sides.
pub struct Scheduling {
    source: Arc<dyn CostSource>,
    sizes: plan::Sizes,
    placement: Placement,
}

impl Scheduling {
    /// Predictions for a scheduler.
    pub fn predict(&self) -> Box<dyn sched::Predict + Send> {
        Box::new(Predictor::of(self.source.clone(), self.sizes.clone(), self.placement.clone()))
    }
}

/// Predictions for schedulers of a model in this placement on this machine with this device; `None` if there are no
/// figures.
///
/// # Errors
/// A description of hardware that cannot be read, or has no GPU.
pub fn scheduling(
    args: &EngineArgs,
    model: &LoadedModel,
    device: (&Kind, &DeviceInfo),
    placement: &Placement,
) -> tandem::Result<Option<Scheduling>> {
    let Some(Basis { hardware, tables, .. }) = basis(args, model, Some(device))? else { return Ok(None) };
    let sizes = plan::Sizes::of_weights(&model.spec, &model.weights, Isa::selected()?);
    let source: Arc<dyn CostSource> = match tables {
        Some(_) => source(hardware, tables),
        None => Arc::new(Uncached(hardware)),
    };
    Ok(Some(Scheduling { source, sizes, placement: placement.clone() }))
}

/// The source of costs: timings if there are any.
fn source(hardware: Hardware, tables: Option<Tables>) -> Arc<dyn CostSource> {
    match tables {
        Some(tables) => Arc::new(Timings::new(hardware, tables)),
        None => Arc::new(hardware),
    }
}

/// The predicted time with everything on one side: on `device`, or without one on the CPU. `None` if nothing can be
/// predicted.
///
/// # Errors
/// A description of hardware that cannot be read, or has no GPU.
pub fn alone(
    args: &EngineArgs,
    model: &LoadedModel,
    device: Option<(&Kind, &DeviceInfo)>,
    options: &Options,
    choice: Choice,
    work: Use,
) -> tandem::Result<Option<Prediction>> {
    let Some(basis) = basis(args, model, device)? else { return Ok(None) };
    let strategy = if device.is_some() { System::GpuOnly } else { System::CpuOnly };
    predict(basis, model, options, work, |costs, sized, work| {
        // Unlimited pages.
        let placement = Placement { device_pages: usize::MAX >> 1, ..choice.placement.clone() };
        let run = programs(costs, sized, &placement, &work)?;
        let considered = Considered {
            strategy,
            what: format!("everything on the {}", if device.is_some() { "device" } else { "CPU" }),
            seconds: Some((run.prefill, run.decode)),
            bytes: (choice.device.total(), choice.host.total()),
        };
        let why = format!("{}: as it was asked for", strategy.name());
        let considered = vec![considered];
        Ok(Some(Timed { strategy, choice, run, considered, fitting: 1, far: None, why }))
    })
}

/// Calls `choose` with the costs of this machine and the sizes of the model.
fn predict(
    basis: Basis,
    model: &LoadedModel,
    options: &Options,
    work: Use,
    choose: impl FnOnce(&dyn Costs, &plan::Sizes, Workload) -> tandem::Result<Option<Timed>>,
) -> tandem::Result<Option<Prediction>> {
    let sized = plan::Sizes::of_weights(&model.spec, &model.weights, Isa::selected()?);
    let work = Workload {
        prompt: work.prompt.max(1) as u64,
        gen_len: work.gen_len as u64,
        batch: work.batch.max(1) as u64,
        chunk: options.chunk.min(options.context) as u64,
    };
    // No prediction if the figures would overflow.
    if plan::countable(&sized, work.batch, work.context()).is_err() {
        return Ok(None);
    }
    let mut choose = Some(choose);
    let mut chosen = Ok(None);
    let Basis { hardware, tables, whose, from } = basis;
    let source = source(hardware, tables);
    source.ask(&sized, &mut |costs| {
        if let Some(choose) = choose.take() {
            chosen = choose(costs, &sized, work);
        }
    });
    let times = StepTimes::of(source, sized);
    Ok(chosen?.map(|timed| Prediction { timed, work, whose, from, times }))
}

/// A choice by predicted time.
pub struct Prediction {
    /// The choice.
    pub timed: Timed,
    work: Workload,
    whose: Option<String>,
    from: String,
    times: StepTimes,
}

/// `1.23 s`, `12.3 ms`, `123 us`.
pub fn seconds(t: f64) -> String {
    match t {
        t if t >= 100.0 => format!("{t:.0} s"),
        t if t >= 1.0 => format!("{t:.2} s"),
        t if t >= 1e-3 => format!("{:.1} ms", t * 1e3),
        t => format!("{:.0} us", t * 1e6),
    }
}

impl Prediction {
    fn step(&self) -> Option<f64> {
        let n = self.work.gen_len;
        (n > 0).then(|| self.timed.run.decode / n as f64)
    }

    /// Predictions of steps, for as long as the model runs.
    pub fn times(&self) -> StepTimes {
        self.times.clone()
    }

    /// `predicted: 12.3 ms for the prompt, 1.2 ms a token`; `predicted for a100-spr: …` if that is another machine.
    pub fn brief(&self) -> String {
        let whose =
            self.whose.as_ref().map_or(String::new(), |name| format!(" for {}", progress::one_line(name)));
        let prompt = format!("predicted{whose}: {} for the prompt", seconds(self.timed.run.prefill));
        match self.step() {
            Some(step) => format!("{prompt}, {} a token", seconds(step)),
            None => prompt,
        }
    }

    /// Why it won: a line for each strategy.
    pub fn why(&self) -> Vec<String> {
        let t = &self.timed;
        let mut lines = vec![format!(
            "{}; of {} placements that fit, for {} x {} + {} tokens, by {}",
            t.why, t.fitting, self.work.batch, self.work.prompt, self.work.gen_len, self.from
        )];
        for c in &t.considered {
            let time = match c.seconds {
                Some((prefill, decode)) => format!("{} + {}", seconds(prefill), seconds(decode)),
                None => "does not fit".into(),
            };
            lines.push(format!(
                "  {:<9} {time:>20}  {:>9} of the device  {:>9} of the host  {}",
                c.strategy.name(),
                megabytes(c.bytes.0),
                megabytes(c.bytes.1),
                c.what
            ));
        }
        lines.extend(t.far.as_ref().map(|far| told(far, self.work.context())));
        lines
    }

    /// For `plan` in JSON.
    pub fn json(&self) -> Value {
        let t = &self.timed;
        let candidates: Vec<Value> = t
            .considered
            .iter()
            .map(|c| {
                json!({
                    "strategy": c.strategy.name(),
                    "feasible": c.seconds.is_some(),
                    "what": c.what,
                    "t_prefill_s": c.seconds.map(|s| s.0),
                    "t_decode_s": c.seconds.map(|s| s.1),
                    "gpu_bytes": c.bytes.0,
                    "host_bytes": c.bytes.1,
                })
            })
            .collect();
        json!({
            "prompt_len": self.work.prompt,
            "gen_len": self.work.gen_len,
            "batch": self.work.batch,
            "t_prefill_s": t.run.prefill,
            "t_decode_s": t.run.decode,
            "t_decode_step_s": self.step(),
            "by": self.from,
            "why": t.why,
            "far": t.far,
            "candidates": candidates,
        })
    }
}

/// A sentence on how decode steps attend pages that left the device.
pub fn told(far: &FarForecast, context: u64) -> String {
    let way = |w: Spilled| match w {
        Spilled::Split => "attended by the cpu",
        Spilled::Streamed => "streamed",
    };
    let ways: Vec<String> =
        far.ways.iter().map(|&(from, w)| format!("{} from token {from} on", way(w))).collect();
    format!(
        "pages that left the device: {}; a token at {context} takes {} with them attended by the cpu, {} streamed",
        ways.join(", "),
        seconds(far.attend_s),
        seconds(far.stream_s)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_time() {
        for (t, want) in
            [(123.4, "123 s"), (1.234, "1.23 s"), (0.2055, "205.5 ms"), (5.5e-6, "6 us"), (0.0, "0 us")]
        {
            assert_eq!(seconds(t), want);
        }
    }
}
