//! Counting the choices of a model's routers over a text, on the CPU.

use crate::Result;
use crate::engine::{Engine, NewTokens, Options};
use crate::model::{ModelSpec, RouterProfile, Weights};
use crate::program::Wants;
use crate::simd::Isa;
use crate::{Error, text};

/// Most tokens that see each other.
const WINDOW: usize = 2048;

/// Rows of a step. All want logits, since the last layer computes no others, and those of a step are in memory at once.
const STEP: usize = 128;

/// Runs `tokens` through the model on the CPU, in windows of up to 2048 tokens that each begin with `beginning`, and counts what the
/// routers choose for all of these rows, those of `beginning` included. `progress` is called with the rows done so far.
///
/// # Errors
/// No tokens, or some that the model has not; a model without experts, or one that does not fit in memory.
pub fn record_router(
    (spec, weights): (&ModelSpec, &Weights),
    isa: Isa,
    beginning: &[u32],
    tokens: &[u32],
    progress: &dyn Fn(u64),
) -> Result<RouterProfile> {
    if spec.experts.is_none() {
        let why = format!("{} has no experts, so there are no choices of a router to count", spec.name);
        return Err(Error::usage(why));
    }
    text::check_tokens(beginning, spec.vocab)?;
    text::check_tokens(tokens, spec.vocab)?;
    let window = WINDOW.min(spec.max_context).min(beginning.len() + tokens.len());
    if tokens.is_empty() || window <= beginning.len() {
        return Err(Error::usage(format!(
            "{} tokens in a context of {}: nothing to count the choices of routers over",
            tokens.len(),
            spec.max_context
        )));
    }
    let options = Options { chunk: STEP, logits: STEP, ..Options::new(isa, window) };
    let mut engine = Engine::new(spec.clone(), weights, &options, &|_| ())?;
    engine.count_choices();
    let mut done = 0;
    for part in tokens.chunks(window - beginning.len()) {
        let id = engine.add();
        for step in [beginning, part].concat().chunks(STEP) {
            engine.forward(&[NewTokens { id, tokens: step, wants: Wants::All }])?;
            done += step.len() as u64;
            progress(done);
        }
        engine.remove(id);
    }
    Ok(engine.choices().expect("it counts, and the model has experts"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::load;

    /// That the counts are right is for tests/models/router.rs; this is about windows and steps.
    #[test]
    fn every_token_adds_its_choices_in_every_layer() {
        for name in ["tiny-qwen3-moe", "tiny-qwen2-moe,layers=3"] {
            let model = load(&format!("synth:{name},dtype=f32")).unwrap();
            let spec = &model.spec;
            let tokens: Vec<u32> = (0..300).map(|i| (i * 37 + 11) % spec.vocab as u32).collect();
            let count = |tokens: &[u32]| {
                record_router((spec, &model.weights), Isa::Reference, &[], tokens, &|_| ()).unwrap()
            };
            let all = count(&tokens);
            all.check("counted", spec).unwrap();
            assert_eq!(all.tokens, 300);
            for (layer, of) in all.layers.iter().enumerate() {
                let k = if spec.experts_of(layer).is_some() { all.used as u64 } else { 0 };
                assert_eq!(of.counts.iter().sum::<u64>(), 300 * k, "{name} layer {layer}");
                // Three steps, whose first rows are compared with none.
                assert_eq!(of.followers, if k > 0 { 297 } else { 0 });
            }
            // Choices of a row depend on the rows before it alone, so those of one more token are added.
            let (some, more) = (count(&tokens[..40]), count(&tokens[..41]));
            for (some, more) in some.layers.iter().zip(&more.layers) {
                let added: Vec<u64> = more.counts.iter().zip(&some.counts).map(|(m, s)| m - s).collect();
                assert!(added.iter().all(|&n| n <= 1));
                let k = if added.is_empty() { 0 } else { all.used as u64 };
                assert_eq!(added.iter().sum::<u64>(), k);
                assert_eq!(more.followers - some.followers, if k > 0 { 1 } else { 0 });
                assert!(more.repeated - some.repeated <= k);
            }
        }
    }

    #[test]
    fn windows_begin_as_texts_do() {
        let model = load("synth:tiny-qwen3-moe").unwrap();
        let spec = &model.spec;
        let done = std::cell::Cell::new(0);
        let tokens: Vec<u32> = (0..600).map(|i| i * 7 % spec.vocab as u32).collect();
        let isa = Isa::selected().unwrap();
        let p = record_router((spec, &model.weights), isa, &[1, 2], &tokens, &|n| done.set(n)).unwrap();
        // 510 + 90 tokens, 2 in front of each part.
        assert_eq!((p.tokens, done.get()), (604, 604));
        assert_eq!(p.layers[0].followers, 604 - 5);
        let said = |beginning: &[u32], tokens: &[u32]| {
            let of = record_router((spec, &model.weights), isa, beginning, tokens, &|_| ());
            of.unwrap_err().to_string()
        };
        assert!(said(&[1], &[]).contains("0 tokens in a context of 512"));
        assert!(said(&[], &[512]).contains("gives token 512, the model has 512"));
        let dense = load("synth:tiny-llama").unwrap();
        let of = record_router((&dense.spec, &dense.weights), isa, &[], &[1], &|_| ());
        assert!(of.unwrap_err().to_string().contains("tiny-llama has no experts"));
    }
}
