//! The kernels of mixtures of experts (`cuda/experts_*.cu`), each against its definition, and one whole feed-forward.

mod product;
mod route;
mod sort;
mod whole;

use std::sync::Arc;

use crate::support::gpu::Rng;
use crate::support::gpu::memory::*;
use tandem::device::kernels::experts::*;
use tandem::device::{DevPtr, Runtime};

/// Unit roundoff of f32.
const U: f64 = 1.0 / (1u64 << 24) as f64;

fn normals(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| rng.normal()).collect()
}

/// Places of choices, rows of places, and groups as (slot, first place, count), by a stable sort.
struct Sorted {
    places: Vec<u32>,
    rows: Vec<u32>,
    groups: Vec<[u32; 3]>,
}

fn sorted(ids: &[u32], slots: Option<&[u32]>, used: usize, experts: usize, tokens: usize) -> Sorted {
    let slot = |e: u32| slots.map_or(e, |slots| slots[e as usize]);
    let mut order: Vec<usize> = (0..ids.len()).filter(|&i| slot(ids[i]) != NONE).collect();
    order.sort_by_key(|&i| ids[i]);
    let (mut places, mut rows) = (vec![NONE; ids.len()], vec![NONE; ids.len()]);
    for (place, &i) in order.iter().enumerate() {
        places[i] = place as u32;
        rows[place] = (i / used) as u32;
    }
    let mut groups = Vec::new();
    for e in 0..experts as u32 {
        let first = order.iter().position(|&i| ids[i] == e).unwrap_or(0);
        let count = order.iter().filter(|&&i| ids[i] == e).count();
        for done in (0..count).step_by(tokens) {
            groups.push([slot(e), (first + done) as u32, (count - done).min(tokens) as u32]);
        }
    }
    Sorted { places, rows, groups }
}

/// A list as kernels read it: groups, and none behind them.
fn list(groups: &[[u32; 3]], capacity: usize) -> Vec<u32> {
    assert!(groups.len() <= capacity, "{} groups of at most {capacity}", groups.len());
    let mut list = vec![0; capacity * GROUP_BYTES / 4];
    for (entry, group) in list.chunks_exact_mut(GROUP_BYTES / 4).zip(groups) {
        entry[..3].copy_from_slice(group);
    }
    list
}
