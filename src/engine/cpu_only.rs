//! Everything on the CPU.

use super::executor::{Executor, Placement, Want};
use super::forward::{Forward, Input};
use super::memory::Memory;
use super::prepare::Prepared;
use crate::Result;
use crate::cache::{BlockTable, PageList, PagePool};
use crate::host::Pool;

/// The forward pass of the CPU over pages in host memory.
pub(super) struct CpuOnly {
    pub model: Prepared,
    pub pool: Pool,
    pub cache: PagePool,
    pub forward: Forward,
    pub memory: Memory,
    pub argmax: Vec<u32>,
}

impl Executor for CpuOnly {
    fn pages(&mut self) -> &mut PageList {
        &mut self.cache
    }

    fn run(&mut self, inputs: &[Input<'_>], tables: &[&BlockTable], want: Want) -> Result<()> {
        self.forward.run(&self.model, &self.pool, &self.cache, inputs, tables);
        if want == Want::Argmax {
            let rows = self.forward.logits().chunks_exact(self.model.spec.vocab);
            let kernels = crate::simd::Kernels::for_isa(self.model.isa);
            self.argmax.clear();
            self.argmax.extend(rows.map(|row| kernels.argmax(row) as u32));
        }
        Ok(())
    }

    fn logits(&self) -> &[f32] {
        self.forward.logits()
    }

    fn argmax(&self) -> &[u32] {
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
