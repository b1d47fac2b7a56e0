//! The small kernels, per tier, at the sizes of SmolLM2-135M and Llama 3: GB/s of bytes read and written.
//!
//!   cargo bench --bench elementwise                  everything
//!   cargo bench --bench elementwise -- silu       names that contain a word
//!
//! Rows are hot in L1 or L2, as they are between two linear layers. Each answer is checked against the
//! reference before it is timed.

use std::cell::RefCell;
use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use tandem::model::RopePairing;
use tandem::reference::quantise::Int8Row;
use tandem::simd::{Isa, Kernels};
use tandem::tensor::DType;

/// Width of the residual stream, of the feed-forward, and of the vocabulary.
const MODELS: [(&str, usize, usize, usize); 2] =
    [("smollm2-135m", 576, 1536, 49_152), ("llama-3.1-8b", 4096, 14_336, 128_256)];

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919) % 1009) as f32 / 200.0 - 2.5).collect()
}

/// Largest difference of an element, relative to the greatest of the row: 1e-5 leaves room for the sum of
/// 10^5 rounded terms and shows any wrong lane. The tests bound each kernel tightly.
fn verify(name: &str, got: &[f32], want: &[f32]) {
    let size = want.iter().fold(1e-30f32, |m, v| m.max(v.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-5 * size, "{name}: element {i}: {g}, reference {w}");
    }
}

/// Times `run` on every tier; `run` fills the output it is given, `n` elements, from scratch.
fn tiers(
    c: &mut Criterion,
    op: &str,
    model: &str,
    bytes: usize,
    n: usize,
    run: &dyn Fn(&Kernels, &mut [f32]),
) {
    let mut want = vec![0.0; n];
    run(Kernels::for_isa(Isa::Reference), &mut want);
    let mut group = c.benchmark_group(op);
    group.throughput(Throughput::Bytes(bytes as u64));
    for isa in Isa::ALL {
        if let Some(why) = isa.missing() {
            println!("skipped: {op} {isa}: {why}");
            continue;
        }
        let k = Kernels::for_isa(isa);
        let mut out = vec![0.0; n];
        run(k, &mut out);
        verify(&format!("{op} {model} {isa}"), &out, &want);
        group.bench_function(BenchmarkId::new(isa.name(), model), |b| b.iter(|| run(k, black_box(&mut out))));
    }
    group.finish();
}

/// Activations to int8 with a fine plane, as the products of queries, keys and values read them; checked by the scales.
fn quantise_row(c: &mut Criterion, model: &str, x: &[f32]) {
    let n = x.len().next_multiple_of(64);
    let plane = || {
        let floats = [n / 32, n / 32, n / 16].map(|n| vec![0f32; n]);
        (vec![0i8; n], floats, [n / 32, n / 16].map(|n| vec![0i32; n]))
    };
    let planes = RefCell::new([plane(), plane()]);
    // Four bytes read of an element; of each plane a code, and 24 bytes of a block's scale and sums.
    tiers(c, "quantise_row", model, 6 * n + 2 * 24 * n / 32, n / 32, &|k, scales| {
        let mut planes = planes.borrow_mut();
        let [row, fine] = planes.each_mut().map(|(q, [d, sum32, sum16], [minus32, minus16])| Int8Row {
            q,
            d,
            sum32,
            sum16,
            minus32,
            minus16,
        });
        k.quantise_row(x, row, Some(fine));
        scales.copy_from_slice(&planes[0].1[0]);
    });
}

fn elementwise(c: &mut Criterion) {
    for (model, d, ff, vocab) in MODELS {
        let (x, w, up, logits) = (values(d), values(d), values(ff), values(vocab));
        tiers(c, "rms_norm", model, 12 * d, d, &|k, out| k.rms_norm(&x, &w, 1e-5, out));
        tiers(c, "layer_norm", model, 16 * d, d, &|k, out| k.layer_norm(&x, &w, &w, 1e-5, out));
        // In place: the copy is counted.
        for (name, run) in [
            ("silu_mul", Kernels::silu_mul_inplace as fn(&Kernels, &mut [f32], &[f32])),
            ("gelu_tanh_mul", Kernels::gelu_tanh_mul_inplace),
            ("clamped_swiglu", Kernels::clamped_swiglu_inplace),
        ] {
            tiers(c, name, model, 20 * ff, ff, &|k, out| {
                out.copy_from_slice(&up);
                run(k, out, &up);
            });
        }
        quantise_row(c, model, &x);
        tiers(c, "softcap", model, 16 * vocab, vocab, &|k, out| {
            out.copy_from_slice(&logits);
            k.softcap(out, 30.0);
        });
        tiers(c, "argmax", model, 4 * vocab, 1, &|k, out| out[0] = k.argmax(&logits) as f32);
        tiers(c, "logsumexp", model, 4 * vocab, 1, &|k, out| out[0] = k.max_and_logsumexp(&logits).1 as f32);
        let (cos, sin) = (vec![0.8; 32], vec![0.6; 32]);
        for pairing in [RopePairing::Half, RopePairing::Interleaved] {
            tiers(c, &format!("rope_{pairing:?}").to_lowercase(), model, 16 * d, d, &|k, out| {
                out.copy_from_slice(&x);
                k.rope_heads(out, d / 64, 64, &cos, &sin, pairing);
            });
        }
        for dtype in [DType::BF16, DType::Q8_0, DType::Q4_1, DType::Q4_K, DType::Q6_K] {
            // SmolLM2's rows are no whole number of 256-blocks: it has no K formats.
            let Some(bytes) = dtype.row_bytes(d) else { continue };
            // Small codes everywhere, scales included, so that nothing is infinite; and for bf16
            // exponents near 1, since subnormal operands are slow.
            let mut row: Vec<u8> = (0..bytes).map(|i| (i * 37 % 41) as u8).collect();
            if dtype == DType::BF16 {
                row.iter_mut().skip(1).step_by(2).for_each(|b| *b = 0x3f);
            }
            tiers(c, &format!("embed_row_{dtype}"), model, bytes + 4 * d, d, &|k, out| {
                k.embed_row(dtype, &row, 1.5, out);
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_millis(500));
    targets = elementwise
}
criterion_main!(benches);
