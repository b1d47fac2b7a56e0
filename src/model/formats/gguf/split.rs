//! A model in several GGUF files: `NAME-00001-of-00003.gguf` and so on, as converters and `gguf-split` write them.
//!
//! Each file is whole in itself and holds some of the tensors. `split.no` (from 0) and `split.count` say which file it is,
//! `split.tensors.count` how many tensors all have together; other metadata is in the first. The user names the first, and
//! the others are looked for beside it, by their names. Files are untrusted: no number in them decides how much is
//! allocated, and a set that does not fit together is refused.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;

use super::super::in_file;
use super::{Gguf, MAX_ENTRIES, Metadata, Value};
use crate::tensor::Bytes;
use crate::{Error, Result};

/// Most files of a model: real ones have dozens, and all stay open.
const MAX_FILES: u64 = 1024;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// The name of a file of a split model: `NAME-00002-of-00003.gguf`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartName<'a> {
    /// `NAME`.
    pub stem: &'a str,
    /// From 1.
    pub number: u64,
    /// Files of the model.
    pub count: u64,
}

impl<'a> PartName<'a> {
    /// Reads the name of a file, without its folder or with it.
    pub fn parse(file: &'a str) -> Option<PartName<'a>> {
        let digits = |s: &str| {
            let five = s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
            five.then(|| s.parse::<u64>().expect("five digits"))
        };
        let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let name = PartName { stem, number: digits(number)?, count: digits(count)? };
        (1..=name.count).contains(&name.number).then_some(name)
    }

    /// The name of another file of the model.
    pub fn of(&self, number: u64) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

/// What a file says about the model that it is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// From 0.
    number: u64,
    count: u64,
    /// Of all files together.
    tensors: u64,
}

impl Part {
    /// `None` for a file that is a whole model.
    fn of(metadata: &Metadata) -> Result<Option<Part>> {
        let Some(value) = metadata.get(COUNT) else { return Ok(None) };
        let count = value.as_u64().ok_or_else(|| Error::format(COUNT, format!("{value:?} is no count")))?;
        if count < 2 {
            return Ok(None);
        }
        let number = |key: &str, range: std::ops::Range<u64>| match metadata.get(key) {
            None => Err(Error::format(key, format!("missing in one of {count} files"))),
            Some(value) => value.as_u64().filter(|v| range.contains(v)).ok_or_else(|| {
                Error::format(key, format!("{value:?}, wanted {} to {}", range.start, range.end - 1))
            }),
        };
        number(COUNT, 2..MAX_FILES + 1)?;
        let (number, tensors) = (number(NUMBER, 0..count)?, number(TENSORS, 1..MAX_ENTRIES as u64 + 1)?);
        Ok(Some(Part { number, count, tensors }))
    }
}

/// Parses the file `path`, and all the other files of its model if it is the first of several. `read` has the bytes of a file.
///
/// # Errors
/// A file is missing, cannot be read or is rejected by [`Gguf::parse`], or the files do not belong together.
pub(super) fn open(path: &Path, read: &mut dyn FnMut(&Path) -> Result<Bytes>) -> Result<Gguf> {
    let whole = Gguf::parse(read(path)?).and_then(|g| Ok((Part::of(&g.metadata)?, g)));
    let (part, mut whole) = whole.map_err(|e| in_file(path, e))?;
    let Some(first) = part else { return Ok(whole) };
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let name = first_name(name, first).map_err(|e| in_file(path, e))?;
    let mut seen: HashSet<String> = whole.tensors.iter().map(|(name, _)| name.clone()).collect();
    for number in 1..first.count {
        let path = path.with_file_name(name.of(number + 1));
        let bytes = read(&path).map_err(|e| missing(&path, first.count, e))?;
        Gguf::parse(bytes)
            .and_then(|part| add(&mut whole, &mut seen, Part { number, ..first }, part))
            .map_err(|e| in_file(&path, e))?;
    }
    let found = whole.tensors.len() as u64;
    if found != first.tensors {
        let problem = format!("{}, but its {} files have {found} together", first.tensors, first.count);
        return Err(in_file(path, Error::format(TENSORS, problem)));
    }
    // What was split is now whole.
    for key in [NUMBER, COUNT, TENSORS] {
        whole.metadata.remove(key);
    }
    Ok(whole)
}

/// The name of a first file, by which the others are found.
fn first_name(name: &str, first: Part) -> Result<PartName<'_>> {
    let parsed = PartName::parse(name).filter(|n| n.count == first.count);
    if first.number > 0 {
        let which = parsed.map(|n| format!(", {}", n.of(1))).unwrap_or_default();
        let (number, count) = (first.number + 1, first.count);
        return Err(Error::usage(format!(
            "{name}: file {number} of a model of {count} files; give the first{which}"
        )));
    }
    parsed.filter(|n| n.number == 1).ok_or_else(|| {
        let count = first.count;
        let problem = format!(
            "the first of {count} files, which are found by names like NAME-00001-of-{count:05}.gguf"
        );
        Error::format("name", problem)
    })
}

/// Says of a file that is not there that it should be.
fn missing(path: &Path, count: u64, e: Error) -> Error {
    match e {
        Error::Io { source, .. } if source.kind() == ErrorKind::NotFound => Error::format(
            path.display().to_string(),
            format!("missing, one of the {count} files of the model; is the download complete?"),
        ),
        other => other,
    }
}

/// Adds the tensors of a further file, which has to be the one `wanted`.
fn add(whole: &mut Gguf, seen: &mut HashSet<String>, wanted: Part, part: Gguf) -> Result<()> {
    let Some(found) = Part::of(&part.metadata)? else {
        return Err(Error::format(COUNT, "missing, though the file's name says that it is one of several"));
    };
    for (key, found, wanted) in [
        (NUMBER, found.number, wanted.number),
        (COUNT, found.count, wanted.count),
        (TENSORS, found.tensors, wanted.tensors),
    ] {
        if found != wanted {
            return Err(Error::format(key, format!("{found}, wanted {wanted}; are the files of one model?")));
        }
    }
    const FAMILY: &str = "general.architecture";
    let family = |metadata: &Metadata| metadata.get(FAMILY).and_then(Value::as_str).map(str::to_owned);
    if let (Some(first), Some(this)) = (family(&whole.metadata), family(&part.metadata))
        && first != this
    {
        return Err(Error::format(FAMILY, format!("{this}, but the first file's is {first}")));
    }
    for (name, tensor) in part.tensors {
        if !seen.insert(name.clone()) {
            return Err(Error::format(name, "an earlier file of the model has a tensor of this name, too"));
        }
        whole.tensors.push((name, tensor));
        if whole.tensors.len() as u64 > wanted.tensors {
            return Err(Error::format(TENSORS, format!("{}, but there are more", wanted.tensors)));
        }
    }
    whole.files.count += part.files.count;
    whole.files.bytes += part.files.bytes;
    Ok(())
}

/// The metadata of file `number` (from 0) of `count`: the first has `all`.
pub fn metadata_of_part(all: &Metadata, number: usize, count: usize, tensors: usize) -> Metadata {
    let mut part = if number == 0 { all.clone() } else { Metadata::new() };
    for (key, value) in [(NUMBER, number), (COUNT, count), (TENSORS, tensors)] {
        part.insert(key.into(), Value::Uint(value as u64));
    }
    part
}

#[cfg(test)]
mod tests;
