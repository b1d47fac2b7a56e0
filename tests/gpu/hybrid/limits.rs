//! What was not planned for, and what contradicts itself, is an error before anything is enqueued.

use super::bench::*;
use crate::support::gpu::memory::LANE;
use tandem::Error;
use tandem::device::{Attend, Limits, Mailbox, Publish, Published, RowOp, StepDesc, StepSeq};

/// Sequences of one row each.
fn singles(n: usize) -> Vec<StepSeq<'static>> {
    (0..n)
        .map(|row0| StepSeq { pages: &[1], first_pos: row0, row0, n_rows: 1, attend: Attend::Here })
        .collect()
}

#[track_caller]
fn capacity<T>(result: tandem::Result<T>, words: &str) {
    match result.err() {
        Some(Error::Capacity(m)) => assert!(m.contains(words), "{m}"),
        other => panic!("{words:?} wanted: {other:?}"),
    }
}

#[track_caller]
fn usage<T>(result: tandem::Result<T>, words: &str) {
    match result.err() {
        Some(Error::Usage(m)) => assert!(m.contains(words), "{m}"),
        other => panic!("{words:?} wanted: {other:?}"),
    }
}

#[test]
fn a_step_beyond_its_limits_is_refused() {
    each(|_, b| {
        assert_eq!(b.limits.sequences, 4);
        let (five, four) = (singles(5), singles(4));
        capacity(b.prepare(0, &b.desc(&five, &[0; 5])), "5 sequences, 4 were planned for");
        let long = [StepSeq { pages: &[1; 6], first_pos: 160, row0: 0, n_rows: 1, attend: Attend::Here }];
        capacity(b.prepare(0, &b.desc(&long, &[0])), "6 pages of a sequence, 4 were planned for");
        let many = [StepSeq { pages: &[1; 8], first_pos: 0, row0: 0, n_rows: 129, attend: Attend::Here }];
        capacity(b.prepare(0, &StepDesc { launch_rows: 129, ..b.desc(&many, &[0; 129]) }), "129 rows, 128");
        let behind = [StepSeq { row0: 1, ..four[0] }];
        usage(b.prepare(0, &b.desc(&behind, &[0])), "begins at row 1");
        b.prepare(0, &b.desc(&four, &[0; 4])).unwrap();
        b.rt.synchronize_all().unwrap();
    });
}

#[test]
fn operations_on_rows_that_are_not_there_are_refused() {
    each(|_, b| {
        let seqs = [
            StepSeq { pages: &[1, 4], first_pos: 0, row0: 0, n_rows: 3, attend: Attend::Here },
            StepSeq { pages: &[7], first_pos: 0, row0: 3, n_rows: 1, attend: Attend::Elsewhere },
        ];
        let desc = b.desc(&seqs, &[1, 2, 3, 4]);
        let step = b.prepare(0, &StepDesc { cuts: &[3], ..desc }).unwrap();
        let (a, cx) = (&b.accel, b.context(0, &step));
        a.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        usage(a.enqueue(&cx, RowOp::Embed(&b.embed), 2..5), "rows 2..5 of a step of 4");
        a.enqueue(&cx, b.qkv(None), cx.all()).unwrap();
        usage(a.enqueue(&cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, 0..2), "cut at rows [3]");
        usage(a.enqueue(&cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, 1..4), "cut at rows [3]");
        a.enqueue(&cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, 0..3).unwrap();
        let small = Mailbox { rows: 0, ..b.mailbox.clone() };
        let publish = Publish { mailbox: &small, epoch_add: 0, what: Published::Qkv };
        capacity(a.enqueue(&cx, RowOp::Publish(publish), cx.all()), "1 rows for a mailbox of 0");
        capacity(a.enqueue(&cx, RowOp::Collect(&small), cx.all()), "1 rows for a mailbox of 0");
        // Lists that lead to places which the workspace does not have.
        let limits = Limits { sequences: 3, ..b.limits };
        let other = a.prepare(LANE, &b.shape, &limits, &desc, b.subs[0].lists).unwrap();
        usage(a.enqueue(&b.context(0, &other), RowOp::OutProj(&b.layer), 0..4), "planned for");
        b.rt.synchronize_all().unwrap();
    });
}
