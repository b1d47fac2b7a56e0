//! Timing a model's operations one by one, as steps run them: layer after layer, so that each reads its weights from where
//! a step would find them.
//!
//! | a file | what |
//! |---|---|
//! | `grid` | which rows and contexts are measured, in which order |
//! | `host` | the CPU's sublayers |
//! | `device` | an accelerator's |

mod device;
mod grid;
mod host;

use std::sync::Arc;

use super::calibrate::Factors;
use super::sample::Effort;
use super::tables::{Tables, kinds};
use crate::device::Accelerator;
use crate::host::{Pool, memory_available};
use crate::model::{ModelSpec, Weights};
use crate::simd::Isa;
use crate::{Error, Result};

/// A model whose operations are to be timed.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    /// Its sizes.
    pub spec: &'a ModelSpec,
    /// Its weights.
    pub weights: &'a Weights,
    /// The tier of the CPU's kernels.
    pub isa: Isa,
    /// The CPU's threads.
    pub pool: &'a Pool,
    /// How long it may take.
    pub effort: Effort,
}

impl Subject<'_> {
    /// Steps of [`Subject::measure`], for a progress bar.
    pub fn steps(&self, device: bool) -> u64 {
        let grid = grid::Grid::new(self.spec, self.effort);
        grid.points().len() as u64 * (host::passes(self.effort) as u64 + u64::from(device))
    }

    /// Times the operations on the CPU, and on `accelerator`, if there is one. `progress` is called after each step.
    ///
    /// # Errors
    /// A damaged model; no memory for it; a device that failed, or that cannot multiply its weights.
    pub fn measure(&self, accelerator: Option<&Arc<dyn Accelerator>>, progress: &dyn Fn()) -> Result<Tables> {
        let (needed, available) = (self.weights.bytes(), memory_available().unwrap_or(u64::MAX));
        if needed > available / 10 * 9 {
            return Err(Error::Capacity(format!(
                "its weights are {:.1} GB, {:.1} GB of host memory are available: timing its operations needs all of them there",
                needed as f64 / 1e9,
                available as f64 / 1e9
            )));
        }
        let kinds = kinds(self.spec, self.weights);
        let host = Some(host::measure(self, &kinds, progress)?);
        let device = accelerator.map(|a| device::measure(self, a, &kinds, progress)).transpose()?;
        Ok(Tables { kinds, host, device, factors: Factors::default() })
    }
}

/// The layers that are walked through: of each kind as many, in their order, as it takes to read more than `bytes` (or
/// all), and at least two of it, so that no layer finds its weights in a cache that a whole model would have overrun.
fn walk(kinds: &[usize], layer_bytes: &[u64], bytes: u64) -> Vec<usize> {
    let n_kinds = kinds.iter().max().map_or(0, |k| k + 1);
    let share = bytes / n_kinds.max(1) as u64;
    let mut taken = vec![(0, 0); n_kinds];
    let wanted = |&layer: &usize| {
        let (count, sum) = &mut taken[kinds[layer]];
        let take = *count < 2 || *sum < share;
        if take {
            (*count, *sum) = (*count + 1, *sum + layer_bytes[layer]);
        }
        take
    };
    (0..kinds.len()).filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_has_every_kind_and_overruns_the_cache() {
        let kinds = [0, 0, 0, 1, 0, 0, 0, 1];
        assert_eq!(walk(&kinds, &[10; 8], 1), [0, 1, 3, 7], "two of each at least");
        assert_eq!(walk(&kinds, &[10; 8], 80), [0, 1, 2, 3, 4, 7]);
        assert_eq!(walk(&kinds, &[10; 8], u64::MAX), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(walk(&[0], &[10], 1), [0]);
        assert_eq!(walk(&[], &[], 1), [0usize; 0]);
    }
}
