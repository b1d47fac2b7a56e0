//! The answers of one request, of which there may be several: `n`, and `best_of`.

use tandem::engine::{Likelihood, Logprobs, Token, best_of};

/// An answer that has ended.
pub struct Sample {
    /// Its place among the request's answers, from 0.
    pub at: usize,
    /// Its tokens.
    pub answer: Vec<Token>,
    /// Of the prompt's tokens from the second on, where this answer tells them.
    pub scores: Vec<Logprobs>,
    /// What of it is told.
    pub told: serde_json::Map<String, serde_json::Value>,
}

/// See the [module](self).
pub struct Candidates {
    n: usize,
    of: usize,
    ended: Vec<Sample>,
}

impl Candidates {
    /// `n` answers, the best of `of`.
    pub fn new(n: usize, of: usize) -> Candidates {
        Candidates { n, of, ended: Vec::with_capacity(of) }
    }

    /// Takes one that has ended. When it is the last, returns what the first tells of the prompt, and those that were asked for: in the
    /// order of their places, or, where they are the [best of](best_of) more, the best first.
    pub fn add(&mut self, sample: Sample) -> Option<(Vec<Logprobs>, Vec<Sample>)> {
        self.ended.push(sample);
        if self.ended.len() < self.of {
            return None;
        }
        let mut all = std::mem::take(&mut self.ended);
        all.sort_by_key(|sample| sample.at);
        let scores = std::mem::take(&mut all[0].scores);
        if self.n == self.of {
            return Some((scores, all));
        }
        let likely: Vec<Likelihood> = all.iter().map(|sample| Likelihood::of(&sample.answer)).collect();
        let mut all: Vec<Option<Sample>> = all.into_iter().map(Some).collect();
        let best = best_of(&likely, self.n).into_iter().filter_map(|at| all[at].take()).collect();
        Some((scores, best))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: usize, logprobs: &[f64]) -> Sample {
        let token = |&p: &f64| Token {
            id: 0,
            text: String::new(),
            logprobs: Some(Box::new(Logprobs { token: p, rank: 1, top: Vec::new() })),
        };
        Sample {
            at,
            answer: logprobs.iter().map(token).collect(),
            scores: Vec::new(),
            told: Default::default(),
        }
    }

    #[test]
    fn all_are_told_in_their_order_and_the_best_by_their_mean() {
        // Ends last, first and second; the sum of the second is the least, its mean the largest.
        let given = || [sample(1, &[-0.5; 9]), sample(2, &[-1.0]), sample(0, &[-0.7, -0.9])];
        let told = |n| {
            let mut samples = Candidates::new(n, 3);
            let [a, b, c] = given();
            assert!(samples.add(a).is_none() && samples.add(b).is_none());
            samples.add(c).unwrap().1.iter().map(|s| s.at).collect::<Vec<_>>()
        };
        assert_eq!(told(3), [0, 1, 2]);
        assert_eq!(told(2), [1, 0]);
        assert_eq!(told(1), [1]);
        let mut one = Candidates::new(1, 1);
        assert_eq!(one.add(sample(0, &[])).unwrap().1.len(), 1);
    }
}
