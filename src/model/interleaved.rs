//! Experts as gpt-oss has them in safetensors: stacks in which gates and first matrices alternate, in one of two forms.
//!
//! ```text
//! gate_up_proj_blocks [E, 2I, d/32, 16]  gate_up_proj_scales [E, 2I, d/32]  rows g₀ u₀ g₁ u₁ …, MXFP4: element 2i of a block of 32 is
//! down_proj_blocks    [E, d, I/32, 16]   down_proj_scales    [E, d, I/32]   the low half of byte i, element 2i + 1 the high half
//! gate_up_proj        [E, d, 2I]         down_proj           [E, I, d]      floats, transposed: columns g₀ u₀ g₁ u₁ …
//! gate_up_proj_bias   [E, 2I]            down_proj_bias      [E, d]
//! ```
//! No kernel reads these, so they are rearranged when a folder is loaded, into stacks as GGUF files have them: as much memory as
//! the files have bytes for experts, which is checked first.

use std::collections::BTreeMap;
use std::sync::Mutex;

use super::ModelSpec;
use super::arch::{self, Family};
use super::block::tensor_name;
use super::formats::safetensors::{Contents, Raw};
use super::stacks::{STACKS, in_block};
use crate::host::memory_available;
use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};

/// Elements of an MXFP4 block, and its bytes here (nibbles alone) and in a tensor (behind a scale).
const BLOCK: usize = 32;
const NIBBLES: usize = 16;
const STORED: usize = 1 + NIBBLES;

/// A family's name for a tensor, with the kind that GGUF's names end in: `….gate_up_proj_bias` is `….gate_up_proj.bias`.
pub(super) fn with_kind(name: &str) -> String {
    for kind in ["blocks", "scales", "bias"] {
        if let Some(stem) = name.strip_suffix(kind).and_then(|n| n.strip_suffix('_')) {
            return format!("{stem}.{kind}");
        }
    }
    if [".sinks", "_proj"].iter().any(|end| name.ends_with(end)) {
        format!("{name}.weight")
    } else {
        name.into()
    }
}

/// The name in files of what [`with_kind`] calls `name`.
pub(super) fn without_kind(name: &str) -> String {
    let Some((stem, kind)) = name.rsplit_once('.') else { return name.into() };
    match kind {
        "weight" if stem.ends_with(".sinks") || stem.contains(".experts.") => stem.into(),
        "bias" if stem.contains(".experts.") => format!("{stem}_bias"),
        _ => name.into(),
    }
}

/// Whether a tensor of bytes is one of MXFP4's two parts.
pub(super) fn is_raw(name: &str) -> bool {
    name.ends_with("_blocks") || name.ends_with("_scales")
}

/// One stack, as far as it was found.
#[derive(Default)]
struct Found {
    /// Its name in the file, without kind.
    name: String,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    blocks: Option<Raw>,
    scales: Option<Raw>,
}

/// The tensors of a folder without stacks, under names that end in a kind; and the stacks, rearranged, under canonical names.
///
/// # Errors
/// A stack has another shape than the sizes imply, a part of it is missing or there twice, or there is too little memory.
#[allow(clippy::type_complexity)] // two lists of named tensors
pub(super) fn rearranged(
    family: &Family,
    spec: &ModelSpec,
    all: Contents,
) -> Result<(Vec<(String, Tensor)>, Vec<(String, Tensor)>)> {
    let Contents { tensors, raw } = all;
    let (mut rest, mut stacks) = (Vec::new(), BTreeMap::<(usize, &'static str), Found>::new());
    let stack_of = |file_name: &str, named: &str| {
        let stem = named.rsplit_once('.')?.0;
        let canonical = arch::canonical_name(family.names, &format!("{stem}.weight"))?;
        let (layer, stack, _) = in_block(&canonical)?;
        let (stack, _) = STACKS.iter().find(|(s, _)| *s == stack)?;
        let name = file_name.strip_suffix("_bias").or(file_name.strip_suffix("_blocks"));
        let name = name.or(file_name.strip_suffix("_scales")).unwrap_or(file_name).to_owned();
        Some((layer, *stack, name))
    };
    let twice = |name: &str| Error::format(name, "a second tensor for the same experts");
    for (name, t) in tensors {
        let named = with_kind(&name);
        let Some((layer, stack, stem)) = stack_of(&name, &named) else {
            rest.push((named, t));
            continue;
        };
        let found = stacks.entry((layer, stack)).or_default();
        found.name = stem;
        let place = if named.ends_with(".bias") { &mut found.bias } else { &mut found.weight };
        if place.replace(t).is_some() {
            return Err(twice(&name));
        }
    }
    for (name, r) in raw {
        let named = with_kind(&name);
        // Bytes of other parts of a model are nobody's.
        let Some((layer, stack, stem)) = stack_of(&name, &named) else { continue };
        let found = stacks.entry((layer, stack)).or_default();
        found.name = stem;
        let place = if named.ends_with(".scales") { &mut found.scales } else { &mut found.blocks };
        if place.replace(r).is_some() || found.weight.is_some() {
            return Err(twice(&name));
        }
    }
    for (&(layer, stack), found) in &stacks {
        check(spec, layer, stack, found)?;
    }
    let bytes: usize = stacks.values().map(Found::bytes).sum();
    if let Some(have) = memory_available().filter(|&have| bytes as u64 > have) {
        let gib = |b: u64| b as f64 / (1u64 << 30) as f64;
        return Err(Error::Capacity(format!(
            "experts in this layout are rearranged in memory, which takes {:.1} GiB, {:.1} GiB are available; a GGUF file of the \
             model needs no such copy",
            gib(bytes as u64),
            gib(have)
        )));
    }
    let mut made = Vec::new();
    for ((layer, stack), found) in stacks {
        made.extend(found.rearranged(spec, layer, stack)?);
    }
    Ok((rest, made))
}

/// The sizes of a stack: experts, parts of each, and rows and columns of a part.
fn sizes(spec: &ModelSpec, stack: &str) -> Option<(usize, &'static [&'static str], usize, usize)> {
    let (_, parts) = STACKS.iter().find(|(s, _)| *s == stack)?;
    let e = spec.experts.as_ref()?;
    let (rows, cols) = if stack == "ffn_down_exps" { (spec.d_model, e.d_ff) } else { (e.d_ff, spec.d_model) };
    Some((e.count, parts, rows, cols))
}

/// Checks every shape of a stack.
fn check(spec: &ModelSpec, layer: usize, stack: &str, found: &Found) -> Result<()> {
    let name = &found.name;
    let Some((e, parts, rows, cols)) = sizes(spec, stack).filter(|_| spec.experts_of(layer).is_some()) else {
        return Err(Error::format(
            name,
            format!("experts of layer {layer}, which has none; is this another model's file?"),
        ));
    };
    let rows = parts.len() * rows;
    let same = |kind: &str, shape: &[usize], wanted: &[usize]| match shape == wanted {
        true => Ok(()),
        false => Err(Error::format(
            format!("{name}{kind}"),
            format!("shape {shape:?}, config.json implies {wanted:?} ({e} experts); is the file damaged?"),
        )),
    };
    if let Some(t) = &found.weight {
        same("", &t.shape, &[e, cols, rows])?;
    }
    if let Some(t) = &found.bias {
        same("_bias", &t.shape, &[e, rows])?;
    }
    match (&found.blocks, &found.scales) {
        (None, None) => Ok(()),
        (Some(_), None) => {
            Err(Error::format(format!("{name}_scales"), format!("missing beside {name}_blocks")))
        }
        (None, Some(_)) => {
            Err(Error::format(format!("{name}_blocks"), format!("missing beside {name}_scales")))
        }
        (Some(_), Some(_)) if !cols.is_multiple_of(BLOCK) => Err(Error::format(
            format!("{name}_blocks"),
            format!("rows of {cols} elements do not split into blocks of {BLOCK}"),
        )),
        (Some(blocks), Some(scales)) => {
            // Some writers leave the division into blocks out.
            if blocks.shape != [e, rows, cols / 2] {
                same("_blocks", &blocks.shape, &[e, rows, cols / BLOCK, NIBBLES])?;
            }
            same("_scales", &scales.shape, &[e, rows, cols / BLOCK])
        }
    }
}

impl Found {
    /// Bytes of the rearranged tensors, as many as it has now.
    fn bytes(&self) -> usize {
        let floats = [&self.weight, &self.bias].into_iter().flatten().map(|t| t.data.len());
        let raw = [&self.blocks, &self.scales].into_iter().flatten().map(|r| r.data.len());
        floats.chain(raw).sum()
    }

    /// A tensor for each part, and one for its biases. Shapes were checked.
    fn rearranged(self, spec: &ModelSpec, layer: usize, stack: &str) -> Result<Vec<(String, Tensor)>> {
        let (e, parts, rows, cols) = sizes(spec, stack).expect("checked");
        let n = parts.len();
        let mut made = Vec::new();
        for (p, part) in parts.iter().enumerate() {
            let name = |kind| tensor_name(layer, &format!("{part}_exps"), kind);
            if let (Some(blocks), Some(scales)) = (&self.blocks, &self.scales) {
                let (row, per_expert) = (cols / BLOCK, rows * cols / BLOCK);
                let data = filled(e, per_expert * STORED, &|expert, out| {
                    for (i, out) in out.chunks_exact_mut(row * STORED).enumerate() {
                        let from = (expert * n * rows + i * n + p) * row;
                        let nibbles = &blocks.data[from * NIBBLES..(from + row) * NIBBLES];
                        let scales = &scales.data[from..from + row];
                        for ((out, block), &scale) in
                            out.chunks_exact_mut(STORED).zip(nibbles.chunks_exact(NIBBLES)).zip(scales)
                        {
                            out[0] = scale;
                            halves_apart(block, &mut out[1..]);
                        }
                    }
                })?;
                made.push((name("weight"), Tensor::new(DType::MXFP4, vec![e, rows, cols], data)?));
            }
            if let Some(t) = &self.weight {
                let w = t.dtype.block_bytes();
                let data = filled(e, rows * cols * w, &|expert, out| {
                    let from = &t.data[expert * n * rows * cols * w..(expert + 1) * n * rows * cols * w];
                    match w {
                        2 => transpose::<2>(from, (n * rows, p, n), cols, out),
                        _ => transpose::<4>(from, (n * rows, p, n), cols, out),
                    }
                })?;
                made.push((name("weight"), Tensor::new(t.dtype, vec![e, rows, cols], data)?));
            }
            if let Some(t) = &self.bias {
                let w = t.dtype.block_bytes();
                let each = t.data.chunks_exact(w).skip(p).step_by(n);
                let data = Bytes::copy_of(&each.flatten().copied().collect::<Vec<u8>>());
                made.push((name("bias"), Tensor::new(t.dtype, vec![e, rows], data)?));
            }
        }
        // They were read once, and will not be again.
        [&self.blocks, &self.scales].into_iter().flatten().for_each(|r| r.data.release_pages());
        [&self.weight, &self.bias].into_iter().flatten().for_each(|t| t.data.release_pages());
        Ok(made)
    }
}

/// Memory for `experts` of `each` bytes, every one filled by `fill` with its number, on all cores.
fn filled(experts: usize, each: usize, fill: &(dyn Fn(usize, &mut [u8]) + Sync)) -> Result<Bytes> {
    let failed = |e| Error::Capacity(format!("{} bytes of memory for experts: {e}", experts * each));
    let mut map = memmap2::MmapMut::map_anon((experts * each).max(1)).map_err(failed)?;
    // Only advice, which the system may refuse.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    let queue = Mutex::new(map.chunks_exact_mut(each).enumerate());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(experts);
    std::thread::scope(|s| {
        for _ in 0..threads {
            s.spawn(|| {
                loop {
                    let next = queue.lock().expect("no worker panics with the lock held").next();
                    let Some((expert, out)) = next else { break };
                    fill(expert, out);
                }
            });
        }
    });
    Ok(Bytes::from_anonymous(map.make_read_only().map_err(failed)?))
}

/// A block's nibbles in the order of a tensor: the first 16 elements in the low halves of bytes, the last in the high ones.
fn halves_apart(block: &[u8], out: &mut [u8]) {
    let (first, last) = block.split_at(NIBBLES / 2);
    for ((out, a), b) in out.chunks_exact_mut(2).zip(first).zip(last) {
        out[0] = a & 15 | b << 4;
        out[1] = a >> 4 | b & 0xf0;
    }
}

/// `out[r][c] = x[c][first + r·step]`, of W-byte elements; `x` has rows of `width`, `out` of `cols`.
fn transpose<const W: usize>(
    x: &[u8],
    (width, first, step): (usize, usize, usize),
    cols: usize,
    out: &mut [u8],
) {
    let (x, out) = (x.as_chunks::<W>().0, out.as_chunks_mut::<W>().0);
    // Squares, so that a cache line that was read is used up before it leaves.
    const SIDE: usize = 64;
    let rows = out.len() / cols;
    for r0 in (0..rows).step_by(SIDE) {
        for c0 in (0..cols).step_by(SIDE) {
            for r in r0..(r0 + SIDE).min(rows) {
                for c in c0..(c0 + SIDE).min(cols) {
                    out[r * cols + c] = x[c * width + first + r * step];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::dequant::dequantise;

    #[test]
    fn nibbles_of_neighbours_are_put_apart() {
        // Element i of the block is i % 16 as a code.
        let block: Vec<u8> = (0..16u8).map(|i| (2 * i % 16) | (2 * i % 16 + 1) << 4).collect();
        let mut stored = [127; STORED];
        halves_apart(&block, &mut stored[1..]);
        let want: Vec<u8> = (0..16u8).map(|i| i | i << 4).collect();
        assert_eq!(&stored[1..], &want);
        let t = Tensor::new(DType::MXFP4, vec![1, BLOCK], Bytes::copy_of(&stored)).unwrap();
        let codes = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let want: Vec<f32> = (0..32).map(|i| codes[i % 8] * if i % 16 < 8 { 1.0 } else { -1.0 }).collect();
        assert_eq!(dequantise(&t), want);
    }

    fn raw(shape: &[usize]) -> Raw {
        Raw { shape: shape.to_vec(), data: Bytes::copy_of(&vec![121; shape.iter().product()]) }
    }

    fn floats(shape: &[usize]) -> Tensor {
        let bytes = vec![0; 2 * shape.iter().product::<usize>()];
        Tensor::new(DType::BF16, shape.to_vec(), Bytes::copy_of(&bytes)).unwrap()
    }

    /// What comes of these tensors of the second layer's experts in a model of 8 experts of width 256.
    fn of(tensors: &[(&str, &[usize])], bytes: &[(&str, &[usize])]) -> Result<Vec<(String, Tensor)>> {
        let spec = crate::model::synth::spec("tiny-gpt-oss").unwrap();
        let family = arch::by_name("gpt-oss").unwrap();
        let name = |n: &str| format!("model.layers.1.mlp.experts.{n}");
        let all = Contents {
            tensors: tensors.iter().map(|(n, shape)| (name(n), floats(shape))).collect(),
            raw: bytes.iter().map(|(n, shape)| (name(n), raw(shape))).collect(),
        };
        rearranged(family, &spec, all).map(|(_, made)| made)
    }

    #[test]
    fn stacks_get_the_names_and_shapes_of_gguf() {
        let (blocks, scales) = ("gate_up_proj_blocks", "gate_up_proj_scales");
        for shape in [&[8, 512, 8, 16][..], &[8, 512, 128]] {
            let made =
                of(&[("down_proj_bias", &[8, 256])], &[(blocks, shape), (scales, &[8, 512, 8])]).unwrap();
            let seen: Vec<_> = made.iter().map(|(n, t)| (n.as_str(), t.dtype, &t.shape[..])).collect();
            let want: [(&str, DType, &[usize]); 3] = [
                ("blk.1.ffn_down_exps.bias", DType::BF16, &[8, 256]),
                ("blk.1.ffn_gate_exps.weight", DType::MXFP4, &[8, 256, 256]),
                ("blk.1.ffn_up_exps.weight", DType::MXFP4, &[8, 256, 256]),
            ];
            assert_eq!(seen, want);
        }
    }

    #[test]
    fn damaged_stacks_get_one_sentence() {
        let (blocks, scales) = ("down_proj_blocks", "down_proj_scales");
        let whole: &[usize] = &[8, 256, 8, 16];
        let both = |b, s| of(&[], &[(blocks, b), (scales, s)]);
        for (got, want) in [
            (
                both(whole, &[8, 256, 7]),
                "down_proj_scales: shape [8, 256, 7], config.json implies [8, 256, 8] (8 experts)",
            ),
            (
                both(&[7, 256, 8, 16], &[8, 256, 8]),
                "down_proj_blocks: shape [7, 256, 8, 16], config.json implies",
            ),
            (both(&[8, 256, 8, 15], &[8, 256, 8]), "down_proj_blocks: shape [8, 256, 8, 15]"),
            (of(&[], &[(blocks, whole)]), "down_proj_scales: missing beside"),
            (of(&[], &[(scales, &[8, 256, 8])]), "down_proj_blocks: missing beside"),
            (
                of(&[("down_proj", &[8, 256, 256])], &[(blocks, whole), (scales, &[8, 256, 8])]),
                "a second tensor for the same experts",
            ),
            (
                of(&[("gate_up_proj", &[8, 512, 256])], &[]),
                "gate_up_proj: shape [8, 512, 256], config.json implies [8, 256, 512]",
            ),
            (
                of(&[("gate_up_proj_bias", &[8, 256])], &[]),
                "gate_up_proj_bias: shape [8, 256], config.json implies [8, 512]",
            ),
        ] {
            let got = got.map(|_| ()).expect_err(want).to_string();
            assert!(got.contains(want) && !got.contains('\n'), "{got:?} does not say {want:?}");
        }
    }

    #[test]
    fn columns_that_alternate_become_rows() {
        // Two parts of 70 rows and 130 columns: more than a square of each.
        let (rows, cols, n) = (70u32, 130u32, 2);
        let x: Vec<u8> =
            (0..cols).flat_map(|c| (0..rows * n).flat_map(move |r| (c * 1000 + r).to_le_bytes())).collect();
        for p in 0..n {
            let mut out = vec![0; (rows * cols * 4) as usize];
            transpose::<4>(&x, ((n * rows) as usize, p as usize, n as usize), cols as usize, &mut out);
            let want: Vec<u8> = (0..rows)
                .flat_map(|r| (0..cols).flat_map(move |c| (c * 1000 + r * n + p).to_le_bytes()))
                .collect();
            assert!(out == want, "part {p}");
        }
    }

    #[test]
    fn kinds_of_names_go_both_ways() {
        for (file, named) in [
            ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj.weight"),
            ("model.layers.0.mlp.experts.down_proj_bias", "model.layers.0.mlp.experts.down_proj.bias"),
            ("model.layers.0.self_attn.sinks", "model.layers.0.self_attn.sinks.weight"),
            ("model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_proj.bias"),
            ("lm_head.weight", "lm_head.weight"),
        ] {
            assert_eq!(with_kind(file), named);
            assert_eq!(without_kind(named), file);
        }
        assert_eq!(with_kind("x.down_proj_scales"), "x.down_proj.scales");
    }
}
