//! Requests once more through the CUDA runtime, on a stand-in for the driver that runs the kernels as late as it may, and in orders by
//! chance.

use crate::support::fake_driver::{again, orders};

#[test]
fn requests_in_any_order_of_execution() {
    for order in orders(1) {
        again(&["on_a_device::", "requests::numbers::"], &order, &[]);
    }
}
