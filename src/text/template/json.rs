//! JSON as templates see it: objects keep the order of their keys, and 1.0 stays apart from 1.

use std::fmt;

use minijinja::value::Value;
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

/// A value for a template: a variable, a tool, a field of a message.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`, Python's `None`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number without a fraction or an exponent.
    Whole(i64),
    /// One that is larger than those.
    Large(u64),
    /// Any other number.
    Real(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Json>),
    /// An object. Of equal keys the last value counts, at the place of the first, as in Python.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        if let Json::Text(text) = self { Some(text) } else { None }
    }

    /// The value of an object's key.
    pub fn get(&self, key: &str) -> Option<&Json> {
        let Json::Object(entries) = self else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The value of an object's key, to be changed.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Json> {
        let Json::Object(entries) = self else { return None };
        entries.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// The entries of a list; none of anything else.
    pub fn list(&self) -> &[Json] {
        if let Json::List(list) = self { list } else { &[] }
    }

    /// Bytes of its texts.
    pub(super) fn size(&self) -> usize {
        match self {
            Json::Text(text) => text.len(),
            Json::List(list) => list.iter().map(Json::size).sum(),
            Json::Object(entries) => entries.iter().map(|(key, value)| key.len() + value.size()).sum(),
            _ => 8,
        }
    }

    /// For the template engine.
    pub(super) fn value(&self) -> Value {
        match self {
            Json::Null => Value::from(()),
            Json::Bool(b) => Value::from(*b),
            Json::Whole(n) => Value::from(*n),
            Json::Large(n) => Value::from(*n),
            Json::Real(x) => Value::from(*x),
            Json::Text(text) => Value::from(text.as_str()),
            Json::List(list) => list.iter().map(Json::value).collect(),
            Json::Object(entries) => {
                Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), value.value())))
            }
        }
    }
}

/// Puts a value in an object, as Python does: a key that is there keeps its place.
pub(super) fn put(entries: &mut Vec<(String, Json)>, key: String, value: Json) {
    match entries.iter_mut().find(|(name, _)| *name == key) {
        Some((_, old)) => *old = value,
        None => entries.push((key, value)),
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Json {
        Json::Text(text.to_owned())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Null => to.serialize_unit(),
            Json::Bool(b) => to.serialize_bool(*b),
            Json::Whole(n) => to.serialize_i64(*n),
            Json::Large(n) => to.serialize_u64(*n),
            Json::Real(x) => to.serialize_f64(*x),
            Json::Text(text) => to.serialize_str(text),
            Json::List(list) => to.collect_seq(list),
            Json::Object(entries) => {
                let mut map = to.serialize_map(Some(entries.len()))?;
                entries.iter().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Json, D::Error> {
        from.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E: de::Error>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }
    fn visit_bool<E: de::Error>(self, b: bool) -> Result<Json, E> {
        Ok(Json::Bool(b))
    }
    fn visit_i64<E: de::Error>(self, n: i64) -> Result<Json, E> {
        Ok(Json::Whole(n))
    }
    fn visit_u64<E: de::Error>(self, n: u64) -> Result<Json, E> {
        Ok(i64::try_from(n).map_or(Json::Large(n), Json::Whole))
    }
    fn visit_f64<E: de::Error>(self, x: f64) -> Result<Json, E> {
        Ok(Json::Real(x))
    }
    fn visit_str<E: de::Error>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.to_owned()))
    }
    fn visit_string<E: de::Error>(self, text: String) -> Result<Json, E> {
        Ok(Json::Text(text))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        // A set of the keys, so that many of them take no time squared.
        let mut places = std::collections::HashMap::new();
        let mut entries: Vec<(String, Json)> = Vec::new();
        while let Some((key, value)) = items.next_entry::<String, Json>()? {
            match places.get(&key) {
                Some(&place) => entries[place] = (key, value),
                None => {
                    places.insert(key.clone(), entries.len());
                    entries.push((key, value));
                }
            }
        }
        Ok(Json::Object(entries))
    }
}
