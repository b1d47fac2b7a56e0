//! The form that answers are asked to have: `--json-schema`, `--grammar`.

use std::path::Path;
use std::sync::Arc;

use tandem::text::{Constraint, Content, Grammar, Grammars, Shape, Thinking, Tokenizer};
use tandem::{Error, Result};

use crate::cli::prompt;

/// The options.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct FormArgs {
    /// Answer with JSON of this schema: the schema itself, or a file.
    #[arg(long, value_name = "JSON|FILE", conflicts_with = "grammar")]
    pub json_schema: Option<String>,
    /// Answer with a text of this grammar, in llguidance's dialect of Lark: the grammar itself, or a file.
    #[arg(long, value_name = "LARK|FILE")]
    pub grammar: Option<String>,
}

impl FormArgs {
    /// The form, for the tokens of a model; JSON may come behind this reasoning.
    ///
    /// # Errors
    /// A schema or grammar that cannot be read or enforced.
    pub fn constraint(
        &self,
        tokenizer: Option<&Arc<Tokenizer>>,
        vocab: usize,
        thinking: Thinking,
    ) -> Result<Option<Constraint>> {
        let (flag, grammar) = match (&self.json_schema, &self.grammar) {
            (Some(schema), _) => ("--json-schema", schema_of(schema, thinking)),
            (None, Some(grammar)) => {
                ("--grammar", text(grammar, |text| text.contains("start:")).map(Grammar::lark))
            }
            (None, None) => return Ok(None),
        };
        let compile = |grammar: Grammar| Grammars::new(tokenizer.cloned(), vocab).compile(&grammar);
        let named = |e: Error| match e {
            Error::Usage(why) => Error::Usage(format!("{flag}: {why}")),
            other => other,
        };
        grammar.and_then(compile).map(Some).map_err(named)
    }
}

fn schema_of(given: &str, thinking: Thinking) -> Result<Grammar> {
    let text = text(given, |text| text.trim_start().starts_with('{'))?;
    let schema = serde_json::from_str(&text).map_err(|e| Error::usage(format!("no JSON: {e}")))?;
    Shape { thinking, content: Content::Schema(schema), calls: None }.grammar()
}

/// What is given, or what the file of this name has.
fn text(given: &str, is_itself: impl Fn(&str) -> bool) -> Result<String> {
    if is_itself(given) { Ok(given.to_owned()) } else { prompt::read_file(Path::new(given)) }
}
