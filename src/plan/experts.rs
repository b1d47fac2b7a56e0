//! Experts by the side whose memory they are read from, and how many of them rows read by a router's profile.

use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::hardware::Hardware;
use crate::model::{ModelSpec, RouterProfile};
use crate::program::{Placement, Residence, Side};

/// Experts of all layers, by where a decode step reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ExpertCounts {
    /// In the GPU's memory.
    pub device: usize,
    /// In the host's.
    pub host: usize,
    /// In the GPU's memory, and exchanged for others that the routers choose more often.
    pub cache: usize,
    /// In the GPU's memory, of layers that are divided.
    #[serde(skip)]
    divided: usize,
}

impl ExpertCounts {
    /// The same, where those of divided layers follow the router, or do not.
    pub fn with_cache(self, follows: bool) -> ExpertCounts {
        ExpertCounts { cache: if follows { self.divided } else { 0 }, ..self }
    }

    /// The experts of a model that is placed so; `None` if it has none.
    pub fn of(spec: &ModelSpec, placement: &Placement) -> Option<ExpertCounts> {
        spec.experts.as_ref()?;
        let mut counts = ExpertCounts::default();
        for (layer, at) in placement.layers.iter().enumerate() {
            let experts = spec.experts_of(layer).map_or(0, |e| e.count);
            let resident = matches!(at.weights, Residence::Device | Residence::Both);
            let device = match resident && at.computes_ffn_on(Side::Device) {
                true if at.is_divided() => usize::from(at.device_experts).min(experts),
                true => experts,
                false => 0,
            };
            counts.device += device;
            counts.divided += if at.is_divided() { device } else { 0 };
            counts.host += experts - device;
        }
        Some(counts)
    }
}

/// Choices of an expert that make up for bringing it to the device, on a machine whose host reads B_c bytes/s and whose device B_d; `None`: nothing does.
///
/// ```text
/// packing takes 3·S/B_c of the host (read, write, and read what is written over), the crossing runs beside the step; each later choice
/// saves S/B_c − S/B_d:          3/B_c : (1/B_c − 1/B_d) = 3 / (1 − B_c/B_d)
/// ```
pub fn exchange_pays(hardware: &Hardware) -> Option<f64> {
    let (gpu, _) = hardware.accelerator.as_ref()?;
    let saved = 1.0 - hardware.cpu.read_bw / gpu.bw;
    (saved > 0.0).then(|| 3.0 / saved)
}

/// The share of each layer's experts that rows read, by a router's profile. Planners ask for the same few numbers of rows thousands of
/// times, and each answer is a sum over all experts.
#[derive(Debug)]
pub(super) struct SharesRead {
    router: RouterProfile,
    known: Mutex<FxHashMap<u64, Arc<[f64]>>>,
}

impl SharesRead {
    pub fn of(router: RouterProfile) -> SharesRead {
        SharesRead { router, known: Mutex::default() }
    }

    /// The share of the experts of `layer`, which has some, that `rows` rows read.
    pub fn of_layer(&self, layer: usize, rows: u64) -> f64 {
        // What a panic of another thread has left is whole entries.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let shares = known.entry(rows).or_insert_with(|| {
            let of = |layer: usize| {
                self.router.distinct_of_all(layer, rows as f64) / self.router.experts(layer).max(1) as f64
            };
            (0..self.router.layers.len()).map(of).collect()
        });
        shares[layer]
    }
}
