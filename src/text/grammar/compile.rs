//! Compiles grammars of strangers: within limits of steps and memory, on a thread with stack for the deepest of them.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};

use super::super::Tokenizer;
use super::guide::{Constraint, Mask};
use super::{Grammar, reason, vocabulary};
use crate::{Error, Result};

/// Most bytes of a grammar: schemas are bounded themselves, and a request may have many.
const MOST_BYTES: usize = 1 << 20;
/// Bytes of stack for the compiler, which recurses with the nesting of a grammar.
const STACK: usize = 64 << 20;
/// Steps of compiling take about 20 ms at most, those of one mask about 15 ms; a state of the lexer takes 1 to 2 kB. Real schemas
/// take a few hundredths of each.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 20_000, verbose_errors: false, ..ParserLimits::default() }
}

/// Compiles grammars for the tokens of one model. The tokens are prepared with the first grammar.
pub struct Grammars {
    tokenizer: Option<Arc<Tokenizer>>,
    vocab: usize,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

impl Grammars {
    /// For a model with a vocabulary of `vocab`, whose tokens the tokenizer knows.
    pub fn new(tokenizer: Option<Arc<Tokenizer>>, vocab: usize) -> Grammars {
        Grammars { tokenizer, vocab, factory: OnceLock::new() }
    }

    /// Compiles a grammar. Takes some milliseconds, with the first grammar some hundred.
    ///
    /// # Errors
    /// [`Error::Usage`] if the grammar is none, has something that cannot be enforced, is too large, or allows no answer;
    /// [`Error::Unsupported`] if the model has no tokenizer.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint> {
        if grammar.0.len() > MOST_BYTES {
            let n = grammar.0.len();
            return Err(Error::usage(format!("the grammar has {n} bytes, more than {MOST_BYTES}")));
        }
        let built = std::thread::scope(|scope| {
            let build = || self.build(grammar);
            let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, build);
            thread.map(std::thread::ScopedJoinHandle::join)
        });
        let built = built.map_err(|e| Error::Run(format!("no thread to compile a grammar: {e}")))?;
        built.unwrap_or_else(|panic| Err(Error::usage(reason(&said(&*panic)))))
    }

    fn build(&self, grammar: &Grammar) -> Result<Constraint> {
        let none = || Error::Unsupported("a model without a tokenizer has no texts of a form".into());
        let tokenizer = self.tokenizer.as_deref().ok_or_else(none)?;
        let factory = self.factory.get_or_init(|| prepare(tokenizer, self.vocab));
        let factory = factory.as_ref().map_err(|why| Error::format("tokenizer", why.clone()))?;
        let bad = |error: &dyn fmt::Display| Error::usage(reason(&error.to_string()));
        let parser = factory.create_parser(TopLevelGrammar::from_lark(grammar.0.clone()));
        let mut matcher = Matcher::new(Ok(parser.map_err(|e| bad(&e))?));
        // Some grammars that allow nothing, or take too many steps, are only found here.
        let first = matcher.compute_mask().map_err(|e| bad(&e))?;
        Ok(Constraint::new(matcher, Mask::new(first)))
    }
}

fn prepare(tokenizer: &Tokenizer, vocab: usize) -> Result<ParserFactory, String> {
    let factory = || {
        let tokens = vocabulary::environment(tokenizer, vocab);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        ParserFactory::new(&tokens, InferenceCapabilities::default(), &slices)
    };
    // A vocabulary is a stranger's, too.
    let factory = catch_unwind(AssertUnwindSafe(factory)).map_err(|panic| said(&*panic))?;
    let mut factory = factory.map_err(|e| reason(&e.to_string()))?;
    *factory.quiet().limits_mut() = limits();
    Ok(factory)
}

/// The message of a panic.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it cannot be compiled".into())
}
