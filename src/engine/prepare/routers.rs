//! The routers of a mixture, in f32 in memory of their own.
//!
//! They are small, and each token reads all of them. In the mapping of the file each is some hundred pages of 4 KiB, whose addresses
//! no longer are at hand after the experts' gigabyte: on a virtual machine, whose pages are looked up twice, a router of 1 MB took
//! 540 µs for 16 rows where it takes 120 from huge pages.

use std::collections::HashMap;

use super::{ALIGN, Units, in_f32, memory, router_names};
use crate::model::{ModelSpec, Weights};
use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};

/// The routers of the units that are prepared.
pub(super) struct Routers {
    bytes: Option<Bytes>,
    /// Where each begins, by its tensor's name.
    places: HashMap<String, usize>,
}

impl Routers {
    /// Copies them to one mapping, on the node of `units`.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn copy(spec: &ModelSpec, weights: &Weights, units: &Units) -> Result<Routers> {
        let wanted = router_names(spec).filter(|(layer, _)| units.layers[*layer]);
        let found: Vec<(String, &Tensor)> =
            wanted.filter_map(|(_, name)| weights.get(&name).map(|t| (name, t))).collect();
        let (mut total, mut places) = (0usize, HashMap::new());
        for (name, t) in &found {
            places.insert(name.clone(), total);
            total += (t.rows() * t.cols() * size_of::<f32>()).next_multiple_of(ALIGN);
        }
        if total == 0 {
            return Ok(Routers { bytes: None, places });
        }
        let no_room = |e: std::io::Error| {
            Error::Capacity(format!("no memory for {:.1} MB of routers: {e}", total as f64 / 1e6))
        };
        let mut map = memory(total, units.node.as_ref(), &no_room)?;
        for (name, t) in found {
            let floats = in_f32(t)?;
            map[places[&name]..][..floats.data.len()].copy_from_slice(&floats.data);
            t.data.release_pages();
        }
        let bytes = Bytes::from_anonymous(map.make_read_only().map_err(no_room)?);
        Ok(Routers { bytes: Some(bytes), places })
    }

    /// The router of this name, `[rows, d]`; `None` if it has not been copied.
    pub fn get(&self, name: &str, rows: usize, d: usize) -> Option<Tensor> {
        let data = self.bytes.as_ref()?.slice(*self.places.get(name)?, rows * d * size_of::<f32>())?;
        Tensor::new(DType::F32, vec![rows, d], data).ok()
    }
}
