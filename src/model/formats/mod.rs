//! Model files. Each format has a module, which yields metadata and named zero-copy tensors; the families in
//! [`crate::model::arch`] turn those into a [`crate::model::ModelSpec`] and [`crate::model::Weights`].

pub mod gguf;
pub(super) mod guise;
pub mod safetensors;

use std::path::Path;

use crate::tensor::Bytes;
use crate::{Error, Result};

/// The files that hold a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Files {
    /// Number of files.
    pub count: usize,
    /// Their lengths together.
    pub bytes: u64,
}

/// Maps a whole file, read only and shared with the page cache: the bytes of a model are never copied.
///
/// # Errors
/// The file cannot be opened, is a directory, or is empty.
pub fn map_file(path: &Path) -> Result<Bytes> {
    let file = crate::small_file::open(path)?;
    let meta = file.metadata().map_err(|e| Error::io(path, e))?;
    if meta.len() == 0 {
        return Err(Error::format(
            path.display().to_string(),
            "the file is empty; is the download complete?",
        ));
    }
    // SAFETY: the mapping is read only. Like every program that maps its input, this one relies on no process
    // truncating or rewriting a model while it runs; `pull` replaces files by renaming, which keeps maps whole.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
    Ok(Bytes::from_map(map, file))
}

/// Puts the file's name in front of an error about its contents.
pub(crate) fn in_file(path: &Path, e: Error) -> Error {
    let file = path.file_name().map(|f| f.to_string_lossy().into_owned()).unwrap_or_default();
    match e {
        Error::Format { what, problem } if what == path.display().to_string() => {
            Error::Format { what, problem }
        }
        Error::Format { what, problem } => Error::Format { what: format!("{file}: {what}"), problem },
        Error::Unsupported(m) => Error::Unsupported(format!("{file}: {m}")),
        other => other,
    }
}
