//! Requests once more through the CUDA runtime, on a stand-in for the driver that runs the kernels as late as it may, and in orders by
//! chance.

use crate::interleave::STRATEGIES;
use crate::support::fake_driver::{again, again_plainly, orders, tried_again};

#[test]
fn requests_in_any_order_of_execution() {
    for order in orders(1) {
        again(&["on_a_device::", "requests::numbers::"], &order, &[]);
    }
}

/// More of them, with the largest kernels by plain loops and unchecked: 252 orders here, as many as `TANDEM_DEVICE_ORDERS` says elsewhere.
#[test]
fn requests_in_many_orders_of_execution() {
    let given = std::env::var("TANDEM_DEVICE_ORDERS").ok();
    let wanted: u64 = given.map_or(252, |n| n.parse().expect("a number of orders"));
    // The scripts of a process are those of other seeds than any other's.
    let scripts = 9;
    let processes = wanted.div_ceil(scripts * STRATEGIES.len() as u64);
    for process in 0..processes {
        let env = [
            ("FAKE_CHECKS", "0"),
            ("TANDEM_DEVICE_INTERLEAVINGS", &*scripts.to_string()),
            ("TANDEM_DEVICE_FIRST", &*(1000 + process * scripts).to_string()),
        ];
        again_plainly(&["on_a_device::any_order"], &format!("seed:{process}"), &env);
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
