//! Linear layers on an accelerator: random operands, their product in f64, and how far a right result may be from it.

use std::sync::Arc;

use tandem::device::kernels::product::{COUNTER_BYTES, Epilogue, Matrix, ProductArgs, Weight, gate_up_row};
use tandem::device::{Buffer, DevPtr, Runtime};
use tandem::tensor::{DType, Half};

use super::memory::{CANARY, LANE, decode, encode, rounding, upload};

/// Bytes after the last element of y that nobody may write.
const GUARD: usize = 64;

/// One layer for one batch.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// What the weights are stored in.
    pub weights: DType,
    /// What x, and y of an activation, are.
    pub act: Half,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Elements that a row of x has more than k.
    pub pad_x: usize,
    /// Columns of a row of y before and after the ones written.
    pub pad_y: (usize, usize),
    pub bias: bool,
    pub epilogue: Epilogue,
    /// Which numbers.
    pub seed: u64,
}

impl Case {
    /// Dense, rows without gaps, f32 out.
    pub fn plain(act: Half, m: usize, n: usize, k: usize) -> Case {
        let weights = if act == Half::F16 { DType::F16 } else { DType::BF16 };
        let (bias, epilogue) = (false, Epilogue::F32);
        Case { weights, act, m, n, k, pad_x: 0, pad_y: (0, 0), bias, epilogue, seed: 0 }
    }

    pub fn matrix(&self) -> Matrix {
        Matrix::of(self.weights, self.n, self.k)
    }

    pub fn columns(&self) -> usize {
        if self.epilogue.is_gated() { self.n / 2 } else { self.n }
    }

    pub fn ldx(&self) -> usize {
        self.k + self.pad_x
    }

    pub fn ldy(&self) -> usize {
        self.pad_y.0 + self.columns() + self.pad_y.1
    }

    /// Bytes of an element of y.
    pub fn size(&self) -> usize {
        if self.epilogue == Epilogue::F32 { 4 } else { 2 }
    }

    /// Which row of the file is row `r` on the device: there, eight gates and their eight ups take turns.
    pub fn row_of_file(&self, r: usize) -> usize {
        if self.epilogue.is_gated() { r % 16 / 8 * (self.n / 2) + r / 16 * 8 + r % 8 } else { r }
    }

    /// Element `at` of y, gaps counted.
    pub fn element(&self, y: &[u8], at: usize) -> f64 {
        let bytes = &y[at * self.size()..][..self.size()];
        match self.epilogue {
            Epilogue::F32 => f32::from_le_bytes(bytes.try_into().expect("4 bytes")).into(),
            _ => decode(self.act, u16::from_le_bytes(bytes.try_into().expect("2 bytes"))),
        }
    }

    /// Compares every element of `y` with its definition; what lies around them is untouched. `roundings` is how
    /// many a product meets on its way into a sum; `how` names the kernel.
    #[track_caller]
    pub fn check(&self, o: &Operands, roundings: usize, y: &[u8], how: &str) {
        let written = self.pad_y.0..self.pad_y.0 + self.columns();
        for (at, bytes) in y.chunks_exact(self.size()).enumerate() {
            let (m, column) = (at / self.ldy(), at % self.ldy());
            if m >= self.m || !written.contains(&column) {
                assert!(
                    bytes.iter().all(|&b| b == CANARY),
                    "{self:?} {how}: wrote token {m} column {column}"
                );
                continue;
            }
            let got = self.element(y, at);
            let (want, tolerance) = o.expect(self, roundings, m, column - self.pad_y.0);
            assert!(
                (got - want).abs() <= tolerance,
                "{self:?} {how}: token {m} column {column} is {got}, wanted {want} within {tolerance:e}"
            );
        }
    }
}

/// Uniform in 0..2^32, by place: the same whatever the sizes, so that batches of different m compare.
pub fn random(seed: u64, row: usize, col: usize) -> u32 {
    let mut z = seed ^ (row as u64) << 40 ^ (col as u64) << 8;
    for _ in 0..2 {
        z = (z ^ z >> 30).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^= z >> 27;
    }
    (z >> 32) as u32
}

/// Uniform in -1..1, by place.
pub fn noise(seed: u64, row: usize, col: usize) -> f64 {
    f64::from(random(seed, row, col)) / f64::from(1u32 << 31) - 1.0
}

/// Operands as the device gets them, and what the rows of y are sums of.
pub struct Operands {
    pub packed: Vec<u8>,
    /// `[n][k]` in the order of the packed rows: weights, and how large the parts are that they are made of.
    w: Vec<f64>,
    parts: Vec<f64>,
    pub x: Vec<u16>,
    /// In the order of the packed rows.
    pub bias: Vec<f32>,
}

impl Operands {
    /// Random activations and bias for the given weights.
    pub fn new(c: &Case, packed: Vec<u8>, w: Vec<f64>, parts: Vec<f64>) -> Operands {
        // Padding of x is NaN: a sum that takes some in shows it.
        let x = (0..c.m * c.ldx())
            .map(|i| (i / c.ldx(), i % c.ldx()))
            .map(|(m, k)| if k < c.k { encode(c.act, 2.0 * noise(c.seed ^ 2, m, k) as f32) } else { 0x7fff })
            .collect();
        let bias = (0..c.n).map(|i| noise(c.seed ^ 3, i, 0) as f32).collect();
        Operands { packed, w, parts, x, bias }
    }

    /// Random 16-bit weights, gates and ups interleaved as the engine does it.
    pub fn dense(c: &Case) -> Operands {
        // Sums of k products then have a variance of about 1: gates lie where activations bend.
        let scale = (3.0 / c.k as f64).sqrt();
        let file: Vec<u16> = (0..c.n * c.k)
            .map(|i| encode(c.act, (scale * noise(c.seed ^ 1, i / c.k, i % c.k)) as f32))
            .collect();
        let w: Vec<f64> =
            (0..c.n * c.k).map(|i| decode(c.act, file[c.row_of_file(i / c.k) * c.k + i % c.k])).collect();
        let mut packed: Vec<u8> = file.iter().flat_map(|v| v.to_le_bytes()).collect();
        if c.epilogue.is_gated() {
            let rows: Vec<&[u8]> = packed.chunks_exact(2 * c.k).collect();
            let row = |r: usize| {
                let (is_up, i) = gate_up_row(r);
                rows[usize::from(is_up) * c.n / 2 + i]
            };
            packed = (0..c.n).flat_map(|r| row(r).to_vec()).collect();
        }
        let parts = w.iter().map(|v| v.abs()).collect();
        Operands::new(c, packed, w, parts)
    }

    /// Packed row n's sum for token m in f64, and the sum of magnitudes.
    fn sum(&self, c: &Case, m: usize, n: usize) -> (f64, f64) {
        let mut sum = if c.bias { f64::from(self.bias[n]) } else { 0.0 };
        let mut size = sum.abs();
        let x = &self.x[m * c.ldx()..][..c.k];
        for ((w, part), &x) in self.w[n * c.k..].iter().zip(&self.parts[n * c.k..]).zip(x) {
            let x = decode(c.act, x);
            sum += w * x;
            size += part * x.abs();
        }
        (sum, size)
    }

    /// Element (m, column) of the output, and how far a right result may be from it.
    ///
    /// Each of the `roundings` is within 2^-23 (tensor cores cut where IEEE rounds) of the magnitudes summed so far.
    /// silu and gelu_tanh have slopes below 1.13. Their f32 evaluation is within 2^-19 (|x| + 1), that is 16 units
    /// u = 2^-23 of |x| + 1, at any argument x. silu: a fast exponential is off by 2 + 1.2 |x| of its u, which
    /// changes x / (1 + e) by |x| s (1 - s) of that, s the sigmoid: |x| s (1 - s) < 0.23 and x^2 s (1 - s) < 0.44, so
    /// less than 1 u; the roundings of the sum and of the quotient add 3 u |x|. Beyond the range of the exponential
    /// the quotient is 0 or x, as it should be within 2^-100. gelu: the argument of tanh has 5 roundings, which
    /// y (1 - tanh(y)^2) < 0.45 reduces to 3 u, tanh itself is within 2 u, and the product adds 1: times |x| / 2.
    /// g s(1.702 g) is silu(1.702 g) / 1.702, of the same slope; its argument is rounded once more. u + 1 is rounded once.
    fn expect(&self, c: &Case, roundings: usize, m: usize, column: usize) -> (f64, f64) {
        let roundings = roundings as f64 * 2f64.powi(-23);
        let row = if c.epilogue.is_gated() { column / 8 * 16 + column % 8 } else { column };
        let (sum, size) = self.sum(c, m, row);
        let error = roundings * size;
        let act = match c.epilogue {
            Epilogue::F32 => return (sum, error),
            Epilogue::Relu => return (sum.max(0.0), error + rounding(c.act, sum.abs() + error)),
            Epilogue::SwiGlu => sum / (1.0 + (-sum).exp()),
            Epilogue::GeGlu => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (sum + 0.044715 * sum.powi(3));
                0.5 * sum * (1.0 + inner.tanh())
            }
            Epilogue::ClampedSwiGlu => {
                let g = sum.min(7.0);
                g / (1.0 + (-1.702 * g).exp())
            }
        };
        let (mut up, mut up_size) = self.sum(c, m, row + 8);
        if c.epilogue == Epilogue::ClampedSwiGlu {
            (up, up_size) = (up.clamp(-7.0, 7.0) + 1.0, up_size + 1.0);
        }
        let act_error = 1.13 * error + 2f64.powi(-19) * (sum.abs() + 1.0);
        let up_error = roundings * up_size;
        let out = act * up;
        let out_error = act_error * (up.abs() + up_error) + act.abs() * up_error;
        (out, out_error + rounding(c.act, out.abs() + out_error))
    }
}

/// Everything that a launch touches, on a device.
pub struct Launch {
    pub rt: Arc<dyn Runtime>,
    pub w: Buffer,
    pub x: Buffer,
    /// NULL without a bias.
    pub bias: DevPtr,
    /// The first element that is written.
    pub y: DevPtr,
    pub scratch: Buffer,
    out: Buffer,
    _bias: Buffer,
}

impl Launch {
    pub fn new(rt: &Arc<dyn Runtime>, c: &Case, o: &Operands, scratch_bytes: usize) -> Launch {
        let (w, x, bias) = (upload(rt, &o.packed), upload(rt, &o.x), upload(rt, &o.bias));
        let out = upload(rt, &vec![CANARY; c.m * c.ldy() * c.size() + GUARD]);
        // NaNs: a partial sum that is read before it is written shows.
        let mut scratch = vec![CANARY; scratch_bytes];
        scratch[..COUNTER_BYTES].fill(0);
        Launch {
            rt: rt.clone(),
            w,
            x,
            bias: if c.bias { bias.ptr() } else { DevPtr::NULL },
            y: out.ptr().add(c.pad_y.0 * c.size()),
            scratch: upload(rt, &scratch),
            out,
            _bias: bias,
        }
    }

    pub fn args(&self, c: &Case) -> ProductArgs {
        ProductArgs {
            w: Weight { ptr: self.w.ptr(), matrix: c.matrix(), bias: self.bias },
            act: c.act,
            x: self.x.ptr(),
            ldx: c.ldx(),
            y: self.y,
            ldy: c.ldy(),
            m: c.m,
            epilogue: c.epilogue,
            scratch: self.scratch.ptr(),
        }
    }

    /// All bytes of y, gaps and guard included, after `launched`; counters are as they were, for the next launch.
    #[track_caller]
    pub fn output(&self, launched: tandem::Result<()>, how: &str) -> Vec<u8> {
        launched.unwrap_or_else(|e| panic!("{how}: {e}"));
        let mut y = vec![0; self.out.len()];
        self.rt.download(LANE, self.out.ptr(), &mut y).unwrap_or_else(|e| panic!("{how}: {e}"));
        let mut counters = vec![1; COUNTER_BYTES];
        self.rt.download(LANE, self.scratch.ptr(), &mut counters).expect("download");
        assert!(counters.iter().all(|&b| b == 0), "{how}: counters are not left at zero");
        y
    }
}
