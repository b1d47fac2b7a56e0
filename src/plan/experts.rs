//! Experts by the side whose memory they are read from, and how many of them rows read by a router's profile.

use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::model::{ModelSpec, RouterProfile};
use crate::program::{Placement, Residence, Side};

/// Experts of all layers, by where a decode step reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct ExpertCounts {
    /// In the GPU's memory.
    pub device: usize,
    /// In the host's.
    pub host: usize,
    /// Slots on the GPU that follow the router.
    pub cache: usize,
}

impl ExpertCounts {
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
            counts.host += experts - device;
        }
        Some(counts)
    }
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
