//! Activations, casts and biases.

use super::*;

/// The activation in f64 of an exact argument, and the error of its f32 evaluation.
///
/// silu: e^-x is off by (2 + 1.2 |x|)·2^-23 (the fast exponential), which reaches x / (1 + e^-x) weighted by
/// e^-x / (1 + e^-x); three roundings more. gelu: the inner argument has six roundings, weighted by
/// max z·sech²z < 0.45; tanh is off by 2 ulp (4u), the sum with 1 by 2u: 9u of |x|/2, then three of the result. Clamped: as silu of
/// 1.702 x, an argument with one more rounding.
fn activation(ffn: Ffn, x: f64) -> (f64, f64) {
    match ffn {
        Ffn::SwiGlu => {
            let e = (-x).exp();
            let y = x / (1.0 + e);
            (y, y.abs() * ((2.0 + 1.2 * x.abs()) * 2.0 * U * (e / (1.0 + e)) + 4.0 * U))
        }
        Ffn::GeGlu => {
            let z = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
            let y = 0.5 * x * (1.0 + z.tanh());
            (y, 0.5 * x.abs() * 9.0 * U + 3.0 * U * y.abs())
        }
        Ffn::Relu => (x.max(0.0), 0.0),
        Ffn::ClampedSwiGlu => {
            let x = x.min(7.0);
            let e = (-1.702 * x).exp();
            let y = x / (1.0 + e);
            (y, y.abs() * ((2.0 + 2.4 * 1.702 * x.abs()) * 2.0 * U * (e / (1.0 + e)) + 4.0 * U))
        }
    }
}

pub fn check(rt: &Arc<dyn Runtime>, ffn: Ffn, act: Half, rows: usize, n: usize, bias: bool) {
    let mut rng = Rng::new(11);
    // Gate and up are columns of one buffer.
    let (ld, ld_out) = (2 * n + 4, n + 8);
    let mut both: Vec<f32> = normals(&mut rng, rows * ld).iter().map(|v| v * 4.0).collect();
    for row in 0..rows {
        both[row * ld + 2 * n..(row + 1) * ld].fill(f32::NAN);
    }
    let (bg, bu) = (normals(&mut rng, n), normals(&mut rng, n));
    let (both_dev, bg_dev, bu_dev) = (upload(rt, &both), upload(rt, &bg), upload(rt, &bu));
    let out = Output::new(rt, rows * ld_out * 2);
    let gated = ffn != Ffn::Relu;
    let or_null = |wanted: bool, p: DevPtr| if wanted { p } else { DevPtr::NULL };
    let args = Activate {
        gate: both_dev.ptr(),
        up: or_null(gated, both_dev.ptr().add(n * 4)),
        gate_bias: or_null(bias, bg_dev.ptr()),
        up_bias: or_null(bias && gated, bu_dev.ptr()),
        out: out.ptr(),
        rows,
        n,
        ld_gate: ld,
        ld_up: ld,
        ld_out,
    };
    activate(&**rt, LANE, Activation::Ffn(ffn, act), &args).expect("launch");
    let got = out.u16();
    for row in 0..rows {
        let line = &got[row * ld_out..(row + 1) * ld_out];
        assert!(line[n..].iter().all(|v| *v == 0xffff), "padding of the output was written");
        for i in 0..n {
            let biased = |v: f32, b: f32| f64::from(if bias { v + b } else { v });
            let (mut y, mut error) = activation(ffn, biased(both[row * ld + i], bg[i]));
            if gated {
                let mut u = biased(both[row * ld + n + i], bu[i]);
                if ffn == Ffn::ClampedSwiGlu {
                    u = f64::from(u.clamp(-7.0, 7.0) as f32 + 1.0);
                }
                y *= u;
                error = error * u.abs() + y.abs() * U;
            }
            let what = format!("{ffn:?} {act:?} bias {bias}, row {row}");
            close(&what, i, decode(act, line[i]), y, error + rounding(act, y.abs() + error));
        }
    }
}

#[test]
fn activations_in_both_types() {
    for rt in gpu::runtimes() {
        for act in halves(&rt, |t| format!("activation_swiglu_{t}")) {
            for ffn in [Ffn::SwiGlu, Ffn::ClampedSwiGlu, Ffn::GeGlu, Ffn::Relu] {
                for (rows, n) in [(1, 4), (3, 96), (2, 1028)] {
                    check(&rt, ffn, act, rows, n, false);
                    check(&rt, ffn, act, rows, n, true);
                }
            }
        }
    }
}

#[test]
fn casts_round_once_and_biases_are_added_in_place() {
    for rt in gpu::runtimes() {
        let (rows, n, ld) = (3, 1032, 1040);
        let mut rng = Rng::new(12);
        let mut x = normals(&mut rng, rows * ld);
        x[..6].copy_from_slice(&[f32::NAN, f32::INFINITY, -0.0, 1e30, 1e-30, f32::MIN_POSITIVE]);
        let bias = normals(&mut rng, n);
        let bias_dev = upload(&rt, &bias);
        let args = |x: DevPtr, out: DevPtr, bias: DevPtr, ld_out: usize| Activate {
            gate: x,
            up: DevPtr::NULL,
            gate_bias: bias,
            up_bias: DevPtr::NULL,
            out,
            rows,
            n,
            ld_gate: ld,
            ld_up: 0,
            ld_out,
        };
        for act in halves(&rt, |t| format!("cast_{t}")) {
            let x_dev = upload(&rt, &x);
            let out = Output::new(&rt, rows * n * 2);
            let args = args(x_dev.ptr(), out.ptr(), DevPtr::NULL, n);
            activate(&*rt, LANE, Activation::Cast(act), &args).expect("launch");
            for (i, got) in out.u16().into_iter().enumerate() {
                let v = x[i / n * ld + i % n];
                if v.is_nan() {
                    assert!(decode(act, got).is_nan());
                } else {
                    assert_eq!(got, encode(act, v), "{v} as {act:?}");
                }
            }
        }
        let inout = Output::of(&rt, &x);
        let args = args(inout.ptr(), inout.ptr(), bias_dev.ptr(), ld);
        activate(&*rt, LANE, Activation::AddBias, &args).expect("launch");
        for (i, got) in inout.f32().into_iter().enumerate() {
            let want = if i % ld < n { x[i] + bias[i % ld] } else { x[i] };
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{i}: {got} not {want}"
            );
        }
    }
}
