//! A fake executor: commits decisions, keeps a clock, and holds every decision against what must always be true.

use std::collections::HashMap;

use tandem::program::{Flow, Iteration, Phase, RequestId, Side, SubBatch, Wants};
use tandem::sched::{Decision, Limits, Observed, Predict, Queues, RequestView, SlotMap, Strategy};

/// A request, as the driver knows it.
#[derive(Debug, Clone)]
pub struct Live {
    pub job: RequestView,
}

/// See the [module](self).
pub struct Driver<'a> {
    pub strategy: Box<dyn Strategy>,
    pub limits: Limits,
    /// What the strategy is told.
    pub costs: &'a dyn Predict,
    /// What steps really take.
    pub truth: &'a dyn Predict,
    pub queues: Queues,
    pub live: HashMap<RequestId, Live>,
    slots: SlotMap<()>,
    pub clock: f64,
    pub steps: u64,
    /// Tokens of answers made, and of prompts stored.
    pub tokens: u64,
    pub prompt_tokens: u64,
    /// Tokens of answers by where keys and values were: device, host.
    pub made: [u64; 2],
    pub finished: u64,
    pub swapped: u64,
    /// Steps by flow: serial, two lanes, asynchronous.
    pub flows: [u64; 3],
    /// Asynchronous steps: cohorts in them, those that advanced, and when each one's attention is done, by first request.
    pub cohorts: [u64; 2],
    ready: HashMap<RequestId, f64>,
    host_free: f64,
    /// Longest time a request went without advancing, in iterations, once it had memory.
    pub longest_wait: u32,
}

macro_rules! hold {
    ($cond:expr, $($why:tt)*) => {
        if !$cond {
            return Err(format!($($why)*));
        }
    };
}

impl<'a> Driver<'a> {
    pub fn new(strategy: Box<dyn Strategy>, limits: Limits, costs: &'a dyn Predict) -> Driver<'a> {
        Driver {
            strategy,
            limits,
            costs,
            truth: costs,
            queues: Queues::default(),
            live: HashMap::new(),
            slots: SlotMap::default(),
            clock: 0.0,
            steps: 0,
            tokens: 0,
            prompt_tokens: 0,
            made: [0; 2],
            finished: 0,
            swapped: 0,
            flows: [0; 3],
            cohorts: [0; 2],
            ready: HashMap::new(),
            host_free: 0.0,
            longest_wait: 0,
        }
    }

    /// Returns whether the strategy can serve it.
    pub fn submit(&mut self, prompt: u32, most: u32) -> Option<RequestId> {
        let id = self.slots.insert(());
        let job = RequestView::new(id, prompt, most);
        if job.pages() > self.strategy.most_pages(&self.limits) {
            self.slots.remove(id);
            return None;
        }
        self.live.insert(id, Live { job: job.clone() });
        self.queues.submit(job);
        Some(id)
    }

    pub fn cancel(&mut self, id: RequestId) {
        assert!(self.queues.end(id) && self.slots.remove(id).is_some() && self.live.remove(&id).is_some());
    }

    /// One step; what is wrong, in words.
    pub fn step(&mut self) -> Result<(), String> {
        if self.live.is_empty() {
            hold!(self.queues.is_empty(), "requests in queues that nobody knows");
            return Ok(());
        }
        let decision = self.strategy.plan(&self.queues, &self.limits, self.costs);
        self.check_sides(&decision)?;
        self.queues.admit(&decision);
        self.check_queues()?;
        self.check_rows(&decision.iteration)?;
        let pages: usize = decision.swaps.iter().map(|(id, _)| self.live[id].job.pages_with(0)).sum();
        let iteration = &decision.iteration;
        let predicted = self.costs.iteration(iteration);
        self.clock += self.truth.swap(pages as u64);
        let (seconds, parked) = match iteration.flow {
            Flow::Async => self.advance(iteration),
            _ => (self.truth.iteration(iteration), Vec::new()),
        };
        self.clock += seconds;
        self.steps += 1;
        self.swapped += pages as u64;
        self.flows[iteration.flow as usize] += 1;
        let cohorts = iteration.cohorts().count() as u32;
        let stays = |(i, batch): &(u8, &SubBatch)| batch.at.is_some() && parked[*i as usize] == batch.at;
        let advanced = cohorts - iteration.cohorts().filter(stays).count() as u32;
        self.cohorts = [self.cohorts[0] + u64::from(cohorts), self.cohorts[1] + u64::from(advanced)];
        self.commit(iteration, &parked);
        self.strategy.observe(&Observed { predicted, seconds, cohorts, advanced });
        Ok(())
    }

    /// An asynchronous step from now on: its seconds, and where each sub-batch stands after it.
    fn advance(&mut self, iteration: &Iteration) -> (f64, Vec<Option<u32>>) {
        let layers = self.truth.layers();
        let seconds = self.truth.iteration(iteration);
        let mut parked = vec![None; iteration.sub_batches.len()];
        let mut waits = f64::INFINITY;
        let mut any = iteration.sub_batches[0].rows() > 0;
        for (i, batch) in iteration.cohorts() {
            let key = batch.groups[0].request;
            let looked = self.clock + seconds * f64::from(batch.at.unwrap_or(0)) / f64::from(layers);
            let ready = self.ready.get(&key).copied().unwrap_or(0.0);
            if batch.at.is_some() && ready > looked {
                parked[i as usize] = batch.at;
                waits = waits.min(ready);
                continue;
            }
            any = true;
            let next = batch.at.map_or(0, |at| at + 1);
            if next == layers {
                self.ready.remove(&key);
                continue;
            }
            let (rows, kv) = (batch.rows().into(), batch.groups.iter().map(|g| u64::from(g.end())).sum());
            let attention = self.truth.host_attention(rows, kv) / f64::from(layers) + self.truth.launch();
            let published = self.clock + seconds * f64::from(next) / f64::from(layers);
            self.host_free = self.host_free.max(published) + attention;
            self.ready.insert(key, self.host_free);
            parked[i as usize] = Some(next);
        }
        // With nothing else to do, the engine waits for the host.
        (if any { seconds } else { waits - self.clock }, parked)
    }

    fn commit(&mut self, iteration: &Iteration, parked: &[Option<u32>]) {
        self.queues.commit(iteration, parked, |g| g.tokens);
        for (i, batch) in iteration.sub_batches.iter().enumerate() {
            let at = parked.get(i).copied().flatten();
            for group in &batch.groups {
                let live = self.live.get_mut(&group.request).expect("live");
                live.job.at = at;
                if at.is_some() {
                    continue;
                }
                live.job.stored = group.end();
                if group.phase == Phase::Prefill {
                    self.prompt_tokens += u64::from(group.tokens);
                }
                if group.wants == Wants::Last {
                    self.tokens += 1;
                    self.made[usize::from(live.job.home == Some(Side::Host))] += 1;
                }
            }
        }
        let waited = self.queues.running().iter().map(|j| j.waited).max();
        self.longest_wait = self.longest_wait.max(waited.unwrap_or(0));
        let over: Vec<RequestId> =
            self.live.values().filter(|l| l.job.stored >= l.job.most).map(|l| l.job.id).collect();
        for id in over {
            self.finished += 1;
            self.cancel(id);
        }
    }

    fn check_sides(&mut self, decision: &Decision) -> Result<(), String> {
        for &(id, side) in &decision.admit {
            let Some(live) = self.live.get_mut(&id) else {
                return Err(format!("{id:?} is admitted, but is not there"));
            };
            hold!(live.job.home.is_none(), "{id:?} is admitted twice");
            live.job.home = Some(side);
        }
        let mut to_device = false;
        for &(id, side) in &decision.swaps {
            let Some(live) = self.live.get_mut(&id) else {
                return Err(format!("{id:?} is swapped, but is not there"));
            };
            hold!(
                live.job.home.is_some_and(|h| h != side),
                "{id:?} is swapped to {side:?} from {:?}",
                live.job.home
            );
            hold!(live.job.at.is_none(), "{id:?} is swapped while its row is parked");
            hold!(side == Side::Device || !to_device, "what leaves the device must do so first");
            to_device |= side == Side::Device;
            live.job.home = Some(side);
        }
        Ok(())
    }

    /// Each request in one queue, on the side it should be; promises kept.
    fn check_queues(&self) -> Result<(), String> {
        let mut seen = HashMap::new();
        for job in self.queues.waiting().chain(self.queues.running()) {
            hold!(seen.insert(job.id, job.home).is_none(), "{:?} is in two queues", job.id);
            let known = self.live.get(&job.id).map(|l| (l.job.home, l.job.stored, l.job.at));
            hold!(known == Some((job.home, job.stored, job.at)), "{job:?} is known as {known:?}");
        }
        hold!(seen.len() == self.live.len(), "{} in queues, {} live", seen.len(), self.live.len());
        hold!(self.queues.running().len() <= self.limits.sequences as usize, "more than {:?}", self.limits);
        let (device, host) = (self.limits.device_pages, self.limits.host_pages);
        let promised = self.queues.promised(Side::Host);
        hold!(promised <= host, "{promised} pages promised on the host, {host} there");
        // What may have to leave the device has a place: all behind the requests that fit it at their longest.
        let (mut sum, mut behind) = (0, 0);
        for job in self.queues.running().iter().filter(|j| j.home == Some(Side::Device)) {
            sum += job.pages();
            if sum > device {
                behind += job.pages();
            }
        }
        hold!(
            promised + behind <= host,
            "{behind} pages cannot be evicted: {promised} of {host} are promised"
        );
        Ok(())
    }

    /// Rows are within limits, continue what is stored, and their pages are there.
    fn check_rows(&self, iteration: &Iteration) -> Result<(), String> {
        let batches = &iteration.sub_batches;
        hold!(!batches.is_empty(), "no progress: {:?}", self.queues);
        hold!(batches.len() <= self.limits.sub_batches as usize, "{} sub-batches", batches.len());
        let lanes = match iteration.flow {
            Flow::TwoLanes => 2,
            Flow::Async => batches.len(),
            // One side: sub-batches one after the other.
            _ if self.limits.one_sided() => batches.len(),
            _ => 1,
        };
        hold!(batches.len() == lanes, "{:?} of {} sub-batches", iteration.flow, batches.len());
        let mut after: HashMap<RequestId, u32> = HashMap::new();
        for (i, batch) in batches.iter().enumerate() {
            let rows = batch.rows();
            let least = u32::from(iteration.flow != Flow::Async);
            hold!((least..=self.limits.rows).contains(&rows), "{rows} rows, {:?}", self.limits);
            for g in &batch.groups {
                let Some(Live { job, .. }) = self.live.get(&g.request) else {
                    return Err(format!("{g:?} of nobody"));
                };
                hold!(after.insert(g.request, g.end()).is_none(), "{g:?} twice in a step");
                let Some(home) = job.home else { return Err(format!("{g:?} has no memory")) };
                hold!(job.at == batch.at, "{g:?} at {:?}, of {job:?}", batch.at);
                let cohort = i > 0 && iteration.flow == Flow::Async;
                hold!(
                    !cohort || (home == Side::Host && g.phase == Phase::Decode),
                    "{g:?} in a cohort, of {job:?}"
                );
                hold!(*g == job.group(g.tokens, home) && g.tokens > 0, "{g:?} of {job:?}");
                hold!(
                    g.end() <= job.prompt || (g.phase == Phase::Decode && g.tokens == 1),
                    "{g:?} of {job:?}"
                );
            }
        }
        hold!(!after.is_empty(), "no progress: {:?}", self.queues);
        for side in [Side::Device, Side::Host] {
            let of = self.queues.running().iter().filter(|j| j.home == Some(side));
            let end = |j: &RequestView| after.get(&j.id).map_or(0, |end| end - j.stored);
            let pages: usize = of.map(|j| j.pages_with(end(j))).sum();
            hold!(pages <= self.limits.pages(side), "{pages} pages on the {side:?}, {:?}", self.limits);
        }
        Ok(())
    }
}
