//! Requests once more through the CUDA runtime, on a stand-in for the driver that runs the kernels as late as it may, and in orders by
//! chance.

use crate::interleave::STRATEGIES;
use crate::support::fake_driver::{again, again_plainly_in, orders, tried_again};

#[test]
fn requests_in_any_order_of_execution() {
    for order in orders(1) {
        again(&["on_a_device::", "requests::numbers::"], &order, &[]);
    }
}

/// More of them, with kernels by plain loops and unchecked, and scripts that are short: 882 orders here, as many as `TANDEM_DEVICE_ORDERS` says
/// elsewhere.
#[test]
fn requests_in_many_orders_of_execution() {
    let given = std::env::var("TANDEM_DEVICE_ORDERS").ok();
    let wanted: u64 = given.map_or(882, |n| n.parse().expect("a number of orders"));
    let scripts = 9;
    let processes = wanted.div_ceil(scripts * STRATEGIES.len() as u64);
    // The scripts of a process are those of other seeds than any other's.
    again_plainly_in(processes, &["on_a_device::any_order"], |process| {
        vec![
            ("FAKE_CHECKS", "0".to_owned()),
            ("TANDEM_DEVICE_INTERLEAVINGS", scripts.to_string()),
            ("TANDEM_DEVICE_FIRST", (1000 + process * scripts).to_string()),
            ("TANDEM_DEVICE_ACTS", "20".to_owned()),
        ]
    });
}

/// Within calls, too, waits that are forgotten are seen: in each of the ways in which such a device is eager, by one of a few scripts. Which threads
/// meet which calls is by chance, so no single one can be told to see them.
#[test]
fn waits_that_are_forgotten_are_seen_in_many_orders() {
    let env = [("FAKE_CHECKS", "0"), ("FAKE_PLAIN", "1"), ("TANDEM_DEVICE_ACTS", "20"), ("FAKE_FORGET", "3")];
    let forgets = |seed: u64| tried_again(&["on_a_device::any_order"], &format!("calls:{seed}"), &env);
    for eagerness in 0..4 {
        let mut said = String::new();
        let is_seen = (0..8).any(|n| match forgets(eagerness + 4 * n) {
            // There is no stand-in.
            None => true,
            Some((succeeded, text)) => {
                said = text;
                !succeeded && said.contains("standard deviations behind")
            }
        });
        assert!(is_seen, "eagerness {eagerness}: {said}");
    }
}

/// Streams that forget to wait for each other make somebody's tokens wrong.
#[test]
fn waits_that_are_forgotten_are_seen() {
    let tests = ["on_a_device::any_order"];
    let forgets = |order: &str| tried_again(&tests, order, &[("FAKE_FORGET", "3")]);
    let mut orders = orders(4).into_iter().map_while(|order| forgets(&order)).peekable();
    if orders.peek().is_some() {
        assert!(orders.any(|(succeeded, _)| !succeeded), "as if nobody had to wait");
    }
}
