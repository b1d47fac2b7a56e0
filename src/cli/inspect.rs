//! `tandem inspect`: what is in a model.

pub(super) mod experts;
mod heat;

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::Result;
use serde::Serialize;
use tandem::model::{Description, LoadedModel, describe};
use tandem::{Error, atomic_file};

use super::progress::{megabytes, one_line};
use super::{open, output};

/// Shows what is in a model: sizes, types of tensors, memory per token.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a .gguf file, a folder, a name that `tandem pull` knows, or synth:NAME.
    #[arg(value_name = "MODEL", required_unless_present = "named")]
    pub model: Option<String>,
    /// The model, with the option name of the other commands.
    #[arg(short = 'm', long = "model", value_name = "MODEL", conflicts_with = "model")]
    pub named: Option<String>,
    /// List every tensor, too.
    #[arg(long)]
    pub tensors: bool,
    /// Show how the experts of a mixture are used, too, by what `tandem profile -m MODEL` has recorded.
    #[arg(long)]
    pub experts: bool,
    /// Take that from this file, a copy that `tandem profile --router -o` made, and not from the cache folder.
    #[arg(long, value_name = "FILE", requires = "experts")]
    pub router_profile: Option<PathBuf>,
    /// Draw the use of all experts of all layers.
    #[arg(long, value_name = "FILE.svg", requires = "experts")]
    pub plot: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    description: Description,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<TensorReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    router: Option<experts::ExpertUse>,
}

#[derive(Serialize)]
struct TensorReport {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
}

/// Loads and describes the model.
pub fn run(args: &Args) -> Result<()> {
    let name = args.model.as_ref().or(args.named.as_ref()).expect("the parser wants one of them");
    if let Some(path) = &args.plot {
        if path.extension().is_none_or(|e| !e.eq_ignore_ascii_case("svg")) {
            let why = format!("--plot {}: wanted the name of an .svg file", path.display());
            return Err(Error::usage(why).into());
        }
        atomic_file::check(path)?;
    }
    let model = open::outline(name)?;
    let router = match args.experts {
        true => Some(experts::ExpertUse::of(name, &model, args.router_profile.as_deref())?),
        false => None,
    };
    if let (Some(path), Some(found)) = (&args.plot, &router) {
        let drawn = heat::svg(&one_line(name), &one_line(&found.source()), found.router())?;
        atomic_file::replace(path, |to| to.write_all(drawn.as_bytes()))?;
    }
    let tensors = args.tensors.then(|| tensors(&model));
    let report = Report { description: describe(&model), tensors, router };
    if args.json { output::json(&report) } else { output::print(&text(&report)) }
}

fn tensors(model: &LoadedModel) -> Vec<TensorReport> {
    let report = |(name, t): (&str, &tandem::tensor::Tensor)| TensorReport {
        name: name.into(),
        dtype: t.dtype.name(),
        shape: t.shape.clone(),
        bytes: t.data.len(),
    };
    model.weights.iter().map(report).collect()
}

fn text(report: &Report) -> String {
    let d = &report.description;
    let mut out = String::new();
    let mut row = |what: &str, found: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{what:<12} {}", one_line(&found));
    };
    row("name", d.name.clone());
    row("source", d.source.clone());
    if d.files > 1 {
        row("files", format!("{}, {} together", d.files, megabytes(d.file_bytes)));
    }
    row("family", d.family.clone());
    row("parameters", format!("{:.1} M in {}", d.parameters as f64 / 1e6, megabytes(d.weight_bytes)));
    let by_dtype = d.bytes_by_dtype.iter().map(|(dtype, bytes)| format!("{dtype} {}", megabytes(*bytes)));
    row("types", by_dtype.collect::<Vec<_>>().join(", "));
    let dense = if d.d_ff > 0 { format!(", feed-forward {}", d.d_ff) } else { String::new() };
    row("layers", format!("{}, width {}{dense}", d.layers, d.d_model));
    if !d.experts.is_empty() {
        let active = d.active_parameters as f64 / 1e6;
        row("experts", format!("{}; {active:.1} M parameters a token", d.experts));
    }
    let sinks = if d.attn_sinks { ", each with a sink" } else { "" };
    row("heads", format!("{} query{sinks}, {} key/value, of {} elements", d.heads, d.kv_heads, d.head_dim));
    let head = if d.tied_head { "output head tied to the embedding" } else { "output head of its own" };
    row("vocabulary", format!("{}, {head}", d.vocab));
    row("position", d.position.clone());
    if let Some((size, layers)) = d.window {
        row("window", format!("{size} tokens in {layers} of {} layers", d.layers));
    }
    row("norms", d.norms.clone());
    let caps = [("scores", d.attn_softcap), ("logits", d.logit_softcap)];
    let caps: Vec<_> = caps.iter().filter_map(|(of, cap)| Some(format!("{of} {}", (*cap)?))).collect();
    if !caps.is_empty() {
        row("soft-caps", caps.join(", "));
    }
    row("context", format!("{} tokens, {} each", d.max_context, megabytes(d.kv_bytes_per_token)));
    row("tokenizer", d.tokenizer.clone());
    row("template", if d.chat_template { "has a chat template".into() } else { "no chat template".into() });
    if !d.sampling.is_empty() {
        row("sampling", d.sampling.clone());
    }
    for note in &d.notes {
        row("note", note.clone());
    }
    for t in report.tensors.iter().flatten() {
        row("tensor", format!("{:<32} {:<5} {:?}", t.name, t.dtype, t.shape));
    }
    if let Some(found) = &report.router {
        let _ = write!(out, "\n{}", found.text());
    }
    out
}
