//! Rows and pages between the device and the host, and recorded work.

use std::sync::Arc;

use super::numbers::{floats, noise, some, stored, unit, value, words};
use super::probe::{LANE, Probe, Worst, kv_types};
use super::{Depth, GRAPHS};
use crate::cache::{KvGeometry, KvType, PAGE_TOKENS, PagePool};
use crate::device::accelerator::{LayerPages, PageMove};
use crate::device::kernels::exchange::{
    CheckReady, MoveRows, PageMoves, PublishArgs, PublishSource, check_ready, copy_rows, pages_from_host,
    pages_to_host, publish_rows,
};
use crate::device::runtime::{DevPtr, Pinned};
use crate::tensor::Half;
use crate::{Error, Result};

/// Rows that are published and copied; pages that move.
pub fn exchange(p: &mut Probe, _depth: Depth) {
    for piece in [16, 2] {
        p.check(&format!("copied rows by {piece} bytes"), |p| copied(p, piece));
    }
    for &half in p.half_types() {
        p.check(&format!("published rows of {}", half.name()), |p| published(p, half));
    }
    p.check("an epoch that the host has reached", |p| {
        let flag = p.rt.pinned(64)?;
        let epoch = p.up(&words(&[5]))?;
        let mut seen = Vec::new();
        for reached in [7u32, 8] {
            p.finish()?;
            // SAFETY: nothing in flight touches it, and it has 64 bytes.
            unsafe { flag.host().cast::<u32>().write_volatile(reached) };
            let ready = p.out(4)?;
            let args = CheckReady {
                epoch_flag: flag.device(),
                epoch: epoch.ptr(),
                epoch_add: 3,
                ready: ready.ptr(),
            };
            check_ready(&*p.rt, LANE, &args)?;
            seen.extend(p.words(&ready)?);
        }
        Ok(Worst::of(&seen, [(0.0, 0.0), (1.0, 0.0)]))
    });
    for kv in kv_types(p) {
        p.check(&format!("pages of {}", kv.name()), |p| pages(p, kv));
    }
}

fn host(memory: &Arc<dyn Pinned>, p: &Probe) -> Result<Vec<u8>> {
    p.finish()?;
    // SAFETY: the memory has that many bytes, all initialised, and nothing in flight touches it.
    Ok(unsafe { std::slice::from_raw_parts(memory.host(), memory.len()) }.to_vec())
}

fn some_bytes(seed: u64, n: usize) -> Vec<u8> {
    (0..n).map(|i| noise(seed, i).to_bits() as u8).collect()
}

/// Two buffers' rows side by side, listed and rounded, then the epoch.
fn published(p: &Probe, half: Half) -> Result<Worst> {
    let (widths, stored, list, header) = ([64usize, 24], 9, [4u32, 0, 7], 64);
    let all = widths[0] + widths[1];
    // Behind each place 16 bytes that nobody writes.
    let stride = 2 * all + 16;
    let rows = [some(1, stored * widths[0]), some(2, stored * widths[1])];
    let (a, b, list_dev) = (p.up(&floats(&rows[0]))?, p.up(&floats(&rows[1]))?, p.up(&words(&list))?);
    let (epoch, arrived) = (p.up(&words(&[10]))?, p.zeros(4)?);
    let memory = p.rt.pinned(header + list.len() * stride)?;
    let source = |at: DevPtr, width: usize| PublishSource { at, stride: 4 * width, bytes: 4 * width };
    let args = PublishArgs {
        sources: [source(a.ptr(), widths[0]), source(b.ptr(), widths[1]), PublishSource::default()],
        half,
        to: memory.device().add(header),
        stride,
        list: list_dev.ptr(),
        n_rows: DevPtr::NULL,
        max_rows: list.len(),
        epoch: epoch.ptr(),
        epoch_add: 3,
        epoch_flag: memory.device(),
        arrived: arrived.ptr(),
    };
    publish_rows(&*p.rt, LANE, &args)?;
    let got = host(&memory, p)?;
    let mut head = vec![0; header];
    head[..4].copy_from_slice(&13u32.to_le_bytes());
    let mut worst = Worst::of_bytes(&got[..header], &head);
    for (place, &row) in got[header..].chunks_exact(stride).zip(&list) {
        let row = row as usize;
        let (values, rest) = place.split_at(2 * all);
        let values: Vec<f64> =
            values.chunks_exact(2).map(|b| value(half, u16::from_le_bytes([b[0], b[1]]))).collect();
        let want = rows.iter().zip(widths).flat_map(|(rows, width)| &rows[row * width..][..width]);
        let want = want.map(|&x| (f64::from(x), unit(half) * f64::from(x.abs()) + 2f64.powi(-25)));
        worst = worst.max(Worst::of(&values, want)).max(Worst::of_bytes(rest, &[0; 16]));
    }
    Ok(worst)
}

fn moves(from: DevPtr, from_stride: usize, to: DevPtr, to_stride: usize, lists: [DevPtr; 2]) -> MoveRows {
    MoveRows {
        from,
        from_stride,
        to,
        to_stride,
        from_list: lists[0],
        to_list: lists[1],
        n_rows: DevPtr::NULL,
        gate: DevPtr::NULL,
        max_rows: 3,
    }
}

fn copied(p: &Probe, piece: usize) -> Result<Worst> {
    let (width, stride) = (5 * piece, 6 * piece);
    let rows = some_bytes(3, 4 * stride);
    let (from, to) = (p.up(&rows)?, p.out(4 * stride)?);
    let lists = [[3u32, 0, 2], [1, 3, 0]];
    let lists_dev = [p.up(&words(&lists[0]))?, p.up(&words(&lists[1]))?];
    let args = moves(from.ptr(), stride, to.ptr(), stride, [lists_dev[0].ptr(), lists_dev[1].ptr()]);
    copy_rows(&*p.rt, LANE, &args, width)?;
    let mut want = vec![0xff; 4 * stride];
    for (&from, &to) in lists[0].iter().zip(&lists[1]) {
        want[to as usize * stride..][..width].copy_from_slice(&rows[from as usize * stride..][..width]);
    }
    Ok(Worst::of_bytes(&p.bytes(&to)?, &want))
}

/// Pages of the host's cache to the device, where each element is where its layout says, and back.
fn pages(p: &Probe, kv: KvType) -> Result<Worst> {
    let (heads, hd, n) = (2, 64, 2);
    let geometry = KvGeometry { n_layers: 1, n_kv_heads: heads, head_dim: hd, dtype: kv };
    let mut pool = PagePool::new(geometry, n)?;
    let ids = [pool.alloc()?, pool.alloc()?];
    for token in 0..n * PAGE_TOKENS {
        let row = some(token as u64, 2 * heads * hd);
        let (k, v) = row.split_at(heads * hd);
        // SAFETY: the pool is this thread's alone.
        unsafe { pool.layer(0).append(&ids, token, k, v) };
    }
    let layer = pool.layer(0);
    let page_bytes = heads * 2 * kv.part_bytes(hd);
    let mut on_host = Vec::new();
    for &id in &ids {
        // SAFETY: heads of a page are contiguous, K before V (see `LayerKv`), and nobody writes.
        let page = unsafe { std::slice::from_raw_parts(layer.k_ptr(id, 0).cast::<u8>(), page_bytes) };
        on_host.extend_from_slice(page);
    }
    let staged = p.up(&on_host)?;
    let device = p.out(n * page_bytes)?;
    let back = p.out(n * page_bytes)?;
    // They change places on the device.
    let list: Vec<PageMove> =
        [1, 0].iter().zip(0..).map(|(&d, h)| PageMove { device: d, host: h, tokens: 32 }).collect();
    let layer_at = |host| [LayerPages { device: device.ptr(), host }];
    let (from, to) = (layer_at(staged.ptr()), layer_at(back.ptr()));
    let args = PageMoves { layers: &from, pages: &list, n_kv_heads: heads, head_dim: hd, kv };
    pages_from_host(&*p.rt, LANE, &args)?;
    let mut want = Vec::new();
    for &id in [ids[1], ids[0]].iter() {
        for head in 0..heads {
            for is_v in [false, true] {
                for token in 0..PAGE_TOKENS {
                    let each = (0..hd).map(|d| match is_v {
                        true => layer.value(id, head, token, d),
                        false => layer.key(id, head, token, d),
                    });
                    want.extend(each.map(|x| (f64::from(x), 0.0)));
                }
            }
        }
    }
    let bytes = p.bytes(&device)?;
    let parts = bytes.chunks_exact(kv.part_bytes(hd));
    // In f32, as the layout's accessors: a code times its scale is rounded.
    let each = |part| (0..PAGE_TOKENS * hd).map(move |i| stored(kv, part, hd, i / hd, i % hd) as f32);
    let got: Vec<f64> = parts.flat_map(each).map(f64::from).collect();
    let there = Worst::of(&got, want);
    pages_to_host(&*p.rt, LANE, &PageMoves { layers: &to, ..args })?;
    Ok(there.max(Worst::of_bytes(&p.bytes(&back)?, &on_host)))
}

/// Two copies, one of what the other wrote, recorded and run with other data: a recording has the addresses, not the data. Runs
/// kernels that were checked alone before.
pub fn graphs(p: &mut Probe, _depth: Depth) {
    let bytes = 16 * 48;
    p.check_named("recorded work", Some(GRAPHS), |p| {
        let (a, b, c) = (p.zeros(bytes)?, p.out(bytes)?, p.out(bytes)?);
        let step = || {
            copy_rows(&*p.rt, LANE, &moves(a.ptr(), 256, b.ptr(), 256, [DevPtr::NULL; 2]), 256)?;
            copy_rows(&*p.rt, LANE, &moves(b.ptr(), 256, c.ptr(), 256, [DevPtr::NULL; 2]), 256)
        };
        // The first run loads what a recording may not.
        step()?;
        p.finish()?;
        let Some(graph) = p.rt.capture(&mut || step())? else {
            // Allowed: steps are then launched kernel by kernel.
            let why = p.rt.notices().pop().unwrap_or_else(|| "the device records nothing".into());
            return Err(Error::Unsupported(why));
        };
        let mut worst = Worst::EXACT;
        for seed in 1..4 {
            let data = some_bytes(seed, bytes);
            p.rt.upload(LANE, a.ptr(), &data)?;
            p.rt.replay(&graph)?;
            worst = worst.max(Worst::of_bytes(&p.bytes(&c)?, &data));
        }
        Ok(worst)
    });
}
