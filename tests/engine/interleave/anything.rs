//! A strategy that does anything it may: admits to either side, swaps, splits, and takes rows at random, in any flow. What every
//! real strategy does is a part of it. It keeps two promises: no side is given more than it has, and some row is computed.

use std::collections::HashMap;

use tandem::program::{Flow, Group, Iteration, MoveRequest, Phase, RequestId, Side, SubBatch};
use tandem::sched::{Decision, Limits, Predict, Queues, RequestView, Strategy};

use super::random::Random;

pub struct Anything {
    random: Random,
    /// Pages on the host of requests that live on the device.
    split: HashMap<RequestId, usize>,
}

impl Anything {
    pub fn new(seed: u64) -> Anything {
        Anything { random: Random(seed), split: HashMap::new() }
    }
}

/// Pages of each side that nobody was promised.
struct Room([usize; 2]);

impl Room {
    fn fits(&mut self, side: Side, pages: usize) -> bool {
        let left = &mut self.0[side as usize];
        let fits = pages <= *left;
        *left -= if fits { pages } else { 0 };
        fits
    }
}

fn other(side: Side) -> Side {
    if side == Side::Device { Side::Host } else { Side::Device }
}

impl Strategy for Anything {
    fn name(&self) -> &'static str {
        "anything"
    }

    fn plan(&mut self, queues: &Queues, limits: &Limits, _: &dyn Predict) -> Decision {
        let r = &mut self.random;
        let two = limits.device_pages > 0 && limits.host_pages > 0;
        self.split.retain(|id, _| queues.running().iter().any(|j| j.id == *id));
        let mut room =
            Room([Side::Host, Side::Device].map(|side| limits.pages(side) - queues.promised(side)));
        room.0[Side::Host as usize] -= self.split.values().sum::<usize>();
        let mut homes: HashMap<RequestId, Side> = HashMap::new();
        let (mut swaps, mut moves) = (Vec::new(), Vec::new());
        for job in queues.running().iter().filter(|_| two) {
            let home = job.home.expect("it runs");
            let away = self.split.get(&job.id).copied().unwrap_or_default();
            let full = job.stored as usize / 32;
            if r.chance(12) && room.fits(other(home), job.pages()) {
                // What it leaves is promised to nobody before the next step.
                swaps.push((job.id, other(home)));
                homes.insert(job.id, other(home));
                self.split.remove(&job.id);
            } else if home == Side::Device && full > 0 && r.chance(20) {
                let n = r.below(full + 1);
                let more = n.saturating_sub(away);
                if room.fits(Side::Host, more) {
                    let (to, pages) = match n > away {
                        true => (Side::Host, 0..n as u32),
                        false => (Side::Device, n as u32..away as u32),
                    };
                    moves.push(MoveRequest { request: job.id, to, pages });
                    // What comes back is promised to nobody before the next step.
                    self.split.insert(job.id, n);
                }
            }
        }
        // Those to the host first.
        swaps.sort_by_key(|&(_, side)| side);
        let mut admit = Vec::new();
        let mut places = limits.sequences as usize - queues.running().len();
        for job in queues.waiting() {
            let needed = queues.running().is_empty() && admit.is_empty();
            if places == 0 || !(needed || r.chance(70)) {
                continue;
            }
            let first = if r.chance(50) { Side::Device } else { Side::Host };
            let side = [first, other(first)].into_iter().find(|&side| room.fits(side, job.pages()));
            if let Some(side) = side {
                admit.push((job.id, side));
                homes.insert(job.id, side);
                places -= 1;
            }
        }
        let new = queues.waiting().filter(|job| admit.iter().any(|(id, _)| *id == job.id));
        let mut jobs: Vec<&RequestView> = queues.running().iter().chain(new).collect();
        for i in (1..jobs.len()).rev() {
            jobs.swap(i, r.below(i + 1));
        }
        let parked: Vec<&RequestView> = queues.running().iter().filter(|j| j.at.is_some()).collect();
        let overlaps = two && limits.sub_batches > 1;
        let overlaps = overlaps && r.chance(if parked.is_empty() { 40 } else { 85 });
        let mut begins: Vec<Group> = Vec::new();
        // Rows that are parked are those of cohorts, but for a few that begin again in another flow.
        jobs.retain(|job| job.at.is_none() || (!overlaps && r.chance(20)));
        if overlaps {
            jobs.retain(|job| {
                let side = homes.get(&job.id).copied().or(job.home);
                let swapped = swaps.iter().any(|(id, _)| *id == job.id);
                let can = side == Some(Side::Host) && !swapped && job.phase() == Phase::Decode;
                let begin = can && r.chance(70) && begins.len() < limits.rows as usize;
                begins.extend(begin.then(|| job.group(1, Side::Host)));
                !begin
            });
        }
        let n = if overlaps { 1 } else { 1 + r.below(limits.sub_batches as usize) };
        let mut groups: Vec<Vec<Group>> = vec![Vec::new(); n];
        let mut left = vec![limits.rows; n];
        for job in jobs {
            let at = r.below(n);
            let none = groups.iter().all(Vec::is_empty) && begins.is_empty() && parked.is_empty();
            if left[at] == 0 || !(none || r.chance(85)) {
                continue;
            }
            let tokens = match job.phase() {
                Phase::Decode => 1,
                Phase::Prefill => 1 + r.below((job.prompt - job.stored).min(left[at]) as usize) as u32,
            };
            let side = homes.get(&job.id).copied().or(job.home).expect("a side");
            left[at] -= tokens;
            groups[at].push(job.group(tokens, side));
        }
        let flow = if n == 2 && r.chance(70) { Flow::TwoLanes } else { Flow::Serial };
        let mut sub_batches: Vec<SubBatch> = groups.into_iter().map(SubBatch::of).collect();
        if overlaps || (sub_batches.iter().all(|b| b.groups.is_empty()) && !parked.is_empty()) {
            sub_batches.truncate(1);
            let mut layers: Vec<u32> = parked.iter().filter_map(|j| j.at).collect();
            layers.dedup();
            for at in layers {
                let cohort = parked.iter().filter(|j| j.at == Some(at)).map(|j| j.group(1, Side::Host));
                sub_batches.push(SubBatch::parked(cohort.collect(), at));
            }
            if !begins.is_empty() {
                sub_batches.push(SubBatch::of(begins));
            }
            let iteration = Iteration { sub_batches, moves, flow: Flow::Async, pick: false, top: false };
            return Decision { admit, passed: Vec::new(), swaps, iteration };
        }
        Decision {
            admit,
            passed: Vec::new(),
            swaps,
            iteration: Iteration { sub_batches, moves, flow, pick: false, top: false },
        }
    }
}
