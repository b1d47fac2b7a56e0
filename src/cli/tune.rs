//! `tandem tune`: the kernels' settings measured on this machine, and kept.

use std::fmt::Write;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;
use tandem::host::Pool;
use tandem::profile::{Effort, TUNING_STEPS, TimedValue, Tuned, TuningStore, measure_tuning};

use super::{open, output, progress};

/// Measures which kernel settings are best on this machine, in under a minute: prefetch distances, chunk sizes, shapes of
/// tiles, thresholds between kernels. The table is kept in the cache folder, for this CPU and this version, and used from
/// then on; `tandem doctor` prints it. Settings that could change results are ignored with --deterministic.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Try everything once on small weights, in a second or two, and keep nothing: to see what would be measured.
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    file: &'a Path,
    kept: bool,
    #[serde(flatten)]
    tuned: &'a Tuned,
}

/// Measures the settings, stores and prints them.
pub fn run(args: &Args) -> Result<()> {
    let (isa, store) = (open::measured_tier()?, TuningStore::from_env()?);
    let effort = if args.quick { Effort::Quick } else { Effort::Full };
    let pool = Pool::pinned(None);
    let bar = progress::count_bar(TUNING_STEPS, "tuning the kernels");
    let tuned = measure_tuning(&pool, isa, effort, &|| bar.inc(1));
    bar.finish();
    let (tuned, kept) = (tuned?, !args.quick);
    if kept {
        store.save(&tuned)?;
    }
    if args.json {
        return output::json(&Report { file: store.path(), kept, tuned: &tuned });
    }
    output::print(&text(&tuned))?;
    let file = store.path().display();
    output::line(&if kept { format!("\nkept: {file}") } else { "\nnot kept: measured in a hurry".to_owned() })
}

/// A line for each comparison: the choice, and all times.
fn text(tuned: &Tuned) -> String {
    let mut out =
        format!("{:6} {:12} {:>6}  {:10} microseconds of a product\n", "dtype", "entry", "tokens", "chosen");
    for f in &tuned.findings {
        let packed = |c: &TimedValue| {
            c.packed_per_s
                .map_or(String::new(), |rate| format!(" (packed at {:.1} GB/s when loaded)", rate / 1e9))
        };
        let each = f.candidates.iter().map(|c| format!("{} {:.0}{}", c.value, c.seconds * 1e6, packed(c)));
        let (chosen, all) = (&f.candidates[f.chosen].value, each.collect::<Vec<_>>().join(", "));
        let mark = if f.chosen == 0 { "" } else { "*" };
        let _ = writeln!(
            out,
            "{:6} {:12} {:>6}  {:10} {all}",
            f.dtype,
            f.entry,
            f.tokens,
            format!("{chosen}{mark}")
        );
    }
    out + "* not the default; the default stands first and is left only for 3% less time\n"
}
