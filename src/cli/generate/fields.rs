//! Reads the fields of a JSON object one by one, each of the type that it must have, and says in a sentence what is wrong.

use std::ops::RangeBounds;

use serde_json::{Map, Value};
use tandem::text::Json;

use super::neutral;

/// Fields that have not been read yet, and all fields with their order.
pub struct Fields<'a>(pub Map<String, Value>, pub &'a Json);

impl Fields<'_> {
    /// A list of objects for the template; an empty one is none.
    pub fn objects(&mut self, name: &str) -> Result<Option<Json>, String> {
        match self.0.remove(name) {
            None => Ok(None),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) if list.iter().all(Value::is_object) => Ok(self.1.get(name).cloned()),
            Some(other) => Err(format!("{name}: {} where a list of objects is wanted", kind(&other))),
        }
    }

    /// A text, or a list of texts.
    pub fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, String> {
        let wrong = || format!("{name}: a text, or a list of texts that are not empty, is wanted");
        let text = |v: &Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_owned).ok_or_else(wrong);
        match self.0.remove(name) {
            None => Ok(None),
            Some(Value::Array(list)) => list.iter().map(text).collect::<Result<_, _>>().map(Some),
            Some(one) => Ok(Some(vec![text(&one)?])),
        }
    }

    /// A list of token ids.
    pub fn tokens(&mut self, name: &str) -> Result<Option<Vec<u32>>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        let ids = value.as_array().and_then(|list| {
            list.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<u32>>>()
        });
        ids.map(Some).ok_or_else(|| format!("{name}: {}, a list of token ids is wanted", shown(&value)))
    }

    /// A number in a range, in words `wanted`.
    pub fn real(
        &mut self,
        name: &str,
        range: impl RangeBounds<f32>,
        wanted: &str,
    ) -> Result<Option<f64>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        match value.as_f64().filter(|&x| range.contains(&(x as f32))) {
            Some(x) => Ok(Some(x)),
            None => Err(format!("{name}: {}, a number ({wanted}) is wanted", shown(&value))),
        }
    }

    /// A target of latency.
    pub fn seconds(&mut self, name: &str) -> Result<Option<f64>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        match value.as_f64().filter(|&x| x > 0.0 && x.is_finite()) {
            Some(x) => Ok(Some(x)),
            None => Err(format!("{name}: {}, a number of seconds above 0 is wanted", shown(&value))),
        }
    }

    /// A whole number from `least` to `most`.
    pub fn whole(&mut self, name: &str, least: i64, most: i64) -> Result<Option<i64>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        match value.as_i64().filter(|n| (least..=most).contains(n)) {
            Some(n) => Ok(Some(n)),
            None => Err(format!("{name}: {}, a whole number from {least} is wanted", shown(&value))),
        }
    }

    /// True or false.
    pub fn flag(&mut self, name: &str) -> Result<Option<bool>, String> {
        let Some(value) = self.0.remove(name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| format!("{name}: {}, true or false is wanted", shown(&value)))
    }

    /// The name that is present, of several names of one setting.
    pub fn one_of<'n>(&self, names: &[&'n str]) -> Result<&'n str, String> {
        let mut present = names.iter().filter(|name| self.0.contains_key(**name));
        match (present.next(), present.next()) {
            (Some(one), Some(other)) => Err(format!("both {one} and {other}, which mean the same")),
            (Some(one), None) => Ok(one),
            _ => Ok(names[0]),
        }
    }

    /// Reads a setting for which only some values are supported.
    pub fn only(&mut self, name: &str, can: &[&str]) -> Result<(), String> {
        let Some(value) = self.0.remove(name) else { return Ok(()) };
        if can.iter().any(|can| neutral::is(&value, can)) {
            return Ok(());
        }
        let value = shown(&value);
        Err(match can.is_empty() {
            true => format!("{name}: {value}, which cannot be had here; leave it out"),
            false => format!("{name}: {value}, only {} can be", can.join(" or ")),
        })
    }
}

/// A value for a message, which may be long.
pub fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}

/// What a value is, for a message.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(list) if list.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
