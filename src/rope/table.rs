//! Frequencies of RoPE, and the cosines and sines of a position.

use super::{Rope, RopeScaling};
use crate::{Error, Result};

/// Inverse frequencies, scaled once; cosines and sines are computed in double precision on demand, once
/// per position and step, and shared by all layers and heads.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    inv_freq: Vec<f64>,
    /// Factor of every cosine and sine.
    scale: f64,
}

impl RopeTable {
    /// For ordinary (full-attention) layers, in a run with room for `context` tokens: scaling that depends on the length is chosen
    /// by it, once (docs/decisions/0028).
    ///
    /// # Errors
    /// An odd or zero `dim`, a base that is not positive, or impossible scaling: model files hold these.
    pub fn new(rope: &Rope, context: usize) -> Result<RopeTable> {
        RopeTable::scaled(rope.dim, rope.theta, &rope.scaling, context)
    }

    /// For sliding-window layers, if they have a base of their own; else they share [`RopeTable::new`]'s.
    ///
    /// # Errors
    /// As for [`RopeTable::new`].
    pub fn local(rope: &Rope, context: usize) -> Result<Option<RopeTable>> {
        let table = |theta| RopeTable::scaled(rope.dim, theta, &rope.local_scaling, context);
        rope.local_theta.map(table).transpose()
    }

    fn scaled(dim: usize, theta: f32, scaling: &RopeScaling, context: usize) -> Result<RopeTable> {
        let mut table = RopeTable::unscaled(dim, theta)?;
        scaling.check(dim)?;
        scaling.apply(theta, context, &mut table.inv_freq);
        table.scale = f64::from(scaling.attention_factor());
        Ok(table)
    }

    /// How many times slower than without scaling each pair of elements turns, `dim / 2` numbers: any scaling that does not
    /// depend on the context and has no attention factor, as [`RopeScaling::Factors`], the only one that some formats can say.
    ///
    /// # Errors
    /// As for [`RopeTable::new`].
    pub fn factors(rope: &Rope) -> Result<Vec<f32>> {
        let (plain, scaled) = (RopeTable::unscaled(rope.dim, rope.theta)?, RopeTable::new(rope, 1)?);
        Ok(plain
            .inv_freq
            .iter()
            .zip(&scaled.inv_freq)
            .map(|(plain, scaled)| (plain / scaled) as f32)
            .collect())
    }

    /// theta^(-2i/dim).
    fn unscaled(dim: usize, theta: f32) -> Result<RopeTable> {
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(Error::format(
                "RoPE",
                format!("{dim} rotated elements per head, wanted an even number"),
            ));
        }
        if !(theta > 0.0 && theta.is_finite()) {
            return Err(Error::format("RoPE", format!("base {theta} is not a positive number")));
        }
        let inv_freq = (0..dim / 2).map(|i| (theta as f64).powf(-2.0 * i as f64 / dim as f64)).collect();
        Ok(RopeTable { inv_freq, scale: 1.0 })
    }

    /// Pairs per head: the length of a position's cosines (and of its sines).
    pub fn pairs(&self) -> usize {
        self.inv_freq.len()
    }

    /// cos and sin of `pos` times each frequency, times the attention factor; both outputs have [`RopeTable::pairs`] elements.
    pub fn cos_sin(&self, pos: usize, out_cos: &mut [f32], out_sin: &mut [f32]) {
        let n = self.pairs();
        assert!(
            out_cos.len() == n && out_sin.len() == n,
            "cos_sin: outputs of {} and {} elements for {n} pairs",
            out_cos.len(),
            out_sin.len()
        );
        for ((&f, c), s) in self.inv_freq.iter().zip(out_cos).zip(out_sin) {
            let (sin, cos) = (pos as f64 * f).sin_cos();
            *c = (cos * self.scale) as f32;
            *s = (sin * self.scale) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::RopePairing;

    fn rope(dim: usize, theta: f32, scaling: RopeScaling) -> Rope {
        Rope {
            theta,
            local_theta: None,
            local_scaling: RopeScaling::None,
            pairing: RopePairing::Half,
            dim,
            scaling,
            query_scaling: None,
        }
    }

    #[test]
    fn frequencies_are_powers_of_the_base() {
        let t = RopeTable::new(&rope(8, 10_000.0, RopeScaling::None), 64).unwrap();
        for (got, want) in t.inv_freq.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((got / want - 1.0).abs() < 1e-12, "{got} {want}");
        }
        let (mut c, mut s) = ([0.0; 4], [0.0; 4]);
        t.cos_sin(3, &mut c, &mut s);
        assert_eq!((c[0], s[0]), (3f64.cos() as f32, 3f64.sin() as f32));
        assert_eq!((c[2], s[2]), (0.03f64.cos() as f32, 0.03f64.sin() as f32));
    }

    #[test]
    fn linear_and_explicit_factors_divide() {
        let plain = RopeTable::new(&rope(4, 100.0, RopeScaling::None), 64).unwrap();
        let linear = RopeTable::new(&rope(4, 100.0, RopeScaling::Linear { factor: 4.0 }), 64).unwrap();
        let own = RopeTable::new(&rope(4, 100.0, RopeScaling::Factors(vec![4.0, 2.0])), 64).unwrap();
        assert_eq!(linear.inv_freq, [plain.inv_freq[0] / 4.0, plain.inv_freq[1] / 4.0]);
        assert_eq!(own.inv_freq, [plain.inv_freq[0] / 4.0, plain.inv_freq[1] / 2.0]);
    }

    /// Llama 3.2 1B (factor 32, low 1, high 4, 8192, base 500 000, dim 64). Short waves are kept, long
    /// ones divided by 32, and pair 15 (blended) follows the published formula, written out here in
    /// wavelengths as the paper's code has it.
    #[test]
    fn llama3_scaling_is_piecewise_in_wavelength() {
        let scaling = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let plain = RopeTable::new(&rope(64, 500_000.0, RopeScaling::None), 64).unwrap();
        let got = RopeTable::new(&rope(64, 500_000.0, scaling), 64).unwrap();
        let mut kinds = [0; 3];
        for (&f, &g) in plain.inv_freq.iter().zip(&got.inv_freq) {
            let wavelength = std::f64::consts::TAU / f;
            let want = if wavelength < 8192.0 / 4.0 {
                kinds[0] += 1;
                f
            } else if wavelength > 8192.0 {
                kinds[1] += 1;
                f / 32.0
            } else {
                kinds[2] += 1;
                let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
                (1.0 - smooth) * f / 32.0 + smooth * f
            };
            assert!((g / want - 1.0).abs() < 1e-12, "wavelength {wavelength}: {g}, not {want}");
        }
        assert!(kinds.iter().all(|&k| k > 0), "all three pieces were seen: {kinds:?}");
    }

    #[test]
    fn local_layers_have_a_base_and_scaling_of_their_own() {
        let mut r = rope(8, 1e6, RopeScaling::Linear { factor: 8.0 });
        assert_eq!(RopeTable::local(&r, 64).unwrap(), None);
        r.local_theta = Some(10_000.0);
        let want = RopeTable::new(&rope(8, 10_000.0, RopeScaling::None), 64).unwrap();
        assert_eq!(RopeTable::local(&r, 64).unwrap(), Some(want));
        r.local_scaling = RopeScaling::Linear { factor: 2.0 };
        let want = RopeTable::new(&rope(8, 10_000.0, RopeScaling::Linear { factor: 2.0 }), 64).unwrap();
        assert_eq!(RopeTable::local(&r, 64).unwrap(), Some(want));
    }

    #[test]
    fn nonsense_from_files_is_an_error() {
        assert!(RopeTable::new(&rope(7, 1e4, RopeScaling::None), 64).is_err());
        assert!(RopeTable::new(&rope(0, 1e4, RopeScaling::None), 64).is_err());
        assert!(RopeTable::new(&rope(8, f32::NAN, RopeScaling::None), 64).is_err());
        assert!(RopeTable::new(&rope(8, 1e4, RopeScaling::Linear { factor: 0.0 }), 64).is_err());
        let e = RopeTable::new(&rope(8, 1e4, RopeScaling::Factors(vec![1.0; 3])), 64).unwrap_err();
        assert!(e.to_string().contains("3 frequency factors, 4 wanted"), "{e}");
    }
}
