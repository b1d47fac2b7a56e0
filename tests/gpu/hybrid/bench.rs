//! A layer, its pages and two sequences on an accelerator, with the memory of two sub-batches.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::gpu::memory::{LANE, bytes, decode, encode, epsilon};
use crate::support::gpu::{self, Rng};
use tandem::device::emulated::PageShape;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::device::{
    Accelerator, Attend, AttnTables, Buffer, DevPtr, EmbedWeight, FeedForward, FfnWeights, LayerPages,
    LayerWeights, Limits, LinearSource, LinearWeight, Mailbox, NormWeight, Publish, Published, Residual,
    RowOp, RowSpan, Runtime, Shape, Step, StepContext, StepDesc, StepSeq, SubBatch, SubBatches, UpWeight,
    Workspace, on_kernels,
};
use tandem::host::Pool;
use tandem::model::{Ffn, Norm, RopePairing};
use tandem::tensor::{Bytes, DType, Half, Tensor};

pub const PAGE: usize = 32;
pub const PAGES: usize = 8;
pub const EPOCH: u32 = 40;

pub fn accelerators() -> Vec<(String, Arc<dyn Accelerator>)> {
    let kernels = gpu::runtimes()
        .into_iter()
        .map(|rt| (rt.info().name.clone(), on_kernels(rt).expect("a runtime with kernels")));
    let options = EmulatedOptions { jitter: Some(2), ..Default::default() };
    let plain = gpu::wanted("emulated").then(|| {
        let rt = Arc::new(EmulatedRuntime::new(options).expect("it starts"));
        let accel: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(rt));
        ("plain functions".to_owned(), accel)
    });
    kernels.chain(plain).collect()
}

pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

pub fn u16s(bytes: &[u8]) -> Vec<u16> {
    bytes.as_chunks().0.iter().map(|b| u16::from_ne_bytes(*b)).collect()
}

/// A layer on an accelerator, and sequences A (70 tokens) and B (33) in its pages.
pub struct Bench {
    pub accel: Arc<dyn Accelerator>,
    pub rt: Arc<dyn Runtime>,
    pub shape: Shape,
    pub limits: Limits,
    /// The first sub-batch's.
    pub ws: Workspace,
    pub subs: Vec<SubBatch>,
    pub layer: LayerWeights,
    pub embed: EmbedWeight,
    pub out_norm: NormWeight,
    pub head: LinearWeight,
    pub kv: DevPtr,
    pub mailbox: Mailbox,
    /// Of the layer's heads, or none.
    sinks: &'static [f32],
    /// Keeps all memory.
    _buffers: Vec<Buffer>,
}

/// Unnormalised attention of a head, and what its rounding errors are in proportion to.
pub struct Oracle {
    pub m: f64,
    pub s: f64,
    pub o: Vec<f64>,
    /// Σ e^(e−m)·|v|.
    size: Vec<f64>,
    /// Σ |v|.
    all: Vec<f64>,
    /// The largest scale·Σ |q·k|.
    largest: f64,
}

/// Sinks among the scores, and one far above them.
const SINKS: [f32; 4] = [-2.0, 0.5, 3.0, 20.0];

/// Sequences: pages, tokens before the decode step.
pub const A: (&[u32], usize) = (&[5, 0, 3], 70);
pub const B: (&[u32], usize) = (&[2, 6], 33);

impl Bench {
    pub fn new(accel: Arc<dyn Accelerator>, kv: Half, window: Option<usize>) -> Bench {
        let rt = accel.runtime().clone();
        let shape = Shape {
            d_model: 64,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 64,
            d_ff: 128,
            vocab: 96,
            norm: Norm::Rms { eps: 1e-5 },
            qk_norm: None,
            ffn: Ffn::SwiGlu,
            experts: None,
            attn_scale: 0.125,
            attn_softcap: None,
            embed_scale: 1.0,
            rope_dim: 64,
            pairing: RopePairing::Half,
            window,
            logit_softcap: None,
            act: Half::F16,
            kv: kv.into(),
            exact: None,
        };
        accel.check(&shape).unwrap();
        // With one of the windows.
        let sinks: &[f32] = if window == Some(45) { &SINKS } else { &[] };
        let limits = Limits { rows: 128, logit_rows: 4, sequences: 4, pages_per_sequence: 4 };
        let mut buffers = Vec::new();
        let mut memory = |bytes: usize| {
            let b = Buffer::new(&rt, bytes).unwrap();
            rt.fill(LANE, b.ptr(), 0, b.len()).unwrap();
            buffers.push(b);
            buffers.last().unwrap().ptr()
        };
        let mut rng = Rng::new(11);
        let mut normal =
            |n: usize, scale: f32| -> Vec<f32> { (0..n).map(|_| scale * rng.normal()).collect() };
        let mut floats = |x: &[f32]| {
            let ptr = memory(4 * x.len());
            rt.upload(LANE, ptr, bytes(x)).unwrap();
            ptr
        };
        let (d, qd, width) = (shape.d_model, shape.q_dim(), shape.qkv_dim());
        let tensor = |n: usize, x: &[f32]| {
            let halves: Vec<u8> = x.iter().flat_map(|&x| encode(Half::F16, x).to_ne_bytes()).collect();
            Tensor::new(DType::F16, vec![n, x.len() / n], Bytes::copy_of(&halves)).unwrap()
        };
        let norm = NormWeight { w: floats(&normal(d, 1.0)), b: DevPtr::NULL };
        let angles = |f: fn(f64) -> f64| -> Vec<f32> {
            let at = |p: usize, i: usize| f(p as f64 * 10_000f64.powf(-(i as f64) / 32.0)) as f32;
            (0..128).flat_map(|p| (0..32).map(move |i| at(p, i))).collect()
        };
        let rope = [floats(&angles(f64::cos)), floats(&angles(f64::sin))];
        let sinks_at = if sinks.is_empty() { DevPtr::NULL } else { floats(sinks) };
        let pool = Pool::new(1);
        let mut pack = |source: LinearSource<'_>| {
            let mut packed = vec![0; accel.packed_bytes(&source, shape.act).unwrap()];
            accel.pack(&source, shape.act, &pool, &mut packed);
            let ptr = memory(packed.len());
            rt.upload(LANE, ptr, &packed).unwrap();
            LinearWeight { ptr, dtype: DType::F16, n: source.n(), k: source.k(), bias: DevPtr::NULL }
        };
        let mut ffn = || tensor(shape.d_ff, &normal(shape.d_ff * d, 0.1));
        let (gate, up) = (ffn(), ffn());
        let up = pack(LinearSource::GateUp(&gate, &up));
        let mut matrix = |t: &Tensor| pack(LinearSource::Rows(&[t]));
        // Queries and keys of size 1 or so, so that some scores stand out.
        let qkv = matrix(&tensor(width, &normal(width * d, 0.15)));
        let o = matrix(&tensor(d, &normal(d * qd, 0.05)));
        let down = matrix(&tensor(d, &normal(d * shape.d_ff, 0.1)));
        let head = matrix(&tensor(shape.vocab, &normal(shape.vocab * d, 0.2)));
        let layer = LayerWeights {
            attn_norm: norm,
            qkv: vec![qkv],
            qkv_bias: DevPtr::NULL,
            q_norm: DevPtr::NULL,
            k_norm: DevPtr::NULL,
            o,
            post_attn: DevPtr::NULL,
            ffn_norm: norm,
            ffn: FeedForward::Dense(FfnWeights { up: UpWeight::GateUp(up), down }),
            post_ffn: DevPtr::NULL,
            windowed: window.is_some(),
            tables: AttnTables { rope, sinks: sinks_at },
        };
        let table = tensor(shape.vocab, &normal(shape.vocab * d, 1.0));
        let table_ptr = memory(table.data.len());
        rt.upload(LANE, table_ptr, &table.data).unwrap();
        let embed = EmbedWeight {
            table: table_ptr,
            dtype: DType::F16,
            packed: false,
            positions: DevPtr::NULL,
            positions_dtype: DType::F16,
            position_offset: 0,
            n_positions: 0,
        };
        let plan = SubBatches::plan(&*accel, &shape, &[limits; 2], &[qkv, o, up, down, head], false, true);
        let subs = plan.at(memory(plan.bytes()));
        let kv = memory(PAGES * shape.page_bytes());
        let mailbox = Mailbox { memory: rt.pinned(Mailbox::bytes(&shape, 4)).unwrap(), rows: 4 };
        rt.synchronize_all().unwrap();
        let ws = subs[0].ws;
        Bench {
            accel,
            rt,
            shape,
            limits,
            ws,
            subs,
            layer,
            embed,
            out_norm: norm,
            head,
            kv,
            mailbox,
            sinks,
            _buffers: buffers,
        }
    }

    pub fn download(&self, ptr: DevPtr, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.rt.download(LANE, ptr, &mut out).unwrap();
        out
    }

    pub fn span(&self, span: RowSpan) -> Vec<u8> {
        self.download(span.ptr, span.bytes)
    }

    pub fn publish(&self, what: Published, epoch_add: u32) -> Publish<'_> {
        Publish { mailbox: &self.mailbox, epoch_add, what }
    }

    /// A step in a sub-batch.
    pub fn prepare(&self, sub: usize, desc: &StepDesc<'_>) -> tandem::Result<Step> {
        self.accel.prepare(LANE, &self.shape, &self.limits, desc, self.subs[sub].lists)
    }

    pub fn desc<'a>(&self, seqs: &'a [StepSeq<'a>], tokens: &'a [u32]) -> StepDesc<'a> {
        let launch_rows = self.accel.row_bucket(tokens.len());
        StepDesc { seqs, tokens, logit_rows: &[], cuts: &[], epoch: EPOCH, launch_rows }
    }

    pub fn context<'a>(&'a self, sub: usize, step: &'a Step) -> StepContext<'a> {
        StepContext { lane: LANE, shape: &self.shape, ws: &self.subs[sub].ws, step }
    }

    /// The layer's projections, in front of which nothing is added.
    pub fn qkv<'a>(&'a self, publish: Option<Publish<'a>>) -> RowOp<'a> {
        RowOp::Qkv { layer: &self.layer, kv: self.kv, residual: Residual::None, publish }
    }

    pub fn logits(&self, residual: Residual) -> RowOp<'_> {
        RowOp::Logits { norm: self.out_norm, head: &self.head, residual }
    }

    /// Embeds, projects and attends rows of these sequences, in the first sub-batch.
    pub fn run(&self, seqs: &[StepSeq<'_>], tokens: &[u32], then: impl Fn(&StepContext<'_>)) {
        let step = self.prepare(0, &self.desc(seqs, tokens)).unwrap();
        let (accel, cx) = (&self.accel, self.context(0, &step));
        accel.enqueue(&cx, RowOp::Embed(&self.embed), cx.all()).unwrap();
        let publish = self.publish(Published::Qkv, 3);
        accel.enqueue(&cx, self.qkv(Some(publish)), cx.all()).unwrap();
        accel.enqueue(&cx, RowOp::Attend { layer: &self.layer, kv: self.kv }, cx.all()).unwrap();
        then(&cx);
        self.rt.synchronize_all().unwrap();
    }

    pub fn prefill(&self) {
        for ((pages, n), salt) in [(A, 3), (B, 8)] {
            let tokens: Vec<u32> = (0..n as u32).map(|i| (i * i * 7 + i * salt) % 96).collect();
            let seq = StepSeq { pages, first_pos: 0, row0: 0, n_rows: n, attend: Attend::Here };
            self.run(&[seq], &tokens, |_| ());
        }
    }

    /// One more token of a sequence, in row `row0`.
    pub fn one((pages, n): (&'static [u32], usize), row0: usize, attend: Attend) -> StepSeq<'static> {
        let pages = &pages[attend.first_token() / PAGE..];
        StepSeq { pages, first_pos: n, row0, n_rows: 1, attend }
    }

    /// One more token of both sequences, B's first; A is attended as told.
    pub fn decode(&self, attend: Attend, then: impl Fn(&StepContext<'_>)) {
        self.run(&[Bench::one(B, 0, Attend::Here), Bench::one(A, 1, attend)], &[17, 71], then);
    }

    /// Row `row` of the attention's output, as bits.
    pub fn attn(&self, row: usize) -> Vec<u16> {
        let bytes = 2 * self.shape.q_dim();
        u16s(&self.download(self.ws.attn.add(row * bytes), bytes))
    }

    pub fn q(&self, row: usize) -> Vec<u16> {
        let bytes = 2 * self.shape.q_dim();
        u16s(&self.download(self.ws.q.add(row * bytes), bytes))
    }

    pub fn pages(&self) -> Vec<u16> {
        u16s(&self.download(self.kv, PAGES * self.shape.page_bytes()))
    }

    /// The layer's pages, and `host` as their other side.
    pub fn pages_at(&self, host: DevPtr) -> LayerPages {
        LayerPages { device: self.kv, host }
    }

    pub fn page_shape(&self) -> PageShape {
        PageShape::of(&self.shape)
    }

    /// In f64: A's query `q` in one head over some tokens.
    pub fn attend(&self, pages: &[u16], q: &[u16], head: usize, tokens: Range<usize>) -> Oracle {
        let (hd, page) = (self.shape.head_dim, self.page_shape());
        let kv_head = head * self.shape.n_kv_heads / self.shape.n_heads;
        let at = |t: usize, value: bool| {
            let at = (A.0[t / PAGE] as usize * page.bytes() + page.at(kv_head, value, t % PAGE)) / 2;
            pages[at..at + hd].iter().map(|&x| decode(self.shape.kv.half(), x))
        };
        let q: Vec<f64> = q[head * hd..][..hd].iter().map(|&x| decode(self.shape.kv.half(), x)).collect();
        let scale = self.shape.attn_scale as f64;
        let score =
            |t: usize, f: fn(f64) -> f64| scale * at(t, false).zip(&q).map(|(k, q)| f(k * q)).sum::<f64>();
        let scores: Vec<f64> = tokens.clone().map(|t| score(t, |x| x)).collect();
        let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let largest = tokens.clone().map(|t| score(t, f64::abs)).fold(0.0, f64::max);
        let (mut s, mut o, mut size, mut all) = (0.0, vec![0.0; hd], vec![0.0; hd], vec![0.0; hd]);
        for (t, e) in tokens.zip(scores) {
            let p = (e - m).exp();
            s += p;
            for (d, v) in at(t, true).enumerate() {
                o[d] += p * v;
                size[d] += p * v.abs();
                all[d] += v.abs();
            }
        }
        Oracle { m, s, o, size, all, largest }
    }

    /// A's attention at its decode step in f64, and how far off it may be: derived in tests/gpu/kernels/attention/.
    pub fn expected(&self, pages: &[u16], q: &[u16]) -> Vec<(f64, f64)> {
        let first = self.shape.window.map_or(0, |w| A.1 + 1 - w);
        let (n, tiles, hd, u) = ((A.1 + 1 - first) as f64, 8.0, self.shape.head_dim as f64, 2f64.powi(-24));
        let mut out = Vec::new();
        for head in 0..self.shape.n_heads {
            let mut w = self.attend(pages, q, head, first..A.1 + 1);
            if let Some(&sink) = self.sinks.get(head) {
                let sink = f64::from(sink);
                w.s += (sink - w.m).exp();
                w.largest = w.largest.max(sink.abs());
            }
            let score = ((2.0 * hd + 8.0) + 2.0) * u * w.largest;
            let weight = score.exp_m1() + (4.0 + 5.0 * (tiles + 8.0)) * u + epsilon(self.shape.kv.half());
            let relative = 2.0 * (weight + 2.0 * (n + tiles + 8.0) * u);
            for d in 0..w.o.len() {
                let want = w.o[d] / w.s;
                let small = 2.0 * 2f64.powi(-25) * w.all[d] / w.s;
                let error = relative * w.size[d] / w.s + small;
                out.push((want, error + epsilon(self.shape.act) * (want.abs() + error) + 2f64.powi(-25)));
            }
        }
        out
    }

    pub fn assert_attention(&self, name: &str, got: &[u16], want: &[(f64, f64)]) {
        for (i, (&got, &(want, error))) in got.iter().zip(want).enumerate() {
            let got = decode(self.shape.act, got);
            assert!((got - want).abs() <= error, "{name}, element {i}: {got}, not {want} ± {error}");
        }
    }

    pub fn mailbox_halves(&self, at: usize, n: usize) -> Vec<u16> {
        // SAFETY: inside the mailbox, and all work is done.
        u16s(unsafe { std::slice::from_raw_parts(self.mailbox.memory.host().add(at), 2 * n) })
    }

    pub fn epoch(&self) -> u32 {
        // SAFETY: the mailbox begins with this word.
        unsafe { AtomicU32::from_ptr(self.mailbox.memory.host().cast()) }.load(Ordering::Acquire)
    }
}

pub fn each(test: impl Fn(&str, &Bench)) {
    for (name, accel) in accelerators() {
        for (kv, window) in [(Half::BF16, None), (Half::F16, Some(45)), (Half::BF16, Some(5))] {
            let kv = gpu::kv(&accel, kv);
            let bench = Bench::new(accel.clone(), kv, window);
            bench.prefill();
            test(&format!("{name}, {} cache, window {window:?}", kv.name()), &bench);
        }
    }
}
