//! The choice of a router.

use super::RouterWeights;

/// Writes the largest of `logits`, as many as `ids` has, largest first and the lowest index among equals, and their weights, f32 as all
/// sides compute them.
///
/// Logits that are no numbers are chosen last, and make weights that are none.
pub fn route(logits: &[f32], of: RouterWeights, ids: &mut [u32], weights: &mut [f32]) {
    let used = ids.len();
    let key = |e: usize| if logits[e].is_nan() { f32::NEG_INFINITY } else { logits[e] };
    for e in 0..logits.len() {
        // The first place whose expert has less; equals stay in front.
        let filled = e.min(used);
        let place = ids[..filled].iter().rposition(|&id| key(id as usize) >= key(e)).map_or(0, |p| p + 1);
        if place < used {
            ids.copy_within(place..filled.min(used - 1), place + 1);
            ids[place] = e as u32;
        }
    }
    let most = logits[ids[0] as usize];
    let exp = |e: usize| (logits[e] - most).exp();
    let sum: f32 = match of {
        RouterWeights::OfAll => (0..logits.len()).map(exp).sum(),
        RouterWeights::OfChosen => ids.iter().map(|&e| exp(e as usize)).sum(),
    };
    for (w, &e) in weights.iter_mut().zip(&*ids) {
        *w = exp(e as usize) / sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_choice_is_the_references(
            // Few values, so that many are equal.
            logits in prop::collection::vec((-8i8..8).prop_map(|x| f32::from(x) / 3.0), 1..80),
            k in 1usize..80,
            of_chosen: bool,
        ) {
            let k = k.min(logits.len());
            let of = if of_chosen { RouterWeights::OfChosen } else { RouterWeights::OfAll };
            let (mut ids, mut weights) = (vec![7777; k], vec![0.0; k]);
            route(&logits, of, &mut ids, &mut weights);
            let want = reference::route(&logits, k, of_chosen);
            let chosen: Vec<usize> = want.iter().map(|c| c.0).collect();
            prop_assert_eq!(ids.iter().map(|&e| e as usize).collect::<Vec<_>>(), chosen);
            for (w, (_, want)) in weights.iter().zip(want) {
                prop_assert!((f64::from(*w) - want).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn what_is_no_number_chooses_experts_that_exist() {
        for logits in [vec![f32::NAN; 5], vec![f32::NAN, 1.0, f32::INFINITY, f32::NEG_INFINITY, 2.0]] {
            let (mut ids, mut weights) = ([9; 3], [0.0; 3]);
            route(&logits, RouterWeights::OfAll, &mut ids, &mut weights);
            assert!(ids.iter().all(|&e| e < 5), "{ids:?}");
            assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
            assert!(weights.iter().any(|w| w.is_nan()));
        }
    }
}
