//! Requests once more through the CUDA runtime, on a stand-in for the driver that runs the kernels as late as it may, and in orders by
//! chance.

use crate::support::fake_driver::{again, orders, tried_again};

#[test]
fn requests_in_any_order_of_execution() {
    for order in orders(1) {
        again(&["on_a_device::", "requests::numbers::"], &order, &[]);
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
