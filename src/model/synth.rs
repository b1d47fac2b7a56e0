//! Random weights of any spec, in memory, for measuring sizes for which no weights are available.
//!
//! ```text
//! synth:NAME[,dtype=D][,experts=D][,seed=N][,layers=N][,ctx=N]
//! NAME   a name from `synth::names()` (llama-3.2-1b, qwen3-8b, tiny-gemma3...), or the path of a config.json
//! dtype  of matrices: a name of `tensor::DType`: f32, bf16, q8_0, q4_k...        (bf16)
//! experts type of the experts' matrices, as in files that quantise only these      (dtype)
//! seed   of the random numbers                                                   (0)
//! layers how many blocks, ctx: the longest context                               (the config's)
//! ```
//! A matrix has elements of mean zero and standard deviation 1/sqrt(columns), those that write to the residual
//! stream 1/sqrt(2·layers) less, so activations neither vanish nor explode. Every row is a function of (seed, tensor
//! name, row) alone: the same on any number of threads. Quantised rows are made as codes and scales of the right
//! variance, not by quantising floats, which keeps this as fast as memory.

use std::path::Path;
use std::sync::Mutex;

use half::{bf16, f16};
use serde_json::Value as Json;

use super::check::{MAX_CONTEXT, MAX_LAYERS, wanted_tensors};
use super::formats::Files;
use super::stacks::{in_block, of_expert};
use super::{LoadedModel, ModelSpec, SamplingDefaults, TextSource, Weights, hf, validate};
use crate::host::memory_available;
use crate::tensor::formats::{BlockFormat, BlockScales, Scales, with_format};
use crate::tensor::{Bytes, DType, Tensor, bf16_bits};
use crate::{Error, Result, small_file};

macro_rules! specs {
    ($($name:literal),* $(,)?) => {
        /// The configurations in `specs/`.
        const SPECS: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../specs/", $name, ".json")))),*];
    };
}
specs!(
    "smollm2-135m",
    "llama-3.2-1b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-2-7b",
    "mistral-7b",
    "qwen2-0.5b",
    "qwen3-0.6b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "qwen1.5-moe-a2.7b",
    "mixtral-8x7b",
    "olmoe-1b-7b",
    "granite-3.1-3b-a800m",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "gemma-2-2b",
    "gemma-3-270m",
    "gemma-3-1b",
    "olmo-2-7b",
    "phi-3.5-mini",
    "granite-3.1-8b",
    "ministral-3-8b",
    "opt-125m",
    "opt-6.7b",
    "opt-13b",
    "opt-30b",
    "opt-66b",
    "opt-175b",
    "tiny-llama",
    "tiny-llama3",
    "tiny-llama-80",
    "tiny-mistral",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-gemma2",
    "tiny-gemma3",
    "tiny-olmo2",
    "tiny-phi3",
    "tiny-granite",
    "tiny-mistral3",
    "tiny-opt",
    "tiny-qwen3-moe",
    "tiny-qwen2-moe",
    "tiny-mixtral",
    "tiny-olmoe",
    "tiny-granite-moe",
    "tiny-gpt-oss",
);

/// The names that `synth:` knows.
pub fn names() -> impl Iterator<Item = &'static str> {
    SPECS.iter().map(|(n, _)| *n)
}

/// A parsed `synth:` request: sizes, and how to fill them.
#[derive(Debug, Clone)]
pub struct SynthRequest {
    /// The sizes.
    pub spec: ModelSpec,
    /// Type of the matrices.
    pub dtype: DType,
    /// Type of the experts' matrices.
    pub experts: DType,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Parses the text after `synth:`. Makes no weights, so it also serves planning for any size.
///
/// # Errors
/// If a name, option or value is unknown, or a config.json is missing or wrong.
pub fn parse(text: &str) -> Result<SynthRequest> {
    let mut parts = text.split(',');
    let name = parts.next().unwrap_or_default();
    let mut config = config(name, "synth:")?;
    let (mut dtype, mut experts, mut seed, mut context) = (DType::BF16, None, 0, None);
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let bad = |want: &str| Error::usage(format!("synth:{text}: {key}={value}: wanted {want}"));
        let number = || value.parse::<u64>().map_err(|_| bad("a number"));
        let up_to = |most: u64| match number()? {
            n if (1..=most).contains(&n) => Ok(n),
            _ => Err(bad(&format!("1 to {most}"))),
        };
        match key {
            "dtype" | "experts" => {
                let names = DType::ALL.map(DType::name).join(", ");
                let named = DType::from_name(value).ok_or_else(|| bad(&format!("one of {names}")))?;
                if key == "dtype" { dtype = named } else { experts = Some(named) }
            }
            "seed" => seed = number()?,
            "layers" => set_layers(&mut config, up_to(MAX_LAYERS as u64)?),
            "ctx" => context = Some(up_to(MAX_CONTEXT as u64)? as usize),
            _ => {
                return Err(Error::usage(format!(
                    "synth:{text}: `{part}`; options are dtype=, experts=, seed=, layers=, ctx="
                )));
            }
        }
    }
    let (_, mut spec) = hf::hf_spec(&config).map_err(|e| in_file(name, e))?;
    // Not set in the configuration, where scalings of RoPE stretch it.
    spec.max_context = context.unwrap_or(spec.max_context);
    spec.check()?;
    if spec.name.is_empty() {
        spec.name = name.to_owned();
    }
    Ok(SynthRequest { spec, dtype, experts: experts.unwrap_or(dtype), seed })
}

/// The sizes of a spec: a name from [`names`], or the path of a config.json.
///
/// # Errors
/// As [`parse`].
pub fn spec(name: &str) -> Result<ModelSpec> {
    let (_, mut spec) = hf::hf_spec(&config(name, "`spec` ")?).map_err(|e| in_file(name, e))?;
    spec.check()?;
    if spec.name.is_empty() {
        spec.name = name.to_owned();
    }
    Ok(spec)
}

/// Most bytes of a config.json.
const MAX_CONFIG: u64 = 16 << 20;

/// The configuration called `name`; `asked` is the text before it, for messages.
fn config(name: &str, asked: &str) -> Result<Json> {
    if let Some((_, json)) = SPECS.iter().find(|(n, _)| *n == name) {
        return Ok(serde_json::from_str(json).expect("embedded specs are valid JSON"));
    }
    let path = Path::new(name);
    if !path.is_file() && !name.ends_with(".json") {
        return Err(Error::usage(format!(
            "{asked}{name}: no such spec; give the path of a config.json or one of {}",
            names().collect::<Vec<_>>().join(", ")
        )));
    }
    let text = small_file::read(path, MAX_CONFIG)?.ok_or_else(|| small_file::missing(path))?;
    small_file::parse_json(&text).map_err(|e| Error::format(name, format!("not valid JSON: {e}")))
}

/// An error about the configuration `name`, which need not be called config.json.
fn in_file(name: &str, error: Error) -> Error {
    let named = |text: String| match text.strip_prefix("config.json") {
        Some(rest) => format!("{name}{rest}"),
        None => text,
    };
    match error {
        Error::Format { what, problem } => Error::Format { what: named(what), problem },
        Error::Unsupported(text) => Error::Unsupported(named(text)),
        other => other,
    }
}

/// Sets a key where the family will look for it.
fn set(config: &mut Json, key: &str, value: Json) {
    let inner = if config.get("text_config").is_some_and(Json::is_object) {
        &mut config["text_config"]
    } else {
        config
    };
    if let Some(map) = inner.as_object_mut() {
        map.insert(key.to_owned(), value);
    }
}

fn set_layers(config: &mut Json, n: u64) {
    set(config, "num_hidden_layers", n.into());
    // A list of layer types is extended with the same pattern.
    let at = if config.get("text_config").is_some_and(Json::is_object) {
        "/text_config/layer_types"
    } else {
        "/layer_types"
    };
    if let Some(list) = config.pointer_mut(at).and_then(Json::as_array_mut).filter(|l| !l.is_empty()) {
        *list = list.iter().cycle().take(n.min(1 << 16) as usize).cloned().collect();
    }
}

/// Makes the model that `text` (after `synth:`) describes.
///
/// # Errors
/// As [`parse`], and if the weights do not fit this machine's memory.
pub fn load(text: &str) -> Result<LoadedModel> {
    model(text, make)
}

/// The model that `text` describes, with zeros for weights, which take no memory. Names, types, shapes and sizes are
/// correct for a model of any size.
///
/// # Errors
/// As [`parse`].
pub fn outline(text: &str) -> Result<LoadedModel> {
    model(text, |request| {
        let (mut plans, _, notes) = plan(request);
        let longest = plans.iter().map(|p| p.bytes).max().unwrap_or(0);
        // All tensors are the same zeros; pages that are never written take no memory.
        plans.iter_mut().for_each(|p| p.offset = 0);
        let zeros = memmap2::MmapMut::map_anon(longest.max(1)).and_then(|map| map.make_read_only());
        let zeros = zeros.map_err(|e| Error::Capacity(format!("synth: {longest} bytes of zeros: {e}")))?;
        Ok((views(plans, &Bytes::from_anonymous(zeros))?, notes))
    })
}

fn model(
    text: &str,
    weights_of: impl Fn(&SynthRequest) -> Result<(Weights, Vec<String>)>,
) -> Result<LoadedModel> {
    let request = parse(text)?;
    let (weights, notes) = weights_of(&request)?;
    validate(&request.spec, &weights)?;
    Ok(LoadedModel {
        spec: request.spec,
        weights,
        text: TextSource::None,
        chat_template: None,
        eos_ids: Vec::new(),
        sampling: SamplingDefaults::default(),
        source: format!("synth:{text}"),
        files: Files::default(),
        notes,
    })
}

/// The plan of one tensor.
struct TensorPlan {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    fill: Fill,
    offset: usize,
    bytes: usize,
}

/// mean + std·normal (quantised types: mean 0).
#[derive(Clone, Copy)]
struct Fill {
    mean: f32,
    std: f32,
}

/// The dtype of a matrix with `cols` columns: `asked`, or a replacement if its blocks are too long.
fn fitting(asked: DType, cols: usize) -> DType {
    if asked.row_bytes(cols).is_some() {
        asked
    } else if DType::Q8_0.row_bytes(cols).is_some() {
        DType::Q8_0
    } else {
        DType::F16
    }
}

/// Every tensor with its place in an arena, the arena's length, and a note for each dtype that had to be replaced.
fn plan(request: &SynthRequest) -> (Vec<TensorPlan>, usize, Vec<String>) {
    let SynthRequest { spec, dtype, experts, .. } = request;
    let mut plans = Vec::new();
    let mut total = 0usize;
    let mut replaced: Vec<(usize, DType, DType)> = Vec::new();
    for (name, wanted) in wanted_tensors(spec) {
        if !wanted.required {
            continue;
        }
        let shape = wanted.shape;
        let cols = *shape.last().expect("no tensor is a scalar");
        let residual = name.ends_with("attn_output.weight") || name.contains(".ffn_down");
        let is_router = name.ends_with("ffn_gate_inp.weight");
        let (dtype, fill) = if shape.len() == 1 {
            let (mean, std) = match () {
                () if name.ends_with("norm.weight") => (1.0, 0.1),
                // About as large as scores.
                () if name.ends_with("attn_sinks.weight") => (0.0, 1.0),
                () => (0.0, 0.02),
            };
            (DType::F32, Fill { mean, std })
        } else {
            let std = (cols as f32).powf(-0.5)
                * if residual { (2.0 * spec.n_layers as f32).powf(-0.5) } else { 1.0 };
            let is_table = name.starts_with("position_embd");
            let of_expert = in_block(&name).is_some_and(|(_, stem, _)| of_expert(stem).is_some());
            let asked = if of_expert { experts } else { dtype };
            let d = match asked.is_quantised() {
                // As in files: rounding a router changes which experts are chosen.
                true if is_router => DType::F32,
                true if is_table => DType::F16,
                _ => fitting(*asked, cols),
            };
            let note = (cols, d, *asked);
            if d != *asked && !is_table && !is_router && !replaced.contains(&note) {
                replaced.push(note);
            }
            (d, Fill { mean: 0.0, std })
        };
        let bytes = dtype.row_bytes(cols).expect("the dtype fits")
            * shape[..shape.len() - 1].iter().product::<usize>();
        let offset = total;
        total = (total + bytes).next_multiple_of(64);
        plans.push(TensorPlan { name, shape, dtype, fill, offset, bytes });
    }
    let notes = replaced
        .iter()
        .map(|(cols, d, asked)| {
            format!("matrices of {cols} columns are {d}: {cols} is no multiple of {asked}'s block")
        })
        .collect();
    (plans, total, notes)
}

fn make(request: &SynthRequest) -> Result<(Weights, Vec<String>)> {
    let SynthRequest { spec, dtype, seed, .. } = request;
    let (plans, total, notes) = plan(request);
    if let Some(have) = memory_available().filter(|&have| total as u64 > have) {
        let gib = |b: u64| b as f64 / (1u64 << 30) as f64;
        return Err(Error::Capacity(format!(
            "synth: {} in {dtype} needs {:.1} GiB, {:.1} GiB of memory are available; try layers=N or a smaller dtype",
            spec.name,
            gib(total as u64),
            gib(have)
        )));
    }
    let arena = fill(&plans, total, *seed)?;
    Ok((views(plans, &arena)?, notes))
}

fn views(plans: Vec<TensorPlan>, arena: &Bytes) -> Result<Weights> {
    let mut weights = Weights::default();
    for p in plans {
        let data = arena.slice(p.offset, p.bytes).expect("the arena holds every tensor");
        weights.insert(p.name, Tensor::new(p.dtype, p.shape, data)?);
    }
    Ok(weights)
}

/// Bytes that one worker fills before it asks for more.
const PIECE: usize = 1 << 20;

fn fill(plans: &[TensorPlan], total: usize, seed: u64) -> Result<Bytes> {
    let failed = |e| Error::Capacity(format!("synth: {total} bytes of memory: {e}"));
    let mut map = memmap2::MmapMut::map_anon(total).map_err(failed)?;
    // Fewer page faults now, and fewer TLB misses when weights are read. This is only advice, which the system may
    // refuse.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);

    // Divide the arena into pieces of whole rows.
    let mut pieces = Vec::new();
    let mut rest: &mut [u8] = &mut map;
    let mut at = 0;
    for p in plans {
        let (_, tail) = rest.split_at_mut(p.offset - at);
        let (mut data, tail) = tail.split_at_mut(p.bytes);
        (rest, at) = (tail, p.offset + p.bytes);
        let row_bytes = p.dtype.row_bytes(p.shape[p.shape.len() - 1]).expect("checked when planned");
        let step = (PIECE / row_bytes).max(1) * row_bytes;
        let mut row = 0;
        while !data.is_empty() {
            let (piece, tail) = data.split_at_mut(step.min(data.len()));
            data = tail;
            pieces.push((p, row, piece, row_bytes));
            row += step / row_bytes;
        }
    }
    let queue = Mutex::new(pieces.into_iter());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|s| {
        for _ in 0..threads {
            s.spawn(|| {
                loop {
                    let next = queue.lock().expect("no worker panics with the lock held").next();
                    let Some((p, first, piece, row_bytes)) = next else { break };
                    let key = name_key(seed, &p.name);
                    for (i, row) in piece.chunks_exact_mut(row_bytes).enumerate() {
                        fill_row(p.dtype, p.fill, &mut Random::new(key, (first + i) as u64), row);
                    }
                }
            });
        }
    });
    Ok(Bytes::from_anonymous(map.make_read_only().map_err(failed)?))
}

/// One generator per tensor name (FNV-1a).
fn name_key(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// splitmix64: a counter through a mixing function.
struct Random(u64);

impl Random {
    fn new(key: u64, row: u64) -> Self {
        let mut r = Random(key ^ row.wrapping_mul(0xd1b5_4a32_d192_ed03));
        // A second mix, so that neighbouring rows do not start at neighbouring counters.
        Random(r.next())
    }

    #[inline]
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Two roughly normal numbers of mean 0 and variance 1: each the sum of two uniform 16-bit numbers. One mix
    /// for both, because making numbers is what limits float models (8 billion of them for an 8B model).
    #[inline]
    fn normals(&mut self) -> [f32; 2] {
        let z = self.next();
        // Two uniforms over 0..65536: mean 65535, variance 2·65536²/12.
        let one = |z: u32| ((z & 0xffff) + (z >> 16)) as i32 as f32 * (1.0 / 26_754.9) - 65_535.0 / 26_754.9;
        [one(z as u32), one((z >> 32) as u32)]
    }

    /// Within 0.75..1.25, mean square 1.02.
    #[inline]
    fn jitter(&mut self) -> f32 {
        0.75 + (self.next() >> 40) as f32 * (0.5 / (1u64 << 24) as f32)
    }

    fn bytes(&mut self, out: &mut [u8]) {
        let mut chunks = out.chunks_exact_mut(8);
        for c in &mut chunks {
            c.copy_from_slice(&self.next().to_le_bytes());
        }
        let rest = chunks.into_remainder();
        let n = rest.len();
        rest.copy_from_slice(&self.next().to_le_bytes()[..n]);
    }

    /// Eight numbers of 16..32.
    fn scales(&mut self) -> [u8; 8] {
        self.next().to_le_bytes().map(|b| 16 | (b & 15))
    }
}

/// Root mean square of the scales that [`Random::scales`] draws: sqrt(23.5² + 255/12).
const SCALE_RMS: f32 = 23.948;

/// The same of their halves, rounded down: sqrt(11.5² + 63/12).
const HALF_SCALE_RMS: f32 = 11.726;

fn fill_row(dtype: DType, fill: Fill, r: &mut Random, row: &mut [u8]) {
    let Fill { mean, std } = fill;
    match dtype {
        DType::F32 => normals(row, r, |x| (mean + std * x).to_le_bytes()),
        DType::F16 => normals(row, r, |x| f16::from_f32(mean + std * x).to_le_bytes()),
        DType::BF16 => normals(row, r, |x| bf16_bits(mean + std * x).to_le_bytes()),
        quantised => with_format!(quantised, F => {
            row.chunks_exact_mut(F::BYTES).for_each(|block| fill_block::<F>(std, r, block));
        }),
    }
}

/// Fills a row of N-byte floats.
fn normals<const N: usize>(row: &mut [u8], r: &mut Random, encode: impl Fn(f32) -> [u8; N]) {
    for pair in row.chunks_mut(2 * N) {
        for (o, x) in pair.chunks_exact_mut(N).zip(r.normals()) {
            o.copy_from_slice(&encode(x));
        }
    }
}

/// Uniform codes; a scale that gives them standard deviation `std`. Codes that are not symmetric about zero
/// (-8..=7) get scales of either sign, so that the mean is zero over blocks.
fn fill_block<F: BlockFormat>(std: f32, r: &mut Random, b: &mut [u8]) {
    r.bytes(b);
    let std = std * r.jitter();
    let sign = if r.next() >> 63 == 0 { 1.0 } else { -1.0 };
    let half = |v: f32| f16::from_f32(v).to_bits();
    // The mean of codes that have a minimum.
    let centre = ((1 << F::BITS) - 1) as f32 / 2.0;
    let mut s = BlockScales::default();
    match F::SCALES {
        Scales::Scale => s.d = half(sign * std / F::STD),
        Scales::PowerOfTwo => {
            // One of the two powers around the scale, so that the mean square is right.
            let scale = std / F::STD;
            let power = f32::from_bits(scale.to_bits() >> 23 << 23);
            let larger = ((scale / power).powi(2) - 1.0) / 3.0;
            let drawn = (r.next() >> 40) as f32 / (1u64 << 24) as f32;
            s.d = bf16::from_f32(if drawn < larger { 2.0 * power } else { power }).to_bits();
        }
        Scales::ScaleMin => (s.d, s.m) = (half(std / F::STD), half(-centre * std / F::STD)),
        Scales::SuperMin => {
            // Minima equal to the scales, at a rate that centres the codes: x = d·sc·(q - centre).
            s.subs[..8].copy_from_slice(&r.scales());
            if F::SUB == 16 {
                s.subs[8..].copy_from_slice(&r.scales());
            }
            let mut rms = SCALE_RMS;
            if F::SUB_MAX < 31 {
                (s.subs, rms) = (s.subs.map(|sub| sub >> 1), HALF_SCALE_RMS);
            }
            let d = std / (F::STD * rms);
            (s.d, s.m) = (half(d), half(centre * d));
            s.sub_mins = s.subs;
        }
        Scales::SuperSigned => {
            s.d = half(sign * std / (F::STD * SCALE_RMS));
            s.subs[..8].copy_from_slice(&r.scales());
            s.subs[8..].copy_from_slice(&r.scales().map(u8::wrapping_neg));
        }
    }
    F::put_scales(&s, b);
}
