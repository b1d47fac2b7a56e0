//! The prepared matrices of a feed-forward: dense, or experts.

use crate::simd::linear::Linear;

/// A feed-forward.
pub(in crate::engine) enum FeedForward {
    /// One for all rows.
    Dense(Box<Mlp>),
    /// A router's choice of several.
    Experts(Box<Mixture>),
}

/// A dense feed-forward, or an expert.
pub(in crate::engine) struct Mlp {
    pub gate: Option<Linear>,
    pub up: Linear,
    pub down: Linear,
}

/// The experts of a block.
pub(in crate::engine) struct Mixture {
    /// In f32, whatever the file has: rounding its inputs would change which experts are chosen.
    pub router: Linear,
    pub experts: Vec<Mlp>,
    /// Experts that a row uses.
    pub used: usize,
    /// The expert of all rows.
    pub shared: Option<Shared>,
}

/// The expert of all rows, and its gate, a matrix of one row.
pub(in crate::engine) struct Shared {
    pub mlp: Mlp,
    pub gate: Linear,
}

impl Mlp {
    /// Bytes of its matrices.
    pub fn bytes(&self) -> usize {
        self.first().iter().map(|w| w.bytes()).sum::<usize>() + self.down.bytes()
    }

    /// What its input is multiplied by.
    pub fn first(&self) -> Vec<&Linear> {
        self.gate.iter().chain([&self.up]).collect()
    }
}

impl FeedForward {
    /// Bytes of its matrices that one row reads.
    pub fn bytes_of_a_row(&self) -> usize {
        match self {
            FeedForward::Dense(mlp) => mlp.bytes(),
            FeedForward::Experts(m) => {
                let all: usize = m.experts.iter().map(Mlp::bytes).sum();
                let shared = m.shared.as_ref().map_or(0, |s| s.mlp.bytes() + s.gate.bytes());
                m.router.bytes() + all / m.experts.len() * m.used + shared
            }
        }
    }
}
