//! The block kernels of each tier.

use super::kernels::BlockKernels;
use crate::cache::KvType;
#[cfg(target_arch = "x86_64")]
use crate::simd::Caps;
use crate::simd::Isa;

/// The kernels of a tier for a size of heads; `None` for the reference tier, which has no blocks.
pub(crate) fn select(isa: Isa, dtype: KvType, head_dim: usize) -> Option<&'static BlockKernels> {
    if let Some(why) = isa.missing() {
        panic!("attention: tier {isa} on a machine without it: {why}");
    }
    match (isa, dtype) {
        (Isa::Reference, _) => None,
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (Isa::Amx, KvType::BF16) if has_tiles(head_dim) => Some(&super::amx::KERNELS),
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        (Isa::Amx, KvType::Q8) if has_tiles(head_dim) => Some(&super::amx::KERNELS_Q8),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, KvType::BF16) => Some(&super::f32_body::AVX2_BF16),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, KvType::F16) => Some(&super::f32_body::AVX2_F16),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, KvType::Q8) => Some(&super::f32_body::AVX2_Q8),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, KvType::BF16) if Caps::get().bf16_dot_pays() => {
            Some(&super::avx512_bf16::KERNELS)
        }
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, KvType::BF16) => Some(&super::f32_body::AVX512_BF16),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, KvType::F16) => Some(&super::f32_body::AVX512_F16),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, KvType::Q8) if Caps::get().bf16_dot_pays() => {
            Some(&super::avx512_bf16::KERNELS_Q8)
        }
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512 | Isa::Amx, KvType::Q8) => Some(&super::f32_body::AVX512_Q8),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("only the reference tier is supported here, and it was handled"),
    }
}

/// Whether tiles attend such heads.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_tiles(head_dim: usize) -> bool {
    Caps::get().avx512_bf16 && super::amx::HEAD_DIMS.contains(&head_dim)
}

/// The kernels that the AMX tier uses for few rows of a KV head outside deterministic mode: those of the tier below.
/// Tiles of 16 rows would be mostly empty, and their kernels prefetch the next block in bursts where these do so line
/// by line (SmolLM2 at depth 4096, Sapphire Rapids: 71 to 75 tok/s against 53 to 70). `None` if [`select`] already
/// returns them.
pub(crate) fn for_few_rows(isa: Isa, dtype: KvType, head_dim: usize) -> Option<&'static BlockKernels> {
    match isa {
        Isa::Amx => {
            let few = select(Isa::Avx512, dtype, head_dim)?;
            select(isa, dtype, head_dim).filter(|tiles| !std::ptr::eq(*tiles, few)).map(|_| few)
        }
        _ => None,
    }
}

/// Every table that this machine can run for `dtype`, whichever [`select`] prefers.
#[cfg(all(test, target_arch = "x86_64"))]
pub(super) fn all(dtype: KvType, head_dim: usize) -> Vec<&'static BlockKernels> {
    let caps = Caps::get();
    let mut all = Vec::new();
    let mut add = |able: bool, table: &'static BlockKernels| {
        if able {
            all.push(table);
        } else {
            println!("skipped: {}, this CPU lacks it", table.name);
        }
    };
    match dtype {
        KvType::BF16 => {
            add(caps.avx2, &super::f32_body::AVX2_BF16);
            add(caps.avx512, &super::f32_body::AVX512_BF16);
            add(caps.avx512_bf16, &super::avx512_bf16::KERNELS);
            #[cfg(target_os = "linux")]
            if super::amx::HEAD_DIMS.contains(&head_dim) {
                add(caps.avx512_bf16 && caps.amx.is_ok(), &super::amx::KERNELS);
            }
        }
        KvType::F16 => {
            add(caps.avx2, &super::f32_body::AVX2_F16);
            add(caps.avx512, &super::f32_body::AVX512_F16);
        }
        KvType::Q8 => {
            add(caps.avx2, &super::f32_body::AVX2_Q8);
            add(caps.avx512, &super::f32_body::AVX512_Q8);
            add(caps.avx512_bf16, &super::avx512_bf16::KERNELS_Q8);
            #[cfg(target_os = "linux")]
            if super::amx::HEAD_DIMS.contains(&head_dim) {
                add(caps.avx512_bf16 && caps.amx.is_ok(), &super::amx::KERNELS_Q8);
            }
        }
    }
    all
}
