//! GGUF metadata values.
//!
//! An array stays as the file encodes it and is decoded where it is used: a vocabulary has megabytes of strings, and a file
//! may hold arrays of any size under keys that nobody reads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use crate::tensor::Bytes;

/// One metadata value.
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
    /// Text that is not UTF-8.
    Bytes(Vec<u8>),
    /// Homogeneous elements.
    Array(Array),
}

impl Value {
    /// An array of integers: of 32 bits if they fit, the only ones that llama.cpp takes for lists of layers.
    pub fn ints(items: &[i64]) -> Value {
        let narrow: Result<Vec<i32>, _> = items.iter().map(|&i| i32::try_from(i)).collect();
        Value::Array(match narrow {
            Ok(items) => Array::new(5, &items, |out, i| out.extend(i.to_le_bytes())),
            Err(_) => Array::new(11, items, |out, i| out.extend(i.to_le_bytes())),
        })
    }
    /// An array of floats.
    pub fn floats(items: &[f32]) -> Value {
        Value::Array(Array::new(6, items, |out, f| out.extend(f.to_le_bytes())))
    }
    /// An array of strings.
    pub fn strings(items: &[impl AsRef<[u8]>]) -> Value {
        Value::Array(Array::new(8, items, |out, s| {
            out.extend((s.as_ref().len() as u64).to_le_bytes());
            out.extend_from_slice(s.as_ref());
        }))
    }
    /// An array of arrays.
    #[cfg(test)]
    pub(super) fn arrays(items: &[Value]) -> Value {
        Value::Array(Array::new(9, items, |out, a| a.as_array().expect("arrays").write(out)))
    }

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
    /// As text, if it is UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::String(s) = self { Some(s) } else { None }
    }
    /// As text, with U+FFFD for what is not UTF-8: for names and remarks.
    pub fn as_lossy_str(&self) -> Option<Cow<'_, str>> {
        match self {
            Value::String(s) => Some(Cow::Borrowed(s)),
            Value::Bytes(b) => Some(String::from_utf8_lossy(b)),
            _ => None,
        }
    }
    /// As an array.
    pub fn as_array(&self) -> Option<&Array> {
        if let Value::Array(a) = self { Some(a) } else { None }
    }
}

/// An array of a file, or one made by [`Value::ints`] and its like. Every element has been checked to lie within it.
#[derive(Clone)]
pub struct Array {
    /// The format's number of the element type.
    kind: u32,
    len: usize,
    /// The elements as they are encoded, without the array's own type and length.
    items: Bytes,
}

impl Array {
    /// `items` holds `len` elements of type `kind`.
    pub(super) fn of_file(kind: u32, len: usize, items: Bytes) -> Array {
        Array { kind, len, items }
    }

    fn new<T>(kind: u32, items: &[T], each: impl Fn(&mut Vec<u8>, &T)) -> Array {
        let mut out = Vec::new();
        items.iter().for_each(|i| each(&mut out, i));
        Array { kind, len: items.len(), items: Bytes::copy_of(&out) }
    }

    /// Appends its type, length and elements, as a file has them.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.kind.to_le_bytes());
        out.extend((self.len as u64).to_le_bytes());
        out.extend_from_slice(&self.items);
    }

    /// Number of elements.
    #[allow(clippy::len_without_is_empty)] // an empty array has no meaningful type, so callers ask for the length
    pub fn len(&self) -> usize {
        self.len
    }

    /// What its elements are, for messages.
    pub fn what(&self) -> &'static str {
        match self.kind {
            6 | 12 => "an array of floats",
            7 => "an array of bools",
            8 => "an array of strings",
            9 => "an array of arrays",
            _ => "an array of integers",
        }
    }

    /// Its integers or bools, in order. One that exceeds 63 bits comes as the largest.
    pub fn ints(&self) -> Option<impl ExactSizeIterator<Item = i64> + '_> {
        let size = match self.kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4 | 5 => 4,
            10 | 11 => 8,
            _ => return None,
        };
        let signed = matches!(self.kind, 1 | 3 | 5 | 11);
        Some(self.items.chunks_exact(size).map(move |bytes| {
            let negative = signed && bytes[size - 1] & 0x80 != 0;
            let mut wide = [if negative { 0xff } else { 0 }; 8];
            wide[..size].copy_from_slice(bytes);
            match signed {
                true => i64::from_le_bytes(wide),
                false => i64::try_from(u64::from_le_bytes(wide)).unwrap_or(i64::MAX),
            }
        }))
    }

    /// Its floats, in order.
    pub fn floats(&self) -> Option<impl ExactSizeIterator<Item = f32> + '_> {
        let size = match self.kind {
            6 => 4,
            12 => 8,
            _ => return None,
        };
        Some(self.items.chunks_exact(size).map(move |bytes| match size {
            4 => f32::from_le_bytes(bytes.try_into().expect("four bytes")),
            _ => f64::from_le_bytes(bytes.try_into().expect("eight bytes")) as f32,
        }))
    }

    /// Its strings, in order, as the bytes that they are.
    pub fn strings(&self) -> Option<impl Iterator<Item = &[u8]> + '_> {
        let mut left = (self.kind == 8).then_some(&self.items[..])?;
        Some(std::iter::from_fn(move || {
            let (len, rest) = left.split_first_chunk::<8>()?;
            let (text, rest) = rest.split_at(u64::from_le_bytes(*len) as usize);
            left = rest;
            Some(text)
        }))
    }
}

impl PartialEq for Array {
    fn eq(&self, other: &Self) -> bool {
        (self.kind, self.len, &self.items[..]) == (other.kind, other.len, &other.items[..])
    }
}

/// The first elements: messages show a value that makes no sense.
impl fmt::Debug for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let mut list = f.debug_list();
        if let Some(all) = self.ints() {
            list.entries(all.take(SHOWN));
        } else if let Some(all) = self.floats() {
            list.entries(all.take(SHOWN));
        } else if let Some(all) = self.strings() {
            list.entries(
                all.take(SHOWN).map(|s| String::from_utf8_lossy(&s[..s.len().min(40)]).into_owned()),
            );
        }
        list.finish()?;
        if self.len > SHOWN { write!(f, " and {} more", self.len - SHOWN) } else { Ok(()) }
    }
}

/// Metadata by key.
pub type Metadata = BTreeMap<String, Value>;
