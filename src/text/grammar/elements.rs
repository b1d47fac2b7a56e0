//! Calls whose arguments are elements (Qwen3-Coder). Parameters come in the order of the schema.

use serde_json::{Map, Value, json};

use super::super::calls::is_text;
use super::schema;
use crate::{Error, Result};

/// What the schema of arguments may say, beside its properties, so that each of them is a schema of its own.
const OF_OBJECT: [&str; 10] = [
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
    "title",
    "description",
    "strict",
];
/// What the schema of a text may say.
const OF_TEXT: [&str; 9] =
    ["type", "enum", "const", "minLength", "maxLength", "title", "description", "default", "examples"];

/// Adds the rules of a call of function `i`; returns what stands between the markers.
///
/// # Errors
/// If a schema is none, or says what cannot be enforced of elements.
pub(super) fn call(i: usize, name: &str, parameters: &Value, rules: &mut Vec<String>) -> Result<String> {
    let function = json!(format!("<function={name}>"));
    let of = parameters.as_object().ok_or_else(|| Error::usage("a JSON schema is an object"))?;
    if let Some(key) = of.keys().find(|key| !OF_OBJECT.contains(&key.as_str())) {
        return Err(refused(key));
    }
    if of.get("type").is_some_and(|kind| kind != "object") {
        return Err(Error::usage("arguments are an object"));
    }
    let empty = Map::new();
    let properties = of.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    let required: Vec<&str> = of
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
        return Err(Error::usage(format!("{name} is required and is none of the properties")));
    }
    let mut all = String::new();
    for (j, (name, own)) in properties.iter().enumerate() {
        if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c)) {
            return Err(Error::Unsupported(format!("a parameter named {name:?}, as an element")));
        }
        let value = match is_text(own) {
            true => text(&format!("text_{i}_{j}"), own, rules)?,
            false => {
                rules.push(format!("value_{i}_{j}: {}", schema::rule(&with_definitions(own, of))?));
                format!("ws? value_{i}_{j} ws? \"</parameter>\"")
            }
        };
        rules.push(format!("parameter_{i}_{j}: {} {value} ws?", json!(format!("<parameter={name}>"))));
        let optional = if required.contains(&name.as_str()) { "" } else { "?" };
        all += &format!(" parameter_{i}_{j}{optional}");
    }
    Ok(format!("{function} ws?{all} \"</function>\""))
}

/// A text between line ends, and the tag behind it.
fn text(rule: &str, of: &Value, rules: &mut Vec<String>) -> Result<String> {
    if let Some(key) =
        of.as_object().into_iter().flat_map(Map::keys).find(|key| !OF_TEXT.contains(&key.as_str()))
    {
        return Err(refused(key));
    }
    let listed =
        of.get("enum").and_then(Value::as_array).cloned().or_else(|| Some(vec![of.get("const")?.clone()]));
    if let Some(values) = listed {
        let texts: Vec<String> = values
            .iter()
            .filter_map(Value::as_str)
            .map(|value| json!(format!("\n{value}\n</parameter>")).to_string())
            .collect();
        return match texts.is_empty() {
            true => Err(Error::usage("no text is allowed")),
            false => Ok(format!("({})", texts.join(" | "))),
        };
    }
    let length = |key: &str| {
        of.get(key).map(|n| n.as_u64().ok_or_else(|| Error::usage(format!("{key}: a number is wanted"))))
    };
    let (least, most) = (length("minLength").transpose()?, length("maxLength").transpose()?);
    let times = match (least, most) {
        (None, None) => "*".to_owned(),
        (least, most) => {
            format!("{{{},{}}}", least.unwrap_or(0), most.map(|n| n.to_string()).unwrap_or_default())
        }
    };
    // A lazy lexeme ends with the first tag.
    rules.push(format!("{rule}[lazy]: /\\n(.|\\n){times}\\n<\\/parameter>/"));
    Ok(rule.to_owned())
}

/// A property's schema, with the definitions that it may refer to.
fn with_definitions(own: &Value, of: &Map<String, Value>) -> Value {
    let mut own = own.clone();
    if let Value::Object(fields) = &mut own {
        for key in ["$defs", "definitions"] {
            if let Some(all) = of.get(key) {
                fields.entry(key).or_insert_with(|| all.clone());
            }
        }
    }
    own
}

fn refused(key: &str) -> Error {
    Error::Unsupported(format!(
        "{key} cannot be enforced where arguments are elements, as this model writes them"
    ))
}
