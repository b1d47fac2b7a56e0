//! Entries of the AMX tier: between which kernels it changes, at how many tokens, and whether 16-bit floats are packed into
//! tiles when a model is loaded.

use super::contest::{Contest, WeightSubject};
use super::{GAIN, OneDType};
use crate::Result;
use crate::simd::tuning::LinearTuning;
use crate::tensor::DType;

/// More tokens than a table may say: what begins there is never used.
const NEVER: usize = usize::MAX;

/// Numbers of tokens at which int8 tiles are compared with VNNI.
const INT8_TILES_AT: [usize; 6] = [4, 6, 8, 10, 12, 16];

/// Numbers of tokens at which bf16 tiles are compared with int8 products: from 17 on they take another block of rows.
const TILES_AT: [usize; 8] = [8, 12, 16, 17, 24, 28, 32, 48];

/// Numbers of tokens at which f16 arithmetic is compared with f32.
const HALF_AT: [usize; 4] = [32, 64, 128, 512];

/// Numbers of tokens at which 16-bit floats in tiles are compared with those in the file: decoding one sequence, several, and
/// prefill.
pub(super) const AT_LOAD: [usize; 3] = [1, 16, 512];

/// A kernel that an entry turns on from, or up to, some number of tokens.
struct Switch {
    entry: &'static str,
    /// The numbers that are tried.
    at: &'static [usize],
    /// Whether it gives the bits of what it replaces.
    same_bits: bool,
    /// Share of the time that it has to save.
    gain: f64,
    /// Whether activations are fine.
    fine: bool,
}

impl OneDType<'_> {
    /// Tries every entry of this type.
    pub(super) fn tiles(&mut self, subject: &WeightSubject) -> Result<()> {
        match self.dtype {
            DType::F32 => Ok(()),
            DType::F16 | DType::BF16 => self.tiles_at_load(subject),
            _ => self.thresholds(subject),
        }
    }

    /// The numbers of tokens from which int8 tiles win, then bf16 tiles, and up to which f16 arithmetic makes those.
    fn thresholds(&mut self, subject: &WeightSubject) -> Result<()> {
        let switch =
            Switch { entry: "int8_tiles_from", at: &INT8_TILES_AT, same_bits: true, gain: 0.0, fine: false };
        self.entries.int8_tiles_from =
            self.wins_from(subject, &switch, |e, from| (e.int8_tiles_from, e.tiles_from) = (from, NEVER))?;
        let switch = Switch { entry: "tiles_from", at: &TILES_AT, same_bits: false, gain: 0.0, fine: false };
        self.entries.tiles_from = self.wins_from(subject, &switch, |e, from| e.tiles_from = from)?;
        let switch =
            Switch { entry: "fine_tiles_from", at: &TILES_AT, same_bits: false, gain: 0.0, fine: true };
        self.entries.fine_tiles_from =
            self.wins_from(subject, &switch, |e, from| e.fine_tiles_from = from)?;
        // It is less exact.
        let switch = Switch { entry: "half_up_to", at: &HALF_AT, same_bits: false, gain: GAIN, fine: false };
        let half = |e: &mut LinearTuning, up_to| (e.tiles_from, e.half_up_to) = (1, up_to);
        let without = turn(HALF_AT.len(), |i| Ok(!self.wins(subject, &switch, i, [0, HALF_AT[i]], half)?))?;
        self.entries.half_up_to = if without == 0 { 0 } else { HALF_AT[without - 1] };
        Ok(())
    }

    /// The number of tokens from which on what `set` turns on wins: twice the last that is tried if none.
    fn wins_from(
        &mut self,
        subject: &WeightSubject,
        switch: &Switch,
        set: impl Fn(&mut LinearTuning, usize),
    ) -> Result<usize> {
        let at = switch.at;
        let from = turn(at.len(), |i| self.wins(subject, switch, i, [NEVER, 1], &set))?;
        Ok(at.get(from).copied().unwrap_or(2 * at[at.len() - 1]))
    }

    /// Whether what the second of `values` turns on wins over the first, at the number `i` of tokens.
    fn wins(
        &mut self,
        subject: &WeightSubject,
        switch: &Switch,
        i: usize,
        values: [usize; 2],
        set: impl Fn(&mut LinearTuning, usize),
    ) -> Result<bool> {
        let (entries, tokens) = (values.map(|value| self.with(&|e| set(e, value))), switch.at[i]);
        let contest = Contest::new(self.pool, subject, tokens, self.effort, switch.same_bits);
        let seconds = contest.run(&entries, switch.fine)?;
        let wins = seconds[1] < seconds[0] * (1.0 - switch.gain);
        let names = ["without", "with"].map(String::from);
        self.found(switch.entry, tokens, usize::from(wins), names.into_iter(), &seconds);
        Ok(wins)
    }

    /// Whether tiles that lie packed gain over rows of the file, decode and prefill together.
    fn tiles_at_load(&mut self, subject: &WeightSubject) -> Result<()> {
        let (tiles, rate) = subject.in_tiles(self.pool, self.isa);
        let mut compared = Vec::new();
        for tokens in AT_LOAD {
            // Up to two tokens rows are summed in another order.
            let contest = Contest::new(self.pool, subject, tokens, self.effort, tokens > 2);
            compared.push(contest.race(&[("rows", subject.in_rows()), ("tiles", &tiles)])?);
        }
        self.entries.tiles_at_load = pays(&compared);
        let chosen = usize::from(self.entries.tiles_at_load);
        for (tokens, seconds) in AT_LOAD.into_iter().zip(compared) {
            self.found(
                "tiles_at_load",
                tokens,
                chosen,
                ["rows", "tiles"].map(String::from).into_iter(),
                &seconds,
            );
            let tiles = self.findings.last_mut().and_then(|f| f.candidates.last_mut());
            tiles.expect("just found").packed_per_s = Some(rate);
        }
        Ok(())
    }
}

/// Whether the second of each pair of times is worth a longer load: nowhere [`GAIN`] more than the first, and by the geometric
/// mean [`GAIN`] less.
fn pays(compared: &[Vec<f64>]) -> bool {
    let ratios = || compared.iter().map(|seconds| seconds[1] / seconds[0]);
    let mean = (ratios().map(f64::ln).sum::<f64>() / compared.len() as f64).exp();
    mean <= 1.0 - GAIN && ratios().all(|r| r <= 1.0 + GAIN)
}

/// The first of `0..n` at which `holds`, or `n`, where it holds from some number on: by halving.
fn turn(n: usize, mut holds: impl FnMut(usize) -> Result<bool>) -> Result<usize> {
    let (mut least, mut most) = (0, n);
    while least < most {
        let middle = least.midpoint(most);
        if holds(middle)? { most = middle } else { least = middle + 1 }
    }
    Ok(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_turn_is_found_wherever_it_is() {
        for n in 0..9 {
            for at in 0..=n {
                let mut asked = 0;
                let found = turn(n, |i| {
                    asked += 1;
                    Ok(i >= at)
                });
                assert_eq!((found.unwrap(), asked <= 4), (at, true), "{at} of {n}");
            }
        }
    }

    #[test]
    fn packing_pays_by_what_decode_and_prefill_gain_together() {
        let of = |ratios: [f64; 3]| pays(&ratios.map(|r| vec![2.0, 2.0 * r]));
        assert!(of([1.0, 0.98, 0.9]), "prefill gains, decode loses nothing");
        assert!(!of([1.05, 0.9, 0.8]), "decode loses");
        assert!(!of([1.0, 0.99, 0.97]), "too little");
        assert!(!of([1.0, 1.0, f64::NAN]));
    }
}
