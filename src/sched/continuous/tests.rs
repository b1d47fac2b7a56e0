use proptest::prelude::{Just, ProptestConfig, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::strategy::Strategy as Draw;

use super::*;
use crate::program::{Kind, LayerPlacement, Placement, Policy, Residence, Wants, check, lower};
use crate::sched::{SlotMap, Untimed};

const LIMITS: Limits = Limits { rows: 8, sub_batches: 1, sequences: 4, device_pages: 10, host_pages: 0 };

/// Requests of these prompts and longest lengths.
fn queues(requests: &[(u32, u32)]) -> (Queues, Vec<RequestId>) {
    let (mut slots, mut queues) = (SlotMap::default(), Queues::default());
    let submit = |&(prompt, most): &(u32, u32)| {
        let id = slots.insert(());
        queues.submit(RequestView::new(id, prompt, most));
        id
    };
    let ids = requests.iter().map(submit).collect();
    (queues, ids)
}

/// Plans and carries out a step; returns its groups as (slot, first, tokens).
fn step(s: &mut Continuous, q: &mut Queues, limits: &Limits) -> Vec<Vec<(u32, u32, u32)>> {
    let decision = s.plan(q, limits, &Untimed);
    q.admit(&decision);
    q.commit(&decision.iteration, &[], |g| g.tokens);
    let groups = |s: &SubBatch| s.groups.iter().map(|g| (g.request.slot, g.first, g.tokens)).collect();
    decision.iteration.sub_batches.iter().map(groups).collect()
}

#[test]
fn prompts_go_in_chunks_beside_decode_rows() {
    let (mut q, ids) = queues(&[(3, 9), (12, 20)]);
    let mut s = Continuous::default();
    assert_eq!(step(&mut s, &mut q, &LIMITS), [[(0, 0, 3), (1, 0, 5)]]);
    assert_eq!(
        step(&mut s, &mut q, &LIMITS),
        [[(1, 5, 7), (0, 3, 1)]],
        "prompts first, in the order of rows"
    );
    assert_eq!(step(&mut s, &mut q, &LIMITS), [[(0, 4, 1), (1, 12, 1)]]);
    assert!(q.end(ids[0]) && !q.end(ids[0]));
    assert_eq!(step(&mut s, &mut q, &LIMITS), [[(1, 13, 1)]]);
}

#[test]
fn only_the_row_behind_the_prompt_wants_logits() {
    let (q, _) = queues(&[(12, 20)]);
    let first = Continuous::default().plan(&q, &LIMITS, &Untimed).iteration.sub_batches[0].groups[0];
    assert_eq!((first.tokens, first.wants, first.phase), (8, Wants::Nothing, Phase::Prefill));
}

#[test]
fn one_that_waits_for_pages_is_overtaken_so_often_and_no_more() {
    // The second needs all pages; the others one each.
    let big = 10 * crate::cache::PAGE_TOKENS as u32;
    let mut requests = vec![(1, 1), (1, big)];
    requests.extend([(1, 1); 20]);
    let (mut q, ids) = queues(&requests);
    let mut s = Continuous::new(5);
    let mut admitted = Vec::new();
    while !admitted.contains(&ids[1]) {
        let decision = s.plan(&q, &LIMITS, &Untimed);
        q.admit(&decision);
        q.commit(&decision.iteration, &[], |g| g.tokens);
        admitted.extend(decision.admit.into_iter().map(|(id, _)| id));
        // One is over after each step: pages become free one by one.
        let oldest = q.running()[0].id;
        assert!(q.end(oldest));
    }
    // The first, five that overtook, the big one; nothing behind it until it is through.
    assert_eq!(admitted, [&ids[..1], &ids[2..7], &ids[1..2]].concat());
}

#[test]
fn prompts_keep_an_eighth_of_the_rows_and_decode_rows_take_turns() {
    let limits = Limits { rows: 8, sub_batches: 1, sequences: 20, device_pages: 100, host_pages: 0 };
    let (mut q, _) = queues(&[(1, 60); 10]);
    let mut s = Continuous::default();
    // Until all decode.
    for _ in 0..4 {
        step(&mut s, &mut q, &limits);
    }
    q.submit(RequestView::new(RequestId { slot: 10, generation: 0 }, 30, 30));
    let mut seen = [0; 10];
    for _ in 0..20 {
        let groups = step(&mut s, &mut q, &limits).concat();
        assert_eq!(groups.iter().map(|g| g.2).sum::<u32>(), 8);
        assert!(groups.iter().any(|g| g.0 == 10), "the prompt goes on");
        groups.iter().filter(|g| g.0 < 10).for_each(|g| seen[g.0 as usize] += 1);
    }
    assert_eq!(seen, [14; 10], "140 rows for ten requests");
}

/// The prompts of many requests in mini-batches: each streamed layer crosses the link once for all of them.
#[test]
fn a_streamed_layer_crosses_the_link_once_for_all_sub_batches() {
    let layers = 5;
    let mut placement = Placement::all(Side::Device, layers, 0);
    for layer in &mut placement.layers[1..] {
        let policy = Policy::all(Side::Device);
        *layer = LayerPlacement {
            weights: Residence::Streamed,
            prefill: policy,
            decode: policy,
            kv: Side::Device,
            device_experts: 0,
        };
    }
    let requests = [(20, 40); 8];
    let mut streams = Vec::new();
    let mut rows = Vec::new();
    for sub_batches in [1, 2, 4] {
        let (q, _) = queues(&requests);
        let limits = Limits { rows: 32, sub_batches, sequences: 8, device_pages: 100, host_pages: 0 };
        let iteration = Continuous::default().plan(&q, &limits, &Untimed).iteration;
        assert_eq!(iteration.sub_batches.len(), sub_batches as usize);
        rows.push(iteration.sub_batches.iter().map(SubBatch::rows).sum::<u32>());
        let program = lower(&placement, &iteration).unwrap();
        check(&program, &placement, &iteration).unwrap();
        streams.push(program.ops.iter().filter(|op| matches!(op.kind, Kind::Stream { .. })).count());
    }
    assert_eq!(rows, [32, 64, 128], "as many rows as there is room for");
    assert_eq!(streams, [layers - 1; 3]);
}

#[derive(Debug, Clone)]
enum Event {
    Submit { prompt: u32, more: u32 },
    Cancel(prop::sample::Index),
    Step,
}

fn event() -> impl Draw<Value = Event> {
    prop_oneof![
        3 => (1..90u32, 0..60u32).prop_map(|(prompt, more)| Event::Submit { prompt, more }),
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
        4 => Just(Event::Step),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    /// Pages are never promised twice, every step has rows, no row comes twice or out of order, everybody gets there.
    #[test]
    fn any_requests_get_through(
        events in prop::collection::vec(event(), 0..80),
        rows in 1..24u32,
        sub_batches in 1..4u32,
        sequences in 1..9u32,
        patience in 0..6u32,
    ) {
        // A request of 150 tokens fits.
        let pages = crate::cache::KvGeometry::pages_for(150) + 2;
        let limits = Limits { rows: rows.max(sequences), sub_batches, sequences, device_pages: pages, host_pages: 0 };
        let (mut slots, mut q, mut s) = (SlotMap::default(), Queues::default(), Continuous::new(patience));
        // Stored tokens by id, which is what the queues should say.
        let mut live: Vec<(RequestId, RequestView)> = Vec::new();
        let drain = std::iter::repeat_n(Event::Step, 20_000);
        for event in events.into_iter().chain(drain) {
            match event {
                Event::Submit { prompt, more } => {
                    let id = slots.insert(());
                    let job = RequestView::new(id, prompt, prompt + more);
                    q.submit(job.clone());
                    live.push((id, job));
                }
                Event::Cancel(which) if !live.is_empty() => {
                    let (id, _) = live.swap_remove(which.index(live.len()));
                    prop_assert!(q.end(id) && slots.remove(id).is_some());
                    prop_assert!(!q.end(id), "cancelled once");
                }
                Event::Cancel(_) => {}
                Event::Step if live.is_empty() => {
                    prop_assert!(q.is_empty());
                }
                Event::Step => {
                    let decision = s.plan(&q, &limits, &Untimed);
                    q.admit(&decision);
                    prop_assert!(q.promised(Side::Device) <= pages, "{} pages promised", q.promised(Side::Device));
                    prop_assert!(q.running().len() <= limits.sequences as usize);
                    prop_assert_eq!(q.waiting().len() + q.running().len(), live.len(), "each in one queue");
                    prop_assert!(q.waiting().all(|j| j.passed <= patience), "overtaken too often");
                    let batches = &decision.iteration.sub_batches;
                    prop_assert!(batches.iter().all(|b| (1..=limits.rows).contains(&b.rows())));
                    prop_assert!(batches.len() <= sub_batches as usize && !batches.is_empty(), "no progress");
                    let mut seen = Vec::new();
                    for g in batches.iter().flat_map(|b| &b.groups) {
                        prop_assert!(!seen.contains(&g.request), "a request twice in a step");
                        seen.push(g.request);
                        let (_, job) = live.iter_mut().find(|(id, _)| *id == g.request).expect("live");
                        prop_assert_eq!(g.first, job.stored);
                        prop_assert!(g.end() <= job.prompt || (g.phase == Phase::Decode && g.tokens == 1));
                        prop_assert_eq!(g.wants == Wants::Last, g.end() >= job.prompt);
                        job.stored = g.end();
                    }
                    q.commit(&decision.iteration, &[], |g| g.tokens);
                    // As long as it may get: over.
                    live.retain(|(id, job)| {
                        let over = job.stored >= job.most;
                        if over {
                            q.end(*id);
                            slots.remove(*id);
                        }
                        !over
                    });
                }
            }
        }
        prop_assert!(live.is_empty(), "{} requests starve", live.len());
    }
}
