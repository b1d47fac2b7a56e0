//! Rows that want logits, put side by side behind the device's last attention.
//!
//! Behind the last keys and values only rows that want logits go on. In a step of several prompts they are not
//! neighbours, and products take rows that are: without packing, from the first such row to the last.
//!
//! ```text
//! rows      a a a A b b B c C d e    three prompts and two decode rows; A, B, C, d and e want logits
//! span            A b b B c C d e    from the first to the last
//! packed                A B C d e    A and B moved: the last products compute 5 rows instead of 8
//! ```
//! Rows move to the end of the span, because decode rows are there, which then stay where they are.

use std::ops::Range;

use crate::program::{Flow, Kind, Op, Phase, Program, SubBatch, Unit};

/// Rows that must be saved for each row that moves. A move is two small copies, of a few microseconds in all: on an H200, seven rows
/// of an 8B model's last block.
const SAVED: usize = 8;

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packed {
    /// Rows that move, and where to, in an order in which no move overwrites a row that has not moved yet.
    moves: Vec<(usize, usize)>,
    /// Where the rows with logits are afterwards.
    rows: Range<usize>,
}

impl Packed {
    /// The packing of a sub-batch's rows; `None` if the program does not allow it, or it does not pay.
    ///
    /// It renumbers rows for all later operations. So the device must compute all of these, with one projection of
    /// attention's outputs. Steps that may be recorded, and cohorts, whose lists outlive a step, are left alone.
    pub fn of(program: &Program, sub_batch: u8, batch: &SubBatch) -> Option<Packed> {
        let cohort = program.flow == Flow::Async && sub_batch > 0;
        if cohort || !batch.groups.iter().any(|g| g.phase == Phase::Prefill) {
            return None;
        }
        let ops = || program.ops.iter().filter(move |op| op.sub_batch == sub_batch);
        let mut last = ops().skip_while(|op| !is_packed(op));
        let first = last.next().filter(|op| op.kind == Kind::OutProj)?;
        let carried_on = |op: &Op| is_packed(op) && op.kind != Kind::OutProj && op.rows == first.rows;
        if !last.all(|op| if op.wanted_only { carried_on(op) } else { !has_rows(op) }) {
            return None;
        }
        let wanted: Vec<usize> = batch
            .with_rows()
            .flat_map(|(g, rows)| rows.end - g.wanted()..rows.end)
            .map(|row| row as usize)
            .collect();
        let span = first.rows.start as usize..first.rows.end as usize;
        let rows = span.end.checked_sub(wanted.len()).filter(|&at| at >= span.start)?..span.end;
        // A row moves up, and those above it have moved before.
        let moves: Vec<_> =
            wanted.into_iter().zip(rows.clone()).rev().filter(|(from, to)| from != to).collect();
        let pays = !moves.is_empty() && span.len() - rows.len() >= SAVED * moves.len();
        pays.then_some(Packed { moves, rows })
    }

    /// Rows that move, and where to, in the order of their moves.
    pub fn moves(&self) -> &[(usize, usize)] {
        &self.moves
    }

    /// Where the rows with logits are afterwards, in their order.
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }
}

/// Whether an operation computes packed rows, if there are any.
pub(super) fn is_packed(op: &Op) -> bool {
    use Kind::{FfnDown, FfnUp, Head, OutProj, Pick};
    op.wanted_only
        && op.unit == Unit::Gpu
        && matches!(op.kind, OutProj | FfnUp { .. } | FfnDown | Head { .. } | Pick)
}

/// Whether an operation reads or writes activations.
fn has_rows(op: &Op) -> bool {
    !matches!(op.kind, Kind::Stream { .. } | Kind::PageIn { .. } | Kind::PageOut { .. } | Kind::Join)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::program::{Group, Iteration, Kv, Placement, RequestId, Wants, lower};

    /// Prompts of these lengths, the last row of each with logits if so marked, and decode rows.
    fn batch(prompts: &[(u32, bool)], decode: u32) -> SubBatch {
        let group = |slot: usize, phase, tokens, wants| Group {
            request: RequestId { slot: slot as u32, generation: 0 },
            phase,
            first: if phase == Phase::Decode { 7 } else { 0 },
            tokens,
            kv: Kv::Device,
            wants,
        };
        let prompt = |(slot, &(tokens, ends)): (usize, &(u32, bool))| {
            group(slot, Phase::Prefill, tokens, if ends { Wants::Last } else { Wants::Nothing })
        };
        let decode = (0..decode).map(|i| group(prompts.len() + i as usize, Phase::Decode, 1, Wants::Last));
        SubBatch::of(prompts.iter().enumerate().map(prompt).chain(decode).collect())
    }

    fn packed(placement: &Placement, batch: &SubBatch) -> Option<Packed> {
        let iteration = Iteration::serial(batch.groups.clone(), true);
        Packed::of(&lower(placement, &iteration).unwrap(), 0, batch)
    }

    /// Two blocks, with the first `on_host` of embedding, blocks and head on the CPU.
    fn split(on_host: usize) -> Placement {
        Placement::boundary(on_host, 2, 64, 64)
    }

    proptest! {
        #[test]
        fn rows_with_logits_end_side_by_side_in_their_order(
            prompts in prop::collection::vec((1u32..60, any::<bool>()), 1..6),
            decode in 0u32..5,
        ) {
            let batch = batch(&prompts, decode);
            let wanted: Vec<u32> =
                batch.with_rows().flat_map(|(g, rows)| rows.end - g.wanted()..rows.end).collect();
            if let Some(packed) = packed(&split(0), &batch) {
                let mut rows: Vec<u32> = (0..batch.rows()).collect();
                for &(from, to) in packed.moves() {
                    rows[to] = rows[from];
                }
                prop_assert_eq!(&rows[packed.rows()], &wanted[..]);
            } else {
                let span = wanted.last().map_or(0, |last| last + 1 - wanted[0]) as usize;
                let end = wanted.last().map_or(0, |last| last + 1);
                let stay = wanted.iter().rev().zip((0..end).rev()).take_while(|&(&row, place)| row == place);
                let moved = wanted.len() - stay.count();
                prop_assert!(moved == 0 || span - wanted.len() < SAVED * moved, "{moved} of {} rows", span);
            }
        }
    }

    #[test]
    fn of_several_prompts_all_but_the_last_move_and_decode_rows_stay() {
        let packed = packed(&split(0), &batch(&[(40, true), (50, true), (60, true)], 3)).unwrap();
        assert_eq!(packed.rows(), 147..153);
        assert_eq!(packed.moves(), [(89, 148), (39, 147)]);
    }

    #[test]
    fn nothing_moves_where_it_is_for_nothing() {
        // One prompt's last row is beside the decode rows.
        assert_eq!(packed(&split(0), &batch(&[(40, false), (50, true)], 3)), None);
        // Too short.
        assert_eq!(packed(&split(0), &batch(&[(40, true), (5, true)], 3)), None);
        // The host computes the last block, and keeps the rows with logits itself.
        assert_eq!(packed(&split(4), &batch(&[(40, true), (50, true)], 0)), None);
    }
}
