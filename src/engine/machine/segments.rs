//! Segments of programs: operations that can be one graph.
//!
//! A segment is a maximal run of operations on the device's compute lane in which only the first waits for other operations, and
//! other operations wait only for the last. A program wholly on the device is one segment.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use crate::program::{Buffer, Flow, Kind, Op, Placement, Program, Residence, Unit};

/// Steps of at most this many rows are recorded.
pub(super) const GRAPH_ROWS: usize = 64;

/// Length of the shortest segment for which recording pays.
const SHORTEST: usize = 4;

/// Operations that can be one graph.
pub(super) struct Segment {
    pub ops: Range<usize>,
    /// Hash of the launches, except for the contents of the step's lists.
    pub shape: u64,
}

/// The segments of a program whose sub-batches have these numbers of rows. Where cohorts may join, each layer is a
/// segment, so that the segments are the same wherever they join.
pub(super) fn segments(
    program: &Program,
    waits: &[Vec<usize>],
    awaited: &[bool],
    placement: &Placement,
    rows: &[u32],
) -> Vec<Segment> {
    // The weights of a streamed layer may be in either staging buffer.
    let streamed = |op: &Op| match op.layer.map(|l| placement.layers[l as usize].weights) {
        Some(Residence::Streamed) => true,
        Some(Residence::StreamedExperts) => op.reads.iter().any(|r| matches!(r.buffer, Buffer::Weights(_))),
        _ => false,
    };
    let (ops, layered) = (program.ops.as_slice(), program.flow == Flow::Async);
    let plain = |op: &Op| op.unit == Unit::Gpu && !streamed(op) && !program.is_of_cohort(op);
    let waits_for_others =
        |i: usize| waits.get(i).is_some_and(|w| w.iter().any(|&w| ops[w].unit != Unit::Gpu));
    let mut found = Vec::new();
    let mut at = 0;
    while at < ops.len() {
        if !plain(&ops[at]) {
            at += 1;
            continue;
        }
        let from = at;
        // Operations of one launch stay together.
        let mut n = fusible(ops, at);
        at += n;
        while at < ops.len() && plain(&ops[at]) && !(at - n..at).any(|i| awaited[i]) {
            n = fusible(ops, at);
            if (at..at + n).any(waits_for_others) || layered && ops[at].layer != ops[from].layer {
                break;
            }
            at += n;
        }
        if at - from >= SHORTEST {
            found.push(Segment { ops: from..at, shape: shape(&ops[from..at], rows) });
        }
    }
    found
}

fn shape(ops: &[Op], rows: &[u32]) -> u64 {
    let mut hash = DefaultHasher::new();
    for op in ops {
        // All rows of a sub-batch stand for the launched rows, whatever their number.
        let all = op.rows == (0..rows[op.sub_batch as usize]);
        let some = (!all).then(|| op.rows.clone());
        (op.kind, op.layer, op.sub_batch, some).hash(&mut hash);
    }
    hash.finish()
}

/// Number of operations from `at` on that the accelerator runs in one pass over the rows: project, append and publish.
pub(super) fn fusible(ops: &[Op], at: usize) -> usize {
    let op = &ops[at];
    let with = |i: usize, is: fn(&Kind) -> bool| {
        ops.get(i).is_some_and(|o| {
            o.unit == Unit::Gpu
                && (o.layer, o.sub_batch, &o.rows) == (op.layer, op.sub_batch, &op.rows)
                && is(&o.kind)
        })
    };
    if op.unit != Unit::Gpu || !matches!(op.kind, Kind::Project { .. }) {
        return 1;
    }
    let n = match with(at + 1, |k| matches!(k, Kind::Append { .. })) {
        false => 1,
        true => 2 + usize::from(with(at + 2, |k| matches!(k, Kind::Publish { .. }))),
    };
    // The pass leaves nothing in q|k|v for those who come later, such as the publication of some of its rows.
    let of_pass = |o: &&Op| (o.layer, o.sub_batch) == (op.layer, op.sub_batch);
    if ops[at + n..].iter().filter(of_pass).any(|o| matches!(o.kind, Kind::Publish { .. })) { 1 } else { n }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Group, Iteration, Kv, Phase, Policy, RequestId, Side, Wants, lower, waits};

    fn of(placement: &Placement, decode: u32) -> (Vec<Op>, Vec<Segment>) {
        let group = |slot| Group {
            request: RequestId { slot, generation: 0 },
            phase: Phase::Decode,
            first: 40,
            tokens: 1,
            kv: Kv::Device,
            wants: Wants::Last,
        };
        let iteration = Iteration::serial((0..decode).map(group).collect(), true);
        let program = lower(placement, &iteration).unwrap();
        let waits = waits(&program);
        let mut awaited = vec![false; program.ops.len()];
        for (at, w) in waits.iter().enumerate() {
            w.iter().for_each(|&w| awaited[w] |= program.ops[w].unit != program.ops[at].unit);
        }
        let found = segments(&program, &waits, &awaited, placement, &[decode]);
        (program.ops, found)
    }

    #[test]
    fn a_program_all_on_the_device_is_one_segment_whatever_the_batch() {
        let placement = Placement::all(Side::Device, 5, 0);
        let (ops, one) = of(&placement, 1);
        assert_eq!((one.len(), one[0].ops.clone()), (1, 0..ops.len()));
        assert_eq!(one[0].shape, of(&placement, 7).1[0].shape);
        assert_ne!(one[0].shape, of(&Placement::all(Side::Device, 4, 0), 1).1[0].shape);
    }

    #[test]
    fn segments_end_where_the_other_side_waits() {
        // The host's blocks come first, then a transfer, then one segment to the end.
        let (ops, found) = of(&Placement::boundary(3, 5, 0, 0), 2);
        assert_eq!((found.len(), found[0].ops.end), (1, ops.len()));
        assert!(matches!(ops[found[0].ops.start - 1].kind, Kind::Carry { .. }));
        // With attention on the host there is one segment between two attentions: it begins with what waits for the host, and ends
        // with what the host waits for.
        let mut placement = Placement::all(Side::Device, 4, 0);
        for layer in &mut placement.layers {
            (layer.decode, layer.kv) = (Policy::ATTENTION_ON_HOST, Side::Host);
        }
        let (ops, found) = of(&placement, 2);
        let ends = |s: &Segment| (ops[s.ops.start].kind.name(), ops[s.ops.end - 1].kind.name());
        let between = ("collect", "publish");
        assert_eq!(
            found.iter().map(ends).collect::<Vec<_>>(),
            [between, between, between, ("collect", "pick")]
        );
        // Streamed layers have no segments.
        placement.layers.iter_mut().for_each(|l| l.weights = Residence::Streamed);
        assert!(of(&placement, 2).1.is_empty());
    }
}
