//! Files that are written whole or not at all.

use std::io::Write;
use std::path::Path;

use crate::{Error, Result};

fn folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes a write beyond the limit on the size of files (`ulimit -f`) an error of that write, instead of the end of the process
/// by SIGXFSZ.
pub fn report_size_limits() {
    #[cfg(unix)]
    // SAFETY: SIG_IGN is a valid disposition of SIGXFSZ, and no handler is installed that could run.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// What limits a write, where that is the disk or the size of files; other errors as they are.
fn told(error: std::io::Error) -> std::io::Error {
    use std::io::ErrorKind;
    let why = match error.kind() {
        ErrorKind::FileTooLarge => "larger than a file may be here (ulimit -f); raise the limit",
        ErrorKind::StorageFull => "the disk is full; free some space",
        ErrorKind::QuotaExceeded => "the disk quota of this user is used up; free some space",
        _ => return error,
    };
    std::io::Error::new(error.kind(), format!("cannot be written: {why}"))
}

/// Refuses a path that cannot be written, before long work and not after it: creates a temporary file in its folder and removes it.
///
/// # Errors
/// [`Error::Io`].
pub fn check(path: &Path) -> Result<()> {
    let (folder, no) = (folder(path), |why: &str| Error::io(path, std::io::Error::other(why.to_owned())));
    if !folder.is_dir() {
        return Err(no(&format!("cannot be written: there is no folder {}", folder.display())));
    }
    if path.is_dir() {
        return Err(no("cannot be written: it is a folder"));
    }
    match tempfile::NamedTempFile::new_in(folder) {
        Ok(_) => Ok(()),
        Err(e) => Err(no(&format!("cannot be written: {}: {}", folder.display(), e.kind()))),
    }
}

/// Writes `path` by `write`: to a file of another name beside it, renamed when all is there. Who may read it is what the
/// process's umask says, as of any new file.
///
/// # Errors
/// [`Error::Io`]; then `path` is as it was.
pub fn replace(path: &Path, write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>) -> Result<()> {
    let all = || -> std::io::Result<()> {
        let mut options = tempfile::Builder::new();
        #[cfg(unix)]
        options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = options.tempfile_in(folder(path))?;
        let mut to = std::io::BufWriter::new(file.as_file_mut());
        write(&mut to)?;
        to.flush()?;
        drop(to);
        file.persist(path)?;
        Ok(())
    };
    all().map_err(|e| Error::io(path, told(e)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.txt");
        replace(&path, |to| to.write_all(b"first")).unwrap();
        let failed = replace(&path, |to| {
            to.write_all(b"second")?;
            Err(std::io::Error::other("out of luck"))
        });
        assert!(failed.unwrap_err().to_string().contains("out of luck"));
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left behind");
        let nowhere = folder.path().join("no/such");
        check(&nowhere).and_then(|()| replace(&nowhere, |_| Ok(()))).unwrap_err();
        replace(&nowhere, |_| Ok(())).unwrap_err();
        check(&path).unwrap();
        let said = |path: &Path| check(path).unwrap_err().to_string();
        assert!(said(&nowhere).contains("there is no folder"), "{}", said(&nowhere));
        assert!(said(folder.path()).contains("it is a folder"), "{}", said(folder.path()));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left behind");
    }

    #[cfg(unix)]
    #[test]
    fn it_may_be_read_by_whoever_may_read_a_new_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (ours, other) = (folder.path().join("ours"), folder.path().join("other"));
        replace(&ours, |_| Ok(())).unwrap();
        std::fs::write(&other, "").unwrap();
        let mode = |path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&other));
    }
}
