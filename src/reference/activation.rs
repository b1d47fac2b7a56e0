//! Elementwise operations, in double precision where there is a transcendental function.

/// `x += delta`.
pub fn add(x: &mut [f32], delta: &[f32]) {
    for (x, d) in x.iter_mut().zip(delta) {
        *x += d;
    }
}

/// x / (1 + e^-x).
fn silu(x: f32) -> f64 {
    let x = x as f64;
    x / (1.0 + (-x).exp())
}

/// ½x(1 + tanh u), u = √(2/π)(x + 0.044715x³), as x / (1 + e^-2u), which is the same without cancellation.
fn gelu_tanh(x: f32) -> f64 {
    let x = x as f64;
    let u = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x);
    x / (1.0 + (-2.0 * u).exp())
}

/// `gate = silu(gate)·up`.
pub fn silu_mul_inplace(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = (silu(*g) * u as f64) as f32;
    }
}

/// `gate = gelu(gate)·up`, tanh approximation.
pub fn gelu_tanh_mul_inplace(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = (gelu_tanh(*g) * u as f64) as f32;
    }
}

/// gpt-oss clamps the gate from above, and the factor on both sides, to this.
pub const SWIGLU_LIMIT: f32 = 7.0;
/// Its factor of the gate inside the sigmoid.
pub const SWIGLU_GAIN: f32 = 1.702;

/// `gate = g·σ(1.702·g)·(u + 1)`, g = min(gate, 7), u = min(max(up, -7), 7); NaN stays NaN.
pub fn clamped_swiglu_inplace(gate: &mut [f32], up: &[f32]) {
    for (g, &u) in gate.iter_mut().zip(up) {
        let x = f64::from(if *g > SWIGLU_LIMIT { SWIGLU_LIMIT } else { *g });
        let u = f64::from(u.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT));
        *g = (x / (1.0 + (-f64::from(SWIGLU_GAIN) * x).exp()) * (u + 1.0)) as f32;
    }
}

/// `x = max(x, 0)`; NaN stays NaN.
pub fn relu(x: &mut [f32]) {
    for x in x {
        if *x < 0.0 {
            *x = 0.0;
        }
    }
}

/// `x = cap·tanh(x / cap)`.
pub fn softcap(x: &mut [f32], cap: f32) {
    for x in x {
        *x = (cap as f64 * (*x as f64 / cap as f64).tanh()) as f32;
    }
}
