//! Sequences in flight, and the engine that owns them.

use std::sync::Arc;

use super::input::{Input, Logits, StepPlan};
use super::iterate::iterations;
use super::kv::{FarSteps, Moved, Room, SequenceKv};
use super::machine::RealMachine;
use super::memory::Memory;
use super::options::Options;
use super::place::Placement;
use super::seq_id::SeqId;
use crate::cache::KvGeometry;
use crate::device::{Accelerator, Clock};
use crate::model::{ModelSpec, Weights};
use crate::program::{Flow, RequestId, Side};
use crate::sched::Slots;
use crate::text::Top;
use crate::timeline::Timeline;
use crate::{Error, Result};

/// A model with the sequences in flight, and the machine that computes their steps.
pub struct Engine {
    spec: ModelSpec,
    pub(super) machine: RealMachine,
    pub(super) sequences: Slots<SequenceKv>,
    picked: Vec<u32>,
    context: usize,
    chunk: usize,
    rows: usize,
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
        Engine { spec, machine, sequences: Slots::default(), picked: Vec::new(), context, chunk, rows, most }
    }

    /// The model's sizes.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }
    /// Where it runs.
    pub fn placement(&self) -> Placement {
        self.machine.place()
    }
    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }
    /// Rows of the widest step.
    pub fn rows(&self) -> usize {
        self.rows
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
    pub fn busy_seconds(&self) -> Option<[f64; 4]> {
        self.machine.busy_seconds()
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

    /// Counts `tokens` more tokens of a sequence as stored, on the host alone, without computing them: for timings,
    /// which do not depend on the values of keys and values. Their pages are resident afterwards.
    ///
    /// # Errors
    /// No free pages.
    pub(crate) fn store_blank(&mut self, id: SeqId, tokens: usize) -> Result<()> {
        let table = self.sequences.get_mut(id.request()).expect("a live sequence");
        table.reserve(&mut self.machine.kv().pages, tokens)?;
        table.advance(tokens);
        let pages = table.host_pages().to_vec();
        self.machine.touch(&pages);
        Ok(())
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> SeqId {
        let table = SequenceKv::new(self.machine.kv().sides);
        self.put(table)
    }

    pub(super) fn put(&mut self, table: SequenceKv) -> SeqId {
        let id = self.sequences.insert(table);
        self.sequences.get_mut(id).expect("just put there").name(id);
        SeqId::named(id)
    }

    /// Ends a sequence and frees its pages. Does nothing if it has already ended.
    ///
    /// If its row is parked ([`Engine::advance`]), the host's attention of it ends first, and the other rows of its
    /// cohort must start over.
    pub fn remove(&mut self, id: SeqId) {
        self.leave(id);
        if let Some(mut table) = self.sequences.remove(id.request()) {
            table.free(&mut self.machine.kv().pages);
        }
    }

    /// Number of stored tokens of a sequence; 0 if it has ended.
    pub fn len(&self, id: SeqId) -> usize {
        self.sequences.get(id.request()).map_or(0, SequenceKv::len)
    }

    /// Whether no token of it is stored.
    pub fn is_empty(&self, id: SeqId) -> bool {
        self.len(id) == 0
    }

    /// Forgets all tokens from position `len` on.
    pub fn truncate(&mut self, id: SeqId, len: usize) {
        self.leave(id);
        if let Some(table) = self.sequences.get_mut(id.request()) {
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

    pub(super) fn check_live(&self, id: SeqId) -> Result<()> {
        match self.sequences.get(id.request()) {
            Some(_) => Ok(()),
            None => {
                let RequestId { slot, generation } = id.request();
                Err(Error::usage(format!("sequence {slot} of generation {generation} has ended")))
            }
        }
    }

    /// Runs the rows of `inputs`, appending their keys and values. Returns the requested logits, `[rows][V]`, in the
    /// order of the inputs.
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a sequence has ended, would outgrow its context or is named twice, there
    /// are no free pages, or the device has failed. No sequence has changed then.
    pub fn forward(&mut self, inputs: &[Input<'_>]) -> Result<&[f32]> {
        self.step(inputs, false, &[], &StepPlan::ONE)?;
        Ok(self.machine.logits())
    }

    /// As [`Engine::forward`], in sub-batches that share the lanes as `flow` says. Logits come in the order of the inputs,
    /// whatever their sub-batches.
    ///
    /// # Errors
    /// As [`Engine::forward_plan`].
    pub fn forward_as(&mut self, inputs: &[Input<'_>], split: &[u8], flow: Flow) -> Result<&[f32]> {
        self.forward_plan(inputs, &StepPlan { split: Some(split), flow, swaps: &[] })
    }

    /// As [`Engine::forward`], by a plan.
    ///
    /// # Errors
    /// As [`Engine::forward`], and if there are more sub-batches than [`Options::sub_batches`], or a swap finds no
    /// pages or is not supported by the engine ([`Engine::swap`]). A sequence whose copies had to end first to make
    /// room stays at its new place.
    pub fn forward_plan(&mut self, inputs: &[Input<'_>], plan: &StepPlan<'_>) -> Result<&[f32]> {
        self.step(inputs, false, &[], plan)?;
        Ok(self.machine.logits())
    }

    /// As [`Engine::forward_plan`], for rows from which tokens are drawn: logits stay on the device that computes them, and
    /// what most draws need of each row comes back, [`Engine::top`]. `factors` has the factor of its sum
    /// ([`crate::text::Sampler::top_factor`]) for each row that wants logits, or `None` where the whole row is needed.
    ///
    /// # Errors
    /// As [`Engine::forward_plan`].
    ///
    /// # Panics
    /// If there are not as many factors as rows that want logits.
    pub fn forward_tops(
        &mut self,
        inputs: &[Input<'_>],
        factors: &[Option<f32>],
        plan: &StepPlan<'_>,
    ) -> Result<()> {
        self.step(inputs, false, factors, plan)
    }

    /// Whether logits can stay on a device that computes them ([`Engine::forward_tops`]).
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

    /// Like [`Engine::forward`], but returns only the likeliest token of each row that wants logits: on an
    /// accelerator the logits stay there.
    ///
    /// # Errors
    /// As [`Engine::forward`], and if logits are not numbers. The latter is detected after everything has been
    /// computed, so the sequences then hold the step's tokens.
    pub fn forward_greedy(&mut self, inputs: &[Input<'_>]) -> Result<&[u32]> {
        self.step(inputs, true, &[], &StepPlan::ONE)?;
        self.picked.clear();
        for (row, token) in self.machine.argmax().iter().enumerate() {
            let token = token.ok_or_else(|| Error::Run(format!("row {row} of the step: {NOT_NUMBERS}")))?;
            self.picked.push(token);
        }
        Ok(&self.picked)
    }

    /// Like [`Engine::forward_greedy`], but a row whose logits are not numbers has no token and does not affect the
    /// others.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_picks(&mut self, inputs: &[Input<'_>]) -> Result<&[Option<u32>]> {
        self.step(inputs, true, &[], &StepPlan::ONE)?;
        Ok(self.machine.argmax())
    }

    /// [`Engine::forward_picks`] in sub-batches, as [`Engine::forward_as`].
    ///
    /// # Errors
    /// As [`Engine::forward_as`].
    pub fn forward_picks_as(
        &mut self,
        inputs: &[Input<'_>],
        split: &[u8],
        flow: Flow,
    ) -> Result<&[Option<u32>]> {
        self.picks_plan(inputs, &StepPlan { split: Some(split), flow, swaps: &[] })
    }

    /// [`Engine::forward_picks`] by a plan, as [`Engine::forward_plan`].
    ///
    /// # Errors
    /// As [`Engine::forward_plan`].
    pub fn picks_plan(&mut self, inputs: &[Input<'_>], plan: &StepPlan<'_>) -> Result<&[Option<u32>]> {
        self.step(inputs, true, &[], plan)?;
        Ok(self.machine.argmax())
    }

    fn step(
        &mut self,
        inputs: &[Input<'_>],
        pick: bool,
        factors: &[Option<f32>],
        plan: &StepPlan<'_>,
    ) -> Result<()> {
        if let Some(split) = plan.split {
            check_split(inputs, split)?;
        }
        if plan.flow == Flow::Async {
            return Err(Error::usage("an asynchronous step is made by Engine::advance"));
        }
        self.check_swaps(plan.swaps)?;
        self.check_inputs(inputs)?;
        let room = |i: &Input<'_>| Room {
            seq: i.seq.request().slot as usize,
            tokens: i.tokens.len(),
            decode: i.tokens.len() == 1 && i.logits != Logits::None,
        };
        let step: Vec<Room> = inputs.iter().map(room).collect();
        self.make_room(&step)?;
        let mut moved = Vec::new();
        let done = match self.begin_swaps(plan.swaps, &mut moved) {
            Ok(()) => self.reserve_and_run(inputs, &step, &mut moved, (pick, factors), plan),
            Err(e) => Err(e),
        };
        match &done {
            Ok(()) => {
                for input in inputs {
                    self.sequences
                        .get_mut(input.seq.request())
                        .expect("a live sequence")
                        .advance(input.tokens.len());
                }
            }
            Err(_) => self.give_back(inputs),
        }
        self.moved(&moved, done.is_ok());
        done
    }

    /// Returns an error for inputs that no step can compute.
    pub(super) fn check_inputs(&self, inputs: &[Input<'_>]) -> Result<()> {
        for input in inputs {
            self.check_live(input.seq)?;
        }
        self.check_free(inputs.iter().map(|i| i.seq))?;
        if repeats(inputs.iter().map(|i| i.seq.request().slot as usize), self.sequences.capacity()) {
            return Err(Error::usage("a sequence appears twice in one step"));
        }
        for input in inputs {
            let end = self.len(input.seq) + input.tokens.len();
            if end > self.context {
                return Err(Error::Capacity(format!(
                    "{end} tokens do not fit the context of {}; raise --ctx",
                    self.context
                )));
            }
            self.check_tokens(input.tokens)?;
        }
        Ok(())
    }

    /// Makes room for a step on the device, if pages can leave it.
    fn make_room(&mut self, step: &[Room]) -> Result<()> {
        let kv = self.machine.kv();
        let Some(pager) = &kv.pager else { return Ok(()) };
        let moved = pager.make_room(self.sequences.values_mut(), &mut kv.pages, step)?;
        if moved.is_empty() {
            return Ok(());
        }
        let done = self.machine.move_pages(&moved);
        self.moved(&moved, done.is_ok());
        done
    }

    /// Records the end of the copies of moved pages. If they failed (`well` is false), the pages return to their old
    /// side.
    pub(super) fn moved(&mut self, moved: &[Moved], well: bool) {
        let pages = &mut self.machine.kv().pages;
        match well {
            true => moved.iter().for_each(|m| m.finish(pages)),
            false => moved.iter().rev().for_each(|m| m.undo(pages, self.sequences.values_mut())),
        }
    }

    fn reserve_and_run(
        &mut self,
        inputs: &[Input<'_>],
        step: &[Room],
        moved: &mut Vec<Moved>,
        (pick, factors): (bool, &[Option<f32>]),
        plan: &StepPlan<'_>,
    ) -> Result<()> {
        if let Err(e) = self.reserve(inputs) {
            // Pages may become free once copies from them have ended.
            if moved.is_empty() {
                return Err(e);
            }
            self.give_back(inputs);
            self.finish_moves(moved)?;
            self.reserve(inputs)?;
        }
        let kv = self.machine.kv();
        if let Some(pager) = &kv.pager {
            *moved = pager.ahead(self.sequences.values_mut(), &mut kv.pages, step);
        }
        let tables: Vec<&SequenceKv> =
            inputs.iter().map(|i| self.sequences.get(i.seq.request()).expect("a live sequence")).collect();
        let (mut iterations, n) = iterations(
            inputs,
            &tables,
            (moved, self.machine.kv().far.usual()),
            plan,
            pick,
            self.machine.logit_rows(),
        );
        iterations.iter_mut().for_each(|(iteration, _)| self.machine.settle(iteration));
        self.machine.expect(n, pick);
        // An iteration writes over the logits of the one before.
        if iterations.len() == 1 && factors.iter().any(Option::is_some) {
            assert_eq!(factors.len(), n, "factors, and rows that want logits");
            self.machine.expect_tops(factors.iter().map(|factor| factor.unwrap_or(1.0)));
        }
        iterations.iter().try_for_each(|(iteration, rows)| self.machine.run(iteration, rows, moved))
    }

    /// Takes the pages that the rows of a step need.
    pub(super) fn reserve(&mut self, inputs: &[Input<'_>]) -> Result<()> {
        let kv = self.machine.kv();
        for input in inputs {
            let table = self.sequences.get_mut(input.seq.request()).expect("a live sequence");
            table.reserve(&mut kv.pages, input.tokens.len())?;
        }
        Ok(())
    }

    /// Frees the pages that were reserved for a step.
    pub(super) fn give_back(&mut self, inputs: &[Input<'_>]) {
        let pages = &mut self.machine.kv().pages;
        for input in inputs {
            let table = self.sequences.get_mut(input.seq.request()).expect("a live sequence");
            table.truncate(pages, table.len());
        }
    }

    /// Runs a prompt in chunks and returns the logits of its last token. `progress` is called with the tokens done.
    ///
    /// # Errors
    /// As [`Engine::forward`], before any work unless the device fails; and if the prompt is empty. If a chunk fails,
    /// nothing of the prompt is stored.
    pub fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            return Err(Error::usage("the prompt is empty"));
        }
        self.check_live(seq)?;
        let end = self.len(seq) + tokens.len();
        if end > self.context {
            return Err(Error::Capacity(format!(
                "the prompt takes the sequence to {end} tokens, more than the context of {}; raise --ctx or shorten it",
                self.context
            )));
        }
        self.check_tokens(tokens)?;
        // Check for all pages now, so that no chunk fails after others have been computed. If pages move, count those
        // of both sides.
        let kv = self.machine.kv();
        if kv.pager.is_some() && kv.pages.pages_move() {
            kv.pages.suffice(KvGeometry::pages_for(end) - KvGeometry::pages_for(end - tokens.len()))?;
        } else {
            let table = self.sequences.get_mut(seq.request()).expect("a live sequence");
            table.reserve(&mut kv.pages, tokens.len())?;
        }
        let before = end - tokens.len();
        let logits = self.run_chunks(seq, tokens, &mut progress);
        if logits.is_err() {
            self.truncate(seq, before);
        }
        logits
    }

    fn run_chunks(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize),
    ) -> Result<Vec<f32>> {
        let mut done = 0;
        let mut logits = Vec::new();
        for chunk in tokens.chunks(self.chunk) {
            done += chunk.len();
            let want = if done == tokens.len() { Logits::Last } else { Logits::None };
            let out = self.forward(&[Input { seq, tokens: chunk, logits: want }])?;
            if want == Logits::Last {
                logits = out.to_vec();
            }
            progress(done);
        }
        Ok(logits)
    }
}

fn check_split(inputs: &[Input<'_>], split: &[u8]) -> Result<()> {
    if split.len() == inputs.len() {
        return Ok(());
    }
    Err(Error::usage(format!("{} inputs, the sub-batches of {}", inputs.len(), split.len())))
}

/// The message for logits that are NaN or infinite.
pub const NOT_NUMBERS: &str =
    "the model's scores are not numbers (NaN or infinite); are its weights damaged?";

/// Whether one of `ids`, all below `n`, occurs twice.
fn repeats(ids: impl Iterator<Item = usize>, n: usize) -> bool {
    let mut seen = vec![false; n];
    ids.into_iter().any(|id| std::mem::replace(&mut seen[id], true))
}

#[cfg(test)]
mod tests;
