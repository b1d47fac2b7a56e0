//! Which experts of a divided layer are on the device.

use crate::model::{ModelSpec, RouterProfile};
use crate::program::Placement;

/// The experts of a layer of which the device has some and the host computes the others.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Divided {
    /// Experts of the layer.
    pub count: usize,
    /// Those on the device, ascending: the most used ones, or the first where nothing is known of their use.
    pub on_device: Vec<u32>,
    /// Choices of a row that are expected to be of these.
    pub uses: f64,
    /// Choices of a row.
    pub used: usize,
}

impl Divided {
    /// The experts of `layer`, placed so; `None` if it is not divided.
    pub fn of(
        spec: &ModelSpec,
        placement: &Placement,
        router: Option<&RouterProfile>,
        layer: usize,
    ) -> Option<Divided> {
        let e = spec.experts_of(layer)?;
        let at = placement.layers[layer];
        let n = usize::from(at.device_experts).min(e.count);
        let mut on_device: Vec<u32> = match router {
            Some(router) => router.by_use(layer),
            None => (0..e.count as u32).collect(),
        };
        on_device.truncate(n);
        on_device.sort_unstable();
        let uses = match router {
            Some(router) => on_device.iter().map(|&e| router.probability(layer, e)).sum(),
            None => (e.used * n) as f64 / e.count as f64,
        };
        at.is_divided().then_some(Divided { count: e.count, on_device, uses, used: e.used })
    }

    /// For each expert, whether the host computes it.
    pub fn on_host(&self) -> Vec<bool> {
        let mut own = vec![true; self.count];
        self.on_device.iter().for_each(|&e| own[e as usize] = false);
        own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;
    use crate::program::{LayerPlacement, Side};

    #[test]
    fn the_device_has_the_most_used() {
        let spec = synth::spec("tiny-qwen3-moe").unwrap();
        let e = spec.experts.clone().unwrap();
        let mut placement = Placement::all(Side::Device, spec.n_layers, 1);
        assert_eq!(Divided::of(&spec, &placement, None, 0), None);
        placement.layers[0] = LayerPlacement { device_experts: 2, ..placement.layers[0] };
        let plain = Divided::of(&spec, &placement, None, 0).unwrap();
        assert_eq!((&plain.on_device[..], plain.used), (&[0, 1][..], e.used));
        assert!((plain.uses - 2.0 * e.used as f64 / e.count as f64).abs() < 1e-12);
        let mut router = RouterProfile::uniform(&e);
        // Expert 5 is chosen by all rows, expert 2 by more than the others.
        router.layers[0].counts.iter_mut().for_each(|n| *n = 1);
        (router.layers[0].counts[5], router.layers[0].counts[2]) = (8, 3);
        let of = Divided::of(&spec, &placement, Some(&router), 0).unwrap();
        assert_eq!(of.on_device, [2, 5]);
        assert!(of.uses > plain.uses);
        let own = of.on_host();
        assert_eq!(own.iter().filter(|own| **own).count(), e.count - 2);
        assert!(!own[2] && !own[5]);
    }
}
