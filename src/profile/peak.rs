//! Arithmetic peaks: independent chains of one instruction in registers.

use std::hint::black_box;
use std::time::Instant;

use crate::host::Pool;
use crate::simd::Caps;

/// One measured peak.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// What was measured: `f32 fma`, `bf16 dot`, `int8 dot`.
    pub name: &'static str,
    /// Operations per second of all threads together; a multiply-add counts two.
    pub ops: f64,
}

/// The peaks of the instructions that this CPU has and the kernels use.
pub fn peaks(pool: &Pool) -> Vec<Peak> {
    let mut out = Vec::new();
    let caps = Caps::get();
    #[cfg(target_arch = "x86_64")]
    {
        type Probe = unsafe fn(usize) -> f32;
        let mut run = |name, ops_per_iteration: usize, f: Probe| {
            const ITERATIONS: usize = 200_000;
            let mut best = 0f64;
            for _ in 0..5 {
                let start = Instant::now();
                pool.run(pool.threads() * 4, &|_, _| {
                    // SAFETY: each probe is offered only where its features were detected.
                    black_box(unsafe { f(ITERATIONS) });
                });
                let ops = (pool.threads() * 4 * ITERATIONS * ops_per_iteration) as f64;
                best = best.max(ops / start.elapsed().as_secs_f64());
            }
            out.push(Peak { name, ops: best });
        };
        if caps.avx512 {
            run("f32 fma", CHAINS * 32, x86::fma);
        } else if caps.avx2 {
            run("f32 fma", CHAINS * 16, x86::fma256);
        }
        if caps.avx512 && caps.avx512_bf16 {
            run("bf16 dot", CHAINS * 64, x86::bf16);
        }
        if caps.avx512 && caps.avx512_vnni {
            run("int8 dot", CHAINS * 128, x86::vnni);
        } else if caps.avx_vnni {
            run("int8 dot", CHAINS * 64, x86::vnni256);
        } else if caps.avx2 {
            run("int8 dot", CHAINS * 64, x86::pairs);
        }
    }
    let _ = (caps, pool);
    out
}

#[cfg(target_arch = "x86_64")]
const CHAINS: usize = 12;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::CHAINS;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    macro_rules! probe {
        ($name:ident, $features:literal, $zero:expr, $one:expr, $step:expr, $reduce:expr) => {
            #[target_feature(enable = $features)]
            pub unsafe fn $name(iterations: usize) -> f32 {
                // Different, opaque starting points: equal chains would be merged into one.
                let mut acc = [$zero; CHAINS];
                for (i, a) in acc.iter_mut().enumerate() {
                    *a = black_box($one(i));
                }
                let x = black_box($one(1));
                for _ in 0..iterations {
                    for a in acc.iter_mut() {
                        *a = $step(*a, x);
                    }
                }
                acc.into_iter().map($reduce).sum()
            }
        };
    }
    probe!(
        fma,
        "avx512f",
        _mm512_setzero_ps(),
        |i: usize| _mm512_set1_ps(i as f32 * 1e-3),
        |a, x| _mm512_fmadd_ps(x, x, a),
        |a| _mm512_reduce_add_ps(a)
    );
    probe!(
        fma256,
        "avx2,fma",
        _mm256_setzero_ps(),
        |i: usize| _mm256_set1_ps(i as f32 * 1e-3),
        |a, x| _mm256_fmadd_ps(x, x, a),
        |a| _mm256_cvtss_f32(a)
    );
    probe!(
        bf16,
        "avx512f,avx512bf16",
        _mm512_setzero_ps(),
        |i: usize| _mm512_set1_ps(i as f32 * 1e-3),
        |a, x: __m512| {
            // SAFETY: both are 64 bytes of any value.
            let x: __m512bh = unsafe { std::mem::transmute(x) };
            _mm512_dpbf16_ps(a, x, x)
        },
        |a| _mm512_reduce_add_ps(a)
    );
    probe!(
        vnni,
        "avx512f,avx512vnni",
        _mm512_setzero_si512(),
        |i: usize| _mm512_set1_epi32(i as i32),
        |a, x| _mm512_dpbusd_epi32(a, x, x),
        |a| _mm512_reduce_add_epi32(a) as f32
    );
    probe!(
        vnni256,
        "avx2,avxvnni",
        _mm256_setzero_si256(),
        |i: usize| _mm256_set1_epi32(i as i32),
        |a, x| _mm256_dpbusd_avx_epi32(a, x, x),
        |a| _mm256_cvtsi256_si32(a) as f32
    );
    // Products of pairs and their sums, which kernels widen to 32 bits once for many.
    probe!(
        pairs,
        "avx2",
        _mm256_setzero_si256(),
        |i: usize| _mm256_set1_epi32(i as i32),
        |a, x| _mm256_add_epi16(a, _mm256_maddubs_epi16(a, x)),
        |a| _mm256_cvtsi256_si32(a) as f32
    );
}
