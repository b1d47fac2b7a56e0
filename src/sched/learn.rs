//! Ratios of measured to predicted seconds, learned while requests run (APEX §6, future work).

use super::model::Mode;
use super::strategy::Observed;

/// Weight of the newest sample in a ratio.
const NEW: f64 = 0.05;

/// Largest factor by which a prediction is corrected.
const MOST: f64 = 2.0;

/// One ratio per way of sharing an iteration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Learned {
    ratios: [f64; 3],
}

impl Default for Learned {
    fn default() -> Self {
        Learned { ratios: [1.0; 3] }
    }
}

impl Learned {
    /// The factor on a prediction.
    pub fn ratio(&self, mode: Mode) -> f64 {
        self.ratios[mode as usize]
    }

    /// Learns from an iteration.
    pub fn observe(&mut self, mode: Mode, seen: &Observed) {
        if seen.predicted > 0.0
            && seen.predicted.is_finite()
            && seen.seconds.is_finite()
            && seen.seconds > 0.0
        {
            let sample = (seen.seconds / seen.predicted).clamp(1.0 / MOST, MOST);
            let ratio = &mut self.ratios[mode as usize];
            *ratio += NEW * (sample - *ratio);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_follow_what_is_measured_slowly_and_within_bounds() {
        let mut learned = Learned::default();
        let seen = |predicted, seconds| Observed { predicted, seconds, ..Observed::default() };
        learned.observe(Mode::Pipelined, &seen(1.0, 1.5));
        assert!((learned.ratio(Mode::Pipelined) - 1.025).abs() < 1e-12);
        for _ in 0..500 {
            learned.observe(Mode::Pipelined, &seen(1.0, 1.5));
            learned.observe(Mode::GpuOnly, &seen(1.0, 1e9));
            // Says nothing.
            learned.observe(Mode::Overlapped, &seen(0.0, 1.0));
            learned.observe(Mode::Overlapped, &seen(1.0, f64::NAN));
            learned.observe(Mode::Overlapped, &seen(f64::INFINITY, 1.0));
        }
        assert!((learned.ratio(Mode::Pipelined) - 1.5).abs() < 1e-6);
        assert!((learned.ratio(Mode::GpuOnly) - MOST).abs() < 1e-6);
        assert_eq!(learned.ratio(Mode::Overlapped), 1.0);
    }
}
