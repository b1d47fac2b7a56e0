//! If the host or the device of a machine on two sides fails in the middle of a step, the result is an error, nothing
//! is in flight, and the step can be repeated.

use std::sync::Arc;

use super::carry::Areas;
use super::lane::Lane;
use super::{GroupRows, HostHalf, HostSide, RealMachine, Results, Sizes};
use crate::Error;
use crate::cache::PAGE_TOKENS;
use crate::device::emulated::{EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan};
use crate::engine::kv::SequenceKv;
use crate::engine::options::Options;
use crate::model::{load, synth};
use crate::plan::{self, OpCosts, Roofline};
use crate::program::{
    Flow, Group, Iteration, Kind, Kv, Op, Phase, Placement, Policy, RequestId, Residence, Side, SubBatch,
    Unit, Wants, Work, lower,
};
use crate::simd::Isa;

const TOKENS: [u32; 5] = [3, 1, 4, 1, 5];

/// Two sequences in lock step, attended on the host.
struct Setup {
    machine: RealMachine,
    runtime: Arc<EmulatedRuntime>,
    tables: [SequenceKv; 2],
}

impl Setup {
    fn new() -> Setup {
        let m = load("synth:tiny-llama,dtype=q4_0,seed=1").unwrap();
        let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
        let accel = Arc::new(EmulatedAccelerator::new(runtime.clone()));
        let mut placement = Placement::boundary(2, m.spec.n_layers, 0, 0);
        for layer in &mut placement.layers[1..] {
            (layer.prefill, layer.decode, layer.kv) =
                (Policy::ATTENTION_ON_HOST, Policy::ATTENTION_ON_HOST, Side::Host);
        }
        let mut options = Options::new(Isa::Reference, 64);
        (options.threads, options.sequences, options.sub_batches) = (Some(2), 2, 2);
        let machine =
            RealMachine::new(&m.spec, &m.weights, &options, accel, "test", "test", placement, &|_| ());
        let mut machine = machine.unwrap();
        let kv = machine.kv();
        let mut tables = [SequenceKv::new(kv.sides), SequenceKv::new(kv.sides)];
        tables.iter_mut().for_each(|t| t.reserve(&mut kv.pages, TOKENS.len()).unwrap());
        Setup { machine, runtime, tables }
    }

    /// The logits of both prompts.
    fn step(&mut self) -> crate::Result<Vec<f32>> {
        let group = |slot| Group {
            request: RequestId { slot, generation: 0 },
            phase: Phase::Prefill,
            first: 0,
            tokens: TOKENS.len() as u32,
            kv: Kv::Device,
            wants: Wants::Last,
        };
        let iteration = Iteration {
            sub_batches: [0, 1].map(|slot| SubBatch::of(vec![group(slot)])).into(),
            moves: Vec::new(),
            flow: Flow::TwoLanes,
            pick: false,
            top: false,
        };
        let rows: Vec<GroupRows<'_>> = self
            .tables
            .iter()
            .enumerate()
            .map(|(out, table)| GroupRows { tokens: &TOKENS, table, out })
            .collect();
        let results = Results { rows: 2, pick: false, factors: Vec::new() };
        self.machine.run(iteration, rows, &[], &results)?;
        Ok(self.machine.logits().to_vec())
    }

    fn lane(&self) -> &Lane<HostHalf> {
        match &self.machine.host {
            Some(HostSide::Lane(lane)) => lane,
            _ => unreachable!("a placement of both sides"),
        }
    }
}

#[test]
fn an_operation_of_the_host_that_panics_is_an_error_of_the_step() {
    let mut s = Setup::new();
    let want = s.step().unwrap();
    // The first, two in the middle, and a late one.
    for at in [0, 3, 9, 12] {
        s.lane().state().panics_at = Some(at);
        let error = s.step().expect_err("it panics");
        assert!(error.to_string().contains("an operation of the host panicked"), "{error}");
        assert!(s.lane().is_idle());
        s.lane().state().panics_at = None;
        assert_eq!(s.step().unwrap(), want, "after a panic at operation {at}");
    }
}

#[test]
fn a_launch_that_is_refused_leaves_the_host_idle() {
    let mut s = Setup::new();
    let want = s.step().unwrap();
    for n in [1, 4, 7, 10] {
        s.runtime.set_faults(FaultPlan { refuse_launch: Some(n), ..FaultPlan::default() });
        let error = s.step().expect_err("it is refused");
        assert!(matches!(error, Error::Device { .. }), "{error}");
        assert!(s.lane().is_idle());
        s.runtime.set_faults(FaultPlan::default());
        assert_eq!(s.step().unwrap(), want, "after launch {n} was refused");
    }
}

#[test]
fn a_lost_device_ends_the_step_and_every_later_one() {
    let mut s = Setup::new();
    s.step().unwrap();
    s.runtime.set_faults(FaultPlan { lost_at: Some(7), ..FaultPlan::default() });
    for _ in 0..2 {
        let error = s.step().expect_err("the device is lost");
        assert!(matches!(error, Error::Device { .. }), "{error}");
        assert!(s.lane().is_idle());
    }
}

/// Mailboxes, partial attention and areas of all sub-batches take the bytes that the dry run counts.
#[test]
fn pinned_memory_of_rows_is_what_was_counted() {
    let m = load("synth:tiny-llama,dtype=q4_0,seed=1").unwrap();
    let n = m.spec.n_layers;
    let bits = |bits: [u8; 6]| Policy::from_bits(bits.map(|b| b == 1));
    let lia = |prefill, decode| {
        let mut placement = Placement::all(Side::Device, n, 0);
        for layer in &mut placement.layers[1..] {
            (layer.weights, layer.kv) = (Residence::Streamed, Side::Host);
            (layer.prefill, layer.decode) = (bits(prefill), bits(decode));
        }
        placement
    };
    let mut counted = 0;
    for (placement, kv_pages) in [
        (Placement::boundary(2, n, 0, 0), None),
        (Placement::boundary(n + 1, n, 0, 0), None),
        (Placement::all(Side::Device, n, 0), None),
        (Placement::all(Side::Device, n, 0), Some(6)),
        (lia([0; 6], [0, 1, 1, 0, 0, 0]), None),
        (lia([0, 0, 0, 1, 1, 0], [1; 6]), None),
    ] {
        for sub_batches in [1, 3] {
            let mut options = Options::new(Isa::Reference, 256);
            (options.threads, options.chunk, options.kv_pages) = (Some(2), 32, kv_pages);
            options.sub_batches = sub_batches;
            let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
            let accel = Arc::new(EmulatedAccelerator::new(runtime));
            let sizes = Sizes::new(&m.spec, &m.weights, &options, &*accel).unwrap();
            let told = sizes.pinned(&placement);
            let (before, here) = (sizes.host(&placement), placement.clone());
            let machine =
                RealMachine::new(&m.spec, &m.weights, &options, accel, "test", "test", here, &|_| ());
            let machine = machine.unwrap();
            let d = machine.device.as_ref().unwrap();
            let mail = d.parts.iter().flat_map(|p| &p.mailbox).map(|m| m.memory.len());
            let parts = d.parts.iter().flat_map(|p| &p.parts).map(|m| m.memory.len());
            let areas = machine.areas.as_ref().map_or(0, Areas::bytes);
            let there = mail.sum::<usize>() + parts.sum::<usize>() + areas;
            // Allocations are whole cache lines.
            assert!((there as u64).abs_diff(told) <= 64 * 64, "{placement:?}: {there} bytes, {told} counted");
            assert!(before.activations >= told, "{before:?}");
            counted += usize::from(there > 0);
        }
    }
    assert_eq!(counted, 10, "all but those on the device alone");
}

/// Sizes with chunks of another length are those that are counted anew.
#[test]
fn chunks_of_another_length_are_counted_alike() {
    let m = synth::outline("tiny-qwen3-moe,dtype=q4_0").unwrap();
    let n = m.spec.n_layers;
    let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
    let accel = EmulatedAccelerator::new(runtime);
    let with = |chunk| Options { threads: Some(2), chunk, ..Options::new(Isa::best(), 512) };
    let anew = |chunk| Sizes::new(&m.spec, &m.weights, &with(chunk), &accel).unwrap();
    let first = anew(64);
    let mut seen = Vec::new();
    for chunk in [1, 64, 96, 512] {
        let (want, got) = (anew(chunk), first.with_chunk(&m.spec, &m.weights, &with(chunk), &accel).unwrap());
        for placement in [
            Placement::all(Side::Device, n, 0),
            Placement::all(Side::Host, n, 0),
            Placement::boundary(2, n, 0, 0),
        ] {
            let of = |sizes: &Sizes| (sizes.device(&placement), sizes.host(&placement));
            assert_eq!(of(&got), of(&want), "chunks of {chunk}: {placement:?}");
            seen.push(want.device(&placement).activations);
        }
    }
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() > 4, "the length matters: {seen:?}");
}

/// A step of two prompts of a page each and then one of two decode rows, on a machine of `placement`. Returns what crossed, and what the
/// operations of the programs say.
fn crossed(placement: Placement, kv_pages: Option<usize>, pick: bool) -> ([u64; 2], [u64; 2]) {
    let m = load("synth:tiny-llama,dtype=q4_0,seed=1").unwrap();
    let runtime = Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).unwrap());
    let accel = Arc::new(EmulatedAccelerator::new(runtime));
    let mut options = Options::new(Isa::Reference, 64);
    (options.threads, options.sequences, options.chunk) = (Some(2), 2, 128);
    options.kv_pages = kv_pages;
    let here = placement.clone();
    let machine = RealMachine::new(&m.spec, &m.weights, &options, accel, "test", "test", here, &|_| ());
    let mut machine = machine.unwrap();
    let prompt: Vec<u32> = (0..PAGE_TOKENS as u32).collect();
    let kv = machine.kv();
    let mut tables = [SequenceKv::new(kv.sides), SequenceKv::new(kv.sides)];
    tables.iter_mut().for_each(|t| t.reserve(&mut kv.pages, prompt.len() + 1).unwrap());
    let sizes = plan::Sizes::of_weights(&m.spec, &m.weights, Isa::Reference);
    let hardware = plan::hardware::named("t4-xeon").unwrap();
    let costs = Roofline::new(&hardware, &sizes);
    let mut told = [0, 0];
    for (phase, first, tokens) in [(Phase::Prefill, 0, prompt.len()), (Phase::Decode, prompt.len(), 1)] {
        let group = |slot| Group {
            request: RequestId { slot, generation: 0 },
            phase,
            first: first as u32,
            tokens: tokens as u32,
            kv: Kv::Device,
            wants: Wants::Last,
        };
        let iteration = Iteration::serial(vec![group(0), group(1)], pick);
        let rows = tables.iter().enumerate();
        let rows = rows.map(|(out, table)| GroupRows { tokens: &prompt[..tokens], table, out }).collect();
        machine.run(iteration.clone(), rows, &[], &Results { rows: 2, pick, factors: Vec::new() }).unwrap();
        let costs = OpCosts::new(&costs, &sizes).of(&iteration);
        for op in lower(&placement, &iteration).unwrap().ops {
            let to_host = op.unit == Unit::D2h || matches!(op.kind, Kind::Publish { .. });
            // Behind the last keys and values, all rows from the first that wants logits to the last cross; prices have those that want.
            let rows = u64::from(op.rows.end - op.rows.start);
            let op = Op { work: Work { rows, ..op.work }, ..op };
            told[usize::from(to_host)] += costs.link_bytes(&op);
        }
        if placement.head == Side::Device {
            // Tokens and their sums, or the logits, of both rows.
            let results = machine.device.as_ref().unwrap().parts[0].ws.picked(2);
            told[1] += if pick { results.bytes as u64 } else { 2 * 4 * m.spec.vocab as u64 };
        }
    }
    (machine.link_bytes(), told)
}

#[test]
fn what_crosses_the_link_is_what_operations_say() {
    let n = load("synth:tiny-llama").unwrap().spec.n_layers;
    let bits = |bits: [u8; 6]| Policy::from_bits(bits.map(|b| b == 1));
    let lia = |prefill, decode| {
        let mut placement = Placement::all(Side::Device, n, 0);
        for layer in &mut placement.layers[1..] {
            (layer.weights, layer.kv) = (Residence::Streamed, Side::Host);
            (layer.prefill, layer.decode) = (bits(prefill), bits(decode));
        }
        placement
    };
    let mut mailbox = Placement::boundary(2, n, 0, 0);
    for layer in &mut mailbox.layers[1..] {
        (layer.prefill, layer.decode, layer.kv) =
            (Policy::ATTENTION_ON_HOST, Policy::ATTENTION_ON_HOST, Side::Host);
    }
    for (name, placement, kv_pages) in [
        ("on the device", Placement::all(Side::Device, n, 0), None),
        ("a boundary, the first layers on the host", Placement::boundary(2, n, 0, 0), None),
        ("attended on the host", mailbox, None),
        ("weights and pages streamed", lia([0; 6], [0, 1, 1, 0, 0, 0]), None),
        ("rows of sublayers", lia([0, 0, 0, 1, 1, 0], [1; 6]), None),
    ] {
        for pick in [true, false] {
            let (crossed, told) = crossed(placement.clone(), kv_pages, pick);
            assert_eq!(crossed, told, "{name}: to the device, to the host; pick {pick}");
            // Each placement but the first has both directions.
            assert!(crossed[1] > 0 && (name == "on the device") == (crossed[0] == 0), "{name}: {crossed:?}");
        }
    }
}
