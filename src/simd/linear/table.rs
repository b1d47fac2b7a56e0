//! The tables of linear kernels, one per tier with the best first, and the choice among them.

use std::sync::OnceLock;

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use super::amx;
use super::kernel::{ActsForm, Ask, LinearKernel, Work};
use super::mode::Mode;
#[cfg(target_arch = "x86_64")]
use super::{float, quant};
use crate::simd::Isa;
use crate::{Error, Result};

/// Safe scalar Rust, for rows of the file.
static REFERENCE: LinearKernel = LinearKernel {
    name: "reference",
    takes: |a| !a.packed,
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::F32,
    chunk: |s| s.usual(),
    run: reference,
};

/// # Safety
/// The fields of the work are correct.
unsafe fn reference(w: &Work<'_>) {
    crate::reference::linear::linear_rows(w.dtype, w.w, w.k, w.x.f32(), &mut |t, n, v| {
        // SAFETY: t < m and n < the work's rows, so these outputs are ours.
        unsafe { *w.out.add(t * w.ldo + n) = v };
    });
}

/// The kernels that every tier can run, and the reference tier uses.
static ALL: &[&LinearKernel] = &[&REFERENCE];

#[cfg(target_arch = "x86_64")]
static AVX2: &[&LinearKernel] =
    &[&quant::avx2_kernels::VNNI, &quant::avx2_kernels::KERNEL, &float::rowdot::AVX2, &float::tiledot::AVX2];

#[cfg(target_arch = "x86_64")]
static AVX512: &[&LinearKernel] = &[
    &quant::vnni::KERNEL,
    &float::rowdot_bf16::KERNEL,
    &float::rowdot::AVX512,
    &float::tiledot::BF16,
    &float::tiledot::AVX512,
];

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
static AMX: &[&LinearKernel] = &[
    // Quantised weights.
    &amx::quantised::HALF,
    &amx::quantised::KERNEL,
    &amx::int8_tiles::KERNEL,
    &quant::vnni::KERNEL,
    // 16-bit floats that were packed at load.
    &float::paneldot::KERNEL,
    &amx::stored::KERNEL,
    // Rows of the file.
    &float::rowdot_bf16::KERNEL,
    &float::rowdot::AVX512,
    &amx::rows_tiles::KERNEL,
    &amx::rows::KERNEL,
    &float::tiledot::AVX512,
];

/// The kernels of a tier, the best first: among those that can compute a product, the first that pays is chosen. The
/// last one for a layout always pays.
pub fn kernels(isa: Isa) -> &'static [&'static LinearKernel] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => AVX2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => AVX512,
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx => AMX,
        _ => ALL,
    }
}

/// The kernel of a tier with a name.
///
/// # Errors
/// If the tier has none of that name.
pub fn named(isa: Isa, name: &str) -> Result<&'static LinearKernel> {
    kernels(isa).iter().copied().find(|k| k.name == name).ok_or_else(|| {
        let names: Vec<&str> = kernels(isa).iter().map(|k| k.name).collect();
        Error::Unsupported(format!("no kernel of tier {isa} is called `{name}`; it has {}", names.join(", ")))
    })
}

/// The environment variable that names a kernel to use wherever possible.
const VARIABLE: &str = "TANDEM_LINEAR";

fn variable() -> Option<&'static str> {
    static NAME: OnceLock<Option<String>> = OnceLock::new();
    NAME.get_or_init(|| std::env::var(VARIABLE).ok().filter(|name| !name.is_empty())).as_deref()
}

/// The kernel that `TANDEM_LINEAR` names, if it is set.
///
/// # Errors
/// If the tier has none of that name.
pub fn forced(isa: Isa) -> Result<Option<&'static LinearKernel>> {
    let named = |name| named(isa, name).map_err(|e| Error::Usage(format!("{VARIABLE}: {e}")));
    variable().map(named).transpose()
}

/// The kernel for this product: the `forced` one if it can compute it, otherwise the first of the table that pays.
pub(super) fn choose(
    isa: Isa,
    ask: &Ask<'_>,
    mode: Mode,
    forced: Option<&'static LinearKernel>,
) -> &'static LinearKernel {
    let paying = || kernels(isa).iter().copied().find(|k| k.may(ask, mode) && (k.pays)(ask));
    forced.filter(|k| k.may(ask, mode)).or_else(paying).unwrap_or_else(|| {
        panic!(
            "tier {isa} has no kernel for {} weights of {}",
            if ask.packed { "packed" } else { "row" },
            ask.dtype
        )
    })
}
