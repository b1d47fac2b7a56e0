//! Attention on the host beside copies over the link: both read the same memory, so a copy slows the attention down while it runs.
//!
//! ```text
//! copies     ──████████──────────██──
//! attention  ─▓▓▒▒▒▒▒▒▒▒▓▓▓▓▓▓▓▓▓▒▒▓     ▓ at its own rate   ▒ at the share of it that copies leave
//! ```
//! The one rule of planners, schedulers, the simulator and emulated time.

/// When copies over the link run, in either direction: seconds, ascending, apart from each other.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CopySpans(Vec<(f64, f64)>);

impl CopySpans {
    /// Those that run in these spans (begin, end), in any order; spans may overlap.
    pub fn of(spans: impl IntoIterator<Item = (f64, f64)>) -> CopySpans {
        let mut all: Vec<_> = spans.into_iter().filter(|s| s.1 > s.0).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut apart: Vec<(f64, f64)> = Vec::with_capacity(all.len());
        for (begin, end) in all {
            match apart.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => apart.push((begin, end)),
            }
        }
        CopySpans(apart)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a copy. `begin` is not before that of any other of its direction.
    pub fn push(&mut self, begin: f64, end: f64) {
        if end > begin {
            let after = self.0.iter().rposition(|s| s.1 < begin).map_or(0, |at| at + 1);
            let merged = self.0.split_off(after);
            self.0.extend(CopySpans::of(merged.into_iter().chain([(begin, end)])).0);
        }
    }

    /// Forgets those that have ended by `now`.
    pub fn forget(&mut self, now: f64) {
        let done = self.0.iter().take_while(|s| s.1 <= now).count();
        self.0.drain(..done);
    }

    /// When attention ends that begins at `begin`, takes so many seconds alone, and keeps the `share` of its rate, in (0, 1], while
    /// a copy runs.
    pub fn end(&self, begin: f64, alone: f64, share: f64) -> f64 {
        let (mut now, mut left) = (begin, alone);
        for &(from, to) in &self.0 {
            let before = (from - now).max(0.0);
            if left <= before {
                break;
            }
            left -= before;
            now += before;
            let beside = (to - now).max(0.0);
            if left <= beside * share {
                return now + left / share;
            }
            left -= beside * share;
            now += beside;
        }
        now + left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_copy_slows_attention_down_while_it_runs() {
        let end = |copies: &[(f64, f64)], begin, alone| {
            CopySpans::of(copies.iter().copied()).end(begin, alone, 0.5)
        };
        assert_eq!(end(&[], 1.0, 4.0), 5.0);
        // Two seconds of copies do one second of the work; three are left.
        assert_eq!(end(&[(0.0, 2.0)], 0.0, 4.0), 5.0);
        assert_eq!(end(&[(0.0, 8.0)], 0.0, 4.0), 8.0);
        assert_eq!(end(&[(0.0, 100.0)], 0.0, 4.0), 8.0);
        // Over before it begins, and begun after it ends.
        assert_eq!(end(&[(0.0, 1.0), (9.0, 10.0)], 1.0, 4.0), 5.0);
        // Both directions at once slow it down once.
        assert_eq!(end(&[(0.0, 2.0), (1.0, 2.0), (1.0, 3.0)], 0.0, 4.0), 5.5);
        assert_eq!(end(&[(2.0, 4.0)], 0.0, 4.0), 5.0);
    }

    proptest! {
        /// Against small slices of time; and what is pushed one by one is what was given at once.
        #[test]
        fn matches_a_walk_in_small_slices(
            spans in prop::collection::vec((0u32..200, 1u32..60), 0..6),
            begin in 0u32..100,
            alone in 1u32..200,
            share in 0.05f64..1.0,
        ) {
            let mut spans: Vec<_> = spans.iter().map(|&(a, n)| (f64::from(a), f64::from(a + n))).collect();
            let copies = CopySpans::of(spans.iter().copied());
            let (mut now, mut left) = (f64::from(begin), f64::from(alone));
            while left > 1e-9 {
                let busy = spans.iter().any(|s| s.0 <= now && now < s.1);
                let rate = if busy { share } else { 1.0 };
                // CopySpans begin and end at whole seconds.
                let step = (now.floor() + 1.0 - now).min(left / rate);
                left -= step * rate;
                now += step;
            }
            let got = copies.end(begin.into(), alone.into(), share);
            prop_assert!((got - now).abs() < 1e-6, "{got} for {now}");
            spans.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut one_by_one = CopySpans::default();
            spans.iter().for_each(|s| one_by_one.push(s.0, s.1));
            prop_assert_eq!(one_by_one, copies);
        }
    }
}
