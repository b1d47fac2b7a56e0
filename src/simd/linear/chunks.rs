//! How a product is divided among threads.

use std::ops::Range;

/// The chunks of one product, in a job of one or several.
///
/// ```text
/// job      │ product 0: chunks 0..3                  │ product 1: chunks 3..5   │
/// groups   │ 0..4          4..8          8..10       │ 0..4          4..8       │     per_chunk = 4
/// ```
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunks {
    /// The number of its first chunk in the job.
    pub first: usize,
    /// The chunk of the job after its last one.
    pub end: usize,
    /// Groups of 16 rows of the weight.
    groups: usize,
    /// Groups of a chunk; the last one may have fewer.
    per_chunk: usize,
    /// Whether neighbouring chunks may run as one. Otherwise each is to stay in a cache.
    joined: bool,
}

impl Chunks {
    /// `groups` in chunks of `per_chunk`, the first of which is chunk `first` of the job.
    pub fn new(first: usize, groups: usize, per_chunk: usize, joined: bool) -> Chunks {
        Chunks { first, end: first + groups.div_ceil(per_chunk), groups, per_chunk, joined }
    }

    /// The groups of its chunks among these of the job: from where to where each call of a kernel goes.
    #[inline]
    pub fn runs(&self, chunks: &Range<usize>) -> impl Iterator<Item = (usize, usize)> + use<> {
        let &Chunks { first, end, groups, per_chunk, joined } = self;
        let (mut from, to) = (chunks.start.max(first), chunks.end.min(end));
        std::iter::from_fn(move || {
            if from >= to {
                return None;
            }
            let next = if joined { to } else { from + 1 };
            let run = ((from - first) * per_chunk, ((next - first) * per_chunk).min(groups));
            from = next;
            Some(run)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Chunks;

    #[test]
    fn every_group_runs_once_however_the_job_is_cut() {
        for (joined, per_chunk) in [(false, 4), (true, 4), (true, 1), (false, 100)] {
            let a = Chunks::new(0, 10, per_chunk, joined);
            let b = Chunks::new(a.end, 8, per_chunk, joined);
            for cut in 0..=b.end {
                let mut seen = [vec![0; a.groups], vec![0; b.groups]];
                for part in [0..cut, cut..b.end] {
                    for (seen, product) in seen.iter_mut().zip([a, b]) {
                        let calls: Vec<_> = product.runs(&part).collect();
                        assert!(!joined || calls.len() <= 1, "{calls:?}");
                        for (g0, g1) in calls {
                            assert!(g0 < g1, "{g0}..{g1}");
                            assert!(joined || g1 - g0 <= per_chunk, "{g0}..{g1}");
                            seen[g0..g1].iter_mut().for_each(|n| *n += 1);
                        }
                    }
                }
                assert!(seen.iter().flatten().all(|&n| n == 1), "cut at {cut}: {seen:?}");
            }
        }
    }
}
