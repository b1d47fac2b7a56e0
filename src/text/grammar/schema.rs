//! JSON schemas of strangers: bounded before anything is compiled.

use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// Most bytes of a schema. The largest in public use, those of medical records, have more, but no model writes them.
const MOST_BYTES: usize = 256 << 10;
/// Deepest nesting of a schema: each level of the compiler takes some stack.
const DEEPEST: usize = 64;
/// Space between the parts of JSON. Bounded: small models go on with blank lines for ever where any number of them is allowed.
const SPACE: &str = r"[ \n\r\t]{1,40}";

/// A schema as a part of a grammar.
///
/// # Errors
/// If it is no schema, too large or nested too deeply.
pub(super) fn rule(schema: &Value) -> Result<String> {
    let mut schema = match schema {
        Value::Object(fields) => fields.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err(Error::usage("no JSON has the schema `false`")),
        _ => return Err(Error::usage("a JSON schema is an object")),
    };
    // Options of the compiler, which are not the client's: some of them would leave out what cannot be enforced.
    schema.insert("x-guidance".into(), json!({ "whitespace_pattern": SPACE }));
    let schema = Value::Object(schema);
    if depth(&schema) > DEEPEST {
        return Err(Error::usage(format!("the schema is nested more than {DEEPEST} deep")));
    }
    let text = schema.to_string();
    if text.len() > MOST_BYTES {
        return Err(Error::usage(format!("the schema has {} bytes, more than {MOST_BYTES}", text.len())));
    }
    Ok(format!("%json {text}"))
}

/// Levels of lists and objects. The text was parsed, which bounds them.
fn depth(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => fields.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}
