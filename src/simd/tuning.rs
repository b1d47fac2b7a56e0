//! The tuning table: thresholds, prefetch distances and chunk sizes that differ between CPUs.
//!
//! | entry | what it decides | may change results |
//! |---|---|---|
//! | `chunk_bytes` | weight bytes per chunk when few tokens make the work memory-bound | no |
//! | `ahead_from`, `ahead_bytes` | from how many tokens on packed weights are requested ahead, and how far | no |
//! | `groups_of_1`, `_2`, `_4`, `_8` | groups of 16 rows that a VNNI tile of 1, 2 to 3, 4, 5 to 8 tokens holds | no |
//! | `int8_tiles_from` | tokens from which the AMX tier multiplies packed weights by int8 tiles rather than VNNI | no |
//! | `tiles_from` | tokens from which the AMX tier multiplies packed weights by bf16 tiles | yes: ignored in deterministic mode |
//! | `fine_tiles_from` | the same of fine activations, which int8 products multiply twice | yes: ignored in deterministic mode |
//! | `half_up_to` | tokens up to which bf16 tiles of packed weights are made with f16 arithmetic, where the CPU has it | yes: no such tiles in deterministic mode |
//! | `tiles_at_load` | whether the AMX tier packs f16 and bf16 weights into tiles when it loads a model | yes, for one and two tokens; nothing in deterministic mode |
//! | `attention_vector_rows` | rows of a KV head up to which the AMX tier attends without tiles | yes: ignored in deterministic mode |
//!
//! Defaults depend on vendor and family ([`Tuning::default_for`]); `tandem tune` measures the entries on this machine
//! ([`crate::profile::measure_tuning`]). Whether bf16 dot products beat f32 arithmetic ([`super::Caps::bf16_dot_pays`])
//! changes results in every mode, so it depends on the vendor alone and is not measured.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use super::{CpuId, Vendor};
use crate::tensor::DType;

/// Entries for weights of one dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearTuning {
    /// Weight bytes per chunk when few tokens make the work memory-bound: some microseconds of reading, so that the
    /// cost of claiming chunks and of a straggler at the end is negligible.
    pub chunk_bytes: usize,
    /// Fewest tokens, 1 to 3, of a tile that requests weights ahead of reading them: packed ones, and dot products of
    /// float rows those of the next tile (3: never, and tiles of 4 rows instead of 8).
    pub ahead_from: usize,
    /// How far ahead of reading packed weights they are requested, in bytes.
    pub ahead_bytes: usize,
    /// Groups of 16 rows in a VNNI tile of one token: 1 or 4, which read four streams of memory at once.
    pub groups_of_1: usize,
    /// Groups in a VNNI tile of 2 or 3 tokens: 1 or 4.
    pub groups_of_2: usize,
    /// Groups of 16 rows in a VNNI tile of 4 tokens: 1, 2 or 4.
    pub groups_of_4: usize,
    /// Groups in a VNNI tile of 5 to 8 tokens: 1 or 2.
    pub groups_of_8: usize,
    /// Tokens from which the AMX tier multiplies packed weights by int8 tiles rather than by VNNI, unless `tiles_from`
    /// applies.
    pub int8_tiles_from: usize,
    /// Tokens from which the AMX tier multiplies packed weights by dequantised bf16 tiles rather than by int8 products.
    pub tiles_from: usize,
    /// The same of fine activations ([`super::linear::Linear::with_fine_activations`]): they make int8 products, on tiles or not,
    /// multiply twice, where weights that are dequantised once serve both planes.
    pub fine_tiles_from: usize,
    /// Tokens up to which bf16 tiles of packed weights are made with f16 arithmetic (AVX512-FP16), where the CPU has it: fewer
    /// operations, 2^-11 of each weight. With more tokens, products hide the cost of making tiles.
    pub half_up_to: usize,
    /// Whether the AMX tier packs 16-bit floats into tiles when it loads a model.
    pub tiles_at_load: bool,
}

/// The table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuning {
    /// Settings by the name of the dtype.
    linear: BTreeMap<String, LinearTuning>,
    /// Query rows of a KV head up to which the AMX tier attends by vector kernels in fast mode: 0 to 32.
    pub attention_vector_rows: usize,
}

/// The table in use, and whether it was measured.
struct Installed {
    tuning: Tuning,
    measured: bool,
}

static CURRENT: OnceLock<Installed> = OnceLock::new();

impl Tuning {
    /// The table in use: the installed one; if none is installed yet, the defaults of this CPU from now on.
    pub fn current() -> &'static Tuning {
        &Tuning::installed().tuning
    }

    /// Whether the table in use was measured, not a default.
    pub fn is_measured() -> bool {
        Tuning::installed().measured
    }

    fn installed() -> &'static Installed {
        CURRENT.get_or_init(|| Installed { tuning: Tuning::default_for(CpuId::get()), measured: false })
    }

    /// Makes a measured table the one in use, if no table is in use yet. Returns whether it was.
    pub fn install(tuning: Tuning) -> bool {
        CURRENT.set(Installed { tuning, measured: true }).is_ok()
    }

    /// Default table for a CPU.
    ///
    /// Measured: Zen 4 (one or two tokens do not gain by prefetching: 7 to 25% slower, 10 to 40% faster from three on; several groups
    /// cost up to 60% of one token's time, 10 to 40% of four's, 3 to 20% of eight's: one stream of memory is read fastest), Zen 5 (the
    /// same, but one token of quantised weights gains by prefetching, up to a quarter of the time, and rows of floats lose half by it; they gain by
    /// long chunks), Zen 3 (AVX2: one token gains a quarter by prefetching 1 or 2 KiB ahead, less by 4), Sapphire
    /// Rapids (prefetching gains for any number of tokens, 12 to 24% of the time; chunks of 96 KiB 8%; AMX thresholds, once more with rows
    /// that begin on cache lines) and
    /// Emerald Rapids (VNNI tiles of several groups: 22 to 40% of the time of one token, 22 to 30% of four, 10 to 20% of eight).
    /// Other CPUs of a vendor use the same entries; docs/performance.md has the figures.
    pub fn default_for(cpu: &CpuId) -> Tuning {
        let intel = cpu.vendor == Vendor::Intel;
        let zen5 = cpu.vendor == Vendor::Amd && cpu.family == 0x1a;
        let zen3 = cpu.is_zen3();
        let entry = |dtype: DType| {
            let five_bits = matches!(dtype, DType::Q5_0 | DType::Q5_1 | DType::Q5_K | DType::Q6_K);
            let floats = !dtype.is_quantised();
            LinearTuning {
                chunk_bytes: match floats {
                    true if zen5 => 192 << 10,
                    true if intel => 96 << 10,
                    _ => 24 << 10,
                },
                ahead_from: match (floats, five_bits) {
                    // f16 and f32 are bound by arithmetic from two tokens on.
                    (true, _) if zen5 => {
                        if dtype == DType::BF16 {
                            3
                        } else {
                            2
                        }
                    }
                    (true, _) => 1,
                    (false, _) if intel || zen3 || zen5 => 1,
                    (false, true) => 2,
                    (false, false) => 3,
                },
                ahead_bytes: if zen3 { 2048 } else { 4096 },
                groups_of_1: if intel { 4 } else { 1 },
                groups_of_2: if intel { 4 } else { 1 },
                groups_of_4: if intel { 4 } else { 1 },
                groups_of_8: if intel { 2 } else { 1 },
                int8_tiles_from: match dtype {
                    // Two products per block, and offsets.
                    DType::Q2_K => 1024,
                    DType::Q6_K | DType::Q8_0 => 12,
                    _ => 10,
                },
                // As steps of a whole model have it: products alone, which `tandem tune` measures, would have some types stay with
                // int8 tiles up to 32 tokens.
                tiles_from: match dtype {
                    DType::Q5_0 => 28,
                    DType::Q2_K => 16,
                    _ => 17,
                },
                fine_tiles_from: if dtype == DType::Q8_0 { 12 } else { 8 },
                half_up_to: 64,
                // Decode of one sequence 1.15 to 1.2 x, sixteen 1.1 x in bf16 and 4.2 x in f16, for half a second of loading more
                // for 2.5 GB.
                tiles_at_load: matches!(dtype, DType::F16 | DType::BF16),
            }
        };
        Tuning {
            linear: DType::ALL.into_iter().map(|d| (d.name().to_owned(), entry(d))).collect(),
            attention_vector_rows: 8,
        }
    }

    /// Entries for weights of `dtype`.
    pub fn linear(&self, dtype: DType) -> LinearTuning {
        self.linear[dtype.name()]
    }

    /// Mutable entries for weights of `dtype`.
    pub fn linear_mut(&mut self, dtype: DType) -> &mut LinearTuning {
        self.linear.get_mut(dtype.name()).expect("a table has every dtype")
    }

    /// Checks that kernels can use the table: it has each dtype once, and each entry is within its range.
    ///
    /// # Errors
    /// The first entry that is missing or out of range, as a sentence.
    pub fn check(&self) -> Result<(), String> {
        if let Some(name) = self.linear.keys().find(|name| DType::from_name(name).is_none()) {
            return Err(format!("{name}: no such dtype"));
        }
        for dtype in DType::ALL {
            let e = self.linear.get(dtype.name()).ok_or_else(|| format!("{dtype}: no entries"))?;
            let ranges = [
                ("chunk_bytes", e.chunk_bytes, 4 << 10, 4 << 20),
                ("ahead_from", e.ahead_from, 1, 3),
                ("ahead_bytes", e.ahead_bytes, 64, 64 << 10),
                ("groups_of_1", e.groups_of_1, 1, 4),
                ("groups_of_2", e.groups_of_2, 1, 4),
                ("groups_of_4", e.groups_of_4, 1, 4),
                ("groups_of_8", e.groups_of_8, 1, 2),
                ("int8_tiles_from", e.int8_tiles_from, 1, 1024),
                ("tiles_from", e.tiles_from, 1, 1024),
                ("fine_tiles_from", e.fine_tiles_from, 1, 1024),
                ("half_up_to", e.half_up_to, 0, 4096),
            ];
            for (name, value, least, most) in ranges {
                if !(least..=most).contains(&value) {
                    return Err(format!("{dtype}: {name} is {value}, wanted {least} to {most}"));
                }
            }
        }
        match self.attention_vector_rows {
            0..=32 => Ok(()),
            rows => Err(format!("attention_vector_rows is {rows}, wanted 0 to 32")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(vendor: Vendor, family: u32, model: u32) -> CpuId {
        CpuId { vendor, family, model }
    }

    /// The results measured on each available machine.
    #[test]
    fn defaults_are_those_measured() {
        let zen4 = Tuning::default_for(&cpu(Vendor::Amd, 0x19, 0x11));
        assert_eq!((zen4.linear(DType::Q4_0).ahead_from, zen4.linear(DType::Q5_K).ahead_from), (3, 2));
        let groups = |d| {
            let e = zen4.linear(d);
            (e.groups_of_1, e.groups_of_2, e.groups_of_4, e.groups_of_8)
        };
        assert_eq!((groups(DType::Q4_0), zen4.linear(DType::BF16).chunk_bytes), ((1, 1, 1, 1), 24 << 10));
        let zen5 = Tuning::default_for(&cpu(Vendor::Amd, 0x1a, 2));
        assert_eq!((zen5.linear(DType::Q4_K).ahead_from, zen5.linear(DType::Q4_K).groups_of_1), (1, 1));
        let floats = |t: &Tuning| (t.linear(DType::BF16).ahead_from, t.linear(DType::BF16).chunk_bytes);
        assert_eq!((floats(&zen5), floats(&zen4)), ((3, 192 << 10), (1, 24 << 10)));
        let rapids = Tuning::default_for(&cpu(Vendor::Intel, 6, 143));
        assert_eq!(
            (rapids.linear(DType::Q4_0).ahead_from, rapids.linear(DType::BF16).chunk_bytes),
            (1, 96 << 10)
        );
        assert_eq!((zen5.linear(DType::F16).ahead_from, rapids.linear(DType::F16).ahead_from), (2, 1));
        let from = |d| rapids.linear(d).tiles_from;
        assert_eq!(
            (from(DType::Q8_0), from(DType::Q4_0), from(DType::Q4_K), from(DType::Q5_0)),
            (17, 17, 17, 28)
        );
        let from = |d| rapids.linear(d).int8_tiles_from;
        assert_eq!((from(DType::Q4_K), from(DType::Q6_K), from(DType::Q2_K)), (10, 12, 1024));
        for t in [zen4, zen5, rapids, Tuning::default_for(&cpu(Vendor::Other, 0, 0))] {
            t.check().unwrap();
        }
    }

    #[test]
    fn a_table_out_of_range_is_refused_by_name() {
        let good = || Tuning::default_for(CpuId::get());
        let refused = |change: &dyn Fn(&mut Tuning), want: &str| {
            let mut t = good();
            change(&mut t);
            let why = t.check().unwrap_err();
            assert!(why.contains(want), "{why}");
        };
        refused(&|t| t.linear_mut(DType::Q4_0).ahead_from = 0, "q4_0: ahead_from is 0");
        refused(&|t| t.linear_mut(DType::Q8_0).groups_of_8 = 4, "q8_0: groups_of_8 is 4, wanted 1 to 2");
        refused(&|t| t.linear_mut(DType::BF16).chunk_bytes = 1, "bf16: chunk_bytes is 1");
        refused(&|t| t.attention_vector_rows = 33, "attention_vector_rows is 33");
        refused(&|t| _ = t.linear.remove("q6_k"), "q6_k: no entries");
        refused(&|t| _ = t.linear.insert("q9_0".into(), good().linear(DType::Q4_0)), "q9_0: no such dtype");
    }
}
