//! Context extension: which values are possible, and what each kind does to the frequencies.

use super::RopeScaling;
use crate::{Error, Result};

impl RopeScaling {
    /// What multiplies cosines and sines, and so queries and keys.
    pub fn attention_factor(&self) -> f32 {
        match *self {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::LongRope { attention_factor, .. } => {
                attention_factor
            }
            _ => 1.0,
        }
    }

    /// Checks the values for `dim` rotated elements.
    ///
    /// # Errors
    /// The first impossible one, by its name in files.
    pub fn check(&self, dim: usize) -> Result<()> {
        match self {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                original(*original_context)?;
                // The scaling interpolates between the two: equal ones would divide by zero.
                positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)
            }
            RopeScaling::Factors(factors) => divisors("rope_freqs.weight", factors, dim),
            RopeScaling::Yarn {
                factor, original_context, beta_fast, beta_slow, attention_factor, ..
            } => {
                positive("factor", *factor)?;
                original(*original_context)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                if beta_slow >= beta_fast {
                    let problem = format!("{beta_slow} is not below beta_fast, {beta_fast}");
                    return Err(Error::format("RoPE scaling: beta_slow", problem));
                }
                positive("attention_factor", *attention_factor)
            }
            RopeScaling::LongRope { short, long, original_context, attention_factor } => {
                divisors("short_factor", short, dim)?;
                divisors("long_factor", long, dim)?;
                original(*original_context)?;
                positive("attention_factor", *attention_factor)
            }
            RopeScaling::Dynamic { factor, original_context } => {
                if dim <= 2 {
                    return Err(Error::format(
                        "RoPE scaling",
                        "dynamic scaling of a single pair of elements",
                    ));
                }
                original(*original_context)?;
                if *factor < 1.0 {
                    // Below 1 the base would turn negative in long contexts.
                    return Err(Error::format(
                        "RoPE scaling: factor",
                        format!("{factor}, wanted at least 1"),
                    ));
                }
                positive("factor", *factor)
            }
        }
    }

    /// Scales the frequencies `f` of the base `theta` for a run with room for `context` tokens. The values were checked.
    pub(super) fn apply(&self, theta: f32, context: usize, f: &mut [f64]) {
        let dim = 2 * f.len();
        match *self {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => f.iter_mut().for_each(|f| *f /= f64::from(factor)),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (low, high) = (f64::from(low_freq_factor), f64::from(high_freq_factor));
                for f in f {
                    // How often the wave turns within the original context: kept above `high`, fully
                    // stretched below `low`, blended between.
                    let turns = original_context as f64 * *f / std::f64::consts::TAU;
                    let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    *f *= keep + (1.0 - keep) / f64::from(factor);
                }
            }
            RopeScaling::Factors(ref by) => divide(f, by),
            RopeScaling::LongRope { ref short, ref long, original_context, .. } => {
                divide(f, if context > original_context { long } else { short });
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                // The (fractional) pair that turns this often within the original context.
                let pair = |turns: f32| {
                    let wave = original_context as f64 / (f64::from(turns) * std::f64::consts::TAU);
                    dim as f64 * wave.ln() / (2.0 * f64::from(theta).ln())
                };
                let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    // The published code's way round a division by zero.
                    high += 0.001;
                }
                for (i, f) in f.iter_mut().enumerate() {
                    let stretch = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *f *= 1.0 - stretch + stretch / f64::from(factor);
                }
            }
            RopeScaling::Dynamic { factor, original_context } => {
                let (factor, original) = (f64::from(factor), original_context as f64);
                let length = (context as f64).max(original);
                let dim = dim as f64;
                let growth = (factor * length / original - (factor - 1.0)).powf(dim / (dim - 2.0));
                for (i, f) in f.iter_mut().enumerate() {
                    *f *= growth.powf(-2.0 * i as f64 / dim);
                }
            }
        }
    }
}

fn divide(f: &mut [f64], by: &[f32]) {
    f.iter_mut().zip(by).for_each(|(f, &by)| *f /= f64::from(by));
}

fn positive(what: &str, x: f32) -> Result<()> {
    if x.is_finite() && x > 0.0 {
        Ok(())
    } else {
        Err(Error::format(format!("RoPE scaling: {what}"), format!("{x}, wanted a positive number")))
    }
}

fn original(context: usize) -> Result<()> {
    if context > 0 {
        Ok(())
    } else {
        Err(Error::format("RoPE scaling: original_max_position_embeddings", "0, wanted a positive number"))
    }
}

fn divisors(what: &str, factors: &[f32], dim: usize) -> Result<()> {
    if factors.len() != dim / 2 {
        return Err(Error::format(
            format!("RoPE scaling: {what}"),
            format!(
                "{} frequency factors, {} wanted (half of the {dim} rotated elements)",
                factors.len(),
                dim / 2
            ),
        ));
    }
    factors.iter().try_for_each(|&by| positive(what, by))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::{Rope, RopePairing, RopeTable};

    fn rope(dim: usize, theta: f32, scaling: RopeScaling) -> Rope {
        let (local_theta, local_scaling) = (None, RopeScaling::None);
        Rope {
            theta,
            local_theta,
            local_scaling,
            pairing: RopePairing::Half,
            dim,
            scaling,
            query_scaling: None,
        }
    }

    fn yarn(beta_fast: f32, beta_slow: f32) -> RopeScaling {
        RopeScaling::Yarn {
            factor: 4.0,
            original_context: 128,
            beta_fast,
            beta_slow,
            truncate: true,
            attention_factor: 1.0,
        }
    }

    #[test]
    fn the_context_of_the_run_chooses() {
        let cos = |scaling: &RopeScaling, context| {
            let table = RopeTable::new(&rope(8, 1e4, scaling.clone()), context).unwrap();
            let (mut c, mut s) = ([0.0; 4], [0.0; 4]);
            table.cos_sin(7, &mut c, &mut s);
            c
        };
        let long_rope = RopeScaling::LongRope {
            short: vec![1.0; 4],
            long: vec![2.0; 4],
            original_context: 64,
            attention_factor: 1.0,
        };
        let twice = RopeScaling::Linear { factor: 2.0 };
        assert_eq!(cos(&long_rope, 64), cos(&RopeScaling::None, 64));
        assert_eq!(cos(&long_rope, 65), cos(&twice, 65));
        let dynamic = RopeScaling::Dynamic { factor: 2.0, original_context: 64 };
        assert_eq!(cos(&dynamic, 64), cos(&RopeScaling::None, 64));
        assert_ne!(cos(&dynamic, 65), cos(&RopeScaling::None, 65));
    }

    #[test]
    fn the_attention_factor_multiplies_both() {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0; 2],
            long: vec![1.0; 2],
            original_context: 8,
            attention_factor: 1.25,
        };
        let table = RopeTable::new(&rope(4, 100.0, scaling), 8).unwrap();
        let (mut c, mut s) = ([0.0; 2], [0.0; 2]);
        table.cos_sin(3, &mut c, &mut s);
        assert_eq!((c[0], s[0]), ((3f64.cos() * 1.25) as f32, (3f64.sin() * 1.25) as f32));
    }

    #[test]
    fn impossible_values_are_named() {
        let long = |n: usize, by: f32| RopeScaling::LongRope {
            short: vec![1.0; 4],
            long: vec![by; n],
            original_context: 64,
            attention_factor: 1.0,
        };
        let dynamic = |factor, original_context| RopeScaling::Dynamic { factor, original_context };
        for (scaling, want) in [
            (RopeScaling::Linear { factor: 0.0 }, "factor: 0, wanted"),
            (RopeScaling::Linear { factor: f32::NAN }, "factor: NaN, wanted"),
            (yarn(1.0, 1.0), "beta_slow: 1 is not below beta_fast, 1"),
            (yarn(1.0, 32.0), "beta_slow: 32 is not below beta_fast, 1"),
            (yarn(f32::NAN, 1.0), "beta_fast: NaN"),
            (yarn(32.0, -1.0), "beta_slow: -1"),
            (long(3, 1.0), "long_factor: 3 frequency factors, 4 wanted"),
            (long(4, 0.0), "long_factor: 0, wanted"),
            (dynamic(0.5, 64), "factor: 0.5, wanted at least 1"),
            (dynamic(f32::INFINITY, 64), "factor: inf"),
            (dynamic(2.0, 0), "original_max_position_embeddings: 0"),
        ] {
            let e = RopeTable::new(&rope(8, 1e4, scaling), 64).expect_err(want).to_string();
            assert!(e.contains(want), "{e:?} does not say {want:?}");
        }
    }
}
