//! Times of the latest answers, for percentiles: histograms of the whole run say little about the last minutes.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};

/// Answers that are remembered.
const MOST: usize = 1024;

/// Of an answer: time to its first token, mean time between its tokens, time as a whole.
type Times = (Duration, Option<Duration>, Duration);

/// See the [module](self).
#[derive(Default)]
pub(super) struct Recent(Mutex<VecDeque<Times>>);

impl Recent {
    /// An answer has ended.
    pub fn add(&self, times: Times) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == MOST {
            all.pop_front();
        }
        all.push_back(times);
    }

    /// How many there are, and the percentiles of each time in seconds, null without any.
    pub fn json(&self) -> Value {
        let all: Vec<Times> = self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        json!({
            "answers": all.len(),
            "first_token": percentiles(all.iter().map(|times| times.0)),
            "per_token": percentiles(all.iter().filter_map(|times| times.1)),
            "whole": percentiles(all.iter().map(|times| times.2)),
        })
    }
}

/// Nearest rank: each is the time of an answer.
fn percentiles(times: impl Iterator<Item = Duration>) -> Value {
    let mut sorted: Vec<Duration> = times.collect();
    sorted.sort_unstable();
    let at = |percent: usize| {
        let rank = (sorted.len() * percent).div_ceil(100).max(1);
        sorted.get(rank - 1).map(Duration::as_secs_f64)
    };
    json!({ "p50": at(50), "p90": at(90), "p99": at(99) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_of_the_latest_answers() {
        let recent = Recent::default();
        assert_eq!(recent.json()["whole"], json!({ "p50": null, "p90": null, "p99": null }));
        let second = |n: usize| Duration::from_secs(n as u64);
        // The first hundred are forgotten.
        for n in 0..MOST + 100 {
            recent.add((second(n), (n % 2 == 0).then(|| second(1)), second(7)));
        }
        let json = recent.json();
        assert_eq!(json["answers"], MOST);
        let first = |percent: usize| (100 + (MOST * percent).div_ceil(100) - 1) as f64;
        assert_eq!(json["first_token"], json!({ "p50": first(50), "p90": first(90), "p99": first(99) }));
        assert_eq!(json["per_token"]["p99"], 1.0);
        assert_eq!(json["whole"]["p50"], 7.0);
    }
}
