//! Steps of which fewer tokens are kept than were computed: guesses of a request's next tokens are verified in one decode step, and
//! those behind the first wrong one are forgotten, by the engine and by the queues.

use tandem::engine::{Batcher, Engine, Request, TokenSource};
use tandem::program::{Group, Iteration, Kv, Phase, RequestId, Side, Wants};
use tandem::sched::{Continuous, Limits, Queues, RequestView, Strategy, Untimed};

use super::world::{drain, engine, model, options, prompt};

/// The tokens of the one request, and guesses behind them.
struct Guessed(Vec<u32>);

impl TokenSource for Guessed {
    fn tokens(&self, group: &Group) -> &[u32] {
        &self.0[group.first as usize..group.end() as usize]
    }
}

fn run(engine: &mut Engine, iteration: &Iteration, tokens: &Guessed) -> Vec<u32> {
    engine.run(iteration, &[], tokens).unwrap();
    engine.picks().iter().map(|pick| pick.unwrap()).collect()
}

/// Decodes `prompt` to `end` tokens by guesses of which `right` in a row are right, each time. Returns the tokens and the steps.
fn by_guesses(engine: &mut Engine, prompt: &[u32], answer: &[u32], right: &[usize]) -> (Vec<u32>, usize) {
    const GUESSES: u32 = 3;
    let id: RequestId = engine.add();
    let (n, end) = (prompt.len() as u32, prompt.len() + answer.len());
    let limits =
        Limits { rows: 16, sub_batches: 1, sequences: 1, device_pages: 0, host_pages: engine.free_pages() };
    let (mut queues, mut strategy) = (Queues::default(), Continuous::default());
    queues.submit(RequestView::new(id, n, end as u32));
    let mut tokens = Guessed(prompt.to_vec());
    let mut steps = 0;
    while tokens.0.len() < end {
        let decision = strategy.plan(&queues, &limits, &Untimed);
        queues.admit(&decision);
        let mut iteration = Iteration { pick: true, ..decision.iteration };
        let group = &mut iteration.sub_batches[0].groups[0];
        let decodes = group.phase == Phase::Decode;
        assert_eq!(decodes, group.first >= n, "the phase is the scheduler's");
        let known = tokens.0.len();
        if decodes {
            // One token is known; those behind it are guessed: some as they will be, then others.
            let right = right[steps % right.len()];
            for i in 0..GUESSES as usize {
                let next = answer.get(known - n as usize + i).copied().unwrap_or(7);
                tokens.0.push(if i < right { next } else { (next + 1) % 50 });
            }
            *group = Group { tokens: 1 + GUESSES, wants: Wants::All, ..*group };
        }
        let group = *group;
        let picks = run(engine, &iteration, &tokens);
        let mut accepted = group.tokens;
        if decodes {
            let guesses = &tokens.0[known..];
            let agreed = guesses.iter().zip(&picks).take_while(|(guess, pick)| guess == pick).count();
            accepted = 1 + agreed as u32;
            tokens.0.truncate(known + agreed);
        }
        if group.end() >= n {
            tokens.0.push(picks[if decodes { accepted as usize - 1 } else { 0 }]);
        }
        engine.truncate(id, (group.first + accepted) as usize);
        queues.commit(&iteration, &[], |_| accepted);
        let job = &queues.running()[0];
        assert_eq!(job.stored as usize, engine.len(id), "the queues and the engine count alike");
        assert_eq!(job.stored, group.first + accepted);
        assert_eq!(job.waited, 0);
        steps += 1;
    }
    engine.remove(id);
    tokens.0.truncate(end);
    (tokens.0, steps)
}

#[test]
fn a_step_keeps_the_tokens_that_are_accepted() {
    let m = model();
    let prompt = prompt(21, 1, m.spec.vocab);
    let mut requests = Batcher::new(engine(&m, &options(1, None)));
    let (_, events) =
        requests.submit(Request { prompt: prompt.clone(), max_tokens: 40, ..Request::default() }).unwrap();
    requests.run();
    let (answer, _) = drain(&events);
    let mut engine = engine(&m, &tandem::engine::Options { logits: 4, ..options(1, None) });
    assert_eq!(engine.home(), Side::Host);
    // Two steps for 21 tokens of the prompt in chunks of 16; the second gives the first token of the answer.
    for (right, steps) in [(&[0][..], 39), (&[3], 10), (&[1, 0, 2, 3, 0, 1], 0)] {
        let free = engine.free_pages();
        let (tokens, made) = by_guesses(&mut engine, &prompt, &answer, right);
        assert_eq!(tokens[21..], answer[..], "{right:?}: the tokens of one step each");
        if steps > 0 {
            assert_eq!(made, 2 + steps, "{right:?}");
        }
        assert_eq!(engine.free_pages(), free, "{right:?}");
    }
}

/// The phase of a group says what its request does, not how many tokens it has.
#[test]
fn a_group_of_guesses_is_a_group_of_decode_rows() {
    let view = RequestView {
        stored: 9,
        home: Some(Side::Host),
        ..RequestView::new(RequestId { slot: 0, generation: 0 }, 9, 40)
    };
    let group = view.group(4, Side::Host);
    assert_eq!((group.phase, group.tokens, group.first, group.kv), (Phase::Decode, 4, 9, Kv::Host));
    let prompt = RequestView { stored: 8, ..view };
    assert_eq!(prompt.group(1, Side::Host).phase, Phase::Prefill, "a single row of a prompt");
}
