//! The CPU's sublayers as an executor uses them beside an accelerator: on ranges of rows, sub-batches in one workspace,
//! rows that come from a mailbox and go back to it, attention in parts. Bit for bit what one pass over all rows gives.

use std::ops::Range;

use crate::support::models;
use tandem::cache::{BlockTable, KvGeometry, KvType, LayerKv, PAGE_TOKENS, PagePool};
use tandem::engine::{
    Host, HostContext, HostSeq, HostStep, HostWorkspace, Layer, NewTokens, Options, Prepared, Residual,
};
use tandem::host::Pool;
use tandem::model::{LoadedModel, load};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::simd::attention::{AttnOut, Partial, merge_partials};
use tandem::simd::linear::Mode;
use tandem::tensor::{Rows, RowsMut};

const NAMES: [&str; 8] = [
    "tiny-llama,dtype=q4_k",
    "tiny-qwen2,dtype=bf16",
    "tiny-qwen3,dtype=f32",
    "tiny-gemma3,dtype=q8_0",
    "tiny-gemma3,dtype=bf16",
    "tiny-gemma2,dtype=q8_0",
    "tiny-olmo2,dtype=q4_k",
    "tiny-opt,dtype=f16",
];

fn models() -> impl Iterator<Item = (&'static str, LoadedModel)> {
    NAMES.into_iter().map(|name| (name, load(&format!("synth:{name},seed=3")).unwrap()))
}

fn tiers() -> impl Iterator<Item = Isa> {
    models::tiers().into_iter().filter(|&i| i > Isa::Reference)
}

fn tokens(n: usize, which: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + 3 + which * 101) % 512) as u32).collect()
}

/// A model on the CPU with the pages of some sequences, without an engine.
struct World {
    host: Host,
    model: Prepared,
    pool: Pool,
    cache: PagePool,
    tables: Vec<BlockTable>,
}

/// Rows of one sequence in a step.
struct Part<'a> {
    seq: usize,
    tokens: &'a [u32],
    logits: Wants,
}

impl World {
    fn new(m: &LoadedModel, isa: Isa, sequences: usize) -> World {
        let (spec, pool) = (&m.spec, Pool::new(2));
        let geometry = KvGeometry {
            n_layers: spec.n_layers,
            n_kv_heads: spec.n_kv_heads,
            head_dim: spec.head_dim,
            dtype: KvType::BF16,
        };
        World {
            host: Host::new(spec, isa, Mode::Deterministic, 2, spec.max_context).unwrap(),
            model: Prepared::new(spec.clone(), &m.weights, isa, &pool, &|_| ()).unwrap(),
            pool,
            cache: PagePool::new(geometry, 4 * sequences).unwrap(),
            tables: (0..sequences).map(|_| BlockTable::new()).collect(),
        }
    }

    /// Prepares a step of `parts`, whose rows begin at `first_row`.
    fn step(&mut self, first_row: usize, parts: &[Part<'_>]) -> HostStep {
        for p in parts {
            self.tables[p.seq].reserve(&mut self.cache, p.tokens.len()).unwrap();
        }
        let (mut wanted, mut row) = (Vec::new(), 0);
        for p in parts {
            let end = row + p.tokens.len();
            match p.logits {
                Wants::Nothing => {}
                Wants::Last => wanted.push(end - 1),
                Wants::All => wanted.extend(row..end),
            }
            row = end;
        }
        let seqs: Vec<HostSeq<'_>> = parts
            .iter()
            .map(|p| HostSeq {
                pages: self.tables[p.seq].pages(),
                first_pos: self.tables[p.seq].len(),
                n_rows: p.tokens.len(),
                tokens: HostSeq::ALL,
            })
            .collect();
        let mut step = HostStep::default();
        self.host.prepare(&mut step, first_row, &seqs, parts.iter().flat_map(|p| p.tokens).copied(), wanted);
        step
    }

    fn advance(&mut self, parts: &[Part<'_>]) {
        parts.iter().for_each(|p| self.tables[p.seq].advance(p.tokens.len()));
    }

    fn layers(&self) -> usize {
        self.model.spec().n_layers
    }
}

/// How one layer's attention of one sub-batch comes about.
type Attention<'a> = dyn Fn(&HostContext<'_>, &mut HostWorkspace, &mut HostStep, &Layer, &LayerKv<'_>) + 'a;

/// All layers of some sub-batches in turn, each operation cut into two ranges of rows; logits of all that want them.
fn run(w: &World, ws: &mut HostWorkspace, steps: &mut [HostStep], attention: &Attention<'_>) -> Vec<f32> {
    let cx = w.host.with(&w.model, &w.pool);
    let halves = |rows: Range<usize>| {
        let middle = rows.start + rows.len() / 3;
        [rows.start..middle, middle..rows.end]
    };
    for step in steps.iter() {
        halves(step.rows()).into_iter().for_each(|rows| cx.embed(ws, step, rows));
    }
    for i in 0..w.layers() {
        let (layer, kv) = (w.model.layer(i), w.cache.layer(i));
        let before = if i == 0 { Residual::None } else { w.model.layer(i - 1).after_ffn() };
        for step in steps.iter() {
            for rows in halves(step.rows()) {
                cx.project(ws, step, layer, before, rows);
            }
        }
        for step in steps.iter_mut() {
            attention(&cx, ws, step, layer, &kv);
            if i + 1 == w.layers() {
                // attn of the rows kept lies where those rows were: attention again, of them alone.
                step.keep_wanted(ws);
                cx.attend(ws, step, layer, &kv, step.rows());
            }
        }
        for step in steps.iter() {
            for rows in halves(step.rows()) {
                cx.out_proj(ws, layer, rows.clone());
                // What one operation adds by itself, another adds with its norm.
                let after = layer.after_attention();
                if i % 2 == 0 {
                    cx.add_residual(ws, after, rows.clone());
                    cx.ffn_up(ws, layer, Residual::None, rows.clone());
                } else {
                    cx.ffn_up(ws, layer, after, rows.clone());
                }
                cx.ffn_down(ws, layer, rows);
            }
        }
    }
    let mut at = 0;
    for step in steps.iter() {
        for rows in halves(step.rows()) {
            let n = rows.len();
            if n > 0 {
                cx.head(ws, w.model.layer(w.layers() - 1).after_ffn(), rows, at);
            }
            at += n;
        }
    }
    ws.logits.rows(0..at).to_vec()
}

/// Append and attend in the workspace, over two ranges of rows.
fn in_place(
    cx: &HostContext<'_>,
    ws: &mut HostWorkspace,
    step: &mut HostStep,
    layer: &Layer,
    kv: &LayerKv<'_>,
) {
    let rows = step.rows();
    let middle = rows.start + rows.len() / 2;
    for part in [rows.start..middle, middle..rows.end] {
        cx.append(ws, step, kv, part);
    }
    for part in [rows.start..middle, middle..rows.end] {
        cx.attend(ws, step, layer, kv, part);
    }
}

/// Append and attend from a mailbox of rows of q|k|v, into another part of it.
fn through_a_mailbox(
    cx: &HostContext<'_>,
    ws: &mut HostWorkspace,
    step: &mut HostStep,
    layer: &Layer,
    kv: &LayerKv<'_>,
) {
    let rows = step.rows();
    let (qd, kvd) = (ws.q.width(), ws.k.width());
    let stride = qd + 2 * kvd;
    let mut mailbox = vec![f32::NAN; rows.len() * stride];
    for (to, r) in mailbox.chunks_exact_mut(stride).zip(rows.clone()) {
        to[..qd].copy_from_slice(ws.q.rows(r..r + 1));
        to[qd..qd + kvd].copy_from_slice(ws.k.rows(r..r + 1));
        to[qd + kvd..].copy_from_slice(ws.v.rows(r..r + 1));
    }
    // Whatever is read from the workspace now is wrong.
    ws.q.rows_mut(rows.clone()).fill(f32::NAN);
    ws.k.rows_mut(rows.clone()).fill(f32::NAN);
    ws.v.rows_mut(rows.clone()).fill(f32::NAN);
    let (k, v) = (&mailbox[qd..], &mailbox[qd + kvd..]);
    let (k, v) = (Rows::strided(k, kvd, stride), Rows::strided(v, kvd, stride));
    cx.append_from(step, kv, rows.clone(), k, v);
    let mut out = vec![f32::NAN; rows.len() * (qd + 7)];
    let to = AttnOut::Whole(RowsMut::strided(&mut out, qd, qd + 7));
    cx.attend_rows(step, layer.windowed(), kv, rows.clone(), Rows::strided(&mailbox, qd, stride), to);
    for (r, o) in rows.zip(out.chunks_exact(qd + 7)) {
        ws.attn.rows_mut(r..r + 1).copy_from_slice(&o[..qd]);
        ws.q.rows_mut(r..r + 1).copy_from_slice(&mailbox[(r - step.rows().start) * stride..][..qd]);
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// What an engine gives for prompts (two sequences), and then for a step of both.
fn engine(m: &LoadedModel, isa: Isa, prompts: [&[u32]; 2], next: [&[u32]; 2]) -> Vec<f32> {
    let mut o = Options::new(isa, 128);
    (o.mode, o.threads, o.sequences) = (Mode::Deterministic, Some(2), 2);
    let mut e = models::engine(m, &o);
    let seqs = [e.add(), e.add()];
    let mut out = Vec::new();
    for (tokens, wants) in [(prompts, [Wants::Last, Wants::All]), (next, [Wants::All, Wants::Last])] {
        let inputs = [0, 1].map(|i| NewTokens { id: seqs[i], tokens: tokens[i], wants: wants[i] });
        out.extend_from_slice(e.forward(&inputs).unwrap());
    }
    out
}

#[test]
fn sub_batches_on_rows_of_one_workspace_give_what_a_whole_step_gives() {
    let (a, b) = (tokens(41, 0), tokens(37, 1));
    let (c, d) = (tokens(5, 2), tokens(1, 3));
    for (name, m) in models() {
        for isa in tiers() {
            let want = engine(&m, isa, [&a, &b], [&c, &d]);
            let ways: [(&str, &Attention<'_>); 2] =
                [("in place", &in_place), ("through a mailbox", &through_a_mailbox)];
            for (way, attention) in ways {
                let mut w = World::new(&m, isa, 2);
                let mut ws = HostWorkspace::new(&m.spec);
                let mut got = Vec::new();
                for (tokens, wants) in
                    [([&a, &b], [Wants::Last, Wants::All]), ([&c, &d], [Wants::All, Wants::Last])]
                {
                    let part = |i: usize| Part { seq: i, tokens: tokens[i], logits: wants[i] };
                    // The second sub-batch lies before the first, with rows of nobody's between and around them.
                    let (n0, n1) = (tokens[0].len(), tokens[1].len());
                    let mut steps = [w.step(5 + n1 + 2, &[part(0)]), w.step(5, &[part(1)])];
                    ws.reserve(5 + n1 + 2 + n0, n0 + n1);
                    got.extend(run(&w, &mut ws, &mut steps, attention));
                    w.advance(&[part(0), part(1)]);
                }
                assert_eq!(bits(&got), bits(&want), "{name} {isa} {way}");
            }
        }
    }
}

/// The oldest pages are attended on the host, the rest elsewhere: here by a second step with the other tokens.
#[test]
fn attention_in_two_parts_gives_what_it_gives_at_once() {
    for (name, m) in models() {
        for isa in tiers() {
            let prompt = tokens(75, 0);
            let mut w = World::new(&m, isa, 1);
            let mut ws = HostWorkspace::new(&m.spec);
            let part = |tokens| [Part { seq: 0, tokens, logits: Wants::All }];
            let mut steps = [w.step(0, &part(&prompt[..70]))];
            ws.reserve(75, 75);
            run(&w, &mut ws, &mut steps, &in_place);
            w.advance(&part(&prompt[..70]));

            let mut whole = w.step(0, &part(&prompt[70..]));
            let first_pos = w.tables[0].len();
            let (i, hd) = (m.spec.n_layers - 1, m.spec.head_dim);
            for windowed in [false, true].into_iter().take(1 + usize::from(m.spec.window.is_some())) {
                let cx = w.host.with(&w.model, &w.pool);
                cx.embed(&mut ws, &whole, 0..5);
                cx.project(&mut ws, &whole, w.model.layer(i), Residual::None, 0..5);
                cx.append(&ws, &whole, &w.cache.layer(i), 0..5);
                let q = ws.q.rows(0..5).to_vec();
                let attend = |step: &mut HostStep, w: &World, out: AttnOut<'_>| {
                    let cx = w.host.with(&w.model, &w.pool);
                    let q = Rows::new(&q, m.spec.q_dim());
                    cx.attend_rows(step, windowed, &w.cache.layer(i), 0..5, q, out);
                };
                let mut want = vec![0.0; q.len()];
                let to = AttnOut::Whole(RowsMut::new(&mut want, m.spec.q_dim()));
                attend(&mut whole, &w, to);
                let parts: Vec<Partial> = [0..PAGE_TOKENS, PAGE_TOKENS..usize::MAX]
                    .into_iter()
                    .map(|tokens| {
                        let pages = &w.tables[0].pages()[..tokens.end.min(75).div_ceil(PAGE_TOKENS)];
                        let seq = HostSeq { pages, first_pos, n_rows: 5, tokens };
                        let mut step = HostStep::default();
                        w.host.prepare(&mut step, 0, &[seq], [], []);
                        let mut part = Partial::empty(5, m.spec.n_heads, hd);
                        attend(&mut step, &w, AttnOut::Partial(part.rows_mut(m.spec.n_heads, hd)));
                        part
                    })
                    .collect();
                let mut got = vec![0.0; q.len()];
                merge_partials(&[&parts[0], &parts[1]], hd, None, &mut got);
                // Each element is a mean of values whose weights may be rounded to bf16 (2⁻⁹), above and below the
                // line, in both ways of computing it; what f32 rounds is far below that.
                let kv = w.cache.layer(i);
                let values = (0..75).flat_map(|t| {
                    let (page, slot) = (w.tables[0].pages()[t / PAGE_TOKENS], t % PAGE_TOKENS);
                    (0..m.spec.n_kv_heads).flat_map(move |h| (0..hd).map(move |d| kv.value(page, h, slot, d)))
                });
                let bound = 4.1 * 2f32.powi(-9) * values.fold(0.0, |most, v| v.abs().max(most));
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(
                        (got - want).abs() <= bound,
                        "{name} {isa}, windowed {windowed}, {i}: {got} {want}"
                    );
                }
                let seen = m.spec.window.as_ref().filter(|_| windowed).map_or(usize::MAX, |w| w.size);
                let visible = parts[0].m.iter().any(|&m| m > f32::NEG_INFINITY);
                assert_eq!(
                    visible,
                    first_pos + 1 < PAGE_TOKENS + seen.min(1000),
                    "{name}: the first page is seen"
                );
            }
        }
    }
}

#[test]
#[should_panic(expected = "rows 3..6 of a step with rows 2..5")]
fn rows_of_another_sub_batch_are_refused() {
    let m = load("synth:tiny-llama,dtype=f32,seed=3").unwrap();
    let mut w = World::new(&m, Isa::best(), 1);
    let step = w.step(2, &[Part { seq: 0, tokens: &[1, 2, 3], logits: Wants::Nothing }]);
    let mut ws = HostWorkspace::new(&m.spec);
    ws.reserve(8, 0);
    w.host.with(&w.model, &w.pool).embed(&mut ws, &step, 3..6);
}
