//! Which of several answers is the best: that of the highest mean log-probability, as in OpenAI's `best_of`.

use super::Token;

/// The log-probabilities of an answer's tokens, added up as they come.
#[derive(Debug, Clone, Copy, Default)]
pub struct Likelihood {
    sum: f64,
    tokens: usize,
}

impl Likelihood {
    /// Of a whole answer.
    pub fn of(answer: &[Token]) -> Likelihood {
        let mut all = Likelihood::default();
        answer.iter().for_each(|token| all.add(token));
        all
    }

    /// Adds a token; one whose request asks for no [`logprobs`](super::Request::logprobs) counts nothing.
    pub fn add(&mut self, token: &Token) {
        if let Some(logprobs) = &token.logprobs {
            (self.sum, self.tokens) = (self.sum + logprobs.token, self.tokens + 1);
        }
    }

    /// The mean; of an answer without tokens, the least.
    fn mean(self) -> f64 {
        if self.tokens == 0 { f64::NEG_INFINITY } else { self.sum / self.tokens as f64 }
    }
}

/// The places of the `n` best answers, the best first; answers that are as likely keep their order.
pub fn best_of(answers: &[Likelihood], n: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..answers.len()).collect();
    places.sort_by(|&a, &b| answers[b].mean().total_cmp(&answers[a].mean()));
    places.truncate(n);
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Logprobs;

    #[test]
    fn the_mean_decides_and_not_the_sum() {
        let of = |logprobs: &[f64]| {
            let token = |&token: &f64| Token {
                id: 0,
                text: String::new(),
                logprobs: Some(Box::new(Logprobs { token, rank: 1, top: Vec::new() })),
            };
            Likelihood::of(&logprobs.iter().map(token).collect::<Vec<_>>())
        };
        // The sum of the third is the least, its mean the largest; the first two are alike.
        let all = [of(&[-0.7, -0.9]), of(&[-0.8]), of(&[-0.5; 9]), of(&[])];
        assert_eq!(best_of(&all, 4), [2, 0, 1, 3]);
        assert_eq!(best_of(&all, 1), [2]);
    }
}
