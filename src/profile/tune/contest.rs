//! The same product under several entries of the tuning table, in alternating calls, so that a drifting host moves all of
//! them, on weights that are not in a cache. Answers are checked before anything is timed.

use std::time::Instant;

use memmap2::MmapMut;

use super::super::{Effort, Samples, cold_bytes};
use crate::host::{AlignedBuffer, Pieces, Pool};
use crate::simd::Isa;
use crate::simd::linear::{Acts, GROUP, Linear, Mode, Out, Packed, linear, pack, pack_group};
use crate::simd::tuning::LinearTuning;
use crate::tensor::{Bytes, DType, Tensor, set_scales};
use crate::{Error, Result, reference};

/// A small generator (xorshift).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// A weight of one dtype, in as many copies as overflow the caches.
pub(super) struct WeightSubject {
    weight: Tensor,
    /// As kernels read it: quantised ones packed, others in rows.
    copies: Vec<Linear>,
    /// The data of `copies`.
    parts: Vec<Bytes>,
}

impl WeightSubject {
    /// Random values; quick: a small weight in one copy.
    pub fn new(dtype: DType, isa: Isa, effort: Effort) -> WeightSubject {
        let (n, k, bytes) = match effort {
            Effort::Quick => (256, 512, 1),
            Effort::Full => (4096, 2048, cold_bytes()),
        };
        let weight = random(dtype, n, k);
        let (parts, copy): (_, &dyn Fn(Bytes) -> Linear) = match dtype.is_quantised() {
            true => {
                let copy = |data| Linear::from_packed(Packed::new(dtype, n, k, data), isa);
                (cold(&pack(&weight).data, bytes), &{ copy })
            }
            false => {
                let tensor = |data| Tensor::new(dtype, vec![n, k], data).expect("sized alike");
                (cold(&weight.data, bytes), &{ move |data| Linear::from_rows(tensor(data), isa) })
            }
        };
        let copies = parts.iter().cloned().map(copy).collect();
        WeightSubject { weight, copies, parts }
    }

    /// The copies in rows.
    pub fn in_rows(&self) -> &[Linear] {
        &self.copies
    }

    /// The copies of 16-bit floats packed into tiles, as loading a model packs them, and bytes a second.
    pub fn in_tiles(&self, pool: &Pool, isa: Isa) -> (Vec<Linear>, f64) {
        let (dtype, n, k) = (self.weight.dtype, self.weight.rows(), self.weight.cols());
        let size = Packed::size(dtype, n, k).expect("of 16 bits");
        let group = size / n.div_ceil(GROUP);
        let begun = Instant::now();
        let mut map = memory(size * self.parts.len());
        for (part, to) in self.parts.iter().zip(map.chunks_exact_mut(size)) {
            let rows = Tensor { data: part.clone(), ..self.weight.clone() };
            pool.rows(true, 1, Pieces::new(to, group), |g, out| pack_group(&rows, g, out));
        }
        let rate = (self.weight.data.len() * self.parts.len()) as f64 / begun.elapsed().as_secs_f64();
        let all = read_only(map);
        let copy = |i| all.slice(i * size, size).expect("as long as the map");
        let packed = (0..self.parts.len()).map(|i| Packed::new(dtype, n, k, copy(i)));
        (packed.map(|p| Linear::from_packed(p, isa)).collect(), rate)
    }
}

/// Memory on huge pages, as the weights of a model: on small ones, where each 4 KiB begin with a TLB miss, kernels that ask
/// ahead look better than they are.
fn memory(bytes: usize) -> MmapMut {
    let map = MmapMut::map_anon(bytes).expect("memory for the weights that are measured");
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage); // only speed depends on it
    map
}

fn read_only(map: MmapMut) -> Bytes {
    Bytes::from_anonymous(map.make_read_only().expect("a mapping can be made read-only"))
}

/// Copies of `data`, one behind the other, that take at least `bytes`, and one that is there in any case.
fn cold(data: &[u8], bytes: usize) -> Vec<Bytes> {
    let (stride, n) = (data.len().next_multiple_of(4096), bytes.div_ceil(data.len()).max(1));
    let mut map = memory(stride * n);
    map.chunks_exact_mut(stride).for_each(|part| part[..data.len()].copy_from_slice(data));
    let all = read_only(map);
    (0..n).map(|i| all.slice(i * stride, data.len()).expect("as long as the map")).collect()
}

/// A weight whose values are finite, and of quantised ones below one, as those of models are: larger ones are not made with f16
/// arithmetic.
fn random(dtype: DType, n: usize, k: usize) -> Tensor {
    let mut rng = Rng(0x9e37_79b9_7f4a_7c15);
    let len = n * dtype.row_bytes(k).expect("whole blocks");
    let mut data: Vec<u8> = Vec::with_capacity(len + 8);
    // Clear the exponent bits that make floats large, and NaN.
    let mask: u64 = match dtype {
        DType::F32 => 0xbf7f_ffff_bf7f_ffff,
        DType::BF16 => 0xbf7f_bf7f_bf7f_bf7f,
        DType::F16 => 0xbbff_bbff_bbff_bbff,
        _ => !0,
    };
    while data.len() < len {
        data.extend((rng.next() & mask).to_le_bytes());
    }
    data.truncate(len);
    // K-quants multiply it by up to 127.
    let scale = if dtype.block_len() > 32 { 1e-4 } else { 0.005 };
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        set_scales(dtype, block, scale, scale);
    }
    Tensor::new(dtype, vec![n, k], Bytes::copy_of(&data)).expect("sized above")
}

/// Several entries, `tokens` rows at a time.
pub(super) struct Contest<'a> {
    pool: &'a Pool,
    subject: &'a WeightSubject,
    tokens: usize,
    effort: Effort,
    same_bits: bool,
}

impl<'a> Contest<'a> {
    /// `same_bits`: the entries must not change results, and that is checked, too.
    pub fn new(
        pool: &'a Pool,
        subject: &'a WeightSubject,
        tokens: usize,
        effort: Effort,
        same_bits: bool,
    ) -> Self {
        Contest { pool, subject, tokens, effort, same_bits }
    }

    /// Seconds of a product under each of `entries`, of fine activations or not: the first quartiles.
    ///
    /// # Errors
    /// [`Error::Run`]: a wrong answer, with dtype, tokens and entries.
    pub fn run(&self, entries: &[LinearTuning], fine: bool) -> Result<Vec<f64>> {
        let made = |w: &Linear, e| {
            let w = w.clone().with_tuning(e);
            if fine { w.with_fine_activations() } else { w }
        };
        let with = |e| self.subject.copies.iter().map(|w| made(w, e)).collect();
        let sides: Vec<(String, Vec<Linear>)> =
            entries.iter().map(|&e| (format!("{e:?}"), with(e))).collect();
        let sides: Vec<(&str, &[Linear])> = sides.iter().map(|(name, copies)| (&**name, &**copies)).collect();
        self.race(&sides)
    }

    /// The same of several forms of the subject's copies, with their names.
    ///
    /// # Errors
    /// As [`Contest::run`].
    pub fn race(&self, sides: &[(&str, &[Linear])]) -> Result<Vec<f64>> {
        let (n, k, m) = (self.subject.weight.rows(), self.subject.weight.cols(), self.tokens);
        let mut rng = Rng(7);
        let x: Vec<f32> = (0..m * k).map(|_| (rng.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect();
        let (mut acts, mut out) = (Acts::default(), AlignedBuffer::zeros(m * n));
        let mut once = |w: &Linear, out: &mut [f32]| {
            acts.reset(m, k).copy_from_slice(&x);
            let begun = Instant::now();
            linear(self.pool, Mode::Fast, &mut acts, &mut [Out { w, out, ldo: n }]);
            begun.elapsed().as_secs_f64()
        };
        let mut first = Vec::new();
        for &(name, weights) in sides {
            out.fill(f32::NAN);
            once(&weights[0], &mut out);
            self.verify(&x, &out, name)?;
            if first.is_empty() {
                first = out.to_vec();
            } else if self.same_bits && first.iter().zip(&*out).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Err(self.wrong(name, &format!("other bits than {}", sides[0].0)));
            }
        }
        let begun = Instant::now();
        let mut samples = vec![Samples::default(); sides.len()];
        let mut next = 0;
        while samples[0].len() < 3 || begun.elapsed() < self.effort.per_contest(sides.len()) {
            for (&(_, weights), samples) in sides.iter().zip(&mut samples) {
                samples.push(once(&weights[next % weights.len()], &mut out));
                // Each call reads another copy, so none finds its weights in a cache.
                next += 1;
            }
        }
        Ok(samples.iter().map(Samples::typical).collect())
    }

    /// A few rows against the reference: 5% of the root of the sum of squared products, for activations of 8 bits.
    fn verify(&self, x: &[f32], out: &[f32], side: &str) -> Result<()> {
        let (w, n, k) = (&self.subject.weight, self.subject.weight.rows(), self.subject.weight.cols());
        let mut row = vec![0f32; k];
        for r in [0, 17, n / 2 + 5, n - 1] {
            reference::dequant::dequantise_row(w.dtype, w.row(r), &mut row);
            for (t, x) in x.chunks_exact(k).enumerate() {
                let products = row.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x));
                let (want, size) = products.fold((0.0, 0.0), |(sum, square), p| (sum + p, square + p * p));
                let got = f64::from(out[t * n + r]);
                if (got - want).abs().partial_cmp(&(0.05 * size.sqrt().max(1e-3))).is_none_or(|o| o.is_gt()) {
                    return Err(self.wrong(side, &format!("row {r} of token {t}: {got}, wanted {want}")));
                }
            }
        }
        match out.iter().all(|v| v.is_finite()) {
            true => Ok(()),
            false => Err(self.wrong(side, "an output was not written")),
        }
    }

    fn wrong(&self, side: &str, what: &str) -> Error {
        let dtype = self.subject.weight.dtype;
        Error::Run(format!("tune: {dtype}, {} tokens, {side}: {what}", self.tokens))
    }
}
