//! Chooses the placement of a strategy in the memory of this device and this host: by predicted time if there are
//! prices ([`time`]), and in this file by the dry run alone:
//!
//! | strategy | placement |
//! |---|---|
//! | HELM | the smallest boundary k that fits: the embedding and the first blocks on the host, the rest on the device |
//! | LIA | as many whole blocks as fit pinned on the device; the others streamed for prompts, computed in place in decode |
//! | streaming | every block streamed for every step (FlexGen, ZeRO-Inference); keys and values on the device if they fit |
//!
//! HELM searches all k for the least predicted time (HELM §3.2). If only weights are read, and the CPU reads slower
//! than the device, every unit moved to the device saves time; the optimum of that search is then the smallest k that
//! fits, which needs no prices. The two differ if a step's time is not dominated by reading weights: with long
//! contexts, large batches, or a device that is not faster.
//!
//! LIA also derives its vectors from predicted times (LIA §5.1). Here prompts use (0,0,0,0,0,0), since a prompt's rows
//! share each transfer of a layer, and decode uses (1,1,1,1,1,1), since a transfer does not pay for one row. Pinned
//! blocks are its optimisation 1, the two staging buffers its optimisation 2.

pub(super) mod time;

use super::sizes::Sizes;
use crate::engine::memory::Memory;
use crate::host::memory_available;
use crate::program::{
    COPY_LANE_ROWS, Far, Group, Iteration, Kv, LayerPlacement, Phase, Placement, Policy, RequestId,
    Residence, Side, Staging, Sublayer, Wants, lower,
};
use crate::{Error, Result};

/// How two sides share a model, with the parameters that the user fixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// A boundary between units on the host and units on the device.
    Helm {
        /// The boundary, if fixed.
        boundary: Option<usize>,
    },
    /// Pinned blocks, and a vector for prompts and one for decode rows of the others.
    Lia {
        /// The number of pinned blocks, if fixed.
        pinned: Option<usize>,
        /// The vector for prompts.
        prefill: Option<Policy>,
        /// The vector for decode rows.
        decode: Option<Policy>,
    },
    /// Every block streamed.
    Stream,
    /// The device filled: the smallest boundary that fits (llama.cpp's `--n-gpu-layers`).
    Greedy,
}

impl Strategy {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Helm { .. } => "helm",
            Strategy::Lia { .. } => "lia",
            Strategy::Stream => "stream",
            Strategy::Greedy => "greedy",
        }
    }

    /// Returns an error for vectors that cannot run, before a model or a device is known.
    ///
    /// # Errors
    /// [`Error::Usage`], as from [`lower()`].
    pub fn check(self) -> Result<()> {
        let Strategy::Lia { prefill, decode, .. } = self else { return Ok(()) };
        let (prefill, decode) = vectors_of(prefill, decode);
        let placement = lia(1, 0, prefill, decode, [Side::Host; 2]);
        for phase in [Phase::Prefill, Phase::Decode] {
            let request = RequestId { slot: 0, generation: 0 };
            let group = Group { request, phase, first: 0, tokens: 1, kv: Kv::Device, wants: Wants::Last };
            lower(&placement, &Iteration::serial(vec![group], false))?;
        }
        Ok(())
    }
}

/// What was chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Where everything lives.
    pub placement: Placement,
    /// HELM's boundary. 0: all on the device; layers + 2: all on the host, for which no device is needed.
    pub k: Option<usize>,
    /// Blocks that LIA keeps on the device.
    pub pinned: Option<usize>,
    /// The vectors for prompts and decode rows of blocks that are not pinned.
    pub policies: Option<(Policy, Policy)>,
    /// Pages of a layer on the device, and pages of all sequences; the rest is on the host.
    pub kv_pages: Option<(usize, usize)>,
    /// How tokens whose pages have left the device are attended; `None`: in each step in the faster way, which needs
    /// memory for streamed pages.
    pub far: Option<Far>,
    /// Bytes on the device.
    pub device: Memory,
    /// Bytes on the host.
    pub host: Memory,
    /// Host memory that was available, if the system reports it.
    pub host_available: Option<u64>,
    /// The next choice that would use more of the device, and its bytes there.
    pub next: Option<(String, u64)>,
}

/// A placement that may fit.
struct Candidate {
    placement: Placement,
    what: String,
    k: Option<usize>,
    pinned: Option<usize>,
}

/// The placement of `strategy` for a model of these sizes.
///
/// # Errors
/// [`Error::Capacity`] if no candidate fits, with the numbers of both sides; [`Error::Usage`] for a boundary or a
/// number of blocks that the model does not have, or a vector that cannot run.
pub fn choose(sizes: &Sizes, strategy: Strategy) -> Result<Choice> {
    strategy.check()?;
    let n = sizes.layers();
    let (candidates, policies) = match strategy {
        Strategy::Helm { boundary } => (boundaries(sizes, boundary)?, None),
        Strategy::Greedy => (boundaries(sizes, None)?, None),
        Strategy::Lia { pinned, prefill, decode } => {
            let forced = prefill.is_some() || decode.is_some();
            let (prefill, decode) = vectors_of(prefill, decode);
            (pins(n, pinned, forced, prefill, decode)?, Some((prefill, decode)))
        }
        Strategy::Stream => (streams(n), None),
    };
    let host_available = memory_available();
    let mut next = None;
    let mut last = None;
    for candidate in candidates {
        let Candidate { placement, what, k, pinned } = candidate;
        let device = device_bytes(sizes, &placement, k);
        let host = sizes.host(&placement);
        let fits = device.total() <= sizes.free()
            && host_available.is_none_or(|available| host.total() <= available);
        if fits {
            let (placement, kv_pages) = sizes.with_pages(placement);
            return Ok(Choice {
                placement,
                k,
                pinned,
                policies,
                kv_pages,
                far: Some(sizes.far.unwrap_or(Far::Attend)),
                device,
                host,
                host_available,
                next,
            });
        }
        next = Some((what.clone(), device.total()));
        last = Some((what, device, host));
    }
    let (what, device, host) = last.expect("a candidate at least");
    Err(Error::Capacity(format!(
        "`strategy` {}: with {what} it needs {} on the device ({}), {} free there, and {} of host memory ({}){}; try a \
         smaller `context` or `chunk`, or `device` cpu",
        strategy.name(),
        megabytes(device.total()),
        parts(&device),
        megabytes(sizes.free()),
        megabytes(host.total()),
        parts(&host),
        host_available.map_or(String::new(), |a| format!(", {} available", megabytes(a)))
    )))
}

/// Bytes on the device; none if everything is on the CPU, which runs without a device.
fn device_bytes(sizes: &Sizes, placement: &Placement, k: Option<usize>) -> Memory {
    match k == Some(sizes.layers() + 2) {
        true => Memory { weights: 0, kv: 0, activations: 0 },
        false => sizes.device(placement),
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

fn parts(m: &Memory) -> String {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    format!("weights {:.1}, KV {:.1}, activations {:.1}", mb(m.weights), mb(m.kv), mb(m.activations))
}

/// HELM's candidates: the first that fits has the smallest k. If all weights fit, keys and values move before any block
/// does.
fn boundaries(sizes: &Sizes, fixed: Option<usize>) -> Result<Vec<Candidate>> {
    let n = sizes.layers();
    let units = n + 2;
    if let Some(k) = fixed
        && k > units
    {
        return Err(Error::usage(format!(
            "`boundary` {k}: the model has {units} units (embedding, {n} blocks, head)"
        )));
    }
    let ladder = |k: usize| std::iter::once(boundary(k, n)).chain(fewer_pages(sizes, k));
    Ok(match fixed {
        Some(k) => ladder(k).collect(),
        None => ladder(0).chain((1..=units).map(|k| boundary(k, n))).collect(),
    })
}

/// HELM's boundary with as many pages as fit, if not all do.
fn fewer_pages(sizes: &Sizes, k: usize) -> Option<Candidate> {
    let whole = boundary(k, sizes.layers());
    let placement = sizes.fewer_pages(&whole.placement)?;
    let what = format!("{} and {} pages of keys and values", whole.what, placement.device_pages);
    Some(Candidate { what, placement, ..whole })
}

/// HELM's boundary with host blocks computed in place.
fn boundary(k: usize, n: usize) -> Candidate {
    Candidate {
        placement: Placement::boundary(k, n, 0, 0),
        what: format!("boundary {k} of {} units", n + 2),
        k: Some(k),
        pinned: None,
    }
}

/// `3 of 30 blocks pinned, the head on the device`.
fn pins_told(pinned: usize, n: usize, ends: [Side; 2]) -> String {
    format!("{pinned} of {n} blocks pinned, {}", told(ends))
}

/// LIA's vectors, unless they are given.
fn vectors_of(prefill: Option<Policy>, decode: Option<Policy>) -> (Policy, Policy) {
    (prefill.unwrap_or(Policy::all(Side::Device)), decode.unwrap_or(Policy::all(Side::Host)))
}

/// `pinned` blocks on the device, the others by the vectors; `ends` are the sides of embedding and head.
fn lia(n: usize, pinned: usize, prefill: Policy, decode: Policy, ends: [Side; 2]) -> Placement {
    let multiplies = |p: Policy| Sublayer::PRODUCTS.iter().any(|&s| p.side(s) == Side::Device);
    let streamed = multiplies(prefill) || multiplies(decode);
    let weights = if streamed { Residence::Streamed } else { Residence::Host };
    let other = LayerPlacement { weights, prefill, decode, kv: Side::Host };
    let layer = |i| if i < pinned { LayerPlacement::all(Side::Device) } else { other };
    let [embedding, head] = ends;
    Placement {
        embedding,
        layers: (0..n).map(layer).collect(),
        head,
        device_pages: 0,
        host_pages: 0,
        windows: Vec::new(),
        staging: Staging::Ahead,
        copy_lane_rows: COPY_LANE_ROWS,
    }
}

/// Sides of embedding and head in the order of trial: the head is read for every token, the embedding only looks up a
/// row.
const ENDS: [[Side; 2]; 3] =
    [[Side::Device, Side::Device], [Side::Host, Side::Device], [Side::Host, Side::Host]];

fn told(ends: [Side; 2]) -> &'static str {
    match ends {
        [Side::Device, _] => "embedding and head on the device",
        [Side::Host, Side::Device] => "the head on the device",
        [Side::Host, Side::Host] => "embedding and head on the host",
    }
}

/// LIA's candidates: blocks first, then the head, then the embedding. Given vectors apply to at least one block.
fn pins(
    n: usize,
    fixed: Option<usize>,
    forced: bool,
    prefill: Policy,
    decode: Policy,
) -> Result<Vec<Candidate>> {
    let pinned: Vec<usize> = match fixed {
        Some(p) if p > n => return Err(Error::usage(format!("`pinned` {p}: the model has {n} blocks"))),
        Some(p) if p == n && forced => {
            return Err(Error::usage(format!("`pinned` {p}: all blocks, which leaves none to `policy`")));
        }
        Some(p) => vec![p],
        None => (0..=n - usize::from(forced)).rev().collect(),
    };
    let candidate = |pinned: usize, ends| Candidate {
        placement: lia(n, pinned, prefill, decode, ends),
        what: pins_told(pinned, n, ends),
        k: None,
        pinned: Some(pinned),
    };
    Ok(pinned.into_iter().flat_map(|p| ENDS.map(|ends| candidate(p, ends))).collect())
}

/// Streaming candidates: keys and values get the device's memory before the head and the embedding. With keys and
/// values on the host, prompts fetch them and decode attends in place, since fetching does not pay for one row.
fn streams(n: usize) -> Vec<Candidate> {
    let candidate = |kv: Side, ends: [Side; 2]| {
        let prefill = Policy::all(Side::Device);
        let (decode, where_kv) = match kv {
            Side::Device => (prefill, "device"),
            Side::Host => (Policy::ATTENTION_ON_HOST, "host"),
        };
        let layer = LayerPlacement { weights: Residence::Streamed, prefill, decode, kv };
        Candidate {
            placement: Placement { layers: vec![layer; n], ..lia(0, 0, prefill, decode, ends) },
            what: format!("keys and values on the {where_kv}, {}", told(ends)),
            k: None,
            pinned: None,
        }
    };
    [Side::Device, Side::Host].into_iter().flat_map(|kv| ENDS.map(|ends| candidate(kv, ends))).collect()
}
