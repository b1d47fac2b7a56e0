//! Chooses the placement with the least predicted time among those that fit, by the dry run's exact bytes.
//!
//! ```text
//! candidates of every strategy ─ fit? (dry run) ─► closed form ─► the best few of each ─► their programs, on the virtual machine
//! ```
//! | strategy | candidates |
//! |---|---|
//! | `cpu-only`, `gpu-only` | one each |
//! | `greedy` | the smallest boundary that fits (fills the device without regard to time) |
//! | `helm` | every boundary, its host blocks computed in place or streamed to the device for prompts |
//! | `lia` | vectors for prompts and for decode rows (the three that win for dense models, and the best of all 64 by the papers' costs with and without overlap), with as many blocks pinned as fit |
//! | `stream` | keys and values, embedding and head on either side |
//!
//! The user's fixed parameters are kept: with a given boundary, the only candidate is the one with host blocks computed
//! in place; with LIA, only the given vectors and number of blocks.

use super::{
    Candidate, Choice, ENDS, Strategy, boundaries, device_bytes, lia, pins_told, streams, vectors_of,
};
use crate::Result;
use crate::engine::machine::sizes::Sizes;
use crate::host::memory_available;
use crate::plan::{
    self, Batch, Costs, FarForecast, Group, PredictedRun, Resident, Strategy as System, Workload,
    best_policies, far_forecast, price, programs_with,
};
use crate::program::{Far, Phase, Placement, Policy, Residence, Side};

/// The data that times are predicted from.
#[derive(Clone, Copy)]
pub struct Prices<'a> {
    /// Seconds of operations.
    pub costs: &'a dyn Costs,
    /// The model, as the costs know it.
    pub model: &'a plan::Sizes,
    /// The work to run.
    pub work: Workload,
    /// Whether the model norms the outputs of sublayers, so that sublayers cannot be separated freely.
    pub post_norms: bool,
}

/// The strategies to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Among {
    /// All six.
    All,
    /// One, with the parameters that the user fixed.
    One(Strategy),
}

/// The best of one strategy.
#[derive(Debug, Clone, PartialEq)]
pub struct Considered {
    /// The system whose candidate it is.
    pub strategy: System,
    /// Its description; if none fits, that of the candidate that takes the least device memory.
    pub what: String,
    /// Seconds of the prefill and of all decode steps; none if it does not fit.
    pub seconds: Option<(f64, f64)>,
    /// Bytes on the device and on the host.
    pub bytes: (u64, u64),
}

/// The choice, and the alternatives that were considered.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    /// The system that the placement follows.
    pub strategy: System,
    /// The choice, in the same form as by memory alone.
    pub choice: Choice,
    /// Its predicted time.
    pub run: PredictedRun,
    /// The best of every strategy, in the order of [`System::ALL`].
    pub considered: Vec<Considered>,
    /// Candidates that fit.
    pub fitting: usize,
    /// How decode steps attend pages that leave the device, if any do.
    pub far: Option<FarForecast>,
    /// The reason for the choice.
    pub why: String,
}

/// Number of placements per strategy whose programs are simulated.
const FEW: usize = 5;

/// The fastest placement that fits; `None` if no candidate does, for which [`choose`](super::choose) has the message.
///
/// # Errors
/// If the model does not have the boundary or number of blocks, or a vector cannot run.
pub fn choose_by_time(sizes: &Sizes, among: Among, prices: &Prices<'_>) -> Result<Option<Timed>> {
    let n = sizes.layers();
    let host_available = memory_available();
    let cpu_only = Placement::all(Side::Host, n, 0);
    let fits = |sizes: &Sizes, p: &Placement| {
        let (device, host) = bytes(sizes, p);
        device <= sizes.free() && host_available.is_none_or(|available| host <= available)
    };
    // Prices depend on the number of pages that there will be.
    let paged = |sizes: &Sizes, p: &Placement| sizes.with_pages(p.clone()).0;
    // Pages that leave the device are attended in place, or in the faster way, which needs memory.
    let streaming = sizes.streaming();
    let of = |e: &Entry| if e.streams { streaming.as_ref().unwrap_or(sizes) } else { sizes };
    let mut considered = Vec::new();
    let mut best: Option<(System, Entry, PredictedRun)> = None;
    let mut fitting = 0;
    for system in System::ALL {
        let Some(mut all) = candidates(sizes, system, among, prices, &|p| fits(sizes, p))? else { continue };
        if let Some(sizes) = &streaming {
            let more = candidates(sizes, system, among, prices, &|p| fits(sizes, p))?.unwrap_or_default();
            let moves = |e: &Entry| sizes.pages_move(&e.candidate.placement);
            all.extend(more.into_iter().filter(moves).map(|e| Entry { streams: true, ..e }));
        }
        let least = all
            .iter()
            .min_by_key(|e| bytes(of(e), &e.candidate.placement))
            .map(|e| (e.candidate.what.clone(), bytes(of(e), &e.candidate.placement)));
        let mut few: Vec<(f64, Entry)> = all
            .into_iter()
            .filter(|e| fits(of(e), &e.candidate.placement))
            .map(|e| (closed(prices, &paged(of(&e), &e.candidate.placement)), e))
            .collect();
        fitting += few.iter().filter(|(_, e)| !e.streams).count();
        few.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut left = [FEW; 2];
        few.retain(|(_, e)| {
            let left = &mut left[usize::from(e.streams)];
            let stays = *left > 0;
            *left = left.saturating_sub(1);
            stays
        });
        let timed = few.into_iter().filter_map(|(_, e)| {
            let placement = paged(of(&e), &e.candidate.placement);
            let far = if e.streams { None } else { Some(sizes.far.unwrap_or(Far::Attend)) };
            // A placement that cannot be lowered cannot run.
            let run = programs_with(prices.costs, prices.model, &placement, &prices.work, far).ok()?;
            Some((e, run))
        });
        // Memory for streamed pages has to pay.
        let weighed =
            |(e, run): &(Entry, PredictedRun)| run.total() * if e.streams { 1.0 + 1e-6 } else { 1.0 };
        let winner = timed.min_by(|a, b| weighed(a).total_cmp(&weighed(b)));
        considered.extend(match (&winner, least) {
            (Some((e, run)), _) => Some(Considered {
                strategy: system,
                what: e.candidate.what.clone(),
                seconds: Some((run.prefill, run.decode)),
                bytes: bytes(of(e), &e.candidate.placement),
            }),
            (None, Some((what, bytes))) => Some(Considered { strategy: system, what, seconds: None, bytes }),
            (None, None) => None,
        });
        let Some((entry, run)) = winner else { continue };
        let better = best.as_ref().is_none_or(|(other, _, b)| {
            // Sums in a different order differ in their last bits, which counts as a tie.
            let tie = (run.total() - b.total()).abs() <= 1e-9 * b.total();
            if tie { system.preference() < other.preference() } else { run.total() < b.total() }
        });
        if better {
            best = Some((system, entry, run));
        }
    }
    let Some((strategy, entry, run)) = best else { return Ok(None) };
    let sizes = of(&entry);
    let Entry { candidate: Candidate { placement, k, pinned, .. }, policies, streams } = entry;
    let (placement, kv_pages) = match placement == cpu_only {
        true => (placement, None),
        false => sizes.with_pages(placement),
    };
    let choice = Choice {
        k,
        pinned,
        policies,
        device: device_bytes(sizes, &placement, (placement == cpu_only).then_some(n + 2)),
        host: sizes.host(&placement),
        host_available,
        next: next(sizes, k, n, &|p| fits(sizes, p)),
        placement,
        kv_pages,
        far: if streams { None } else { Some(sizes.far.unwrap_or(Far::Attend)) },
    };
    let why = why(strategy, &run, &considered);
    let far = match kv_pages {
        Some(_) => far_forecast(prices.costs, prices.model, &choice.placement, &prices.work)?,
        None => None,
    };
    Ok(Some(Timed { strategy, choice, run, considered, fitting, far, why }))
}

/// Bytes of a placement on the device and on the host.
fn bytes(sizes: &Sizes, p: &Placement) -> (u64, u64) {
    let n = sizes.layers();
    let k = (*p == Placement::all(Side::Host, n, 0)).then_some(n + 2);
    (device_bytes(sizes, p, k).total(), sizes.host(p).total())
}

/// A placement with its description.
struct Entry {
    candidate: Candidate,
    policies: Option<(Policy, Policy)>,
    /// Whether there is memory for streaming pages that have left.
    streams: bool,
}

impl From<Candidate> for Entry {
    fn from(candidate: Candidate) -> Entry {
        Entry { candidate, policies: None, streams: false }
    }
}

fn closed(prices: &Prices<'_>, placement: &Placement) -> f64 {
    let t = price(prices.costs, prices.model, placement, &prices.work);
    t.prefill + prices.work.gen_len as f64 * t.step
}

/// The boundary before the chosen one, if only memory prevents it.
fn next(
    sizes: &Sizes,
    k: Option<usize>,
    n: usize,
    fits: &dyn Fn(&Placement) -> bool,
) -> Option<(String, u64)> {
    let before = k?.checked_sub(1)?;
    let placement = Placement::boundary(before, n, 0, 0);
    let bytes = sizes.device(&placement).total();
    (!fits(&placement)).then(|| (format!("boundary {before} of {} units", n + 2), bytes))
}

/// The candidates of a strategy; `None` if it is not to be compared.
fn candidates(
    sizes: &Sizes,
    system: System,
    among: Among,
    prices: &Prices<'_>,
    fits: &dyn Fn(&Placement) -> bool,
) -> Result<Option<Vec<Entry>>> {
    let n = sizes.layers();
    let all = among == Among::All;
    let entries = |list: Vec<Candidate>| list.into_iter().map(Entry::from).collect();
    let one = |k: usize, what: &str| vec![Candidate { what: what.into(), ..super::boundary(k, n) }.into()];
    Ok(Some(match (system, among) {
        (System::CpuOnly, Among::All) => one(n + 2, "everything on the CPU"),
        (System::GpuOnly, Among::All) => one(0, "everything on the device"),
        (System::Greedy, Among::All) | (System::Greedy, Among::One(Strategy::Greedy)) => {
            let mut list = boundaries(sizes, None)?;
            list.retain(|c| c.placement.device_pages == 0);
            let at = list.iter().position(|c| fits(&c.placement)).unwrap_or(list.len() - 1);
            let mut filled = list.swap_remove(at);
            filled.what = format!("the device filled: {}", filled.what);
            vec![filled.into()]
        }
        (System::Stream, _) if all || among == Among::One(Strategy::Stream) => entries(streams(n)),
        (System::Helm, Among::All) => entries(helm(sizes)),
        (System::Helm, Among::One(Strategy::Helm { boundary: None })) => entries(helm(sizes)),
        (System::Helm, Among::One(Strategy::Helm { boundary })) => entries(boundaries(sizes, boundary)?),
        (System::Lia, Among::All) => lias(n, (None, None, None), prices, fits)?,
        (System::Lia, Among::One(Strategy::Lia { pinned, prefill, decode })) => {
            lias(n, (pinned, prefill, decode), prices, fits)?
        }
        _ => return Ok(None),
    }))
}

/// Every boundary, with host blocks computed in place, and streamed to the device for prompts; and all blocks on the
/// device with fewer pages, if not all pages fit.
fn helm(sizes: &Sizes) -> Vec<Candidate> {
    let n = sizes.layers();
    let streamed = (2..=n + 2).map(|k| {
        let mut candidate = super::boundary(k, n);
        for layer in candidate.placement.layers.iter_mut().filter(|l| l.weights == Residence::Host) {
            (layer.weights, layer.prefill) = (Residence::Streamed, Policy::all(Side::Device));
        }
        candidate.what += ", host blocks streamed to the device for prompts";
        candidate
    });
    let fewer = super::fewer_pages(sizes, 0);
    (0..=n + 2).map(|k| super::boundary(k, n)).chain(fewer).chain(streamed).collect()
}

/// Vectors worth trying in a phase.
fn vectors(prices: &Prices<'_>, phase: Phase) -> Vec<Policy> {
    let mut all = vec![Policy::all(Side::Device), Policy::all(Side::Host), Policy::ATTENTION_ON_HOST];
    if prices.post_norms {
        return all;
    }
    let groups = [match phase {
        Phase::Prefill => Group::prompts(prices.work.batch, prices.work.prompt),
        Phase::Decode => prices.work.decode_step(),
    }];
    let batch = Batch { phase, groups: &groups };
    for overlap in [false, true] {
        let (_, runnable) = best_policies(prices.costs, prices.model, 0, Resident::HOST, &batch, overlap);
        if !all.contains(&runnable.policy) {
            all.push(runnable.policy);
        }
    }
    all
}

/// LIA's candidates: for all vectors and sides of the ends, as many blocks pinned as fit.
fn lias(
    n: usize,
    (pinned, prefill, decode): (Option<usize>, Option<Policy>, Option<Policy>),
    prices: &Prices<'_>,
    fits: &dyn Fn(&Placement) -> bool,
) -> Result<Vec<Entry>> {
    let forced = prefill.is_some() || decode.is_some();
    // Reject impossible parameters.
    let (a, b) = vectors_of(prefill, decode);
    let counts: Vec<usize> = {
        let mut counts: Vec<usize> =
            super::pins(n, pinned, forced, a, b)?.iter().filter_map(|c| c.pinned).collect();
        counts.dedup();
        counts
    };
    let of = |given: Option<Policy>, phase| given.map_or_else(|| vectors(prices, phase), |p| vec![p]);
    let (prompts, rows) = (of(prefill, Phase::Prefill), of(decode, Phase::Decode));
    let mut entries: Vec<Entry> = Vec::new();
    for &prefill in &prompts {
        for &decode in &rows {
            for ends in ENDS {
                let place = |pinned: usize| lia(n, pinned, prefill, decode, ends);
                // The largest number that fits; if none does, the smallest, to report what is lacking.
                let most = counts.iter().copied().find(|&p| fits(&place(p)));
                let Some(pinned) = most.or(counts.last().copied()) else { continue };
                let candidate = Candidate {
                    placement: place(pinned),
                    what: format!("{}, {}", pins_told(pinned, n, ends), told(prefill, decode, pinned < n)),
                    k: None,
                    pinned: Some(pinned),
                };
                // With all blocks pinned all vectors are equivalent; without the device it is CPU-only.
                if candidate.placement.uses(Side::Device)
                    && !entries.iter().any(|e| e.candidate.placement == candidate.placement)
                {
                    entries.push(Entry { candidate, policies: Some((prefill, decode)), streams: false });
                }
            }
        }
    }
    Ok(entries)
}

fn told(prefill: Policy, decode: Policy, used: bool) -> String {
    let text = |p: Policy| p.bits().map(|b| b.to_string()).join(",");
    match used {
        true => format!("the others ({}) for prompts and ({}) in decode", text(prefill), text(decode)),
        false => "no others".into(),
    }
}

/// The winner, its margin, and the runner-up.
fn why(strategy: System, run: &PredictedRun, considered: &[Considered]) -> String {
    let total = |c: &Considered| c.seconds.map(|(p, d)| p + d);
    let second = considered
        .iter()
        .filter(|c| c.strategy != strategy)
        .filter_map(|c| Some((c.strategy, total(c)?)))
        .min_by(|a, b| a.1.total_cmp(&b.1));
    match second {
        None if considered.len() == 1 => format!("{}: the fastest of its placements", strategy.name()),
        None => format!("{}: the only strategy that fits", strategy.name()),
        Some((other, t)) => match t / run.total() {
            r if r < 1.001 => format!("{}: as fast as {}", strategy.name(), other.name()),
            r if r < 1.1 => {
                format!("{}: {:.1}% faster than {}", strategy.name(), (r - 1.0) * 100.0, other.name())
            }
            r => format!("{}: {r:.1} times as fast as {}", strategy.name(), other.name()),
        },
    }
}
