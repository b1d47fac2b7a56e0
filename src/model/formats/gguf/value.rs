//! GGUF metadata values.

use std::collections::BTreeMap;

/// One metadata value. Arrays are homogeneous.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any unsigned integer type.
    Uint(u64),
    /// Any signed integer type.
    Int(i64),
    /// f32 or f64.
    Float(f64),
    /// bool.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// Array of unsigned or signed integers (u8..i64) or bools.
    IntArray(Vec<i64>),
    /// Array of f32/f64.
    FloatArray(Vec<f32>),
    /// Array of strings.
    StringArray(Vec<String>),
    /// Array of arrays (rare).
    NestedArray(Vec<Value>),
}

impl Value {
    /// As an unsigned integer, if it is a non-negative one.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::Uint(v) => Some(v),
            Value::Int(v) => v.try_into().ok(),
            _ => None,
        }
    }
    /// As a float (integers convert).
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::Float(v) => Some(v),
            Value::Uint(v) => Some(v as f64),
            Value::Int(v) => Some(v as f64),
            _ => None,
        }
    }
    /// As a bool.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(b) = self { Some(*b) } else { None }
    }
    /// As text.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(s) = self { Some(s) } else { None }
    }
    /// As a list of strings.
    pub fn as_strings(&self) -> Option<&[String]> {
        if let Value::StringArray(s) = self { Some(s) } else { None }
    }
    /// As a list of floats.
    pub fn as_floats(&self) -> Option<&[f32]> {
        if let Value::FloatArray(s) = self { Some(s) } else { None }
    }
    /// As a list of integers.
    pub fn as_ints(&self) -> Option<&[i64]> {
        if let Value::IntArray(s) = self { Some(s) } else { None }
    }
}

/// Metadata by key.
pub type Metadata = BTreeMap<String, Value>;
