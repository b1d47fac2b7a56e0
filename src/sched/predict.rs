//! Predicted seconds, as strategies ask for them.
//!
//! Pure: implementations read cost tables ([`plan`](crate::plan)) or closed formulas, never a clock.

use crate::program::Iteration;

/// Predicted seconds of the parts of an iteration, each over all layers unless it says otherwise, and of whole iterations.
pub trait Predict {
    /// Products with weights, and what runs beside them on the device, for this many rows.
    fn linear(&self, rows: u64) -> f64;

    /// Attention on the device: rows, tokens whose keys and values are read over all sequences, pairs of a row and a token.
    fn device_attention(&self, rows: u64, kv_tokens: u64, pairs: u64) -> f64;

    /// Attention of decode rows on the host, with no copy beside it.
    fn host_attention(&self, rows: u64, kv_tokens: u64) -> f64;

    /// Pages of all layers to the other side.
    fn swap(&self, pages: u64) -> f64;

    /// Handing one layer's rows to the host and back (NEO's t_launch).
    fn launch(&self) -> f64;

    /// Blocks of the model.
    fn layers(&self) -> u32;

    /// A whole iteration.
    fn iteration(&self, iteration: &Iteration) -> f64;

    /// Seconds for which the iteration's copies keep the link busy, in the busier direction; 0 where they slow nothing down.
    fn copies(&self, _iteration: &Iteration) -> f64 {
        0.0
    }

    /// Share of its rate that attention on the host keeps while copies over the link run, in (0, 1].
    fn beside_copies(&self) -> f64 {
        1.0
    }

    /// Iterations that a cohort takes for a token: one for each layer where it waits for the host, and one more.
    fn token_iterations(&self) -> u32 {
        self.layers() + 1
    }

    /// The layer where a cohort's rows wait for the host next, from this one or from the start; `None`: they get their token.
    fn next_stop(&self, at: Option<u32>) -> Option<u32> {
        Some(at.map_or(0, |layer| layer + 1)).filter(|&layer| layer < self.layers())
    }

    /// Seconds of the host for a cohort of these rows, from one iteration to the next.
    fn cohort(&self, rows: u64, kv_tokens: u64) -> f64 {
        self.host_attention(rows, kv_tokens) / f64::from(self.layers())
    }

    /// Seconds of the host that the device waits for in an iteration: layers whose products the host computes.
    fn host_part(&self, _iteration: &Iteration) -> f64 {
        0.0
    }
}

/// Predicts zero seconds for everything: for strategies that need no costs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Untimed;

impl Predict for Untimed {
    fn linear(&self, _rows: u64) -> f64 {
        0.0
    }
    fn device_attention(&self, _rows: u64, _kv_tokens: u64, _pairs: u64) -> f64 {
        0.0
    }
    fn host_attention(&self, _rows: u64, _kv_tokens: u64) -> f64 {
        0.0
    }
    fn swap(&self, _pages: u64) -> f64 {
        0.0
    }
    fn launch(&self) -> f64 {
        0.0
    }
    fn layers(&self) -> u32 {
        1
    }
    fn iteration(&self, _iteration: &Iteration) -> f64 {
        0.0
    }
}
