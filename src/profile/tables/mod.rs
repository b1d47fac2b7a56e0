//! Timing tables of the real kernels on a model's own matrices, and the costs that they answer.
//!
//! ```text
//! product      seconds by rows, for each kind of layer                         project, out_proj, ffn_up, ffn_down
//! attention    of single rows: by (rows, tokens that a row sees)               decode
//!              of a sequence's rows: by (rows, mean tokens that a row sees)    prompts; sequences add up
//! ends         seconds by rows                                                 embed (with a step's lists), head, pick
//! factors      by (rows, tokens whose keys and values the step reads)          what all of them are multiplied by
//! ```
//! Products take longer in steps that read more keys and values: where the CPU's last-level cache holds a part of the weights
//! from one step to the next, those leave less room for them. The tables are of short contexts; the factors, which come from real
//! steps at several contexts, know the rest. Layers are alike if their matrices have the same types and both have a window or none; each kind is measured. Where a table
//! is missing (a side that was not measured) the [`Roofline`] over the measured limits answers.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::calibrate::{FactorIndex, Factors};
pub use super::curve::{Curve, Surface};
use crate::model::{Block, MatrixSpec, ModelSpec, Weights};
use crate::plan::{Batch, CostSource, Costs, Direction, Hardware, Roofline, Scan, Sizes};
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
    /// Seconds by rows, each of a sequence of its own, and tokens that each sees.
    pub attend: Surface,
    /// Seconds by rows of one sequence, and the mean of the tokens that each sees.
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
    /// By rows: what real steps take around and between their operations; empty if none were run.
    pub once: Curve,
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
    let mut known: Vec<(bool, Vec<Option<(crate::tensor::DType, Vec<usize>)>>)> = Vec::new();
    let mut of = |layer: usize| {
        let tensor =
            |m: &MatrixSpec| weights.get(&m.tensor(layer, "weight")).map(|t| (t.dtype, t.shape.clone()));
        let parts = Block::of(spec, layer).matrices().into_iter().map(tensor).collect();
        let key = (spec.window_of(layer).is_some(), parts);
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
    /// The table of one side, if it was measured.
    pub fn side(&self, side: Side) -> Option<&SideTable> {
        match side {
            Side::Host => self.host.as_ref(),
            Side::Device => self.device.as_ref(),
        }
    }

    /// The same, to be changed.
    pub(super) fn side_mut(&mut self, side: Side) -> Option<&mut SideTable> {
        match side {
            Side::Host => self.host.as_mut(),
            Side::Device => self.device.as_mut(),
        }
    }

    /// The table of a layer on a side, if it was measured.
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
            let ends = [&t.embed, &t.head, &t.pick, &t.once, &t.page_out, &t.page_in];
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
        Measured {
            tables: self,
            factors: Cow::Owned(self.factors.index()),
            roofline: Roofline::new(hardware, sizes),
            sizes,
        }
    }
}

/// A machine with a model's tables: what costs are made of.
#[derive(Debug, Clone)]
pub struct Timings {
    /// Its measured limits.
    pub hardware: Hardware,
    /// Timings of the model's operations on it.
    pub tables: Tables,
    /// Those of the tables: a scheduler asks a hundred times a step.
    factors: FactorIndex,
}

impl Timings {
    /// Timings of a machine, from what was measured there.
    pub fn new(hardware: Hardware, tables: Tables) -> Timings {
        let factors = tables.factors.index();
        Timings { hardware, tables, factors }
    }
}

impl CostSource for Timings {
    fn ask(&self, sizes: &Sizes, question: &mut dyn FnMut(&dyn Costs)) {
        question(&Measured {
            tables: &self.tables,
            factors: Cow::Borrowed(&self.factors),
            roofline: Roofline::new(&self.hardware, sizes),
            sizes,
        });
    }
}

/// Tokens of a sequence, where the number that is stored is not given.
const CONTEXT: u64 = 512;

/// Answers from tables; from the roofline where there is none.
#[derive(Debug, Clone)]
pub struct Measured<'a> {
    tables: &'a Tables,
    factors: Cow<'a, FactorIndex>,
    roofline: Roofline<'a>,
    sizes: &'a Sizes,
}

impl Measured<'_> {
    /// Seconds of a curve by rows, corrected.
    fn by_rows(&self, kind: &str, side: Side, curve: &Curve, rows: u64) -> f64 {
        self.beside(kind, side, curve, rows, rows * CONTEXT)
    }

    /// The same in a step that reads the keys and values of `stored` tokens.
    fn beside(&self, kind: &str, side: Side, curve: &Curve, rows: u64, stored: u64) -> f64 {
        curve.at(rows as f64) * self.factors.of(kind, side, rows, stored)
    }

    /// Tokens whose keys and values a step of this batch alone reads, in the mean over the layers.
    fn stored(&self, batch: &Batch<'_>) -> u64 {
        self.sizes.mean_by_window(|window| batch.tokens_read(window))
    }

    /// Bytes of a token's keys and values in a layer as they were measured: in 16 bits.
    fn measured_kv_token(&self) -> u64 {
        2 * self.sizes.spec.kv_dim() as u64 * crate::plan::ELEMENT
    }

    /// Attention's time over keys and values as they are stored, as a multiple of the measured one: by the roofline, so that what
    /// reads them takes as much less as they are smaller, and what multiplies does not.
    fn stored_otherwise(&self, side: Side, scan: &Scan) -> f64 {
        let (stored, measured) = (self.sizes.kv_token(), self.measured_kv_token());
        if stored == measured || scan.rows == 0 {
            return 1.0;
        }
        let seconds = |kv_token| self.roofline.attend_stored(side, scan, kv_token);
        seconds(stored) / seconds(measured)
    }
}

impl Costs for Measured<'_> {
    fn embed(&self, side: Side, rows: u64) -> f64 {
        match self.tables.side(side) {
            Some(t) if rows > 0 => self.by_rows("embed", side, &t.embed, rows) + t.once.at(rows as f64),
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
            _ => {
                let rows = batch.rows();
                let product = self.product_beside(side, layer, sublayer, rows, self.stored(batch));
                if sublayer != Sublayer::Qkv {
                    return product;
                }
                let bytes = rows * self.sizes.kv_token();
                product + self.append(side, layer, rows, bytes)
            }
        }
    }

    fn attention(&self, side: Side, layer: usize, batch: &Batch<'_>) -> f64 {
        match self.tables.layer(side, layer) {
            None => self.roofline.attention(side, layer, batch),
            Some(_) => {
                let scan = Scan::of(batch, self.sizes.blocks[layer].window);
                self.attend_beside(side, layer, &scan, self.stored(batch))
            }
        }
    }

    fn product(&self, side: Side, layer: usize, sublayer: Sublayer, rows: u64) -> f64 {
        self.product_beside(side, layer, sublayer, rows, rows * CONTEXT)
    }

    fn product_beside(&self, side: Side, layer: usize, sublayer: Sublayer, rows: u64, stored: u64) -> f64 {
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
        let bytes = self.sizes.read(layer, sublayer, rows).on(side);
        // Tables are of weights in the CPU's own memory.
        self.beside(kind, side, curve, rows, stored).max(self.roofline.weights_read(side, bytes))
    }

    fn attend(&self, side: Side, layer: usize, scan: &Scan) -> f64 {
        self.attend_beside(side, layer, scan, scan.kv_tokens)
    }

    fn attend_beside(&self, side: Side, layer: usize, scan: &Scan, stored: u64) -> f64 {
        match self.tables.layer(side, layer) {
            None => self.roofline.attend(side, layer, scan),
            Some(t) => {
                let measured = t.attention(scan) * self.factors.of("attend", side, scan.rows, stored);
                measured * self.stored_otherwise(side, scan)
            }
        }
    }

    fn head(&self, side: Side, rows: u64) -> f64 {
        self.head_beside(side, rows, rows * CONTEXT)
    }

    fn head_beside(&self, side: Side, rows: u64, stored: u64) -> f64 {
        match self.tables.side(side) {
            Some(t) if rows > 0 => {
                let read = self.roofline.weights_read(side, self.sizes.head.on(side));
                self.beside("head", side, &t.head, rows, stored).max(read)
            }
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

    fn top(&self, rows: u64, bytes: u64) -> f64 {
        self.roofline.top(rows, bytes)
    }

    fn pages(&self, direction: Direction, pages: u64, bytes: u64) -> f64 {
        let curve = self.tables.device.as_ref().map(|t| match direction {
            Direction::ToDevice => &t.page_in,
            Direction::ToHost => &t.page_out,
        });
        match curve.filter(|c| pages > 0 && !c.is_empty()) {
            Some(curve) => {
                curve.at(pages as f64) * self.sizes.kv_token() as f64 / self.measured_kv_token() as f64
            }
            None => self.roofline.pages(direction, pages, bytes),
        }
    }

    fn copy(&self, side: Side, bytes: u64) -> f64 {
        self.roofline.copy(side, bytes)
    }

    fn launches(&self, kernels: u32) -> f64 {
        self.roofline.launches(kernels)
    }

    fn hand_over(&self) -> f64 {
        self.roofline.hand_over()
    }

    fn beside_copies(&self) -> f64 {
        self.roofline.beside_copies()
    }

    fn transfer(&self, direction: Direction, bytes: u64) -> f64 {
        self.roofline.transfer(direction, bytes)
    }

    fn stream(&self, bytes: u64) -> f64 {
        self.roofline.stream(bytes)
    }

    fn stream_pageable(&self, bytes: u64) -> f64 {
        self.roofline.stream_pageable(bytes)
    }

    /// Tables count it.
    fn issue(&self, side: Side) -> f64 {
        if self.tables.side(side).is_some() { 0.0 } else { self.roofline.issue(side) }
    }
}

#[cfg(test)]
mod tests;
