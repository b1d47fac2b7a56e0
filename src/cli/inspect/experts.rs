//! `tandem inspect --experts`: how a model's routers use its experts.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tandem::model::{LoadedModel, RouterProfile};
use tandem::profile::{ModelIdentity, ProfileStore, RouterRecord, RouterText};
use tandem::{Error, Result};

use crate::cli::progress::one_line;

/// Parts of the experts whose share of all choices is told.
const PARTS: [f64; 3] = [0.1, 0.25, 0.5];
/// Numbers of rows whose distinct experts are told.
const ROWS: [u32; 8] = [1, 2, 4, 8, 16, 64, 128, 512];

/// The experts of a model by their use.
#[derive(Serialize)]
pub struct ExpertUse {
    /// The file that it comes from.
    file: PathBuf,
    text: RouterText,
    tokens: u64,
    layers: Vec<Layer>,
    distinct: Vec<Distinct>,
    #[serde(skip)]
    record: RouterRecord,
}

/// A layer with experts.
#[derive(Serialize)]
struct Layer {
    layer: usize,
    experts: usize,
    /// Share of the choices that fell on the most used 10%, 25% and 50% of the experts.
    most_used: [f64; 3],
    /// exp of the entropy of the choices.
    effective: f64,
    /// Share of a token's choices that the token before made, too.
    repeats: Option<f64>,
    /// Tokens that chose each expert.
    counts: Vec<u64>,
}

/// Distinct experts of a layer, the mean over the layers.
#[derive(Serialize)]
struct Distinct {
    rows: u32,
    experts: f64,
    /// If all were used alike.
    uniform: f64,
}

impl ExpertUse {
    /// From `file`, or else from what is kept of this model.
    ///
    /// # Errors
    /// A dense model; nothing kept; a file that is damaged or is another model's.
    pub fn of(name: &str, model: &LoadedModel, file: Option<&Path>) -> Result<ExpertUse> {
        if model.spec.experts.is_none() {
            return Err(Error::usage(format!("--experts: {name} has no experts")));
        }
        let (file, record) = match file {
            Some(file) => (file.to_owned(), Some(RouterRecord::read(file, &model.spec)?)),
            None => {
                let store = ProfileStore::from_env()?;
                let identity = ModelIdentity::of(&model.spec, &model.weights, &model.source);
                (store.router_path(&identity), store.load_router(&identity, &model.spec)?)
            }
        };
        let record = record.ok_or_else(|| {
            Error::usage(format!(
                "--experts: nothing is known of how {name} uses its experts; tandem profile -m {name} --router records it"
            ))
        })?;
        let router = &record.router;
        let layers = of_experts(router).map(|layer| Layer {
            layer,
            experts: router.experts(layer),
            most_used: PARTS.map(|part| router.share_of_most_used(layer, part)),
            effective: router.effective(layer),
            repeats: router.repeats(layer),
            counts: router.layers[layer].counts.clone(),
        });
        let (text, tokens, layers) = (record.text.clone(), router.tokens, layers.collect());
        Ok(ExpertUse { file, text, tokens, layers, distinct: distinct(router), record })
    }

    /// As text.
    pub fn text(&self) -> String {
        format!("{}{}", source(&self.record), table(&self.record.router))
    }

    /// What was counted over which text.
    pub fn source(&self) -> String {
        source(&self.record).trim_end().to_owned()
    }

    /// What was counted.
    pub fn router(&self) -> &RouterProfile {
        &self.record.router
    }
}

/// The layers that have experts.
fn of_experts(router: &RouterProfile) -> impl Iterator<Item = usize> {
    (0..router.layers.len()).filter(|&layer| router.experts(layer) > 0)
}

fn distinct(router: &RouterProfile) -> Vec<Distinct> {
    let layers: Vec<usize> = of_experts(router).collect();
    let mean = |of: &dyn Fn(usize) -> f64| layers.iter().map(|&l| of(l)).sum::<f64>() / layers.len() as f64;
    let of = |rows: u32| Distinct {
        rows,
        experts: mean(&|l| router.distinct_of_all(l, f64::from(rows))),
        uniform: mean(&|l| {
            let count = router.experts(l) as f64;
            count * (1.0 - (1.0 - f64::from(router.used) / count).powf(f64::from(rows)))
        }),
    };
    ROWS.map(of).into()
}

/// What was counted over which text, in a line.
pub fn source(record: &RouterRecord) -> String {
    let (all, learned, name) = (record.router.tokens, record.learned, one_line(&record.text.name));
    let tokens = all - learned;
    let mut of = match &record.text {
        text if *text == RouterText::none() => format!("{learned} tokens that ran"),
        text if text.random => format!("{tokens} {name}"),
        _ => format!("{tokens} tokens of {name}"),
    };
    if learned > 0 && record.text != RouterText::none() {
        let _ = write!(of, " and {learned} that ran");
    }
    format!("routers over {of}, {} experts a token\n", record.router.used)
}

/// A line for each layer with experts, one for their mean, and one for experts that are used alike.
pub fn table(router: &RouterProfile) -> String {
    let mut text = String::new();
    let heads = ["experts", "top 10%", "top 25%", "top 50%", "effective", "repeats"];
    let heads = heads.map(|head| format!("{head:>10}")).concat();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{:<10}{heads}", "layer");
    let percent = |share: f64| format!("{:.1}%", 100.0 * share);
    let mut line = |name: String, experts: f64, top: [f64; 3], effective: f64, repeats: Option<f64>| {
        let cells = [format!("{experts:.0}")].into_iter().chain(top.map(percent));
        let cells = cells.chain([format!("{effective:.1}"), repeats.map_or("-".into(), percent)]);
        let cells = cells.map(|cell| format!("{cell:>10}")).collect::<String>();
        let _ = writeln!(text, "{name:<10}{cells}");
    };
    let layers: Vec<usize> = of_experts(router).collect();
    let top = |l: usize| PARTS.map(|part| router.share_of_most_used(l, part));
    for &l in &layers {
        line(l.to_string(), router.experts(l) as f64, top(l), router.effective(l), router.repeats(l));
    }
    let n = layers.len() as f64;
    let mean = |of: &dyn Fn(usize) -> f64| layers.iter().map(|&l| of(l)).sum::<f64>() / n;
    let repeats: Option<Vec<f64>> = layers.iter().map(|&l| router.repeats(l)).collect();
    let count = mean(&|l| router.experts(l) as f64);
    let of_part = |i: usize| mean(&|l| top(l)[i]);
    line(
        "mean".into(),
        count,
        [0, 1, 2].map(of_part),
        mean(&|l| router.effective(l)),
        repeats.map(|r| r.iter().sum::<f64>() / n),
    );
    let alike = PARTS.map(|part| (part * count - 1e-9).ceil() / count);
    line("alike".into(), count, alike, count, Some(f64::from(router.used) / count));
    let numbers = distinct(router);
    let row = |name: &str, of: &dyn Fn(&Distinct) -> String| {
        format!("{name:<20}{}\n", numbers.iter().map(|d| format!("{:>8}", of(d))).collect::<String>())
    };
    text += &format!("\n{}", row("rows", &|d| d.rows.to_string()));
    text += &row("distinct experts", &|d| format!("{:.1}", d.experts));
    text + &row("if used alike", &|d| format!("{:.1}", d.uniform))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem::model::RouterCounts;

    #[test]
    fn a_table_has_a_line_for_each_layer_with_experts() {
        let of = |counts: &[u64]| RouterCounts { counts: counts.into(), followers: 10, repeated: 5 };
        let router = RouterProfile {
            tokens: 40,
            used: 1,
            layers: vec![of(&[10, 10, 10, 10]), of(&[]), of(&[40, 0, 0, 0])],
        };
        let text = table(&router);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["0", "4", "25.0%", "25.0%", "50.0%", "4.0", "50.0%"]);
        assert_eq!(lines[2], ["2", "4", "100.0%", "100.0%", "100.0%", "1.0", "50.0%"]);
        assert_eq!(lines[3], ["mean", "4", "62.5%", "62.5%", "75.0%", "2.5", "50.0%"]);
        assert_eq!(lines[4], ["alike", "4", "25.0%", "25.0%", "50.0%", "4.0", "25.0%"]);
        assert_eq!(&lines[6][..3], ["rows", "1", "2"]);
        assert_eq!(&lines[7][..3], ["distinct", "experts", "1.0"]);
        assert_eq!(lines.last().unwrap()[..5], ["if", "used", "alike", "1.0", "1.8"]);
    }
}
