//! Mixtures of experts: the choice of a router, and the sum of what the chosen experts give.

/// The `k` largest of `logits`, the lowest index among equals, largest first; and the weight of each by a softmax over these, or over
/// all.
pub fn route(logits: &[f32], k: usize, of_chosen: bool) -> Vec<(usize, f64)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Stable: equal logits stay in the order of their indices.
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let exp = |e: usize| f64::from(logits[e] - logits[order[0]]).exp();
    let over = if of_chosen { &order[..k] } else { &order[..] };
    let sum: f64 = over.iter().map(|&e| exp(e)).sum();
    order[..k].iter().map(|&e| (e, exp(e) / sum)).collect()
}

/// Σ w·expert(x) over the chosen experts, of which `expert` gives the output of one.
pub fn mix(chosen: &[(usize, f64)], mut expert: impl FnMut(usize) -> Vec<f64>) -> Vec<f64> {
    let mut sum: Vec<f64> = Vec::new();
    for &(e, w) in chosen {
        let y = expert(e);
        sum.resize(y.len(), 0.0);
        sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += w * y);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_are_chosen_and_weighed() {
        let logits = [1.0, 3.0, 3.0, 0.0];
        let (all, chosen) = (route(&logits, 2, false), route(&logits, 2, true));
        assert_eq!(chosen, [(1, 0.5), (2, 0.5)]);
        let sum = 2.0 + (-2f64).exp() + (-3f64).exp();
        assert_eq!(all.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 2]);
        assert!(all.iter().all(|c| (c.1 - 1.0 / sum).abs() < 1e-15));
        assert_eq!(mix(&chosen, |e| vec![e as f64, 2.0]), [1.5, 2.0]);
    }
}
