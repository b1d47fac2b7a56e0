//! An engine on the CUDA runtime whose driver fails on demand while kernels run: each failure is a typed error, nothing leaks, and
//! what could go on goes on.

use super::{CASES, ROOMY, open};
use crate::support::fake_driver::{count, executes};
use tandem::Error;
use tandem::device::on_kernels;
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{RequestId, Wants};
use tandem::simd::Isa;
use tandem::tensor::Half;

pub const PROGRAMS: &[(&str, fn())] =
    &[("an engine", built), ("steps", steps), ("steps until it is lost", until_it_is_lost)];

const PROMPT: [u32; 3] = [3, 1, 4];

fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=q4_0,seed=1").unwrap()
}

fn engine(m: &LoadedModel) -> tandem::Result<Engine> {
    let mut options = Options::new(Isa::Reference, 64);
    (options.threads, options.kv_dtype) = (Some(1), Half::F16.into());
    let accel = on_kernels(open()).expect("kernels");
    Engine::on_accelerator(m.spec.clone(), &m.weights, &options, accel, "cuda:0", &|_| ())
}

fn step(e: &mut Engine, seq: RequestId) -> tandem::Result<Vec<f32>> {
    let out = e.forward(&[NewTokens { id: seq, tokens: &[7], wants: Wants::Last }])?.to_vec();
    let len = e.len(seq);
    e.truncate(seq, len - 1);
    Ok(out)
}

fn tell(error: &Error) {
    let capacity = if matches!(error, Error::Capacity(_)) { " (capacity)" } else { "" };
    println!("error: {error}{capacity}");
}

/// An engine is built, or the error is told.
fn built() {
    match engine(&model()) {
        Ok(_) => println!("built with {} allocations", count("cuMemAlloc_v2")),
        Err(error) => tell(&error),
    }
}

/// Calls of the driver that tests make fail. (How often others are made depends on how long things take.)
const CALLS: [&str; 6] = [
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuGraphLaunch",
    "cuStreamEndCapture",
    "cuEventRecord",
];

/// Steps give the same logits before and after one that fails: at first kernel by kernel, then recorded, then replayed.
fn steps() {
    let m = model();
    let mut e = engine(&m).unwrap();
    let before = CALLS.map(count);
    let mut first = None;
    let mut failed = 0;
    for _ in 0..2 {
        let seq = e.add();
        let done = e.prefill(seq, &PROMPT, |_| ()).and_then(|_| (0..3).map(|_| step(&mut e, seq)).collect());
        e.remove(seq);
        let rows: Vec<Vec<f32>> = match done {
            Ok(rows) => rows,
            Err(error) => {
                assert!(matches!(error, Error::Device { .. }), "{error}");
                tell(&error);
                failed += 1;
                continue;
            }
        };
        let first = first.get_or_insert_with(|| rows[0].clone());
        assert!(rows.iter().all(|row| row == first), "other bits after {failed} failures");
    }
    assert!(failed <= 1, "{failed} steps failed, one call did");
    for (name, before) in CALLS.iter().zip(before) {
        println!("calls of {name}: {} to {}", before + 1, count(name));
    }
}

/// The first call of a function in steps, one in their midst, and the last one.
fn calls_of(function: &str, text: &str) -> [u32; 3] {
    let line = text.lines().find_map(|l| l.strip_prefix("calls of ")?.strip_prefix(function));
    let (first, last) = line.and_then(|l| l.strip_prefix(": ")?.split_once(" to ")).expect("its calls");
    let [first, last] = [first, last].map(|n| n.parse::<u32>().expect("a number"));
    assert!(first <= last, "{function} is never called");
    [first, first.midpoint(last), last]
}

/// What the driver is asked where nothing fails.
fn undisturbed() -> Option<String> {
    if !executes() {
        return None;
    }
    CASES.child("steps", &[("FAKE_ORDER", "late"), ROOMY])
}

/// The same steps until the device is lost: the first error is said again by every later call.
fn until_it_is_lost() {
    let m = model();
    let mut e = engine(&m).unwrap();
    for _ in 0..2 {
        let seq = e.add();
        let done = e
            .prefill(seq, &PROMPT, |_| ())
            .and_then(|_| (0..3).try_for_each(|_| step(&mut e, seq).map(drop)));
        if let Err(error) = done {
            assert!(matches!(error, Error::Device { .. }), "{error}");
            let again = step(&mut e, seq).expect_err("it stays lost");
            assert!(matches!(again, Error::Device { .. }), "{again}");
            return tell(&error);
        }
        e.remove(seq);
    }
}

/// What `case` said with a call that fails.
fn with(case: &str, fail: &str) -> Option<(String, Option<String>)> {
    let text = CASES.child(case, &[("FAKE_ORDER", "late"), ("FAKE_FAIL", fail), ROOMY])?;
    let error = text.lines().find_map(|l| l.split_once("error: ")).map(|(_, e)| e.to_owned());
    Some((text, error))
}

fn gives_everything_back(text: &str, fail: &str) {
    for rule in ["leaked", "gave back", "still"].map(|r| format!("fake driver: {r}")) {
        assert!(!text.contains(&rule), "{fail}: {text}");
    }
}

#[test]
fn no_memory_at_any_allocation_is_an_error_and_leaks_nothing() {
    if !executes() {
        return;
    }
    for function in ["cuMemAlloc_v2", "cuMemHostAlloc", "cuModuleLoadDataEx"] {
        let mut failed = 0;
        // A call, and the one that tries again.
        for at in (1..).step_by(4) {
            let fail = format!("{function}:2:{at}:2");
            let Some((text, error)) = with("an engine", &fail) else { return };
            gives_everything_back(&text, &fail);
            let Some(error) = error else { break };
            assert!(error.contains("(capacity)"), "{fail}: {error}");
            failed += 1;
        }
        println!("{function}: {failed} times");
        assert!(failed > 0, "{function} is never called");
    }
}

#[test]
fn after_a_refused_call_the_step_can_be_repeated() {
    let Some(calls) = undisturbed() else { return };
    for function in ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuGraphLaunch", "cuStreamEndCapture"] {
        for at in calls_of(function, &calls) {
            let fail = format!("{function}:1:{at}");
            let Some((text, error)) = with("steps", &fail) else { return };
            gives_everything_back(&text, &fail);
            let logits = |text: &str| text.lines().find(|l| l.starts_with("logits: ")).map(str::to_owned);
            assert_eq!(logits(&text), logits(&calls), "{fail}: other bits than without");
            // A recording that is refused is none; the step runs all the same.
            assert_eq!(error.is_some(), function != "cuStreamEndCapture", "{fail}: {text}");
        }
    }
}

#[test]
fn a_device_lost_at_any_call_is_an_error_and_the_process_lives() {
    let Some(calls) = undisturbed() else { return };
    for function in CALLS {
        for at in calls_of(function, &calls) {
            let fail = format!("{function}:700:{at}");
            let Some((text, error)) = with("steps until it is lost", &fail) else { return };
            let error = error.unwrap_or_else(|| panic!("{fail}: nothing was lost: {text}"));
            assert!(error.contains("lost: ") && error.contains("700"), "{fail}: {error}");
        }
    }
}
