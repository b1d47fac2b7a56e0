//! Cosines and sines of the positions seen so far.

use crate::rope::RopeTable;

/// Grows on demand: row `p` holds the `dim/2` cosines and sines of position `p`.
pub(super) struct RopeCache {
    table: RopeTable,
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeCache {
    pub fn new(table: RopeTable) -> RopeCache {
        let half = table.pairs();
        RopeCache { table, half, cos: Vec::new(), sin: Vec::new() }
    }

    /// Number of positions to compute so that all below `n` exist. It doubles, so that decoding does not grow the table
    /// token by token.
    fn positions(n: usize) -> usize {
        n.next_power_of_two().max(256)
    }

    /// Bytes of a table that has been extended to `n` positions, of `half` pairs each.
    pub fn bytes(half: usize, n: usize) -> usize {
        2 * size_of::<f32>() * half * RopeCache::positions(n)
    }

    /// Computes all positions below `n`.
    pub fn extend_to(&mut self, n: usize) {
        let have = self.cos.len() / self.half;
        if n <= have {
            return;
        }
        let n = RopeCache::positions(n);
        for table in [&mut self.cos, &mut self.sin] {
            table.reserve_exact(n * self.half - table.len());
            table.resize(n * self.half, 0.0);
        }
        for p in have..n {
            let at = p * self.half..(p + 1) * self.half;
            self.table.cos_sin(p, &mut self.cos[at.clone()], &mut self.sin[at]);
        }
    }

    /// Cosines and sines of position `p`, which [`RopeCache::extend_to`] must have covered.
    pub fn at(&self, p: usize) -> (&[f32], &[f32]) {
        let at = p * self.half..(p + 1) * self.half;
        (&self.cos[at.clone()], &self.sin[at])
    }
}
