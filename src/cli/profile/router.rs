//! Which experts the routers of `-m` choose, recorded over a text and kept.

use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use tandem::model::LoadedModel;
use tandem::profile::{ModelIdentity, ProfileStore, RouterRecord, RouterText, record_router, router_text};
use tandem::simd::Isa;
use tandem::{Error, text};

use super::Args;
use crate::cli::inspect::experts;
use crate::cli::{open, output, progress, prompt};

/// Tokens unless `--tokens` says otherwise: with 128 experts of which 8 are used, 256 choices of each if they are used alike.
const TOKENS: u32 = 4096;
/// The same with `--quick`.
const QUICK: u32 = 512;

/// A record, and whether it is an earlier one.
#[derive(Serialize)]
pub struct FoundRecord {
    /// Where it is kept.
    pub file: PathBuf,
    /// Whether it was read, not recorded now.
    pub cached: bool,
    #[serde(flatten)]
    pub record: RouterRecord,
}

/// What `--router --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    router: &'a FoundRecord,
}

/// The text of `--text`, and how much of it is to be read.
struct Wish {
    /// Its name and all of it; `None`: the program's own.
    text: Option<(String, String)>,
    limit: u64,
}

impl Wish {
    fn of(args: &Args) -> tandem::Result<Wish> {
        let text = |path: &PathBuf| Ok((prompt::name(path), prompt::read_file(path)?));
        let text: Option<(String, String)> = args.text.as_ref().map(text).transpose()?;
        if let Some((name, _)) = text.as_ref().filter(|(_, text)| text.trim().is_empty()) {
            return Err(Error::usage(format!("--text {name}: it is empty")));
        }
        let limit = args.tokens.unwrap_or(if args.quick { QUICK } else { TOKENS });
        Ok(Wish { text, limit: limit.into() })
    }

    /// Whether a record is what would be recorded now, or more. Over which text is left to whoever recorded it, unless one is given.
    fn met_by(&self, record: &RouterRecord) -> bool {
        let of_text = |(name, text): &(String, String)| {
            record.text.hash == RouterText::of(name.clone(), text, self.limit).hash
        };
        record.text.limit >= self.limit && self.text.as_ref().is_none_or(of_text)
    }
}

/// The record of the model's routers: one that is kept, or a new one, which is kept then. `None` of a dense model.
///
/// # Errors
/// A text that cannot be read; a model that cannot run here.
pub fn recorded(args: &Args, store: &ProfileStore, name: &str) -> Result<Option<FoundRecord>> {
    let outline = open::outline(name)?;
    if outline.spec.experts.is_none() {
        if args.text.is_some() || args.tokens.is_some() {
            progress::note(&format!("{name} has no experts: --text and --tokens have no effect"));
        }
        return Ok(None);
    }
    let wish = Wish::of(args)?;
    let model = ModelIdentity::of(&outline.spec, &outline.weights, &outline.source);
    if let Some(record) = kept(args, store, &model, &outline).filter(|record| wish.met_by(record)) {
        return Ok(Some(FoundRecord { file: store.router_path(&model), cached: true, record }));
    }
    drop(outline);
    let record = record(name, model, wish)?;
    let file = store.save_router(&record)?;
    Ok(Some(FoundRecord { file, cached: false, record }))
}

/// The record in the cache folder. A damaged one is reported, and made again.
fn kept(
    args: &Args,
    store: &ProfileStore,
    model: &ModelIdentity,
    outline: &LoadedModel,
) -> Option<RouterRecord> {
    if args.again {
        return None;
    }
    store.load_router(model, &outline.spec).unwrap_or_else(|e| {
        progress::note(&format!("recording the router again: {e}"));
        None
    })
}

fn record(name: &str, model: ModelIdentity, wish: Wish) -> Result<RouterRecord> {
    let opened = open::open(Some(name))?;
    let spec = &opened.loaded.spec;
    let limit = wish.limit as usize;
    let (of, beginning, tokens) = match opened.tokenizer()? {
        None => {
            if wish.text.is_some() {
                let why = format!("--text: {name} has random weights and no tokenizer, leave it out");
                return Err(Error::usage(why).into());
            }
            progress::note("random weights: what their routers choose says nothing about real text");
            (RouterText::random(wish.limit), Vec::new(), random(limit, spec.vocab))
        }
        Some(tokenizer) => {
            let (name, text) =
                wish.text.unwrap_or_else(|| ("documents and code of Tandem".into(), router_text()));
            let mut tokens = tokenizer.encode(&text, false, false)?;
            text::check_tokens(&tokens, spec.vocab)?;
            if tokens.len() < limit {
                progress::note(&format!("the text has {} tokens, not {limit}", tokens.len()));
            }
            tokens.truncate(limit);
            (RouterText::of(name, &text, wish.limit), tokenizer.beginning().to_vec(), tokens)
        }
    };
    let bar = progress::count_bar(tokens.len() as u64, "recording the router's choices");
    let weights = &opened.loaded.weights;
    let router = record_router((spec, weights), Isa::selected()?, &beginning, &tokens, &|done| bar.set(done));
    bar.finish();
    let router = router.map_err(|e| match e {
        Error::Capacity(why) => Error::Capacity(format!("{name}: {why}")),
        other => other,
    })?;
    Ok(RouterRecord::new(model, of, router))
}

/// Tokens without a pattern, the same in every run.
fn random(n: usize, vocab: usize) -> Vec<u32> {
    let mut state = 1u64;
    let mut next = || {
        // Knuth's MMIX generator; its upper bits are its good ones.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab as u64) as u32
    };
    (0..n).map(|_| next()).collect()
}

/// `--router`: only this.
pub fn run(args: &Args, store: &ProfileStore, name: &str) -> Result<()> {
    let Some(found) = recorded(args, store, name)? else {
        return Err(Error::usage(format!("--router: {name} has no experts, so no router chooses any")).into());
    };
    if let Some(path) = &args.output {
        found.record.write(path)?;
    }
    if args.json {
        return output::json(&Report { router: &found });
    }
    output::print(&text_of(&found.record))?;
    let how = if found.cached { "recorded before, --again records anew" } else { "kept" };
    output::line(&format!("\n{how}: {}", found.file.display()))
}

/// The record as text: a line for each layer.
pub fn text_of(record: &RouterRecord) -> String {
    experts::source(record) + &experts::table(&record.router)
}
