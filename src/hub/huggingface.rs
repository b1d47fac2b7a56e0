//! The Hugging Face hub: a `.gguf` file of a repository, all files of a split one, or the files of a safetensors model.
//!
//! `GET {endpoint}/api/models/{owner}/{repo}/revision/{rev}?blobs=true` lists the files with their
//! lengths and, for the large ones, SHA-256; `GET {endpoint}/{owner}/{repo}/resolve/{commit}/{file}`
//! has the bytes, often behind a redirect to another host (which never sees the token).

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::cache::{Cache, bytes_in, bytes_of_model};
use super::download::{self, Want};
use super::name::{HubName, component_ok};
use super::{Hub, Pulled, create_dir};
use crate::model::formats::gguf::PartName;
use crate::progress::Progress;
use crate::{Error, Result, small_file};

/// The small files of a model folder that are of use to us.
const COMPANIONS: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

#[derive(Deserialize)]
struct Listing {
    #[serde(default)]
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize, Clone)]
struct Sibling {
    rfilename: String,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    lfs: Option<Lfs>,
}

#[derive(Deserialize, Clone)]
struct Lfs {
    #[serde(default, alias = "oid")]
    sha256: Option<String>,
    #[serde(default)]
    size: Option<u64>,
}

impl Sibling {
    fn bytes(&self) -> Option<u64> {
        self.lfs.as_ref().and_then(|l| l.size).or(self.size)
    }
    fn sha256(&self) -> Option<&str> {
        let sum = self.lfs.as_ref()?.sha256.as_deref()?;
        Some(sum.strip_prefix("sha256:").unwrap_or(sum))
    }
}

/// Where the files of a name belong.
fn base(cache: &Cache, name: &HubName) -> PathBuf {
    cache.models().join("hf").join(&name.owner).join(&name.repo).join(&name.revision)
}

/// Where `name` is in the cache, if it is there.
pub(super) fn lookup(cache: &Cache, name: &HubName) -> Option<PathBuf> {
    let base = base(cache, name);
    if let Some(file) = &name.file {
        return Some(base.join("gguf").join(file)).filter(|p| p.is_file());
    }
    let folder = base.join("safetensors");
    if folder.is_dir() {
        return Some(folder);
    }
    // A repository with one GGUF file is called by its own name, too.
    let marker = small_file::read_text(&base.join("default"), 4096).ok()??;
    Some(base.join("gguf").join(marker.trim())).filter(|p| p.is_file())
}

/// Fetches `name`, unless it is there.
pub(super) fn pull(hub: &Hub, name: &HubName, force: bool, progress: &dyn Progress) -> Result<Pulled> {
    let here = || {
        let path = lookup(&hub.cache, name).filter(|_| !force)?;
        let bytes = bytes_of_model(&path);
        Some(Pulled { path, bytes, fetched: false })
    };
    // What is there needs no lock, so that it is found on a read-only disk, too.
    if let Some(pulled) = here() {
        return Ok(pulled);
    }
    let _lock = hub.cache.lock(&format!("hf/{}", name.repository()), progress)?;
    if let Some(pulled) = here() {
        return Ok(pulled);
    }
    let target = base(&hub.cache, name);
    let placed = |e| match e {
        Error::Network(why) => Error::Network(format!(
            "{why}; to use the model without a network, download it elsewhere and give its path with -m"
        )),
        other => other,
    };
    let listing = list(hub, name).map_err(placed)?;
    let commit = listing.sha.clone().filter(|s| component_ok(s)).unwrap_or_else(|| name.revision.clone());
    let job = Download { hub, name, commit, progress };
    let (path, bytes) = match choose(name, &listing.siblings)? {
        Choice::Gguf(files) => job.gguf(&files, &target).map_err(placed)?,
        Choice::Folder(files) => job.folder(&files, &target).map_err(placed)?,
    };
    Ok(Pulled { path, bytes, fetched: true })
}

fn list(hub: &Hub, name: &HubName) -> Result<Listing> {
    let endpoint = hub.hf_endpoint.trim_end_matches('/');
    let HubName { owner, repo, revision, .. } = name;
    let url = format!("{endpoint}/api/models/{owner}/{repo}/revision/{revision}?blobs=true");
    let (_, body) = hub.http.text(&url, &token(hub))?;
    serde_json::from_str(&body)
        .map_err(|e| Error::Network(format!("{url}: not a listing of a repository: {e}")))
}

fn token(hub: &Hub) -> Vec<(&'static str, String)> {
    hub.hf_token.as_ref().map(|t| ("authorization", format!("Bearer {}", t.trim()))).into_iter().collect()
}

#[derive(Debug)]
enum Choice {
    /// The model's file, or all of a split one, the first of which is its path.
    Gguf(Vec<Sibling>),
    Folder(Vec<Sibling>),
}

impl std::fmt::Debug for Sibling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.rfilename)
    }
}

/// Which files of the repository make the model.
fn choose(name: &HubName, files: &[Sibling]) -> Result<Choice> {
    let repository = name.repository();
    // Names become paths: what would climb out of the folder is not ours to fetch.
    let safe = |f: &&Sibling| f.rfilename.split('/').all(component_ok);
    let ggufs: Vec<_> = files.iter().filter(safe).filter(|f| f.rfilename.ends_with(".gguf")).collect();
    let names = |list: &[&Sibling]| list.iter().map(|f| f.rfilename.as_str()).collect::<Vec<_>>().join(", ");
    if let Some(file) = &name.file {
        let found = ggufs.iter().find(|f| f.rfilename == *file).ok_or_else(|| {
            let have = if ggufs.is_empty() { "no .gguf file".to_owned() } else { names(&ggufs) };
            Error::usage(format!("{repository}: no {file}; it has {have}"))
        })?;
        return parts(found, &ggufs).map(Choice::Gguf);
    }
    let shards: Vec<_> = files
        .iter()
        .filter(safe)
        .filter(|f| !f.rfilename.contains('/') && f.rfilename.ends_with(".safetensors"))
        .collect();
    // Some repositories keep a second copy of the weights under another name (`consolidated`).
    let standard: Vec<_> = shards.iter().copied().filter(|f| f.rfilename.starts_with("model")).collect();
    let shards = if standard.is_empty() { shards } else { standard };
    if !shards.is_empty() {
        let companions = files.iter().filter(|f| COMPANIONS.contains(&f.rfilename.as_str()));
        return Ok(Choice::Folder(companions.chain(shards).cloned().collect()));
    }
    let is_model = |file: &&Sibling| PartName::parse(&file.rfilename).is_none_or(|name| name.number == 1);
    match ggufs.iter().copied().filter(is_model).collect::<Vec<_>>()[..] {
        [only] => parts(only, &ggufs).map(Choice::Gguf),
        [] => Err(Error::Unsupported(format!("{repository}: has neither .safetensors nor .gguf files"))),
        ref several => Err(Error::usage(format!(
            "{repository}: has several files, name one of them (hf:OWNER/REPO/FILE.gguf): {}",
            names(several)
        ))),
    }
}

/// The file `first`, and the other ones of its model if its name says that there are any.
fn parts(first: &Sibling, ggufs: &[&Sibling]) -> Result<Vec<Sibling>> {
    let file = &first.rfilename;
    let Some(name) = PartName::parse(file) else { return Ok(vec![first.clone()]) };
    if name.number > 1 {
        let (number, count, first) = (name.number, name.count, name.of(1));
        return Err(Error::usage(format!(
            "{file}: file {number} of a model of {count}; name the first, {first}"
        )));
    }
    let part = |number| {
        let file = name.of(number);
        let found = ggufs.iter().find(|f| f.rfilename == file).copied().cloned();
        let count = name.count;
        found.ok_or_else(|| {
            Error::format(file, format!("not in the repository, one of the {count} files of the model"))
        })
    };
    (1..=name.count).map(part).collect()
}

struct Download<'a> {
    hub: &'a Hub,
    name: &'a HubName,
    /// Files are fetched from one commit, so that a push in between cannot mix two versions.
    commit: String,
    progress: &'a dyn Progress,
}

impl Download<'_> {
    fn gguf(&self, files: &[Sibling], target: &Path) -> Result<(PathBuf, u64)> {
        let folder = target.join("gguf");
        let path = folder.join(&files[0].rfilename);
        create_dir(path.parent().expect("a cached model lies in a folder"))?;
        let downloads = self.hub.cache.downloads()?;
        let staged = |file: &Sibling| downloads.join(self.key(&file.rfilename));
        self.require_space(files, staged)?;
        for file in files {
            self.download(file, &staged(file))?;
        }
        // The model is there when its first file is: that one comes last, and goes first if it is replaced.
        if files.len() > 1 && path.exists() {
            std::fs::remove_file(&path).map_err(|e| Error::io(&path, e))?;
        }
        for file in files.iter().rev() {
            let path = folder.join(&file.rfilename);
            std::fs::rename(staged(file), &path).map_err(|e| Error::io(&path, e))?;
        }
        if self.name.file.is_none() {
            let marker = target.join("default");
            std::fs::write(&marker, &files[0].rfilename).map_err(|e| Error::io(marker, e))?;
        }
        let bytes = bytes_of_model(&path);
        Ok((path, bytes))
    }

    /// Fails if the disk has no room for those of `files` that are not yet where `staged` has them.
    fn require_space(&self, files: &[Sibling], staged: impl Fn(&Sibling) -> PathBuf) -> Result<()> {
        let Some(first) = files.first() else { return Ok(()) };
        let missing = files.iter().filter(|f| !staged(f).exists());
        let missing = missing.filter_map(Sibling::bytes).fold(0, u64::saturating_add);
        download::require_space(&staged(first), missing, &self.name.repository())
    }

    fn folder(&self, files: &[Sibling], target: &Path) -> Result<(PathBuf, u64)> {
        let staging = self.hub.cache.downloads()?.join(self.key("safetensors"));
        create_dir(&staging)?;
        create_dir(target)?;
        self.require_space(files, |file| staging.join(&file.rfilename))?;
        let mut bytes = 0;
        for file in files {
            bytes += bytes_in(&self.download(file, &staging.join(&file.rfilename))?);
        }
        let path = target.join("safetensors");
        if path.exists() {
            // A folder cannot be replaced in one step, but it can be moved out of the way in one.
            let old = staging.with_extension("old");
            let _ = std::fs::remove_dir_all(&old);
            std::fs::rename(&path, &old).map_err(|e| Error::io(&path, e))?;
            let _ = std::fs::remove_dir_all(&old);
        }
        std::fs::rename(&staging, &path).map_err(|e| Error::io(&path, e))?;
        Ok((path, bytes))
    }

    /// A name for half-finished files that no other model, revision or file shares.
    fn key(&self, file: &str) -> String {
        format!("hf--{}--{}--{}--{}", self.name.owner, self.name.repo, self.commit, file.replace('/', "--"))
    }

    fn download(&self, file: &Sibling, path: &Path) -> Result<PathBuf> {
        let endpoint = self.hub.hf_endpoint.trim_end_matches('/');
        let HubName { owner, repo, .. } = self.name;
        let url = format!("{endpoint}/{owner}/{repo}/resolve/{}/{}", self.commit, file.rfilename);
        let want = Want {
            url: &url,
            what: &file.rfilename,
            bytes: file.bytes(),
            sha256: file.sha256(),
            headers: &token(self.hub),
        };
        download::fetch(&self.hub.http, &want, path, self.progress)?;
        Ok(path.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn siblings(names: &[&str]) -> Vec<Sibling> {
        names.iter().map(|n| Sibling { rfilename: n.to_string(), size: None, lfs: None }).collect()
    }

    fn choice(name: &str, files: &[&str]) -> Result<String> {
        choose(&HubName::parse(name).unwrap(), &siblings(files)).map(|c| format!("{c:?}"))
    }

    #[test]
    fn which_files_make_a_model() {
        let all =
            ["README.md", "config.json", "model.safetensors", "consolidated.safetensors", "tokenizer.json"];
        assert_eq!(choice("o/r", &all).unwrap(), "Folder([config.json, tokenizer.json, model.safetensors])");
        assert_eq!(choice("o/r", &["a.gguf", ".gitattributes"]).unwrap(), "Gguf([a.gguf])");
        assert_eq!(choice("o/r/b.gguf", &["a.gguf", "b.gguf"]).unwrap(), "Gguf([b.gguf])");
        let several = choice("o/r", &["a.gguf", "b.gguf"]).unwrap_err().to_string();
        assert!(several.contains("a.gguf, b.gguf"), "{several}");
        assert!(choice("o/r", &["pytorch_model.bin"]).is_err());
        assert!(choice("o/r/c.gguf", &["a.gguf"]).is_err());
    }

    #[test]
    fn a_split_model_is_all_of_its_files() {
        let all = ["q/m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "q/m-00001-of-00002.gguf"];
        let of = "Gguf([q/m-00001-of-00002.gguf, q/m-00002-of-00002.gguf])";
        assert_eq!(choice("o/r/q/m-00001-of-00002.gguf", &all).unwrap(), of);
        assert_eq!(choice("o/r", &[all[0], all[2]]).unwrap(), of, "the only model of a repository");
        let error = |name, files: &[&str]| choice(name, files).unwrap_err().to_string();
        let later = error("o/r/q/m-00002-of-00002.gguf", &all);
        assert!(later.contains("file 2 of a model of 2; name the first, q/m-00001-of-00002.gguf"), "{later}");
        let incomplete = error("o/r/m-00001-of-00002.gguf", &all);
        assert!(incomplete.starts_with("m-00002-of-00002.gguf: not in the repository"), "{incomplete}");
        let several = error("o/r", &all);
        assert!(several.ends_with(": m-00001-of-00002.gguf, q/m-00001-of-00002.gguf"), "{several}");
        assert!(choice("o/r/m-00001-of-00001.gguf", &["m-00001-of-00001.gguf"]).is_ok());
        assert!(choice("o/r/out-of-00003.gguf", &["out-of-00003.gguf"]).is_ok());
    }

    #[test]
    fn files_that_would_leave_the_folder_are_ignored() {
        assert!(choice("o/r", &["../../evil.gguf", "../x.safetensors"]).is_err());
    }

    #[test]
    fn metadata_of_large_files() {
        let text = r#"{"rfilename":"a","size":5,"lfs":{"oid":"sha256:ab","size":7,"pointerSize":1}}"#;
        let file: Sibling = serde_json::from_str(text).unwrap();
        assert_eq!((file.bytes(), file.sha256()), (Some(7), Some("ab")));
    }
}
