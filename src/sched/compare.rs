//! Which policy finishes the present requests first: each is rolled out in turn, the current policy before the others.
//!
//! ```text
//! worth done
//!   |        best so far ______/    another policy must beat the current one by MARGIN
//!   |               ____/  .'       its rollout stops where it falls behind by BEHIND, or where it has used its share
//!   |        ______/   .'  <- stops
//!   |_______/_____.'_________ seconds
//! ```
//! With targets of latency ([`Targets`](super::Targets)) those that keep them come first, then those with fewer late requests, and only
//! among equals the faster: a rollout goes on, then, while it may still turn out to be in time.
//!
//! Without targets, where requests came one by one, the device alone is rolled out first: a policy whose first tokens come so much later
//! than its ([`Targets::awaited`]) counts as late. So no throughput is bought with somebody's patience. Where some requests have targets of
//! their own and the others have none, both hold: late requests count first, then first tokens of those without.
//!
//! A rollout that stops early is judged by what it had done by then. So bad policies cost little, and none remains untried
//! because of those before it. The work is done in portions, so that no step of the real run waits long for the answer.

use super::learn::Learned;
use super::policy::Policy;
use super::predict::Predict;
use super::queues::Queues;
use super::rollout::{Rollout, RolloutProgress};
use super::steady::Steady;
use super::strategy::{Limits, Strategy};
use super::targets::Targets;
use super::weigh::Worth;

/// The share of its time by which another policy must beat the one that decides already. Before a run's first step none does: which policy is
/// first in the table says nothing, and a margin would make a run up to 1% slower wherever that one is predicted to be nearly as fast.
const MARGIN: f64 = 0.01;

/// The same where requests come one by one: what is predicted for the present ones is soon about others.
const MARGIN_ONLINE: f64 = 0.05;

/// The share of the work by which it must be ahead where one of the two rollouts was stopped.
const AHEAD: f64 = 0.02;

/// The share of the best policy's work that must be done at the same time, from [`FROM`] of its time on.
const BEHIND: f64 = 0.85;

/// See [`BEHIND`]. Policies begin differently: with all prompts, or with some.
const FROM: f64 = 0.5;

/// The fixed cost of a rollout's step, in requests: a step costs this and one for each request in it.
const STEP: i64 = 32;

/// Of the work that is left, a rollout has this part at most: few need so much, and those that follow get what it leaves.
const SHARES: i64 = 3;

/// A step that only repeats another one costs this part of it.
const REPEATED: i64 = 6;

/// The share of a run's predicted time that may be spent on the comparison before it, if that is more than what it is given.
const SPENT: f64 = 0.02;

/// Seconds of a unit of work, about.
const UNIT: f64 = 130e-9;

/// Most units of work for any comparison: some 2 s.
const MOST: f64 = 16e6;

/// In the comparison before the first step a request that waits, and is hardly looked at, costs this part of one that runs. (At later steps, which are
/// timed closely, it costs as much.)
const WAITING: usize = 8;

/// Where requests come one by one, the share of the first rollout's time whose work counts: others will have come before the last of
/// the present ones end, and a step will never be as empty as at the end of a rollout.
const HORIZON: f64 = 0.7;

/// The winner is tried with at most this many per cent of the requests that it had at a time.
const EVENED: usize = 97;

/// Numbers of waves that it is tried with.
const WAVES: usize = 3;

/// The policy whose first tokens others are measured by: vLLM's.
const REFERENCE: &str = "gpu-only";

/// See the [module](self).
#[derive(Debug, Clone)]
pub(super) struct Comparison {
    /// The requests as they were when it began.
    queues: Queues,
    worth: Worth,
    /// Policies that have not been tried, the next one last.
    left: Vec<Policy>,
    /// The policy that is being tried, and its rollout.
    trying: Option<(Policy, Rollout)>,
    /// Work of that rollout.
    used: i64,
    /// Most work of that rollout.
    share: i64,
    /// Work that is left for all; `None` if there is no end to it.
    total: Option<i64>,
    /// The best so far.
    best: Option<Best>,
    /// The policy that decides already.
    current: Policy,
    /// Whether the winner has been tried with fewer requests at a time.
    evened: bool,
    by: By,
    /// Whether requests come one by one.
    online: bool,
    /// If so, the second until which work counts, once known ([`HORIZON`]).
    horizon: Option<f64>,
    /// Whether it asks again what another one has found.
    is_second: bool,
}

/// A policy that has been rolled out.
#[derive(Debug, Clone)]
struct Best {
    policy: Policy,
    progress: RolloutProgress,
    /// Whether all requests ended.
    ended: bool,
    /// Whether it is the policy that decides already.
    is_current: bool,
    /// Most requests that it has at a time.
    peak: usize,
    /// What another's time must be below of its time, and its own work of the other's.
    margin: f64,
    lateness: Lateness,
}

/// How late a rollout's requests are.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Lateness {
    /// Requests beyond their targets, then seconds to first tokens: each 0 unless it counts.
    much: (usize, f64),
    /// Whether targets, or the default bound, are kept.
    kept: bool,
}

/// What lateness is measured by.
#[derive(Debug, Clone, Copy, PartialEq)]
struct By {
    /// Those of all requests, if any request has some, of all or its own.
    targets: Option<Targets>,
    patience: Patience,
}

/// How long the first tokens of requests without targets may take, in the mean.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Patience {
    Any,
    /// As long as a rollout says that has not been made.
    Unknown,
    Seconds(f64),
}

impl By {
    fn of(self, rollout: &Rollout) -> Lateness {
        let (late, in_time) = self.targets.map_or((0, true), |targets| {
            let (late, all) = rollout.late();
            (late, targets.kept(late, all))
        });
        let (seconds, soon) = match self.patience {
            Patience::Seconds(most) => (rollout.first_seconds(), rollout.first_seconds() <= most),
            Patience::Unknown | Patience::Any => (0.0, true),
        };
        Lateness { much: (late, seconds), kept: in_time && soon }
    }
}

impl Best {
    /// Whether a rollout that has come so far cannot beat this one any more.
    fn is_out_of_reach(&self, rollout: &Rollout, hurries: bool, by: By, horizon: Option<f64>) -> bool {
        if !self.lateness.kept {
            // The faster does not matter before the better.
            return by.of(rollout).much > self.lateness.much;
        }
        let (seconds, end) = (rollout.seconds(), self.progress.seconds());
        let late = match horizon {
            Some(h) => seconds >= h && !self.is_behind(rollout, h),
            None => self.ended && seconds >= end * self.margin,
        };
        let behind = || rollout.progress().at(seconds) < BEHIND * self.progress.at(seconds);
        late || (hurries && seconds > FROM * end && seconds < end && behind())
    }

    /// Whether a rollout has done more by the horizon.
    fn is_behind(&self, rollout: &Rollout, horizon: f64) -> bool {
        rollout.progress().at(horizon) * self.margin > self.progress.at(horizon)
    }

    /// Whether a rollout beats this one.
    fn is_beaten_by(&self, rollout: &Rollout, by: By, horizon: Option<f64>) -> bool {
        let late = by.of(rollout);
        match (self.lateness.kept, late.kept) {
            (true, false) => return false,
            (false, true) => return rollout.requests() == 0,
            (false, false) if late.much != self.lateness.much => {
                return late.much < self.lateness.much && rollout.requests() == 0;
            }
            _ => {}
        }
        let (end, seconds) = (self.progress.seconds(), rollout.seconds());
        match horizon {
            Some(h) if seconds >= h => return self.is_behind(rollout, h),
            None if self.ended && rollout.requests() == 0 => return seconds < end * self.margin,
            _ => {}
        }
        let both = end.min(seconds);
        rollout.progress().at(both) > (1.0 + AHEAD) * self.progress.at(both)
    }
}

/// The best policy with fewer requests at a time. As many as there is room for is not always best: of 137 requests with room for 100 the last 37 run
/// alone, hardly faster, and even waves end 11% sooner. Several numbers of waves, since requests begin at a pace rather than in waves. Only where
/// requests and their lengths are known ([`Queues::are_known`]).
fn in_even_waves(best: &Best, queues: &Queues) -> Vec<Policy> {
    let all = queues.running().len() + queues.waiting().len();
    let fewer = |waves: usize| all.div_ceil(waves);
    let Some(first) = (2..=all).find(|&waves| 100 * fewer(waves) <= EVENED * best.peak) else {
        return Vec::new();
    };
    let mut most: Vec<usize> =
        (first..first + WAVES).map(fewer).filter(|&n| n >= queues.running().len()).collect();
    most.dedup();
    most.into_iter().rev().map(|n| best.policy.with_most_running(n as u32)).collect()
}

impl Comparison {
    /// Of `current` with all others of these that can serve the requests.
    pub fn new(
        current: &Policy,
        among: Vec<Policy>,
        queues: &Queues,
        limits: &Limits,
        costs: &dyn Predict,
    ) -> Comparison {
        let others = among.into_iter().filter(|p| !p.is_like(current) && p.serves(queues, limits));
        let mut left: Vec<Policy> = others.rev().collect();
        let targets = queues.targets();
        let mut first = current.clone();
        let patience = match !targets.is_some() && queues.is_awaited() {
            true => match left.iter().position(|p| p.name() == REFERENCE) {
                Some(at) => {
                    let reference = left.remove(at);
                    left.push(std::mem::replace(&mut first, reference));
                    Patience::Unknown
                }
                None if first.name() == REFERENCE => Patience::Unknown,
                None => Patience::Any,
            },
            false => Patience::Any,
        };
        let by = By { targets: queues.has_targets().then_some(targets), patience };
        let seen = queues.in_sight();
        let worth = Steady::of(&seen, limits, costs, 1.0).worth;
        Comparison {
            left,
            current: current.clone(),
            evened: false,
            by,
            online: seen.is_online(),
            trying: Some((first.clone(), Rollout::new(first, seen.clone(), worth))),
            queues: seen,
            worth,
            used: 0,
            share: i64::MAX,
            total: None,
            best: None,
            horizon: None,
            is_second: false,
        }
    }

    /// Of `current` with the `winner` of an earlier comparison, from the requests of the moment.
    pub fn second(
        current: &Policy,
        winner: Policy,
        queues: &Queues,
        limits: &Limits,
        costs: &dyn Predict,
    ) -> Comparison {
        let comparison = Comparison::new(current, vec![winner], queues, limits, costs);
        Comparison { is_second: true, evened: true, ..comparison }
    }

    /// Whether it asks again what another one has found.
    pub fn is_second(&self) -> bool {
        self.is_second
    }

    /// With `work` for all rollouts together.
    pub fn within(self, work: i64) -> Comparison {
        let trying = self.trying.map(|(policy, rollout)| (policy, rollout.exactly()));
        Comparison { total: Some(work), share: work, trying, ..self }
    }

    /// Continues while there is `work` left, counted in requests of rolled-out steps. Returns the answer once it is known:
    /// `Some(None)` if the current policy stays.
    pub fn advance(
        &mut self,
        work: &mut i64,
        limits: &Limits,
        costs: &dyn Predict,
        learned: &Learned,
    ) -> Option<Option<Policy>> {
        while let Some((policy, rollout)) = &mut self.trying {
            let hurries = self.total.is_none();
            let goes_on = |rollout: &Rollout, used: i64| {
                rollout.requests() > 0
                    && rollout.seconds().is_finite()
                    && used < self.share
                    && !self
                        .best
                        .as_ref()
                        .is_some_and(|best| best.is_out_of_reach(rollout, hurries, self.by, self.horizon))
            };
            while goes_on(rollout, self.used) {
                if *work <= 0 {
                    return None;
                }
                let part = if hurries { 1 } else { WAITING };
                let requests = (rollout.running() + rollout.waiting().div_ceil(part)) as i64;
                let repeated = i64::from(rollout.step(limits, costs, learned));
                let step = requests + STEP + repeated * requests / REPEATED;
                (*work, self.used) = (*work - step, self.used + step);
            }
            if self.by.patience == Patience::Unknown {
                // The first is the device alone.
                self.by.patience = Patience::Seconds(Targets::bound(rollout.first_seconds()));
            }
            let is_first = self.best.is_none();
            if self.best.as_ref().is_none_or(|best| best.is_beaten_by(rollout, self.by, self.horizon)) {
                let is_current = policy.is_like(&self.current);
                self.best = Some(Best {
                    lateness: self.by.of(rollout),
                    policy: policy.clone(),
                    progress: rollout.progress().clone(),
                    ended: rollout.requests() == 0,
                    is_current,
                    peak: rollout.peak(),
                    margin: match (is_current, self.online) {
                        (true, true) => 1.0 - MARGIN_ONLINE,
                        (true, false) if hurries => 1.0 - MARGIN,
                        _ => 1.0,
                    },
                });
            }
            if self.horizon.is_none() && self.online && rollout.requests() == 0 {
                self.horizon = Some(HORIZON * rollout.seconds());
            }
            if is_first {
                // The longer the run, the more may be spent on it.
                let more = (SPENT * rollout.seconds() / UNIT).min(MOST) as i64;
                self.total = self.total.map(|total| total.max(more));
            }
            if self.left.is_empty() && !self.evened && self.queues.are_known() {
                self.evened = true;
                self.left = self.best.as_ref().map_or(Vec::new(), |best| in_even_waves(best, &self.queues));
            }
            self.total = self.total.map(|total| total - self.used);
            self.share =
                self.total.map_or(i64::MAX, |total| total / (self.left.len() as i64).clamp(1, SHARES));
            self.used = 0;
            let new = |p: Policy| {
                let rollout = Rollout::new(p.clone(), self.queues.clone(), self.worth);
                (p, if hurries { rollout } else { rollout.exactly() })
            };
            self.trying = self.left.pop().map(new);
        }
        Some(self.better())
    }

    /// The best of those that have been tried, if it beats the current policy.
    pub fn better(&self) -> Option<Policy> {
        self.best.as_ref().filter(|best| !best.is_current).map(|best| best.policy.clone())
    }
}

#[cfg(test)]
mod tests;
