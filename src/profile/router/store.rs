//! Recorded routers as files: in the cache folder by their model, and wherever somebody copies them.
//!
//! ```text
//! $TANDEM_HOME/profiles/router-<key>.json     the key is a hash of the model's identity
//! ```

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::model::{Experts, ModelSpec, RouterProfile};
use crate::profile::identity::{ModelIdentity, digits};
use crate::profile::store::ProfileStore;
use crate::{Error, Result, atomic_file, small_file};

/// Layout of the file: raised whenever a field changes its meaning.
const SCHEMA: u32 = 1;

/// Most bytes of a file.
const MAX_BYTES: u64 = 4 << 20;

/// What the routers of a model chose, and over which text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterRecord {
    /// Layout of the file.
    pub schema: u32,
    /// Whose routers.
    pub model: ModelIdentity,
    /// What they read.
    pub text: RouterText,
    /// What they chose.
    pub router: RouterProfile,
    /// Tokens of `router` that were not of the text, but of what ran.
    #[serde(default)]
    pub learned: u64,
}

/// The text that a router was recorded over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterText {
    /// Its file, or a description.
    pub name: String,
    /// A hash of all of it: 16 hexadecimal digits.
    pub hash: String,
    /// Most tokens of it that were to be read.
    pub limit: u64,
    /// Whether tokens and weights are random ones, which say nothing about real text.
    pub random: bool,
}

impl RouterText {
    /// The first `limit` tokens of `text`.
    pub fn of(name: impl Into<String>, text: &str, limit: u64) -> RouterText {
        RouterText { name: name.into(), hash: digits(text), limit, random: false }
    }

    /// So many random tokens, for a model of random weights.
    pub fn random(limit: u64) -> RouterText {
        let name = "random tokens";
        RouterText { random: true, ..RouterText::of(name, name, limit) }
    }

    /// None: nothing was recorded.
    pub fn none() -> RouterText {
        RouterText::of("no text", "", 0)
    }
}

/// The first field, whatever else the file's version has.
#[derive(Deserialize)]
struct Head {
    schema: u32,
}

impl RouterRecord {
    /// What was counted over a text, of a model.
    pub fn new(model: ModelIdentity, text: RouterText, router: RouterProfile) -> RouterRecord {
        RouterRecord { schema: SCHEMA, model, text, router, learned: 0 }
    }

    /// Before anything was counted, of a model with these experts: each chosen as often as any other.
    pub fn unknown(model: ModelIdentity, of: &Experts) -> RouterRecord {
        RouterRecord::new(model, RouterText::none(), RouterProfile::uniform(of))
    }

    /// Adds what the routers chose while the model ran.
    pub fn learn(&mut self, chosen: &RouterProfile) {
        let before = self.router.tokens;
        self.router.add(chosen);
        self.learned += self.router.tokens - before;
    }

    /// Reads a record's text; `file` is its name for messages.
    ///
    /// # Errors
    /// [`Error::Format`]: no JSON, another schema, or counts that a model with these sizes cannot have.
    pub fn parse(file: &str, text: &str, spec: &ModelSpec) -> Result<RouterRecord> {
        let broken = |e: serde_json::Error| Error::format(file, format!("not a profile of a router: {e}"));
        let head: Head = serde_json::from_str(text).map_err(broken)?;
        if head.schema != SCHEMA {
            return Err(Error::format(
                file,
                format!(
                    "a router's profile of schema {}, this version reads {SCHEMA}; run tandem profile again",
                    head.schema
                ),
            ));
        }
        let record: RouterRecord = serde_json::from_str(text).map_err(broken)?;
        record.router.check(file, spec)?;
        let (learned, all) = (record.learned, record.router.tokens);
        if learned > all {
            return Err(Error::format(
                file,
                format!("{learned} tokens were learned, of {all} that were counted"),
            ));
        }
        Ok(record)
    }

    /// Reads a file, for any model with these sizes: other weight types of the same model choose about alike.
    ///
    /// # Errors
    /// [`Error::Io`]; a file that is too long; as [`RouterRecord::parse`].
    pub fn read(path: &Path, spec: &ModelSpec) -> Result<RouterRecord> {
        let text = small_file::read_text(path, MAX_BYTES)?.ok_or_else(|| small_file::missing(path))?;
        RouterRecord::parse(&path.display().to_string(), &text, spec)
    }

    /// Writes all of it, or nothing.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self).expect("numbers and strings");
        atomic_file::replace(path, |to| to.write_all(text.as_bytes()).and_then(|()| to.write_all(b"\n")))
    }
}

impl ProfileStore {
    /// Where the router's profile of a model belongs.
    pub fn router_path(&self, model: &ModelIdentity) -> PathBuf {
        let key = digits(&serde_json::to_string(model).expect("strings and numbers"));
        self.folder().join(format!("router-{key}.json"))
    }

    /// What was recorded of a model's routers, if anything was.
    ///
    /// # Errors
    /// A file that is there and is damaged, or that is another model's.
    pub fn load_router(&self, model: &ModelIdentity, spec: &ModelSpec) -> Result<Option<RouterRecord>> {
        let path = self.router_path(model);
        if !path.exists() {
            return Ok(None);
        }
        let record = RouterRecord::read(&path, spec)?;
        if record.model != *model {
            let name = |m: &ModelIdentity| format!("{} ({} bytes, {})", m.name, m.bytes, m.hash);
            return Err(Error::format(
                path.display().to_string(),
                format!("a router's profile of {}, wanted that of {}", name(&record.model), name(model)),
            ));
        }
        Ok(Some(record))
    }

    /// Adds what the routers of a model chose while it ran to what is kept of them, recorded or learned before. Returns where it is.
    ///
    /// # Errors
    /// As [`ProfileStore::load_router`] and [`ProfileStore::save_router`]; a model without experts; more tokens than can be counted.
    pub fn learn_router(
        &self,
        model: &ModelIdentity,
        spec: &ModelSpec,
        chosen: &RouterProfile,
    ) -> Result<PathBuf> {
        let Some(experts) = &spec.experts else {
            return Err(Error::usage(format!("{} has no experts, so no router chooses any", spec.name)));
        };
        let kept = self.load_router(model, spec)?;
        let mut record = kept.unwrap_or_else(|| RouterRecord::unknown(model.clone(), experts));
        record.learn(chosen);
        record.router.check("what routers chose", spec)?;
        self.save_router(&record)
    }

    /// Keeps `record`, in the place of an older one; returns where.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save_router(&self, record: &RouterRecord) -> Result<PathBuf> {
        std::fs::create_dir_all(self.folder()).map_err(|e| Error::io(self.folder(), e))?;
        let path = self.router_path(&record.model);
        record.write(&path)?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;

    fn record(name: &str) -> (RouterRecord, ModelSpec) {
        let m = synth::outline(name).unwrap();
        let router = RouterProfile::uniform(m.spec.experts.as_ref().unwrap());
        let model = ModelIdentity::of(&m.spec, &m.weights, &m.source);
        (RouterRecord::new(model, RouterText::random(99), router), m.spec)
    }

    #[test]
    fn what_is_kept_is_found_by_its_model_alone() {
        let home = tempfile::tempdir().unwrap();
        let store = ProfileStore::at(home.path());
        let (a, spec) = record("tiny-qwen3-moe");
        let (b, _) = record("tiny-qwen3-moe,dtype=q8_0");
        assert_eq!(store.load_router(&a.model, &spec).unwrap(), None);
        let path = store.save_router(&a).unwrap();
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("router-"));
        assert_eq!(store.load_router(&a.model, &spec).unwrap().as_ref(), Some(&a));
        assert_eq!(store.load_router(&b.model, &spec).unwrap(), None);
        // Under another model's name.
        std::fs::copy(&path, store.router_path(&b.model)).unwrap();
        let said = store.load_router(&b.model, &spec).unwrap_err().to_string();
        assert!(
            said.contains("a router's profile of tiny-qwen3-moe (") && said.contains("wanted that of"),
            "{said}"
        );
        // Given by its name it serves any weight type, and no other model.
        assert_eq!(RouterRecord::read(&path, &spec).unwrap(), a);
        let other = synth::spec("tiny-granite-moe").unwrap();
        let said = RouterRecord::read(&path, &other).unwrap_err().to_string();
        assert!(said.contains("experts") && said.contains("the model has"), "{said}");
    }

    #[test]
    fn what_is_learned_is_added_to_what_is_known() {
        let home = tempfile::tempdir().unwrap();
        let store = ProfileStore::at(home.path());
        let (recorded, spec) = record("tiny-qwen3-moe");
        let of = spec.experts.as_ref().unwrap();
        let mut chosen = RouterProfile::empty(of);
        // 50 tokens, of a layer alone: others are whole on a device.
        chosen.layers[0].counts[..of.used].fill(50);
        chosen.count_tokens();
        let path = store.learn_router(&recorded.model, &spec, &chosen).unwrap();
        let kept = store.load_router(&recorded.model, &spec).unwrap().unwrap();
        assert_eq!((path, kept.learned), (store.router_path(&recorded.model), 50));
        assert_eq!(kept.text, RouterText::none());
        // Equal use before.
        let before = of.used as u64;
        assert_eq!(kept.router.layers[0].counts[0], before + 50);
        assert_eq!(kept.router.layers[0].counts[of.used], before);
        assert!(kept.router.layers[1].counts.iter().all(|&n| n == before));
        assert_eq!(kept.router.by_use(0)[..of.used], (0..of.used as u32).collect::<Vec<_>>());
        // More of the same; then over a text.
        store.learn_router(&recorded.model, &spec, &chosen).unwrap();
        let kept = store.load_router(&recorded.model, &spec).unwrap().unwrap();
        assert_eq!((kept.learned, kept.router.layers[0].counts[0]), (100, before + 100));
        store.save_router(&recorded).unwrap();
        store.learn_router(&recorded.model, &spec, &chosen).unwrap();
        let kept = store.load_router(&recorded.model, &spec).unwrap().unwrap();
        assert_eq!((kept.learned, &kept.text), (50, &recorded.text));
        // More than can be counted: what is kept stays.
        chosen.layers[0].counts[..of.used].fill(1 << 41);
        chosen.count_tokens();
        let said = store.learn_router(&recorded.model, &spec, &chosen).unwrap_err().to_string();
        assert!(said.contains("what routers chose: ") && said.contains("tokens were counted"), "{said}");
        assert_eq!(store.load_router(&recorded.model, &spec).unwrap().unwrap(), kept);
        let dense = synth::spec("tiny-llama").unwrap();
        let said = store.learn_router(&recorded.model, &dense, &chosen).unwrap_err().to_string();
        assert!(said.contains("tiny-llama has no experts"), "{said}");
    }

    #[test]
    fn damaged_files_are_errors() {
        let (record, spec) = record("tiny-qwen3-moe");
        let text = serde_json::to_string(&record).unwrap();
        let parse = |text: &str| RouterRecord::parse("r.json", text, &spec);
        assert_eq!(parse(&text).unwrap(), record);
        for end in 0..text.len() {
            assert!(parse(&text[..end]).is_err(), "cut at byte {end}");
        }
        for (from, to, want) in [
            ("\"schema\":1", "\"schema\":9", "r.json: a router's profile of schema 9, this version reads 1"),
            ("\"tokens\":8", "\"tokens\":-8", "r.json: not a profile of a router"),
            ("\"tokens\":8", "\"tokens\":0", "r.json: 0 tokens were counted"),
            ("\"tokens\":8", "\"tokens\":7", "r.json: layer 0: 24 choices were counted, of 7 tokens"),
            ("\"used\":3", "\"used\":2", "2 experts of a token were counted, the model has 3"),
            ("\"counts\"", "\"count\"", "unknown field"),
            ("\"learned\":0", "\"learned\":9", "r.json: 9 tokens were learned, of 8 that were counted"),
        ] {
            assert!(text.contains(from), "{from} in {text}");
            let said = parse(&text.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(said.contains(want), "{want}: {said}");
        }
    }
}
