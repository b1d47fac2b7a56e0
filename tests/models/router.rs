//! The choices of routers as the engine counts them, against a recount in f64.

use crate::families::decided;
use crate::support::{models, naive_model};
use tandem::engine::{NewTokens, Options};
use tandem::model::{LoadedModel, RouterCounts, RouterProfile};
use tandem::program::Wants;
use tandem::simd::Isa;
use tandem::tensor::Half;

const TOKENS: usize = 16;

/// What `rows` consecutive rows of a sequence add.
fn recount(of: &mut RouterCounts, rows: &[Vec<usize>]) {
    for (i, row) in rows.iter().enumerate() {
        row.iter().for_each(|&e| of.counts[e] += 1);
        if i > 0 {
            of.followers += 1;
            of.repeated += row.iter().filter(|e| rows[i - 1].contains(e)).count() as u64;
        }
    }
}

fn tokens(m: &LoadedModel) -> Vec<u32> {
    (0..TOKENS).map(|i| (i * i * 31 + i * 7 + 3) as u32 % m.spec.vocab as u32).collect()
}

/// Two sequences whose rows are in one step, one of them divided between two; nothing of before counting began.
#[test]
fn choices_are_counted_as_they_are_made() {
    for name in ["tiny-qwen3-moe", "tiny-qwen2-moe,layers=3", "tiny-granite-moe"] {
        // No tier above: their products round more, and might choose otherwise.
        let m = decided(name, false, &|_| ());
        let tokens = tokens(&m);
        let mut options = Options::new(Isa::Reference, TOKENS);
        (options.sequences, options.logits, options.threads) = (3, 2 * TOKENS, Some(2));
        let mut e = models::engine(&m, &options);
        let [before, a, b] = [e.add(), e.add(), e.add()];
        let rows = |id, tokens| NewTokens { id, tokens, wants: Wants::All };
        e.forward(&[rows(before, &tokens[..5])]).unwrap();
        assert_eq!(e.choices(), None);
        e.count_choices();
        e.forward(&[rows(a, &tokens[..10]), rows(b, &tokens)]).unwrap();
        e.forward(&[rows(a, &tokens[10..])]).unwrap();
        let found = e.choices().unwrap();
        let mut want = RouterProfile::empty(m.spec.experts.as_ref().unwrap());
        want.tokens = 2 * TOKENS as u64;
        let chosen = naive_model::choices(&m.spec, &m.weights, Half::BF16, &tokens);
        for (of, rows) in want.layers.iter_mut().zip(&chosen) {
            for part in [&rows[..], &rows[..rows.len().min(10)], &rows[rows.len().min(10)..]] {
                recount(of, part);
            }
        }
        assert_eq!(found, want, "{name}");
        found.check(name, &m.spec).unwrap();
        assert!(found.layers.iter().any(|l| l.repeated > 0), "{name}: {found:?}");
        // The last layer computes no rows that want no logits.
        e.count_choices();
        e.remove(b);
        let c = e.add();
        e.forward(&[NewTokens { id: c, tokens: &tokens, wants: Wants::Last }]).unwrap();
        let found = e.choices().unwrap();
        let last = found.layers.len() - 1;
        assert_eq!(found.tokens, TOKENS as u64, "{name}: counted anew");
        assert_eq!((found.tokens_of(last), found.layers[last].followers), (1, 0), "{name}");
    }
}
