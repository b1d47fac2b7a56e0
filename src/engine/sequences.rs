//! Sequences in flight, and the engine that owns them.

use super::forward::{Forward, Input, Logits};
use super::memory::{Memory, geometry};
use super::prepare::Prepared;
use crate::cache::{BlockTable, KvDType, KvGeometry, PagePool};
use crate::device::host::Pool;
use crate::model::{ModelSpec, Weights};
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
        }
    }
}

/// A sequence of an [`Engine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SeqId(usize);

/// A model with its thread pool, KV cache and sequences.
pub struct Engine {
    model: Prepared,
    pool: Pool,
    cache: PagePool,
    sequences: Vec<Option<BlockTable>>,
    forward: Forward,
    context: usize,
    chunk: usize,
    memory: Memory,
}

impl Engine {
    /// Sizes everything, then prepares the weights and the cache.
    ///
    /// # Errors
    /// It does not fit in memory; a context or chunk of zero, or beyond the model's; a damaged model.
    pub fn new(
        spec: ModelSpec,
        weights: &Weights,
        options: &Options,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<Engine> {
        if options.context == 0 || options.chunk == 0 || options.sequences == 0 {
            return Err(Error::usage(
                "the context, the chunk and the number of sequences must be at least 1",
            ));
        }
        if options.context > spec.max_context {
            return Err(Error::usage(format!(
                "a context of {} tokens, but the model was made for at most {}",
                options.context, spec.max_context
            )));
        }
        if options.threads == Some(0) {
            return Err(Error::usage("0 threads; at least 1 is needed"));
        }
        let kv = geometry(&spec, options.kv_dtype);
        let pages = KvGeometry::pages_for(options.context)
            .checked_mul(options.sequences)
            .ok_or_else(|| Error::usage("context times sequences overflows"))?;
        let rows = options.chunk.min(options.context).max(options.sequences);
        let tokens = pages.saturating_mul(crate::cache::PAGE_TOKENS);
        let memory = Memory::plan(&spec, weights, options.isa, &kv, tokens, rows);
        memory.check()?;
        let pool = Pool::pinned(options.threads);
        let forward = Forward::new(&spec, options.isa, options.mode, pool.threads())?;
        let model = Prepared::new(spec, weights, options.isa, &pool, progress)?;
        let cache = PagePool::new(kv, pages)?;
        let (context, chunk) = (options.context, options.chunk);
        Ok(Engine { model, pool, cache, sequences: Vec::new(), forward, context, chunk, memory })
    }

    /// The model.
    pub fn model(&self) -> &Prepared {
        &self.model
    }
    /// Its sizes.
    pub fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }
    /// The thread pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }
    /// What the dry run said.
    pub fn memory(&self) -> Memory {
        self.memory
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
            table.free(&mut self.cache);
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
        table.truncate(&mut self.cache, len);
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
    /// free pages. Then nothing has changed.
    pub fn forward(&mut self, inputs: &[Input<'_>]) -> Result<&[f32]> {
        for (i, input) in inputs.iter().enumerate() {
            let end = self.len(input.seq) + input.tokens.len();
            if end > self.context {
                return Err(Error::Capacity(format!(
                    "{end} tokens do not fit the context of {}; raise --ctx",
                    self.context
                )));
            }
            self.check_tokens(input.tokens)?;
            if inputs[..i].iter().any(|o| o.seq == input.seq) {
                return Err(Error::usage("a sequence appears twice in one step"));
            }
        }
        for (i, input) in inputs.iter().enumerate() {
            let table = self.sequences[input.seq.0].as_mut().expect("a live sequence");
            if let Err(e) = table.reserve(&mut self.cache, input.tokens.len()) {
                for undo in &inputs[..i] {
                    let table = self.sequences[undo.seq.0].as_mut().expect("a live sequence");
                    let len = table.len();
                    table.truncate(&mut self.cache, len);
                }
                return Err(e);
            }
        }
        let tables: Vec<&BlockTable> =
            inputs.iter().map(|i| self.sequences[i.seq.0].as_ref().expect("a live sequence")).collect();
        self.forward.run(&self.model, &self.pool, &self.cache, inputs, &tables);
        for input in inputs {
            self.sequences[input.seq.0].as_mut().expect("a live sequence").advance(input.tokens.len());
        }
        Ok(self.forward.logits())
    }

    /// Runs a prompt in chunks; returns the logits of its last token. `progress` is told the tokens done.
    ///
    /// # Errors
    /// As [`Engine::forward`], before any work; an empty prompt.
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
        table.reserve(&mut self.cache, tokens.len())?;
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
