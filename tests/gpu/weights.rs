//! Weights by layer: a model whose layers are streamed through two staging buffers computes the bits of one whose layers
//! are resident, on every accelerator of this machine.

use std::sync::Arc;

use crate::support::gpu;
use crate::support::models::dense_models;
use tandem::Error;
use tandem::cache::PAGE_TOKENS;
use tandem::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime};
use tandem::device::{
    Accelerator, Attend, AttnTables, Buffer, DevPtr, EmbedWeight, Lane, LayerWeights, Limits, LinearWeight,
    NormWeight, Residual, RowOp, Runtime, Shape, StepContext, StepDesc, StepSeq, SubBatch, SubBatches,
    on_kernels,
};
use tandem::engine::{
    LayerImage, LayerLayout, LayerSource, LayerStream, Upload, activation_type, embedding_bytes, head_bytes,
    linear_shapes, separate_gate_up, table_bytes,
};
use tandem::host::Pool;
use tandem::model::{LoadedModel, load};
use tandem::tensor::{DType, Half};

const LANE: Lane = Lane::Compute;
const CONTEXT: usize = 64;
const PROMPT: usize = 40;

fn accelerators() -> Vec<(String, Arc<dyn Accelerator>)> {
    let on_kernels = |rt| on_kernels(rt).expect("a runtime with kernels");
    let kernels = gpu::runtimes().into_iter().map(|rt| (rt.info().name.clone(), on_kernels(rt)));
    let plain: Arc<dyn Accelerator> = Arc::new(EmulatedAccelerator::new(Arc::new(
        EmulatedRuntime::new(EmulatedOptions { jitter: Some(3), ..Default::default() }).expect("it starts"),
    )));
    kernels.chain([("plain functions".to_owned(), plain)]).collect()
}

/// What a model needs besides its layers.
struct Bench<'a> {
    accel: &'a Arc<dyn Accelerator>,
    shape: Shape,
    limits: Limits,
    sub: SubBatch,
    tables: Vec<AttnTables>,
    embed: EmbedWeight,
    norm: NormWeight,
    head: LinearWeight,
    kv: Vec<Buffer>,
    _buffers: Vec<Buffer>,
}

/// Where layers are.
enum Layers<'a> {
    Resident(&'a [LayerWeights]),
    Streamed(&'a [LayerImage], LayerStream),
}

impl Bench<'_> {
    /// The logits of a prompt's last token and of three more.
    fn run(&self, layers: &mut Layers<'_>) -> Vec<u8> {
        let rt = self.accel.runtime();
        self.kv.iter().for_each(|kv| rt.fill(LANE, kv.ptr(), 0, kv.len()).unwrap());
        let tokens: Vec<u32> = (0..PROMPT as u32 + 3).map(|i| (i * i * 3 + i + 1) % 50).collect();
        let pages: Vec<u32> = (0..(CONTEXT / PAGE_TOKENS) as u32).rev().collect();
        let mut out = Vec::new();
        for (first_pos, n_rows) in [(0, PROMPT), (PROMPT, 1), (PROMPT + 1, 1), (PROMPT + 2, 1)] {
            let seqs = [StepSeq { pages: &pages, first_pos, row0: 0, n_rows, attend: Attend::Here }];
            let desc = StepDesc {
                seqs: &seqs,
                tokens: &tokens[first_pos..first_pos + n_rows],
                logit_rows: &[n_rows as u32 - 1],
                cuts: &[],
                epoch: 0,
                launch_rows: self.accel.row_bucket(n_rows),
            };
            let step = self.accel.prepare(LANE, &self.shape, &self.limits, &desc, self.sub.lists).unwrap();
            let cx = StepContext { lane: LANE, shape: &self.shape, ws: &self.sub.ws, step: &step };
            self.forward(&cx, layers).unwrap();
            let logits = self.sub.ws.logit_rows(&self.shape, &(0..1));
            let mut bytes = vec![0; logits.bytes];
            rt.download(LANE, logits.ptr, &mut bytes).unwrap();
            out.extend(bytes);
        }
        out
    }

    fn forward(&self, cx: &StepContext<'_>, layers: &mut Layers<'_>) -> tandem::Result<()> {
        let (a, rows) = (self.accel, cx.all());
        a.enqueue(cx, RowOp::Embed(&self.embed), rows.clone())?;
        if let Layers::Streamed(images, stream) = layers {
            stream.fetch(&images[0])?;
        }
        for (i, kv) in self.kv.iter().enumerate() {
            let layer = match layers {
                Layers::Resident(layers) => layers[i].clone(),
                Layers::Streamed(images, stream) => {
                    // The next layer's copy is enqueued before this layer's work.
                    images.get(i + 1).map_or(Ok(()), |next| stream.fetch(next))?;
                    let layout = &images[i].layout;
                    stream.acquire(layout, self.tables[layout.layer])?
                }
            };
            a.enqueue(
                cx,
                RowOp::Qkv { layer: &layer, kv: kv.ptr(), residual: Residual::None, publish: None },
                rows.clone(),
            )?;
            a.enqueue(cx, RowOp::Attend { layer: &layer, kv: kv.ptr() }, rows.clone())?;
            a.enqueue(cx, RowOp::OutProj(&layer), rows.clone())?;
            a.enqueue(
                cx,
                RowOp::FfnUp { layer: &layer, residual: Residual::after(layer.post_attn) },
                rows.clone(),
            )?;
            a.enqueue(cx, RowOp::FfnDown(&layer), rows.clone())?;
            // Before the layer's buffer is given up: the norm of what is added is the layer's, too.
            a.enqueue(cx, RowOp::Fold(Residual::after(layer.post_ffn)), rows.clone())?;
            if let Layers::Streamed(_, stream) = layers {
                stream.release(i)?;
            }
        }
        a.enqueue(cx, RowOp::Logits { norm: self.norm, head: &self.head, residual: Residual::None }, rows)
    }
}

fn check(device: &str, accel: &Arc<dyn Accelerator>, m: &LoadedModel, name: &str) {
    let rt: &Arc<dyn Runtime> = accel.runtime();
    let (spec, pool) = (&m.spec, Pool::new(1));
    let act = activation_type(&**accel, spec, &m.weights).unwrap();
    let shape = Shape::of(spec, act, act);
    let limits = Limits {
        rows: accel.row_bucket(PROMPT),
        logit_rows: 1,
        sequences: 1,
        pages_per_sequence: CONTEXT / PAGE_TOKENS,
    };
    let linears = linear_shapes(&**accel, spec, &m.weights).unwrap();
    let separate = separate_gate_up(&**accel, spec, &m.weights).unwrap();
    let plan = SubBatches::plan(&**accel, &shape, &[limits], &linears, separate, false);
    let mut up = Upload::new(accel, spec, &m.weights, act, &pool, &|_| ());
    let tables = up.tables(CONTEXT).unwrap();
    let layouts: Vec<LayerLayout> =
        (0..spec.n_layers).map(|i| LayerLayout::new(&**accel, spec, &m.weights, i, act).unwrap()).collect();
    let resident: Vec<LayerWeights> =
        layouts.iter().map(|l| l.at(up.layer(l).unwrap(), tables[l.layer])).collect();
    let images: Vec<LayerImage> =
        layouts.iter().map(|l| LayerImage::new(l.clone(), &up.source()).unwrap()).collect();
    let (norm, head) = up.head().unwrap();
    let embed = up.embedding(Some(&head)).unwrap();
    let mut buffers = up.finish().unwrap();
    let memory = Buffer::new(rt, plan.bytes()).unwrap();
    rt.fill(LANE, memory.ptr(), 0, memory.len()).unwrap();
    let sub = plan.at(memory.ptr())[0];
    buffers.push(memory);
    let kv_bytes = limits.pages_per_sequence * shape.page_bytes();
    let kv = (0..spec.n_layers).map(|_| Buffer::new(rt, kv_bytes).unwrap()).collect();
    let bench = Bench { accel, shape, limits, sub, tables, embed, norm, head, kv, _buffers: buffers };
    let want = bench.run(&mut Layers::Resident(&resident));
    let bytes = layouts.iter().map(|l| l.bytes).max().unwrap();
    for slots in [2, 3] {
        let stream = LayerStream::new(rt, slots, bytes).unwrap();
        let got = bench.run(&mut Layers::Streamed(&images, stream));
        assert!(got == want, "{device}, {name}, {slots} buffers: other bits than with resident layers");
    }
    assert!(want.iter().any(|&b| b != 0));
}

#[test]
fn streamed_layers_give_the_bits_of_resident_ones() {
    for (device, accel) in accelerators() {
        // Kernels on the host are slow: one type is what a test has time for, of two families in the orders of the stand-in.
        let stand_in = gpu::is_stand_in(&device);
        let few = |n: &&str| !stand_in || ["tiny-llama", "tiny-gemma3"].contains(n);
        for name in dense_models().filter(few) {
            let dtypes = ["q4_k", "bf16"];
            for dtype in &dtypes[..if stand_in || device.contains("mulated") { 1 } else { 2 }] {
                let m = load(&format!("synth:{name},dtype={dtype},seed=11")).unwrap();
                check(&device, &accel, &m, &format!("{name} {dtype}"));
            }
        }
    }
}

/// Bytes that all weights take on the device, as the engine plans them.
fn planned_bytes(accel: &dyn Accelerator, m: &LoadedModel, act: Half) -> u64 {
    let (spec, weights) = (&m.spec, &m.weights);
    let layers =
        (0..spec.n_layers).map(|i| LayerLayout::new(accel, spec, weights, i, act).unwrap().bytes as u64);
    table_bytes(spec, CONTEXT)
        + embedding_bytes(accel, spec, weights, act, true).unwrap()
        + head_bytes(accel, spec, weights, act).unwrap()
        + layers.sum::<u64>()
}

#[test]
fn a_layer_is_one_image_and_its_bytes_are_known_before() {
    for (device, accel) in accelerators() {
        for name in dense_models() {
            let m = load(&format!("synth:{name},dtype=q8_0,seed=2")).unwrap();
            let act = activation_type(&*accel, &m.spec, &m.weights).unwrap();
            let free = accel.runtime().memory_free().unwrap();
            let planned = planned_bytes(&*accel, &m, act);
            let pool = Pool::new(1);
            let mut up = Upload::new(&accel, &m.spec, &m.weights, act, &pool, &|_| ());
            let tables = up.tables(CONTEXT).unwrap();
            for layer in 0..m.spec.n_layers {
                up.layer(&LayerLayout::new(&*accel, &m.spec, &m.weights, layer, act).unwrap()).unwrap();
            }
            let (_, head) = up.head().unwrap();
            up.embedding(Some(&head)).unwrap();
            let _buffers = up.finish().unwrap();
            let taken = free - accel.runtime().memory_free().unwrap();
            // CUDA hands out memory by larger pieces than the emulated accelerator.
            if device.contains("mulated") || device.contains("plain") {
                assert!(taken <= planned, "{device}, {name}: {taken} bytes taken, {planned} planned");
                assert!(
                    planned - taken < 256 * (m.spec.n_layers as u64 + 9),
                    "{device}, {name}: {planned}, {taken}"
                );
            }
            // Every address of a layer lies in its image, wherever that is.
            let layout = LayerLayout::new(&*accel, &m.spec, &m.weights, 1, act).unwrap();
            let of_layer = tables[layout.layer];
            let (here, there) = (layout.at(DevPtr(1 << 20), of_layer), layout.at(DevPtr(1 << 30), of_layer));
            assert_eq!(here.moved(DevPtr(1 << 20), DevPtr(1 << 30)), there, "{name}");
            let pre_norms = [here.attn_norm.w, here.ffn_norm.w];
            assert!(pre_norms.iter().all(|w| w.is_null() != m.spec.pre_norms), "{name}");
            let norms = pre_norms.into_iter().filter(|w| !w.is_null());
            for ptr in norms.chain([here.qkv[0].ptr, here.o.ptr, here.ffn.dense().unwrap().down.ptr]) {
                assert!((1 << 20..(1 << 20) + layout.bytes as u64).contains(&ptr.0), "{name}: {ptr:?}");
                assert!(ptr.0.is_multiple_of(256), "{name}: {ptr:?}");
            }
            assert_eq!(here.tables, of_layer, "{name}: tables do not move");
        }
    }
}

#[test]
fn a_stream_refuses_what_would_overwrite_a_layer_in_use() {
    for (_, accel) in accelerators() {
        let m = load("synth:tiny-llama,dtype=bf16,seed=1").unwrap();
        let act = activation_type(&*accel, &m.spec, &m.weights).unwrap();
        let pool = Pool::new(1);
        let source = LayerSource { accel: &*accel, weights: &m.weights, act, pool: &pool, progress: &|_| () };
        let layout = LayerLayout::new(&*accel, &m.spec, &m.weights, 0, act).unwrap();
        let image = LayerImage::new(layout.clone(), &source).unwrap();
        let rt = accel.runtime();
        let mut small = LayerStream::new(rt, 2, layout.bytes - 1).unwrap();
        let e = small.fetch(&image).unwrap_err();
        assert!(matches!(&e, Error::Capacity(m) if m.contains(&layout.bytes.to_string())), "{e}");
        let mut stream = LayerStream::new(rt, 1, layout.bytes).unwrap();
        let tables = AttnTables::default();
        assert!(matches!(stream.acquire(&layout, tables), Err(Error::Usage(_))), "it was not fetched");
        stream.fetch(&image).unwrap();
        let e = stream.fetch(&image).unwrap_err();
        assert!(matches!(&e, Error::Usage(m) if m.contains("in use")), "{e}");
        stream.acquire(&layout, tables).unwrap();
        stream.release(0).unwrap();
        stream.fetch(&image).unwrap();
        rt.synchronize_all().unwrap();
    }
}

/// Before anything is packed or uploaded. Plain functions decode any type.
#[test]
fn types_that_have_no_kernels_are_refused_by_name() {
    for (name, accel) in accelerators() {
        for dtype in DType::QUANTISED {
            let m = load(&format!("synth:tiny-llama,dtype={dtype},seed=1")).unwrap();
            let lacks = name != "plain functions" && dtype == DType::IQ4_NL;
            match (accel.activations_for(dtype), activation_type(&*accel, &m.spec, &m.weights)) {
                (Some(one), Ok(all)) => assert!(one == all && !lacks, "{name} takes {dtype}"),
                (None, Err(Error::Unsupported(why))) => {
                    assert!(why.contains(&format!("has no kernel for {dtype} weights")), "{why}");
                }
                (one, all) => panic!("{name}, {dtype}: {one:?} for the type, {all:?} for the model"),
            }
        }
    }
}
