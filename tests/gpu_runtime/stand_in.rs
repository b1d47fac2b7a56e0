//! The runtime contract once more through the CUDA runtime, on a stand-in for the driver that runs what is enqueued as late as it may,
//! and in orders by chance.

use crate::support::fake_driver::{again, orders};

#[test]
fn the_contract_in_any_order_of_execution() {
    for order in orders(3) {
        again(&["contract::", "model::", "time::timed", "time::a_wait"], &order, &[]);
    }
}
