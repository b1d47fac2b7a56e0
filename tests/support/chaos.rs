//! A machine of any temper from one seed: slow CPU, slow GPU, slow link, random delays, tiny memory, launches that are refused.
//!
//! Results of a correct engine do not depend on any of it: in deterministic mode they are the CPU's, bit by bit. So a test draws a
//! seed, builds its engine on [`Chaos::accelerator`] with options that went through [`Chaos::squeeze`], asks for a
//! [`Chaos::mishap`] before a step, and compares with what the CPU says when nothing else runs.
//!
//! ```ignore
//! let mut chaos = Chaos::of(seed); // print it with a failure: `{chaos:?}` says what the seed stands for
//! let (runtime, accel) = chaos.accelerator();
//! let options = chaos.squeeze(options);
//! let mut engine = Engine::placed(spec, weights, &options, accel, ...)?;
//! loop {
//!     runtime.set_faults(chaos.mishap());
//!     match engine.forward(&inputs) {
//!         Err(e) if Chaos::planned(&e) => continue, // nothing is stored: the step is made again
//!         ...
//!     }
//! }
//! ```

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use tandem::Error;
use tandem::device::Accelerator;
use tandem::device::emulated::{
    EmulatedAccelerator, EmulatedOptions, EmulatedRuntime, FaultPlan, KernelChecks, Speed,
};
use tandem::engine::Options;

/// What a seed stands for, and the numbers that are still to be drawn from it.
#[derive(Debug, Clone)]
pub struct Chaos {
    pub seed: u64,
    /// How many times as long the CPU's jobs take.
    pub slow_cpu: f64,
    /// How many times as long the GPU's operations take, and how much longer each launch.
    pub slow_gpu: f64,
    pub launch: Duration,
    /// GB/s of either direction of the link.
    pub link: [Option<f64>; 2],
    /// Whether work of each lane, the CPU's included, is delayed at random.
    pub delays: bool,
    /// Whether the GPU has room for little more than a step's pages.
    pub tiny: bool,
    /// Whether launches are refused now and then.
    pub mishaps: bool,
    state: u64,
}

impl Chaos {
    /// Always the same for a seed. Seed 0 is a machine that is even-tempered: as fast as this one, with room and without faults.
    pub fn of(seed: u64) -> Chaos {
        let mut chaos = Chaos {
            seed,
            slow_cpu: 1.0,
            slow_gpu: 1.0,
            launch: Duration::ZERO,
            link: [None; 2],
            delays: false,
            tiny: false,
            mishaps: false,
            state: seed,
        };
        if seed == 0 {
            return chaos;
        }
        // Each by itself, so that all combinations occur.
        if chaos.one_in(3) {
            chaos.slow_cpu = [2.0, 10.0, 50.0][chaos.below(3) as usize];
        }
        if chaos.one_in(3) {
            chaos.slow_gpu = [2.0, 10.0, 50.0][chaos.below(3) as usize];
            chaos.launch = Duration::from_micros(chaos.below(200));
        }
        if chaos.one_in(3) {
            chaos.link = [0, 1].map(|_| [None, Some(0.02), Some(0.2)][chaos.below(3) as usize]);
        }
        chaos.delays = chaos.one_in(2);
        chaos.tiny = chaos.one_in(2);
        chaos.mishaps = chaos.one_in(3);
        chaos
    }

    /// Any of them; a failure shrinks to the even-tempered one if that fails, too.
    pub fn any() -> impl Strategy<Value = Chaos> {
        prop_oneof![1 => Just(0u64), 9 => any::<u64>()].prop_map(Chaos::of)
    }

    /// How the emulated device behaves.
    pub fn device(&self) -> EmulatedOptions {
        EmulatedOptions {
            speed: Speed {
                host_to_device: self.link[0],
                device_to_host: self.link[1],
                launch: self.launch,
                kernel_factor: self.slow_gpu,
                host_factor: self.slow_cpu,
            },
            jitter: self.delays.then_some(self.seed),
            // A test that hangs says where, rather than nothing.
            watchdog: Duration::from_secs(60),
            checks: KernelChecks::FAST,
            ..EmulatedOptions::default()
        }
    }

    /// The device by plain functions, and its runtime, for faults.
    pub fn accelerator(&self) -> (Arc<EmulatedRuntime>, Arc<dyn Accelerator>) {
        let runtime = Arc::new(EmulatedRuntime::new(self.device()).expect("it starts"));
        (runtime.clone(), Arc::new(EmulatedAccelerator::new(runtime)))
    }

    /// The same options with as few pages on the device as the temper says: at least a step's and two of each sequence, so that
    /// an engine can be made.
    pub fn squeeze(&mut self, options: Options) -> Options {
        if !self.tiny {
            return options;
        }
        let rows = options.chunk.min(options.context).max(options.sequences);
        let least = rows.div_ceil(32) + 2 * options.sequences;
        let more = self.below(least as u64) as usize;
        Options { kv_pages: Some(least + more), ..options }
    }

    /// What is to go wrong from now on: mostly nothing, sometimes one launch.
    pub fn mishap(&mut self) -> FaultPlan {
        let refuse_launch = (self.mishaps && self.one_in(4)).then(|| 1 + self.below(80));
        FaultPlan { refuse_launch, ..FaultPlan::default() }
    }

    /// Whether an error is one of [`Chaos::mishap`]'s.
    pub fn planned(error: &Error) -> bool {
        error.to_string().contains("a fault was injected")
    }

    /// In `0..n`.
    pub fn below(&mut self, n: u64) -> u64 {
        // SplitMix64 (Steele, Lea & Flood 2014).
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
