//! A minimal GGUF v3 writer for tests, fuzz seeds and exports.

use super::{Metadata, Value};
use crate::tensor::{DType, Tensor};

/// The bytes of a whole file, tensors aligned to `general.alignment` (32 if absent).
pub fn to_bytes<'a>(
    metadata: &Metadata,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Vec<u8> {
    let align = metadata.get("general.alignment").and_then(Value::as_u64).unwrap_or(32) as usize;
    let tensors: Vec<_> = tensors.into_iter().collect();
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (k, v) in metadata {
        string(&mut out, k.as_bytes());
        out.extend(kind(v).to_le_bytes());
        value(&mut out, v);
    }
    let mut offset = 0usize;
    for (name, t) in &tensors {
        string(&mut out, name.as_bytes());
        out.extend((t.shape.len() as u32).to_le_bytes());
        for d in t.shape.iter().rev() {
            out.extend((*d as u64).to_le_bytes());
        }
        out.extend(ggml_type(t.dtype).to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset = (offset + t.data.len()).next_multiple_of(align);
    }
    for (_, t) in &tensors {
        out.resize(out.len().next_multiple_of(align), 0);
        out.extend_from_slice(&t.data);
    }
    out
}

/// The inverse of [`DType::from_ggml`].
pub fn ggml_type(dtype: DType) -> u32 {
    (0..64).find(|&i| DType::from_ggml(i) == Some(dtype)).expect("every dtype has a ggml number")
}

fn string(out: &mut Vec<u8>, s: &[u8]) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend_from_slice(s);
}

/// The type written for a value. Unsigned integers that fit are written as u32, as converters do.
fn kind(v: &Value) -> u32 {
    match v {
        Value::Uint(u) if *u <= u32::MAX.into() => 4,
        Value::Uint(_) => 10,
        Value::Int(_) => 11,
        // An f32 that was widened to f64 is written as the same f32.
        Value::Float(f) if f64::from(*f as f32) == *f => 6,
        Value::Float(_) => 12,
        Value::Bool(_) => 7,
        Value::String(_) | Value::Bytes(_) => 8,
        Value::Array(_) => 9,
    }
}

fn value(out: &mut Vec<u8>, v: &Value) {
    match v {
        Value::Uint(u) if *u <= u32::MAX.into() => out.extend((*u as u32).to_le_bytes()),
        Value::Uint(u) => out.extend(u.to_le_bytes()),
        Value::Int(i) => out.extend(i.to_le_bytes()),
        Value::Float(f) if f64::from(*f as f32) == *f => out.extend((*f as f32).to_le_bytes()),
        Value::Float(f) => out.extend(f.to_le_bytes()),
        Value::Bool(b) => out.push(u8::from(*b)),
        Value::String(s) => string(out, s.as_bytes()),
        Value::Bytes(s) => string(out, s),
        Value::Array(a) => a.write(out),
    }
}
