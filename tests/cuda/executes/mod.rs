//! The stand-in for the driver runs what is enqueued, late or by chance: programs with a mistake get wrong data or an error, their
//! corrected twins never do. Each run is a process of its own.

mod device;
mod faults;
mod planted;

use std::sync::Arc;

use crate::support::fake_driver::{Cases, executes, orders};
use tandem::device::Runtime;
use tandem::device::cuda::{self, CudaOptions};

const CASES: Cases = Cases::of(module_path!());

/// A device that is not tiny.
const ROOMY: (&str, &str) = ("FAKE_MEMORY", "17179869184");

fn open() -> Arc<dyn Runtime> {
    cuda::open(&CudaOptions::default()).expect("the stand-in opens")
}

/// The other side: runs in a process whose driver is the stand-in.
#[test]
#[ignore = "run by the others, in a process of its own"]
fn inside() {
    let case = std::env::var("FAKE_CASE").expect("the other tests set FAKE_CASE");
    if let Some(program) = device::PROGRAMS.iter().chain(faults::PROGRAMS).find(|p| p.0 == case) {
        return program.1();
    }
    let (name, twin) = case.rsplit_once(", ").expect("a program, and whether it is the one with the mistake");
    let program = planted::PROGRAMS.iter().find(|p| p.0 == name).expect("a program");
    let mistake = match twin {
        "planted" => true,
        "corrected" => false,
        other => panic!("neither planted nor corrected: {other}"),
    };
    match program.1(&open(), mistake) {
        Ok(true) => println!("data: right"),
        Ok(false) => println!("data: wrong"),
        Err(error) => println!("error: {error}"),
    }
}

/// What a program of [`planted`] says in an order.
fn said(name: &str, twin: &str, order: &str) -> Option<(String, String)> {
    let text = CASES.child(&format!("{name}, {twin}"), &[("FAKE_ORDER", order), ROOMY])?;
    let result =
        text.lines().find_map(|l| l.find("data: ").or(l.find("error: ")).map(|at| l[at..].to_owned()));
    Some((result.unwrap_or_else(|| panic!("{name}: no result in {text}")), text))
}

/// The program with the mistake shows it in one of the orders; without it the data are right in all of them, and the driver has
/// nothing to complain of.
fn shows(name: &str, wanted: &[&str]) {
    if !executes() {
        return;
    }
    let orders = orders(4);
    let mut seen = Vec::new();
    for order in &orders {
        let Some((result, text)) = said(name, "corrected", order) else { return };
        assert_eq!(result, "data: right", "{name}, corrected, {order}: {text}");
        assert!(
            !text.contains("gave back") && !text.contains("fake driver: leaked"),
            "{name}, {order}: {text}"
        );
        let Some((result, text)) = said(name, "planted", order) else { return };
        seen.push(format!("{order}: {result}"));
        if result != "data: right" {
            assert!(wanted.iter().all(|w| text.contains(w)), "{name}, {order}: {wanted:?} wanted in {text}");
            println!("{name}: seen in {order}, {result}");
            return;
        }
    }
    panic!("{name}: the mistake is not seen: {seen:?}");
}

#[test]
fn a_missing_wait_between_streams_is_seen() {
    shows("no wait between lanes", &["data: wrong"]);
}

#[test]
fn a_staging_slot_used_again_too_early_is_seen() {
    shows("a slot used again", &["data: wrong"]);
}

#[test]
fn a_host_write_before_a_late_copy_has_read_is_seen() {
    shows("a write under a copy", &["data: wrong"]);
}

#[test]
fn a_read_of_what_a_late_copy_has_not_written_is_seen() {
    shows("a read before its copy", &["data: wrong"]);
}

#[test]
fn a_parameter_that_changes_after_a_graph_was_made_has_no_effect() {
    shows("a changed parameter", &["data: wrong"]);
}

#[test]
fn memory_given_back_under_a_copy_is_seen() {
    shows("an early free, a copy", &["gave back memory under work in flight", "700"]);
}

#[test]
fn memory_given_back_under_a_kernel_is_seen() {
    shows("an early free, a kernel", &["fake driver: kernel copy_rows_16", "no device memory", "700"]);
}

#[test]
fn pinned_memory_given_back_under_a_copy_is_seen() {
    shows("an early free of pinned memory", &["gave back mapped memory under work in flight", "700"]);
}

/// One of [`device`] succeeds in all orders.
fn holds(name: &str, env: &[(&str, &str)]) {
    if !executes() {
        return;
    }
    for order in orders(2) {
        let mut all = vec![("FAKE_ORDER", order.as_str()), ROOMY];
        all.extend_from_slice(env);
        if CASES.run(name, &all).is_none() {
            return;
        }
    }
}

#[test]
fn an_event_means_where_it_was_recorded_when_somebody_began_to_wait() {
    holds("an event recorded again", &[]);
}

#[test]
fn pageable_memory_is_read_at_once_and_written_when_the_call_returns() {
    holds("pageable memory", &[("FAKE_FAIL", "cuMemHostRegister_v2:2:0")]);
}

#[test]
fn what_a_kernel_writes_to_mapped_memory_appears_while_nobody_calls_the_driver() {
    holds("looking at mapped memory", &[]);
}

#[test]
fn what_is_more_than_the_rings_hold_arrives_whole() {
    holds("around the rings", &[]);
}

#[test]
fn memory_comes_in_granules_beside_the_contexts_and_the_modules() {
    holds("memory", &[("FAKE_MEMORY", "536870912"), ("FAKE_CONTEXT", "314572800")]);
}

/// While nothing runs, at least.
#[test]
fn a_devices_address_is_none_of_the_hosts() {
    if !executes() {
        return;
    }
    let tried = CASES.tried("a device's address", &[("FAKE_ORDER", "late"), ROOMY]);
    let Some((succeeded, text)) = tried else { return };
    assert!(!succeeded && text.contains("nothing runs") && !text.contains("it was"), "{text}");
    assert!(text.contains("signal: 11"), "{text}");
}

#[test]
fn another_executor_can_be_put_behind_launches() {
    holds("another executor", &[]);
}

#[test]
fn a_fault_of_a_kernel_loses_the_device() {
    if !executes() {
        return;
    }
    for (case, said, code) in
        [("out of bounds", "of an allocation of", "700"), ("unwritten", "which nobody wrote", "719")]
    {
        for order in orders(1) {
            let Some(text) = CASES.child(case, &[("FAKE_ORDER", &order), ROOMY]) else { return };
            let message = text.lines().find(|l| l.contains("fake driver: kernel ")).expect("a message");
            assert!(message.contains("copy_rows_16") && message.contains(said), "{case}: {text}");
            let errors: Vec<_> =
                text.lines().filter_map(|l| l.split_once("error: ")).map(|(_, e)| e).collect();
            assert_eq!(errors.len(), 3, "{case}: {text}");
            assert!(errors.iter().all(|e| e.contains("lost: ") && e.contains(code)), "{case}: {text}");
        }
    }
}
