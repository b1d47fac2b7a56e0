//! GGUF v2/v3: a file with metadata and tensors, little endian. A model may be [split] into several.
//!
//! ```text
//! "GGUF" version:u32 n_tensors:u64 n_kv:u64
//! n_kv      x  key:string  type:u32  value
//! n_tensors x  name:string n_dims:u32 dims:[u64; n_dims] (innermost first) ggml_type:u32 offset:u64
//! padding to general.alignment, then the tensors' bytes (offsets count from here)
//! ```
//! The file is untrusted: every count is checked against the remaining bytes before anything is allocated for it, arrays stay in
//! the file until they are used, and text that nobody reads may be anything: a parse allocates less than the file's size and
//! what some thousand entries take.

mod reader;
mod split;
mod value;
pub(in crate::model) mod write;

pub(crate) use split::PartName;
pub(in crate::model) use split::metadata_of_part;
pub use value::{Array, Metadata, Value};

use std::collections::HashSet;
use std::path::Path;

use super::Files;
use crate::tensor::{Bytes, DType, Tensor};
use crate::{Error, Result};
use reader::GgufReader;

/// A parsed file, or the files of a split model together. Tensors are views; nothing of their bytes has been read.
#[derive(Debug)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// Every key.
    pub metadata: Metadata,
    /// In file order. Shapes are outermost first.
    pub tensors: Vec<(String, Tensor)>,
    /// How many files these are.
    pub files: Files,
}

/// Most tensors and most keys: real files have thousands, and dozens. An entry takes several times the memory that it takes in
/// the file.
const MAX_ENTRIES: usize = 1 << 18;

/// Where tensors start when `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;

impl Gguf {
    /// Maps and parses `path`, and the files beside it that it is the first of.
    ///
    /// # Errors
    /// If a file is missing or cannot be read, [`Gguf::parse`] rejects it (the file is part of the message), or the files do
    /// not belong together.
    pub fn open(path: &Path) -> Result<Gguf> {
        Gguf::open_with(path, &mut super::map_file)
    }

    /// As [`Gguf::open`], of files whose bytes `read` has.
    ///
    /// # Errors
    /// As there.
    pub fn open_with(path: &Path, read: &mut dyn FnMut(&Path) -> Result<Bytes>) -> Result<Gguf> {
        split::open(path, read)
    }

    /// Parses the bytes of a whole file.
    ///
    /// # Errors
    /// Not GGUF, an unsupported version or tensor type, or malformed in any way.
    pub fn parse(bytes: Bytes) -> Result<Gguf> {
        let mut r = GgufReader::new(&bytes);
        if bytes.get(..4) != Some(b"GGUF".as_slice()) {
            let problem = super::guise::suspect("does not start with `GGUF`", &bytes, "is this a GGUF file?");
            return Err(Error::format("header", problem));
        }
        r.take(4, "magic")?;
        let version = r.u32("version")?;
        match version {
            2 | 3 => {}
            1 => return Err(Error::Unsupported("GGUF version 1; convert the model again".into())),
            v if matches!(v.swap_bytes(), 1..=3) => {
                return Err(Error::Unsupported(
                    "big-endian GGUF; only little-endian files are supported".into(),
                ));
            }
            v => return Err(Error::Unsupported(format!("GGUF version {v}; 2 and 3 are supported"))),
        }
        let n_tensors = r.count("tensor count", reader::MIN_TENSOR_INFO)?;
        let n_kv = r.count("metadata count", reader::MIN_KEY_VALUE)?;
        for (what, n) in [("tensor count", n_tensors), ("metadata count", n_kv)] {
            if n > MAX_ENTRIES {
                return Err(Error::format(
                    what,
                    format!("{n}, more than {MAX_ENTRIES}; is the file damaged?"),
                ));
            }
        }

        let mut metadata = Metadata::new();
        for i in 0..n_kv {
            let key = r.string(&format!("metadata key {i}"))?;
            let value = r.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(Error::format(key, "metadata key appears twice"));
            }
        }
        let alignment = alignment(&metadata)?;

        // The infos come before the data section whose start they are relative to.
        let mut infos = Vec::with_capacity(n_tensors);
        let mut seen = HashSet::with_capacity(n_tensors);
        for i in 0..n_tensors {
            let info = Info::read(&mut r, i)?;
            if !seen.insert(info.name.clone()) {
                return Err(Error::format(info.name, "tensor name appears twice"));
            }
            infos.push(info);
        }
        let data_start = (r.position() as u64).next_multiple_of(alignment);
        let tensors = infos
            .into_iter()
            .map(|info| info.view(&bytes, data_start, alignment))
            .collect::<Result<Vec<_>>>()?;
        // The header's contents have been copied; a vocabulary in it takes megabytes.
        if let Some(header) = bytes.slice(0, r.position()) {
            header.release_pages();
        }
        Ok(Gguf { version, metadata, tensors, files: Files { count: 1, bytes: bytes.len() as u64 } })
    }
}

/// `general.alignment`: a power of two of at least 8, so that views of a mapped file are aligned for
/// every element type.
fn alignment(metadata: &Metadata) -> Result<u64> {
    let Some(v) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match v.as_u64() {
        Some(a) if a.is_power_of_two() && (8..=1 << 20).contains(&a) => Ok(a),
        _ => Err(Error::format("general.alignment", format!("{v:?} is no power of two in 8..=1048576"))),
    }
}

/// One entry of the tensor table.
struct Info {
    name: String,
    shape: Vec<usize>,
    ggml_type: u32,
    offset: u64,
}

impl Info {
    fn read(r: &mut GgufReader<'_>, index: usize) -> Result<Info> {
        let name = r.string(&format!("name of tensor {index}"))?;
        let n_dims = r.u32(&name)?;
        if !(1..=4).contains(&n_dims) {
            return Err(Error::format(name, format!("{n_dims} dimensions, 1 to 4 are possible")));
        }
        let mut shape = Vec::with_capacity(n_dims as usize);
        for _ in 0..n_dims {
            let d = r.u64(&name)?;
            match usize::try_from(d) {
                Ok(d) if d > 0 => shape.push(d),
                _ => return Err(Error::format(name, format!("a dimension of {d}"))),
            }
        }
        shape.reverse();
        let ggml_type = r.u32(&name)?;
        let offset = r.u64(&name)?;
        Ok(Info { name, shape, ggml_type, offset })
    }

    fn view(self, bytes: &Bytes, data_start: u64, alignment: u64) -> Result<(String, Tensor)> {
        let Info { name, shape, ggml_type, offset } = self;
        let Some(dtype) = DType::from_ggml(ggml_type) else {
            return Err(Error::Unsupported(format!(
                "{name}: ggml type {ggml_type}{} is not supported; choose a file in one of {}",
                reader::ggml_type_name(ggml_type).map(|n| format!(" ({n})")).unwrap_or_default(),
                DType::ALL.map(DType::name).join(", "),
            )));
        };
        if offset % alignment != 0 {
            return Err(Error::format(name, format!("offset {offset} is no multiple of {alignment}")));
        }
        let cols = *shape.last().expect("1 to 4 dimensions");
        let Some(row) = dtype.row_bytes(cols) else {
            return Err(Error::format(
                name,
                format!("rows of {cols} elements do not split into {dtype} blocks of {}", dtype.block_len()),
            ));
        };
        let size = shape[..shape.len() - 1].iter().try_fold(row, |a, &b| a.checked_mul(b));
        let start = data_start.checked_add(offset).and_then(|s| usize::try_from(s).ok());
        let data = size.zip(start).and_then(|(size, start)| bytes.slice(start, size)).ok_or_else(|| {
            Error::format(
                name.clone(),
                format!(
                    "{dtype} of shape {shape:?} at offset {offset} ends beyond the file's {} bytes; is the \
                     download complete?",
                    bytes.len()
                ),
            )
        })?;
        Ok((name, Tensor::new(dtype, shape, data)?))
    }
}

#[cfg(test)]
mod tests;
