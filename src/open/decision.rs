//! The decision where a model runs, and the numbers it rests on.

use super::predict::Prediction;
use crate::engine::{Memory, Sizes};
use crate::host::memory_available;
use crate::plan::{Candidate, ExpertCounts};
use crate::program::{Far, Placement, Policy, Side};

/// Where a model runs, and in how much memory.
pub struct PlacementDecision {
    /// The strategy's name.
    pub strategy: &'static str,
    /// Where everything lives.
    pub placement: Placement,
    /// The accelerator that was considered.
    pub device: Option<String>,
    /// HELM's boundary: 0 is all on the device, layers + 2 all on the host.
    pub k: Option<usize>,
    /// Blocks that LIA keeps on the device.
    pub pinned: Option<usize>,
    /// The vectors for prompts and decode rows of blocks that are not pinned.
    pub policies: Option<(Policy, Policy)>,
    /// Of a mixture of experts: those on each side.
    pub experts: Option<ExpertCounts>,
    /// Pages of keys and values on the device, and in total, if not all are on the device.
    pub kv_pages: Option<(usize, usize)>,
    /// How pages that left the device are attended; `None`: in each step in the faster way.
    pub far: Option<Far>,
    /// Bytes on the device, and those that were free there.
    pub gpu: Option<(Memory, u64)>,
    /// Bytes on the host, and those that were available, if the system reports them.
    pub host: Option<(Memory, Option<u64>)>,
    /// The next choice that would use more of the device, and its bytes there.
    pub next: Option<(String, u64)>,
    /// Why a simpler placement was not possible.
    pub because: Option<String>,
    /// The prediction that the choice is based on.
    pub predicted: Option<Prediction>,
}

impl PlacementDecision {
    /// Everything on the CPU, with `available` bytes of memory before loading: no accelerator was requested, or there
    /// is none.
    pub(super) fn cpu(layers: usize, memory: Memory, available: Option<u64>) -> PlacementDecision {
        PlacementDecision {
            strategy: "cpu-only",
            placement: Placement::all(Side::Host, layers, 0),
            device: None,
            k: Some(layers + 2),
            pinned: None,
            policies: None,
            experts: None,
            kv_pages: None,
            far: Some(Far::Attend),
            gpu: None,
            host: Some((memory, available)),
            next: None,
            because: None,
            predicted: None,
        }
    }

    /// Everything on the accelerator.
    pub(super) fn gpu(layers: usize, device: String, memory: Memory, free: u64) -> PlacementDecision {
        PlacementDecision {
            strategy: "gpu-only",
            placement: Placement::all(Side::Device, layers, 0),
            device: Some(device),
            k: Some(0),
            gpu: Some((memory, free)),
            host: None,
            ..PlacementDecision::cpu(layers, memory, None)
        }
    }

    /// The placement of a strategy's candidate, of a model of these sizes.
    pub(super) fn of(candidate: &Candidate, sizes: &Sizes, device: String) -> PlacementDecision {
        let (k, n) = (candidate.k, sizes.layers());
        let vectors = |bits: Option<[u8; 6]>| bits.map(|b| Policy::from_bits(b.map(|b| b == 1)));
        let (placement, kv_pages) = sizes.with_pages(candidate.placement.clone());
        let (host, none) = (sizes.host(&placement), Memory { weights: 0, kv: 0, activations: 0 });
        let on_device = match placement.is_host_alone() {
            true => none,
            false => sizes.device_by(&placement, candidate.way),
        };
        // The boundary before this one, if memory is what prevents it.
        let before = k.and_then(|k| k.checked_sub(1)).filter(|_| candidate.strategy.has_boundary());
        let next = before.and_then(|k| {
            let bytes = sizes.device(&Placement::boundary(k, n, 0, 0)).total();
            (bytes > sizes.free()).then(|| (format!("boundary {k} of {} units", n + 2), bytes))
        });
        PlacementDecision {
            strategy: candidate.strategy.name(),
            placement,
            device: Some(device),
            k,
            pinned: candidate.pinned_blocks,
            policies: vectors(candidate.prefill_policy).zip(vectors(candidate.decode_policy)),
            experts: None,
            kv_pages,
            far: candidate.way,
            gpu: Some((on_device, sizes.free())),
            host: Some((host, memory_available())),
            next,
            because: None,
            predicted: None,
        }
    }

    /// This decision, chosen by predicted time.
    pub(super) fn with(self, predicted: Option<Prediction>) -> PlacementDecision {
        PlacementDecision { predicted, ..self }
    }

    /// Bytes on the device and on the host.
    pub(super) fn bytes(&self) -> (u64, u64) {
        (self.gpu.map_or(0, |g| g.0.total()), self.host.map_or(0, |h| h.0.total()))
    }

    /// Whether it was chosen by predicted time.
    pub fn is_predicted(&self) -> bool {
        self.predicted.is_some()
    }

    /// Whether pages of keys and values leave the accelerator.
    pub fn pages_move(&self) -> bool {
        self.kv_pages.is_some()
    }

    /// Whether a block has its keys and values on the accelerator.
    pub fn keeps_kv_on_device(&self) -> bool {
        self.placement.layers.iter().any(|l| l.kv == Side::Device)
    }
}
