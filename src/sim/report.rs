//! What a simulation says of a strategy.

use serde::Serialize;

use crate::hardware::{Energy, Hardware, Power};
use crate::program::Side;
use crate::sched::Targets;

/// The share of the makespan in the middle that counts as steady: from 20% to 80% of the time.
///
/// By time, not by completions: the 30% to 70% of completions that papers use leave out the long requests at the end, and
/// inflate gains.
pub const STEADY: (f64, f64) = (0.2, 0.8);

/// Reasons of failures that are told apart.
const MOST_REASONS: usize = 10;

/// The p-th percentile by nearest rank; `None` without values.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Quantiles {
    /// Half.
    pub p50: Option<f64>,
    /// 90 of 100.
    pub p90: Option<f64>,
    /// 99 of 100.
    pub p99: Option<f64>,
}

impl Quantiles {
    /// The quantiles of values in any order.
    pub fn of(mut values: Vec<f64>) -> Quantiles {
        values.sort_by(f64::total_cmp);
        let rank = |p: usize| (values.len() * p).div_ceil(100).checked_sub(1).map(|i| values[i]);
        Quantiles { p50: rank(50), p90: rank(90), p99: rank(99) }
    }
}

/// Latencies by where a request's keys and values were for most of its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Latencies {
    /// On the GPU.
    pub gpu: Quantiles,
    /// On the host.
    pub host: Quantiles,
}

/// How requests ended.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct RequestCounts {
    /// Requests that got all their tokens.
    pub finished: usize,
    /// Without.
    pub failed: usize,
    /// Finished ones whose keys and values were on the host for most of their tokens.
    pub on_host: usize,
    /// Why requests failed: each reason, and how often.
    pub reasons: Vec<(String, usize)>,
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The strategy's name.
    pub strategy: String,
    /// Tokens generated per second of the makespan.
    pub throughput_tok_s: f64,
    /// Tokens generated per second in the [`STEADY`] window.
    pub steady_tok_s: f64,
    /// Seconds from the first arrival to the last token.
    pub makespan_s: f64,
    /// Seconds from arrival to the first token.
    pub ttft_s: Quantiles,
    /// Seconds between the tokens of a request, its mean, after the first.
    pub tpot_s: Latencies,
    /// Seconds from arrival to the last token, by token of the answer (NEO's per-token latency): the mean over requests.
    pub latency_per_token_s: Option<f64>,
    /// Share of the makespan during which the GPU worked; not a number (null in JSON) if unknown, as with the next ones.
    pub gpu_busy: f64,
    /// The same share for the CPU.
    pub cpu_busy: f64,
    /// The same share for the busier direction of the link.
    pub link_busy: f64,
    /// Share of the makespan during which there were requests to run and the GPU did not work.
    pub gpu_bubbles: f64,
    /// Iterations.
    pub iterations: u64,
    /// How many of them ran unified, in two lanes, asynchronously.
    pub flows: [u64; 3],
    /// Pages that changed sides, over all requests.
    pub swapped_pages: u64,
    /// Bytes that crossed the link, where they were counted: on a real engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link_bytes: Option<LinkBytes>,
    /// Requests that got all their tokens, and them in time; without targets all that did.
    pub within_targets: usize,
    /// Those per second of the makespan.
    pub goodput_req_s: f64,
    /// Whether as many of all requests were in time as the targets' percentile says; `None` without targets.
    pub keeps_targets: Option<bool>,
    /// Requests that failed: runs in which not as many did are of different work.
    pub failed: usize,
    /// What the run drew and cost, where it is known ([`Report::spend`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<Energy>,
    /// How requests ended.
    pub requests: RequestCounts,
    /// Each of them, in the order of their arrival.
    #[serde(skip)]
    pub trips: Vec<Trip>,
}

impl Report {
    /// Fills [`Report::energy`] from what `hardware` says of watts and prices.
    pub fn spend(&mut self, hardware: &Hardware) {
        let tokens = self.throughput_tok_s * self.makespan_s;
        let busy = (self.cpu_busy, self.gpu_busy);
        let of = |power: Power| power.energy(self.makespan_s, busy, tokens, hardware.price.as_ref());
        self.energy = hardware.power.and_then(of);
    }
}

/// Bytes that crossed the link in each direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LinkBytes {
    /// From the host to the device.
    pub to_device: u64,
    /// From the device to the host.
    pub to_host: u64,
}

/// A request on its way.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Trip {
    /// When it arrived, in seconds since the start, as all times.
    pub arrived: f64,
    /// Tokens that it wants.
    pub output: u32,
    /// Tokens that it has.
    pub made: u32,
    /// When it had the first.
    pub first: f64,
    /// When it had the last.
    pub last: f64,
    /// Tokens made while its keys and values were on the host.
    pub host_tokens: u32,
    /// Whether it ended without all of them.
    pub failed: bool,
}

impl Trip {
    /// A token at `now`, of a request that lives on `side`.
    pub fn token(&mut self, now: f64, side: Side) {
        if self.made == 0 {
            self.first = now;
        }
        self.made += 1;
        self.last = now;
        self.host_tokens += u32::from(side == Side::Host);
    }

    /// Seconds from its arrival to its first token.
    pub fn ttft(&self) -> f64 {
        self.first - self.arrived
    }

    /// Seconds between its tokens after the first; `None` of an answer of one.
    pub fn tpot(&self) -> Option<f64> {
        (self.made > 1).then(|| (self.last - self.first) / f64::from(self.made - 1))
    }

    /// Whether it got all its tokens.
    pub fn is_done(&self) -> bool {
        !self.failed && self.made == self.output
    }

    /// Whether its keys and values were on the host for most of its tokens.
    pub fn on_host(&self) -> bool {
        2 * self.host_tokens > self.made
    }
}

/// Sums over a run, simulated or real.
#[derive(Debug, Clone, Default)]
pub struct RunSums {
    /// When, and how many tokens.
    pub tokens: Vec<(f64, u32)>,
    /// Seconds that the GPU worked; not a number if unknown, as with the others.
    pub gpu: f64,
    /// Seconds that the CPU worked.
    pub cpu: f64,
    /// Seconds of copies to the GPU.
    pub h2d: f64,
    /// Seconds of copies to the host.
    pub d2h: f64,
    /// Seconds of iterations.
    pub running: f64,
    /// Iterations.
    pub iterations: u64,
    /// How many of them ran unified, in two lanes, asynchronously.
    pub flows: [u64; 3],
    /// Pages that changed sides.
    pub swapped_pages: u64,
    /// Bytes that crossed the link, if somebody counted.
    pub link_bytes: Option<LinkBytes>,
    /// Why requests failed: each reason, and how often.
    pub reasons: Vec<(String, usize)>,
}

impl RunSums {
    /// A request failed.
    pub fn fail(&mut self, why: String) {
        let known = self.reasons.iter().position(|(w, _)| *w == why);
        match known.or((self.reasons.len() == MOST_REASONS).then_some(MOST_REASONS - 1)) {
            Some(at) => self.reasons[at].1 += 1,
            None => self.reasons.push((why, 1)),
        }
    }
}

/// What is to be said of a run of requests.
pub fn report(strategy: &str, trips: &[Trip], sums: RunSums, targets: &Targets) -> Report {
    let makespan = sums.tokens.last().map_or(0.0, |t| t.0);
    let per_second = |tokens: u64, seconds: f64| if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    let all: u64 = sums.tokens.iter().map(|t| u64::from(t.1)).sum();
    let (begin, end) = (STEADY.0 * makespan, STEADY.1 * makespan);
    let steady: u64 = sums.tokens.iter().filter(|t| t.0 > begin && t.0 <= end).map(|t| u64::from(t.1)).sum();
    let done: Vec<&Trip> = trips.iter().filter(|t| t.is_done()).collect();
    let within = done.iter().filter(|t| targets.met(t.ttft(), t.tpot())).count();
    let between = |host: bool| {
        let of = done.iter().filter(|t| t.on_host() == host);
        Quantiles::of(of.filter_map(|t| t.tpot()).collect())
    };
    let per_token: Vec<f64> = done.iter().map(|t| (t.last - t.arrived) / f64::from(t.made)).collect();
    // What is not known (not a number) stays so.
    let share = |seconds: f64| match makespan > 0.0 && !seconds.is_nan() {
        true => (seconds / makespan).clamp(0.0, 1.0),
        false => seconds * 0.0,
    };
    Report {
        strategy: strategy.to_owned(),
        throughput_tok_s: per_second(all, makespan),
        steady_tok_s: per_second(steady, end - begin),
        makespan_s: makespan,
        ttft_s: Quantiles::of(done.iter().map(|t| t.ttft()).collect()),
        tpot_s: Latencies { gpu: between(false), host: between(true) },
        latency_per_token_s: (!per_token.is_empty())
            .then(|| per_token.iter().sum::<f64>() / per_token.len() as f64),
        gpu_busy: share(sums.gpu),
        cpu_busy: share(sums.cpu),
        link_busy: share(sums.h2d.max(sums.d2h)),
        gpu_bubbles: share(sums.running - sums.gpu),
        iterations: sums.iterations,
        flows: sums.flows,
        swapped_pages: sums.swapped_pages,
        link_bytes: sums.link_bytes,
        within_targets: within,
        goodput_req_s: if makespan > 0.0 { within as f64 / makespan } else { 0.0 },
        keeps_targets: targets.is_some().then(|| targets.kept(trips.len() - within, trips.len())),
        failed: trips.len() - done.len(),
        energy: None,
        requests: RequestCounts {
            finished: done.len(),
            failed: trips.len() - done.len(),
            on_host: done.iter().filter(|t| t.on_host()).count(),
            reasons: sums.reasons,
        },
        trips: trips.to_vec(),
    }
}
