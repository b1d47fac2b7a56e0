//! The decision where a model runs, and the numbers it rests on.

use super::predict::Prediction;
use crate::engine::{Choice, Memory};
use crate::program::{Far, Placement, Policy, Side};

/// Where a model runs, and in how much memory.
pub struct Decision {
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

impl Decision {
    /// Everything on the CPU, with `available` bytes of memory before loading: no accelerator was requested, or there
    /// is none.
    pub(super) fn cpu(layers: usize, memory: Memory, available: Option<u64>) -> Decision {
        Decision {
            strategy: "cpu-only",
            placement: Placement::all(Side::Host, layers, 0),
            device: None,
            k: Some(layers + 2),
            pinned: None,
            policies: None,
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
    pub(super) fn gpu(layers: usize, device: String, memory: Memory, free: u64) -> Decision {
        Decision {
            strategy: "gpu-only",
            placement: Placement::all(Side::Device, layers, 0),
            device: Some(device),
            k: Some(0),
            gpu: Some((memory, free)),
            host: None,
            ..Decision::cpu(layers, memory, None)
        }
    }

    /// The placement that a strategy chose.
    pub fn split(
        strategy: &'static str,
        device: String,
        free: u64,
        choice: Choice,
        because: Option<String>,
    ) -> Decision {
        Decision {
            strategy,
            placement: choice.placement,
            device: Some(device),
            k: choice.k,
            pinned: choice.pinned,
            policies: choice.policies,
            kv_pages: choice.kv_pages,
            far: choice.far,
            gpu: Some((choice.device, free)),
            host: Some((choice.host, choice.host_available)),
            next: choice.next,
            because,
            predicted: None,
        }
    }

    /// This decision, chosen by predicted time.
    pub(super) fn with(self, predicted: Option<Prediction>) -> Decision {
        Decision { predicted, ..self }
    }

    /// This decision as a [`Choice`].
    pub(super) fn choice(&self) -> Choice {
        let none = Memory { weights: 0, kv: 0, activations: 0 };
        Choice {
            placement: self.placement.clone(),
            k: self.k,
            pinned: self.pinned,
            policies: self.policies,
            kv_pages: self.kv_pages,
            far: self.far,
            device: self.gpu.map_or(none, |g| g.0),
            host: self.host.map_or(none, |h| h.0),
            host_available: self.host.and_then(|h| h.1),
            next: None,
        }
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
