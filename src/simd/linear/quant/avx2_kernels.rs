//! The AVX2 kernels of quantised weights: few tokens by `avx2_int8`, many by `avx2_unpacked`, with AVX-VNNI or without.

use super::super::kernel::{ActsForm, GROUP, LinearKernel, Work};
use super::super::packed::RecordLayout;
use super::avx2_int8::{Dest, tiles};
use super::{X, avx2_unpacked};
use crate::simd::Caps;
use crate::tensor::formats::{BlockFormat, with_format};

/// `m` tokens times one group.
#[inline(always)]
unsafe fn any<F: BlockFormat, const VNNI: bool>(
    w: *const u8,
    k: usize,
    x: X,
    m: usize,
    dest: Dest,
    ahead: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        if m >= avx2_unpacked::FROM {
            avx2_unpacked::group::<F, VNNI>(w, k, x, m, dest);
        } else {
            tiles::<F, VNNI>(w, k, x, m, dest, ahead);
        }
    }
}

/// [`any`] by the instructions that every CPU of the tier has.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group<F: BlockFormat>(w: *const u8, k: usize, x: X, m: usize, dest: Dest, ahead: usize) {
    // SAFETY: the caller's contract.
    unsafe { any::<F, false>(w, k, x, m, dest, ahead) }
}

/// [`any`] by AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn vnni_group<F: BlockFormat>(w: *const u8, k: usize, x: X, m: usize, dest: Dest, ahead: usize) {
    // SAFETY: the caller's contract.
    unsafe { any::<F, true>(w, k, x, m, dest, ahead) }
}

pub(in super::super) static KERNEL: LinearKernel = LinearKernel {
    name: "avx2_int8",
    takes: |a| a.quantised(),
    pays: |_| true,
    any_rows: true,
    reads: ActsForm::Int8,
    chunk: |s| s.usual(),
    run: run::<false>,
};

pub(in super::super) static VNNI: LinearKernel = LinearKernel {
    name: "avx_vnni",
    takes: |a| a.quantised() && Caps::get().avx_vnni,
    run: run::<true>,
    ..KERNEL
};

/// `out[t·ldo + row]` for the rows of the groups `w`.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C, with `VNNI` AVX-VNNI; the work's weights are whole groups of a quantised dtype, its activations int8.
unsafe fn run<const VNNI: bool>(work: &Work<'_>) {
    let &Work { dtype, w, n, k, out, ldo, .. } = work;
    let (x, m) = (X::of(work), work.x.m());
    let group_bytes = RecordLayout::of(dtype).expect("quantised").group_bytes(k);
    let ahead = if work.asks_ahead() { work.tuning.ahead_bytes } else { 0 };
    for (g, w) in w.chunks_exact(group_bytes).enumerate() {
        let first = g * GROUP;
        // SAFETY: rows of `out` are `ldo >= n` long.
        let dest = Dest { out: unsafe { out.add(first) }, ldo, rows: (n - first).min(GROUP) };
        // SAFETY: the caller's contract.
        unsafe {
            with_format!(dtype, F => if VNNI {
                vnni_group::<F>(w.as_ptr(), k, x, m, dest, ahead);
            } else {
                group::<F>(w.as_ptr(), k, x, m, dest, ahead);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Pool;
    use crate::simd::linear::acts::{Acts, Need};
    use crate::simd::linear::packed::pack_group;
    use crate::simd::tuning::Tuning;
    use crate::simd::{Isa, Kernels};
    use crate::tensor::{Bytes, DType, Tensor, set_scales};

    /// By AVX-VNNI, in hardware or in software, the bits are those of the instructions that every CPU has.
    #[test]
    fn both_kernels_have_the_same_bits() {
        if !Caps::get().avx2 {
            return println!("skipped: this CPU reports no avx2, fma and f16c");
        }
        crate::amx::emulate::install().unwrap();
        if !Caps::get().avx_vnni && !crate::amx::emulate::installed() {
            return println!("skipped: AVX-VNNI is hidden on a CPU with AMX, where nothing is emulated");
        }
        let (n, k) = (20, 512);
        let mut seed = 3u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as u32
        };
        let pool = Pool::new(1);
        for dtype in DType::QUANTISED {
            let mut bytes: Vec<u8> = (0..n * dtype.row_bytes(k).unwrap()).map(|_| next() as u8).collect();
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                set_scales(dtype, block, next() as f32 * 1e-11, next() as f32 * -1e-11);
            }
            let weight = Tensor::new(dtype, vec![n, k], Bytes::copy_of(&bytes)).unwrap();
            let group = RecordLayout::of(dtype).unwrap().group_bytes(k);
            let mut packed = vec![0; 2 * group];
            packed.chunks_exact_mut(group).enumerate().for_each(|(g, out)| pack_group(&weight, g, out));
            // Tiles of few tokens; unpacked codes, in tiles of four and in each rest.
            for m in [1, 2, 3, 4, 5, 8, 9, 10, 11] {
                let mut acts = Acts::default();
                for v in acts.reset(m, k) {
                    // Also the largest quantised activations, of either sign.
                    *v = if next() % 3 == 0 { 1.0 } else { next() as f32 / (1u32 << 30) as f32 - 1.0 };
                }
                let need = Need { int8: true, ..Need::default() };
                let x = acts.input(&pool, Kernels::for_isa(Isa::Avx2), need);
                let tuning = &Tuning::current().linear(dtype);
                let of = |kernel: &LinearKernel| {
                    let mut out = vec![f32::NAN; m * n];
                    let (w, plane) = (packed.as_slice(), 0);
                    let work = Work { dtype, w, n, k, x, plane, out: out.as_mut_ptr(), ldo: n, tuning };
                    // SAFETY: the CPU has AVX2, AVX-VNNI in hardware or in software; whole groups; m rows of n.
                    unsafe { (kernel.run)(&work) };
                    out.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
                };
                let (plain, vnni) = (of(&KERNEL), of(&VNNI));
                assert!(plain.iter().all(|&v| f32::from_bits(v).is_finite()));
                assert_eq!(plain, vnni, "{dtype}, {m} tokens");
            }
        }
    }
}
