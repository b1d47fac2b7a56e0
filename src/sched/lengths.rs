//! How long answers turn out, learned from those that have ended, where only the most tokens that a request may have are known.
//!
//! ```text
//! S(t)  share of answers longer than t tokens
//!  1 ──┐
//!      └──┐     an answer that ended by itself is a step down; one that was cut off at its limit, or still runs,
//!         └──── only leaves those that are known to be longer (Kaplan and Meier 1958)
//!                 likely length of an answer with m tokens: m + ∫ S(t) dt / S(m) from m to its limit
//! ```
//! So short answers, which end first, do not make all look short; and without an answer that ended by itself, all are as long as
//! allowed.

/// Ended answers that are remembered.
const REMEMBERED: usize = 512;

/// Answers that must have ended by themselves before anything is said.
const FEW: usize = 8;

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub(super) struct LearnedLengths {
    /// Tokens of the last answers, and whether each ended by itself; a ring.
    ended: Vec<(u32, bool)>,
    /// Where the next goes.
    next: usize,
    /// Answers since the curve was made.
    fresh: usize,
    curve: Curve,
}

/// S: constant between its steps.
#[derive(Debug, Clone, Default)]
struct Curve {
    /// Lengths at which it steps down, ascending.
    at: Vec<u32>,
    /// Its value from each on.
    then: Vec<f64>,
    /// Its integral up to each.
    area: Vec<f64>,
}

impl Curve {
    /// Its value and its integral up to `t`.
    fn look(&self, t: u32) -> (f64, f64) {
        match self.at.partition_point(|&at| at <= t) {
            0 => (1.0, f64::from(t)),
            n => (self.then[n - 1], self.area[n - 1] + self.then[n - 1] * f64::from(t - self.at[n - 1])),
        }
    }
}

impl LearnedLengths {
    /// An answer has ended with so many tokens: by itself, or where it was cut off.
    pub fn ended(&mut self, tokens: u32, by_itself: bool) {
        match self.ended.get_mut(self.next) {
            Some(old) => *old = (tokens, by_itself),
            None => self.ended.push((tokens, by_itself)),
        }
        self.next = (self.next + 1) % REMEMBERED;
        self.fresh += 1;
    }

    /// Whether enough answers have ended for the curve to be made again.
    pub fn is_due(&self) -> bool {
        self.fresh >= FEW.max(self.ended.len() / 8)
    }

    /// Makes the curve again; `running` are the tokens of answers that have not ended.
    pub fn learn(&mut self, running: impl Iterator<Item = u32>) {
        self.fresh = 0;
        self.curve = Curve::default();
        if self.ended.iter().filter(|e| e.1).count() < FEW {
            return;
        }
        let mut all: Vec<(u32, bool)> =
            self.ended.iter().copied().chain(running.map(|made| (made, false))).collect();
        // Of those of one length, the ends come first: who is cut off there is longer.
        all.sort_unstable_by_key(|&(tokens, by_itself)| (tokens, !by_itself));
        let (mut share, mut area, mut from) = (1.0, 0.0, 0);
        let mut i = 0;
        while i < all.len() {
            let (tokens, left) = (all[i].0, all.len() - i);
            let same = all[i..].iter().take_while(|a| a.0 == tokens);
            let (count, ends) = same.fold((0, 0), |(n, ends), a| (n + 1, ends + usize::from(a.1)));
            i += count;
            if ends > 0 {
                area += share * f64::from(tokens - from);
                share *= 1.0 - ends as f64 / left as f64;
                from = tokens;
                self.curve.at.push(tokens);
                self.curve.then.push(share);
                self.curve.area.push(area);
            }
        }
    }

    /// The likely tokens of an answer that has `made` of them and may have `most`: more than it has, if it may.
    pub fn likely(&self, made: u32, most: u32) -> u32 {
        let ((share, before), (_, all)) = (self.curve.look(made), self.curve.look(most.max(made)));
        let more = match share > 0.0 {
            true => (all - before) / share,
            // Longer than any other: as long again.
            false => f64::from(made),
        };
        made.saturating_add((more.round() as u32).max(1)).min(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_answers_that_ended_by_themselves_all_are_as_long_as_allowed() {
        let mut lengths = LearnedLengths::default();
        assert_eq!(
            (lengths.likely(0, 100), lengths.likely(99, 100), lengths.likely(100, 100)),
            (100, 100, 100)
        );
        for _ in 0..100 {
            lengths.ended(50, false);
        }
        lengths.learn([3, 70].into_iter());
        assert_eq!((lengths.likely(0, 100), lengths.likely(60, 1000)), (100, 1000));
    }

    #[test]
    fn the_mean_of_what_is_left_is_learned() {
        let mut lengths = LearnedLengths::default();
        for i in 0..400 {
            lengths.ended([10, 20, 30, 40][i % 4], true);
        }
        assert!(lengths.is_due());
        lengths.learn(std::iter::empty());
        assert!(!lengths.is_due());
        assert_eq!(lengths.likely(0, 1000), 25);
        // Of those that have 20 tokens, half have 30 and half 40.
        assert_eq!(lengths.likely(20, 1000), 35);
        assert_eq!(lengths.likely(30, 1000), 40);
        // What is beyond its limit is not counted: 10, then 15 three times.
        assert_eq!(lengths.likely(0, 15), 14);
        // Longer than any.
        assert_eq!((lengths.likely(100, 1000), lengths.likely(600, 1000)), (200, 1000));
    }

    #[test]
    fn answers_that_still_run_are_not_taken_for_short_ones() {
        let mut lengths = LearnedLengths::default();
        for _ in 0..20 {
            lengths.ended(10, true);
        }
        // Eighty others are at 50 tokens, of 100 allowed.
        lengths.learn((0..80).map(|_| 50));
        assert_eq!(lengths.likely(0, 100), 82);
        assert_eq!(lengths.likely(50, 100), 100);
    }

    #[test]
    fn old_answers_are_forgotten() {
        let mut lengths = LearnedLengths::default();
        (0..REMEMBERED).for_each(|_| lengths.ended(10, true));
        (0..REMEMBERED).for_each(|_| lengths.ended(1000, true));
        lengths.learn(std::iter::empty());
        assert_eq!((lengths.ended.len(), lengths.likely(0, 5000)), (REMEMBERED, 1000));
    }
}
