//! LIA's policy map: the best vector for prompts and decode rows at every batch and prompt length.

use std::fmt::Write;

use anyhow::Result;
use serde::Serialize;
use tandem::Error;
use tandem::plan::{Hardware, Roofline, Sizes, batch_policies, countable, streaming_threshold};

/// `B=1..2048,S=32..4096`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRanges {
    /// Batches, first and last.
    pub batch: (u64, u64),
    /// Prompt lengths.
    pub prompt: (u64, u64),
}

impl MapRanges {
    /// The ranges of LIA's paper, within a model's context.
    pub fn usual(max_context: u64) -> MapRanges {
        MapRanges { batch: (1, 2048), prompt: (32.min(max_context), 4096.min(max_context)) }
    }
}

/// Reads ranges.
pub fn ranges(text: &str) -> Result<MapRanges, String> {
    let bad = || "wanted ranges like B=1..2048,S=32..4096, from 1 to 1048576".to_owned();
    let (mut batch, mut prompt) = (None, None);
    for part in text.split(',') {
        let (key, range) = part.split_once('=').ok_or_else(bad)?;
        let (first, last) = range.split_once("..").ok_or_else(bad)?;
        let number =
            |n: &str| n.trim().parse::<u64>().ok().filter(|n| (1..=1 << 20).contains(n)).ok_or_else(bad);
        let range = (number(first)?, number(last)?);
        if range.0 > range.1 {
            return Err(format!("{part}: the first number is larger than the last"));
        }
        let slot = match key.trim() {
            "B" | "b" => &mut batch,
            "S" | "s" => &mut prompt,
            _ => return Err(bad()),
        };
        if slot.replace(range).is_some() {
            return Err(format!("{part}: {key} is given twice"));
        }
    }
    Ok(MapRanges { batch: batch.ok_or_else(bad)?, prompt: prompt.ok_or_else(bad)? })
}

/// From `first` to `last`, both included, four steps an octave.
fn points((first, last): (u64, u64)) -> Vec<u64> {
    let mut all: Vec<u64> = (0..)
        .map(|i| (first as f64 * (i as f64 / 4.0).exp2()).round() as u64)
        .take_while(|&n| n < last)
        .collect();
    all.push(last);
    all.dedup();
    all
}

/// The best vectors at one point.
#[derive(Debug, Clone, Serialize)]
pub struct Cell {
    /// Sequences.
    pub b: u64,
    /// Tokens of a prompt.
    pub s: u64,
    /// For prompts: 1 is the CPU.
    pub prefill: [u8; 6],
    /// For decode rows.
    pub decode: [u8; 6],
}

/// See the [module](self).
#[derive(Debug, Clone, Serialize)]
pub struct Map {
    /// The model.
    pub model: String,
    /// The machine.
    pub hardware: String,
    /// Whether transfers overlap with compute.
    pub overlap: bool,
    /// The B·S from which prompts run on the GPU, and the B from which decode's products do, in closed form (without
    /// overlap).
    pub threshold: Option<f64>,
    /// Batches, ascending.
    #[serde(rename = "B")]
    pub batches: Vec<u64>,
    /// Prompt lengths, ascending.
    #[serde(rename = "S")]
    pub prompts: Vec<u64>,
    /// Row by row: all prompt lengths of a batch, then the next batch.
    pub cells: Vec<Cell>,
}

/// Computes the map for blocks whose weights, keys and values are on the host.
pub fn compute(sizes: &Sizes, hardware: &Hardware, ranges: &MapRanges, overlap: bool) -> Result<Map> {
    let Some((gpu, link)) = hardware.accelerator else {
        return Err(
            Error::usage(format!("--policy-map: {} has no GPU to share blocks with", hardware.name)).into()
        );
    };
    countable(sizes, ranges.batch.1, ranges.prompt.1)?;
    let costs = Roofline::serial(hardware, sizes);
    let (batches, prompts) = (points(ranges.batch), points(ranges.prompt));
    let cell = |b: u64, s: u64| {
        let (prefill, decode) = batch_policies(&costs, sizes, b, s, overlap);
        Cell { b, s, prefill: prefill.0.policy.bits(), decode: decode.0.policy.bits() }
    };
    let e = &hardware.efficiency;
    let weights_bw = hardware.weights.as_ref().map(|on| on.read_bw);
    Ok(Map {
        model: sizes.spec.name.clone(),
        hardware: hardware.name.clone(),
        overlap,
        threshold: streaming_threshold(
            (link.h2d_bw * e.link).min(weights_bw.map_or(f64::INFINITY, |bw| bw * e.cpu_memory)),
            gpu.bw * e.gpu_memory,
            weights_bw.unwrap_or(hardware.cpu.read_bw) * e.cpu_memory,
            hardware.cpu.flops_bf16 * e.cpu_compute,
            gpu.flops_bf16 * e.gpu_compute,
        ),
        cells: batches
            .iter()
            .flat_map(|&b| prompts.iter().map(move |&s| (b, s)))
            .map(|(b, s)| cell(b, s))
            .collect(),
        batches,
        prompts,
    })
}

/// `(1,1,1,1,1,1)`.
pub fn vector(bits: [u8; 6]) -> String {
    format!("({})", bits.map(|b| b.to_string()).join(","))
}

impl Map {
    /// The vectors that occur, most frequent first.
    pub fn vectors(&self, of: impl Fn(&Cell) -> [u8; 6]) -> Vec<[u8; 6]> {
        let mut counts: Vec<([u8; 6], usize)> = Vec::new();
        for cell in &self.cells {
            let bits = of(cell);
            match counts.iter_mut().find(|c| c.0 == bits) {
                Some(c) => c.1 += 1,
                None => counts.push((bits, 1)),
            }
        }
        counts.sort_by_key(|c| std::cmp::Reverse(c.1));
        counts.into_iter().map(|c| c.0).collect()
    }

    /// Two grids of letters, with a legend.
    pub fn text(&self) -> String {
        let mut out = format!("{} on {}, 1 is the CPU\n", self.model, self.hardware);
        type Of = fn(&Cell) -> [u8; 6];
        let phases: [(&str, Of); 2] = [("prefill", |c| c.prefill), ("decode", |c| c.decode)];
        for (name, of) in phases {
            let vectors = self.vectors(of);
            let letter = |bits: [u8; 6]| {
                vectors.iter().position(|v| *v == bits).map_or('?', |i| (b'a' + i as u8) as char)
            };
            let _ = writeln!(
                out,
                "\n{name:>8}  S = {} .. {}",
                self.prompts[0],
                self.prompts[self.prompts.len() - 1]
            );
            for (row, b) in self.cells.chunks(self.prompts.len()).zip(&self.batches) {
                let letters: String = row.iter().map(|c| letter(of(c))).collect();
                let _ = writeln!(out, "B {b:>6}  {letters}");
            }
            for &v in &vectors {
                let _ = writeln!(out, "       {}  {}", letter(v), vector(v));
            }
        }
        if let Some(n) = self.threshold {
            let _ =
                writeln!(out, "\nstreaming weights pays from {n:.0} rows on, in closed form without overlap");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read() {
        let want = MapRanges { batch: (1, 2048), prompt: (32, 4096) };
        assert_eq!(ranges("B=1..2048,S=32..4096"), Ok(want));
        assert_eq!(ranges("S=32..4096,B=1..2048"), Ok(want));
        for bad in [
            "",
            "B=1..2",
            "B=1..2,S=",
            "B=0..2,S=1..2",
            "B=9..2,S=1..2",
            "B=1..2,B=1..2",
            "B=1..2,S=1..9999999",
            "B=1..2,S=1..2,X=1..2",
            "B=a..2,S=1..2",
            "B=-1..2,S=1..2",
        ] {
            assert!(ranges(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn points_have_both_ends_and_no_double() {
        assert_eq!(
            points((1, 8)),
            [1, 2, 3, 4, 5, 6, 7, 8]
                .iter()
                .copied()
                .filter(|n| points((1, 8)).contains(n))
                .collect::<Vec<_>>()
        );
        assert_eq!((points((5, 5)), points((32, 4096)).len()), (vec![5], 29));
        assert_eq!(points((3, 100)).last(), Some(&100));
    }
}
