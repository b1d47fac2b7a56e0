//! A model on the CPU: what its tokens may be.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::support::{models, naive_model, rounding};
use tandem::cache::KvType;
use tandem::engine::{Engine, NewTokens, Options};
use tandem::open::Model;
use tandem::program::Wants;
use tandem::progress::Silent;
use tandem::simd::Isa;

/// Longer than any text of a case.
const CONTEXT: usize = 128;

pub struct Judge {
    pub model: Model,
    /// By the type of keys and values.
    engines: RefCell<HashMap<KvType, Engine>>,
}

impl Judge {
    pub fn of(name: &str) -> Judge {
        Judge { model: Model::open(name, &Silent).expect("a model"), engines: RefCell::default() }
    }

    fn vocab(&self) -> usize {
        self.model.loaded.spec.vocab
    }

    /// A prompt of `n` tokens.
    pub fn prompt(&self, n: usize, seed: usize) -> Vec<u32> {
        (0..n).map(|i| ((i * i * 31 + i * 7 + seed * 13 + 3) % self.vocab()) as u32).collect()
    }

    /// Whether rounding cannot choose other experts after these tokens; a dense model has no choice.
    fn is_sure(&self, kv: KvType, tokens: &[u32]) -> bool {
        let loaded = &self.model.loaded;
        loaded.spec.experts.is_none()
            || naive_model::closest_choice(&loaded.spec, &loaded.weights, kv, tokens) > self.bound(kv)
    }

    /// The CPU's rows of logits behind the prompt and behind each of `answer`'s tokens.
    fn rows(&self, kv: KvType, prompt: &[u32], answer: &[u32]) -> Vec<Vec<f32>> {
        let mut engines = self.engines.borrow_mut();
        let engine = engines.entry(kv).or_insert_with(|| {
            let options = Options { kv_dtype: kv, threads: Some(1), ..Options::new(Isa::best(), CONTEXT) };
            models::engine(&self.model.loaded, &options)
        });
        let seq = engine.add();
        let mut rows = vec![engine.prefill(seq, prompt, |_| ()).expect("it fits")];
        for token in answer {
            let input = NewTokens { id: seq, tokens: std::slice::from_ref(token), wants: Wants::Last };
            rows.push(engine.forward(&[input]).expect("it fits").to_vec());
        }
        engine.remove(seq);
        rows
    }

    /// How far an engine's rows may be from the CPU's, which may compute a part of them.
    fn bound(&self, kv: KvType) -> f64 {
        let loaded = &self.model.loaded;
        let cpu = rounding::cpu(&loaded.spec, kv, true) + rounding::activations(loaded, Isa::best());
        cpu + rounding::accelerator(&loaded.spec, kv, true)
    }

    /// Whether these are the model's rows of logits behind the prompt, and behind each of these tokens.
    pub fn check_rows(
        &self,
        kv: KvType,
        prompt: &[u32],
        answer: &[u32],
        got: &[Vec<f32>],
    ) -> Result<(), String> {
        let bound = self.bound(kv);
        for (i, (got, want)) in got.iter().zip(self.rows(kv, prompt, answer)).enumerate() {
            let off = models::distance(got, &want).0;
            // Behind a near tie of experts either choice is right.
            if off > bound && self.is_sure(kv, &[prompt, &answer[..i]].concat()) {
                return Err(format!(
                    "row {i} is {off:.2e} standard deviations from the CPU's, at most {bound:.2e}"
                ));
            }
        }
        Ok(())
    }

    /// Whether each of these tokens could be the likeliest behind those before it.
    pub fn check_tokens(&self, kv: KvType, prompt: &[u32], answer: &[u32]) -> Result<(), String> {
        let most = 3.0 * self.bound(kv);
        for (i, (&token, row)) in answer.iter().zip(self.rows(kv, prompt, answer)).enumerate() {
            let (best, _, std) = rounding::lead(&row);
            let behind = f64::from(row[best as usize] - row[token as usize]) / std;
            if behind > most {
                return Err(format!(
                    "token {i}, {token}, is {behind:.2} standard deviations behind {best}, at most {most:.2}"
                ));
            }
        }
        Ok(())
    }
}
