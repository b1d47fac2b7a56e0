//! Real steps against predicted ones: factors for each operation, and how far off a step is with and without them.

use serde::{Deserialize, Serialize};

use super::curve::Curve;
use super::sample::Samples;
use crate::program::Side;
use crate::{Error, Result};

/// What the predictions of one operation on one side are multiplied by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Factor {
    /// The kind of operation: `ffn_up`.
    pub kind: String,
    /// Where it runs.
    pub side: Side,
    /// Rows of the operation.
    pub rows: u64,
    /// Tokens whose keys and values the step read, in the mean over the layers; 0 of operations whose factor does not depend
    /// on them.
    pub tokens: u64,
    /// Executed over predicted seconds.
    pub factor: f64,
}

/// Factors of all operations; 1 for those that are not listed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Factors(pub Vec<Factor>);

/// Within these a factor corrects; beyond them something else was measured than was predicted.
const SANE: std::ops::RangeInclusive<f64> = 0.25..=4.0;

/// Operations that take as long whatever else a step reads: one factor for each number of rows.
const BY_ROWS: [&str; 3] = ["embed", "append", "pick"];

/// Factors of one kind on one side: for each number of rows, by tokens; both ascend.
type Lines = Vec<(u64, Vec<(u64, f64)>)>;

/// [`Factors`] by kind and side, to be asked often.
#[derive(Debug, Clone)]
pub(super) struct FactorIndex(Vec<(String, Side, Lines)>);

impl FactorIndex {
    /// The factor of an operation of this kind and side with `rows` rows, in a step that reads the keys and values of `tokens` tokens.
    /// Interpolates between measured numbers of tokens and of rows; beyond them, the nearest one's factor.
    pub fn of(&self, kind: &str, side: Side, rows: u64, tokens: u64) -> f64 {
        let Some((_, _, lines)) = self.0.iter().find(|k| k.1 == side && k.0 == kind) else { return 1.0 };
        between(lines, rows, |line| between(line, tokens, |&factor| factor))
    }
}

/// What `of` gives at `x`: of the neighbours in proportion, of the first or the last beyond them. 1 without any.
fn between<T>(points: &[(u64, T)], x: u64, of: impl Fn(&T) -> f64) -> f64 {
    let above = points.partition_point(|p| p.0 < x);
    match (above.checked_sub(1).map(|i| &points[i]), points.get(above)) {
        (_, Some((at, y))) if *at == x => of(y),
        (Some((x0, y0)), Some((x1, y1))) => {
            let (y0, y1) = (of(y0), of(y1));
            y0 + (y1 - y0) * ((x - x0) as f64 / (x1 - x0) as f64)
        }
        (Some((_, y)), None) | (None, Some((_, y))) => of(y),
        (None, None) => 1.0,
    }
}

impl Factors {
    /// Ready to be asked.
    pub(super) fn index(&self) -> FactorIndex {
        let mut kinds: Vec<(String, Side, Lines)> = Vec::new();
        for f in &self.0 {
            let known = kinds.iter().position(|k| k.0 == f.kind && k.1 == f.side).unwrap_or_else(|| {
                kinds.push((f.kind.clone(), f.side, Vec::new()));
                kinds.len() - 1
            });
            let lines = &mut kinds[known].2;
            let line = lines.iter().position(|l| l.0 == f.rows).unwrap_or_else(|| {
                lines.push((f.rows, Vec::new()));
                lines.len() - 1
            });
            lines[line].1.push((f.tokens, f.factor));
        }
        for (_, _, lines) in &mut kinds {
            lines.sort_by_key(|l| l.0);
            for (_, line) in lines {
                line.sort_by_key(|p| p.0);
                line.dedup_by_key(|p| p.0);
            }
        }
        FactorIndex(kinds)
    }

    fn add(&mut self, of: &Compared, tokens: u64, factor: f64) {
        if factor.is_finite() && factor > 0.0 {
            let factor = factor.clamp(*SANE.start(), *SANE.end());
            let (kind, side, rows) = (of.kind.clone(), of.side, of.rows);
            self.0.push(Factor { kind, side, rows, tokens, factor });
        }
    }

    /// What makes predicted into executed seconds, such that each of `steps` is predicted as it was executed: with a factor for
    /// each kind, number of rows and number of tokens, and with what a step of so many rows takes once.
    pub fn between(steps: &[Seen]) -> (Factors, Curve) {
        let mut steps: Vec<&Seen> = steps.iter().collect();
        steps.sort_by_key(|s| (s.rows, s.tokens));
        let alike = |rows: u64| steps.iter().filter(move |s| s.rows == rows).map(|s| s.once_s);
        let once = steps.iter().map(|s| (s.rows as f64, Samples::new(alike(s.rows).collect()).median()));
        let once = Curve::new(once.collect());
        let mut factors = Factors::default();
        let parts = || steps.iter().flat_map(|s| s.parts.iter());
        for part in parts().filter(|p| BY_ROWS.contains(&&*p.kind)) {
            let same = || parts().filter(|p| (&p.kind, p.rows) == (&part.kind, part.rows));
            if same().next().is_some_and(|first| std::ptr::eq(first, part)) {
                let sum = |of: fn(&Compared) -> f64| same().map(of).sum::<f64>();
                factors.add(part, 0, sum(|p| p.executed_s) / sum(|p| p.predicted_s));
            }
        }
        for step in steps {
            // The head of a prompt has fewer rows than the prompt: steps of as many rows know its factor.
            let own = |p: &&Compared| p.rows == step.rows && !BY_ROWS.contains(&&*p.kind);
            let known = factors.index();
            let rest = step.parts.iter().filter(|p| !own(p));
            let rest = rest.map(|p| p.predicted_s * known.of(&p.kind, p.side, p.rows, step.tokens));
            let left = (step.seconds - once.at(step.rows as f64) - rest.sum::<f64>()).max(0.0);
            let scale = left / step.parts.iter().filter(own).map(|p| p.executed_s).sum::<f64>();
            for part in step.parts.iter().filter(own) {
                factors.add(part, step.tokens, scale * part.executed_s / part.predicted_s);
            }
        }
        (factors, once)
    }

    /// Refuses what no calibration gives.
    ///
    /// # Errors
    /// [`Error::Format`] that names `file`.
    pub(super) fn check(&self, file: &str) -> Result<()> {
        match self.0.iter().find(|f| !SANE.contains(&f.factor)) {
            None => Ok(()),
            Some(f) => Err(Error::format(
                format!("{file}: tables.factors.{}", f.kind),
                format!("{}, wanted {} to {}", f.factor, SANE.start(), SANE.end()),
            )),
        }
    }
}

/// A real step that calibrates.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// Its rows.
    pub rows: u64,
    /// Tokens whose keys and values it read, in the mean over the layers.
    pub tokens: u64,
    /// Seconds of all of it.
    pub seconds: f64,
    /// Of these, seconds around and between its operations.
    pub once_s: f64,
    /// Its kinds of operations.
    pub parts: Vec<Compared>,
}

/// Operations of one kind on one side in one step: predicted by the tables alone, and executed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compared {
    /// The kind of operation.
    pub kind: String,
    /// Where it runs.
    pub side: Side,
    /// Rows of the operation.
    pub rows: u64,
    /// Tokens whose keys and values the step read, in the mean over the layers.
    pub tokens: u64,
    /// Seconds that the tables say, of all layers together.
    pub predicted_s: f64,
    /// Seconds that it took.
    pub executed_s: f64,
}

/// A step: predicted and executed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepCompared {
    /// Sequences.
    pub sequences: u64,
    /// New rows of each.
    pub rows: u64,
    /// Tokens stored of each.
    pub past: u64,
    /// Where it ran.
    pub side: Side,
    /// Whether factors come from it; if not, it is a check of them.
    pub calibrates: bool,
    /// Seconds that the tables say.
    pub predicted_s: f64,
    /// Seconds that the tables say, times the factors.
    pub calibrated_s: f64,
    /// Seconds that it took.
    pub executed_s: f64,
}

impl StepCompared {
    /// Predicted over executed, minus one: without and with factors.
    pub fn errors(&self) -> [f64; 2] {
        [self.predicted_s, self.calibrated_s].map(|p| p / self.executed_s - 1.0)
    }
}

/// What came of running real steps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    /// Each kind of operation in each step that calibrates, where the engine times operations.
    pub operations: Vec<Compared>,
    /// Steps that calibrate, then steps that check.
    pub steps: Vec<StepCompared>,
}

impl Calibration {
    /// The worst error of the decode steps that were only checked, with factors: 0.03 is 3%. `None` without any.
    pub fn worst_decode_error(&self) -> Option<f64> {
        let checked = self.steps.iter().filter(|s| !s.calibrates && s.rows == 1);
        checked.map(|s| s.errors()[1].abs()).max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(kind: &str, rows: u64, predicted_s: f64, executed_s: f64) -> Compared {
        Compared { kind: kind.into(), side: Side::Host, rows, tokens: 0, predicted_s, executed_s }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12 * b.abs().max(1.0), "{a} for {b}");
    }

    /// Steps of one and of four rows at two contexts, and a prompt whose head has one row.
    fn steps() -> Vec<Seen> {
        let seen = |rows, tokens, seconds, once_s, parts| Seen { rows, tokens, seconds, once_s, parts };
        vec![
            seen(1, 100, 7.5, 0.5, vec![part("ffn_up", 1, 2.0, 4.0), part("head", 1, 2.0, 3.0)]),
            seen(1, 900, 10.0, 0.5, vec![part("ffn_up", 1, 2.0, 6.0), part("head", 1, 2.0, 3.5)]),
            seen(4, 400, 9.0, 0.0, vec![part("ffn_up", 4, 4.0, 4.0), part("pick", 4, 2.0, 3.0)]),
            seen(4, 800, 14.0, 0.0, vec![part("ffn_up", 4, 4.0, 8.0), part("pick", 4, 2.0, 5.0)]),
            seen(64, 64, 50.0, 1.0, vec![part("ffn_up", 64, 40.0, 30.0), part("head", 1, 2.0, 9.0)]),
        ]
    }

    #[test]
    fn every_step_that_calibrates_is_predicted_as_it_was_executed() {
        let steps = steps();
        let (factors, once) = Factors::between(&steps);
        let known = factors.index();
        for s in &steps {
            let of = |p: &Compared| p.predicted_s * known.of(&p.kind, p.side, p.rows, s.tokens);
            close(once.at(s.rows as f64) + s.parts.iter().map(of).sum::<f64>(), s.seconds);
        }
        assert!(factors.check("p.json").is_ok());
    }

    #[test]
    fn factors_go_by_rows_and_tokens_and_end_with_what_was_seen() {
        let (factors, _) = Factors::between(&steps());
        let known = factors.index();
        let of = |kind, rows, tokens| known.of(kind, Side::Host, rows, tokens);
        // The parts of a step share what they lack: 7 of 4 + 3, 9.5 of 6 + 3.5.
        close(of("ffn_up", 1, 100), 2.0);
        close(of("ffn_up", 1, 900), 3.0);
        close(of("ffn_up", 1, 500), 2.5);
        assert_eq!((of("ffn_up", 1, 7), of("ffn_up", 1, 7000)), (of("ffn_up", 1, 100), of("ffn_up", 1, 900)));
        let at = |rows| of("ffn_up", rows, 100);
        close(at(2), at(1) + (at(4) - at(1)) / 3.0);
        assert_eq!((at(1000), of("ffn_down", 1, 100)), (at(64), 1.0));
        // The same whatever the step reads: 8 of 4.
        assert_eq!((of("pick", 4, 0), of("pick", 4, 1 << 20)), (2.0, 2.0));
        assert_eq!(known.of("ffn_up", Side::Device, 1, 100), 1.0);
    }

    #[test]
    fn what_no_calibration_gives_is_refused() {
        let steps =
            [Seen { rows: 1, tokens: 9, seconds: 9.0, once_s: 0.0, parts: vec![part("head", 1, 1e-6, 9.0)] }];
        let (factors, _) = Factors::between(&steps);
        assert_eq!(factors.0[0].factor, 4.0);
        let mad = Factors(vec![Factor { factor: 1e3, ..factors.0[0].clone() }]);
        assert!(mad.check("p.json").unwrap_err().to_string().contains("p.json: tables.factors.head: 1000"));
    }

    #[test]
    fn the_worst_of_the_steps_that_were_only_checked() {
        let step = |rows, calibrates, calibrated_s| StepCompared {
            sequences: 1,
            rows,
            past: 10,
            side: Side::Host,
            calibrates,
            predicted_s: 2.0,
            calibrated_s,
            executed_s: 1.0,
        };
        let steps =
            vec![step(1, true, 3.0), step(1, false, 1.02), step(1, false, 0.96), step(64, false, 9.0)];
        let c = Calibration { operations: Vec::new(), steps };
        assert!((c.worst_decode_error().unwrap() - 0.04).abs() < 1e-12);
        assert_eq!(c.steps[0].errors()[0], 1.0);
        assert_eq!(Calibration::default().worst_decode_error(), None);
    }
}
