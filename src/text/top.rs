//! The likeliest tokens of a row of logits, and how much all of them weigh: enough for most draws.

/// See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub struct Top {
    /// Logits and tokens, the greatest first by the total order of floats, the lowest token first among equals, NaN last.
    /// No other logit of the row comes before the last of these.
    pub likeliest: Vec<(f32, u32)>,
    /// Number of logits of the row.
    pub vocab: usize,
    /// What differences to the greatest logit are multiplied by in `sum`.
    pub factor: f32,
    /// Σ e^(factor·(x − greatest)) over the whole row; NaN if one of its logits is, or the greatest or
    /// the factor is infinite.
    pub sum: f32,
    /// `sum` is off by at most this fraction of itself.
    pub error: f64,
}

/// What a draw has to know of the tokens that are not among the likeliest.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beyond {
    /// None of their logits is greater.
    most: f32,
    /// Of the sum of all.
    pub factor: f32,
    /// The sum of all lies between these.
    pub low: f64,
    /// See `low`.
    pub high: f64,
}

/// What is certain of a nucleus whose sum of all weights is known between bounds.
pub(super) enum Nucleus {
    /// It has this many of the likeliest tokens.
    Has(usize),
    /// It has all of them, and others.
    GoesOn,
    /// The bounds do not tell.
    Unclear,
}

impl Top {
    /// Whether the row has no other tokens.
    pub(super) fn is_whole(&self) -> bool {
        self.likeliest.len() >= self.vocab
    }

    /// What is known of the others, if there are any.
    pub(super) fn beyond(&self) -> Option<Beyond> {
        let &(most, _) = self.likeliest.last().filter(|_| !self.is_whole())?;
        let sum = f64::from(self.sum);
        Some(Beyond {
            most,
            factor: self.factor,
            low: sum * (1.0 - self.error),
            high: sum * (1.0 + self.error),
        })
    }
}

impl Beyond {
    /// Whether none of the others has a logit of at least `floor`, or one at all.
    pub fn is_below(&self, floor: f32) -> bool {
        self.most < floor || self.most == f32::NEG_INFINITY
    }

    /// The smallest set of likeliest tokens whose probabilities sum to at least `p`; the logits come greatest first.
    pub fn nucleus(&self, logits: impl Iterator<Item = f32>, max: f32, p: f64) -> Nucleus {
        let mut sum = 0.0;
        for (i, l) in logits.enumerate() {
            sum += f64::from(l - max).exp();
            if sum >= p * self.high {
                return Nucleus::Has(i + 1);
            }
            if sum >= p * self.low {
                return Nucleus::Unclear;
            }
        }
        Nucleus::GoesOn
    }
}
