//! The tuning table in use.

use serde::Serialize;
use tandem::simd::CpuId;
use tandem::simd::tuning::{LinearTuning, Tuning};
use tandem::tensor::DType;

/// The table, and where it comes from.
#[derive(Debug, Serialize)]
pub struct Table {
    /// Whether `tandem tune` measured it; otherwise these are the defaults for `cpu`.
    pub measured: bool,
    /// `Sapphire Rapids, family 6 model 143`.
    pub cpu: String,
    pub entries: &'static Tuning,
}

pub fn table() -> Table {
    Table { measured: Tuning::is_measured(), cpu: CpuId::get().to_string(), entries: Tuning::current() }
}

impl Table {
    /// Rows of the report: dtypes with the same entries share a line.
    pub fn describe(&self) -> Vec<(&'static str, String)> {
        let source = match self.measured {
            true => "measured on this machine (tandem tune)".to_owned(),
            false => format!("defaults for {} (tandem tune measures them here)", self.cpu),
        };
        let rows = self.entries.attention_vector_rows;
        let mut lines = vec![
            ("tuning", source),
            ("tuning", format!("attention without tiles up to {rows} rows of a KV head")),
        ];
        let mut groups: Vec<(LinearTuning, Vec<&str>)> = Vec::new();
        for dtype in DType::ALL {
            let entries = self.entries.linear(dtype);
            match groups.iter_mut().find(|(e, _)| *e == entries) {
                Some((_, names)) => names.push(dtype.name()),
                None => groups.push((entries, vec![dtype.name()])),
            }
        }
        lines.extend(groups.into_iter().map(|(e, names)| {
            let what = format!(
                "chunks of {} KiB, ahead {} B from {} tokens, groups {} of 1 token, {} of 2, {} of 4, {} of 8, int8 tiles from {}, bf16 tiles from {}, of fine activations from {}, by f16 up to {}{}",
                e.chunk_bytes >> 10,
                e.ahead_bytes,
                e.ahead_from,
                e.groups_of_1,
                e.groups_of_2,
                e.groups_of_4,
                e.groups_of_8,
                e.int8_tiles_from,
                e.tiles_from,
                e.fine_tiles_from,
                e.half_up_to,
                if e.tiles_at_load { ", packed into tiles at load" } else { "" }
            );
            ("tuning", format!("{}: {what}", names.join(" ")))
        }));
        lines
    }
}
