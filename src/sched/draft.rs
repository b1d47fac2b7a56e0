//! Memory of a step: which requests are on which side. Shared by the strategies; they choose rows afterwards.
//!
//! ```text
//! device   [ guaranteed: all they may grow to fits ][ evictable: admitted by what they need now ]   in the order of admission
//! host     [ all they may grow to is promised       ][ kept for the evictable                    ]
//! ```
//!
//! The device is overcommitted: a request is admitted when its prompt fits below the watermark, not when its longest answer
//! does. That is safe as long as everything behind the guaranteed ones could go to the host and grow there:
//!
//! ```text
//! Σ pages(host) + Σ pages(evictable) <= host pages
//! ```
//!
//! Admissions and swaps keep it. So when the device is full, its newest requests always have somewhere to go, the oldest ones
//! end, and nobody stops half way. Without host pages it says that the device's own promises fit, as in
//! [`Continuous`](super::Continuous).

use crate::cache::KvGeometry;
use crate::program::{Iteration, Phase, RequestId, Side};

use super::decision::Decision;
use super::queues::Queues;
use super::strategy::Limits;
use super::view::RequestView;

/// Per cent of the device's pages up to which requests are admitted; the rest is for growth.
const WATERMARK: usize = 95;

/// Most requests that come back to the device before a step, since their pages are copied first. Evictions are not limited.
const MOST_SWAPS: usize = 16;

/// Requests that may overtake one that waits for memory.
pub(super) const PATIENCE: u32 = 16;

/// See the [module](self).
pub(super) struct Draft<'a> {
    queues: &'a Queues,
    limits: &'a Limits,
    /// Requests on the device, each with its place in the order of admission, ascending.
    pub device: Vec<(usize, &'a RequestView)>,
    /// Requests on the host, likewise.
    pub host: Vec<(usize, &'a RequestView)>,
    /// Pages that the device's requests need now.
    held: usize,
    /// Pages that the host's requests may grow to.
    promised: usize,
    /// Requests that ran before this step.
    running: usize,
    admit: Vec<(RequestId, Side)>,
    swaps: Vec<(RequestId, Side)>,
}

/// Pages that a request needs on the device now: its whole prompt, or one token more than it has.
fn needs(job: &RequestView) -> usize {
    KvGeometry::pages_for(job.prompt.max(job.stored + 1) as usize)
}

/// Pages of the requests, in the order of admission, that do not fit `room` once all before them have grown to their longest.
fn evictable(pages: impl Iterator<Item = usize>, room: usize) -> usize {
    let (mut sum, mut behind) = (0usize, 0);
    for n in pages {
        sum = sum.saturating_add(n);
        if sum > room {
            behind += n;
        }
    }
    behind
}

impl<'a> Draft<'a> {
    /// From the queues as they are.
    pub fn new(queues: &'a Queues, limits: &'a Limits) -> Draft<'a> {
        let of = |side| {
            let running = queues.running().iter().enumerate();
            running.filter(|(_, job)| job.home == Some(side)).collect::<Vec<_>>()
        };
        let (device, host) = (of(Side::Device), of(Side::Host));
        Draft {
            queues,
            limits,
            held: device.iter().map(|(_, job)| needs(job)).sum(),
            promised: host.iter().map(|(_, job)| job.pages()).sum(),
            running: device.len() + host.len(),
            device,
            host,
            admit: Vec::new(),
            swaps: Vec::new(),
        }
    }

    /// The newest requests leave the device until the others have room for their next token.
    pub fn evict(&mut self) {
        while self.held > self.limits.device_pages {
            let Some(&(rank, job)) = self.device.last() else { break };
            if self.promised + job.pages() > self.limits.host_pages {
                debug_assert!(false, "no room for an evictable request: {:?}", self.limits);
                break;
            }
            self.device.pop();
            let at = self.host.partition_point(|&(r, _)| r < rank);
            self.host.insert(at, (rank, job));
            self.held -= needs(job);
            self.promised += job.pages();
            self.swaps.push((job.id, Side::Host));
        }
    }

    /// All requests leave the device for which the host has room.
    pub fn leave(&mut self) {
        for (rank, job) in std::mem::take(&mut self.device) {
            if self.promised + job.pages() > self.limits.host_pages {
                self.device.push((rank, job));
                continue;
            }
            let at = self.host.partition_point(|&(r, _)| r < rank);
            self.host.insert(at, (rank, job));
            self.held -= needs(job);
            self.promised += job.pages();
            self.swaps.push((job.id, Side::Host));
        }
    }

    /// Requests come back to the device, the oldest first, while they fit below the watermark. Those that were evicted just
    /// now and rows that are parked stay.
    pub fn swap_in(&mut self) {
        let mut at = 0;
        while at < self.host.len() && self.swaps.len() < MOST_SWAPS {
            let (rank, job) = self.host[at];
            let parked = job.at.is_some() || self.swaps.iter().any(|&(id, _)| id == job.id);
            if parked || job.pages() > self.limits.device_pages {
                at += 1;
                continue;
            }
            // Most often the device is full: that is asked first.
            if !self.fits_device(job) {
                break;
            }
            let place = self.device.partition_point(|&(r, _)| r < rank);
            let (before, behind) = self.device.split_at(place);
            let order = before.iter().map(|(_, j)| j.pages()).chain([job.pages()]);
            let order = order.chain(behind.iter().map(|(_, j)| j.pages()));
            let evictable = evictable(order, self.limits.device_pages);
            if self.promised - job.pages() + evictable > self.limits.host_pages {
                break;
            }
            self.host.remove(at);
            self.device.insert(place, (rank, job));
            self.held += needs(job);
            self.promised -= job.pages();
            self.swaps.push((job.id, Side::Device));
        }
    }

    /// Whether a request fits below the watermark now, or on a device that has none.
    fn fits_device(&self, job: &RequestView) -> bool {
        let level = match self.device.is_empty() {
            true => self.limits.device_pages,
            false => self.limits.device_pages * WATERMARK / 100,
        };
        job.pages() <= self.limits.device_pages && self.held + needs(job) <= level
    }

    /// Admits waiting requests, first come, first served: to the device while there is room, then to the host those that `to_host`
    /// wants there. One that fits nowhere may be overtaken by [`PATIENCE`] others, then nothing behind it is admitted.
    pub fn admit(&mut self, to_device: bool, to_host: impl FnMut(&RequestView) -> bool) {
        self.admit_while(to_device, u64::MAX, to_host);
    }

    /// The same to the device alone, while fewer than `enough` rows of its prompts are pending: the pages of a prompt that waits
    /// for its rows would serve nobody.
    pub fn admit_rows(&mut self, enough: u64) {
        self.admit_while(true, enough, |_| false);
    }

    fn admit_while(&mut self, to_device: bool, enough: u64, mut to_host: impl FnMut(&RequestView) -> bool) {
        let left = |job: &RequestView| u64::from(job.prompt.saturating_sub(job.stored));
        let mut pending: u64 = self.device.iter().map(|(_, job)| left(job)).sum();
        let mut places = (self.limits.sequences as usize).saturating_sub(self.running);
        let all = self.device.iter().map(|(_, job)| job.pages());
        let mut sum: usize = all.clone().sum();
        let mut behind = evictable(all, self.limits.device_pages);
        // How often each that has to wait has been overtaken.
        let mut held: Vec<u32> = Vec::new();
        for (i, job) in self.queues.waiting().enumerate() {
            if places == 0 || pending >= enough || held.iter().any(|&passed| passed >= PATIENCE) {
                break;
            }
            let pages = job.pages();
            let now_behind = if sum + pages > self.limits.device_pages { behind + pages } else { behind };
            let device =
                to_device && self.fits_device(job) && self.promised + now_behind <= self.limits.host_pages;
            let side = if device {
                (sum, behind) = (sum + pages, now_behind);
                self.held += needs(job);
                pending += left(job);
                Side::Device
            } else if self.promised + behind + pages <= self.limits.host_pages && to_host(job) {
                self.promised += pages;
                Side::Host
            } else {
                held.push(job.passed);
                // A queue of thousands that do not fit is not looked through to its end.
                if held.len() > PATIENCE as usize {
                    break;
                }
                continue;
            };
            let rank = self.queues.running().len() + i;
            match side {
                Side::Device => self.device.push((rank, job)),
                Side::Host => self.host.push((rank, job)),
            }
            held.iter_mut().for_each(|passed| *passed += 1);
            places -= 1;
            self.admit.push((job.id, side));
        }
    }

    /// Whether waiting requests remain after the admissions of this draft.
    pub fn waits(&self) -> bool {
        self.queues.waiting().len() > self.admit.len()
    }

    /// Takes back the admission of a request that gets no row; returns whether it was new.
    pub fn withdraw(&mut self, id: RequestId) -> bool {
        let Some(at) = self.admit.iter().position(|&(new, _)| new == id) else { return false };
        let (_, side) = self.admit.remove(at);
        let list = if side == Side::Device { &mut self.device } else { &mut self.host };
        list.retain(|(_, job)| job.id != id);
        true
    }

    /// Requests of a side in one phase.
    pub fn of(&self, side: Side, phase: Phase) -> impl Iterator<Item = &'a RequestView> + '_ {
        let list = if side == Side::Device { &self.device } else { &self.host };
        list.iter().map(|&(_, job)| job).filter(move |job| job.phase() == phase)
    }

    /// Requests with rows of their prompt to come, in the order of admission.
    pub fn prompts(&self) -> Vec<(&'a RequestView, Side)> {
        let of = |list: &[(usize, &'a RequestView)], side| {
            let prompts = list.iter().filter(|(_, job)| job.phase() == Phase::Prefill);
            prompts.map(|&(rank, job)| (rank, job, side)).collect::<Vec<_>>()
        };
        let mut all = of(&self.device, Side::Device);
        all.extend(of(&self.host, Side::Host));
        all.sort_by_key(|&(rank, ..)| rank);
        all.into_iter().map(|(_, job, side)| (job, side)).collect()
    }

    /// The decision with these rows.
    pub fn decide(self, iteration: Iteration) -> Decision {
        // Those that are admitted are in the order of those that wait.
        let mut passed = Vec::new();
        let mut next = self.admit.iter();
        let mut later = self.admit.len();
        let mut id = next.next().map(|&(id, _)| id);
        for job in self.queues.waiting() {
            if later == 0 {
                break;
            }
            if id == Some(job.id) {
                later -= 1;
                id = next.next().map(|&(id, _)| id);
            } else {
                passed.push((job.id, later as u32));
            }
        }
        Decision { admit: self.admit, passed, swaps: self.swaps, iteration }
    }
}
