//! Decides how tokens whose pages have left the device are attended: always in one way, or in each step in the way with
//! the least predicted time.
//!
//! A step is predicted with these tokens attended in place, and with their pages streamed, separately for prompts and
//! decode rows if it has both. The products of the previous layer hide the copies of a few pages. With many pages the
//! copies may take longer than the CPU or not, depending on the machine and the context. Similar steps are predicted
//! once: page counts that differ by less than 1/32 count as equal, so that a long answer needs a prediction only once
//! in many tokens.

use std::collections::HashMap;

use crate::cache::PAGE_TOKENS;
use crate::plan::StepTimes;
use crate::program::{Far, Iteration, Kv, Phase, Placement};

/// Most predictions that are kept.
const MOST: usize = 4096;

/// A count of pages, rounded in relative steps of 1/32.
fn about(pages: u32) -> u32 {
    let spare = (32 - pages.leading_zeros()).saturating_sub(6);
    pages >> spare << spare
}

/// Rows of one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Load {
    groups: u32,
    rows: u32,
    /// Pages away from the device, and pages on it.
    far: u32,
    near: u32,
}

/// The key of a prediction: for each sub-batch the rows of prompts and of decode, with and without pages that have left
/// the device; and the pages that move during the step, to the host and to the device. (Pages that leave while a step
/// runs must arrive before they are streamed back.)
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct StepKey {
    sub_batches: Vec<[[Load; 2]; 2]>,
    moves: [u32; 2],
}

impl StepKey {
    fn of(iteration: &Iteration) -> StepKey {
        let of = |batch: &crate::program::SubBatch| {
            let mut loads = [[Load::default(); 2]; 2];
            for g in &batch.groups {
                let far = match g.kv {
                    Kv::Split { boundary, .. } => boundary,
                    _ => 0,
                };
                let load = &mut loads[usize::from(far > 0)][usize::from(g.phase == Phase::Decode)];
                let page = PAGE_TOKENS as u32;
                load.groups += 1;
                load.rows += g.tokens;
                load.far += far / page;
                load.near += (g.end() - far).div_ceil(page);
            }
            loads.map(|phases| phases.map(|l| Load { far: about(l.far), near: about(l.near), ..l }))
        };
        let mut moves = [0; 2];
        for m in &iteration.moves {
            moves[m.to as usize] += m.pages.end - m.pages.start;
        }
        StepKey { sub_batches: iteration.sub_batches.iter().map(of).collect(), moves: moves.map(about) }
    }
}

/// Number of steps with tokens away from the device, by how their decode rows (or else their prompts) attended them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FarSteps {
    /// On the host, in place.
    pub attend: u64,
    /// On the device, from staging memory.
    pub stream: u64,
}

/// See the [module](self).
pub(in crate::engine) struct FarPolicy {
    fixed: Option<Far>,
    times: Option<StepTimes>,
    known: HashMap<StepKey, [Far; 2]>,
    steps: FarSteps,
}

impl FarPolicy {
    /// Always uses `far` if given; otherwise the fastest way if there are `times` and staging memory (`staged`), else
    /// attention in place.
    pub fn new(far: Option<Far>, times: Option<StepTimes>, staged: bool) -> FarPolicy {
        let times = times.filter(|_| far.is_none() && staged);
        let fixed = far.or(if times.is_none() { Some(Far::Attend) } else { None });
        FarPolicy { fixed, times, known: HashMap::new(), steps: FarSteps::default() }
    }

    /// The way that groups state until the step's way is chosen.
    pub fn usual(&self) -> Far {
        self.fixed.unwrap_or(Far::Attend)
    }

    /// Steps so far.
    pub fn steps(&self) -> FarSteps {
        self.steps
    }

    /// Decides how the groups of a step attend tokens away from the device.
    pub fn choose_way(&mut self, placement: &Placement, iteration: &mut Iteration) {
        let split = |phase: Phase| {
            let groups = || iteration.sub_batches.iter().flat_map(|b| &b.groups);
            groups().any(|g| g.phase == phase && matches!(g.kv, Kv::Split { .. }))
        };
        let has = [split(Phase::Prefill), split(Phase::Decode)];
        if !has.contains(&true) {
            return;
        }
        let ways = match &self.times {
            None => [self.usual(); 2],
            Some(times) => {
                let likeness = StepKey::of(iteration);
                if self.known.len() >= MOST {
                    self.known.clear();
                }
                let predict = || fastest(times, placement, iteration, has);
                *self.known.entry(likeness).or_insert_with(predict)
            }
        };
        set(iteration, ways);
        match ways[usize::from(has[1])] {
            Far::Attend => self.steps.attend += 1,
            Far::Stream => self.steps.stream += 1,
        }
    }
}

/// The ways for prompts and for decode rows with the least predicted time.
fn fastest(times: &StepTimes, placement: &Placement, iteration: &Iteration, has: [bool; 2]) -> [Far; 2] {
    const BOTH: [Far; 2] = [Far::Attend, Far::Stream];
    let of = |has: bool| if has { &BOTH[..] } else { &BOTH[..1] };
    let mut step = iteration.clone();
    let mut best = ([Far::Attend; 2], f64::INFINITY);
    for &prompts in of(has[0]) {
        for &decode in of(has[1]) {
            set(&mut step, [prompts, decode]);
            let seconds = times.seconds(placement, &step).unwrap_or(f64::INFINITY);
            if seconds < best.1 {
                best = ([prompts, decode], seconds);
            }
        }
    }
    best.0
}

fn set(iteration: &mut Iteration, ways: [Far; 2]) {
    for g in iteration.sub_batches.iter_mut().flat_map(|b| &mut b.groups) {
        if let Kv::Split { far, .. } = &mut g.kv {
            *far = ways[usize::from(g.phase == Phase::Decode)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;
    use crate::plan::{Sizes, hardware};
    use crate::program::{Group, RequestId, Side, Wants};

    #[test]
    fn nearly_equal_numbers_of_pages_are_alike() {
        for n in [0, 1, 17, 63] {
            assert_eq!(about(n), n);
        }
        for n in [64, 1000, 12_345, u32::MAX] {
            assert!(about(n) <= n && f64::from(n - about(n)) < f64::from(n) / 32.0, "{n}: {}", about(n));
        }
        assert_eq!(about(1000), about(1007));
    }

    /// On a machine whose CPU reads faster than its link copies, few pages are streamed during products and many are
    /// attended in place; decode rows and prompts are decided separately.
    #[test]
    fn the_way_changes_with_the_context() {
        let sizes = Sizes::of_spec(&synth::parse("qwen3-0.6b").unwrap().spec);
        let placement = Placement::all(Side::Device, sizes.layers(), 0);
        let times = StepTimes::new(hardware::named("t4-xeon").unwrap(), sizes);
        let mut ways = FarPolicy::new(None, Some(times.clone()), true);
        let step = |boundary: u32| {
            let group = Group {
                request: RequestId { slot: 0, generation: 0 },
                phase: Phase::Decode,
                first: boundary + 100,
                tokens: 1,
                kv: Kv::Split { boundary, far: Far::Attend },
                wants: Wants::Last,
            };
            Iteration::serial(vec![group], true)
        };
        let mut chosen = Vec::new();
        for pages in [1, 4, 16, 64, 256, 1024] {
            let mut iteration = step(32 * pages);
            ways.choose_way(&placement, &mut iteration);
            let Kv::Split { far, .. } = iteration.sub_batches[0].groups[0].kv else { unreachable!() };
            let mut of = |far| {
                set(&mut iteration, [far; 2]);
                times.seconds(&placement, &iteration).unwrap()
            };
            let (attend, stream) = (of(Far::Attend), of(Far::Stream));
            assert_eq!(far == Far::Attend, attend <= stream, "{pages} pages: {attend} {stream}");
            chosen.push(far);
        }
        assert!(chosen.contains(&Far::Stream) && chosen.last() == Some(&Far::Attend), "{chosen:?}");
        assert!(chosen.windows(2).all(|w| w[0] == Far::Stream || w[1] == Far::Attend), "{chosen:?}");
        // The user's choice applies, and so does a lack of memory to stream to.
        let mut iteration = step(32);
        for (mut ways, want) in [
            (FarPolicy::new(Some(Far::Stream), None, true), Far::Stream),
            (FarPolicy::new(Some(Far::Attend), Some(times.clone()), true), Far::Attend),
            (FarPolicy::new(None, Some(times), false), Far::Attend),
            (FarPolicy::new(None, None, true), Far::Attend),
        ] {
            ways.choose_way(&placement, &mut iteration);
            assert!(matches!(iteration.sub_batches[0].groups[0].kv, Kv::Split { far, .. } if far == want));
            let steps = ways.steps();
            assert_eq!((steps.attend, steps.stream), if want == Far::Attend { (1, 0) } else { (0, 1) });
        }
    }
}
