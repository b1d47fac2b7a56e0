//! The accelerator contract by the kernels of `cuda/`, on whatever runs them: a GPU, or their host emulation.

mod matmul;
mod pack;
mod step;

use std::ops::Range;
use std::sync::Arc;

use self::matmul::Matmul;
use self::step::{Lists, StepLists};
use super::attention::{
    self, AttentionShape, Capacity, DecodeAttention, DecodeWorkspace, MergeAttention, PrefillAttention,
};
use super::elementwise::{
    Activate, Activation, Embed, LogitsReduce, NormRows, Positions, PublishRows, RopeAppend, activate, embed,
    logits_reduce, logits_workspace_bytes, norm, rope_append, softcap,
};
use super::exchange::{MoveRows, PageMove, convert_rows, pages_from_host, pages_to_host};
use super::gemm;
use super::linear::Epilogue;
use super::quant::{self, GatherArgs, Layout};
use crate::cache::PAGE_TOKENS;
use crate::device::accelerator::{
    Accelerator, Context, EmbedWeight, Half, LayerWeights, Limits, LinearSource, LinearWeight, Mailbox,
    NormWeight, PartialRows, Publish, Residual, Shape, Step, StepDesc, UpWeight,
};
use crate::device::host::Pool;
use crate::device::runtime::{DevPtr, Lane, Runtime};
use crate::model::spec::{Ffn, Norm};
use crate::tensor::DType;
use crate::{Error, Result};

/// An accelerator that runs the kernels of `cuda/`.
pub struct KernelAccelerator {
    runtime: Arc<dyn Runtime>,
}

impl KernelAccelerator {
    /// Over `runtime`.
    ///
    /// # Errors
    /// [`Error::Unsupported`]: it has no kernels, so nothing would run.
    pub fn new(runtime: Arc<dyn Runtime>) -> Result<KernelAccelerator> {
        if !runtime.has_kernel("softcap") {
            return Err(Error::Unsupported(format!(
                "{}: no kernels for it in this build",
                runtime.info().name
            )));
        }
        Ok(KernelAccelerator { runtime })
    }

    fn rt(&self) -> &dyn Runtime {
        &*self.runtime
    }

    /// hidden += residual, x = norm(hidden), for `rows`.
    fn norm_rows(
        &self,
        cx: &Context<'_>,
        weight: NormWeight,
        residual: Residual,
        rows: &Range<usize>,
    ) -> Result<()> {
        let (ws, d) = (cx.ws, cx.shape.d_model);
        let at = |p: DevPtr, bytes: usize| p.add(rows.start * d * bytes);
        let (delta, post) = match residual {
            Residual::None => (DevPtr::NULL, DevPtr::NULL),
            Residual::Delta => (at(ws.delta, 4), DevPtr::NULL),
            Residual::Normed(w) => (at(ws.delta, 4), w),
        };
        let args = NormRows {
            norm: cx.shape.norm,
            hidden: at(ws.hidden, 4),
            delta,
            delta_bias: DevPtr::NULL,
            post,
            weight,
            sum: if delta.is_null() { DevPtr::NULL } else { at(ws.hidden, 4) },
            x: at(ws.x, 2),
            act: cx.shape.act,
            row_list: DevPtr::NULL,
            rows: rows.len(),
            d,
            ld_delta: d,
            ld_x: d,
        };
        norm(self.rt(), cx.lane, &args)
    }

    /// delta = W·x + bias, for `rows` of x `[..][k]`.
    fn to_delta(&self, cx: &Context<'_>, w: &LinearWeight, x: DevPtr, rows: &Range<usize>) -> Result<()> {
        let (ws, d) = (cx.ws, cx.shape.d_model);
        let matmul = Matmul {
            w,
            act: cx.shape.act,
            x: x.add(rows.start * w.k * 2),
            ldx: w.k,
            y: ws.delta.add(rows.start * d * 4),
            ldy: d,
            m: rows.len(),
            epilogue: Epilogue::F32,
            scratch: linear_scratch(cx),
        };
        matmul.run(self.rt(), cx.lane)
    }
}

/// Where parts of the scratch memory begin: attention's workspace at 0, the logits', what linear layers share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scratch {
    attention_rows: usize,
    attention_splits: usize,
    logits: usize,
    linear: usize,
}

impl Scratch {
    pub(super) fn new(shape: &Shape, limits: &Limits) -> Scratch {
        let splits = attention_capacity(limits).splits;
        let bytes = DecodeWorkspace::bytes(&attention_shape(shape), limits.rows, splits);
        let logits = bytes.next_multiple_of(256);
        let linear =
            (logits + logits_workspace_bytes(limits.logit_rows, shape.vocab, 1)).next_multiple_of(256);
        Scratch { attention_rows: limits.rows, attention_splits: splits, logits, linear }
    }

    fn attention(&self, base: DevPtr, shape: &AttentionShape) -> DecodeWorkspace {
        DecodeWorkspace::at(base, shape, self.attention_rows, self.attention_splits)
    }
}

fn attention_capacity(limits: &Limits) -> Capacity {
    Capacity::new(limits.rows, limits.sequences, limits.pages_per_sequence * PAGE_TOKENS)
}

fn attention_shape(shape: &Shape) -> AttentionShape {
    AttentionShape {
        n_heads: shape.n_heads,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
        scale: shape.attn_scale,
        kv: shape.kv,
        out: shape.act,
    }
}

fn lists<'a>(cx: &'a Context<'_>) -> &'a StepLists {
    cx.step.inner.downcast_ref().expect("a step that this accelerator prepared")
}

fn linear_scratch(cx: &Context<'_>) -> DevPtr {
    cx.ws.scratch.add(lists(cx).scratch.linear)
}

fn eps(norm: Norm) -> f32 {
    let (Norm::Rms { eps } | Norm::Layer { eps }) = norm;
    eps
}

impl Accelerator for KernelAccelerator {
    fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    fn check(&self, shape: &Shape) -> Result<()> {
        attention_shape(shape).check(self.rt())?;
        let widths = [
            ("hidden size", shape.d_model),
            ("width of the query heads", shape.q_dim()),
            ("width of the key heads", shape.kv_dim()),
            ("feed-forward width", shape.d_ff),
        ];
        for (what, n) in widths {
            if !n.is_multiple_of(8) {
                return Err(Error::Unsupported(format!(
                    "{what} {n}: the kernels want a multiple of 8; run on the CPU with --device cpu"
                )));
            }
        }
        Ok(())
    }

    fn activations_for(&self, dtype: DType) -> Option<Half> {
        let bf16 = self.runtime.info().sm >= 80;
        match dtype {
            DType::BF16 if bf16 => Some(Half::BF16),
            // Quantised weights are decoded to either.
            _ => Some(Half::F16),
        }
    }

    fn packed_bytes(&self, source: &LinearSource<'_>, _act: Half) -> Result<usize> {
        let k = source.k();
        let whole = source.dtype().row_bytes(k).is_some();
        if !k.is_multiple_of(8) || !whole {
            return Err(Error::Unsupported(format!(
                "a matrix of {k} columns: the kernels want a multiple of 8"
            )));
        }
        Ok(pack::packed_bytes(source))
    }

    fn embeds_packed(&self, dtype: DType, act: Half, positions: bool) -> bool {
        match dtype {
            // Rows in the activations' own type are packed as they are.
            DType::F16 => act == Half::F16,
            DType::BF16 => act == Half::BF16,
            DType::F32 => false,
            _ => !positions,
        }
    }

    fn pack(&self, source: &LinearSource<'_>, act: Half, pool: &Pool, out: &mut [u8]) {
        pack::pack(source, act, pool, out);
    }

    fn scratch_bytes(&self, shape: &Shape, limits: &Limits, weights: &[LinearWeight]) -> usize {
        let info = self.runtime.info();
        let linear = weights.iter().map(|w| matmul::scratch_bytes(info, w, limits.rows)).max().unwrap_or(0);
        Scratch::new(shape, limits).linear + linear
    }

    fn step_bytes(&self, _shape: &Shape, limits: &Limits) -> usize {
        step::bytes(limits)
    }

    fn row_bucket(&self, rows: usize) -> usize {
        match rows {
            0..=4 => rows,
            5..=128 => rows.next_power_of_two(),
            _ => gemm::bucket(rows),
        }
    }

    fn prepare(
        &self,
        lane: Lane,
        shape: &Shape,
        limits: &Limits,
        step: &StepDesc<'_>,
        memory: DevPtr,
    ) -> Result<Step> {
        step::prepare(self.rt(), lane, shape, limits, step, memory)
    }

    fn embed(&self, cx: &Context<'_>, weight: &EmbedWeight, rows: Range<usize>) -> Result<()> {
        let (lists, d) = (lists(cx), cx.shape.d_model);
        let layout = Layout::new(weight.dtype, cx.shape.vocab, d).filter(|_| weight.packed);
        if let Some(layout) = layout {
            let args = GatherArgs {
                layout,
                w: weight.table,
                row_ids: lists.tokens.add(rows.start * 4),
                y: cx.ws.hidden.add(rows.start * d * 4),
                ldy: d,
                count: rows.len(),
                scale: cx.shape.embed_scale,
            };
            return quant::gather(self.rt(), cx.lane, &args);
        }
        let positions = (!weight.positions.is_null()).then(|| Positions {
            table: weight.positions,
            dtype: weight.positions_dtype,
            n: weight.n_positions,
            offset: weight.position_offset,
            row_pos: lists.row_pos.add(rows.start * 4),
        });
        let args = Embed {
            tokens: lists.tokens.add(rows.start * 4),
            table: weight.table,
            dtype: weight.dtype,
            vocab: cx.shape.vocab,
            scale: cx.shape.embed_scale,
            positions,
            hidden: cx.ws.hidden.add(rows.start * d * 4),
            rows: rows.len(),
            d,
        };
        embed(self.rt(), cx.lane, &args)
    }

    fn qkv(
        &self,
        cx: &Context<'_>,
        layer: &LayerWeights,
        kv: DevPtr,
        residual: Residual,
        publish: Option<Publish<'_>>,
        rows: Range<usize>,
    ) -> Result<()> {
        let (ws, shape, lists) = (cx.ws, cx.shape, lists(cx));
        self.norm_rows(cx, layer.attn_norm, residual, &rows)?;
        let width = shape.qkv_dim();
        let mut column = 0;
        for w in &layer.qkv {
            let matmul = Matmul {
                w,
                act: shape.act,
                x: ws.x.add(rows.start * shape.d_model * 2),
                ldx: shape.d_model,
                y: ws.qkv.add((rows.start * width + column) * 4),
                ldy: width,
                m: rows.len(),
                epilogue: Epilogue::F32,
                scratch: linear_scratch(cx),
            };
            matmul.run(self.rt(), cx.lane)?;
            column += w.n;
        }
        assert_eq!(column, width, "q, k and v are {column} rows of weights");
        let publish = publish.filter(|_| lists.max_published > 0).map(|p| {
            assert!(lists.max_published <= p.mailbox.rows, "a mailbox of {} rows", p.mailbox.rows);
            let memory = p.mailbox.memory.device();
            PublishRows {
                slots: lists.publish_slot.add(rows.start * 4),
                n: lists.n_published,
                to: memory.add(p.mailbox.row_at(shape, 0)),
                stride: 4 * width,
                f32: true,
                epoch: lists.epoch,
                epoch_add: p.epoch_add,
                epoch_flag: memory,
                arrived: lists.arrived,
            }
        });
        let args = RopeAppend {
            qkv: ws.qkv.add(rows.start * width * 4),
            bias: layer.qkv_bias,
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            eps: eps(shape.norm),
            rope: layer.rope,
            rope_dim: shape.rope_dim,
            pairing: shape.pairing,
            row_pos: lists.row_pos.add(rows.start * 4),
            row_slot: lists.row_slot.add(rows.start * 4),
            q: ws.q.add(rows.start * shape.q_dim() * 2),
            kv,
            kv_type: shape.kv,
            publish,
            rows: rows.len(),
            ld: width,
            n_heads: shape.n_heads,
            n_kv_heads: shape.n_kv_heads,
            head_dim: shape.head_dim,
        };
        rope_append(self.rt(), cx.lane, &args)
    }

    fn attend(&self, cx: &Context<'_>, layer: &LayerWeights, kv: DevPtr) -> Result<()> {
        let (ws, step) = (cx.ws, lists(cx));
        let (work, window): (Lists, Option<u32>) = match (layer.windowed, step.window) {
            (true, Some(lists)) => (lists, cx.shape.window.map(|w| w as u32)),
            _ => (step.full, None),
        };
        let shape = attention_shape(cx.shape);
        let decode = DecodeAttention {
            q: ws.q,
            kv,
            page_table: step.page_table,
            items: work.decode.items,
            n_items: work.decode.n,
            max_items: work.decode.max,
            out: ws.attn,
            partial: ws.partial,
            workspace: step.scratch.attention(ws.scratch, &shape),
        };
        attention::decode_attention(self.rt(), cx.lane, &shape, &decode)?;
        let prefill = PrefillAttention {
            kernel: step.prefill,
            q: ws.q,
            kv,
            n_pages: step.n_pages,
            page_table: step.page_table,
            items: work.prefill.items,
            n_items: work.prefill.n,
            max_items: work.prefill.max,
            window,
            out: ws.attn,
            partial: ws.partial,
        };
        attention::prefill_attention(self.rt(), cx.lane, &shape, &prefill)
    }

    fn out_proj(&self, cx: &Context<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        self.to_delta(cx, &layer.o, cx.ws.attn, &rows)
    }

    fn ffn_up(
        &self,
        cx: &Context<'_>,
        layer: &LayerWeights,
        residual: Residual,
        rows: Range<usize>,
    ) -> Result<()> {
        self.norm_rows(cx, layer.ffn_norm, residual, &rows)?;
        let (ws, shape) = (cx.ws, cx.shape);
        let (d, ff) = (shape.d_model, shape.d_ff);
        let matmul = |w: &LinearWeight, y: DevPtr, ldy: usize, epilogue: Epilogue| {
            let x = ws.x.add(rows.start * d * 2);
            let (act, m, scratch) = (shape.act, rows.len(), linear_scratch(cx));
            Matmul { w, act, x, ldx: d, y, ldy, m, epilogue, scratch }.run(self.rt(), cx.lane)
        };
        let out = ws.act.add(rows.start * ff * 2);
        let epilogue = match shape.ffn {
            Ffn::SwiGlu => Epilogue::SwiGlu,
            Ffn::GeGlu => Epilogue::GeGlu,
            Ffn::Relu => Epilogue::Relu,
        };
        match &layer.up {
            UpWeight::GateUp(w) | UpWeight::Plain(w) => matmul(w, out, ff, epilogue),
            UpWeight::Separate(gate, up) => {
                // gate | up of a row side by side.
                let both = ws.gate_up.add(rows.start * 2 * ff * 4);
                matmul(gate, both, 2 * ff, Epilogue::F32)?;
                matmul(up, both.add(ff * 4), 2 * ff, Epilogue::F32)?;
                let args = Activate {
                    gate: both,
                    up: both.add(ff * 4),
                    gate_bias: DevPtr::NULL,
                    up_bias: DevPtr::NULL,
                    out,
                    rows: rows.len(),
                    n: ff,
                    ld_gate: 2 * ff,
                    ld_up: 2 * ff,
                    ld_out: ff,
                };
                activate(self.rt(), cx.lane, Activation::Ffn(shape.ffn, shape.act), &args)
            }
        }
    }

    fn ffn_down(&self, cx: &Context<'_>, layer: &LayerWeights, rows: Range<usize>) -> Result<()> {
        self.to_delta(cx, &layer.down, cx.ws.act, &rows)
    }

    fn logits(
        &self,
        cx: &Context<'_>,
        weight: NormWeight,
        head: &LinearWeight,
        residual: Residual,
    ) -> Result<()> {
        let (ws, shape, lists) = (cx.ws, cx.shape, lists(cx));
        let (delta, post) = match residual {
            Residual::None => (DevPtr::NULL, DevPtr::NULL),
            Residual::Delta => (ws.delta, DevPtr::NULL),
            Residual::Normed(w) => (ws.delta, w),
        };
        let rows = lists.launch_logits;
        let d = shape.d_model;
        let args = NormRows {
            norm: shape.norm,
            hidden: ws.hidden,
            delta,
            delta_bias: DevPtr::NULL,
            post,
            weight,
            sum: DevPtr::NULL,
            x: ws.head_x,
            act: shape.act,
            row_list: lists.logit_rows,
            rows,
            d,
            ld_delta: d,
            ld_x: d,
        };
        norm(self.rt(), cx.lane, &args)?;
        let matmul = Matmul {
            w: head,
            act: shape.act,
            x: ws.head_x,
            ldx: d,
            y: ws.logits,
            ldy: shape.vocab,
            m: rows,
            epilogue: Epilogue::F32,
            scratch: linear_scratch(cx),
        };
        matmul.run(self.rt(), cx.lane)?;
        match shape.logit_softcap {
            Some(cap) => softcap(self.rt(), cx.lane, ws.logits, cap, rows, shape.vocab, shape.vocab),
            None => Ok(()),
        }
    }

    fn argmax(&self, cx: &Context<'_>) -> Result<()> {
        let (ws, lists) = (cx.ws, lists(cx));
        let args = LogitsReduce {
            logits: ws.logits,
            workspace: ws.scratch.add(lists.scratch.logits),
            indices: ws.argmax,
            values: DevPtr::NULL,
            logsumexp: DevPtr::NULL,
            rows: lists.launch_logits,
            vocab: cx.shape.vocab,
            ld: cx.shape.vocab,
            k: 1,
        };
        logits_reduce(self.rt(), cx.lane, &args)
    }

    fn collect(&self, cx: &Context<'_>, mailbox: &Mailbox) -> Result<()> {
        let (lists, q) = (lists(cx), cx.shape.q_dim());
        if lists.max_published == 0 {
            return Ok(());
        }
        let args = MoveRows {
            from: mailbox.memory.device().add(mailbox.out_at(cx.shape, 0)),
            from_stride: 4 * q,
            to: cx.ws.attn,
            to_stride: 2 * q,
            from_list: DevPtr::NULL,
            to_list: lists.elsewhere,
            n_rows: lists.n_published,
            gate: DevPtr::NULL,
            max_rows: lists.max_published,
        };
        convert_rows(self.rt(), cx.lane, &args, q, cx.shape.act)
    }

    fn merge(&self, cx: &Context<'_>, other: &PartialRows) -> Result<()> {
        let lists = lists(cx);
        let args = MergeAttention {
            here: cx.ws.partial,
            elsewhere: *other,
            rows: lists.partial_rows,
            n_rows: lists.n_partial,
            max_rows: lists.max_partial,
            out: cx.ws.attn,
        };
        attention::merge_attention(self.rt(), cx.lane, &attention_shape(cx.shape), &args)
    }

    fn gather_pages(&self, cx: &Context<'_>, kv: DevPtr, pages: DevPtr, n: usize, out: DevPtr) -> Result<()> {
        pages_to_host(self.rt(), cx.lane, &page_move(cx.shape, kv, pages, n, out))
    }

    fn scatter_pages(
        &self,
        cx: &Context<'_>,
        kv: DevPtr,
        pages: DevPtr,
        n: usize,
        from: DevPtr,
    ) -> Result<()> {
        pages_from_host(self.rt(), cx.lane, &page_move(cx.shape, kv, pages, n, from))
    }
}

fn page_move(shape: &Shape, kv: DevPtr, pages: DevPtr, n: usize, host: DevPtr) -> PageMove {
    PageMove {
        device: kv,
        host,
        device_pages: pages,
        host_pages: DevPtr::NULL,
        n_tokens: DevPtr::NULL,
        n_pages: DevPtr::NULL,
        max_pages: n,
        n_kv_heads: shape.n_kv_heads,
        head_dim: shape.head_dim,
    }
}
