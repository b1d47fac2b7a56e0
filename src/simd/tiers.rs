//! The table of each tier: it inherits that below, and replaces what it does by itself.

use super::table::REFERENCE;
#[cfg(target_arch = "x86_64")]
use super::{Caps, avx2, avx512};
use super::{Isa, Kernels};

/// AVX2: every operation of the reference tier, replaced.
#[cfg(target_arch = "x86_64")]
static AVX2: Kernels =
    Kernels { name: "avx2", isa: Isa::Avx2, bf16_instruction: None, quantise_row: avx2::quantise_row };
/// AVX-512: every operation, in wider vectors.
#[cfg(target_arch = "x86_64")]
static AVX512: Kernels =
    Kernels { name: "avx512", isa: Isa::Avx512, quantise_row: avx512::quantise_row, ..AVX2 };
/// With AVX512_BF16.
#[cfg(target_arch = "x86_64")]
static AVX512_BF16: Kernels = Kernels { bf16_instruction: Some(avx512::f32_to_bf16), ..AVX512 };
/// AMX, whose tiles serve linear layers and attention only.
#[cfg(target_arch = "x86_64")]
static AMX: Kernels = Kernels { name: "amx", isa: Isa::Amx, ..AVX512 };
/// AMX with AVX512_BF16: every AMX CPU so far.
#[cfg(target_arch = "x86_64")]
static AMX_BF16: Kernels = Kernels { name: "amx", isa: Isa::Amx, ..AVX512_BF16 };

impl Kernels {
    /// The table of a tier.
    ///
    /// # Panics
    /// If this CPU cannot run the tier: choose among [`Isa::supported`], or use [`Isa::selected`].
    pub fn for_isa(isa: Isa) -> &'static Kernels {
        if let Some(why) = isa.missing() {
            panic!("kernels of tier {isa} on a CPU that cannot run them: {why}");
        }
        #[cfg(target_arch = "x86_64")]
        {
            match isa {
                Isa::Reference => &REFERENCE,
                Isa::Avx2 => &AVX2,
                Isa::Avx512 if Caps::get().avx512_bf16 => &AVX512_BF16,
                Isa::Avx512 => &AVX512,
                Isa::Amx if Caps::get().avx512_bf16 => &AMX_BF16,
                Isa::Amx => &AMX,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        &REFERENCE
    }
}
