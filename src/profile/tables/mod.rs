//! Timing tables of the real kernels on a model's own matrices, and the costs that they answer.
//!
//! ```text
//! product      seconds by rows, for each kind of layer                         project, out_proj, ffn_up, ffn_down
//! attention    of single rows: by (rows, tokens that a row sees)               decode
//!              of a sequence's rows: by (rows, mean tokens that a row sees)    prompts; sequences add up
//! ends         seconds by rows                                                 embed (with a step's lists), head, pick
//! ```
//! Layers are alike if their matrices have the same types and both have a window or none; each kind is measured. Where a table
//! is missing (a side that was not measured) the [`Roofline`] over the measured limits answers.

mod curve;

use serde::{Deserialize, Serialize};

pub use self::curve::{Curve, Surface};
use super::calibrate::Factors;
use crate::model::{ModelSpec, Weights};
use crate::plan::cost::{Batch, Costs, Direction, Scan};
use crate::plan::step_times::Source;
use crate::plan::{Hardware, Roofline, Sizes};
use crate::program::{Side, Sublayer};
use crate::{Error, Result};

/// Operations of one kind of layer on one side: seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerTable {
    /// By rows.
    pub project: Curve,
    /// By rows.
    pub append: Curve,
    /// By rows, each of a sequence of its own, and tokens that each sees.
    pub attend: Surface,
    /// By rows of one sequence, and the mean of the tokens that each sees.
    pub attend_prompt: Surface,
    /// By rows.
    pub out_proj: Curve,
    /// By rows.
    pub ffn_up: Curve,
    /// By rows.
    pub ffn_down: Curve,
}

/// Operations on one side: seconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SideTable {
    /// By rows; what a step takes once, however many layers it has (its lists, the plans of attention), is counted here.
    pub embed: Curve,
    /// Each kind of layer.
    pub layers: Vec<LayerTable>,
    /// By rows that want logits.
    pub head: Curve,
    /// By rows that want logits.
    pub pick: Curve,
    /// On the device: pages of one layer to the host, by pages.
    pub page_out: Curve,
    /// On the device: pages of one layer from the host, by pages.
    pub page_in: Curve,
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tables {
    /// Kind of each layer: its place in [`SideTable::layers`].
    pub kinds: Vec<usize>,
    /// On the CPU.
    pub host: Option<SideTable>,
    /// On the device.
    pub device: Option<SideTable>,
    /// What predictions are multiplied by, for each operation: from real steps.
    pub factors: Factors,
}

/// Which layers of a model are alike: for each its kind, kinds numbered in the order of their first layer.
pub fn kinds(spec: &ModelSpec, weights: &Weights) -> Vec<usize> {
    let parts = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"];
    let mut known: Vec<(bool, Vec<Option<(crate::tensor::DType, Vec<usize>)>>)> = Vec::new();
    let mut of = |layer: usize| {
        let tensor =
            |p: &&str| weights.get(&format!("blk.{layer}.{p}.weight")).map(|t| (t.dtype, t.shape.clone()));
        let key = (spec.window_of(layer).is_some(), parts.iter().map(tensor).collect());
        known.iter().position(|k| *k == key).unwrap_or_else(|| {
            known.push(key);
            known.len() - 1
        })
    };
    (0..spec.n_layers).map(&mut of).collect()
}

/// Sequences, rows of each, and mean tokens that a row sees, such that all of it is what `scan` says.
fn shape_of(scan: &Scan) -> (f64, f64, f64) {
    let (rows, kv, pairs) = (scan.rows as f64, scan.kv_tokens as f64, scan.pairs as f64);
    let seen = pairs / rows;
    if pairs <= kv {
        return (rows, 1.0, seen);
    }
    // Of n alike sequences: kv = n·(past + rows/n), pairs/rows = past + (rows/n + 1)/2.
    let n = ((kv - rows / 2.0) / (seen - 0.5).max(0.5)).clamp(1.0, rows);
    (n, rows / n, seen)
}

impl LayerTable {
    /// Seconds of one pass over keys and values.
    pub fn attention(&self, scan: &Scan) -> f64 {
        if scan.rows == 0 || scan.pairs == 0 {
            return 0.0;
        }
        let (n, rows, seen) = shape_of(scan);
        if rows <= 1.0 || self.attend_prompt.is_empty() {
            return self.attend.at(n, seen);
        }
        // What a call costs is paid once, not for each sequence.
        let once = self.attend.at(1.0, 1.0);
        once + n * (self.attend_prompt.at(rows, seen) - once).max(0.0)
    }

    fn curves(&self) -> [&Curve; 5] {
        [&self.project, &self.append, &self.out_proj, &self.ffn_up, &self.ffn_down]
    }
}

impl Tables {
    /// Of one side, if it was measured.
    pub fn side(&self, side: Side) -> Option<&SideTable> {
        match side {
            Side::Host => self.host.as_ref(),
            Side::Device => self.device.as_ref(),
        }
    }

    /// Of a layer on a side, if it was measured.
    pub fn layer(&self, side: Side, layer: usize) -> Option<&LayerTable> {
        self.side(side)?.layers.get(*self.kinds.get(layer)?)
    }

    /// Refuses figures that cannot have been measured, and kinds of layers that no side has.
    ///
    /// # Errors
    /// [`Error::Format`] that names `file`.
    pub(super) fn check(&self, file: &str) -> Result<()> {
        for (name, side) in [("host", &self.host), ("device", &self.device)] {
            let Some(t) = side else { continue };
            let wrong = |what: &str| Err(Error::format(format!("{file}: tables.{name}"), what.to_owned()));
            let ends = [&t.embed, &t.head, &t.pick, &t.page_out, &t.page_in];
            let layers = t.layers.iter().all(|l| {
                l.curves().iter().all(|c| c.is_sound()) && l.attend.is_sound() && l.attend_prompt.is_sound()
            });
            if !layers || !ends.iter().all(|c| c.is_sound()) {
                return wrong("a time or a size that cannot have been measured");
            }
            if self.kinds.iter().any(|&k| k >= t.layers.len()) {
                return wrong("fewer kinds of layers than the model has");
            }
        }
        self.factors.check(file)
    }

    /// Costs of the model of `sizes` on `hardware`, the measured limits of the same machine.
    pub fn costs<'a>(&'a self, hardware: &'a Hardware, sizes: &'a Sizes) -> Measured<'a> {
        Measured { tables: self, roofline: Roofline::new(hardware, sizes), sizes }
    }
}

/// A machine with a model's tables: what costs are made of.
#[derive(Debug, Clone)]
pub struct Timings {
    /// Its measured limits.
    pub hardware: Hardware,
    /// Timings of the model's operations on it.
    pub tables: Tables,
}

impl Source for Timings {
    fn ask(&self, sizes: &Sizes, question: &mut dyn FnMut(&dyn Costs)) {
        question(&self.tables.costs(&self.hardware, sizes));
    }
}

/// Answers from tables; from the roofline where there is none.
#[derive(Debug, Clone)]
pub struct Measured<'a> {
    tables: &'a Tables,
    roofline: Roofline<'a>,
    sizes: &'a Sizes,
}

impl Measured<'_> {
    /// Seconds of a curve by rows, corrected.
    fn by_rows(&self, kind: &str, side: Side, curve: &Curve, rows: u64) -> f64 {
        curve.at(rows as f64) * self.tables.factors.of(kind, side, rows)
    }
}

impl Costs for Measured<'_> {
    fn embed(&self, side: Side, rows: u64) -> f64 {
        match self.tables.side(side) {
            Some(t) if rows > 0 => self.by_rows("embed", side, &t.embed, rows),
            _ => self.roofline.embed(side, rows),
        }
    }

    fn sublayer(&self, side: Side, layer: usize, sublayer: Sublayer, batch: &Batch<'_>) -> f64 {
        if batch.rows() == 0 {
            return 0.0;
        }
        match sublayer {
            // One pass does both; each is half of it.
            Sublayer::Scores | Sublayer::Values if self.tables.layer(side, layer).is_some() => {
                self.attention(side, layer, batch) / 2.0
            }
            Sublayer::Scores | Sublayer::Values => self.roofline.sublayer(side, layer, sublayer, batch),
            Sublayer::Qkv => {
                let (rows, element) = (batch.rows(), crate::plan::sizes::ELEMENT);
                let bytes = rows * 2 * self.sizes.spec.kv_dim() as u64 * element;
                self.product(side, layer, sublayer, rows) + self.append(side, layer, rows, bytes)
            }
            _ => self.product(side, layer, sublayer, batch.rows()),
        }
    }

    fn attention(&self, side: Side, layer: usize, batch: &Batch<'_>) -> f64 {
        match self.tables.layer(side, layer) {
            None => self.roofline.attention(side, layer, batch),
            Some(_) => self.attend(side, layer, &Scan::of(batch, self.sizes.blocks[layer].window)),
        }
    }

    fn product(&self, side: Side, layer: usize, sublayer: Sublayer, rows: u64) -> f64 {
        let Some(t) = self.tables.layer(side, layer).filter(|_| rows > 0) else {
            return self.roofline.product(side, layer, sublayer, rows);
        };
        let (kind, curve) = match sublayer {
            Sublayer::Qkv => ("project", &t.project),
            Sublayer::Out => ("out_proj", &t.out_proj),
            Sublayer::Up => ("ffn_up", &t.ffn_up),
            Sublayer::Down => ("ffn_down", &t.ffn_down),
            // Without weights: no product.
            Sublayer::Scores | Sublayer::Values => return 0.0,
        };
        self.by_rows(kind, side, curve, rows)
    }

    fn attend(&self, side: Side, layer: usize, scan: &Scan) -> f64 {
        match self.tables.layer(side, layer) {
            None => self.roofline.attend(side, layer, scan),
            Some(t) => t.attention(scan) * self.tables.factors.of("attend", side, scan.rows),
        }
    }

    fn head(&self, side: Side, rows: u64) -> f64 {
        match self.tables.side(side) {
            Some(t) if rows > 0 => self.by_rows("head", side, &t.head, rows),
            _ => self.roofline.head(side, rows),
        }
    }

    fn append(&self, side: Side, layer: usize, rows: u64, bytes: u64) -> f64 {
        match self.tables.layer(side, layer) {
            Some(t) if rows > 0 => self.by_rows("append", side, &t.append, rows),
            _ => self.roofline.append(side, layer, rows, bytes),
        }
    }

    fn pick(&self, side: Side, rows: u64, bytes: u64) -> f64 {
        match self.tables.side(side) {
            Some(t) if rows > 0 => self.by_rows("pick", side, &t.pick, rows),
            _ => self.roofline.pick(side, rows, bytes),
        }
    }

    fn pages(&self, direction: Direction, pages: u64, bytes: u64) -> f64 {
        let curve = self.tables.device.as_ref().map(|t| match direction {
            Direction::ToDevice => &t.page_in,
            Direction::ToHost => &t.page_out,
        });
        match curve.filter(|c| pages > 0 && !c.is_empty()) {
            Some(curve) => curve.at(pages as f64),
            None => self.roofline.pages(direction, pages, bytes),
        }
    }

    fn copy(&self, side: Side, bytes: u64) -> f64 {
        self.roofline.copy(side, bytes)
    }

    fn transfer(&self, direction: Direction, bytes: u64) -> f64 {
        self.roofline.transfer(direction, bytes)
    }

    /// Tables count it.
    fn issue(&self, side: Side) -> f64 {
        if self.tables.side(side).is_some() { 0.0 } else { self.roofline.issue(side) }
    }
}

#[cfg(test)]
mod tests;
