//! The memory of a run, computed before anything is allocated.

use std::collections::HashSet;

use super::host::{Host, HostStep, HostWorkspace};
use super::options::Options;
use super::prepare::WeightBytes;
use crate::cache::{KvGeometry, KvType, SeqRows};
use crate::host::memory_available;
use crate::model::{Block, FeedForward, MatrixSpec, Mlp, ModelSpec, Weights};
use crate::simd::linear::{ActsBytes, Linear, Mode};
use crate::tensor::DType;
use crate::{Error, Result};

/// Bytes of a run, by purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Weights as the kernels read them (packed, or mapped from the file).
    pub weights: u64,
    /// Pages of keys and values.
    pub kv: u64,
    /// Activations of the widest step, logits included.
    pub activations: u64,
}

impl Memory {
    /// The dry run with everything on the CPU, with a pool of `threads`.
    ///
    /// # Errors
    /// If attention does not cover the head size, or sizes overflow.
    pub(super) fn plan(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        threads: usize,
    ) -> Result<Memory> {
        let rest = Memory::without_weights(spec, weights, options, threads)?;
        Ok(Memory { weights: WeightBytes::of(spec, weights, options.isa)?.all, ..rest })
    }

    /// [`Memory::plan`] without bytes of the weights.
    ///
    /// # Errors
    /// As [`Memory::plan`].
    pub(super) fn without_weights(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        threads: usize,
    ) -> Result<Memory> {
        let kv = geometry(spec, options.kv_dtype);
        let pages = options.n_pages();
        let (rows, logits) = (options.rows(), options.logit_rows());
        let plans = attention_bytes(spec, options, rows, threads)?;
        let sub_batch = HostWorkspace::bytes(spec, rows, logits)
            + inputs_bytes(spec, weights, options, rows, logits, threads)
            + HostStep::bytes(rows, pages)
            + plans;
        let activations = options.sub_batches * sub_batch + Host::rope_bytes(spec, options.context);
        Ok(Memory {
            weights: 0,
            kv: (pages as u64).saturating_mul(kv.bytes_per_page() as u64),
            activations: activations as u64,
        })
    }

    /// Total bytes.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.activations)
    }

    /// Compares with the memory that the system reports as available.
    ///
    /// # Errors
    /// It does not fit; the message has the numbers.
    pub fn check(&self) -> Result<()> {
        let Some(available) = memory_available() else { return Ok(()) };
        if self.total() <= available {
            return Ok(());
        }
        let gib = |b: u64| b as f64 / (1u64 << 30) as f64;
        Err(Error::Capacity(format!(
            "needs {:.1} GiB (weights {:.1}, KV {:.1}, activations {:.1}), {:.1} GiB of host memory available; \
             try a smaller `context` or a smaller quantisation",
            gib(self.total()),
            gib(self.weights),
            gib(self.kv),
            gib(self.activations),
            gib(available)
        )))
    }
}

/// Checks that memory beyond the plan is available, for a step larger than planned.
///
/// # Errors
/// The system has too little memory left; the message has the numbers.
pub(super) fn check_beyond(what: &str, bytes: usize) -> Result<()> {
    let Some(available) = memory_available() else { return Ok(()) };
    if bytes as u64 <= available {
        return Ok(());
    }
    let gib = |b: u64| b as f64 / (1u64 << 30) as f64;
    Err(Error::Capacity(format!(
        "{what} needs {:.1} GiB more than planned, {:.1} GiB of host memory available; use smaller steps",
        gib(bytes as u64),
        gib(available)
    )))
}

impl Memory {
    /// Compares with a device's free memory.
    ///
    /// # Errors
    /// It does not fit; the message has the numbers.
    pub(super) fn check_device(&self, free: u64, device: &str) -> Result<()> {
        if self.total() <= free {
            return Ok(());
        }
        let (unit, shift) = if self.total() < 1 << 30 { ("MiB", 20) } else { ("GiB", 30) };
        let of = |b: u64| b as f64 / (1u64 << shift) as f64;
        Err(Error::Capacity(format!(
            "needs {:.2} {unit} (weights {:.2}, KV {:.2}, activations {:.2}), {:.2} {unit} free on {device}; \
             try a smaller `context` or a smaller quantisation, or run on the CPU with `device` cpu",
            of(self.total()),
            of(self.weights),
            of(self.kv),
            of(self.activations),
            of(free)
        )))
    }
}

/// Bytes of the prepared inputs of the matrices, and of the threads that multiply them.
fn inputs_bytes(
    spec: &ModelSpec,
    weights: &Weights,
    options: &Options,
    rows: usize,
    logits: usize,
    threads: usize,
) -> usize {
    let (d, isa, mode) = (spec.d_model, options.isa, options.mode);
    // (Type, columns, rows, whether activations are fine, whether the input has rows of its own): many matrices are alike.
    let (mut products, mut thread) = (HashSet::new(), 0);
    let mut of_experts = [HashSet::new(), HashSet::new()];
    let of = |m: &MatrixSpec, layer: usize| weights.get(&m.tensor(layer, "weight")).map(|t| t.dtype);
    for layer in 0..spec.n_layers {
        let block = Block::of(spec, layer);
        let mut add = |m: &MatrixSpec, fine: bool, own: bool| {
            let Some(dtype) = of(m, layer) else { return };
            products.insert((dtype, m.cols, rows, fine, own));
            let (shape, how) = ((m.rows, m.cols), (threads, mode));
            thread = thread.max(Linear::thread_bytes(dtype, isa, fine, rows, shape, how));
        };
        for m in [&block.q, &block.k, &block.v] {
            add(m, true, true);
        }
        add(&block.o, false, false);
        let mut mlp = |mlp: &Mlp| {
            mlp.gate.iter().chain([&mlp.up]).for_each(|m| add(m, false, true));
            add(&mlp.down, false, false);
        };
        match &block.ffn {
            FeedForward::Dense(dense) => mlp(dense),
            FeedForward::Experts(mixture) => {
                mixture.shared.iter().for_each(|(shared, _)| mlp(shared));
                // A single row is the input of all experts.
                products.insert((DType::F32, d, rows, false, true));
                for expert in &mixture.experts {
                    let [first, second] = &mut of_experts;
                    let ups = expert.gate.iter().chain([&expert.up]).filter_map(|m| of(m, layer));
                    for dtype in ups {
                        first.insert(dtype);
                        products.insert((dtype, d, 1, false, true));
                    }
                    second.extend(of(&expert.down, layer));
                }
            }
        }
    }
    let head = if spec.tied_head { "token_embd.weight" } else { "output.weight" };
    products.extend(weights.get(head).map(|t| (t.dtype, d, logits, false, true)));
    let mut inputs = ActsBytes::default();
    for (dtype, k, rows, fine, own) in products {
        for (m, need) in Linear::needs_up_to(dtype, isa, fine, rows, mode) {
            inputs.add(m, k, need, own);
        }
    }
    let [first, second] = of_experts.map(Vec::from_iter);
    let sorted = HostWorkspace::expert_inputs_bytes(spec, rows, [&first, &second], isa, mode);
    inputs.total() + sorted + threads * thread
}

/// Bytes of the attention plans, with and without a window: for the end of the longest prompt, and for steps of 1, 2,
/// 4... sequences of the same length. (Fewer sequences than threads are divided into more pieces.)
fn attention_bytes(spec: &ModelSpec, options: &Options, rows: usize, threads: usize) -> Result<usize> {
    let pages = vec![0; KvGeometry::pages_for(options.context)];
    let tail = |n_rows: usize, row0: usize| SeqRows {
        pages: &pages,
        first_pos: options.context - n_rows,
        n_rows,
        row0,
    };
    let mut total = 0;
    for window in
        [None, spec.window.as_ref().map(|w| w.size)].into_iter().take(1 + usize::from(spec.window.is_some()))
    {
        let mut plan = Host::empty_plan(&Host::attention(spec, window), options.mode, threads)?;
        let most = rows.min(options.context);
        plan.rebuild(&[tail(most, 0)]);
        if options.mode == Mode::Deterministic {
            // Segments are pages: which blocks of rows are split between threads, and so the number of results kept,
            // differs from chunk to chunk, and the last chunk need not have the most.
            for first_pos in (0..options.context).step_by(most.max(options.context / 64)) {
                let n = most.min(options.context - first_pos);
                for n_rows in [n, n - 1].into_iter().filter(|&n| n > 0) {
                    plan.rebuild(&[SeqRows { pages: &pages, first_pos, n_rows, row0: 0 }]);
                }
            }
        }
        let powers = std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|&n| n < options.sequences);
        for n in powers.chain([options.sequences]) {
            plan.rebuild(&(0..n).map(|row0| tail(1, row0)).collect::<Vec<_>>());
        }
        total += plan.bytes();
    }
    Ok(total)
}

/// Geometry of the KV cache of a model.
pub(super) fn geometry(spec: &ModelSpec, dtype: KvType) -> KvGeometry {
    KvGeometry { n_layers: spec.n_layers, n_kv_heads: spec.n_kv_heads, head_dim: spec.head_dim, dtype }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn what_no_machine_has_is_refused_with_the_numbers() {
        check_beyond("a step of 1 row", 4096).unwrap();
        let e = check_beyond("a step of 70000 rows", 1 << 60).unwrap_err().to_string();
        assert!(e.contains("a step of 70000 rows needs 1073741824.0 GiB more than planned"), "{e}");
    }
}
