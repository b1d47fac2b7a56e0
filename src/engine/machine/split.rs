//! Splits an iteration whose sub-batches want more logits than fit.

use super::part::GroupRows;
use crate::program::{Flow, Group, Iteration, SubBatch, Wants};
use crate::{Error, Result};

/// A group with its rows.
type Piece<'a> = (Group, GroupRows<'a>);

/// The iterations that compute `iteration`, each with the rows of its groups: one, unless a sub-batch wants logits of more than
/// `most` rows. The first makes all moves of pages.
///
/// # Errors
/// If an asynchronous iteration, which is one step of its cohorts, would have to be split.
pub(super) fn by_logits<'a>(
    iteration: Iteration,
    rows: Vec<GroupRows<'a>>,
    most: usize,
) -> Result<Vec<(Iteration, Vec<GroupRows<'a>>)>> {
    let wanted = |b: &SubBatch| b.groups.iter().map(|g| g.wanted() as usize).sum::<usize>();
    let wanted = iteration.sub_batches.iter().map(wanted).max().unwrap_or_default();
    if wanted <= most {
        return Ok(vec![(iteration, rows)]);
    }
    if iteration.flow == Flow::Async {
        return Err(Error::Capacity(format!("logits of {wanted} rows, there is room for {most}")));
    }
    let mut rows = rows.into_iter();
    let batches = iteration.sub_batches.iter().map(|b| {
        let pieces: Vec<Piece<'a>> = b.groups.iter().copied().zip(rows.by_ref()).collect();
        steps(&pieces, most)
    });
    let batches: Vec<Vec<Vec<Piece<'a>>>> = batches.collect();
    let n = batches.iter().map(Vec::len).max().unwrap_or_default();
    let step = |i: usize| {
        let pieces = || batches.iter().map(move |b| b.get(i).map_or(&[][..], Vec::as_slice));
        let groups = |pieces: &[Piece<'a>]| pieces.iter().map(|p| p.0).collect::<Vec<_>>();
        let sub_batches = pieces().map(groups).map(SubBatch::of).collect();
        let moves = if i == 0 { iteration.moves.clone() } else { Vec::new() };
        let part = Iteration { sub_batches, moves, ..iteration };
        (part, pieces().flatten().map(|p| p.1).collect())
    };
    Ok((0..n).map(step).collect())
}

/// Splits pieces into steps of at most `most` rows of logits each.
fn steps<'a>(pieces: &[Piece<'a>], most: usize) -> Vec<Vec<Piece<'a>>> {
    let mut steps = vec![Vec::new()];
    let mut left = most;
    for piece in pieces {
        let (mut from, all) = (0, piece.1.tokens.len());
        while from < all {
            if left == 0 {
                steps.push(Vec::new());
                left = most;
            }
            let to = match piece.0.wants {
                Wants::All => all.min(from + left),
                _ => all,
            };
            let part = part_of(piece, from, to);
            left -= part.0.wanted() as usize;
            steps.last_mut().expect("one at least").push(part);
            from = to;
        }
    }
    steps
}

/// Rows `from..to` of a piece.
fn part_of<'a>(&(mut group, mut rows): &Piece<'a>, from: usize, to: usize) -> Piece<'a> {
    if group.wants == Wants::All {
        rows.out += from;
    }
    rows.tokens = &rows.tokens[from..to];
    (group.first, group.tokens) = (group.first + from as u32, (to - from) as u32);
    (group, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kv::{SequenceKv, Sides};
    use crate::program::{Kv, Phase, RequestId};

    const TOKENS: [u32; 10] = [0; 10];

    /// The groups of each step, and the places of their results.
    fn split(batches: &[&[(u32, u32, Wants)]], most: usize) -> Vec<(Iteration, Vec<usize>)> {
        let table = SequenceKv::new(Sides { device: true, host: false });
        let (mut out, mut rows) = (0, Vec::new());
        let mut group = |&(slot, tokens, wants): &(u32, u32, Wants)| {
            let request = RequestId { slot, generation: 0 };
            let group = Group { request, phase: Phase::Prefill, first: 0, tokens, kv: Kv::Device, wants };
            rows.push(GroupRows { tokens: &TOKENS[..tokens as usize], table: &table, out });
            out += group.wanted() as usize;
            group
        };
        let sub_batches = batches.iter().map(|b| SubBatch::of(b.iter().map(&mut group).collect())).collect();
        let iteration =
            Iteration { sub_batches, flow: Flow::TwoLanes, ..Iteration::serial(Vec::new(), false) };
        let steps = by_logits(iteration, rows, most).unwrap();
        steps.into_iter().map(|(i, rows)| (i, rows.iter().map(|r| r.out).collect())).collect()
    }

    #[test]
    fn rows_of_logits_are_shared_out_to_steps() {
        let groups = [(0, 10, Wants::All), (1, 4, Wants::Last), (2, 2, Wants::Nothing)];
        let steps = split(&[&groups], 4);
        let groups = |i: usize| &steps[i].0.sub_batches[0].groups;
        let wanted: Vec<u32> = (0..3).map(|i| groups(i).iter().map(Group::wanted).sum()).collect();
        assert_eq!((steps.len(), wanted), (3, vec![4, 4, 3]));
        let rows: u32 = steps.iter().map(|s| s.0.sub_batches[0].rows()).sum();
        assert_eq!((rows, groups(1)[0].first, groups(2)[0].first), (16, 4, 8));
        assert_eq!([&steps[0].1, &steps[1].1, &steps[2].1], [&vec![0], &vec![4], &vec![8, 10, 11]]);
        assert_eq!(split(&[&[(1, 4, Wants::Last)]], 1).len(), 1);
    }

    #[test]
    fn sub_batches_keep_their_numbers() {
        let first = [(5, 3, Wants::All)];
        let second = [(8, 2, Wants::Nothing), (4, 1, Wants::Last), (7, 1, Wants::Last)];
        let steps = split(&[&first, &second], 64);
        assert_eq!((steps.len(), &steps[0].1), (1, &vec![0, 3, 3, 4]));
        // One sub-batch needs two steps, the other ends in the first.
        let steps = split(&[&first, &second], 2);
        assert_eq!((steps.len(), steps[1].0.sub_batches[1].groups.len(), &steps[1].1), (2, 0, &vec![2]));
    }
}
