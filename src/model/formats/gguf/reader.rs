//! A bounds-checked cursor over the header of a GGUF file.

use super::{Array, Value};
use crate::tensor::Bytes;
use crate::{Error, Result};

/// Bytes that the smallest tensor info takes: name length, dimension count, type, offset.
pub const MIN_TENSOR_INFO: usize = 8 + 4 + 4 + 8;
/// Bytes that the smallest metadata pair takes: key length, type, one byte of value.
pub const MIN_KEY_VALUE: usize = 8 + 4 + 1;
/// Arrays of arrays of arrays are the deepest accepted; real files have none at all.
const MAX_DEPTH: usize = 3;
/// Longest key or tensor name: the format's own limit.
const MAX_NAME: usize = 65_535;

/// Reads little-endian values and never past the end.
pub struct GgufReader<'a> {
    bytes: &'a Bytes,
    at: usize,
}

impl<'a> GgufReader<'a> {
    pub fn new(bytes: &'a Bytes) -> Self {
        GgufReader { bytes, at: 0 }
    }

    pub fn position(&self) -> usize {
        self.at
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        if n > self.left() {
            return Err(Error::format(
                what,
                format!(
                    "needs {n} bytes at {}, the file ends after {} more; is it truncated?",
                    self.at,
                    self.left()
                ),
            ));
        }
        let s = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(s)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N]> {
        Ok(self.take(N, what)?.try_into().expect("N bytes were taken"))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of entries of at least `min_bytes` each, checked against the remaining bytes.
    pub fn count(&mut self, what: &str, min_bytes: usize) -> Result<usize> {
        let n = self.u64(what)?;
        let most = self.left() / min_bytes;
        match usize::try_from(n) {
            Ok(n) if n <= most => Ok(n),
            _ => Err(Error::format(
                what,
                format!(
                    "{n} entries cannot fit in the {} bytes that are left; is the file truncated?",
                    self.left()
                ),
            )),
        }
    }

    /// A string; what it holds is checked where it is used.
    fn text(&mut self, what: &str) -> Result<&'a [u8]> {
        let n = self.count(what, 1)?;
        self.take(n, what)
    }

    /// A key or tensor name.
    pub fn string(&mut self, what: &str) -> Result<String> {
        let s = self.text(what)?;
        if s.is_empty() || s.len() > MAX_NAME {
            return Err(Error::format(what, format!("{} bytes long, 1 to {MAX_NAME} are possible", s.len())));
        }
        match std::str::from_utf8(s) {
            Ok(s) => Ok(s.to_owned()),
            Err(e) => Err(Error::format(what, format!("text of {} bytes is not UTF-8 ({e})", s.len()))),
        }
    }

    /// The typed value of `key`.
    pub fn value(&mut self, key: &str) -> Result<Value> {
        let kind = self.u32(key)?;
        self.value_of(kind, key)
    }

    fn value_of(&mut self, kind: u32, key: &str) -> Result<Value> {
        Ok(match kind {
            0 => Value::Uint(self.array::<1>(key)?[0].into()),
            1 => Value::Int(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Uint(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Uint(self.u32(key)?.into()),
            5 => Value::Int(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => Value::Bool(self.bool(key)?),
            8 => {
                let text = self.text(key)?;
                match std::str::from_utf8(text) {
                    Ok(text) => Value::String(text.to_owned()),
                    Err(_) => Value::Bytes(text.to_vec()),
                }
            }
            9 => Value::Array(self.array_value(key, 0)?),
            10 => Value::Uint(self.u64(key)?),
            11 => Value::Int(i64::from_le_bytes(self.array(key)?)),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            _ => return Err(Error::format(key, format!("unknown metadata type {kind}"))),
        })
    }

    fn bool(&mut self, key: &str) -> Result<bool> {
        match self.array::<1>(key)?[0] {
            0 => Ok(false),
            1 => Ok(true),
            b => Err(Error::format(key, format!("a bool of {b}"))),
        }
    }

    /// Steps over an array: every element is checked to be there, none is decoded.
    fn array_value(&mut self, key: &str, depth: usize) -> Result<Array> {
        let kind = self.u32(key)?;
        // The smallest encoding of one element, which bounds the count.
        let min = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => return Err(Error::format(key, format!("unknown metadata type {kind} of array elements"))),
        };
        let n = self.count(key, min)?;
        let start = self.at;
        match kind {
            8 => {
                for _ in 0..n {
                    self.text(key)?;
                }
            }
            9 if depth + 1 >= MAX_DEPTH => {
                return Err(Error::format(key, format!("arrays nested deeper than {MAX_DEPTH}")));
            }
            9 => {
                for _ in 0..n {
                    self.array_value(key, depth + 1)?;
                }
            }
            _ => {
                self.take(n * min, key)?;
            }
        }
        let items = self.bytes.slice(start, self.at - start).expect("bytes that were read");
        Ok(Array::of_file(kind, n, items))
    }
}

/// ggml's names for types that this engine does not support, for messages.
pub fn ggml_type_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "q4_2",
        5 => "q4_3",
        9 => "q8_1",
        15 => "q8_k",
        16 => "iq2_xxs",
        17 => "iq2_xs",
        18 => "iq3_xxs",
        19 => "iq1_s",
        21 => "iq3_s",
        22 => "iq2_s",
        24 => "i8",
        25 => "i16",
        26 => "i32",
        27 => "i64",
        28 => "f64",
        29 => "iq1_m",
        34 => "tq1_0",
        35 => "tq2_0",
        _ => return None,
    })
}
