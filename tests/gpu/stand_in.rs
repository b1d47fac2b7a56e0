//! Tests of this room once more through the CUDA runtime, on a stand-in for the driver that runs the kernels as late as it may, and in
//! orders by chance: what is enqueued, in which order, and which memory it uses when, is what a GPU would get.

use crate::support::fake_driver::{again, orders};

fn in_orders(tests: &[&str], seeds: u64, env: &[(&str, &str)]) {
    for order in orders(seeds) {
        again(tests, &order, env);
    }
}

#[test]
fn engines() {
    let tests = [
        "greedy_tokens",
        "a_row_does_not",
        "recorded_steps",
        "more_sequences",
        "likeliest_token",
        "biases_of",
    ];
    in_orders(&tests, 1, &[]);
}

/// The paths of older GPUs.
#[test]
fn engines_of_older_gpus() {
    for sm in ["75", "80"] {
        again(&["recorded_steps", "likeliest_token"], "late", &[("FAKE_SM", sm)]);
    }
}

#[test]
fn placements() {
    in_orders(&["placements::placements_on_kernels", "placements::any_placement"], 1, &[]);
}

#[test]
fn pages() {
    in_orders(&["pages::pages_that_left", "pages::any_pages", "pages::homes::any_home"], 1, &[]);
}

#[test]
fn parts_of_the_contract() {
    in_orders(&["hybrid::", "weights::"], 2, &[]);
}

/// What has to do with time: rows and pages between the sides.
#[test]
fn exchanges() {
    in_orders(&["kernels::exchange::"], 1, &[]);
}
