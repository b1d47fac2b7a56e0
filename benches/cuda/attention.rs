//! Paged attention: decode (`attention_decode.cu`) and prefill (`attention_prefill.cu`).

use tandem::Result;
use tandem::cache::KvType;
use tandem::device::kernels::attention::{
    AttentionPlan, AttentionShape, DecodeAttention, DecodeWorkspace, PrefillAttention, PrefillKernel, RowRun,
    decode_attention, decode_item_bytes, prefill_attention, prefill_item_bytes,
};
use tandem::device::{Buffer, DevPtr, Lane, PartialRows};
use tandem::tensor::Half;

use crate::data;
use crate::measure::{Bench, Work};

const PAGE: usize = 32;

/// Name, query heads, KV heads, head size.
type Heads = (&'static str, usize, usize, usize);

const LLAMA_8B: Heads = ("llama-3-8b", 32, 8, 128);
const SMOLLM2_135M: Heads = ("smollm2-135m", 9, 3, 64);

/// `batch` sequences of `tokens` tokens, of which the last `rows` are queries.
#[derive(Clone, Copy)]
struct Case {
    heads: Heads,
    kv: KvType,
    batch: usize,
    tokens: usize,
    rows: usize,
}

impl Case {
    fn shape(&self) -> AttentionShape {
        let (_, n_heads, n_kv_heads, head_dim) = self.heads;
        let scale = (head_dim as f32).powf(-0.5);
        AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            scale,
            softcap: None,
            kv: self.kv,
            out: self.kv.half(),
        }
    }
    fn name(&self) -> String {
        format!("{} batch={} tokens={} rows={}", self.heads.0, self.batch, self.tokens, self.rows)
    }
    fn pages(&self) -> usize {
        self.tokens.div_ceil(PAGE)
    }
    /// The page of a sequence's n-th page, scattered.
    fn page(&self, sequence: usize, n: usize) -> usize {
        let pages = self.batch * self.pages();
        let stride = (1..).map(|i| 7919 + i).find(|s| gcd(*s, pages) == 1).expect("some number is coprime");
        (sequence * self.pages() + n) * stride % pages
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Keys (or values) of that many heads in pages, of noise: rows of tokens, and of q8 then their scales, which differ.
fn parts(kv: KvType, n: usize, d: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(n * kv.part_bytes(d));
    for part in 0..n {
        let noise = (part * PAGE * d..(part + 1) * PAGE * d).map(|at| data::noise(2, at));
        if kv.is_scaled() {
            bytes.extend(noise.map(|x| ((x * 127.0) as i8).cast_unsigned()));
            bytes.extend((0..PAGE).flat_map(|token| ((1 + token % 4) as f32 / 400.0).to_le_bytes()));
        } else {
            bytes.extend(noise.flat_map(|x| data::to_bits(kv.half(), x).to_le_bytes()));
        }
    }
    bytes
}

/// An element of the first of these parts.
fn element_of(kv: KvType, part: &[u8], d: usize, token: usize, i: usize) -> f64 {
    let at = token * d + i;
    if kv.is_scaled() {
        f64::from(part[at].cast_signed()) * f64::from((1 + token % 4) as f32 / 400.0)
    } else {
        data::value(kv.half(), u16::from_le_bytes([part[2 * at], part[2 * at + 1]]))
    }
}

struct Operands {
    q: Vec<u16>,
    kv: Vec<u8>,
    q_buffer: Buffer,
    kv_copies: Vec<Buffer>,
    table: Buffer,
    out: Buffer,
}

impl Operands {
    fn new(bench: &Bench, c: &Case) -> Result<Operands> {
        let q_dim = c.heads.1 * c.heads.3;
        let q = data::halves(c.kv.half(), c.batch * c.rows * q_dim, 1, 1.0);
        let kv = parts(c.kv, c.batch * c.pages() * c.heads.2 * 2, c.heads.3);
        let table: Vec<u32> = (0..c.batch)
            .flat_map(|s| (0..c.pages()).map(move |n| (s, n)))
            .map(|(s, n)| c.page(s, n) as u32)
            .collect();
        let upload = |bytes: &[u8]| Buffer::from_bytes(&bench.rt, Lane::Compute, bytes);
        Ok(Operands {
            q_buffer: upload(data::bytes_of(&q))?,
            kv_copies: (0..bench.copies(kv.len())).map(|_| upload(&kv)).collect::<Result<_>>()?,
            table: upload(data::bytes_of(&table))?,
            out: Buffer::new(&bench.rt, q.len() * 2)?,
            q,
            kv,
        })
    }

    /// A sample of rows and heads against f64. The bound is the one of tests/gpu/kernels/attention/.
    fn check(&self, bench: &Bench, c: &Case, kernel: &str) -> Result<()> {
        let (_, n_heads, n_kv_heads, d) = c.heads;
        let mut bytes = vec![0; self.q.len() * 2];
        bench.rt.download(Lane::Compute, self.out.ptr(), &mut bytes)?;
        let half_ulp = match c.kv.half() {
            Half::F16 => 2f64.powi(-11),
            Half::BF16 => 2f64.powi(-8),
        };
        let unit = 2f64.powi(-24);
        for at in data::sample(c.batch * c.rows * n_heads, if bench.test { usize::MAX } else { 20 }) {
            let (row, head) = (at / n_heads, at % n_heads);
            let (sequence, seen) = (row / c.rows, c.tokens - c.rows + row % c.rows + 1);
            let element = |token: usize, v: usize, i: usize| {
                let place =
                    (c.page(sequence, token / PAGE) * n_kv_heads + head / (n_heads / n_kv_heads)) * 2 + v;
                element_of(c.kv, &self.kv[place * c.kv.part_bytes(d)..], d, token % PAGE, i)
            };
            let scale = f64::from(c.shape().scale);
            let mut largest_size = 0f64;
            let scores: Vec<f64> = (0..seen)
                .map(|t| {
                    let p = (0..d).map(|i| data::value(c.kv.half(), self.q[at * d + i]) * element(t, 0, i));
                    let (sum, size) = p.fold((0.0, 0.0), |(s, a): (f64, f64), p| (s + p, a + p.abs()));
                    largest_size = largest_size.max(scale * size);
                    scale * sum
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            let tiles = seen as f64 / 16.0 + 8.0;
            let exponent = (2.0 * d as f64 + 10.0) * unit * largest_size;
            let weight_error = exponent.exp_m1() + (4.0 + 5.0 * tiles) * unit + half_ulp;
            for i in 0..d {
                let (mut out, mut size, mut plain) = (0.0, 0.0, 0.0);
                for (t, w) in weights.iter().enumerate() {
                    let v = element(t, 1, i);
                    out += w * v / total;
                    size += w * v.abs() / total;
                    plain += v.abs();
                }
                // Of q8 a weight is rounded with its scale, of which the largest is four times the least.
                let scales = if c.kv.is_scaled() { 4.0 } else { 1.0 };
                let f16 = c.kv.half() == Half::F16;
                let flushed = if f16 { scales * 2.0 * 2f64.powi(-25) * plain / total } else { 0.0 };
                let error = 2.0 * (weight_error + 2.0 * (seen as f64 + tiles) * unit) * size + flushed;
                let tolerance = error + half_ulp * (out.abs() + error) + 2f64.powi(-25);
                let place = 2 * (at * d + i);
                let got = data::value(c.kv.half(), u16::from_le_bytes([bytes[place], bytes[place + 1]]));
                assert!(
                    (got - out).abs() <= tolerance,
                    "{kernel} on {}: row {row} head {head} [{i}] is {got}, wanted {out} within {tolerance:e}",
                    c.name()
                );
            }
        }
        Ok(())
    }
}

fn no_partials() -> PartialRows {
    PartialRows::default()
}

pub fn decode(bench: &mut Bench) -> Result<()> {
    let case = |heads, batch, tokens| Case { heads, kv: KvType::BF16, batch, tokens, rows: 1 };
    let cases = if bench.test {
        vec![case(("tiny", 4, 2, 64), 2, 300)]
    } else {
        vec![
            case(LLAMA_8B, 1, 8192),
            case(LLAMA_8B, 16, 256),
            case(LLAMA_8B, 16, 2048),
            case(LLAMA_8B, 64, 2048),
            case(SMOLLM2_135M, 1, 2048),
            case(SMOLLM2_135M, 64, 2048),
        ]
    };
    let both = |c: Case| [c, Case { kv: KvType::Q8, ..c }];
    for c in cases.into_iter().flat_map(both) {
        let shape = c.shape();
        let kernel = format!("decode_attention_{}_d{}", c.kv.name(), shape.head_dim);
        if !bench.rt.has_kernel(&kernel) || !bench.wants("decode-attention", &kernel, &c.name()) {
            continue;
        }
        let o = Operands::new(bench, &c)?;
        let rows: Vec<RowRun> = (0..c.batch)
            .map(|s| RowRun {
                row0: s as u32,
                n_rows: 1,
                first_pos: c.tokens as u32 - 1,
                from: 0,
                to: u32::MAX,
                page: (s * c.pages()) as u32,
                partial: None,
            })
            .collect();
        let plan = AttentionPlan::new(&rows, 0..0, None, PrefillKernel::Mma.queries());
        let upload = |bytes: &[u8]| Buffer::from_bytes(&bench.rt, Lane::Compute, bytes);
        let items = upload(decode_item_bytes(&plan.decode))?;
        let count = upload(&(plan.decode.len() as u32).to_le_bytes())?;
        let memory = upload(&vec![0; DecodeWorkspace::bytes(&shape, c.batch, plan.splits)])?;
        let rt = bench.rt.clone();
        let mut launch = |i: usize| {
            let args = DecodeAttention {
                q: o.q_buffer.ptr(),
                kv: o.kv_copies[i % o.kv_copies.len()].ptr(),
                page_table: o.table.ptr(),
                items: items.ptr(),
                n_items: count.ptr(),
                max_items: plan.decode.len(),
                sinks: DevPtr::NULL,
                out: o.out.ptr(),
                partial: no_partials(),
                workspace: DecodeWorkspace::at(memory.ptr(), &shape, c.batch, plan.splits),
            };
            decode_attention(&*rt, Lane::Compute, &shape, &args)
        };
        launch(0)?;
        o.check(bench, &c, &kernel)?;
        let work = Work {
            family: "decode-attention",
            shape: c.name(),
            bytes: (c.batch * c.tokens * shape.n_kv_heads * 2 * c.kv.head_bytes(shape.head_dim)
                + o.q.len() * 4) as f64,
            flops: 4.0 * (c.batch * c.tokens * shape.n_heads * shape.head_dim) as f64,
            peak: None,
            kernel,
        };
        bench.run(work, &mut launch)?;
    }
    Ok(())
}

pub fn prefill(bench: &mut Bench) -> Result<()> {
    let case = |heads, rows| Case { heads, kv: KvType::BF16, batch: 1, tokens: rows, rows };
    let cases = if bench.test {
        vec![case(("tiny", 2, 1, 64), 70)]
    } else {
        vec![case(LLAMA_8B, 512), case(LLAMA_8B, 2048), case(LLAMA_8B, 8192), case(SMOLLM2_135M, 2048)]
    };
    let both = |c: Case| [c, Case { kv: KvType::Q8, ..c }];
    for c in cases.into_iter().flat_map(both) {
        let shape = c.shape();
        let best = PrefillKernel::best(&*bench.rt, &shape);
        let kernel = best.name(&shape);
        if !bench.rt.has_kernel(&kernel) || !bench.wants("prefill-attention", &kernel, &c.name()) {
            continue;
        }
        let o = Operands::new(bench, &c)?;
        let rows = RowRun {
            row0: 0,
            n_rows: c.rows as u32,
            first_pos: 0,
            from: 0,
            to: u32::MAX,
            page: 0,
            partial: None,
        };
        let plan = AttentionPlan::new(&[rows], 0..0, None, best.queries());
        let upload = |bytes: &[u8]| Buffer::from_bytes(&bench.rt, Lane::Compute, bytes);
        let items = upload(prefill_item_bytes(&plan.prefill))?;
        let count = upload(&(plan.prefill.len() as u32).to_le_bytes())?;
        let rt = bench.rt.clone();
        let mut launch = |i: usize| {
            let args = PrefillAttention {
                kernel: best,
                n_pages: c.batch * c.pages(),
                q: o.q_buffer.ptr(),
                kv: o.kv_copies[i % o.kv_copies.len()].ptr(),
                page_table: o.table.ptr(),
                items: items.ptr(),
                n_items: count.ptr(),
                max_items: plan.prefill.len(),
                window: None,
                sinks: DevPtr::NULL,
                out: o.out.ptr(),
                partial: no_partials(),
            };
            prefill_attention(&*rt, Lane::Compute, &shape, &args)
        };
        launch(0)?;
        o.check(bench, &c, &kernel)?;
        let peak = ["peak_wgmma", "peak_mma"].map(|p| format!("{p}_{}", c.kv.half().name()));
        let peak = peak.iter().find(|p| bench.matrix.contains_key(p.as_str())).cloned();
        let pairs = (c.rows * (c.rows + 1) / 2) as f64;
        let work = Work {
            family: "prefill-attention",
            shape: c.name(),
            bytes: (c.tokens * shape.n_kv_heads * 2 * c.kv.head_bytes(shape.head_dim) + o.q.len() * 4) as f64,
            flops: 4.0 * pairs * (shape.n_heads * shape.head_dim) as f64,
            peak: peak.as_deref(),
            kernel,
        };
        bench.run(work, &mut launch)?;
    }
    Ok(())
}
