//! Turns of waiting requests: tenants (the keys of a server's clients) alternate, whatever one of them has queued.
//!
//! ```text
//! a1 a2 a3 a4 wait, b1 b2 come     turn 0   1   2   3   4        each request of a tenant has a turn of its own,
//!                                       a1  a2  a3  a4           at the earliest that of the request admitted last
//!                                       b1  b2
//! order                            a1 b1 a2 b2 a3 a4
//! ```
//! A tenant without waiting requests joins at the current turn, but behind the turn that it had last: a request at a time, always a
//! new one, is no way past the others. So a request that is its tenant's first waits for at most one of each other tenant. Priorities
//! order the requests of a tenant among its turns, and give it no more of them.
//!
//! refs   start-time fair queueing (Goyal et al. 1996), with requests of equal cost; VTC (Sheng et al. 2024) counts tokens instead

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::view::RequestView;

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct TenantTurns {
    /// The greatest turn that was taken.
    now: u64,
    /// The last turn that each tenant took; those without an entry took theirs before `now`.
    taken: FxHashMap<u32, u64>,
}

/// Tenants of whom it is remembered which turn they took, before those are forgotten that took theirs long ago.
const REMEMBERED: usize = 64;

impl TenantTurns {
    /// A request joins the queue.
    pub fn join(&self, waiting: &mut VecDeque<RequestView>, job: RequestView) {
        let own = waiting.iter().rev().find(|other| other.tenant == job.tenant).map(|other| other.turn);
        let last = own.or_else(|| self.taken.get(&job.tenant).copied());
        let turn = last.map_or(self.now, |last| self.now.max(last + 1));
        // Behind those of the same turn, which came before.
        let at = waiting.len() - waiting.iter().rev().take_while(|other| other.turn > turn).count();
        let tenant = job.tenant;
        waiting.insert(at, RequestView { turn, ..job });
        // Among the tenant's, which keep their turns, to where its priority belongs.
        let mut at = at;
        let mut before = at;
        while let Some(earlier) = waiting.iter().take(before).rposition(|other| other.tenant == tenant)
            && waiting[earlier].priority > waiting[at].priority
        {
            waiting.swap(earlier, at);
            let turn = waiting[at].turn;
            waiting[at].turn = std::mem::replace(&mut waiting[earlier].turn, turn);
            (at, before) = (earlier, earlier);
        }
    }

    /// A request is admitted.
    pub fn take(&mut self, job: &RequestView) {
        self.now = self.now.max(job.turn);
        self.taken.insert(job.tenant, job.turn);
        if self.taken.len() > REMEMBERED {
            let now = self.now;
            self.taken.retain(|_, turn| *turn >= now);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::program::{Iteration, RequestId, Side};
    use crate::sched::{Decision, Queues};

    fn job(slot: u32, tenant: u32, priority: i32) -> RequestView {
        RequestView { tenant, priority, ..RequestView::new(RequestId { slot, generation: 0 }, 1, 1) }
    }

    fn order(queues: &Queues) -> Vec<u32> {
        queues.waiting().map(|job| job.id.slot).collect()
    }

    /// Admits the first waiting request.
    fn admit(queues: &mut Queues) -> Option<u32> {
        let id = queues.waiting().next()?.id;
        let iteration = Iteration::serial(Vec::new(), false);
        let admit = vec![(id, Side::Host)];
        queues.admit(&Decision { admit, passed: Vec::new(), swaps: Vec::new(), iteration });
        queues.end(id);
        Some(id.slot)
    }

    #[test]
    fn tenants_alternate() {
        let mut queues = Queues::default();
        for (slot, tenant) in [(0, 7), (1, 7), (2, 7), (3, 7), (4, 8), (5, 8), (6, 9)] {
            queues.submit(job(slot, tenant, 0));
        }
        assert_eq!(order(&queues), [0, 4, 6, 1, 5, 2, 3]);
        for want in [0, 4, 6, 1] {
            assert_eq!(admit(&mut queues), Some(want));
        }
        // One that has just had its turn is behind one that has not.
        queues.submit(job(7, 9, 0));
        queues.submit(job(8, 9, 0));
        assert_eq!(order(&queues), [5, 7, 2, 8, 3]);
    }

    #[test]
    fn a_hundred_requests_delay_another_tenants_first_by_one_at_most() {
        let mut queues = Queues::default();
        (0..100).for_each(|slot| queues.submit(job(slot, 0, -5)));
        for _ in 0..10 {
            admit(&mut queues);
        }
        queues.submit(job(200, 1, 5));
        queues.submit(job(201, 1, 5));
        let order = order(&queues);
        assert!(order.iter().position(|&slot| slot == 200).unwrap() <= 1, "{order:?}");
        assert!(order.iter().position(|&slot| slot == 201).unwrap() <= 3, "{order:?}");
    }

    /// A new request whenever the last is admitted.
    #[test]
    fn one_at_a_time_is_no_way_past_the_others() {
        let mut queues = Queues::default();
        (0..20).for_each(|slot| queues.submit(job(slot, 0, 0)));
        let mut admitted = Vec::new();
        for slot in 100..110 {
            queues.submit(job(slot, 1, 0));
            admitted.extend([admit(&mut queues), admit(&mut queues)].into_iter().flatten());
        }
        let of_others = admitted.iter().filter(|&&slot| slot < 100).count();
        assert!((9..=11).contains(&of_others), "{admitted:?}");
    }

    #[test]
    fn priorities_are_among_the_requests_of_a_tenant() {
        let mut queues = Queues::default();
        let all = [(0, 0, 0), (1, 0, 0), (2, 1, 9), (3, 1, 9), (4, 0, -1), (5, 1, 3), (6, 0, 0), (7, 0, -1)];
        for (slot, tenant, priority) in all {
            queues.submit(job(slot, tenant, priority));
        }
        assert_eq!(order(&queues), [4, 5, 7, 2, 0, 3, 1, 6]);
        // What is cancelled leaves no gap that would cost the tenant its turns.
        [0, 1, 4, 6, 7].into_iter().for_each(|slot| assert!(queues.end(RequestId { slot, generation: 0 })));
        queues.submit(job(8, 0, 0));
        assert_eq!(order(&queues), [5, 8, 2, 3]);
    }

    proptest! {
        /// Of each tenant the order is that of priority and age; and between two requests of a tenant that are neighbours among its own,
        /// another tenant has at most one that has not waited for longer.
        #[test]
        fn any_submits_and_admissions_keep_the_order(script in prop::collection::vec((0u32..4, -1i32..2, 0u8..3), 1..80)) {
            let mut queues = Queues::default();
            for (slot, (tenant, priority, what)) in (0..).zip(script) {
                if what == 0 {
                    admit(&mut queues);
                } else {
                    queues.submit(job(slot, tenant, priority));
                }
                let waiting: Vec<&RequestView> = queues.waiting().collect();
                prop_assert!(waiting.is_sorted_by_key(|job| job.turn));
                for tenant in 0..4 {
                    let own: Vec<_> = waiting.iter().filter(|job| job.tenant == tenant).collect();
                    prop_assert!(own.is_sorted_by_key(|job| (job.priority, job.id.slot)));
                    prop_assert!(own.windows(2).all(|two| two[0].turn < two[1].turn), "a turn has one of each");
                }
            }
        }
    }
}
