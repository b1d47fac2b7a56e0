//! Measures how long an engine takes, by this computer's clock or in emulated time.

use std::time::Instant;

use tandem::engine::Engine;

/// A stopwatch that runs from its creation.
pub struct Stopwatch {
    began: Instant,
    emulated: Option<f64>,
}

impl Stopwatch {
    /// Starts.
    pub fn start(engine: &Engine) -> Stopwatch {
        Stopwatch { began: Instant::now(), emulated: engine.emulated_seconds() }
    }

    /// Seconds since the start.
    pub fn seconds(&self, engine: &Engine) -> f64 {
        match (self.emulated, engine.emulated_seconds()) {
            (Some(began), Some(now)) => now - began,
            _ => self.began.elapsed().as_secs_f64(),
        }
    }
}

impl Stopwatch {
    /// Waits until `seconds` after the start, or advances emulated time to that point.
    pub fn wait_until(&self, engine: &Engine, seconds: f64) {
        let left = seconds - self.seconds(engine);
        match self.emulated {
            Some(_) => engine.pass(left),
            None if left > 0.0 => std::thread::sleep(std::time::Duration::from_secs_f64(left)),
            None => {}
        }
    }
}

/// The value of `time` in JSON for an engine's times.
pub fn time_of(engine: &Engine) -> &'static str {
    if engine.emulated_seconds().is_some() { "emulated" } else { "measured" }
}
