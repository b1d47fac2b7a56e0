//! What a user asks of latency: strategies then finish the requests as fast as they can while so many of them are in time.

use serde::Serialize;

use super::seconds::OptionalSeconds;
use crate::{Error, Result};

/// Seconds within which tokens are wanted; `None` where any will do.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Targets {
    /// From a request's arrival to its first token.
    #[serde(rename = "ttft_s")]
    pub ttft: Option<f64>,
    /// Between a request's tokens after the first, their mean.
    #[serde(rename = "tpot_s")]
    pub tpot: Option<f64>,
    /// Per cent of the requests that must be within both.
    pub percentile: u32,
    /// Whether somebody waits for first tokens although nothing is asked of them. Strategies then choose what delays the first tokens of
    /// requests that came one by one by at most a quarter, or a second, over what the device alone takes in their place.
    #[serde(skip)]
    pub awaited: bool,
}

impl Targets {
    /// Any latency will do.
    pub const NONE: Targets = Targets { ttft: None, tpot: None, percentile: 90, awaited: true };

    /// Nobody waits: only the last token counts.
    pub const OFFLINE: Targets = Targets { awaited: false, ..Targets::NONE };

    /// Whether anything is asked.
    pub fn is_some(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some()
    }

    /// Those of a request with targets of its own.
    pub fn with(&self, own: OwnTargets) -> Targets {
        Targets { ttft: own.ttft.get().or(self.ttft), tpot: own.tpot.get().or(self.tpot), ..*self }
    }

    /// The mean seconds to a first token that are not exceeded without targets, where the device alone has `alone`.
    pub(super) fn bound(alone: f64) -> f64 {
        alone + (DELAY * alone).max(AT_LEAST)
    }

    /// Whether a request with these times is within them; `tpot` is `None` of an answer of one token.
    pub fn met(&self, ttft: f64, tpot: Option<f64>) -> bool {
        self.ttft.is_none_or(|most| ttft <= most)
            && self.tpot.zip(tpot).is_none_or(|(most, seconds)| seconds <= most)
    }

    /// Whether they are kept if `late` of `all` requests that have any are not within them.
    pub fn kept(&self, late: usize, all: usize) -> bool {
        100 * late <= (100 - self.percentile.min(100) as usize) * all
    }
}

/// Targets of one request: each that is given replaces that of all requests ([`Targets`]).
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct OwnTargets {
    /// Seconds from its arrival to its first token.
    pub ttft: OptionalSeconds,
    /// Seconds between its tokens after the first, their mean.
    pub tpot: OptionalSeconds,
}

impl OwnTargets {
    /// Seconds to the first token, and between those after it.
    pub fn new(ttft: Option<f64>, tpot: Option<f64>) -> OwnTargets {
        // What is not a number is no target, either, and must not count as none: `check` refuses what stands for it.
        let kept = |seconds: Option<f64>| seconds.map(|s| if s.is_nan() { f64::NEG_INFINITY } else { s });
        OwnTargets { ttft: kept(ttft).into(), tpot: kept(tpot).into() }
    }

    /// Whether anything is asked.
    pub fn is_some(&self) -> bool {
        self.ttft.is_some() || self.tpot.is_some()
    }

    /// # Errors
    /// A target that is not a number of seconds above 0, by its name in requests.
    pub fn check(&self) -> Result<()> {
        for (name, target) in [("ttft_target", self.ttft), ("tpot_target", self.tpot)] {
            if let Some(seconds) = target.get().filter(|&seconds| !(seconds > 0.0 && seconds.is_finite())) {
                return Err(Error::usage(format!(
                    "{name}: {seconds}, a number of seconds above 0 is wanted"
                )));
            }
        }
        Ok(())
    }
}

/// See [`Targets::awaited`].
const DELAY: f64 = 0.25;

/// The same in seconds: nobody minds less.
const AT_LEAST: f64 = 1.0;

impl Default for Targets {
    fn default() -> Targets {
        Targets::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nine_of_ten_are_enough() {
        let targets = Targets { ttft: Some(1.0), tpot: Some(0.1), ..Targets::NONE };
        assert!(targets.met(1.0, Some(0.1)) && targets.met(0.5, None));
        assert!(!targets.met(1.1, Some(0.05)) && !targets.met(0.5, Some(0.2)));
        assert!(targets.kept(1, 10) && !targets.kept(2, 10) && targets.kept(0, 0));
        let all = Targets { percentile: 100, ..targets };
        assert!(!all.kept(1, 1000) && all.kept(0, 3));
        assert!(Targets::NONE.met(1e9, Some(1e9)));
    }

    #[test]
    fn own_targets_replace_those_of_all() {
        let all = Targets { ttft: Some(1.0), tpot: Some(0.1), ..Targets::NONE };
        assert_eq!(all.with(OwnTargets::default()), all);
        let own = OwnTargets::new(None, Some(0.5));
        assert_eq!(all.with(own), Targets { tpot: Some(0.5), ..all });
        assert_eq!(Targets::OFFLINE.with(own), Targets { tpot: Some(0.5), ..Targets::OFFLINE });
    }

    #[test]
    fn own_targets_are_seconds_above_0() {
        let own = |ttft, tpot| OwnTargets::new(ttft, tpot).check();
        own(Some(1e-9), Some(1e9)).unwrap();
        own(None, None).unwrap();
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(own(Some(wrong), None).unwrap_err().to_string().contains("ttft_target"));
            assert!(own(None, Some(wrong)).unwrap_err().to_string().contains("tpot_target"));
        }
    }
}
