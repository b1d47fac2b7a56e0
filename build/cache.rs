//! Compilers' results by what went into them: a file that no change touches is not compiled again.
//!
//! The key of a result is a hash of the source, of every header of ours that it includes, of the command's
//! flags and of the compiler's version. Results are shared by all profiles and feature sets of a target
//! folder (`$TANDEM_CUDA_CACHE` names another place, which several checkouts may share).

use std::collections::BTreeSet;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::{Result, tools};

/// Results that no build has used for so long are deleted.
const KEEP: Duration = Duration::from_secs(14 * 24 * 3600);

pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub fn open() -> Result<Cache> {
        let out = PathBuf::from(std::env::var("OUT_DIR").expect("Cargo sets OUT_DIR"));
        // target/<profile>/build/<package>/out
        let shared = out.ancestors().nth(4).unwrap_or(&out).join("cuda-cache");
        let folder = tools::variable("TANDEM_CUDA_CACHE").map_or(shared, PathBuf::from);
        fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        Ok(Cache { folder })
    }

    /// The file with the result of `key`; `make` writes it to the path that it is given, if there is none yet.
    pub fn get(&self, key: u64, ending: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        self.get_both(key, [ending], |[to]| make(to)).map(|[path]| path)
    }

    /// As [`Cache::get`], for several files that one command makes.
    pub fn get_both<const N: usize>(
        &self,
        key: u64,
        endings: [&str; N],
        make: impl FnOnce([&Path; N]) -> Result<()>,
    ) -> Result<[PathBuf; N]> {
        let paths = endings.map(|ending| self.folder.join(format!("{key:016x}.{ending}")));
        let marked = |path: &PathBuf| match fs::File::open(path) {
            // Marks it as in use; a failure only lets it expire.
            Ok(file) => {
                let _ = file.set_modified(SystemTime::now());
                true
            }
            Err(_) => false,
        };
        if paths.iter().all(marked) {
            return Ok(paths);
        }
        // Builds may run beside each other: a result appears under its name when it is whole.
        let process = std::process::id();
        let unfinished = endings.map(|ending| self.folder.join(format!("{key:016x}.{process}.{ending}")));
        make(std::array::from_fn(|i| unfinished[i].as_path()))?;
        for (from, to) in unfinished.iter().zip(&paths) {
            fs::rename(from, to).map_err(|e| format!("{}: {e}", to.display()))?;
        }
        Ok(paths)
    }

    /// The key of what is made of `parts` alone.
    pub fn key_of(parts: &impl Hash) -> u64 {
        let mut hasher = DefaultHasher::new();
        parts.hash(&mut hasher);
        hasher.finish()
    }

    /// Writes what people may want to read about this build. Nothing depends on it.
    pub fn report(&self, name: &str, text: &str) {
        let _ = fs::write(self.folder.join(name), text);
    }

    /// Deletes what has not been used for long.
    pub fn expire(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let modified = entry.metadata().and_then(|m| m.modified());
            if modified.is_ok_and(|m| m.elapsed().is_ok_and(|age| age > KEEP)) {
                // Another build may have been faster.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// What a translation unit is made of: its file, and our headers that it includes.
pub struct Sources {
    /// Folders that headers are looked for in, after the folder of the file that includes them.
    pub include: &'static [&'static str],
    /// A folder whose headers this compiler never sees (they are for the other one).
    pub never: Option<&'static str>,
}

impl Sources {
    /// The hash of everything that decides the result of compiling `file` with `flags`.
    pub fn key(&self, file: &Path, flags: &impl Hash) -> Result<u64> {
        let mut hasher = DefaultHasher::new();
        flags.hash(&mut hasher);
        file.hash(&mut hasher);
        for (path, text) in self.closure(file)? {
            path.hash(&mut hasher);
            text.hash(&mut hasher);
        }
        Ok(hasher.finish())
    }

    /// `file` and its headers, without those of `cuda/include/abi/` that the rest uses nothing of: `abi.h`
    /// includes all of them, and a change of one operation's structs should not compile all kernels again.
    fn closure(&self, file: &Path) -> Result<Vec<(PathBuf, String)>> {
        let mut seen = BTreeSet::new();
        let mut found = Vec::new();
        let mut open = vec![file.to_owned()];
        while let Some(path) = open.pop() {
            let name = path.canonicalize().map_err(|e| format!("{}: {e}", path.display()))?;
            if !seen.insert(name) {
                continue;
            }
            let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            let beside = path.parent().unwrap_or(Path::new("."));
            for name in includes(&text) {
                let folders = [beside].into_iter().chain(self.include.iter().map(Path::new));
                // What is not ours belongs to the system, and the compiler's version stands for it.
                open.extend(folders.map(|f| f.join(name)).find(|p| p.is_file() && !self.is_hidden(p)));
            }
            found.push((path, text));
        }
        let optional =
            |(path, _): &(PathBuf, String)| path.parent().is_some_and(|p| p.ends_with("include/abi"));
        let (mut unused, mut used): (Vec<_>, Vec<_>) = found.into_iter().partition(optional);
        loop {
            let words: BTreeSet<&str> = used.iter().flat_map(|(_, text)| words(text)).collect();
            let needed = unused.iter().position(|(_, text)| defines(text).any(|name| words.contains(name)));
            match needed {
                Some(at) => used.push(unused.swap_remove(at)),
                None => break,
            }
        }
        used.sort();
        Ok(used)
    }

    fn is_hidden(&self, path: &Path) -> bool {
        self.never.is_some_and(|never| {
            let folder = path.canonicalize().ok();
            folder.is_some_and(|p| Path::new(never).canonicalize().is_ok_and(|n| p.starts_with(n)))
        })
    }
}

/// Names in quotes after `#include`.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let name = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?;
        name.trim_start().strip_prefix('"')?.split('"').next()
    })
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// What a header of parameter structs gives others to name: types, macros, enumerators.
fn defines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let code = line.split("//").next().unwrap_or_default().trim();
        let first = |rest| words(rest).next();
        let after = |keyword| code.strip_prefix(keyword);
        if let Some(rest) = after("}").or(after("#define ")).or(after("enum ")).or(after("struct ")) {
            return first(rest);
        }
        if after("typedef ").is_some() {
            return if code.ends_with(';') { words(code).last() } else { None };
        }
        // A macro's or enumerator's name alone on its line: `GEMM_STORE = 0,`.
        let name = first(code)?;
        let rest = code[name.len()..].trim_start();
        (code.starts_with(name) && (rest.starts_with('=') || rest.starts_with(','))).then_some(name)
    })
}
