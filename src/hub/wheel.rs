//! A model out of wheels (which are zip files): members, joined and verified.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

use super::download::{hex, no_space, part_of};
use crate::progress::{Progress, WorkUnit};
use crate::{Error, Result};

/// Writes the members, one after the other, to `target`, if together they have this length and sum.
pub(super) fn extract(
    members: &[(&Path, &str)],
    target: &Path,
    bytes: u64,
    sha256: &str,
    progress: &dyn Progress,
) -> Result<()> {
    let part = part_of(target);
    progress.begin("unpacking", Some(bytes), WorkUnit::Bytes);
    let written = write_members(members, &part, bytes, progress);
    progress.end();
    let outcome = written.and_then(|got| {
        if got == sha256 {
            std::fs::rename(&part, target).map_err(|e| Error::io(target, e))
        } else {
            Err(Error::format(
                target.display().to_string(),
                format!("checksum mismatch: sha256 {got}, expected {sha256}; the file was deleted"),
            ))
        }
    });
    if outcome.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    outcome
}

fn write_members(
    members: &[(&Path, &str)],
    part: &Path,
    bytes: u64,
    progress: &dyn Progress,
) -> Result<String> {
    let mut out = File::create(part).map_err(|e| Error::io(part, e))?;
    let mut hash = Sha256::new();
    let mut total = 0u64;
    let mut buffer = vec![0u8; 256 << 10];
    for &(wheel, member) in members {
        let bad = |problem: String| Error::format(wheel.display().to_string(), problem);
        let file = File::open(wheel).map_err(|e| Error::io(wheel, e))?;
        let mut zip = zip::ZipArchive::new(file).map_err(|e| bad(format!("not a wheel: {e}")))?;
        let mut entry = zip.by_name(member).map_err(|e| bad(format!("{member}: {e}")))?;
        loop {
            let n = entry.read(&mut buffer).map_err(|e| bad(format!("{member}: {e}")))?;
            if n == 0 {
                break;
            }
            total += n as u64;
            // A zip bomb ends here.
            if total > bytes {
                return Err(bad(format!("{member}: longer than the {bytes} bytes of the model")));
            }
            hash.update(&buffer[..n]);
            out.write_all(&buffer[..n]).map_err(|e| no_space(part, e))?;
            progress.at(total);
        }
    }
    out.sync_all().map_err(|e| Error::io(part, e))?;
    Ok(hex(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Silent;
    use zip::write::SimpleFileOptions;

    fn wheel(path: &Path, method: zip::CompressionMethod, content: &[u8]) {
        let mut zip = zip::ZipWriter::new(File::create(path).unwrap());
        zip.start_file("p/model.gguf", SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(content).unwrap();
        zip.finish().unwrap();
    }

    #[test]
    fn joins_stored_and_deflated_members() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, out) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("out"));
        wheel(&a, zip::CompressionMethod::Stored, b"hello ");
        wheel(&b, zip::CompressionMethod::Deflated, b"world");
        let members = [(a.as_path(), "p/model.gguf"), (b.as_path(), "p/model.gguf")];
        let sum = hex(&Sha256::digest(b"hello world"));
        extract(&members, &out, 11, &sum, &Silent).unwrap();
        assert_eq!(std::fs::read(&out).unwrap(), b"hello world");
    }

    #[test]
    fn leaves_nothing_behind_when_the_content_is_wrong() {
        let dir = tempfile::tempdir().unwrap();
        let (a, out) = (dir.path().join("a"), dir.path().join("out"));
        wheel(&a, zip::CompressionMethod::Deflated, &[0; 100_000]);
        let sum = hex(&Sha256::digest([0; 100_000]));
        for (members, bytes, sum, want) in [
            ("p/model.gguf", 100_000, "00", "checksum mismatch"),
            ("p/model.gguf", 99_999, sum.as_str(), "longer than"),
            ("p/other.gguf", 100_000, sum.as_str(), "p/other.gguf"),
        ] {
            let error = extract(&[(&a, members)], &out, bytes, sum, &Silent).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
            assert!(!out.exists() && !part_of(&out).exists());
        }
        std::fs::write(&a, b"no zip at all").unwrap();
        let error = extract(&[(&a, "p/model.gguf")], &out, 1, &sum, &Silent).unwrap_err().to_string();
        assert!(error.contains("not a wheel"), "{error}");
        assert!(!part_of(&out).exists());
    }
}
