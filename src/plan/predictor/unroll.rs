//! Programs of many layers that are alike, from a program of a few.
//!
//! ```text
//! lowered    0 1 2 3 │ 4 5 │ 6 7 │ 8 9              staging memory has two slots, so it is pairs of layers that repeat
//! needed     0 1 2 3 │ 4 5 │ 6 7 │ 6 7 │ … │ 8 9
//! ```
//! Lowering all layers takes most of the time that a new shape takes.

use super::run::Run;
use crate::program::{Op, Program};

/// Layers that are lowered of a run of `n`: the same parity, so that slots alternate behind it as they would.
pub(super) fn lowered(n: usize) -> usize {
    if n > FEW + 2 { FEW + n % 2 } else { n }
}

/// Two pairs before the two that are compared, since the first streamed layers cross the link before all else; and one behind, since
/// the last layer works for logits only.
const FEW: usize = 10;

/// Repeats the layers `first + 6` and `first + 7` `times` times; `first` is the first of a run of [`lowered`] layers.
/// `None`: the two pairs of layers before the last do not have the same operations that wait alike.
pub(super) fn repeat(run: &mut Run, first: u32, times: usize) -> Option<()> {
    let ops = &run.program.ops;
    let begin = |layer: u32| ops.iter().position(|op| op.layer == Some(layer));
    let (a, b, end) = (begin(first + 4)?, begin(first + 6)?, begin(first + 8)?);
    let pair = b.checked_sub(a)?;
    if end.checked_sub(b)? != pair {
        return None;
    }
    let alike = |one: usize, next: usize| {
        let (x, y) = (&ops[one], &ops[next]);
        let same = (x.kind, x.unit, x.sub_batch) == (y.kind, y.unit, y.sub_batch);
        let (w, v) = (&run.waits[one], &run.waits[next]);
        // For an operation a pair later, or for the same before all pairs.
        let waits = |(&w, &v): (&usize, &usize)| (v == w + pair && v >= a) || (v == w && v < a);
        let layers = x.layer.map(|l| l + 2) == y.layer;
        same && layers
            && run.priced[one] == run.priced[next]
            && w.len() == v.len()
            && w.iter().zip(v).all(waits)
    };
    // What comes behind waits for the pair before it, or for what is before all pairs.
    let tail_waits = run.waits[end..].iter().flatten().any(|w| (a..b).contains(w));
    if tail_waits || !(a..b).zip(b..end).all(|(one, next)| alike(one, next)) {
        return None;
    }
    let program = Program { ops: Vec::with_capacity(ops.len() + times * pair), flow: run.program.flow };
    let mut all = Run { program, waits: Vec::new(), priced: Vec::new() };
    let parts = [(0, 0..end)].into_iter().chain((1..=times).map(|k| (k, b..end)));
    for (k, part) in parts.chain([(times, end..ops.len())]) {
        for i in part {
            // Weights of layers behind these may cross the link before.
            let layer = ops[i].layer.map(|l| l + 2 * if l >= first + 8 { times } else { k } as u32);
            all.program.ops.push(Op { layer, ..ops[i].clone() });
            let later = |&w: &usize| if w < a { w } else { w + k * pair };
            all.waits.push(run.waits[i].iter().map(later).collect());
            all.priced.push(run.priced[i]);
        }
    }
    *run = all;
    Some(())
}
