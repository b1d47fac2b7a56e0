//! Real steps against predicted ones: factors for each operation, and how far off a step is with and without them.

use serde::{Deserialize, Serialize};

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
    /// Rows of the step that it was found in.
    pub rows: u64,
    /// Executed over predicted seconds.
    pub factor: f64,
}

/// Of all operations; 1 for those that are not listed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Factors(pub Vec<Factor>);

/// Within these a factor corrects; beyond them something else was measured than was predicted.
const SANE: std::ops::RangeInclusive<f64> = 0.25..=4.0;

impl Factors {
    /// Of a kind of operation on a side: that of the steps with as many rows, between two of them in proportion.
    pub fn of(&self, kind: &str, side: Side, rows: u64) -> f64 {
        let known = self.0.iter().filter(|f| f.kind == kind && f.side == side);
        let (mut below, mut above): (Option<&Factor>, Option<&Factor>) = (None, None);
        for f in known {
            if f.rows <= rows && below.is_none_or(|b| b.rows < f.rows) {
                below = Some(f);
            }
            if f.rows >= rows && above.is_none_or(|a| a.rows > f.rows) {
                above = Some(f);
            }
        }
        match (below, above) {
            (Some(b), Some(a)) if a.rows > b.rows => {
                let share = (rows - b.rows) as f64 / (a.rows - b.rows) as f64;
                b.factor + share * (a.factor - b.factor)
            }
            (Some(f), _) | (None, Some(f)) => f.factor,
            (None, None) => 1.0,
        }
    }

    /// What makes predicted into executed seconds, for each kind and number of rows: the sums over the steps.
    pub fn between(ops: &[Compared]) -> Factors {
        let mut sums: Vec<(&str, Side, u64, f64, f64)> = Vec::new();
        for op in ops {
            match sums.iter_mut().find(|s| (s.0, s.1, s.2) == (&*op.kind, op.side, op.rows)) {
                Some(s) => (s.3, s.4) = (s.3 + op.predicted_s, s.4 + op.executed_s),
                None => sums.push((&op.kind, op.side, op.rows, op.predicted_s, op.executed_s)),
            }
        }
        let factor = |(kind, side, rows, predicted, executed): (&str, Side, u64, f64, f64)| {
            let factor = (executed / predicted).clamp(*SANE.start(), *SANE.end());
            (predicted > 0.0 && executed > 0.0).then(|| Factor { kind: kind.to_owned(), side, rows, factor })
        };
        Factors(sums.into_iter().filter_map(factor).collect())
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

/// Operations of one kind on one side in one step: predicted by the tables alone, and executed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compared {
    /// The kind of operation.
    pub kind: String,
    /// Where it runs.
    pub side: Side,
    /// Rows of the step.
    pub rows: u64,
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

    fn compared(kind: &str, rows: u64, predicted_s: f64, executed_s: f64) -> Compared {
        Compared { kind: kind.into(), side: Side::Host, rows, predicted_s, executed_s }
    }

    #[test]
    fn sums_over_steps_give_one_factor_a_kind_and_number_of_rows() {
        let f = Factors::between(&[
            compared("attend", 1, 1.0, 1.1),
            compared("head", 1, 2.0, 1.0),
            compared("attend", 1, 3.0, 3.3),
            compared("attend", 5, 1.0, 1.5),
            compared("pick", 1, 0.0, 1.0),
            compared("embed", 1, 1e-6, 1.0),
        ]);
        let of = |kind, rows| f.of(kind, Side::Host, rows);
        assert!((of("attend", 1) - 1.1).abs() < 1e-12);
        assert!((of("attend", 3) - 1.3).abs() < 1e-12, "half-way between");
        assert_eq!((of("attend", 5), of("attend", 900), of("head", 64)), (1.5, 1.5, 0.5));
        assert_eq!((of("pick", 1), of("embed", 1), f.of("head", Side::Device, 1)), (1.0, 4.0, 1.0));
        assert!(f.check("p.json").is_ok());
        let mad = Factors(vec![Factor { kind: "head".into(), side: Side::Host, rows: 1, factor: 1e3 }]);
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
