//! What this machine can do, measured: limits that no kernel exceeds, kept from run to run.
//!
//! | a file | what |
//! |---|---|
//! | [`limits`] | read bandwidth, arithmetic, the device's memory and matrix rate, the link |
//! | [`identity`] | which machine, which device, which model a measurement is of |
//! | [`store`] | [`Profile`]: a file in the cache folder |
//! | `sample` | timing something several times |
//! | `bandwidth`, `peak` | the probes of memory and arithmetic |

mod bandwidth;
pub mod identity;
pub mod limits;
mod peak;
mod sample;
pub mod store;

pub use bandwidth::{ReadProbe, read_bandwidth};
pub use identity::{DeviceIdentity, Identity};
pub use limits::Limits;
pub use peak::{Peak, peaks};
pub use sample::{Effort, Samples};
pub use store::{Profile, Store};

use crate::device::runtime::DeviceInfo;
use crate::plan::Hardware;

/// What a measured machine is called as [`Hardware`].
pub const THIS_MACHINE: &str = "this machine";

/// This machine as it was measured before (`tandem profile`), with `device` or without one: `None` if it was not, or if
/// what is kept cannot be read. Reads one file; measures nothing.
pub fn measured_hardware(device: Option<&DeviceInfo>) -> Option<Hardware> {
    let store = Store::from_env().ok()?;
    let profile = store.load(&Identity::of_machine(device)).ok()??;
    let mut hardware = profile.limits.hardware(THIS_MACHINE);
    // How much of the memory is free changes from hour to hour.
    if let Some(available) = crate::host::cgroup::memory_available() {
        hardware.cpu.dram_bytes = available as f64;
    }
    Some(hardware)
}
