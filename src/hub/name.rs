//! What users may call a model that is not a file of theirs.

use super::catalog::{self, Entry};
use crate::{Error, Result};

/// A model by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelName {
    /// One of [`super::CATALOG`].
    Catalog(&'static Entry<'static>),
    /// A repository on the Hugging Face hub.
    Hub(HubName),
}

/// `[hf:]OWNER/REPO[@REV][/FILE.gguf]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    /// User or organisation.
    pub owner: String,
    /// Repository.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// One file of the repository; `None` is the whole model.
    pub file: Option<String>,
}

impl ModelName {
    /// Reads a name.
    ///
    /// # Errors
    /// The text is neither in the catalogue nor of the form of a hub name; the message lists both.
    pub fn parse(text: &str) -> Result<ModelName> {
        if let Some(entry) = catalog::find(text) {
            return Ok(ModelName::Catalog(entry));
        }
        if let Some(name) = HubName::parse(text) {
            return Ok(ModelName::Hub(name));
        }
        let known: Vec<_> = catalog::CATALOG.iter().map(|e| e.name).collect();
        Err(Error::usage(format!(
            "{text}: no such model; known names are {}, and hf:OWNER/REPO[@REV][/FILE.gguf] for the Hugging Face hub",
            known.join(", ")
        )))
    }
}

impl HubName {
    /// Reads `[hf:]OWNER/REPO[@REV][/FILE.gguf]`, or the address of a repository or of a file in it as a browser
    /// shows it; `None` if it has another form.
    pub fn parse(text: &str) -> Option<HubName> {
        if let Some(path) =
            ["https://huggingface.co/", "https://hf.co/"].iter().find_map(|s| text.strip_prefix(s))
        {
            return Self::from_address(path);
        }
        let text = text.strip_prefix("hf:").unwrap_or(text);
        let (owner, rest) = text.split_once('/')?;
        let (repo, file) = match rest.split_once('/') {
            Some((repo, file)) => (repo, Some(file)),
            None => (rest, None),
        };
        let (repo, revision) = repo.split_once('@').unwrap_or((repo, "main"));
        let file_ok = |f: &str| f.ends_with(".gguf") && f.split('/').all(component_ok);
        let ok = [owner, repo, revision].into_iter().all(component_ok) && file.is_none_or(file_ok);
        ok.then(|| HubName {
            owner: owner.into(),
            repo: repo.into(),
            revision: revision.into(),
            file: file.map(Into::into),
        })
    }

    /// What comes after the host: `OWNER/REPO[/(tree|blob|resolve)/REV[/FILE.gguf]]`.
    fn from_address(path: &str) -> Option<HubName> {
        let path = path.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
        let mut parts = path.splitn(5, '/');
        let (owner, repo) = (parts.next()?, parts.next()?);
        let name = match (parts.next(), parts.next(), parts.next()) {
            (None, ..) => format!("{owner}/{repo}"),
            (Some("tree" | "blob" | "resolve"), Some(rev), None) => format!("{owner}/{repo}@{rev}"),
            (Some("blob" | "resolve"), Some(rev), Some(file)) => format!("{owner}/{repo}@{rev}/{file}"),
            _ => return None,
        };
        Self::parse(&name)
    }

    /// `OWNER/REPO@REV`.
    pub fn repository(&self) -> String {
        format!("{}/{}@{}", self.owner, self.repo, self.revision)
    }
}

/// Whether `text` can be part of a path and of a URL as it is: it neither climbs nor needs escaping.
pub(super) fn component_ok(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 128
        && !text.starts_with('.')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'+'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(owner: &str, repo: &str, revision: &str, file: Option<&str>) -> Option<HubName> {
        Some(HubName {
            owner: owner.into(),
            repo: repo.into(),
            revision: revision.into(),
            file: file.map(Into::into),
        })
    }

    #[test]
    fn hub_names() {
        assert_eq!(HubName::parse("a/b"), hub("a", "b", "main", None));
        assert_eq!(HubName::parse("hf:a/b@v1.0"), hub("a", "b", "v1.0", None));
        assert_eq!(HubName::parse("hf:a/b/c.gguf"), hub("a", "b", "main", Some("c.gguf")));
        assert_eq!(HubName::parse("a/b@r/sub/c.gguf"), hub("a", "b", "r", Some("sub/c.gguf")));
    }

    #[test]
    fn addresses_out_of_a_browser() {
        let address = |path: &str| HubName::parse(&format!("https://huggingface.co/{path}"));
        assert_eq!(address("a/b"), hub("a", "b", "main", None));
        assert_eq!(address("a/b/?library=x#files"), hub("a", "b", "main", None));
        assert_eq!(address("a/b/tree/v1"), hub("a", "b", "v1", None));
        assert_eq!(address("a/b/blob/main/s/c.gguf"), hub("a", "b", "main", Some("s/c.gguf")));
        assert_eq!(address("a/b/resolve/v1/c.gguf?download=true"), hub("a", "b", "v1", Some("c.gguf")));
        assert_eq!(HubName::parse("https://hf.co/a/b"), hub("a", "b", "main", None));
        for bad in
            ["", "a", "a/b/discussions", "a/b/blob/main/x.bin", "datasets/a/b", "a/b/tree/v1/s", "../b"]
        {
            assert_eq!(address(bad), None, "{bad}");
        }
        assert_eq!(HubName::parse("https://example.com/a/b"), None);
    }

    #[test]
    fn names_that_would_climb_or_need_escaping_are_refused() {
        for bad in [
            "",
            "a",
            "a/",
            "/a",
            "../a",
            "a/..",
            "a/b/../c.gguf",
            "a/b/c.txt",
            "a/b?x",
            "a b/c",
            "a/b@/c.gguf",
            "a/b//c.gguf",
        ] {
            assert_eq!(HubName::parse(bad), None, "{bad}");
            assert!(ModelName::parse(bad).is_err(), "{bad}");
        }
    }
}
