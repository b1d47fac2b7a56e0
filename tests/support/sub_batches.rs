//! Rows in several sub-batches, whose logits come in the order of the rows.

use tandem::engine::{Engine, NewTokens};
use tandem::program::{Flow, MoveRequest, RequestId, Side, Wants};

/// What happens beside the rows of a step.
#[derive(Debug, Clone, Default)]
pub struct Moves {
    pub whole: Vec<(RequestId, Side)>,
    pub parts: Vec<MoveRequest>,
}

/// Runs `rows`, each in the sub-batch that `split` says.
pub fn forward(
    e: &mut Engine,
    rows: &[NewTokens<'_>],
    split: &[u8],
    flow: Flow,
    moves: &Moves,
) -> tandem::Result<Vec<f32>> {
    assert_eq!(rows.len(), split.len());
    let n = split.iter().max().map_or(1, |&most| usize::from(most) + 1);
    let mut batches: Vec<Vec<NewTokens<'_>>> = vec![Vec::new(); n];
    rows.iter().zip(split).for_each(|(r, &b)| batches[usize::from(b)].push(*r));
    let batches: Vec<&[NewTokens<'_>]> = batches.iter().map(Vec::as_slice).collect();
    e.run_rows(&batches, flow, &moves.whole, |iteration| iteration.moves = moves.parts.clone())?;
    let wanted = |r: &NewTokens<'_>| match r.wants {
        _ if r.tokens.is_empty() => 0,
        Wants::Nothing => 0,
        Wants::Last => 1,
        Wants::All => r.tokens.len(),
    };
    let vocab = e.spec().vocab;
    let mut left = e.logits();
    let mut of = vec![&[][..]; rows.len()];
    for b in 0..n {
        for (i, row) in rows.iter().enumerate().filter(|(i, _)| usize::from(split[*i]) == b) {
            (of[i], left) = left.split_at(wanted(row) * vocab);
        }
    }
    assert!(left.is_empty());
    Ok(of.concat())
}
