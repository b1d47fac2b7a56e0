//! temporary table
use super::Isa;
use crate::model::spec::{Rope, RopePairing, RopeScaling};
use crate::tensor::DType;
/// t
pub struct Kernels {
    /// t
    pub name: &'static str,
    pub rms_norm: fn(&[f32], &[f32], f32, &mut [f32]),
    pub rms_norm_inplace: fn(&mut [f32], &[f32], f32),
    pub add_rms_norm: fn(&mut [f32], &[f32], &[f32], f32, &mut [f32]),
    pub layer_norm: fn(&[f32], &[f32], Option<&[f32]>, f32, &mut [f32]),
    pub add: fn(&mut [f32], &[f32]),
    pub rope_heads: fn(&mut [f32], usize, &[f32], &[f32], RopePairing),
    pub silu_mul: fn(&[f32], &[f32], &mut [f32]),
    pub gelu_tanh_mul: fn(&[f32], &[f32], &mut [f32]),
    pub relu: fn(&mut [f32]),
    pub embed_row: fn(DType, &[u8], f32, &mut [f32]),
    pub softcap: fn(&mut [f32], f32),
}
fn rms(x: &[f32], eps: f32) -> f32 {
    let mut s = [0f32; 16];
    for c in x.chunks(16) {
        for (s, v) in s.iter_mut().zip(c) {
            *s += v * v;
        }
    }
    1.0 / (s.iter().sum::<f32>() / x.len() as f32 + eps).sqrt()
}
fn rms_norm(x: &[f32], w: &[f32], eps: f32, o: &mut [f32]) {
    let r = rms(x, eps);
    for ((o, x), w) in o.iter_mut().zip(x).zip(w) {
        *o = x * r * w;
    }
}
fn rms_norm_inplace(x: &mut [f32], w: &[f32], eps: f32) {
    let r = rms(x, eps);
    for (x, w) in x.iter_mut().zip(w) {
        *x *= r * w;
    }
}
fn add(x: &mut [f32], d: &[f32]) {
    for (x, d) in x.iter_mut().zip(d) {
        *x += d;
    }
}
fn add_rms_norm(x: &mut [f32], d: &[f32], w: &[f32], eps: f32, o: &mut [f32]) {
    add(x, d);
    rms_norm(x, w, eps, o);
}
fn layer_norm(x: &[f32], w: &[f32], b: Option<&[f32]>, eps: f32, o: &mut [f32]) {
    let n = x.len() as f32;
    let mean = x.iter().sum::<f32>() / n;
    let var = x.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / n;
    let r = 1.0 / (var + eps).sqrt();
    for i in 0..x.len() {
        o[i] = (x[i] - mean) * r * w[i] + b.map_or(0.0, |b| b[i]);
    }
}
fn rope_heads(x: &mut [f32], hd: usize, cos: &[f32], sin: &[f32], p: RopePairing) {
    let h = cos.len();
    for x in x.chunks_exact_mut(hd) {
        for i in 0..h {
            let (a, b) = if p == RopePairing::Half { (i, i + h) } else { (2 * i, 2 * i + 1) };
            let (u, v) = (x[a], x[b]);
            x[a] = u * cos[i] - v * sin[i];
            x[b] = u * sin[i] + v * cos[i];
        }
    }
}
fn silu_mul(g: &[f32], u: &[f32], o: &mut [f32]) {
    for i in 0..o.len() {
        o[i] = g[i] / (1.0 + (-g[i]).exp()) * u[i];
    }
}
fn gelu_tanh_mul(g: &[f32], u: &[f32], o: &mut [f32]) {
    for i in 0..o.len() {
        let x = g[i];
        o[i] = 0.5 * x * (1.0 + (0.797_884_6 * (x + 0.044_715 * x * x * x)).tanh()) * u[i];
    }
}
fn relu(x: &mut [f32]) {
    for x in x {
        *x = x.max(0.0);
    }
}
fn embed_row(d: DType, r: &[u8], s: f32, o: &mut [f32]) {
    crate::reference::dequant::dequantise_row(d, r, o);
    if s != 1.0 {
        for o in o {
            *o *= s;
        }
    }
}
fn softcap(x: &mut [f32], c: f32) {
    for x in x {
        *x = c * (*x / c).tanh();
    }
}
impl Kernels {
    pub fn for_isa(_: Isa) -> &'static Kernels {
        &Kernels {
            name: "tmp",
            rms_norm,
            rms_norm_inplace,
            add_rms_norm,
            layer_norm,
            add,
            rope_heads,
            silu_mul,
            gelu_tanh_mul,
            relu,
            embed_row,
            softcap,
        }
    }
}
pub struct RopeTable {
    inv: Vec<f64>,
}
impl RopeTable {
    pub fn new(r: &Rope, local: bool) -> RopeTable {
        let h = r.dim / 2;
        let theta = if local { r.local_theta.unwrap_or(r.theta) } else { r.theta } as f64;
        let inv = (0..h)
            .map(|i| {
                let f = theta.powf(-2.0 * i as f64 / r.dim as f64);
                if local {
                    return f;
                }
                match &r.scaling {
                    RopeScaling::None => f,
                    RopeScaling::Linear { factor } => f / *factor as f64,
                    RopeScaling::Factors(d) => f / d[i] as f64,
                    RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                        let wave = 2.0 * std::f64::consts::PI / f;
                        let (lo, hi, o, fac) = (
                            *low_freq_factor as f64,
                            *high_freq_factor as f64,
                            *original_context as f64,
                            *factor as f64,
                        );
                        if wave < o / hi {
                            f
                        } else if wave > o / lo {
                            f / fac
                        } else {
                            let s = (o / wave - lo) / (hi - lo);
                            (1.0 - s) * f / fac + s * f
                        }
                    }
                }
            })
            .collect();
        RopeTable { inv }
    }
    pub fn half(&self) -> usize {
        self.inv.len()
    }
    pub fn cos_sin(&self, p: usize, c: &mut [f32], s: &mut [f32]) {
        for i in 0..self.inv.len() {
            let (si, co) = (p as f64 * self.inv[i]).sin_cos();
            c[i] = co as f32;
            s[i] = si as f32;
        }
    }
}
