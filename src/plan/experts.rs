//! Experts by the side whose memory they are read from.

use serde::Serialize;

use crate::model::ModelSpec;
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
