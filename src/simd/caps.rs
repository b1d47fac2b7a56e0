//! The features of this CPU, and the tier of kernels that runs.

use std::fmt;
use std::sync::OnceLock;

use crate::{Error, Result};

/// A tier of kernels. Each tier inherits the one below and replaces some of its kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Safe scalar Rust: the oracle, and the last resort.
    Reference,
    /// AVX2 + FMA + F16C; VNNI where the CPU has it.
    Avx2,
    /// AVX-512 F/BW/DQ/VL + VNNI; BF16 where the CPU has it.
    Avx512,
    /// AVX-512 plus AMX tiles (bf16, int8).
    Amx,
}

impl Isa {
    /// All tiers, lowest first.
    pub const ALL: [Isa; 4] = [Isa::Reference, Isa::Avx2, Isa::Avx512, Isa::Amx];

    /// `reference`, `avx2`, `avx512`, `amx`: the values of `TANDEM_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Reference => "reference",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }

    /// Why this CPU cannot run the tier; `None` if it can.
    pub fn missing(self) -> Option<&'static str> {
        let c = Caps::get();
        match self {
            Isa::Reference => None,
            Isa::Avx2 if !c.avx2 => Some("this CPU reports no avx2, fma and f16c"),
            Isa::Avx512 | Isa::Amx if !c.avx512 => Some("this CPU reports no avx512 f/bw/dq/vl"),
            Isa::Avx512 | Isa::Amx if !c.avx512_vnni => Some("this CPU reports no avx512_vnni"),
            Isa::Amx if !c.avx512_bf16 => Some("this CPU reports no avx512_bf16"),
            Isa::Amx => c.amx.err(),
            _ => None,
        }
    }

    /// The tiers that this machine can run, lowest first.
    pub fn supported() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|i| i.missing().is_none()).collect()
    }

    /// The highest supported tier.
    pub fn best() -> Isa {
        *Isa::supported().last().expect("the reference tier always runs")
    }

    /// The tier forced by `TANDEM_ISA`, or the best one.
    ///
    /// # Errors
    /// If `TANDEM_ISA` names no tier, or one that this CPU cannot run.
    pub fn selected() -> Result<Isa> {
        match std::env::var("TANDEM_ISA") {
            Err(_) => Ok(Isa::best()),
            Ok(name) if name.is_empty() || name == "auto" => Ok(Isa::best()),
            Ok(name) => {
                let isa = Isa::ALL.into_iter().find(|i| i.name() == name).ok_or_else(|| {
                    Error::usage(format!(
                        "TANDEM_ISA={name}: no such tier; choose one of reference, avx2, avx512, amx"
                    ))
                })?;
                match isa.missing() {
                    None => Ok(isa),
                    Some(why) => Err(Error::usage(format!("TANDEM_ISA={name}: {why}"))),
                }
            }
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// CPU features, read once.
#[derive(Debug, Clone, Copy)]
pub struct Caps {
    /// AVX2, FMA and F16C.
    pub avx2: bool,
    /// AVX-VNNI (vpdpbusd of 256 bits without AVX-512).
    pub avx_vnni: bool,
    /// AVX-512 F, BW, DQ and VL.
    pub avx512: bool,
    /// AVX-512 VNNI (vpdpbusd).
    pub avx512_vnni: bool,
    /// AVX-512 BF16 (vdpbf16ps).
    pub avx512_bf16: bool,
    /// AVX-512 VBMI (byte permutes).
    pub avx512_vbmi: bool,
    /// AMX tiles with bf16 and int8, permitted by the kernel; otherwise why not.
    pub amx: Result<(), &'static str>,
}

impl Caps {
    /// This machine's.
    pub fn get() -> &'static Caps {
        static CAPS: OnceLock<Caps> = OnceLock::new();
        CAPS.get_or_init(Caps::detect)
    }

    /// Whether bf16 dot products (vdpbf16ps) beat f32 arithmetic on widened values where arithmetic is the bound.
    /// Sapphire Rapids issues one vdpbf16ps every two cycles and two f32 FMAs per cycle (measured: 70-97 against
    /// 140-222 GFLOP/s per thread); Zen 4 issues one of either.
    #[cfg(target_arch = "x86_64")]
    pub fn bf16_dot_pays(&self) -> bool {
        self.avx512_bf16 && CpuId::get().vendor != Vendor::Intel
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Caps {
        use std::is_x86_feature_detected as has;
        Caps {
            avx2: has!("avx2") && has!("fma") && has!("f16c"),
            avx_vnni: has!("avxvnni"),
            avx512: has!("avx2")
                && has!("fma")
                && has!("f16c")
                && has!("avx512f")
                && has!("avx512bw")
                && has!("avx512dq")
                && has!("avx512vl"),
            avx512_vnni: has!("avx512vnni"),
            avx512_bf16: has!("avx512bf16"),
            avx512_vbmi: has!("avx512vbmi"),
            amx: crate::amx::available(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Caps {
        Caps {
            avx2: false,
            avx_vnni: false,
            avx512: false,
            avx512_vnni: false,
            avx512_bf16: false,
            avx512_vbmi: false,
            amx: Err("not an x86-64 CPU"),
        }
    }
}

/// The maker of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// GenuineIntel.
    Intel,
    /// AuthenticAMD.
    Amd,
    /// Another maker, or not an x86-64 CPU.
    Other,
}

/// The identity of a CPU, as CPUID reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuId {
    /// Its maker.
    pub vendor: Vendor,
    /// Extended family added to the family.
    pub family: u32,
    /// Extended model before the model.
    pub model: u32,
}

impl CpuId {
    /// This machine's.
    pub fn get() -> &'static CpuId {
        static ID: OnceLock<CpuId> = OnceLock::new();
        ID.get_or_init(CpuId::detect)
    }

    /// Whether it is a Zen 3: family 19h has Zen 4, too.
    pub fn is_zen3(&self) -> bool {
        let zen4 = matches!(self.model, 0x10..=0x1f | 0x60..=0x7f | 0xa0..=0xaf);
        self.vendor == Vendor::Amd && self.family == 0x19 && !zen4
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> CpuId {
        use std::arch::x86_64::__cpuid;
        let id = __cpuid(0);
        let name = [id.ebx.to_le_bytes(), id.edx.to_le_bytes(), id.ecx.to_le_bytes()].concat();
        let vendor = match name.as_slice() {
            b"GenuineIntel" => Vendor::Intel,
            b"AuthenticAMD" => Vendor::Amd,
            _ => Vendor::Other,
        };
        CpuId::of_signature(vendor, __cpuid(1).eax)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> CpuId {
        CpuId { vendor: Vendor::Other, family: 0, model: 0 }
    }

    /// Decodes the EAX of CPUID leaf 1.
    #[cfg(any(target_arch = "x86_64", test))]
    fn of_signature(vendor: Vendor, eax: u32) -> CpuId {
        let (family, model) = (eax >> 8 & 15, eax >> 4 & 15);
        let extended = if family == 15 { eax >> 20 & 255 } else { 0 };
        let high = if family == 6 || family == 15 { eax >> 16 & 15 } else { 0 };
        CpuId { vendor, family: family + extended, model: high << 4 | model }
    }
}

impl fmt::Display for CpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match (self.vendor, self.family, self.model) {
            (Vendor::Intel, 6, 143) => "Sapphire Rapids",
            (Vendor::Intel, 6, 207) => "Emerald Rapids",
            (Vendor::Intel, 6, 173 | 174) => "Granite Rapids",
            (Vendor::Intel, ..) => "Intel",
            (Vendor::Amd, 0x19, _) if self.is_zen3() => "Zen 3",
            (Vendor::Amd, 0x19, _) => "Zen 4",
            (Vendor::Amd, 0x1a, _) => "Zen 5",
            (Vendor::Amd, ..) => "AMD",
            (Vendor::Other, ..) => "another CPU",
        };
        write!(f, "{name}, family {} model {}", self.family, self.model)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures() {
        let of = |vendor, eax| CpuId::of_signature(vendor, eax).to_string();
        assert_eq!(of(Vendor::Intel, 0x0008_06f8), "Sapphire Rapids, family 6 model 143");
        assert_eq!(of(Vendor::Intel, 0x000c_06f2), "Emerald Rapids, family 6 model 207");
        assert_eq!(of(Vendor::Amd, 0x00a1_0f11), "Zen 4, family 25 model 17");
        assert_eq!(of(Vendor::Amd, 0x00a0_0f11), "Zen 3, family 25 model 1");
        assert_eq!(of(Vendor::Amd, 0x00a2_0f10), "Zen 3, family 25 model 33");
    }
}
