//! The parts of the accelerator contract that hybrid strategies stand on: rows whose attention happens elsewhere
//! (published, collected), attention split between device and host (partials, merged), pages that move between
//! them and are attended where they are.

#[path = "support/gpu.rs"]
mod gpu;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use half::bf16;
use tandem::cache::PAGE_TOKENS;
use tandem::device::accelerator::{
    Accelerator, Attend, Context, Half, LayerWeights, Limits, LinearWeight, Mailbox, NormWeight, PartialRows,
    Publish, Residual, Shape, Step, StepDesc, StepSeq, UpWeight, Workspace,
};
use tandem::device::open::on_kernels;
use tandem::device::runtime::{Buffer, DevPtr, Lane};
use tandem::model::spec::{Ffn, Norm, RopePairing};
use tandem::tensor::DType;

const LANE: Lane = Lane::Compute;
const D: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HD: usize = 64;
/// Tokens before the row that is decoded: two pages and a bit.
const PAST: usize = 75;

/// One layer's attention on a device.
struct Lab {
    accel: Arc<dyn Accelerator>,
    shape: Shape,
    limits: Limits,
    layer: LayerWeights,
    ws: Workspace,
    kv: DevPtr,
    step: DevPtr,
    pages: Vec<u32>,
    partial_sizes: [usize; 3],
    hidden: Vec<f32>,
    _buffers: Vec<Buffer>,
}

fn shape() -> Shape {
    Shape {
        d_model: D,
        n_heads: HEADS,
        n_kv_heads: KV_HEADS,
        head_dim: HD,
        d_ff: 64,
        vocab: 64,
        norm: Norm::Rms { eps: 1e-5 },
        ffn: Ffn::SwiGlu,
        attn_scale: 0.125,
        embed_scale: 1.0,
        rope_dim: HD,
        pairing: RopePairing::Half,
        window: None,
        logit_softcap: None,
        act: Half::BF16,
        kv: Half::BF16,
    }
}

impl Lab {
    fn new(accel: Arc<dyn Accelerator>) -> Lab {
        let (shape, mut rng) = (shape(), gpu::Rng::new(11));
        let limits = Limits { rows: PAST + 1, logit_rows: 1, sequences: 1, pages_per_sequence: 4 };
        let rt = accel.runtime().clone();
        let mut buffers = Vec::new();
        let mut keep = |b: Buffer| {
            let ptr = b.ptr();
            buffers.push(b);
            ptr
        };
        let zeroed = |bytes: usize| {
            let b = Buffer::new(&rt, bytes).unwrap();
            rt.fill(LANE, b.ptr(), 0, b.len()).unwrap();
            b
        };
        let from = |bytes: Vec<u8>| Buffer::from_bytes(&rt, LANE, &bytes).unwrap();
        let floats = |v: &[f32]| from(v.iter().flat_map(|x| x.to_le_bytes()).collect());
        let half_bytes = |n: usize, rng: &mut gpu::Rng, scale: f32| {
            (0..n).flat_map(|_| bf16::from_f32(rng.normal() * scale).to_le_bytes()).collect::<Vec<u8>>()
        };
        let mut matrix = |n: usize, k: usize, keep: &mut dyn FnMut(Buffer) -> DevPtr| LinearWeight {
            ptr: keep(from(half_bytes(n * k, &mut rng, 1.0 / (k as f32).sqrt()))),
            dtype: DType::BF16,
            n,
            k,
            bias: DevPtr::NULL,
        };
        let qkv = matrix(shape.qkv_dim(), D, &mut keep);
        let o = matrix(D, shape.q_dim(), &mut keep);
        let up = matrix(2 * shape.d_ff, D, &mut keep);
        let down = matrix(D, shape.d_ff, &mut keep);
        let norm = NormWeight { w: keep(floats(&[1.0; D])), b: DevPtr::NULL };
        let angle = |p: usize, i: usize| p as f64 * 10000f64.powf(-2.0 * i as f64 / HD as f64);
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..=PAST).flat_map(|p| (0..HD / 2).map(move |i| f(angle(p, i)) as f32)).collect()
        };
        let rope = [keep(floats(&table(f64::cos))), keep(floats(&table(f64::sin)))];
        let layer = LayerWeights {
            attn_norm: norm,
            qkv: vec![qkv],
            qkv_bias: DevPtr::NULL,
            q_norm: DevPtr::NULL,
            k_norm: DevPtr::NULL,
            o,
            post_attn: DevPtr::NULL,
            ffn_norm: norm,
            up: UpWeight::GateUp(up),
            down,
            post_ffn: DevPtr::NULL,
            windowed: false,
            rope,
        };
        let r = limits.rows;
        let partial_sizes = [r * HEADS * 4, r * HEADS * 4, r * shape.q_dim() * 4];
        let partial = partial_sizes.map(|b| keep(zeroed(b)));
        let scratch = accel.scratch_bytes(&shape, &limits, &[qkv, o, up, down]);
        let ws = Workspace {
            hidden: keep(zeroed(r * D * 4)),
            delta: keep(zeroed(r * D * 4)),
            x: keep(zeroed(r * D * 2)),
            qkv: keep(zeroed(r * shape.qkv_dim() * 4)),
            q: keep(zeroed(r * shape.q_dim() * 2)),
            attn: keep(zeroed(r * shape.q_dim() * 2)),
            partial: PartialRows { m: partial[0], s: partial[1], o: partial[2] },
            scratch: keep(zeroed(scratch)),
            ..Workspace::default()
        };
        let kv = keep(zeroed(6 * shape.page_bytes()));
        let step = keep(zeroed(accel.step_bytes(&shape, &limits)));
        let mut rng = gpu::Rng::new(5);
        let hidden = (0..r * D).map(|_| rng.normal()).collect();
        let pages = vec![4, 1, 5, 0];
        Lab { accel, shape, limits, layer, ws, kv, step, pages, partial_sizes, hidden, _buffers: buffers }
    }

    fn prepare(&self, first_pos: usize, n_rows: usize, attend: Attend, epoch: u32) -> Step {
        let seqs = [StepSeq { pages: &self.pages, first_pos, row0: 0, n_rows, attend }];
        let tokens = vec![0; n_rows];
        let desc = StepDesc { seqs: &seqs, tokens: &tokens, logit_rows: &[], epoch, launch_rows: n_rows };
        self.accel.prepare(LANE, &self.shape, &self.limits, &desc, self.step).unwrap()
    }

    fn cx<'a>(&'a self, step: &'a Step) -> Context<'a> {
        Context { lane: LANE, shape: &self.shape, ws: &self.ws, step }
    }

    /// The residual stream of the rows at these positions.
    fn set_hidden(&self, first_pos: usize, n_rows: usize) {
        let rows = &self.hidden[first_pos * D..(first_pos + n_rows) * D];
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.accel.runtime().upload(LANE, self.ws.hidden, &bytes).unwrap();
    }

    /// All tokens before the last, as a prompt.
    fn fill(&self) {
        self.set_hidden(0, PAST);
        let step = self.prepare(0, PAST, Attend::Here, 0);
        self.accel.qkv(&self.cx(&step), &self.layer, self.kv, Residual::None, None, 0..PAST).unwrap();
    }

    fn read(&self, from: DevPtr, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.accel.runtime().download(LANE, from, &mut out).unwrap();
        out
    }

    /// The last row's attention.
    fn attn(&self) -> Vec<f32> {
        let halves = self.read(self.ws.attn, self.shape.q_dim() * 2);
        halves.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect()
    }

    /// What decoding the last token here gives.
    fn here(&self) -> Vec<f32> {
        self.set_hidden(PAST, 1);
        let step = self.prepare(PAST, 1, Attend::Here, 0);
        let cx = self.cx(&step);
        self.accel.qkv(&cx, &self.layer, self.kv, Residual::None, None, 0..1).unwrap();
        self.accel.attend(&cx, &self.layer, self.kv).unwrap();
        self.attn()
    }

    /// Keys and values of the tokens stored, `[token][K, V][kv_head][head_dim]`, through the host's page layout.
    fn stored(&self) -> Vec<f32> {
        let n = self.pages.len();
        let rt = self.accel.runtime();
        let ids: Vec<u8> = self.pages.iter().flat_map(|p| p.to_le_bytes()).collect();
        let (list, out) = (
            Buffer::from_bytes(rt, LANE, &ids).unwrap(),
            Buffer::new(rt, n * self.shape.page_bytes()).unwrap(),
        );
        let step = self.prepare(0, 1, Attend::Here, 0);
        self.accel.gather_pages(&self.cx(&step), self.kv, list.ptr(), n, out.ptr()).unwrap();
        let bytes = self.read(out.ptr(), n * self.shape.page_bytes());
        let at = |i: usize| bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32();
        let half = PAGE_TOKENS * HD;
        let mut all = Vec::new();
        for t in 0..n * PAGE_TOKENS {
            let (page, slot) = (t / PAGE_TOKENS, t % PAGE_TOKENS);
            for value in [false, true] {
                for h in 0..KV_HEADS {
                    for d in 0..HD {
                        let head = (page * KV_HEADS + h) * 2 * half;
                        // The layouts of tandem::cache.
                        let k = ((slot / 16) * (HD / 2) + d / 2) * 32 + (slot % 16) * 2 + d % 2;
                        let v = ((slot / 2) * HD + d) * 2 + slot % 2;
                        all.push(at(head + if value { half + v } else { k }));
                    }
                }
            }
        }
        all
    }
}

/// (m, s, o) of one query over tokens, for every head.
fn attend(
    q: &[f32],
    kv: &[f32],
    tokens: std::ops::Range<usize>,
    scale: f32,
) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let (mut ms, mut ss, mut os) = (Vec::new(), Vec::new(), Vec::new());
    for h in 0..HEADS {
        let g = h / (HEADS / KV_HEADS);
        let at = |t: usize, value: usize, d: usize| f64::from(kv[((t * 2 + value) * KV_HEADS + g) * HD + d]);
        let score = |t: usize| {
            (0..HD).map(|d| f64::from(q[h * HD + d]) * at(t, 0, d)).sum::<f64>() * f64::from(scale)
        };
        let m = tokens.clone().map(score).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = tokens.clone().map(|t| (score(t) - m).exp()).collect();
        ms.push(m as f32);
        ss.push(weights.iter().sum::<f64>() as f32);
        for d in 0..HD {
            os.push(tokens.clone().zip(&weights).map(|(t, w)| w * at(t, 1, d)).sum::<f64>() as f32);
        }
    }
    (ms, ss, os)
}

fn labs() -> Vec<Lab> {
    let on = |rt: Arc<dyn tandem::device::runtime::Runtime>| on_kernels(rt).expect("a runtime with kernels");
    let all = gpu::runtimes().into_iter().filter(|rt| {
        let bf16 = rt.info().sm >= 80;
        if !bf16 {
            println!("skipped: {} has no bfloat16", rt.info().name);
        }
        bf16
    });
    all.map(on).map(Lab::new).collect()
}

/// Values of magnitude about 1, q and the probabilities rounded to bf16 on one side only: 2⁻⁹ of Σ p·|v| each, half an
/// ulp of the bf16 output, and the rounding of k and v where one side has them in f32: 8 roundings of 2⁻⁹ at most.
fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    let most = want.iter().fold(0f32, |m, x| m.max(x.abs()));
    assert!(most > 0.01, "{what}: nothing to compare");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 8.0 / 512.0 * most, "{what}, element {i}: {g}, wanted {w}");
    }
}

#[test]
fn rows_attended_elsewhere_come_back_as_if_attended_here() {
    for lab in labs() {
        lab.fill();
        let want = lab.here();
        let rt = lab.accel.runtime().clone();
        let rows = 2;
        let memory = rt.pinned(Mailbox::bytes(&lab.shape, rows)).unwrap();
        let mailbox = Mailbox { memory, rows };
        let stored = lab.stored();
        for layer in [0u32, 7] {
            lab.set_hidden(PAST, 1);
            let step = lab.prepare(PAST, 1, Attend::Elsewhere, 100);
            let cx = lab.cx(&step);
            let publish = Publish { mailbox: &mailbox, epoch_add: layer };
            lab.accel.qkv(&cx, &lab.layer, lab.kv, Residual::None, Some(publish), 0..1).unwrap();
            // SAFETY: the first word of the mailbox, which lives; the device only stores whole words to it.
            let epoch = unsafe { AtomicU32::from_ptr(mailbox.memory.host().cast()) };
            let began = Instant::now();
            while epoch.load(Ordering::Acquire) != 100 + layer {
                assert!(
                    began.elapsed() < Duration::from_secs(30),
                    "epoch {:?}",
                    epoch.load(Ordering::Acquire)
                );
                std::thread::yield_now();
            }
            let width = lab.shape.qkv_dim();
            let base = mailbox.memory.host().wrapping_add(mailbox.row_at(&lab.shape, 0)).cast::<f32>();
            // SAFETY: the device has published these floats (the epoch was acquired) and writes them no more.
            let row: Vec<f32> = unsafe { std::slice::from_raw_parts(base, width) }.to_vec();
            let q = &row[..lab.shape.q_dim()];
            let mut kv = stored[..PAST * 2 * KV_HEADS * HD].to_vec();
            kv.extend(&row[lab.shape.q_dim()..]);
            let (_, s, o) = attend(q, &kv, 0..PAST + 1, lab.shape.attn_scale);
            let out = mailbox.memory.host().wrapping_add(mailbox.out_at(&lab.shape, 0)).cast::<f32>();
            for (i, x) in o.iter().enumerate() {
                // SAFETY: inside the mailbox; the device reads it only after `collect`.
                unsafe { out.add(i).write(x / s[i / HD]) };
            }
            rt.fill(LANE, lab.ws.attn, 0xff, lab.shape.q_dim() * 2).unwrap();
            lab.accel.collect(&cx, &mailbox).unwrap();
            assert_close("collected", &lab.attn(), &want);
        }
    }
}

#[test]
fn attention_split_between_host_and_device_is_attention() {
    for lab in labs() {
        lab.fill();
        let want = lab.here();
        let rt = lab.accel.runtime().clone();
        let stored = lab.stored();
        for from in [PAGE_TOKENS, 2 * PAGE_TOKENS] {
            lab.set_hidden(PAST, 1);
            for (ptr, bytes) in
                [lab.ws.partial.m, lab.ws.partial.s, lab.ws.partial.o].iter().zip(lab.partial_sizes)
            {
                rt.fill(LANE, *ptr, 0xff, bytes).unwrap();
            }
            rt.fill(LANE, lab.ws.attn, 0xff, lab.shape.q_dim() * 2).unwrap();
            let step = lab.prepare(PAST, 1, Attend::From { from }, 0);
            let cx = lab.cx(&step);
            lab.accel.qkv(&cx, &lab.layer, lab.kv, Residual::None, None, 0..1).unwrap();
            lab.accel.attend(&cx, &lab.layer, lab.kv).unwrap();
            let q = lab.read(lab.ws.q, lab.shape.q_dim() * 2);
            let q: Vec<f32> = q.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
            let (m, s, o) = attend(&q, &stored, 0..from, lab.shape.attn_scale);
            let up = |v: &[f32]| {
                let bytes: Vec<u8> = v.iter().flat_map(|x| x.to_le_bytes()).collect();
                Buffer::from_bytes(&rt, LANE, &bytes).unwrap()
            };
            let (m, s, o) = (up(&m), up(&s), up(&o));
            let other = PartialRows { m: m.ptr(), s: s.ptr(), o: o.ptr() };
            lab.accel.merge(&cx, &other).unwrap();
            assert_close(&format!("merged at {from}"), &lab.attn(), &want);
        }
    }
}

#[test]
fn pages_that_went_to_the_host_and_came_back_are_the_same_pages() {
    for lab in labs() {
        lab.fill();
        let want = lab.here();
        let rt = lab.accel.runtime().clone();
        let n = lab.pages.len();
        let ids: Vec<u8> = lab.pages.iter().flat_map(|p| p.to_le_bytes()).collect();
        let list = Buffer::from_bytes(&rt, LANE, &ids).unwrap();
        // Mapped memory: the host attends over these pages in place.
        let host = rt.pinned(n * lab.shape.page_bytes()).unwrap();
        let step = lab.prepare(0, 1, Attend::Here, 0);
        let cx = lab.cx(&step);
        lab.accel.gather_pages(&cx, lab.kv, list.ptr(), n, host.device()).unwrap();
        rt.fill(LANE, lab.kv, 0xff, 6 * lab.shape.page_bytes()).unwrap();
        lab.accel.scatter_pages(&cx, lab.kv, list.ptr(), n, host.device()).unwrap();
        assert_eq!(lab.here(), want);
    }
}
