//! Sequences in flight, and the engine that owns them.

use std::sync::Arc;

use super::kv::{FarSteps, PrefixIndex, SequenceKv};
use super::machine::RealMachine;
use super::memory::Memory;
use super::options::Options;
use super::place::RunInfo;
use crate::device::{Accelerator, Clock};
use crate::model::{ModelSpec, RouterProfile, Weights};
use crate::program::{PerUnit, RequestId, Side};
use crate::sched::SlotMap;
use crate::text::Top;
use crate::timeline::Timeline;
use crate::{Error, Result};

/// A model with the sequences in flight, and the machine that computes their steps.
pub struct Engine {
    spec: ModelSpec,
    pub(super) machine: RealMachine,
    pub(super) sequences: SlotMap<SequenceKv>,
    /// Pages of earlier sequences by their tokens, if they are kept.
    pub(super) prefixes: Option<PrefixIndex>,
    context: usize,
    chunk: usize,
    rows: usize,
    logit_rows: usize,
    most: usize,
}

impl Engine {
    /// Creates an engine on the CPU: sizes everything, then prepares the weights and the cache.
    ///
    /// # Errors
    /// If it does not fit in memory, the context or chunk is zero or beyond the model's, or the model is damaged.
    pub fn new(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        let machine = RealMachine::on_cpu(&spec, weights, options, None, progress)?;
        Ok(Engine::with(spec, machine, options))
    }

    /// [`Engine::new`] in emulated time: that of the CPU of the machine that `clock` describes.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn on_emulated_cpu(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        clock: Arc<Clock>,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        let machine = RealMachine::on_cpu(&spec, weights, options, Some(clock), progress)?;
        Ok(Engine::with(spec, machine, options))
    }

    /// Creates an engine with everything on an accelerator; `device` is its name for messages.
    ///
    /// # Errors
    /// As [`Engine::new`], and if the accelerator cannot run the model or has too little memory.
    pub fn on_accelerator(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        accelerator: Arc<dyn Accelerator>,
        device: &str,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        let pages = options.check(&spec)?;
        let pages = options.kv_pages.map_or(pages, |n| n.min(pages));
        let placement = crate::program::Placement::all(Side::Device, spec.n_layers, pages);
        Engine::placed(spec, weights, options, accelerator, device, "gpu-only", placement, progress)
    }

    /// Creates an engine on both sides, as `placement` says; `strategy` names the strategy that chose it.
    ///
    /// # Errors
    /// As [`Engine::on_accelerator`], and if a policy cannot run.
    pub fn placed(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        accelerator: Arc<dyn Accelerator>,
        device: &str,
        strategy: &'static str,
        placement: crate::program::Placement,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        let machine =
            RealMachine::new(&spec, weights, options, accelerator, device, strategy, placement, progress)?;
        Ok(Engine::with(spec, machine, options))
    }

    fn with(spec: ModelSpec, machine: RealMachine, options: &Options) -> Engine {
        let (context, chunk) = (options.context, options.chunk);
        let (rows, most) = (options.rows(), options.sequences);
        let (logit_rows, sequences) = (options.logit_room(), SlotMap::default());
        Engine { spec, machine, sequences, prefixes: None, context, chunk, rows, logit_rows, most }
    }

    /// The model's sizes.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }
    /// Where it runs.
    pub fn placement(&self) -> RunInfo {
        self.machine.place()
    }
    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }
    /// Rows of a prompt that are computed together.
    pub(super) fn chunk(&self) -> usize {
        self.chunk
    }
    /// Rows of the widest step.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Rows of a step whose logits fit: at least one of each sequence.
    pub(super) fn logit_rows(&self) -> usize {
        self.logit_rows
    }
    /// Number of sequences that memory was planned for.
    pub fn sequences(&self) -> usize {
        self.most
    }
    /// Most sub-batches of a step ([`Options::sub_batches`]).
    pub fn sub_batches(&self) -> usize {
        self.machine.sub_batches()
    }
    /// Memory as computed by the dry run.
    pub fn memory(&self) -> Memory {
        self.machine.memory()
    }
    /// Bytes of weights that one decode step reads.
    pub fn bytes_per_step(&self) -> u64 {
        self.machine.bytes_per_step()
    }

    /// How the steps so far attended tokens whose pages have left the device.
    pub fn far_steps(&self) -> FarSteps {
        self.machine.far_steps()
    }

    /// Seconds since the device was opened, in emulated time; `None` in real time.
    pub fn emulated_seconds(&self) -> Option<f64> {
        self.machine.clock().map(|clock| clock.now())
    }

    /// Advances emulated time, as between two requests; does nothing on an engine that runs in real time.
    pub fn pass(&self, seconds: f64) {
        if let Some(clock) = self.machine.clock().filter(|_| seconds > 0.0) {
            clock.spend(seconds);
        }
    }

    /// Begins to count how long each unit works: what [`Engine::busy_seconds`] returns.
    pub fn count_busy(&mut self) {
        self.machine.count_busy();
    }

    /// Seconds that each unit has worked, in the order of [`Unit::ALL`](crate::program::Unit::ALL): in emulated time, or by this
    /// computer's and the device's clocks since [`Engine::count_busy`]. In the latter case a lane of the device counts
    /// as working from the point where it has what it waited for to the point where it waits again. `None` if nothing
    /// counts.
    pub fn busy_seconds(&self) -> Option<PerUnit<f64>> {
        self.machine.busy_seconds()
    }

    /// Bytes that have crossed the link since the engine was made: to the device, and to the host. Streamed weights, pages, rows
    /// that one side hands to the other, and the results of a head on the device; not the lists of a step's rows and pages.
    pub fn link_bytes(&self) -> [u64; 2] {
        self.machine.link_bytes()
    }

    /// Waits for all work in flight on the device, if there is one.
    ///
    /// # Errors
    /// Pending errors of earlier calls; a lost device returns its error at every call.
    pub fn check_device(&self) -> Result<()> {
        self.machine.check_device()
    }

    /// Starts recording when each operation runs, for [`Engine::timeline`]. Decode steps are then launched operation by
    /// operation, not as recorded graphs.
    pub fn trace(&mut self) {
        self.machine.trace();
    }

    /// The timeline recorded since [`Engine::trace`], if that was called.
    pub fn timeline(&self) -> Option<Timeline> {
        self.machine.timeline()
    }

    /// [`Engine::timeline`], after which recording stops.
    pub fn end_trace(&mut self) -> Option<Timeline> {
        self.machine.end_trace()
    }

    /// Whether experts of divided layers change sides as the routers choose ([`Options::follow`](super::Options::follow)).
    pub fn follows_router(&self) -> bool {
        self.machine.follows_router()
    }

    /// Experts of divided layers that have changed sides so far, each for another one.
    pub fn exchanged_experts(&self) -> u64 {
        self.machine.exchanged_experts()
    }

    /// Begins to count which experts rows choose: what [`Engine::choices`] returns. Without, nothing is counted, and nothing
    /// is spent on it. Does nothing for a model without experts.
    pub fn count_choices(&mut self) {
        let profile = self.spec.experts.as_ref().map(RouterProfile::empty);
        self.machine.count_choices(profile.map(Box::new));
    }

    /// The choices of all rows computed since [`Engine::count_choices`], if that was called. Of the last layer only rows that want
    /// logits are there ([`Wants::All`](crate::program::Wants::All) for all of them). Of layers whose experts are all on a device there are
    /// none; of divided layers there are, if their experts [follow](Engine::follows_router) the routers, but rows are not compared there.
    pub fn choices(&mut self) -> Option<RouterProfile> {
        let mut profile = self.machine.choices()?;
        profile.count_tokens();
        Some(profile)
    }

    /// Counts `tokens` more tokens of a sequence as stored, on the host alone, without computing them: for timings,
    /// which do not depend on the values of keys and values. Their pages are resident afterwards.
    ///
    /// # Errors
    /// No free pages.
    pub(crate) fn store_blank(&mut self, id: RequestId, tokens: usize) -> Result<()> {
        let table = self.sequences.get_mut(id).expect("a live sequence");
        table.reserve(&mut self.machine.kv().pages, tokens)?;
        table.advance(tokens);
        let pages = table.host_pages().to_vec();
        self.machine.touch(&pages);
        Ok(())
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> RequestId {
        let table = SequenceKv::new(self.machine.kv().sides);
        self.put(table)
    }

    pub(super) fn put(&mut self, table: SequenceKv) -> RequestId {
        let id = self.sequences.insert(table);
        self.sequences.get_mut(id).expect("just put there").name(id);
        id
    }

    /// Ends a sequence and frees its pages. Does nothing if it has already ended.
    ///
    /// If its row is parked ([`Engine::parked`]), the host's attention of it ends first, and the other rows of its
    /// cohort must start over.
    pub fn remove(&mut self, id: RequestId) {
        self.unpark(id);
        if let Some(mut table) = self.sequences.remove(id) {
            table.free(&mut self.machine.kv().pages);
        }
    }

    /// Number of stored tokens of a sequence; 0 if it has ended.
    pub fn len(&self, id: RequestId) -> usize {
        self.sequences.get(id).map_or(0, SequenceKv::len)
    }

    /// Whether no token of it is stored.
    pub fn is_empty(&self, id: RequestId) -> bool {
        self.len(id) == 0
    }

    /// Forgets all tokens from position `len` on.
    ///
    /// # Panics
    /// If that cuts a page that the sequence shares with others ([`Engine::keep_prefixes`]).
    pub fn truncate(&mut self, id: RequestId, len: usize) {
        self.unpark(id);
        if let Some(table) = self.sequences.get_mut(id) {
            table.truncate(&mut self.machine.kv().pages, len);
        }
    }

    /// Pages that no sequence holds.
    pub fn free_pages(&mut self) -> usize {
        self.machine.kv().pages.n_free()
    }

    /// The side that stores keys and values of new tokens: the device, if any layer keeps them there.
    pub fn home(&mut self) -> Side {
        if self.machine.kv().sides.device { Side::Device } else { Side::Host }
    }

    pub(super) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.spec().vocab;
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(t) => Err(Error::usage(format!("token {t} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }

    pub(super) fn check_live(&self, id: RequestId) -> Result<()> {
        match self.sequences.get(id) {
            Some(_) => Ok(()),
            None => {
                let RequestId { slot, generation } = id;
                Err(Error::usage(format!("sequence {slot} of generation {generation} has ended")))
            }
        }
    }

    /// The logits of the last step's rows that wanted them, `[rows][V]`, unless the step
    /// [picked](crate::program::Iteration::pick) tokens or logits have stayed on the device.
    pub fn logits(&self) -> &[f32] {
        self.machine.logits()
    }

    /// The likeliest token of each row of the last step that wanted logits, if the step
    /// [picked](crate::program::Iteration::pick) them; `None` for a row whose logits are not numbers.
    pub fn picks(&self) -> &[Option<u32>] {
        self.machine.argmax()
    }

    /// Whether logits can stay on a device that computes them ([`Iteration::top`](crate::program::Iteration::top)).
    pub fn gives_tops(&self) -> bool {
        self.machine.gives_tops()
    }

    /// The likeliest tokens of a row of the last step, if it had a factor and its logits are on a device.
    pub fn top(&self, row: usize) -> Option<&Top> {
        self.machine.top(row)
    }

    /// The logits of a row of the last step, to be changed at will. What has stayed on a device is copied from there.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn logits_row(&mut self, row: usize) -> Result<&mut [f32]> {
        self.machine.logits_row(row)
    }
}

/// The message for logits that are NaN or infinite.
pub const NOT_NUMBERS: &str =
    "the model's scores are not numbers (NaN or infinite); are its weights damaged?";

#[cfg(test)]
mod tests;
