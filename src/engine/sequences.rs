//! Sequences in flight, and the engine that owns them.

use std::sync::Arc;

use super::cpu_only::CpuOnly;
use super::executor::{Executor, Placement, Want};
use super::gpu_only::GpuOnly;
use super::input::{Input, Logits};
use super::iterate::Sharing;
use super::machine::RealMachine;
use super::memory::Memory;
use super::timeline::Timeline;
use crate::cache::{BlockTable, KvDType, KvGeometry};
use crate::device::accelerator::Accelerator;
use crate::model::{ModelSpec, Weights};
use crate::program::Flow;
use crate::simd::Isa;
use crate::simd::linear::Mode;
use crate::{Error, Result};

/// Rows of a prompt computed together, unless told otherwise: enough to be compute-bound on every tier,
/// little enough that activations stay in the caches.
pub const DEFAULT_CHUNK: usize = 512;

/// How to run a model.
#[derive(Debug, Clone)]
pub struct Options {
    /// Threads; `None`: all cores this process may use.
    pub threads: Option<usize>,
    /// Tier of kernels.
    pub isa: Isa,
    /// Whether results must not depend on batch composition and chunking.
    pub mode: Mode,
    /// Storage of keys and values.
    pub kv_dtype: KvDType,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Most sequences at a time (each may grow to `context`).
    pub sequences: usize,
    /// Rows of a prompt computed together.
    pub chunk: usize,
    /// Rows of a step whose logits are held: one per sequence, unless a step wants those of more.
    pub logits: usize,
    /// Sub-batches of a step that may be in flight side by side ([`Engine::forward_as`]): each has activations of its own.
    pub sub_batches: usize,
}

impl Options {
    /// The defaults for one sequence of up to `context` tokens.
    pub fn new(isa: Isa, context: usize) -> Options {
        Options {
            threads: None,
            isa,
            mode: Mode::Fast,
            kv_dtype: KvDType::BF16,
            context,
            sequences: 1,
            chunk: DEFAULT_CHUNK,
            logits: 1,
            sub_batches: 1,
        }
    }
}

impl Options {
    /// Rows of the widest step.
    pub(super) fn rows(&self) -> usize {
        self.chunk.min(self.context).max(self.sequences)
    }

    /// Rows of a step whose logits there is room for.
    pub(super) fn logit_rows(&self) -> usize {
        self.logits.clamp(self.sequences, self.rows())
    }

    /// Refuses what no engine can do; returns the pages that all sequences need.
    pub(super) fn check(&self, spec: &ModelSpec) -> Result<usize> {
        if self.context == 0 || self.chunk == 0 || self.sequences == 0 {
            return Err(Error::usage(
                "the context, the chunk and the number of sequences must be at least 1",
            ));
        }
        if self.sub_batches == 0 || self.sub_batches > usize::from(u8::MAX) {
            return Err(Error::usage(format!("{} sub-batches; 1 to {} can be", self.sub_batches, u8::MAX)));
        }
        if self.context > spec.max_context {
            return Err(Error::usage(format!(
                "a context of {} tokens, but the model was made for at most {}",
                self.context, spec.max_context
            )));
        }
        if self.threads == Some(0) {
            return Err(Error::usage("0 threads; at least 1 is needed"));
        }
        KvGeometry::pages_for(self.context)
            .checked_mul(self.sequences)
            .ok_or_else(|| Error::usage("context times sequences overflows"))
    }
}

/// A sequence of an [`Engine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId(usize);

impl SeqId {
    /// Its place among the engine's sequences.
    pub(super) fn slot(self) -> u32 {
        self.0 as u32
    }

    #[cfg(test)]
    pub(super) fn of(slot: usize) -> SeqId {
        SeqId(slot)
    }
}

/// A model with the sequences in flight, and what computes their steps.
pub struct Engine {
    spec: ModelSpec,
    executor: Box<dyn Executor>,
    sequences: Vec<Option<BlockTable>>,
    context: usize,
    chunk: usize,
}

impl Engine {
    /// Sizes everything, then prepares the weights and the cache, all on the CPU.
    ///
    /// # Errors
    /// It does not fit in memory; a context or chunk of zero, or beyond the model's; a damaged model.
    pub fn new(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        let pages = options.check(&spec)?;
        let cpu = CpuOnly::new(&spec, weights, options, pages, progress)?;
        Ok(Engine::with(spec, Box::new(cpu), options))
    }

    /// The same, all on an accelerator: `device` is its name for messages.
    ///
    /// # Errors
    /// As [`Engine::new`]; the accelerator cannot run the model, or has too little memory.
    pub fn on_accelerator(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        accelerator: Arc<dyn Accelerator>,
        device: &str,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        let pages = options.check(&spec)?;
        let gpu = GpuOnly::new(&spec, weights, options, pages, accelerator, device, progress)?;
        Ok(Engine::with(spec, Box::new(gpu), options))
    }

    /// The same, on both sides: `placement` says what is where, `strategy` is the name of what chose it.
    ///
    /// # Errors
    /// As [`Engine::on_accelerator`]; a policy that cannot run.
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
        Ok(Engine::with(spec, Box::new(machine), options))
    }

    fn with(spec: ModelSpec, executor: Box<dyn Executor>, options: &Options) -> Engine {
        let (context, chunk) = (options.context, options.chunk);
        Engine { spec, executor, sequences: Vec::new(), context, chunk }
    }

    /// The model's sizes.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }
    /// Where it runs.
    pub fn placement(&self) -> Placement {
        self.executor.placement()
    }
    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }
    /// What the dry run said.
    pub fn memory(&self) -> Memory {
        self.executor.memory()
    }
    /// Bytes of weights that one decode step reads.
    pub fn bytes_per_step(&self) -> u64 {
        self.executor.bytes_per_step()
    }

    /// Seconds since the device was opened, in emulated time: `None` where time is that of this computer.
    pub fn emulated_seconds(&self) -> Option<f64> {
        self.executor.clock().map(|clock| clock.now())
    }

    /// Begins to note when each operation runs: what [`Engine::timeline`] returns.
    ///
    /// # Errors
    /// The model runs on one side, where a step is one segment.
    pub fn trace(&mut self) -> Result<()> {
        self.executor.trace()
    }

    /// What was noted since [`Engine::trace`], if it was called.
    pub fn timeline(&mut self) -> Option<Timeline> {
        self.executor.timeline()
    }

    /// A new, empty sequence.
    pub fn add(&mut self) -> SeqId {
        let free = self.sequences.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.sequences.push(None);
            self.sequences.len() - 1
        });
        self.sequences[at] = Some(BlockTable::new());
        SeqId(at)
    }

    /// Ends a sequence; its pages are free again.
    pub fn remove(&mut self, id: SeqId) {
        if let Some(mut table) = self.sequences[id.0].take() {
            table.free(self.executor.pages());
        }
    }

    /// Tokens stored of a sequence.
    pub fn len(&self, id: SeqId) -> usize {
        self.table(id).len()
    }

    /// Whether nothing is stored of it.
    pub fn is_empty(&self, id: SeqId) -> bool {
        self.len(id) == 0
    }

    /// Forgets all tokens from position `len` on.
    pub fn truncate(&mut self, id: SeqId, len: usize) {
        let table = self.sequences[id.0].as_mut().expect("a live sequence");
        table.truncate(self.executor.pages(), len);
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.spec().vocab;
        match tokens.iter().find(|&&t| t as usize >= vocab) {
            Some(t) => Err(Error::usage(format!("token {t} is outside the vocabulary of {vocab}"))),
            None => Ok(()),
        }
    }

    fn table(&self, id: SeqId) -> &BlockTable {
        self.sequences[id.0].as_ref().expect("a live sequence")
    }

    /// Runs the rows of `inputs`, appending their keys and values. Returns the logits asked for,
    /// `[rows][V]`, in the order of the inputs.
    ///
    /// # Errors
    /// A token outside the vocabulary, a sequence that would outgrow its context or is named twice, no
    /// free pages, a device that failed. Then no sequence has changed.
    pub fn forward(&mut self, inputs: &[Input<'_>]) -> Result<&[f32]> {
        self.step(inputs, Want::Logits, Sharing::ONE)?;
        Ok(self.executor.logits())
    }

    /// As [`Engine::forward`], with the rows of input i in sub-batch `split[i]`, and sub-batches that share the lanes as
    /// `flow` says: in lock step ([`Flow::TwoLanes`]) the CPU attends the rows of one while the device computes those of the
    /// other. Logits come in the order of the inputs, whatever their sub-batches.
    ///
    /// # Errors
    /// As [`Engine::forward`]; more sub-batches than [`Options::sub_batches`].
    pub fn forward_as(&mut self, inputs: &[Input<'_>], split: &[u8], flow: Flow) -> Result<&[f32]> {
        if split.len() != inputs.len() {
            return Err(Error::usage(format!("{} inputs, the sub-batches of {}", inputs.len(), split.len())));
        }
        self.step(inputs, Want::Logits, Sharing { split: Some(split), flow })?;
        Ok(self.executor.logits())
    }

    /// Like [`Engine::forward`], but returns only the likeliest token of each row that wants logits: on an
    /// accelerator the logits stay there.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn forward_greedy(&mut self, inputs: &[Input<'_>]) -> Result<&[u32]> {
        self.step(inputs, Want::Argmax, Sharing::ONE)?;
        Ok(self.executor.argmax())
    }

    fn step(&mut self, inputs: &[Input<'_>], want: Want, sharing: Sharing<'_>) -> Result<()> {
        if repeats(inputs.iter().map(|i| i.seq.0), self.sequences.len()) {
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
        let done = self.reserve_and_run(inputs, want, sharing);
        for input in inputs {
            let table = self.sequences[input.seq.0].as_mut().expect("a live sequence");
            match &done {
                Ok(()) => table.advance(input.tokens.len()),
                // What was reserved for this step is free again.
                Err(_) => table.truncate(self.executor.pages(), table.len()),
            }
        }
        done
    }

    fn reserve_and_run(&mut self, inputs: &[Input<'_>], want: Want, sharing: Sharing<'_>) -> Result<()> {
        for input in inputs {
            let table = self.sequences[input.seq.0].as_mut().expect("a live sequence");
            table.reserve(self.executor.pages(), input.tokens.len())?;
        }
        let tables: Vec<&BlockTable> =
            inputs.iter().map(|i| self.sequences[i.seq.0].as_ref().expect("a live sequence")).collect();
        self.executor.run(inputs, &tables, want, sharing)
    }

    /// Runs a prompt in chunks; returns the logits of its last token. `progress` is told the tokens done.
    ///
    /// # Errors
    /// As [`Engine::forward`], before any work but where the device failed; an empty prompt. Of a prompt whose
    /// chunk failed nothing is stored.
    pub fn prefill(
        &mut self,
        seq: SeqId,
        tokens: &[u32],
        mut progress: impl FnMut(usize),
    ) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            return Err(Error::usage("the prompt is empty"));
        }
        let end = self.len(seq) + tokens.len();
        if end > self.context {
            return Err(Error::Capacity(format!(
                "the prompt takes the sequence to {end} tokens, more than the context of {}; raise --ctx or shorten it",
                self.context
            )));
        }
        self.check_tokens(tokens)?;
        // All pages now, so that no chunk fails after others have been computed.
        let table = self.sequences[seq.0].as_mut().expect("a live sequence");
        table.reserve(self.executor.pages(), tokens.len())?;
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

/// Whether one of `ids`, all below `n`, comes twice.
fn repeats(ids: impl Iterator<Item = usize>, n: usize) -> bool {
    let mut seen = vec![false; n];
    ids.into_iter().any(|id| std::mem::replace(&mut seen[id], true))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::PageList;
    use crate::model::load;

    /// Stores nothing, and fails when told so.
    struct Fake {
        pages: PageList,
        steps: usize,
        /// The step that fails.
        fails: Option<usize>,
        logits: Vec<f32>,
    }

    impl Executor for Fake {
        fn pages(&mut self) -> &mut PageList {
            &mut self.pages
        }
        fn run(&mut self, _: &[Input<'_>], _: &[&BlockTable], _: Want, _: Sharing<'_>) -> Result<()> {
            self.steps += 1;
            match self.fails {
                Some(step) if step == self.steps => Err(Error::Capacity("out of luck".into())),
                _ => Ok(()),
            }
        }
        fn logits(&self) -> &[f32] {
            &self.logits
        }
        fn argmax(&self) -> &[u32] {
            &[]
        }
        fn placement(&self) -> Placement {
            unreachable!("not asked for")
        }
        fn memory(&self) -> Memory {
            unreachable!("not asked for")
        }
        fn bytes_per_step(&self) -> u64 {
            0
        }
    }

    fn engine(n_pages: usize, fails: Option<usize>) -> Engine {
        let spec = load("synth:tiny-llama,dtype=f32,seed=1").unwrap().spec;
        let geometry = super::super::memory::geometry(&spec, KvDType::BF16);
        let pages = PageList::new(geometry, n_pages).unwrap();
        let options = Options { chunk: 40, ..Options::new(Isa::Reference, spec.max_context) };
        Engine::with(spec, Box::new(Fake { pages, steps: 0, fails, logits: vec![0.0] }), &options)
    }

    #[test]
    fn a_failed_step_gives_its_pages_back() {
        let mut e = engine(8, Some(2));
        let (a, b) = (e.add(), e.add());
        let tokens = [1; 33];
        let inputs = |n: usize| [a, b].map(|seq| Input { seq, tokens: &tokens[..n], logits: Logits::None });
        e.forward(&inputs(30)).unwrap();
        assert_eq!(e.executor.pages().n_free(), 6);
        e.forward(&inputs(33)).expect_err("told to fail");
        assert_eq!((e.len(a), e.len(b), e.executor.pages().n_free()), (30, 30, 6), "as before the step");
        e.forward(&inputs(33)).unwrap();
        assert_eq!((e.len(a), e.executor.pages().n_free()), (63, 4));
    }

    #[test]
    fn of_a_prompt_whose_third_chunk_fails_nothing_stays() {
        let mut e = engine(8, Some(4));
        let seq = e.add();
        e.forward(&[Input { seq, tokens: &[1; 5], logits: Logits::None }]).unwrap();
        let mut told = Vec::new();
        e.prefill(seq, &[1; 130], |done| told.push(done)).expect_err("told to fail");
        assert_eq!(told, [40, 80]);
        assert_eq!((e.len(seq), e.executor.pages().n_free()), (5, 7));
        e.prefill(seq, &[1; 130], |_| ()).unwrap();
        assert_eq!(e.len(seq), 135);
    }

    #[test]
    fn a_step_of_very_many_sequences_is_checked_in_linear_time() {
        assert!(!repeats([3, 1, 0].into_iter(), 4) && repeats([3, 1, 3].into_iter(), 4));
        let n = 200_000;
        let mut e = engine(n, None);
        // Not through `add`, which looks for a free place from the first on.
        e.sequences = (0..n).map(|_| Some(BlockTable::new())).collect();
        let inputs: Vec<_> =
            (0..n).map(|i| Input { seq: SeqId(i), tokens: &[1], logits: Logits::None }).collect();
        let begin = std::time::Instant::now();
        e.forward(&inputs).unwrap();
        // Some milliseconds; comparing each with all before it takes 2·10¹⁰ comparisons.
        assert!(begin.elapsed().as_secs() < 5, "{:?} for {n} sequences", begin.elapsed());
        assert_eq!(e.executor.pages().n_free(), 0, "a page each");
    }
}
