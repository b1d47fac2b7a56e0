//! A layer with its sequences in scattered pages, what kernels make of a step, and the oracle of each row.

use super::*;

/// Rows of a sequence in a step.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub first_pos: usize,
    pub n_rows: usize,
    /// Tokens before are elsewhere: their pages are not in the table.
    pub from: usize,
    /// Those from here on are elsewhere too.
    pub to: usize,
    pub partial: bool,
}

impl Part {
    /// The row at `pos` alone.
    pub fn decode(pos: usize) -> Part {
        Part::chunk(pos, 1)
    }
    pub fn chunk(first_pos: usize, n_rows: usize) -> Part {
        Part { first_pos, n_rows, from: 0, to: usize::MAX, partial: false }
    }
}

/// One layer: a sequence per part, pages scattered, NaN wherever no token was appended.
#[derive(Clone)]
pub struct World {
    pub shape: AttentionShape,
    pub window: Option<usize>,
    /// What prefill runs on.
    pub kernel: PrefillKernel,
    pub parts: Vec<Part>,
    /// First row of each part: one canary row between them.
    pub row0: Vec<usize>,
    pub rows: usize,
    pub q: Vec<u16>,
    /// `[page][kv_head][K, V]` of [`KvType::part_bytes`] each.
    pub kv: Vec<u8>,
    /// One for each head, or none.
    pub sinks: Vec<f32>,
    /// Pages of each sequence.
    pub pages: Vec<Vec<u32>>,
}

/// What a step wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub out: Vec<u16>,
    pub m: Vec<u32>,
    pub s: Vec<u32>,
    pub o: Vec<u32>,
}

impl World {
    pub fn new(
        shape: AttentionShape,
        window: Option<usize>,
        parts: &[Part],
        k_scale: f32,
        seed: u64,
    ) -> World {
        let mut rng = Rng::new(seed);
        let (hd, h_kv) = (shape.head_dim, shape.n_kv_heads);
        let lens: Vec<usize> = parts.iter().map(|p| p.first_pos + p.n_rows).collect();
        let n_pages: usize = lens.iter().map(|n| n.div_ceil(PAGE)).sum::<usize>() + 1;
        let mut ids: Vec<u32> = (0..n_pages as u32).collect();
        for i in (1..n_pages).rev() {
            ids.swap(i, rng.below(i + 1));
        }
        // All ones are NaN in each float type, a scale's too.
        let part = shape.kv.part_bytes(hd);
        let mut kv = vec![0xff; n_pages * h_kv * 2 * part];
        let (mut pages, mut rest) = (Vec::new(), &ids[..]);
        for &len in &lens {
            let (own, tail) = rest.split_at(len.div_ceil(PAGE));
            rest = tail;
            for pos in 0..len {
                for head in 0..h_kv {
                    for half in 0..2 {
                        let at = ((own[pos / PAGE] as usize * h_kv + head) * 2 + half) * part;
                        // Of q8 also values that are small, or large, beside those of other tokens.
                        let size = match half {
                            0 => k_scale,
                            _ if shape.kv.is_scaled() => [1.0, 1e-4, 1.0, 30.0][rng.below(4)],
                            _ => 1.0,
                        };
                        let row: Vec<f32> = (0..hd).map(|_| rng.normal() * size).collect();
                        store(shape.kv, &mut kv[at..at + part], pos % PAGE, &row);
                    }
                }
            }
            pages.push(own.to_vec());
        }
        let (mut row0, mut rows) = (Vec::new(), 1);
        for p in parts {
            row0.push(rows);
            rows += p.n_rows + 1;
        }
        let width = shape.n_heads * hd;
        let mut q = vec![encode(shape.kv.half(), f32::NAN); rows * width];
        for (p, &r) in parts.iter().zip(&row0) {
            q[r * width..(r + p.n_rows) * width].fill_with(|| encode(shape.kv.half(), rng.normal()));
        }
        let (kernel, sinks) = (PrefillKernel::Mma, Vec::new());
        World { shape, window, kernel, parts: parts.to_vec(), row0, rows, q, kv, sinks, pages }
    }

    /// The same with sinks: far below all scores, among them, and far above.
    pub fn with_sinks(self, seed: u64) -> World {
        let mut rng = Rng::new(seed);
        let mut sink = || match rng.below(5) {
            0 => -300.0,
            1 => 60.0,
            _ => 3.0 * rng.normal(),
        };
        let sinks = (0..self.shape.n_heads).map(|_| sink()).collect();
        World { sinks, ..self }
    }

    /// The same, prefill on another kernel.
    pub fn on(&self, kernel: PrefillKernel) -> World {
        World { kernel, ..self.clone() }
    }

    /// All kernels that prefill can run on; one if nothing is prefilled.
    pub fn kernels(&self, rt: &Arc<dyn Runtime>) -> Vec<PrefillKernel> {
        let mut kernels = PrefillKernel::available(&**rt, &self.shape);
        if self.parts.iter().all(|p| p.n_rows == 1) {
            kernels.truncate(1);
        }
        kernels
    }

    pub fn width(&self) -> usize {
        self.shape.n_heads * self.shape.head_dim
    }

    pub fn page_start(&self, part: usize) -> usize {
        self.parts[part].from / PAGE
    }

    /// Rows of partial output before part `part`.
    pub fn partial_row(&self, part: usize) -> usize {
        self.parts[..part].iter().map(|p| if p.partial { p.n_rows } else { 0 }).sum()
    }

    /// What the planner is told: the parts in `which`, the pages of all sequences in one table.
    pub fn plan(&self, which: &[usize], padding: std::ops::Range<u32>) -> (AttentionPlan, Vec<u32>) {
        let mut table = vec![u32::MAX]; // no such page
        let mut rows = Vec::new();
        for &i in which {
            let p = &self.parts[i];
            rows.push(RowRun {
                row0: self.row0[i] as u32,
                n_rows: p.n_rows as u32,
                first_pos: p.first_pos as u32,
                from: p.from as u32,
                to: u32::try_from(p.to).unwrap_or(u32::MAX),
                page: table.len() as u32,
                partial: p.partial.then(|| self.partial_row(i) as u32),
            });
            table.extend(self.pages[i].iter().take(p.to.div_ceil(PAGE)).skip(self.page_start(i)));
            table.push(u32::MAX);
        }
        (AttentionPlan::new(&rows, padding, self.window.map(|w| w as u32), self.kernel.queries()), table)
    }

    pub fn run(&self, rt: &Arc<dyn Runtime>, which: &[usize]) -> Output {
        let (plan, table) = self.plan(which, 0..0);
        self.run_plan(rt, &plan, &table)
    }

    /// Runs a plan twice, as two layers would.
    pub fn run_plan(&self, rt: &Arc<dyn Runtime>, plan: &AttentionPlan, table: &[u32]) -> Output {
        let shape = &self.shape;
        shape.check(&**rt).unwrap();
        let up = |data: &[u8]| Buffer::from_bytes(rt, LANE, data).unwrap();
        let (q, kv, table) = (up(bytes(&self.q)), up(&self.kv), up(bytes(table)));
        let decode_items = up(decode_item_bytes(&plan.decode));
        let prefill_items = up(prefill_item_bytes(&plan.prefill));
        let n_decode = up(bytes(&[plan.decode.len() as u32]));
        let n_prefill = up(bytes(&[plan.prefill.len() as u32]));
        let n = self.rows * self.width();
        let n_partial = self.partial_row(self.parts.len());
        let out = up(bytes(&vec![CANARY; n.div_ceil(2)]));
        let canary = |n: usize| up(bytes(&vec![CANARY; n.max(1)]));
        let m = canary(n_partial * shape.n_heads);
        let s = canary(n_partial * shape.n_heads);
        let o = canary(n_partial * self.width());
        let partial = PartialRows { m: m.ptr(), s: s.ptr(), o: o.ptr() };
        // Counters are zero, the rest is what was there before.
        let bytes_all = DecodeWorkspace::bytes(shape, self.rows, plan.splits);
        let zeroed = DecodeWorkspace::bytes(shape, self.rows, 0) - 16;
        let mut workspace = vec![0xffu8; bytes_all];
        workspace[..zeroed].fill(0);
        let workspace = up(&workspace);
        let sinks = self.sinks_on(rt);
        let sinks = sinks.as_ref().map_or(DevPtr::NULL, Buffer::ptr);

        let mut first = None;
        for _ in 0..2 {
            let args = DecodeAttention {
                q: q.ptr(),
                kv: kv.ptr(),
                page_table: table.ptr(),
                items: decode_items.ptr(),
                n_items: n_decode.ptr(),
                max_items: plan.decode.len() + 3,
                sinks,
                out: out.ptr(),
                partial,
                workspace: DecodeWorkspace::at(workspace.ptr(), shape, self.rows, plan.splits),
            };
            decode_attention(&**rt, LANE, shape, &args).unwrap();
            let args = PrefillAttention {
                kernel: self.kernel,
                n_pages: self.kv.len() / (2 * shape.kv.part_bytes(shape.head_dim) * shape.n_kv_heads),
                q: q.ptr(),
                kv: kv.ptr(),
                page_table: table.ptr(),
                items: prefill_items.ptr(),
                n_items: n_prefill.ptr(),
                max_items: plan.prefill.len() + usize::from(!plan.prefill.is_empty()),
                window: self.window.map(|w| w as u32),
                sinks,
                out: out.ptr(),
                partial,
            };
            prefill_attention(&**rt, LANE, shape, &args).unwrap();
            let down = |b: &Buffer, n: usize| -> Vec<u32> {
                let mut v = vec![0u8; n * 4];
                rt.download(LANE, b.ptr(), &mut v).unwrap();
                v.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect()
            };
            let mut all = down(&out, n.div_ceil(2));
            let result = Output {
                out: all.drain(..).flat_map(|w| [w as u16, (w >> 16) as u16]).take(n).collect(),
                m: down(&m, n_partial * shape.n_heads),
                s: down(&s, n_partial * shape.n_heads),
                o: down(&o, n_partial * self.width()),
            };
            assert!(
                down(&workspace, zeroed / 4).iter().all(|&c| c == 0),
                "counters are zero again after a launch"
            );
            if let Some(first) = &first {
                assert_eq!(first, &result, "a second run of the same plan");
            }
            first = Some(result);
        }
        first.unwrap()
    }

    /// The sinks in the device's memory.
    pub fn sinks_on(&self, rt: &Arc<dyn Runtime>) -> Option<Buffer> {
        (!self.sinks.is_empty()).then(|| Buffer::from_bytes(rt, LANE, bytes(&self.sinks)).unwrap())
    }

    /// The oracle: (max, ln Σ e^(x − max), Σ w|v| and Σ|v| and result per element, A, tokens) of a row's head over
    /// tokens from..to, and its sink if it is finished here.
    pub fn oracle(&self, part: usize, row: usize, head: usize, tokens: std::ops::Range<usize>) -> Oracle {
        let (hd, h_kv) = (self.shape.head_dim, self.shape.n_kv_heads);
        let kv_head = head / (self.shape.n_heads / h_kv);
        let pos = self.parts[part].first_pos + row;
        let low = tokens.start.max((pos + 1).saturating_sub(self.window.unwrap_or(usize::MAX)));
        let high = tokens.end.min(pos + 1);
        let q = &self.q[(self.row0[part] + row) * self.width() + head * hd..][..hd];
        let bytes = self.shape.kv.part_bytes(hd);
        let part_of = |t: usize, half: usize| {
            let page = self.pages[part][t / PAGE] as usize;
            &self.kv[((page * h_kv + kv_head) * 2 + half) * bytes..][..bytes]
        };
        let kv = |t: usize, half: usize, d: usize| stored(self.shape.kv, part_of(t, half), hd, t % PAGE, d);
        let scale = f64::from(self.shape.scale);
        let (mut x, mut a) = (Vec::new(), 0f64);
        for t in low..high {
            let (mut dot, mut abs) = (0.0, 0.0);
            for d in 0..hd {
                let p = decode(self.shape.kv.half(), q[d]) * kv(t, 0, d);
                dot += p;
                abs += p.abs();
            }
            x.push(
                self.shape
                    .softcap
                    .map_or(dot * scale, |cap| f64::from(cap) * (dot * scale / f64::from(cap)).tanh()),
            );
            a = a.max(abs * scale);
        }
        let sink = self.sinks.get(head).filter(|_| !self.parts[part].partial && !x.is_empty());
        let sink = sink.map(|&sink| f64::from(sink));
        let m = x.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let w: Vec<f64> = x.iter().map(|x| (x - m).exp()).collect();
        let s: f64 = w.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - m).exp());
        // The sink's exponent is rounded like a score of its size.
        a = a.max(sink.map_or(0.0, f64::abs));
        let (mut out, mut weighted, mut plain) = (vec![0.0; hd], vec![0.0; hd], vec![0.0; hd]);
        // Of q8, values' scales are part of what is rounded, and powers of two near them of the base.
        let size = |t: usize| match self.shape.kv {
            KvType::Q8 => f64::from(scale_of(part_of(t, 1), hd, t % PAGE)),
            KvType::F16 | KvType::BF16 => 1.0,
        };
        let base = |(x, t): (&f64, usize)| {
            x + size(t).max(f64::MIN_POSITIVE).log2().floor() * std::f64::consts::LN_2
        };
        let m_scaled = x.iter().zip(low..high).map(base).fold(f64::NEG_INFINITY, f64::max);
        let largest = if self.shape.kv.is_scaled() { (m_scaled - m).exp() } else { 1.0 };
        for (i, t) in (low..high).enumerate() {
            for d in 0..hd {
                let v = kv(t, 1, d);
                out[d] += w[i] / s * v;
                weighted[d] += w[i] / s * v.abs();
                plain[d] += v.abs() / size(t) * largest / s;
            }
        }
        let cap = self.shape.softcap.map_or(0.0, f64::from);
        Oracle { m, s, out, weighted, plain, a, cap, n: x.len() }
    }

    /// Compares everything that `which` should have written, and that nothing else was.
    pub fn check(&self, which: &[usize], got: &Output, what: &str) {
        let (hd, heads, width) = (self.shape.head_dim, self.shape.n_heads, self.width());
        let mut written = vec![false; self.rows];
        for &i in which {
            let p = &self.parts[i];
            for row in 0..p.n_rows {
                let at = self.row0[i] + row;
                written[at] = !p.partial;
                for head in 0..heads {
                    let want = self.oracle(i, row, head, p.from..p.to);
                    let name = format!("{what}: {p:?} row {row} head {head}");
                    if p.partial {
                        let r = (self.partial_row(i) + row) * heads + head;
                        let f = |v: &[u32], j: usize| f64::from(f32::from_bits(v[j]));
                        let (m, s) = (f(&got.m, r), f(&got.s, r));
                        if want.n == 0 {
                            assert_eq!((m, s), (f64::NEG_INFINITY, 0.0), "{name}");
                            assert!(
                                got.o[r * hd..(r + 1) * hd].iter().all(|&o| o == 0),
                                "{name}: {:?}",
                                &got.o[r * hd..][..hd]
                            );
                            continue;
                        }
                        let total = m - want.m + (s / want.s).ln();
                        let bound = want.weights(self.shape.kv, hd) + 4.0 * U * want.a;
                        assert!(total.abs() <= bound, "{name}: sum off by {total}, allowed {bound}");
                        for d in 0..hd {
                            want.close(&self.shape, d, f(&got.o, r * hd + d) / s, U, &name);
                        }
                    } else {
                        for d in 0..hd {
                            let x = decode(self.shape.out, got.out[at * width + head * hd + d]);
                            want.close(&self.shape, d, x, epsilon(self.shape.out), &name);
                        }
                    }
                }
            }
        }
        for (row, written) in written.iter().enumerate() {
            if !written {
                let untouched = (0..width).all(|d| {
                    let w = row * width + d;
                    got.out[w] == (if w % 2 == 0 { CANARY as u16 } else { (CANARY >> 16) as u16 })
                });
                assert!(untouched, "{what}: row {row} is nobody's");
            }
        }
    }

    /// What is one part's of an output.
    pub fn rows_of(&self, i: usize, got: &Output) -> Output {
        let (p, w) = (&self.parts[i], self.width());
        let r = self.partial_row(i);
        let of = |v: &[u32], per: usize| {
            if p.partial { v[r * per..(r + p.n_rows) * per].to_vec() } else { Vec::new() }
        };
        Output {
            out: got.out[self.row0[i] * w..(self.row0[i] + p.n_rows) * w].to_vec(),
            m: of(&got.m, self.shape.n_heads),
            s: of(&got.s, self.shape.n_heads),
            o: of(&got.o, w),
        }
    }
}

pub const U: f64 = 1.0 / (1u64 << 24) as f64;

pub struct Oracle {
    pub m: f64,
    pub s: f64,
    pub out: Vec<f64>,
    /// Σ w|v|.
    pub weighted: Vec<f64>,
    /// Σ |v| / Σ e^(x − max), of q8 Σ |code| / Σ e^(x − the base).
    pub plain: Vec<f64>,
    pub a: f64,
    /// The soft-cap, or 0.
    pub cap: f64,
    pub n: usize,
}

impl Oracle {
    /// Relative error of a sum of weights.
    pub fn weights(&self, kv: KvType, hd: usize) -> f64 {
        let de = (2 * hd + 10) as f64 * U * self.a + 16.0 * U * self.cap;
        let steps = self.n.div_ceil(16) as f64 + 8.0; // the smallest tile is 16 tokens
        (de + 2.0 * U * self.a).exp_m1()
            + (4.0 + 5.0 * steps) * U
            + epsilon(kv.half())
            + 2.0 * (self.n as f64 + steps) * U
    }

    pub fn close(&self, shape: &AttentionShape, d: usize, got: f64, rounding: f64, name: &str) {
        let tiny = if shape.kv.half() == Half::F16 { 2f64.powi(-24) * self.plain[d] } else { 0.0 };
        let bound = 2.0 * self.weights(shape.kv, shape.head_dim) * self.weighted[d] + tiny;
        let bound = bound + rounding * (self.out[d].abs() + bound) + 2f64.powi(-25);
        let off = (got - self.out[d]).abs();
        assert!(off <= bound, "{name} element {d}: {got} for {}, off by {off}, allowed {bound}", self.out[d]);
    }
}
