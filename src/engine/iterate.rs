//! Turns the inputs of a step into iterations, which group the rows that are computed together.

use super::input::{Input, Logits, StepPlan};
use super::kv::{Moved, SequenceKv};
use super::machine::GroupRows;
use crate::program::{Far, Group, Iteration, Kv, Phase, SubBatch, Wants};

/// New tokens of one sequence.
#[derive(Clone, Copy)]
struct Piece<'a> {
    group: Group,
    rows: GroupRows<'a>,
}

impl Piece<'_> {
    /// Its rows `from..to`, as a piece.
    fn part(&self, from: usize, to: usize) -> Self {
        let (mut group, mut rows) = (self.group, self.rows);
        if group.wants == Wants::Last && to < rows.tokens.len() {
            group.wants = Wants::Nothing;
        }
        if group.wants == Wants::All {
            rows.out += from;
        }
        rows.tokens = &rows.tokens[from..to];
        (group.first, group.tokens) = (group.first + from as u32, (to - from) as u32);
        let decode = group.tokens == 1 && group.wants != Wants::Nothing;
        group.phase = if decode { Phase::Decode } else { Phase::Prefill };
        Piece { group, rows }
    }
}

/// The iterations that compute `inputs`, whose sequences have the pages `tables`. There is one, unless a sub-batch
/// wants logits of more than `most` rows; the first copies the pages in `moved`. Also returns the rows of their groups,
/// and the total number of rows that want logits.
pub(super) fn iterations<'a>(
    inputs: &[Input<'a>],
    tables: &[&'a SequenceKv],
    (moved, far): (&[Moved], Far),
    plan: &StepPlan<'_>,
    pick: bool,
    most: usize,
) -> (Vec<(Iteration, Vec<GroupRows<'a>>)>, usize) {
    let sub_batch = |i: usize| plan.split.map_or(0, |s| usize::from(s[i]));
    let n = (0..inputs.len()).map(sub_batch).max().unwrap_or_default() + 1;
    let mut batches: Vec<Vec<Piece<'_>>> = vec![Vec::new(); n];
    let mut out = 0;
    for (i, (input, table)) in inputs.iter().zip(tables).enumerate() {
        if input.tokens.is_empty() {
            continue;
        }
        let group = Group {
            request: input.seq.request(),
            phase: Phase::Prefill,
            first: table.len() as u32,
            tokens: input.tokens.len() as u32,
            kv: table.kv(far),
            wants: match input.logits {
                Logits::None => Wants::Nothing,
                Logits::Last => Wants::Last,
                Logits::All => Wants::All,
            },
        };
        let piece = Piece { group, rows: GroupRows { tokens: input.tokens, table, out } };
        batches[sub_batch(i)].push(piece.part(0, input.tokens.len()));
        out += group.wanted() as usize;
    }
    let mut batches: Vec<_> = batches
        .into_iter()
        .map(|mut pieces| {
            // Neighbours of the same phase with keys and values on the same side are computed together.
            pieces.sort_by_key(|p| {
                let home = match p.group.kv {
                    Kv::Host => 0,
                    Kv::Split { .. } => 1,
                    Kv::Device => 2,
                };
                let decode = p.group.phase == Phase::Decode;
                (decode, if decode { 2 - home } else { home })
            });
            steps(&pieces, most).into_iter()
        })
        .collect();
    let steps = batches.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
    let iteration = |i: usize| {
        let parts: Vec<Vec<Piece<'_>>> = batches.iter_mut().map(|b| b.next().unwrap_or_default()).collect();
        let rows = parts.iter().flatten().map(|p| p.rows).collect();
        let batch = |part: &Vec<Piece<'_>>| SubBatch::of(part.iter().map(|p| p.group).collect());
        let sub_batches = parts.iter().map(batch).collect();
        (
            Iteration {
                sub_batches,
                moves: if i == 0 { Moved::all_of_iteration(moved) } else { Vec::new() },
                flow: plan.flow,
                pick,
                top: false,
            },
            rows,
        )
    };
    ((0..steps).map(iteration).collect(), out)
}

/// Splits the rows of `pieces` into steps of at most `most` rows of logits each.
fn steps<'a>(pieces: &[Piece<'a>], most: usize) -> Vec<Vec<Piece<'a>>> {
    let mut steps = vec![Vec::new()];
    let mut left = most;
    for piece in pieces {
        let (mut from, all) = (0, piece.rows.tokens.len());
        while from < all {
            if left == 0 {
                steps.push(Vec::new());
                left = most;
            }
            let to = match piece.group.wants {
                Wants::All => all.min(from + left),
                _ => all,
            };
            let part = piece.part(from, to);
            left -= part.group.wanted() as usize;
            steps.last_mut().expect("one at least").push(part);
            from = to;
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::super::seq_id::SeqId;
    use super::*;
    use crate::program::Flow;

    fn all(inputs: &[Input<'_>], split: Option<&[u8]>, most: usize) -> Vec<(Iteration, Vec<usize>)> {
        let table = SequenceKv::new(super::super::kv::Sides { device: true, host: false });
        let tables = vec![&table; inputs.len()];
        let plan = StepPlan { split, flow: Flow::TwoLanes, swaps: &[] };
        let (all, _) = iterations(inputs, &tables, (&[], Far::Attend), &plan, false, most);
        all.into_iter().map(|(i, rows)| (i, rows.iter().map(|r| r.out).collect())).collect()
    }

    #[test]
    fn rows_of_logits_are_shared_out_to_steps() {
        let tokens = [0; 10];
        let input = |slot, n: usize, logits| Input { seq: SeqId::of(slot), tokens: &tokens[..n], logits };
        let inputs = [input(0, 10, Logits::All), input(1, 4, Logits::Last), input(2, 2, Logits::None)];
        let steps = all(&inputs, None, 4);
        let groups = |i: usize| &steps[i].0.sub_batches[0].groups;
        let wanted: Vec<u32> = (0..3).map(|i| groups(i).iter().map(Group::wanted).sum()).collect();
        assert_eq!((steps.len(), wanted), (3, vec![4, 4, 3]));
        let rows: u32 = steps.iter().map(|s| s.0.sub_batches[0].rows()).sum();
        assert_eq!((rows, groups(1)[0].first, groups(2)[0].first), (16, 4, 8));
        assert_eq!([&steps[0].1, &steps[1].1, &steps[2].1], [&vec![0], &vec![4], &vec![8, 10, 11]]);
        assert_eq!(all(&inputs[1..2], None, 1).len(), 1);
    }

    #[test]
    fn sub_batches_keep_the_places_of_their_inputs() {
        let tokens = [0; 3];
        let input = |slot, n: usize, logits| Input { seq: SeqId::of(slot), tokens: &tokens[..n], logits };
        let inputs = [
            input(4, 1, Logits::Last),
            input(5, 3, Logits::All),
            input(6, 0, Logits::Last),
            input(7, 1, Logits::Last),
            input(8, 2, Logits::None),
        ];
        let steps = all(&inputs, Some(&[1, 0, 0, 1, 1]), 64);
        let slots = |b: usize| -> Vec<u32> {
            steps[0].0.sub_batches[b].groups.iter().map(|g| g.request.slot).collect()
        };
        // Within each step, prompts come before decode rows; the input without tokens is gone.
        assert_eq!((steps.len(), slots(0), slots(1)), (1, vec![5], vec![8, 4, 7]));
        assert_eq!(steps[0].1, [1, 5, 0, 4]);
        // One sub-batch needs two steps, the other finishes after one.
        let steps = all(&inputs, Some(&[1, 0, 0, 1, 1]), 2);
        assert_eq!((steps.len(), steps[1].0.sub_batches[1].groups.len(), &steps[1].1), (2, 0, &vec![3]));
    }
}
