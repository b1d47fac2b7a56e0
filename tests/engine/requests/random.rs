//! Any interleaving of submits, cancels and steps.

use std::sync::mpsc::Receiver;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem::engine::{Batcher, Event, Finish, Request};
use tandem::program::RequestId;

use super::world::{alone, drain, engine, model, options, request};

#[derive(Debug, Clone)]
enum Do {
    Submit(usize),
    Cancel(prop::sample::Index),
    Step,
}

fn any_do() -> impl Strategy<Value = Do> {
    prop_oneof![
        2 => (0..KINDS).prop_map(Do::Submit),
        1 => any::<prop::sample::Index>().prop_map(Do::Cancel),
        4 => Just(Do::Step),
    ]
}

/// Different requests; what each answers alone is computed once.
const KINDS: usize = 12;

struct Sent {
    kind: usize,
    id: RequestId,
    events: Receiver<Event>,
    cancelled: bool,
}

#[test]
fn whatever_is_submitted_and_cancelled_each_answer_is_its_own() {
    let m = model();
    let mut lone = engine(&m, &options(1, None));
    let requests: Vec<Request> = (0..KINDS).map(|i| request(i, m.spec.vocab)).collect();
    let answers: Vec<_> = requests.iter().map(|r| alone(&mut lone, r)).collect();
    let mut spare = Some(engine(&m, &options(3, Some(6))));
    let mut runner = TestRunner::new(Config { cases: 24, ..Config::default() });
    // A failure would leave no engine behind: shrinking needs one, too.
    let mut engine = || spare.take().unwrap_or_else(|| engine(&m, &options(3, Some(6))));
    let engine = std::cell::RefCell::new(&mut engine);
    let run = |script: Vec<Do>| {
        let mut all = Batcher::new((engine.borrow_mut())());
        let free = all.limits().all_pages();
        let mut sent: Vec<Sent> = Vec::new();
        for what in script {
            match what {
                Do::Submit(kind) => {
                    let (id, events) = all.submit(requests[kind].clone()).unwrap();
                    prop_assert!(sent.iter().all(|s| s.id != id), "{id:?} was given out before");
                    sent.push(Sent { kind, id, events, cancelled: false });
                }
                // Early or late: of any that there has been.
                Do::Cancel(which) if !sent.is_empty() => {
                    let at = which.index(sent.len());
                    let was_there = all.cancel(sent[at].id);
                    prop_assert!(!(was_there && sent[at].cancelled), "cancelled twice");
                    sent[at].cancelled |= was_there;
                }
                Do::Cancel(_) => {}
                Do::Step => {
                    let (waiting, running) = all.load();
                    let report = all.step();
                    prop_assert!(report.rows > 0 || waiting + running == 0, "no progress");
                }
            }
        }
        all.run();
        for s in &sent {
            let (tokens, end) = drain(&s.events);
            let (answer, finish) = &answers[s.kind];
            if s.cancelled {
                prop_assert_eq!(end, Some(Finish::Cancelled));
                prop_assert_eq!(&tokens[..], &answer[..tokens.len()]);
            } else {
                prop_assert_eq!((&tokens, end.as_ref()), (answer, Some(finish)), "kind {}", s.kind);
            }
        }
        prop_assert_eq!(all.into_engine().free_pages(), free, "no page is lost");
        Ok(())
    };
    runner.run(&prop::collection::vec(any_do(), 0..50), run).unwrap();
}
