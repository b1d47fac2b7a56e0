//! An engine on an accelerator that fails: out of memory at any allocation, a refused launch, a lost device, a copy
//! that never ends. Every time a sentence that names the thing, a process that goes on, host data untouched.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem::Error;
use tandem::device::emulated::{
    EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan, KernelChecks,
};
use tandem::device::{Accelerator, Runtime, on_kernels};
use tandem::engine::{Engine, NewTokens, Options};
use tandem::model::{LoadedModel, load};
use tandem::program::{RequestId, Wants};
use tandem::simd::Isa;

const PROMPT: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 5];

struct Device {
    runtime: Arc<EmulatedRuntime>,
    accel: Arc<dyn Accelerator>,
}

/// Calls `test` with the emulated accelerator running the real kernels, where this build has them, and with it running
/// plain functions.
fn each(memory: u64, test: impl Fn(Device)) {
    for kernels in [true, false] {
        let watchdog = Duration::from_millis(1500);
        let checks = KernelChecks::FAST;
        let options = EmulatedOptions { memory, checks, watchdog, ..EmulatedOptions::default() };
        let runtime = Arc::new(EmulatedRuntime::new(options).unwrap());
        if !kernels {
            let accel = Arc::new(EmulatedAccelerator::new(runtime.clone()));
            test(Device { runtime, accel });
        } else if let Ok(accel) = on_kernels(runtime.clone()) {
            test(Device { runtime, accel });
        } else {
            println!("skipped: {}", tandem::device::built::NO_EMULATION.unwrap_or("no kernels"));
        }
    }
}

fn model() -> LoadedModel {
    load("synth:tiny-llama,dtype=q4_0,seed=1").unwrap()
}

fn engine(m: &LoadedModel, d: &Device) -> tandem::Result<Engine> {
    let mut options = Options::new(Isa::Reference, 64);
    options.threads = Some(2);
    Engine::on_accelerator(m.spec.clone(), &m.weights, &options, d.accel.clone(), "emulated", &|_| ())
}

fn bytes(m: &LoadedModel) -> Vec<u8> {
    m.weights.iter().flat_map(|(_, t)| t.data.to_vec()).collect()
}

fn step(e: &mut Engine, seq: RequestId) -> tandem::Result<Vec<f32>> {
    let out = e.forward(&[NewTokens { id: seq, tokens: &[7], wants: Wants::Last }])?.to_vec();
    let len = e.len(seq);
    e.truncate(seq, len - 1);
    Ok(out)
}

#[test]
fn no_memory_at_any_allocation_is_an_error_and_leaks_nothing() {
    each(256 << 20, |d| {
        let m = model();
        let before = bytes(&m);
        let free = d.runtime.memory_free().unwrap();
        let mut failed = 0;
        loop {
            d.runtime.set_faults(FaultPlan { out_of_memory_at: Some(failed + 1), ..FaultPlan::default() });
            let Err(e) = engine(&m, &d) else { break };
            assert!(matches!(e, Error::Capacity(_)), "allocation {}: {e}", failed + 1);
            assert!(e.to_string().contains("bytes asked for"), "{e}");
            assert_eq!(d.runtime.memory_free().unwrap(), free, "allocation {} failed and leaked", failed + 1);
            failed += 1;
        }
        println!("{failed} allocations failed, one after the other");
        assert!(failed >= 20, "only {failed} allocations were made to fail");
        assert_eq!(bytes(&m), before);
    });
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_the_numbers_before_anything_is_allocated() {
    each(1 << 20, |d| {
        let e = engine(&model(), &d).err().expect("a megabyte is too little");
        let text = e.to_string();
        assert!(matches!(e, Error::Capacity(_)), "{text}");
        for word in ["weights", "KV", "activations", "free on", "`context`", "`device` cpu"] {
            assert!(text.contains(word), "{text:?} does not say {word:?}");
        }
    });
}

#[test]
fn after_a_refused_launch_the_step_can_be_repeated() {
    each(256 << 20, |d| {
        let m = model();
        let mut e = engine(&m, &d).unwrap();
        let seq = e.add();
        e.prefill(seq, &PROMPT, |_| ()).unwrap();
        let want = step(&mut e, seq).unwrap();
        // Prefill launches kernels one by one; a decode step is a recorded graph, launched as one.
        for n in [1, 2, 5, 11] {
            d.runtime.set_faults(FaultPlan { refuse_launch: Some(n), ..FaultPlan::default() });
            let other = e.add();
            let error = e.prefill(other, &PROMPT, |_| ()).err();
            let error = error.unwrap_or_else(|| panic!("launch {n} was not refused"));
            assert!(matches!(error, Error::Device { .. }), "{error}");
            e.remove(other);
            d.runtime.set_faults(FaultPlan::default());
            let got = step(&mut e, seq).unwrap();
            assert_eq!(got, want, "after launch {n} was refused");
            let again = e.add();
            e.prefill(again, &PROMPT, |_| ()).unwrap();
            assert_eq!(step(&mut e, again).unwrap(), want, "a new sequence after launch {n} was refused");
            e.remove(again);
        }
    });
}

#[test]
fn a_lost_device_stays_lost_and_the_process_lives() {
    for n in [1, 3, 8] {
        each(256 << 20, |d| {
            let m = model();
            let before = bytes(&m);
            let mut e = engine(&m, &d).unwrap();
            let seq = e.add();
            d.runtime.set_faults(FaultPlan { lost_at: Some(n), ..FaultPlan::default() });
            let first = e
                .prefill(seq, &PROMPT, |_| ())
                .err()
                .unwrap_or_else(|| panic!("operation {n}: nothing lost"));
            assert!(matches!(first, Error::Device { .. }), "{first}");
            let second = step(&mut e, seq).expect_err("a lost device stays lost");
            assert!(matches!(second, Error::Device { .. }), "{second}");
            drop(e);
            assert_eq!(bytes(&m), before);
            // The CPU goes on with the same weights.
            let mut options = Options::new(Isa::selected().unwrap(), 64);
            options.threads = Some(2);
            let mut cpu = Engine::new(m.spec.clone(), &m.weights, &options, &|_| ()).unwrap();
            let seq = cpu.add();
            cpu.prefill(seq, &PROMPT, |_| ()).unwrap();
        });
    }
}

#[test]
fn a_copy_that_never_ends_is_given_up() {
    each(256 << 20, |d| {
        let m = model();
        let mut e = engine(&m, &d).unwrap();
        let seq = e.add();
        d.runtime.set_faults(FaultPlan { endless_copy: Some(2), ..FaultPlan::default() });
        let began = Instant::now();
        let error = e.prefill(seq, &PROMPT, |_| ()).expect_err("the copy does not end");
        assert!(matches!(error, Error::Device { .. }), "{error}");
        drop(e);
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    });
}
