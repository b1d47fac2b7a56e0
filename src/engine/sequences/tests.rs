use super::super::forward::NewTokens;
use super::super::kv::KvStore;
use super::super::step::repeats;
use super::*;
use crate::cache::KvType;
use crate::model::load;
use crate::program::{RequestId, Side, Wants};
use crate::simd::Isa;

/// An engine on a machine that computes nothing and fails at step `fails`.
fn engine(n_pages: usize, fails: Option<usize>) -> Engine {
    let spec = load("synth:tiny-llama,dtype=f32,seed=1").unwrap().spec;
    let geometry = super::super::memory::geometry(&spec, KvType::BF16);
    let kv = KvStore::all(Side::Host, geometry, n_pages).unwrap();
    let options = Options { chunk: 40, ..Options::new(Isa::Reference, spec.max_context) };
    let machine = RealMachine::pretending(&spec, kv, fails);
    Engine::with(spec, machine, &options)
}

#[test]
fn a_failed_step_gives_its_pages_back() {
    let mut e = engine(8, Some(2));
    let (a, b) = (e.add(), e.add());
    let tokens = [1; 33];
    let inputs =
        |n: usize| [a, b].map(|seq| NewTokens { id: seq, tokens: &tokens[..n], wants: Wants::Nothing });
    e.forward(&inputs(30)).unwrap();
    assert_eq!(e.machine.kv().pages.host.n_free(), 6);
    e.forward(&inputs(33)).expect_err("told to fail");
    assert_eq!((e.len(a), e.len(b), e.machine.kv().pages.host.n_free()), (30, 30, 6), "as before the step");
    e.forward(&inputs(33)).unwrap();
    assert_eq!((e.len(a), e.machine.kv().pages.host.n_free()), (63, 4));
}

#[test]
fn of_a_prompt_whose_third_chunk_fails_nothing_stays() {
    let mut e = engine(8, Some(4));
    let seq = e.add();
    e.forward(&[NewTokens { id: seq, tokens: &[1; 5], wants: Wants::Nothing }]).unwrap();
    let mut told = Vec::new();
    e.prefill(seq, &[1; 130], |done| told.push(done)).expect_err("told to fail");
    assert_eq!(told, [40, 80]);
    assert_eq!((e.len(seq), e.machine.kv().pages.host.n_free()), (5, 7));
    e.prefill(seq, &[1; 130], |_| ()).unwrap();
    assert_eq!(e.len(seq), 135);
}

#[test]
fn a_sequence_that_has_ended_is_refused_when_its_slot_is_used_again() {
    let mut e = engine(8, None);
    let old = e.add();
    let input = |seq| [NewTokens { id: seq, tokens: &[1; 20], wants: Wants::Nothing }];
    e.forward(&input(old)).unwrap();
    e.remove(old);
    let new = e.add();
    assert_eq!((old.slot, new.slot), (0, 0), "the slot is used again");
    e.forward(&input(new)).unwrap();
    for error in [e.forward(&input(old)).unwrap_err(), e.prefill(old, &[1], |_| ()).unwrap_err()] {
        assert!(error.to_string().contains("sequence 0 of generation 0 has ended"), "{error}");
    }
    e.truncate(old, 0);
    e.remove(old);
    assert_eq!((e.len(old), e.len(new), e.free_pages()), (0, 20, 7), "what came after is left alone");
}

#[test]
fn a_step_of_very_many_sequences_is_checked_in_linear_time() {
    assert!(!repeats([3, 1, 0].into_iter(), 4) && repeats([3, 1, 3].into_iter(), 4));
    let n = 200_000;
    let mut e = engine(n, None);
    let begin = std::time::Instant::now();
    let ids: Vec<RequestId> = (0..n).map(|_| e.add()).collect();
    let inputs: Vec<_> =
        ids.iter().map(|&seq| NewTokens { id: seq, tokens: &[1], wants: Wants::Nothing }).collect();
    e.forward(&inputs).unwrap();
    // Takes some milliseconds; comparing each sequence with all earlier ones (or searching a free slot from the first)
    // would take 2·10¹⁰ comparisons.
    assert!(begin.elapsed().as_secs() < 5, "{:?} for {n} sequences", begin.elapsed());
    assert_eq!(e.machine.kv().pages.host.n_free(), 0, "a page each");
}
