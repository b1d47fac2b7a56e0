//! Everything on the CPU: all sublayers of all layers as one segment, rows from 0 of one workspace.

use super::executor::{Executor, Placement, Want};
use super::host::{Host, HostSeq, HostStep, HostWorkspace, Residual};
use super::input::{Input, wanted_rows};
use super::iterate::Sharing;
use super::memory::{Memory, check_beyond, geometry};
use super::options::Options;
use super::prepare::{Prepared, Units};
use crate::Result;
use crate::cache::{BlockTable, PageList, PagePool};
use crate::host::Pool;
use crate::model::{ModelSpec, Weights};

/// The CPU's sublayers over pages in host memory.
pub(super) struct CpuOnly {
    model: Prepared,
    pool: Pool,
    cache: PagePool,
    host: Host,
    workspace: HostWorkspace,
    step: HostStep,
    n_logits: usize,
    /// Bytes of the workspace that the dry run counted.
    planned: usize,
    memory: Memory,
    argmax: Vec<Option<u32>>,
}

impl CpuOnly {
    /// Sizes everything, then prepares the weights and the cache.
    ///
    /// # Errors
    /// It does not fit in memory; a damaged model.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        n_pages: usize,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<CpuOnly> {
        let kv = geometry(spec, options.kv_dtype);
        let pool = Pool::pinned(options.threads);
        let memory = Memory::plan(spec, weights, options, pool.threads())?;
        memory.check()?;
        let host = Host::new(spec, options.isa, options.mode, pool.threads())?;
        let units = Units { node: options.weights_node.clone(), ..Units::all(spec) };
        let model = Prepared::part(spec.clone(), weights, options.isa, &units, &pool, progress)?;
        let cache = PagePool::new(kv, n_pages)?;
        let workspace = HostWorkspace::new(spec);
        let (step, argmax) = (HostStep::default(), Vec::new());
        let planned = HostWorkspace::bytes(spec, options.rows(), options.logit_rows());
        Ok(CpuOnly { model, pool, cache, host, workspace, step, n_logits: 0, planned, memory, argmax })
    }

    fn forward(&mut self, inputs: &[Input<'_>], tables: &[&BlockTable]) -> Result<()> {
        self.n_logits = 0;
        let seqs: Vec<HostSeq<'_>> = inputs
            .iter()
            .zip(tables)
            .map(|(input, table)| HostSeq {
                pages: table.pages(),
                first_pos: table.len(),
                n_rows: input.tokens.len(),
                tokens: HostSeq::ALL,
            })
            .collect();
        let (step, ws) = (&mut self.step, &mut self.workspace);
        let tokens = inputs.iter().flat_map(|i| i.tokens).copied();
        self.host.prepare(step, 0, &seqs, tokens, wanted_rows(inputs));
        let mut rows = step.rows();
        if rows.is_empty() {
            return Ok(());
        }
        let bytes = HostWorkspace::bytes(&self.model.spec, rows.len(), step.n_wanted());
        if bytes > self.planned {
            let what = format!("a step of {} rows with logits of {}", rows.len(), step.n_wanted());
            check_beyond(&what, bytes - self.planned)?;
            self.planned = bytes;
        }
        ws.reserve(rows.end, step.n_wanted());
        let cx = self.host.with(&self.model, &self.pool);
        cx.embed(ws, step, rows.clone());
        let mut residual = Residual::None;
        for i in 0..self.model.spec.n_layers {
            let layer = self.model.layer(i);
            let kv = self.cache.layer(i);
            cx.project(ws, step, layer, residual, rows.clone());
            cx.append(ws, step, &kv, rows.clone());
            if i + 1 == self.model.spec.n_layers {
                step.keep_wanted(ws);
                rows = step.rows();
                if rows.is_empty() {
                    return Ok(());
                }
            }
            cx.attend(ws, step, layer, &kv, rows.clone());
            cx.out_proj(ws, layer, rows.clone());
            cx.ffn_up(ws, layer, layer.after_attention(), rows.clone());
            cx.ffn_down(ws, layer, rows.clone());
            residual = layer.after_ffn();
        }
        self.n_logits = rows.len();
        cx.head(ws, residual, rows, 0);
        Ok(())
    }
}

impl Executor for CpuOnly {
    fn pages(&mut self) -> &mut PageList {
        &mut self.cache
    }

    fn run(
        &mut self,
        inputs: &[Input<'_>],
        tables: &[&BlockTable],
        want: Want,
        _: Sharing<'_>,
    ) -> Result<()> {
        self.forward(inputs, tables)?;
        if want == Want::Argmax {
            self.argmax.clear();
            let cx = self.host.with(&self.model, &self.pool);
            cx.pick(&self.workspace, 0..self.n_logits, &mut self.argmax);
        }
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        self.workspace.logits.rows(0..self.n_logits)
    }

    fn argmax(&self) -> &[Option<u32>] {
        &self.argmax
    }

    fn placement(&self) -> Placement {
        Placement {
            device: "cpu".into(),
            strategy: "cpu-only",
            isa: self.model.isa.name().into(),
            threads: self.pool.threads(),
            kv_type: self.cache.geometry().dtype.name(),
        }
    }

    fn memory(&self) -> Memory {
        self.memory
    }

    fn bytes_per_step(&self) -> u64 {
        self.model.bytes_per_step()
    }
}
