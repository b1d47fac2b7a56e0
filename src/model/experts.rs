//! Mixtures of experts: their sizes, and how a router weighs the experts that it chooses.

use crate::{Error, Result};

/// The experts of a model, which some or all of its layers have in place of a dense feed-forward.
///
/// ```text
/// l = router x       the k largest of E logits are chosen       y = Σ_j w_j·expert_j(x)  (+ σ(g·x)·shared(x))
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// E, experts of a layer.
    pub count: usize,
    /// k, experts that a row uses.
    pub used: usize,
    /// Width of an expert.
    pub d_ff: usize,
    /// Width of an expert that every row uses besides, its output multiplied by a sigmoid gate (Qwen2-MoE).
    pub shared: Option<usize>,
    /// Whether the router and the matrices of experts have biases (gpt-oss).
    pub biases: bool,
    /// The factors of the chosen experts' outputs.
    pub weights: RouterWeights,
    /// For each layer, whether it has experts.
    pub layers: Vec<bool>,
}

/// What the softmax of a router's logits is taken over. The same experts are chosen either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouterWeights {
    /// All E: the k weights add up to less than 1.
    OfAll,
    /// The k chosen ones. A softmax over all whose k largest are divided by their sum is the same.
    OfChosen,
}

/// Most experts of a layer: twice as many as any released model has.
const MAX_EXPERTS: usize = 1024;
/// Most experts of all layers: each has tensors with names, before any of their bytes are there.
const MAX_IN_ALL: usize = 1 << 15;

impl Experts {
    /// Checks the sizes on their own, for a model of `n_layers`.
    ///
    /// # Errors
    /// The first impossible size.
    pub(super) fn check(&self, n_layers: usize) -> Result<()> {
        let limits = [
            ("expert count", self.count, MAX_EXPERTS),
            ("experts of a row", self.used, self.count),
            ("width of an expert", self.d_ff, 1 << 20),
            ("width of the shared expert", self.shared.unwrap_or(1), 1 << 20),
        ];
        for (what, n, most) in limits {
            if n == 0 || n > most {
                return Err(Error::format(what, format!("{n} is outside 1..={most}; is the file damaged?")));
            }
        }
        if self.layers.len() != n_layers {
            return Err(Error::format(
                "experts",
                format!("listed for {} of {n_layers} layers", self.layers.len()),
            ));
        }
        let all = self.count * self.layers.iter().filter(|&&l| l).count();
        if all > MAX_IN_ALL {
            return Err(Error::format(
                "experts",
                format!("{all} in all layers, at most {MAX_IN_ALL} are possible"),
            ));
        }
        Ok(())
    }

    /// Expected number of different experts of a layer that `rows` rows use, each expert as likely as any other:
    /// D(B) = E·(1 − (1 − k/E)^B).
    pub fn distinct(&self, rows: u64) -> f64 {
        self.count as f64 * share_read(self.count, self.used, rows)
    }
}

/// Expected number of different ones of `count` experts that `rows` rows use, of which a row uses `uses` in the mean, each as likely as
/// any other.
pub fn distinct(count: usize, uses: f64, rows: u64) -> f64 {
    let count = count as f64;
    count * (1.0 - (1.0 - uses / count.max(1.0)).max(0.0).powf(rows as f64))
}

/// The share of `count` experts that `rows` rows read, each row `used` of them, each expert as likely as any other.
pub fn share_read(count: usize, used: usize, rows: u64) -> f64 {
    1.0 - (1.0 - used as f64 / count as f64).powf(rows as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(count: usize, used: usize) -> Experts {
        let weights = RouterWeights::OfChosen;
        Experts { count, used, d_ff: 64, shared: None, biases: false, weights, layers: vec![true; 2] }
    }

    #[test]
    fn impossible_sizes_are_named() {
        experts(8, 2).check(2).unwrap();
        for (e, layers, want) in [
            (experts(0, 0), 2, "expert count: 0 is outside 1..=1024"),
            (experts(1_000_000_000, 8), 2, "expert count: 1000000000"),
            (experts(8, 9), 2, "experts of a row: 9 is outside 1..=8"),
            (experts(8, 0), 2, "experts of a row: 0"),
            (experts(8, 2), 3, "listed for 2 of 3 layers"),
            (Experts { d_ff: 0, ..experts(8, 2) }, 2, "width of an expert: 0"),
            (Experts { shared: Some(0), ..experts(8, 2) }, 2, "width of the shared expert: 0"),
            (Experts { layers: vec![true; 100], ..experts(1024, 2) }, 100, "102400 in all layers"),
        ] {
            let found = e.check(layers).unwrap_err().to_string();
            assert!(found.contains(want), "{found}");
        }
    }

    #[test]
    fn few_rows_share_few_experts_and_many_use_all() {
        let e = experts(128, 8);
        for (rows, want) in
            [(0, 0.0), (1, 8.0), (2, 15.5), (4, 29.1), (8, 51.6), (64, 125.9), (100_000, 128.0)]
        {
            assert!((e.distinct(rows) - want).abs() < 0.06, "{rows}: {}", e.distinct(rows));
        }
    }
}
