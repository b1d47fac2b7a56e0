//! What a stream says beside its tokens' ids: text, where it ends, log-probabilities.

use tandem::engine::{Batcher, Event, Finish, NewTokens, Request, Token};
use tandem::program::Wants;
use tandem::text::{Ending, logprobs};

use super::world::{engine, model, options, request};

/// The answer to a request, run alone.
fn answer(all: &mut Batcher, request: Request) -> (Vec<Token>, Finish) {
    let (_, events) = all.submit(request).unwrap();
    all.run();
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Token(token) => tokens.push(token),
            Event::Cached(_) | Event::Prompt(_) => {}
            Event::End(how) => return (tokens, how),
        }
    }
    panic!("no end");
}

fn ids(tokens: &[Token]) -> Vec<u32> {
    tokens.iter().map(|t| t.id).collect()
}

fn text(tokens: &[Token]) -> String {
    tokens.iter().map(|t| &*t.text).collect()
}

#[test]
fn a_text_ends_an_answer_and_is_held_back_until_it_is_complete() {
    let m = model();
    let mut all = Batcher::new(engine(&m, &options(2, None)));
    let good = Request { max_tokens: 12, ..request(0, m.spec.vocab) };
    let (whole, how) = answer(&mut all, good.clone());
    assert_eq!((whole.len(), how), (12, Finish::Length));
    // Without a tokenizer the text is the tokens' numbers.
    assert_eq!(text(&whole), ids(&whole).iter().map(|id| format!("{id} ")).collect::<String>());
    // The numbers of two tokens in the middle.
    let stop = format!("{} {} ", whole[5].id, whole[6].id);
    let at = text(&whole).find(&stop).unwrap();
    for keep_stop in [false, true] {
        let ending = Ending { stop: vec![stop.clone()], keep_stop, ..Ending::default() };
        let (part, how) = answer(&mut all, Request { ending, ..good.clone() });
        assert_eq!(how, Finish::Stop);
        assert_eq!(ids(&part), ids(&whole[..part.len()]));
        let end = if keep_stop { at + stop.len() } else { at };
        assert_eq!(text(&part), text(&whole)[..end]);
    }
    // Not before so many tokens.
    let ending = Ending { stop: vec![stop], min_tokens: 9, ..Ending::default() };
    let (late, how) = answer(&mut all, Request { ending, ..good.clone() });
    assert!(
        late.len() >= 9 && (how == Finish::Length || how == Finish::Stop),
        "{how:?} after {}",
        late.len()
    );
    // A token, which has no text unless that is wanted.
    let last = whole[7].id;
    let first = whole.iter().position(|t| t.id == last).unwrap();
    let (part, how) = answer(&mut all, Request { ending: Ending::at(vec![last]), ..good });
    assert_eq!((how, ids(&part)), (Finish::Stop, ids(&whole[..=first])));
    assert_eq!(text(&part), text(&whole[..first]));
}

#[test]
fn log_probabilities_are_those_of_the_logits_beside_others_and_alone() {
    let m = model();
    let vocab = m.spec.vocab;
    let mut all = Batcher::new(engine(&m, &options(4, None)));
    let mut lone = engine(&m, &options(1, None));
    for i in [0, 3, 5] {
        let wanted = Request { logprobs: Some(3), max_tokens: 6, ..request(i, vocab) };
        // Others, greedy and drawn, in the same steps.
        let others: Vec<_> = (6..9).map(|i| all.submit(request(i, vocab)).unwrap()).collect();
        let (tokens, _) = answer(&mut all, wanted.clone());
        drop(others);
        let seq = lone.add();
        let mut logits = lone.prefill(seq, &wanted.prompt, |_| ()).unwrap();
        assert_eq!(tokens.len(), 6);
        for token in &tokens {
            let (lse, top) = logprobs(&logits, 3);
            let got = token.logprobs.as_ref().expect("wanted");
            assert_eq!((got.token, &got.top), (f64::from(logits[token.id as usize]) - lse, &top));
            let next = NewTokens { id: seq, tokens: &[token.id], wants: Wants::Last };
            logits = lone.forward(&[next]).unwrap().to_vec();
        }
        lone.remove(seq);
        let (plain, _) = answer(&mut all, Request { logprobs: None, ..wanted });
        assert_eq!(ids(&plain), ids(&tokens), "the choice does not depend on it");
        assert!(plain.iter().all(|t| t.logprobs.is_none()));
    }
}

#[test]
fn a_request_for_no_token_computes_its_prompt_and_ends() {
    let m = model();
    let mut all = Batcher::new(engine(&m, &options(2, None)));
    let wanted = Request { max_tokens: 0, ..request(1, m.spec.vocab) };
    let (_, events) = all.submit(wanted).unwrap();
    let (mut rows, mut tokens) = (0, 0);
    while !all.is_idle() {
        let report = all.step();
        (rows, tokens) = (rows + report.rows, tokens + report.tokens);
    }
    assert_eq!((rows, tokens), (40, 0));
    assert_eq!(events.try_iter().collect::<Vec<_>>(), [Event::End(Finish::Length)]);
}
