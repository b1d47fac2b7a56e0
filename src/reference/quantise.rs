//! Activations quantised to int8 in blocks of 32, one row at a time.
//!
//! Per block `d = max|x|/127` and `q = round(x/d)`, ties to even. With the codes go the sums that multiply the weights'
//! offsets. A fine plane holds what the codes lost, `x - d·q`, quantised in the same way: the products of the two planes
//! add up to those of 16-bit activations.

/// A block with nothing greater than this gets codes 0: the reciprocal of its scale would be infinite. Its scale stays.
pub const LEAST: f32 = 1e-36;

/// Where a row's codes, scales and sums go.
pub struct Int8Row<'a> {
    /// Codes, -127 to 127: as many as the row has elements, padded with zeros to a multiple of 64.
    pub q: &'a mut [i8],
    /// Scale of each block of 32.
    pub d: &'a mut [f32],
    /// `d·Σq` of each block.
    pub sum32: &'a mut [f32],
    /// `d·Σq` of each half of a block.
    pub sum16: &'a mut [f32],
    /// `-Σq` of each block.
    pub minus32: &'a mut [i32],
    /// `-Σq` of each half.
    pub minus16: &'a mut [i32],
}

impl Int8Row<'_> {
    /// Blocks of 32: an even number.
    ///
    /// # Panics
    /// If the slices disagree about it, or it is odd.
    #[track_caller]
    pub fn blocks(&self) -> usize {
        let n = self.d.len();
        let halves = [self.sum16.len(), self.minus16.len(), self.q.len() / 16];
        assert_eq!((halves, self.q.len() % 64), ([2 * n; 3], 0), "halves of a row of {n} blocks");
        assert_eq!([self.sum32.len(), self.minus32.len()], [n; 2], "sums of a row of {n} blocks");
        n
    }
}

/// Quantises `x`, padded with zeros, into `row`, and what that loses into `fine`.
pub fn quantise_row(x: &[f32], mut row: Int8Row<'_>, mut fine: Option<Int8Row<'_>>) {
    for b in 0..row.blocks() {
        let mut xs = [0f32; 32];
        let from = &x[(b * 32).min(x.len())..(b * 32 + 32).min(x.len())];
        xs[..from.len()].copy_from_slice(from);
        quantise_block(&xs, &mut row, b);
        if let Some(fine) = &mut fine {
            for (x, q) in xs.iter_mut().zip(&row.q[b * 32..]) {
                *x = (-row.d[b]).mul_add(*q as f32, *x);
            }
            quantise_block(&xs, fine, b);
        }
    }
}

fn quantise_block(xs: &[f32; 32], out: &mut Int8Row<'_>, b: usize) {
    let qs = &mut out.q[b * 32..b * 32 + 32];
    let amax = xs.iter().fold(0f32, |a, v| a.max(v.abs()));
    let scale = amax / 127.0;
    let inverse = if amax > LEAST { 127.0 / amax } else { 0.0 };
    for (q, x) in qs.iter_mut().zip(xs) {
        *q = (x * inverse).round_ties_even() as i8;
    }
    let half: [i32; 2] = std::array::from_fn(|h| qs[h * 16..h * 16 + 16].iter().map(|&v| v as i32).sum());
    out.d[b] = scale;
    out.sum16[b * 2] = scale * half[0] as f32;
    out.sum16[b * 2 + 1] = scale * half[1] as f32;
    out.sum32[b] = scale * (half[0] + half[1]) as f32;
    out.minus16[b * 2..b * 2 + 2].copy_from_slice(&half.map(|s| -s));
    out.minus32[b] = -(half[0] + half[1]);
}
