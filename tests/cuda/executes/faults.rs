//! An engine on the CUDA runtime whose driver fails on demand while kernels run: each failure is a typed error, nothing leaks, and
//! what could go on goes on.

use super::{CASES, ROOMY, open};
use crate::support::fake_driver::{count, executes};
use tandem::Error;
use tandem::cache::PAGE_TOKENS;
use tandem::device::on_kernels;
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{Far, Placement, RequestId, Residence, Side, Wants};
use tandem::simd::Isa;
use tandem::tensor::Half;

pub const PROGRAMS: &[(&str, fn())] = &[
    ("an engine", built),
    ("steps", steps),
    ("steps until it is lost", until_it_is_lost),
    ("steps of both sides", of_both_sides),
    ("host memory", in_host_memory),
];

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

/// Keys and values on the host, and images of streamed layers, lie in memory that is ours (huge pages, on the nodes of the threads that read
/// it) and registered, not in the driver's own.
fn in_host_memory() {
    let m = model();
    let n = m.spec.n_layers;
    // KiB of the driver's host memory, and of registered memory, that an engine takes.
    let takes = |placement: &Placement, host_pages: usize| {
        let of = || ["KiB of the driver's host memory", "KiB of registered memory"].map(count);
        let before = of();
        let mut options = Options::new(Isa::Reference, 128);
        (options.threads, options.kv_dtype) = (Some(1), Half::F16.into());
        options =
            Options { kv_pages: Some(4), far_pages: Some(host_pages), far: Some(Far::Attend), ..options };
        let accel = on_kernels(open()).expect("kernels");
        let (spec, placement) = (m.spec.clone(), placement.clone());
        let built = Engine::placed(spec, &m.weights, &options, accel, "cuda:0", "x", placement, &|_| ());
        built.map(drop).unwrap();
        let after = of();
        [after[0] - before[0], after[1] - before[1]]
    };
    let whole = Placement::all(Side::Device, n, 4);
    let (few, many) = (takes(&whole, 4), takes(&whole, 68));
    let page = 2 * PAGE_TOKENS * m.spec.n_kv_heads * m.spec.head_dim * 2;
    let pages = ((64 * n * page) >> 10) as i32;
    assert_eq!(many[0], few[0], "pages of the host in the driver's memory");
    assert!(many[1] - few[1] >= pages, "{pages} KiB of pages: {few:?}, {many:?}");

    let mut streamed = whole.clone();
    streamed.layers.iter_mut().for_each(|l| l.weights = Residence::Streamed);
    let images = takes(&streamed, 4);
    // Tensors of layers have their numbers in their names.
    let of_layers = m.weights.iter().filter(|(name, _)| name.contains(|c: char| c.is_ascii_digit()));
    let layers: usize = of_layers.map(|(_, t)| t.data.len()).sum();
    assert!(layers > 0, "no tensors of layers");
    assert_eq!(images[0], few[0], "images of layers in the driver's memory");
    assert!(
        images[1] - few[1] >= (layers >> 10) as i32 * 9 / 10,
        "{layers} bytes of layers: {few:?}, {images:?}"
    );
    println!("KiB: {few:?}, {many:?}, {images:?}");
}

#[test]
fn what_the_host_reads_is_registered_and_not_the_drivers() {
    if executes() {
        CASES.run("host memory", &[("FAKE_ORDER", "late"), ROOMY]);
    }
}

/// Steps of an engine whose first block and whose keys and values are partly the host's, with pages on the move, until the device is
/// lost: the sequences keep what they had, and no page of either side is lost.
fn of_both_sides() {
    let m = model();
    let mut options = Options::new(Isa::Reference, 128);
    (options.threads, options.kv_dtype) = (Some(1), Half::F16.into());
    options =
        Options { sequences: 2, kv_pages: Some(3), far_pages: Some(4), far: Some(Far::Attend), ..options };
    let accel = on_kernels(open()).expect("kernels");
    let placement = Placement::boundary(1, m.spec.n_layers, 3, 0);
    let mut e =
        Engine::placed(m.spec.clone(), &m.weights, &options, accel, "cuda:0", "helm", placement, &|_| ())
            .unwrap();
    let free = |e: &Engine| [Side::Device, Side::Host].map(|side| e.kv_pages(side).free);
    let all = free(&e);
    assert!(all.iter().all(|&pages| pages >= 3), "{all:?}");
    let before = CALLS.map(count);
    let seqs = [Side::Device, Side::Host].map(|side| e.add_at(side).unwrap());
    let mut lens = [0; 2];
    let mut lost = None;
    for at in 0..3 {
        // Longer than a page, and the sequences change sides.
        let done = seqs
            .iter()
            .try_for_each(|&seq| {
                let tokens = vec![7; if at == 0 { 40 } else { 1 }];
                e.forward(&[NewTokens { id: seq, tokens: &tokens, wants: Wants::Last }]).map(drop)?;
                lens[usize::from(seq == seqs[1])] += tokens.len();
                Ok(())
            })
            .and_then(|()| e.swap(seqs[at % 2], if at % 2 == 0 { Side::Host } else { Side::Device }));
        if let Err(error) = done {
            assert!(matches!(error, Error::Device { .. }), "{error}");
            lost = Some(error);
            break;
        }
    }
    for (seq, len) in seqs.into_iter().zip(lens) {
        assert_eq!(e.len(seq), len, "tokens that were there");
        if lost.is_some() {
            let again = e.forward(&[NewTokens { id: seq, tokens: &[7], wants: Wants::Last }]).map(drop);
            assert!(matches!(again, Err(Error::Device { .. })), "it stays lost");
            assert_eq!(e.len(seq), len);
        }
        e.remove(seq);
    }
    assert_eq!(free(&e), all, "pages of both sides");
    for (name, before) in CALLS.iter().zip(before) {
        println!("calls of {name}: {} to {}", before + 1, count(name));
    }
    if let Some(error) = lost {
        tell(&error);
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
            // Of the host's memory no plan leaves more.
            let host = function == "cuMemHostAlloc";
            assert_eq!(error.contains("(capacity)"), !host, "{fail}: {error}");
            assert!(!host || error.contains("to page-lock"), "{fail}: {error}");
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

#[test]
fn a_device_lost_between_two_sides_loses_no_page() {
    if !executes() {
        return;
    }
    let Some(calls) = CASES.child("steps of both sides", &[("FAKE_ORDER", "late"), ROOMY]) else { return };
    for function in ["cuLaunchKernel", "cuMemcpyHtoDAsync_v2", "cuEventRecord"] {
        for at in calls_of(function, &calls) {
            let fail = format!("{function}:719:{at}");
            let Some((text, error)) = with("steps of both sides", &fail) else { return };
            let error = error.unwrap_or_else(|| panic!("{fail}: nothing was lost: {text}"));
            assert!(error.contains("lost: ") && error.contains("719"), "{fail}: {error}");
        }
    }
}
