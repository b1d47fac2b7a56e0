//! The strategies, one line each.

use serde::Serialize;

/// How CPU and GPU share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// All on the CPU.
    CpuOnly,
    /// All on the GPU.
    GpuOnly,
    /// The GPU filled without a cost model, the rest computed on the CPU (llama.cpp's `--n-gpu-layers`).
    Greedy,
    /// Hugging Face Accelerate: the GPU filled, the rest copied there in each forward, nothing computed on the CPU.
    Accelerate,
    /// FlexGen: a share of the blocks on the GPU, the rest streamed.
    Flexgen,
    /// DeepSpeed ZeRO-Inference: every block streamed, keys and values on the GPU.
    ZeroInference,
    /// Every block streamed; keys and values, and attention, on either side.
    Stream,
    /// HELM.
    Helm,
    /// LIA.
    Lia,
    /// Of a mixture of experts: the experts on the CPU, all else on the GPU (llama.cpp's `--cpu-moe`, LIA's (0,0,0,0,1,1)).
    CpuMoe,
    /// Of a mixture of experts: those of the first blocks on the CPU, as few as fit, all else on the GPU (llama.cpp's `--n-cpu-moe`).
    Ncmoe,
    /// Of a mixture of experts: experts on both sides, and where all else is, by predicted time.
    Experts,
}

/// The feed-forwards of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ffns {
    /// All are dense.
    Dense,
    /// Experts that either side computes.
    Experts,
    /// Experts that the CPU computes, because the device cannot.
    ExpertsOnHost,
}

/// What there is to know of a strategy.
struct Entry {
    strategy: Strategy,
    /// As on the command line.
    name: &'static str,
    /// Among equal times the least wins: one side alone, then the systems, then the baselines.
    preference: u8,
    /// Whether its placements have a boundary between units on the CPU and units on the GPU.
    has_boundary: bool,
}

/// Baselines first.
const TABLE: [Entry; 12] = {
    use Strategy::*;
    [
        Entry { strategy: CpuOnly, name: "cpu-only", preference: 0, has_boundary: true },
        Entry { strategy: GpuOnly, name: "gpu-only", preference: 1, has_boundary: true },
        Entry { strategy: Greedy, name: "greedy", preference: 5, has_boundary: true },
        Entry { strategy: Accelerate, name: "accelerate", preference: 8, has_boundary: false },
        Entry { strategy: Flexgen, name: "flexgen", preference: 6, has_boundary: false },
        Entry { strategy: ZeroInference, name: "zero-inference", preference: 7, has_boundary: false },
        Entry { strategy: Stream, name: "stream", preference: 4, has_boundary: false },
        Entry { strategy: Helm, name: "helm", preference: 2, has_boundary: true },
        Entry { strategy: Lia, name: "lia", preference: 3, has_boundary: false },
        Entry { strategy: CpuMoe, name: "cpu-moe", preference: 10, has_boundary: false },
        Entry { strategy: Ncmoe, name: "ncmoe", preference: 11, has_boundary: false },
        Entry { strategy: Experts, name: "experts", preference: 9, has_boundary: false },
    ]
};

impl Strategy {
    /// All, baselines first.
    pub const ALL: [Strategy; TABLE.len()] = {
        let mut all = [Strategy::CpuOnly; TABLE.len()];
        let mut i = 0;
        while i < all.len() {
            // An entry stands where its variant does.
            assert!(TABLE[i].strategy as usize == i);
            all[i] = TABLE[i].strategy;
            i += 1;
        }
        all
    };

    fn entry(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// The strategy of this name.
    pub fn named(name: &str) -> Option<Strategy> {
        TABLE.iter().find(|e| e.name == name).map(|e| e.strategy)
    }

    /// Among equal times the least wins: one side alone, then the systems, then the baselines.
    pub fn preference(self) -> u8 {
        self.entry().preference
    }

    /// Whether it places models with such feed-forwards.
    pub fn places(self, ffn: Ffns) -> bool {
        match self {
            Strategy::CpuOnly => true,
            Strategy::CpuMoe => ffn != Ffns::Dense,
            Strategy::Ncmoe | Strategy::Experts => ffn == Ffns::Experts,
            _ => ffn != Ffns::ExpertsOnHost,
        }
    }

    /// Whether its placements have a boundary between units on the CPU and units on the GPU.
    pub fn has_boundary(self) -> bool {
        self.entry().has_boundary
    }
}
