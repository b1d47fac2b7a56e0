//! The tuning table as measured on this machine: `tandem tune`.
//!
//! | a file | what |
//! |---|---|
//! | `contest` | the same product under several entries, call by call in turn, answers checked |
//! | `tiles` | entries of the AMX tier: thresholds between kernels, f16 arithmetic, packing when a model is loaded |
//! | `vector_rows` | attention of few rows by tiles and by vector kernels |
//! | this one | which entries are tried on which weights, and the file that keeps what came of it |
//!
//! ```text
//! $TANDEM_HOME/tuning/<key>.json     the key is a hash of the CPU model, the version and the number of weight types
//! ```
//!
//! A default stands unless an alternative takes at least [`GAIN`] less time: noise does not change a table.

mod contest;
mod tiles;
mod vector_rows;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::contest::{Contest, WeightSubject};
use super::Effort;
use super::identity::{cpu_model, digits};
use crate::host::Pool;
use crate::hub::Cache;
use crate::simd::tuning::{LinearTuning, Tuning};
use crate::simd::{CpuId, Isa};
use crate::tensor::DType;
use crate::{Error, Result, atomic_file, small_file};

/// Layout of the file: raised whenever an entry changes its meaning.
const SCHEMA: u32 = 5;

/// Most bytes of a file.
const MAX_BYTES: u64 = 1 << 20;

/// Share of the default's time that an alternative has to save.
const GAIN: f64 = 0.03;

/// A table with what it is of, and how it came about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tuned {
    /// Layout of this value.
    pub schema: u32,
    /// Version of Tandem.
    pub version: String,
    /// The CPU, as it names itself, with its numbers.
    pub cpu: String,
    /// The tier that was measured.
    pub isa: String,
    /// The table.
    pub tuning: Tuning,
    /// What was compared.
    pub findings: Vec<Finding>,
}

/// One comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    /// Storage type of the weights.
    pub dtype: String,
    /// The entry of the table.
    pub entry: String,
    /// Tokens multiplied together; of attention, rows of a KV head.
    pub tokens: usize,
    /// Which of `candidates` was chosen; the first is the default.
    pub chosen: usize,
    /// What was tried.
    pub candidates: Vec<TimedValue>,
}

/// A value of an entry, and the time it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedValue {
    /// The value in words.
    pub value: String,
    /// Seconds of a product: the first quartile.
    pub seconds: f64,
    /// Of weights that are packed for it although other values of the entry read them as they lie in the file: bytes that the
    /// threads pack a second, from memory. That time is added to loading a model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packed_per_s: Option<f64>,
}

/// What may be tried for one entry: its value in words, and the change to the entries.
type Choice = (String, Box<dyn Fn(&mut LinearTuning)>);

fn choice(value: impl ToString, change: impl Fn(&mut LinearTuning) + 'static) -> Choice {
    (value.to_string(), Box::new(change))
}

/// Distances of prefetches that are tried, bytes.
const AHEAD: [usize; 3] = [2048, 4096, 8192];

/// Sizes of chunks that are tried, bytes.
const CHUNKS: [usize; 4] = [24 << 10, 48 << 10, 96 << 10, 192 << 10];

/// Steps of [`measure_tuning`], for a progress bar.
pub const TUNING_STEPS: u64 = DType::ALL.len() as u64 + 1;

/// Measures the entries on this machine. `progress` is called after each of [`TUNING_STEPS`] steps.
///
/// # Errors
/// The reference tier, which has nothing to tune; a candidate whose answer is wrong: then nothing is to be kept.
pub fn measure_tuning(pool: &Pool, isa: Isa, effort: Effort, progress: &dyn Fn()) -> Result<Tuned> {
    if isa == Isa::Reference {
        return Err(Error::usage("the reference tier has no kernels to tune"));
    }
    let mut tuning = Tuning::default_for(CpuId::get());
    let mut findings = Vec::new();
    for dtype in DType::ALL {
        let mut one =
            OneDType { pool, isa, effort, dtype, entries: tuning.linear(dtype), findings: Vec::new() };
        one.measure()?;
        *tuning.linear_mut(dtype) = one.entries;
        findings.append(&mut one.findings);
        progress();
    }
    if times_tiles(isa, effort) {
        let (rows, mut found) = vector_rows::measure(pool, isa, effort)?;
        tuning.attention_vector_rows = rows;
        findings.append(&mut found);
    }
    progress();
    tuning.check().map_err(|why| Error::Run(format!("tune: {why}")))?;
    let (version, cpu) = (env!("CARGO_PKG_VERSION").to_owned(), cpu_model());
    Ok(Tuned { schema: SCHEMA, version, cpu, isa: isa.name().into(), tuning, findings })
}

/// Whether entries of the AMX tier are measured. Emulated tiles tell nothing but that everything runs and answers are right:
/// quick runs have them, too.
fn times_tiles(isa: Isa, effort: Effort) -> bool {
    isa == Isa::Amx && (crate::amx::hardware().is_ok() || effort == Effort::Quick)
}

/// Entries for one dtype, while they are measured.
struct OneDType<'a> {
    pool: &'a Pool,
    isa: Isa,
    effort: Effort,
    dtype: DType,
    entries: LinearTuning,
    findings: Vec<Finding>,
}

impl OneDType<'_> {
    fn measure(&mut self) -> Result<()> {
        let subject = WeightSubject::new(self.dtype, self.isa, self.effort);
        let quantised = self.dtype.is_quantised();
        self.ahead(&subject)?;
        if quantised && self.isa >= Isa::Avx512 {
            let groups = |values: &[usize], set: fn(&mut LinearTuning, usize)| {
                values.iter().map(|&g| choice(g, move |e| set(e, g))).collect()
            };
            self.choose(&subject, "groups_of_1", 1, groups(&[1, 4], |e, g| e.groups_of_1 = g))?;
            // Two tokens last: where three disagree, the smaller batch decides.
            for tokens in [3, 2] {
                self.choose(&subject, "groups_of_2", tokens, groups(&[1, 4], |e, g| e.groups_of_2 = g))?;
            }
            self.choose(&subject, "groups_of_4", 4, groups(&[1, 2, 4], |e, g| e.groups_of_4 = g))?;
            self.choose(&subject, "groups_of_8", 8, groups(&[1, 2], |e, g| e.groups_of_8 = g))?;
        }
        let chunk = |c: usize| choice(format!("{} KiB", c >> 10), move |e| e.chunk_bytes = c);
        self.choose(&subject, "chunk_bytes", 1, CHUNKS.map(chunk).into())?;
        if times_tiles(self.isa, self.effort) {
            self.tiles(&subject)?;
        }
        Ok(())
    }

    /// Prefetching for one token, and how far packed weights; where it does not pay, for two.
    fn ahead(&mut self, subject: &WeightSubject) -> Result<()> {
        for tokens in [1, 2] {
            let mut choices = vec![choice("none", move |e| e.ahead_from = e.ahead_from.max(tokens + 1))];
            if self.dtype.is_quantised() {
                choices.extend(AHEAD.map(|bytes| {
                    choice(format!("{bytes} B"), move |e| {
                        e.ahead_from = e.ahead_from.min(tokens);
                        e.ahead_bytes = bytes;
                    })
                }));
            } else {
                choices.push(choice("next rows", move |e| e.ahead_from = e.ahead_from.min(tokens)));
            }
            self.choose(subject, "ahead", tokens, choices)?;
            if self.entries.ahead_from <= tokens {
                break;
            }
        }
        Ok(())
    }

    fn with(&self, change: &dyn Fn(&mut LinearTuning)) -> LinearTuning {
        let mut entries = self.entries;
        change(&mut entries);
        entries
    }

    /// Compares `choices` for an entry that changes no results, and takes the best.
    fn choose(
        &mut self,
        subject: &WeightSubject,
        entry: &str,
        tokens: usize,
        mut choices: Vec<Choice>,
    ) -> Result<()> {
        // What stands now goes first.
        let stands = choices.iter().position(|(_, change)| self.with(change) == self.entries).unwrap_or(0);
        choices.swap(0, stands);
        let entries: Vec<LinearTuning> = choices.iter().map(|(_, change)| self.with(change)).collect();
        let seconds = Contest::new(self.pool, subject, tokens, self.effort, true).run(&entries, false)?;
        let best = best(&seconds);
        self.entries = entries[best];
        self.found(entry, tokens, best, choices.into_iter().map(|c| c.0), &seconds);
        Ok(())
    }

    fn found(
        &mut self,
        entry: &str,
        tokens: usize,
        chosen: usize,
        values: impl Iterator<Item = String>,
        seconds: &[f64],
    ) {
        let candidate = |(value, &seconds)| TimedValue { value, seconds, packed_per_s: None };
        let candidates = values.zip(seconds).map(candidate).collect();
        let dtype = self.dtype.name().to_owned();
        self.findings.push(Finding { dtype, entry: entry.into(), tokens, chosen, candidates });
    }
}

/// The least, if it is [`GAIN`] less than the first; else the first.
fn best(seconds: &[f64]) -> usize {
    let least = (0..seconds.len()).min_by(|&a, &b| seconds[a].total_cmp(&seconds[b])).unwrap_or(0);
    if seconds[least] <= seconds[0] * (1.0 - GAIN) { least } else { 0 }
}

impl Effort {
    /// Time for one comparison of so many candidates: in all, with every entry of the AMX tier, less than a minute.
    fn per_contest(self, candidates: usize) -> Duration {
        let each = match self {
            Effort::Quick => Duration::from_millis(1),
            Effort::Full => Duration::from_millis(50),
        };
        each * candidates as u32
    }
}

impl Tuned {
    /// Reads a file's text; `file` is its name for messages.
    ///
    /// # Errors
    /// [`Error::Format`]: no table, another schema, entries out of range; of another CPU or version.
    pub fn parse(file: &str, text: &str) -> Result<Tuned> {
        /// The first field of any table, whatever else its version has.
        #[derive(Deserialize)]
        struct Head {
            schema: u32,
        }
        let broken = |e: serde_json::Error| Error::format(file, format!("not a tuning table: {e}"));
        let head: Head = serde_json::from_str(text).map_err(broken)?;
        if head.schema != SCHEMA {
            let why = format!("a tuning table of schema {}, this version reads {SCHEMA}", head.schema);
            return Err(Error::format(file, why));
        }
        let tuned: Tuned = serde_json::from_str(text).map_err(broken)?;
        for (what, found, want) in
            [("version", &tuned.version, env!("CARGO_PKG_VERSION")), ("CPU", &tuned.cpu, &cpu_model())]
        {
            if found != want {
                return Err(Error::format(file, format!("a tuning table of {what} {found}, here is {want}")));
            }
        }
        tuned.tuning.check().map_err(|why| Error::format(file, why))?;
        Ok(tuned)
    }
}

/// The table of the cache folder.
#[derive(Debug, Clone)]
pub struct TuningStore {
    path: PathBuf,
}

impl TuningStore {
    /// The store in the folder that the environment names.
    ///
    /// # Errors
    /// As [`Cache::from_env`].
    pub fn from_env() -> Result<TuningStore> {
        Ok(TuningStore::at(Cache::from_env()?.home()))
    }

    /// The store in the cache folder `home`.
    pub fn at(home: &Path) -> TuningStore {
        // A table has entries for every type: one from before a type was added is not read.
        let types = DType::ALL.len();
        let key = digits(&format!("{} {} {SCHEMA} {types}", cpu_model(), env!("CARGO_PKG_VERSION")));
        TuningStore { path: home.join("tuning").join(format!("{key}.json")) }
    }

    /// Where this machine's table belongs.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The table, if there is one.
    ///
    /// # Errors
    /// A file that is there and cannot be read; as [`Tuned::parse`].
    pub fn load(&self) -> Result<Option<Tuned>> {
        let Some(text) = small_file::read_text(&self.path, MAX_BYTES)? else { return Ok(None) };
        Tuned::parse(&self.path.display().to_string(), &text).map(Some)
    }

    /// Keeps a table, in the place of an older one, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn save(&self, tuned: &Tuned) -> Result<()> {
        let folder = self.path.parent().expect("a file in a folder");
        std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
        let text = serde_json::to_string_pretty(tuned).expect("numbers and strings");
        atomic_file::replace(&self.path, |to| {
            to.write_all(text.as_bytes()).and_then(|()| to.write_all(b"\n"))
        })
    }
}

/// Makes the table that `tandem tune` has kept the one in use, before any kernel runs. A file that cannot be used is told
/// of in the sentence that comes back, and the defaults stand.
pub fn install_kept_tuning() -> Option<String> {
    // No cache folder: nothing kept.
    match TuningStore::from_env().ok()?.load() {
        Ok(None) => None,
        Ok(Some(tuned)) => {
            Tuning::install(tuned.tuning);
            None
        }
        Err(e) => Some(format!("the tuning table is ignored, defaults are used: {e}; run tandem tune again")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned() -> Tuned {
        let mut tuning = Tuning::default_for(CpuId::get());
        tuning.linear_mut(DType::Q4_0).ahead_bytes = 8192;
        let candidates =
            ["none", "8192 B"].map(|v| TimedValue { value: v.into(), seconds: 1e-3, packed_per_s: None });
        let candidates = candidates.into();
        let found = Finding { dtype: "q4_0".into(), entry: "ahead".into(), tokens: 1, chosen: 1, candidates };
        let version = env!("CARGO_PKG_VERSION").into();
        Tuned {
            schema: SCHEMA,
            version,
            cpu: cpu_model(),
            isa: "avx512".into(),
            tuning,
            findings: vec![found],
        }
    }

    #[test]
    fn a_default_stands_unless_clearly_beaten() {
        assert_eq!(best(&[1.0, 0.98, 1.2]), 0);
        assert_eq!(best(&[1.0, 0.96, 0.9]), 2);
        assert_eq!(best(&[1.0]), 0);
    }

    #[test]
    fn a_table_survives_being_kept() {
        let home = tempfile::tempdir().unwrap();
        let store = TuningStore::at(home.path());
        assert_eq!(store.load().unwrap(), None);
        store.save(&tuned()).unwrap();
        assert_eq!(store.load().unwrap(), Some(tuned()));
        let left: Vec<_> = std::fs::read_dir(store.path().parent().unwrap()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "nothing half written: {left:?}");
    }

    #[test]
    fn files_that_cannot_be_used_say_why() {
        let home = tempfile::tempdir().unwrap();
        let store = TuningStore::at(home.path());
        store.save(&tuned()).unwrap();
        let refused = |bytes: &[u8], want: &str| {
            std::fs::write(store.path(), bytes).unwrap();
            let why = store.load().unwrap_err().to_string();
            assert!(why.contains(want) && why.contains("tuning"), "{why}");
        };
        let with = |change: &dyn Fn(&mut Tuned)| {
            let mut t = tuned();
            change(&mut t);
            serde_json::to_vec(&t).unwrap()
        };
        refused(b"", "not a tuning table");
        refused(&serde_json::to_vec(&tuned()).unwrap()[..100], "not a tuning table");
        refused(b"\xff\xfe", "not UTF-8 text");
        refused(b"{\"schema\": 5, \"tune\": []}", "not a tuning table");
        refused(&vec![b' '; MAX_BYTES as usize + 1], "bytes, at most");
        refused(&with(&|t| t.schema = 99), "schema 99");
        refused(&with(&|t| t.cpu = "i486".into()), "of CPU i486");
        refused(&with(&|t| t.version = "0.0.1".into()), "of version 0.0.1");
        refused(&with(&|t| t.tuning.linear_mut(DType::Q8_0).groups_of_8 = 3), "groups_of_8 is 3");
    }

    /// Every entry is tried, every answer checked, and what comes of it can be kept.
    #[test]
    fn a_measured_table_is_whole() {
        for isa in Isa::supported().into_iter().skip(1) {
            let steps = std::cell::Cell::new(0);
            let tuned =
                measure_tuning(&Pool::new(2), isa, Effort::Quick, &|| steps.set(steps.get() + 1)).unwrap();
            assert_eq!(steps.get(), TUNING_STEPS);
            let text = serde_json::to_string(&tuned).unwrap();
            assert_eq!(Tuned::parse("x", &text).unwrap(), tuned);
            let count = |entry: &str| tuned.findings.iter().filter(|f| f.entry == entry).count();
            let quantised = DType::ALL.iter().filter(|d| d.is_quantised()).count();
            let several = |there: bool, each| if there { each } else { 0 };
            assert_eq!(count("chunk_bytes"), DType::ALL.len());
            // For one token or for two.
            assert!((DType::ALL.len()..=2 * DType::ALL.len()).contains(&count("ahead")), "{isa}");
            assert_eq!(count("groups_of_4"), several(isa >= Isa::Avx512, quantised));
            // Halving six, eight and four numbers of tokens.
            for (entry, least, most) in [
                ("int8_tiles_from", 2, 3),
                ("tiles_from", 3, 4),
                ("fine_tiles_from", 3, 4),
                ("half_up_to", 2, 3),
            ] {
                let range =
                    several(isa == Isa::Amx, least * quantised)..=several(isa == Isa::Amx, most * quantised);
                assert!(range.contains(&count(entry)), "{isa}: {entry} {} times", count(entry));
            }
            // One of f16 and of bf16 each; packing has its rate.
            let packing = tuned.findings.iter().filter(|f| f.entry == "tiles_at_load");
            let rated = packing.filter(|f| f.candidates[1].packed_per_s.is_some_and(|rate| rate > 0.0));
            assert_eq!(rated.count(), several(isa == Isa::Amx, 2 * tiles::AT_LOAD.len()));
            assert_eq!(count("attention_vector_rows") > 0, isa == Isa::Amx);
            assert!(tuned.findings.iter().all(|f| f.candidates.iter().all(|c| c.seconds > 0.0)));
            // What the same comparisons take when they are timed in earnest; making weights takes some 24 s more.
            let long = tuned.findings.iter().map(|f| Effort::Full.per_contest(f.candidates.len()));
            assert!(long.sum::<Duration>() < Duration::from_secs(40), "{isa}");
        }
        assert!(matches!(
            measure_tuning(&Pool::new(1), Isa::Reference, Effort::Quick, &|| {}),
            Err(Error::Usage(_))
        ));
    }
}
