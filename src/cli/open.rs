//! Opens the model of `-m`, starts an engine with the given options, and tells where it runs.

use std::sync::Arc;

use tandem::device::Runtime;
use tandem::engine::{self, Engine};
use tandem::model::LoadedModel;
use tandem::open::{Demand, Model, Needs, PlacementDecision, RouterLearning, Scheduled};
use tandem::simd::Isa;
use tandem::simd::linear;
use tandem::{Error, Result};

use super::args::EngineArgs;
use super::decision::DecisionWords;
use super::progress::{self, Stderr};

/// The tier whose kernels a command measures and stores.
///
/// # Errors
/// As [`Isa::selected`]; and if `TANDEM_LINEAR` is set, since the measured times of the kernel that it names would be
/// used for runs without it.
pub fn measured_tier() -> Result<Isa> {
    let isa = Isa::selected()?;
    match linear::forced(isa)? {
        None => Ok(isa),
        Some(kernel) => Err(Error::Usage(format!(
            "TANDEM_LINEAR: what {kernel} alone takes is not kept for other runs; unset it to measure"
        ))),
    }
}

/// Reads the model that `-m` names, fetching the default one on first use.
pub fn open(name: Option<&str>) -> Result<Model> {
    Model::named(name, &Stderr::default())
}

/// The model that `name` names, for a description: random weights are not generated.
pub fn outline(name: &str) -> Result<LoadedModel> {
    Model::outline(name, &Stderr::default())
}

/// An engine for `demand`, where the options say.
pub fn engine(model: &Model, args: &EngineArgs, demand: &Demand) -> Result<LoadedEngine> {
    let running = model.engine(&args.settings(), demand, &Stderr::default())?;
    let tandem::open::Running { engine, load_ms, decision, notes, details, runtime } = running;
    DecisionWords(&decision).tell();
    notes.iter().for_each(|note| progress::note(note));
    details.iter().for_each(|detail| progress::detail(detail));
    Ok(LoadedEngine { engine, load_ms, decision, notices: Notices(runtime) })
}

/// An engine for `parallel` requests together, or for as many as fit in memory.
pub fn scheduled(
    model: &Model,
    args: &EngineArgs,
    needs: &Needs,
    parallel: Option<u32>,
) -> Result<(Scheduled, Notices)> {
    let parallel = parallel.map(|n| n as usize);
    let scheduled = model.scheduled(&args.settings(), needs, parallel, &Stderr::default())?;
    if let Some(decision) = &scheduled.decision {
        DecisionWords(decision).tell();
    }
    scheduled.notes.iter().for_each(|note| progress::note(note));
    scheduled.details.iter().for_each(|detail| progress::detail(detail));
    let notices = Notices(scheduled.runtime.clone());
    Ok((scheduled, notices))
}

/// Keeps what the routers chose while a model ran, if that was counted. A run does not fail because it cannot be kept.
pub fn keep_router(learning: Option<RouterLearning>, engine: &mut Engine) {
    let Some(learning) = learning else { return };
    match learning.keep(engine) {
        Ok(Some((tokens, path))) => progress::detail(&format!(
            "what the routers chose for {tokens} tokens is kept for later runs: {}",
            path.display()
        )),
        Ok(None) => {}
        Err(error) => progress::note(&format!("what the routers chose is not kept: {error}")),
    }
}

/// Where an engine for many requests runs, in a sentence.
pub fn placement(scheduled: &Scheduled) -> String {
    let decided = scheduled.decision.as_ref().map(|decision| DecisionWords(decision).line());
    // Without a decision, its place is the first that was noted.
    decided.or_else(|| scheduled.notes.first().cloned()).unwrap_or_default()
}

/// An engine and the time it took to load.
pub struct LoadedEngine {
    /// Ready to run.
    pub engine: Engine,
    /// Milliseconds from opening the file until ready.
    pub load_ms: f64,
    decision: PlacementDecision,
    /// Reports notices when dropped.
    #[allow(dead_code)] // what counts is when
    pub notices: Notices,
}

/// Reports the accelerator's slower paths at the end of a run.
pub struct Notices(Option<Arc<dyn Runtime>>);

impl Drop for Notices {
    fn drop(&mut self) {
        let all = self.0.iter().flat_map(|runtime| runtime.notices());
        all.for_each(|sentence| progress::note(&sentence));
    }
}

impl LoadedEngine {
    /// The decision, for `plan` in JSON.
    pub fn plan(&self, args: &EngineArgs) -> serde_json::Value {
        let (e, m, at) = (&self.engine, self.engine.memory(), self.engine.placement());
        let mut plan = serde_json::json!({
            "device": at.device,
            "strategy": at.strategy,
            "isa": at.isa,
            "threads": at.threads,
            "context": e.context(),
            "kv_type": at.kv_type,
            "deterministic": args.deterministic,
            "memory": { "weights": m.weights, "kv": m.kv, "activations": m.activations },
        });
        DecisionWords(&self.decision).add_to(&mut plan);
        // Counts of the steps run so far.
        let far = e.far_steps();
        if far.attend + far.stream > 0 {
            plan["kv_pages"]["steps"] = serde_json::json!({ "attend": far.attend, "stream": far.stream });
        }
        plan
    }
}

/// The error that ended a request.
pub fn failed(error: Arc<Error>) -> Error {
    Arc::try_unwrap(error).unwrap_or_else(|error| Error::Run(error.to_string()))
}

/// The error for a model whose scores are NaN or infinite.
pub fn not_numbers() -> Error {
    Error::Run(engine::NOT_NUMBERS.into())
}
