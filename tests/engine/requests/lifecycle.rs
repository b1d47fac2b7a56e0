//! A request's life: queued, admitted, computed with others, ended by any of its limits or by a cancel.

use tandem::engine::{Batcher, Finish, Request};
use tandem::text::{Ending, SamplerParams};

use super::world::{CONTEXT, alone, drain, engine, model, options, prompt, request};

#[test]
fn tokens_are_those_of_running_alone_with_more_requests_than_slots_and_pages() {
    let m = model();
    let vocab = m.spec.vocab;
    let mut lone = engine(&m, &options(1, None));
    // Twenty requests of up to three pages in four slots and seven pages.
    let mut all = Batcher::new(engine(&m, &options(4, Some(7))));
    let free = all.limits().all_pages();
    assert_eq!(free, 7);
    let requests: Vec<Request> = (0..20).map(|i| request(i, vocab)).collect();
    let streams: Vec<_> = requests.iter().map(|r| all.submit(r.clone()).unwrap().1).collect();
    let mut most = 0;
    while !all.is_idle() {
        let report = all.step();
        assert!(report.rows > 0 && report.rows <= 16 && report.failed == 0, "{report:?}");
        most = most.max(all.load().1);
    }
    assert!(most > 1 && most <= 4, "{most} at a time");
    for (i, (r, events)) in requests.iter().zip(&streams).enumerate() {
        let (tokens, end) = drain(events);
        assert_eq!((tokens, end.unwrap()), alone(&mut lone, r), "request {i}");
    }
    assert_eq!(all.into_engine().free_pages(), free, "no page is lost");
}

#[test]
fn a_request_ends_at_its_stop_token_its_limit_or_the_contexts() {
    let m = model();
    let mut e = engine(&m, &options(1, None));
    let greedy = |n, max_tokens, stop| Request {
        prompt: prompt(n, 1, m.spec.vocab),
        sampling: SamplerParams::default(),
        max_tokens,
        ending: Ending::at(stop),
        ..Request::default()
    };
    let (free, _) = alone(&mut e, &greedy(4, 12, vec![]));
    let stop = free[5];
    let first = free.iter().position(|&t| t == stop).unwrap();
    let cases = [
        (greedy(4, 12, vec![u32::MAX, stop]), first + 1, Finish::Stop),
        (greedy(4, 12, vec![]), 12, Finish::Length),
        (greedy(4, 1, vec![]), 1, Finish::Length),
        // The last token is sampled, but not stored: one more than there is room for.
        (greedy(CONTEXT - 3, 1000, vec![]), 4, Finish::Length),
        (greedy(CONTEXT, usize::MAX, vec![]), 1, Finish::Length),
    ];
    let mut all = Batcher::new(e);
    for (r, n, finish) in cases {
        let (_, events) = all.submit(r.clone()).unwrap();
        all.run();
        let (tokens, end) = drain(&events);
        assert_eq!((tokens.len(), end), (n, Some(finish)), "{r:?}");
    }
}

#[test]
fn a_cancel_frees_pages_and_leaves_the_others_and_a_late_one_is_harmless() {
    let m = model();
    let vocab = m.spec.vocab;
    let mut lone = engine(&m, &options(1, None));
    let mut all = Batcher::new(engine(&m, &options(2, None)));
    let free = all.limits().all_pages();
    let (long, other) = (Request { max_tokens: 50, ..request(0, vocab) }, request(2, vocab));
    let (a, a_events) = all.submit(long.clone()).unwrap();
    let (_, b_events) = all.submit(other.clone()).unwrap();
    // Waits: there are two slots.
    let (c, c_events) = all.submit(long.clone()).unwrap();
    for _ in 0..5 {
        all.step();
    }
    assert_eq!(all.load(), (1, 2));
    assert!(all.cancel(a) && all.cancel(c), "one runs, one waits");
    assert!(!all.cancel(a) && !all.cancel(c), "once");
    let (tokens, end) = drain(&a_events);
    assert_eq!((&tokens[..], end), (&alone(&mut lone, &long).0[..tokens.len()], Some(Finish::Cancelled)));
    assert!(!tokens.is_empty() && drain(&c_events) == (vec![], Some(Finish::Cancelled)));
    // Whoever has the slot now is not meant.
    let (d, d_events) = all.submit(other.clone()).unwrap();
    assert_eq!((d.slot, d.generation), (c.slot, c.generation + 1));
    assert!(!all.cancel(c));
    // Nobody listens: that is a cancel, too.
    let (_, deaf) = all.submit(Request { max_tokens: 90, ..long }).unwrap();
    drop(deaf);
    let steps = all.run();
    assert!(steps < 40, "{steps} steps: a request without a listener went on");
    for events in [b_events, d_events] {
        let (tokens, end) = drain(&events);
        assert_eq!((tokens, end.unwrap()), alone(&mut lone, &other));
    }
    assert_eq!(all.into_engine().free_pages(), free);
}

#[test]
fn what_cannot_be_done_is_refused_when_it_is_submitted() {
    let m = model();
    let vocab = m.spec.vocab;
    let mut all = Batcher::new(engine(&m, &options(2, Some(2))));
    let good = request(0, vocab);
    let hot = SamplerParams { top_p: 2.0, ..SamplerParams::default() };
    for (r, want) in [
        (Request { prompt: vec![], ..good.clone() }, "the prompt is empty"),
        (Request { prompt: vec![vocab as u32], ..good.clone() }, "outside the vocabulary"),
        (Request { prompt: prompt(CONTEXT + 1, 0, vocab), ..good.clone() }, "context of 96"),
        (Request { prompt: prompt(60, 0, vocab), max_tokens: 30, ..good.clone() }, "needs 3 pages"),
        (Request { sampling: hot, ..good.clone() }, "`top_p` 2"),
    ] {
        let error = all.submit(r).unwrap_err().to_string();
        assert!(error.contains(want), "{error:?} does not say {want:?}");
    }
    assert!(all.is_idle() && all.run() == 0);
}
