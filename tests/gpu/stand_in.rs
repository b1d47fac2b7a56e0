//! Tests of this room once more through the CUDA runtime, on a stand-in for the driver that runs the kernels as late as it may, and in
//! orders by chance: what is enqueued, in which order, and which memory it uses when, is what a GPU would get.

use crate::support::fake_driver::{again, again_plainly, orders, tried_again};

fn in_orders(tests: &[&str], seeds: u64) {
    for order in orders(seeds) {
        again(tests, &order, &[]);
    }
}

#[test]
fn engines() {
    let tests =
        ["engine::greedy", "engine::a_row", "engine::more_seq", "engine::the_likeliest", "engine::biases"];
    again(&tests, "late", &[]);
    in_orders(&["engine::recorded_steps"], 1);
}

/// Whole models of every family, and a real one.
#[test]
fn models_of_every_family() {
    again_plainly(&["engine::every_family", "engine::real_text"], "late", &[("FAKE_CHECKS", "5")]);
}

/// Logits stay on the device between steps, and rows of them are copied behind what was enqueued.
#[test]
fn draws() {
    in_orders(&["engine::drawn"], 1);
}

/// The paths of older GPUs. A T4 has no bf16.
#[test]
fn engines_of_older_gpus() {
    again(&["engine::recorded_steps", "engine::the_likeliest"], "late", &[("FAKE_SM", "80")]);
    again(&["engine::biases", "engine::the_likeliest"], "late", &[("FAKE_SM", "75")]);
}

#[test]
fn placements() {
    in_orders(&["placements::placements_on_kernels", "placements::any_placement"], 2);
    in_orders(&["placements::experts_follow"], 1);
}

#[test]
fn pages() {
    in_orders(&["pages::pages_that_left", "pages::any_pages", "pages::homes::any_home"], 1);
}

#[test]
fn parts_of_the_contract() {
    in_orders(&["hybrid::", "weights::"], 1);
}

/// What has to do with time: rows and pages between the sides.
#[test]
fn exchanges() {
    in_orders(&["kernels::exchange::"], 2);
}

/// Kernels by the text that nvcc makes of them, for a T4 and for an A100, and steps of whole models by them.
#[test]
fn kernels_by_their_ptx() {
    for sm in ["80", "75"] {
        let env = [("FAKE_SM", sm), ("FAKE_PTX", "1")];
        let tests = [
            "kernels::elementwise::",
            "kernels::exchange::pages",
            "kernels::exchange::moves",
            "kernels::logits",
        ];
        again(&tests, "late", &env);
        again(&["engine::the_likeliest"], "late", &env);
    }
    again(&["kernels::attention::", "kernels::linear::"], "late", &[("FAKE_SM", "80"), ("FAKE_PTX", "1")]);
}

/// Products of every kind: work that is behind other work, rings and counters that one launch leaves to the next.
#[test]
fn products() {
    again(&["kernels::quant::", "kernels::gemm::", "kernels::experts::"], "late", &[]);
}

/// Every kernel that a T4 and an A100 would be given, by their text, as their first `tandem doctor --gpu` launches it.
#[test]
fn the_self_test_by_its_ptx() {
    for sm in ["80", "75"] {
        again(&["self_test::"], "late", &[("FAKE_SM", sm), ("FAKE_PTX", "1")]);
    }
}

/// The kernels by plain loops with which many orders and memories are tried (`plain.c`): within the bounds of the kernels themselves.
#[test]
fn kernels_by_plain_loops() {
    let tests = [
        "kernels::linear::",
        "kernels::elementwise::",
        "kernels::logits::",
        "kernels::exchange::",
        "kernels::attention::decode",
        "kernels::attention::prefill",
        "kernels::attention::part",
    ];
    again_plainly(&tests, "late", &[("FAKE_CHECKS", "1")]);
}

/// What all of this is for is found: streams that forget to wait for each other.
#[test]
fn waits_that_are_forgotten_are_seen() {
    for test in ["placements::placements_on_kernels", "pages::pages_that_left"] {
        let forgets = |order: &str| tried_again(&[test], order, &[("FAKE_FORGET", "1")]);
        let mut orders = orders(4).into_iter().map_while(|order| forgets(&order)).peekable();
        if orders.peek().is_some() {
            assert!(orders.any(|(succeeded, _)| !succeeded), "{test}: as if nobody had to wait");
        }
    }
}
