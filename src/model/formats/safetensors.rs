//! A safetensors file: a JSON header with names, dtypes, shapes and byte ranges, then the bytes.
//!
//! The header is parsed here rather than by the `safetensors` crate (which writes our test files and exports):
//! this parser names the tensor in every error, detects duplicates, and cannot overflow on hostile offsets.

use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};

use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};

/// Longest header accepted, as in the format's own implementation.
const MAX_HEADER: u64 = 100_000_000;

/// One entry of the header.
#[derive(serde::Deserialize)]
struct Info {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

/// The header's entries in order, `__metadata__` left out.
struct Header(Vec<(String, Info)>);

impl<'de> serde::Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Header;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Header, A::Error> {
                let mut all = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        all.push((name, map.next_value()?));
                    }
                }
                Ok(Header(all))
            }
        }
        d.deserialize_map(V)
    }
}

/// A tensor of bytes, which are numbers to those who know what they mean.
#[derive(Debug, Clone)]
pub struct Raw {
    /// Outermost first; as many elements as bytes.
    pub shape: Vec<usize>,
    /// The bytes, where they are in the file.
    pub data: Bytes,
}

/// What a file holds.
#[derive(Debug, Default)]
pub struct Contents {
    /// Tensors of floats.
    pub tensors: Vec<(String, Tensor)>,
    /// Tensors of bytes that were asked for.
    pub raw: Vec<(String, Raw)>,
}

/// The tensors of a whole file, as views wherever their bytes are aligned for their type; of bytes (`U8`), those for which `raw` is true.
///
/// # Errors
/// If the header is malformed, a tensor's bytes are not where it says, or a dtype is not f32, f16 or bf16 (tensors of
/// other types for which `skip` is true, such as position ids, are silently left out).
pub fn parse(bytes: &Bytes, skip: &dyn Fn(&str) -> bool, raw: &dyn Fn(&str) -> bool) -> Result<Contents> {
    let len: [u8; 8] = bytes
        .get(..8)
        .and_then(|b| b.try_into().ok())
        .ok_or_else(|| Error::format("header", format!("the file has only {} bytes", bytes.len())))?;
    let len = u64::from_le_bytes(len);
    let left = bytes.len() as u64 - 8;
    if len > MAX_HEADER || len > left {
        let problem = format!("claims {len} bytes, {left} are left");
        let otherwise = "is this a safetensors file, and complete?";
        return Err(Error::format("header", super::guise::suspect(&problem, bytes, otherwise)));
    }
    let start = 8 + len as usize;
    let Header(mut infos) = serde_json::from_slice(&bytes[8..start])
        .map_err(|e| Error::format("header", format!("not the JSON of safetensors: {e}")))?;
    infos.sort_by(|a, b| a.1.data_offsets.cmp(&b.1.data_offsets).then_with(|| a.0.cmp(&b.0)));
    let mut names: Vec<&str> = infos.iter().map(|(n, _)| n.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|w| w[0] == w[1]) {
        return Err(Error::format(pair[0], "tensor name appears twice"));
    }

    let mut out = Contents { tensors: Vec::with_capacity(infos.len()), raw: Vec::new() };
    let mut end_of_last = 0;
    for (name, info) in infos {
        let (from, to) = info.data_offsets;
        if from < end_of_last || to < from {
            return Err(Error::format(
                name,
                format!("bytes {from}..{to} overlap another tensor's, or run backwards"),
            ));
        }
        end_of_last = to;
        let data = start.checked_add(from).and_then(|s| bytes.slice(s, to - from)).ok_or_else(|| {
            let have = bytes.len() - start;
            Error::format(name.as_str(), format!("bytes {from}..{to} of {have}; is the download complete?"))
        })?;
        let dtype = match info.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            "U8" if raw(&name) => {
                let elements = info.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
                if elements != Some(data.len()) {
                    let problem = format!("shape {:?} in {} bytes", info.shape, data.len());
                    return Err(Error::format(name, problem));
                }
                out.raw.push((name, Raw { shape: info.shape, data }));
                continue;
            }
            _ if skip(&name) => continue,
            other => {
                return Err(Error::Unsupported(format!(
                    "{name}: dtype {other}; f32, f16 and bf16 are supported in safetensors"
                )));
            }
        };
        // In files written by the format's own tools, padded headers prevent misalignment. Ranges do not overlap, so
        // the copies together are no longer than the file.
        let data = if (data.as_ptr() as usize).is_multiple_of(dtype.block_bytes()) {
            data
        } else {
            Bytes::copy_of(&data)
        };
        let t = Tensor::new(dtype, info.shape, data).map_err(|e| match e {
            Error::Format { problem, .. } => Error::format(name.as_str(), problem),
            other => other,
        })?;
        out.tensors.push((name, t));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(header: &str, data: usize) -> Bytes {
        let mut b = (header.len() as u64).to_le_bytes().to_vec();
        b.extend_from_slice(header.as_bytes());
        b.resize(b.len() + data, 1);
        Bytes::copy_of(&b)
    }

    fn load(b: &Bytes) -> Result<Vec<(String, Tensor)>> {
        parse(b, &|_| false, &|name| name.ends_with("raw")).map(|found| found.tensors)
    }

    const GOOD: &str = r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]}}"#;

    #[test]
    fn good_files_give_aligned_views() {
        // Every header length, so that the data starts at every alignment.
        for pad in 0..8 {
            let b = file(&format!("{GOOD}{}", " ".repeat(pad)), 34);
            let t = load(&b).unwrap();
            assert_eq!(t.len(), 2);
            assert_eq!(
                (t[0].0.as_str(), &t[0].1.shape[..], t[0].1.dtype),
                ("a", &[2usize, 3][..], DType::F32)
            );
            for (_, t) in &t {
                assert_eq!(t.data.as_ptr() as usize % t.dtype.block_bytes(), 0);
                assert!(t.data.iter().all(|&x| x == 1));
            }
        }
    }

    #[test]
    fn hostile_headers_get_one_sentence() {
        let entry = |d: &str, shape: &str, from: &str, to: &str| {
            format!(r#"{{"t":{{"dtype":"{d}","shape":[{shape}],"data_offsets":[{from},{to}]}}}}"#)
        };
        let max = "18446744073709551615";
        for (b, want) in [
            (Bytes::copy_of(b"abc"), "only 3 bytes"),
            (Bytes::copy_of(&u64::MAX.to_le_bytes()), "claims 18446744073709551615"),
            (file("[]", 0), "not the JSON"),
            (file("{\"t\":1}", 0), "not the JSON"),
            (file(&entry("I8", "4", "0", "4"), 4), "t: dtype I8"),
            (file(&entry("U8", "4", "0", "4"), 4), "t: dtype U8"),
            (
                file(&entry("U8", "2,3", "0", "4").replace("\"t\"", "\"raw\""), 4),
                "raw: shape [2, 3] in 4 bytes",
            ),
            (file(&entry("F32", "4", "0", "4"), 4), "t: f32 of shape [4]"),
            (file(&entry("F32", "1", "0", "4"), 3), "t: bytes 0..4 of 3"),
            (file(&entry("F32", "1", "4", "0"), 4), "run backwards"),
            (file(&entry("F32", "1", max, max), 4), "t: bytes"),
            (file(&entry("F32", &format!("{max},{max}"), "0", "4"), 4), "t: f32 of shape"),
            (
                file(
                    r#"{"t":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"t":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#,
                    4,
                ),
                "t: tensor name appears twice",
            ),
        ] {
            let got = load(&b).map(|_| ()).expect_err(want).to_string();
            assert!(got.contains(want), "{got:?} does not say {want:?}");
        }
    }

    proptest! {
        /// Files with flipped bytes, inflated lengths or a truncated end are rejected or parsed, and never cause a
        /// panic.
        #[test]
        fn corruption_never_panics(
            flips in prop::collection::vec((0usize..4096, any::<u8>()), 0..6),
            digits in prop::option::of((0usize..4096, "[0-9]{1,20}")),
            cut in prop::option::of(0usize..4096),
        ) {
            let mut b = file(GOOD, 34).to_vec();
            if let Some((at, text)) = digits {
                // Puts digits into the header and keeps its length correct.
                let at = 8 + at % GOOD.len();
                b.splice(at..at, text.bytes());
                let n = (GOOD.len() + text.len()) as u64;
                b[..8].copy_from_slice(&n.to_le_bytes());
            }
            let n = b.len();
            for (at, v) in flips {
                b[at % n] = v;
            }
            if let Some(c) = cut {
                b.truncate(c % n);
            }
            let _ = load(&Bytes::copy_of(&b));
        }
    }
}
