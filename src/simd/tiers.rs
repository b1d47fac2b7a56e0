//! The table of kernels of each tier.

use super::table::REFERENCE;
#[cfg(target_arch = "x86_64")]
use super::{Caps, avx2, avx512};
use super::{Isa, Kernels};

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
                Isa::Avx2 => &avx2::KERNELS,
                Isa::Avx512 if Caps::get().avx512_bf16 => &avx512::KERNELS_BF16,
                Isa::Avx512 => &avx512::KERNELS,
                Isa::Amx if Caps::get().avx512_bf16 => &avx512::KERNELS_AMX_BF16,
                Isa::Amx => &avx512::KERNELS_AMX,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        &REFERENCE
    }
}
