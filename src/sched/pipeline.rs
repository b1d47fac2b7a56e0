//! Asymmetric pipelining: which decode rows of the host go with which sub-batch (NEO §3.2, steps 4 and 5). Shared by the
//! strategies that weigh it.
//!
//! ```text
//! gpu    | linear 0            | linear 1 | attend 0 |     0: prompts, decode of the device, a few of the host
//! host     attend 1            | attend 0            |     1: decode of the host
//! ```

use crate::program::{Flow, Group, Iteration, RequestId, Side, Wants};

use super::predict::Predict;
use super::rows::{RowLoad, SubBatchRows};
use super::strategy::Limits;
use super::view::RequestView;

/// Iterations after which a request of the host gets its row even if the device then waits for it.
pub(super) const AGE: u32 = 64;

/// Consecutive requests without a place after which the search ends.
const MISSES: u32 = 16;

/// The flat part of the linear curve ends where products take this many times as long as for one row.
const FLAT: f64 = 1.1;

/// Two sub-batches, and the prompts that get no row.
pub(super) struct Pipelined {
    /// The first and the second.
    pub batches: [SubBatchRows; 2],
    /// Of prompts to the host: their rows were dropped.
    pub dropped: Vec<RequestId>,
}

impl Pipelined {
    /// Steps 4 and 5. `first` has the device's decode rows and the prompts; `hosts` are the requests that decode on the host,
    /// those first that have waited longest; `is_old` says which prompts must not wait any longer.
    pub fn new(
        first: SubBatchRows,
        hosts: &[&RequestView],
        is_old: impl Fn(RequestId) -> bool,
        limits: &Limits,
        costs: &dyn Predict,
    ) -> Pipelined {
        let mut batches = [first, SubBatchRows::default()];
        fill(&mut batches, hosts, limits, costs);
        let dropped = drop_prompts(&mut batches, is_old, costs);
        Pipelined { batches, dropped }
    }

    /// As an iteration: one sub-batch if the other has nothing.
    pub fn iteration(self) -> Iteration {
        let full: Vec<_> =
            self.batches.into_iter().filter(|rows| !rows.is_empty()).map(SubBatchRows::batch).collect();
        let flow = if full.len() == 2 { Flow::TwoLanes } else { Flow::Serial };
        Iteration { sub_batches: full, moves: Vec::new(), flow, pick: true, top: false }
    }
}

/// What each side of the inequalities takes: (T_l0, T_ca1), (T_l1 + T_pf0 + T_ga0, T_ca0).
fn hidden(of: &[RowLoad; 2], costs: &dyn Predict) -> [bool; 2] {
    let [zero, one] = of;
    [
        one.host_attention(costs) <= zero.linear(costs),
        zero.host_attention(costs)
            <= one.linear(costs) + zero.device_attention(costs) + one.device_attention(costs),
    ]
}

/// A load with more decode rows of the host.
fn more(load: RowLoad, rows: usize, tokens: u64) -> RowLoad {
    let rows = rows as u64;
    RowLoad { rows: load.rows + rows, host: (load.host.0 + rows, load.host.1 + tokens), ..load }
}

/// The largest count up to `n` that `fits`, which must be monotonic. By bisection, since each question asks the tables.
pub(super) fn most(n: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut known, mut over) = (0, n + 1);
    while over - known > 1 {
        let middle = known.midpoint(over);
        if fits(middle) { known = middle } else { over = middle }
    }
    known
}

/// Step 4: into the second sub-batch while the first's products hide its attention, or else into the first while the second's
/// products and the device's attention hide it. One of those that have waited for [`AGE`] iterations goes in anyhow.
fn fill(batches: &mut [SubBatchRows; 2], hosts: &[&RequestView], limits: &Limits, costs: &dyn Predict) {
    let lanes = limits.sub_batches.min(2) as usize;
    let full = u64::from(limits.rows);
    let mut rest = hosts;
    let take = |batches: &mut [SubBatchRows; 2], rest: &mut &[&RequestView], i: usize, n: usize| {
        let (taken, left) = rest.split_at(n);
        taken.iter().for_each(|job| batches[i].push(job.group(1, Side::Host)));
        *rest = left;
    };
    // The device needs rows of its own to have anything to hide behind.
    if batches[0].is_empty() && !rest.is_empty() {
        take(batches, &mut rest, 0, 1);
    }
    // Many at once, as long as nobody is passed over.
    let sums = |jobs: &[&RequestView]| -> Vec<u64> {
        let tokens = jobs.iter().scan(0, |sum, job| {
            *sum += u64::from(job.stored) + 1;
            Some(*sum)
        });
        std::iter::once(0).chain(tokens).collect()
    };
    for i in (0..lanes).rev() {
        let tokens = sums(rest);
        let (zero, one) = (batches[0].load, batches[1].load);
        let room = (full - batches[i].load.rows) as usize;
        let hides = |n: usize| match i {
            1 => hidden(&[zero, more(one, n, tokens[n])], costs)[0],
            _ => hidden(&[more(zero, n, tokens[n]), one], costs)[1],
        };
        let n = most(rest.len().min(room), hides);
        take(batches, &mut rest, i, n);
    }
    // Then one by one: shorter ones may still fit.
    let (mut misses, mut forced) = (0, false);
    for job in rest {
        let group = job.group(1, Side::Host);
        let room = |i: usize| i < lanes && batches[i].load.rows < full;
        let (zero, one) = (batches[0].load, batches[1].load);
        let place = if room(1) && hidden(&[zero, one.with(&group)], costs)[0] {
            Some(1)
        } else if room(0) && hidden(&[zero.with(&group), one], costs)[1] {
            Some(0)
        } else if job.waited >= AGE && !forced {
            forced = true;
            [1, 0].into_iter().find(|&i| room(i))
        } else {
            None
        };
        match place {
            Some(i) => batches[i].push(group),
            None => misses += 1,
        }
        if misses == MISSES || (0..lanes).all(|i| batches[i].load.rows == full) {
            break;
        }
    }
}

/// Step 5: a prompt whose keys and values go to the host is worth its rows only where they fill a bubble. Print drops them
/// while the inequalities hold, which starves them where the host has nothing to do: here rows within the flat part of the
/// linear curve stay, and those of requests that have been overtaken or have waited half way for long.
fn drop_prompts(
    batches: &mut [SubBatchRows; 2],
    is_old: impl Fn(RequestId) -> bool,
    costs: &dyn Predict,
) -> Vec<RequestId> {
    let mut dropped = Vec::new();
    let mut flat = None;
    while let Some(&last) = batches[0].last_to_host() {
        let (zero, one) = (batches[0].load, batches[1].load);
        let without = zero.without(&last);
        if is_old(last.request) || hidden(&[without, one], costs) != [true; 2] {
            break;
        }
        let flat = *flat.get_or_insert_with(|| flat_rows(zero.rows, costs));
        if zero.rows <= flat {
            break;
        }
        batches[0].drop_last_to_host();
        let stays = flat.saturating_sub(without.rows) as u32;
        if stays > 0 {
            // The middle of a prompt: nothing wants logits.
            batches[0].push(Group { tokens: stays, wants: Wants::Nothing, ..last });
            break;
        }
        dropped.push(last.request);
    }
    dropped
}

/// Rows, up to `most`, whose products take hardly longer than those of one.
fn flat_rows(most: u64, costs: &dyn Predict) -> u64 {
    let limit = FLAT * costs.linear(1);
    let (mut fits, mut over) = (1, most + 1);
    while over - fits > 1 {
        let middle = fits.midpoint(over);
        if costs.linear(middle) <= limit { fits = middle } else { over = middle }
    }
    fits
}
