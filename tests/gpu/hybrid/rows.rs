//! Operations on rows of a step one by one, and sub-batches side by side: the bits are those of the whole.

use std::ops::Range;

use super::bench::*;
use crate::support::gpu::memory::{LANE, bytes};
use tandem::device::{
    Attend, Buffer, Lane, Mailbox, Published, Residual, RowOp, RowSpan, StepContext, StepDesc, StepSeq,
    TOP_BYTES, Workspace, top_error, top_of,
};

fn set_pages(b: &Bench, pages: &[u16]) {
    b.rt.upload(LANE, b.kv, bytes(pages)).unwrap();
    b.rt.synchronize_all().unwrap();
}

/// A step of both sequences' next tokens, B's first, through `enqueue`.
fn decode_by(b: &Bench, attend: Attend, cuts: &[usize], enqueue: impl Fn(&StepContext<'_>)) {
    let seqs = [Bench::one(B, 0, Attend::Here), Bench::one(A, 1, attend)];
    let step = b.prepare(0, &StepDesc { cuts, ..b.desc(&seqs, &[17, 71]) }).unwrap();
    let cx = b.context(0, &step);
    b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
    enqueue(&cx);
    b.rt.synchronize_all().unwrap();
}

#[test]
fn parts_give_the_bits_of_the_whole() {
    each(|name, b| {
        let before = b.pages();
        b.decode(Attend::Here, |_| ());
        let (want, pages) = ([b.attn(0), b.attn(1)], b.pages());
        set_pages(b, &before);
        decode_by(b, Attend::Here, &[1], |cx| {
            b.accel
                .enqueue(cx, RowOp::Project { layer: &b.layer, residual: Residual::None }, cx.all())
                .unwrap();
            for rows in [1..2, 0..1] {
                b.accel.enqueue(cx, RowOp::Append { kv: b.kv }, rows.clone()).unwrap();
                b.accel.enqueue(cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, rows).unwrap();
            }
        });
        assert!(b.pages() == pages, "{name}: pages");
        assert_eq!([b.attn(0), b.attn(1)], want, "{name}: attention");
        // The same when one call attends to all parts.
        decode_by(b, Attend::Here, &[1], |cx| {
            b.accel.enqueue(cx, b.qkv(None), cx.all()).unwrap();
            b.accel.enqueue(cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, cx.all()).unwrap();
        });
        assert_eq!([b.attn(0), b.attn(1)], want, "{name}: attention, all parts");
    });
}

#[test]
fn published_rows_are_those_of_the_call() {
    each(|name, b| {
        let rows: Vec<_> =
            (0..3).map(|i| Bench::one(if i == 1 { B } else { A }, i, Attend::Elsewhere)).collect();
        let step = b.prepare(0, &b.desc(&rows, &[17, 71, 5])).unwrap();
        let cx = b.context(0, &step);
        let width = b.shape.qkv_dim();
        b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        b.accel.enqueue(&cx, b.qkv(Some(b.publish(Published::Qkv, 1))), cx.all()).unwrap();
        b.rt.synchronize_all().unwrap();
        assert_eq!(b.epoch(), EPOCH + 1, "{name}");
        let whole = b.mailbox_halves(b.mailbox.row_at(&b.shape, 0), 3 * width);
        // In two calls, each with an epoch of its own; nothing else in the mailbox changes.
        // SAFETY: inside the mailbox, and no work is in flight.
        unsafe { b.mailbox.memory.host().add(Mailbox::HEADER).write_bytes(0x7f, 3 * 2 * width) };
        let nothing = b.mailbox_halves(b.mailbox.row_at(&b.shape, 0), 2 * width);
        b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        b.accel.enqueue(&cx, RowOp::Project { layer: &b.layer, residual: Residual::None }, cx.all()).unwrap();
        b.accel.enqueue(&cx, RowOp::Publish(b.publish(Published::Qkv, 2)), 2..3).unwrap();
        b.rt.synchronize_all().unwrap();
        assert_eq!(b.epoch(), EPOCH + 2, "{name}");
        let now = b.mailbox_halves(b.mailbox.row_at(&b.shape, 0), 3 * width);
        assert_eq!(
            bytes(&now[..2 * width]),
            bytes(&nothing),
            "{name}: places of rows that were not published"
        );
        b.accel.enqueue(&cx, RowOp::Publish(b.publish(Published::Qkv, 3)), 0..2).unwrap();
        b.rt.synchronize_all().unwrap();
        assert_eq!(b.epoch(), EPOCH + 3, "{name}");
        let now = b.mailbox_halves(b.mailbox.row_at(&b.shape, 0), 3 * width);
        assert_eq!(bytes(&now), bytes(&whole), "{name}");
    });
}

/// Attention over old pages on the host needs the query alone: the key and value go to the page here.
#[test]
fn queries_of_rows_attended_in_part_are_published() {
    each(|name, b| {
        b.decode(Attend::Here, |_| ());
        let (q, other, pages) = (b.q(1), b.attn(0), b.pages());
        let (qd, width) = (b.shape.q_dim(), b.shape.qkv_dim());
        // SAFETY: inside the mailbox, and no work is in flight.
        unsafe { b.mailbox.memory.host().add(Mailbox::HEADER).write_bytes(0x7f, 2 * width) };
        let split = Attend::From { from: 64 };
        let queries = b.publish(Published::Queries, 9);
        decode_by(b, split, &[], |cx| {
            b.accel.enqueue(cx, b.qkv(Some(queries)), cx.all()).unwrap();
            b.accel.enqueue(cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, cx.all()).unwrap();
        });
        assert_eq!(b.epoch(), EPOCH + 9, "{name}");
        let row = b.mailbox_halves(b.mailbox.row_at(&b.shape, 0), width);
        assert_eq!(row[..qd], q, "{name}: the query");
        assert!(row[qd..].iter().all(|&x| x == 0x7f7f), "{name}: keys and values stay here");
        assert!(b.pages() == pages, "{name}: the key and the value went to their page");
        assert_eq!(b.attn(0), other, "{name}: the other row's bits");
    });
}

#[test]
fn keys_made_on_the_host_are_appended() {
    each(|name, b| {
        let before = b.pages();
        b.decode(Attend::Here, |_| ());
        let (want, pages) = ([b.attn(0), b.attn(1)], b.pages());
        // What another device would project: q|k|v of both rows.
        let mut made = Vec::new();
        decode_by(b, Attend::Here, &[], |cx| {
            b.accel
                .enqueue(cx, RowOp::Project { layer: &b.layer, residual: Residual::None }, cx.all())
                .unwrap();
        });
        made.extend(b.span(b.ws.qkv_rows(&b.shape, &(0..2))));
        set_pages(b, &before);
        b.rt.fill(LANE, b.ws.qkv, 0xff, made.len()).unwrap();
        b.rt.fill(LANE, b.ws.q, 0xff, 4 * b.shape.q_dim()).unwrap();
        decode_by(b, Attend::Here, &[], |cx| {
            let to = b.ws.qkv_rows(&b.shape, &(0..2));
            assert_eq!(to.bytes, made.len());
            b.rt.upload(LANE, to.ptr, &made).unwrap();
            b.accel.enqueue(cx, RowOp::Append { kv: b.kv }, cx.all()).unwrap();
            b.accel.enqueue(cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, cx.all()).unwrap();
        });
        assert!(b.pages() == pages, "{name}: pages");
        assert_eq!([b.attn(0), b.attn(1)], want, "{name}: attention");
    });
}

/// Layer-wise swap: a prompt's keys and values go to a staging area, from which they leave for the host, while the rows
/// beside it append to the layer's pages.
#[test]
fn a_prompt_appends_to_a_staging_area() {
    each(|name, b| {
        let prompt: Vec<u32> = (0..40).map(|i| (i * 11 + 2) % 96).collect();
        let tokens = [&[17][..], &prompt].concat();
        let seqs = |pages: &'static [u32]| {
            let rows = StepSeq { pages, first_pos: 0, row0: 1, n_rows: 40, attend: Attend::Here };
            [Bench::one(B, 0, Attend::Here), rows]
        };
        let before = b.pages();
        b.run(&seqs(&[7, 4]), &tokens, |_| ());
        let (pages, page) = (b.pages(), b.page_shape().bytes() / 2);
        let want: Vec<_> = (0..41).map(|r| b.attn(r)).collect();
        set_pages(b, &before);
        let bytes = b.shape.page_bytes();
        let staging = Buffer::new(&b.rt, 2 * bytes).unwrap();
        b.rt.fill(LANE, staging.ptr(), 0, 2 * bytes).unwrap();
        let here = seqs(&[1, 0]);
        let step = b.prepare(0, &StepDesc { cuts: &[1], ..b.desc(&here, &tokens) }).unwrap();
        let (a, cx) = (&b.accel, b.context(0, &step));
        a.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        a.enqueue(&cx, RowOp::Project { layer: &b.layer, residual: Residual::None }, cx.all()).unwrap();
        for (rows, kv) in [(0..1, b.kv), (1..step.rows, staging.ptr())] {
            a.enqueue(&cx, RowOp::Append { kv }, rows.clone()).unwrap();
            a.enqueue(&cx, RowOp::Attend { layer: &b.layer, kv }, rows).unwrap();
        }
        b.rt.synchronize_all().unwrap();
        let got: Vec<_> = (0..41).map(|r| b.attn(r)).collect();
        assert_eq!(got, want, "{name}: attention");
        let staged = u16s(&b.download(staging.ptr(), 2 * bytes));
        for (from, to) in [(7usize, 1usize), (4, 0)] {
            let here = from * page..from * page + page;
            // Places of page 4 that no token fills are as they were, in both.
            let own: Vec<u16> = pages[here.clone()].to_vec();
            if from == 7 {
                assert!(staged[to * page..][..page] == own, "{name}: page {from}");
            }
            assert!(b.pages()[here.clone()] == before[here], "{name}: page {from} of the layer");
        }
        for head in 0..b.shape.n_kv_heads {
            for (value, token) in [(false, 0), (true, 0), (false, 7), (true, 7)] {
                let at = b.page_shape().at(head, value, token) / 2;
                let (there, own) = (&staged[at..at + b.shape.head_dim], &pages[4 * page + at..]);
                assert_eq!(there, &own[..b.shape.head_dim], "{name}: token {} staged", 32 + token);
            }
        }
        let first = B.0[1] as usize * page..(B.0[1] as usize + 1) * page;
        assert!(b.pages()[first.clone()] == pages[first], "{name}: the other row's page");
    });
}

/// What a whole layer and the head leave of a row.
type Row = (Vec<u16>, Vec<u8>, Vec<u8>, Vec<u8>);

fn layer(b: &Bench, cx: &StepContext<'_>, stage: usize) {
    let (a, all) = (&b.accel, cx.all());
    match stage {
        0 => a.enqueue(cx, RowOp::Embed(&b.embed), all),
        1 => a.enqueue(cx, b.qkv(None), all),
        2 => a.enqueue(cx, RowOp::Attend { layer: &b.layer, kv: b.kv }, all),
        3 => a.enqueue(cx, RowOp::OutProj(&b.layer), all),
        4 => a.enqueue(cx, RowOp::FfnUp { layer: &b.layer, residual: Residual::Delta }, all),
        5 => a.enqueue(cx, RowOp::FfnDown(&b.layer), all),
        6 => a.enqueue(cx, b.logits(Residual::Delta), all),
        _ => a.enqueue(cx, RowOp::Argmax, all),
    }
    .unwrap();
}

const STAGES: usize = 8;

fn outcome(b: &Bench, sub: usize) -> Row {
    let (ws, one) = (&b.subs[sub].ws, 0..1);
    (
        u16s(&b.span(ws.attn_rows(&b.shape, &one))),
        b.span(ws.delta_rows(&b.shape, &one)),
        b.span(ws.logit_rows(&b.shape, &one)),
        b.download(ws.argmax, 4),
    )
}

#[test]
fn sub_batches_side_by_side_are_as_if_alone() {
    each(|name, b| {
        let seqs = [[Bench::one(B, 0, Attend::Here)], [Bench::one(A, 0, Attend::Here)]];
        let tokens = [[17], [71]];
        let step = |sub: usize| {
            let desc = StepDesc { logit_rows: &[0], ..b.desc(&seqs[sub], &tokens[sub]) };
            b.prepare(sub, &desc).unwrap()
        };
        let alone = [0, 1].map(|sub| {
            let step = step(sub);
            (0..STAGES).for_each(|stage| layer(b, &b.context(sub, &step), stage));
            b.rt.synchronize_all().unwrap();
            outcome(b, sub)
        });
        let steps = [step(0), step(1)];
        for stage in 0..STAGES {
            for sub in [1, 0] {
                layer(b, &b.context(sub, &steps[sub]), stage);
            }
        }
        b.rt.synchronize_all().unwrap();
        for (sub, alone) in alone.iter().enumerate() {
            assert!(outcome(b, sub) == *alone, "{name}: sub-batch {sub}");
        }
        assert_ne!(alone[0].2, alone[1].2, "{name}: the sub-batches differ");
    });
}

#[test]
fn logits_of_some_rows_go_to_their_places() {
    each(|name, b| {
        let seqs = [Bench::one(B, 0, Attend::Here), Bench::one(A, 1, Attend::Here)];
        let tokens = [17, 71];
        let row = |ws: &Workspace, place: usize| {
            let logits = b.span(ws.logit_rows(&b.shape, &(place..place + 1)));
            (logits, b.download(ws.argmax.add(4 * place), 4))
        };
        // Each alone: straight from the embedding, which knows no neighbours.
        let want: Vec<_> = (0..2)
            .map(|i| {
                let one = [StepSeq { row0: 0, ..seqs[i] }];
                let desc = StepDesc { logit_rows: &[0], ..b.desc(&one, &tokens[i..=i]) };
                let step = b.prepare(0, &desc).unwrap();
                let cx = b.context(0, &step);
                b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
                b.accel.enqueue(&cx, b.logits(Residual::None), cx.all()).unwrap();
                b.accel.enqueue(&cx, RowOp::Argmax, cx.all()).unwrap();
                b.rt.synchronize_all().unwrap();
                row(&b.ws, 0)
            })
            .collect();
        let step = b.prepare(0, &StepDesc { logit_rows: &[0, 1], ..b.desc(&seqs, &tokens) }).unwrap();
        let cx = b.context(0, &step);
        b.rt.fill(LANE, b.ws.logits, 0xff, 2 * 4 * b.shape.vocab).unwrap();
        b.rt.fill(LANE, b.ws.argmax, 0xff, 8).unwrap();
        b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        for rows in [1..2, 0..1] {
            b.accel.enqueue(&cx, b.logits(Residual::None), rows.clone()).unwrap();
            b.accel.enqueue(&cx, RowOp::Argmax, rows.clone()).unwrap();
            b.rt.synchronize_all().unwrap();
            assert!(row(&b.ws, rows.start) == want[rows.start], "{name}: row {}", rows.start);
            if rows.start == 1 {
                assert_eq!(row(&b.ws, 0).1, [0xff; 4], "{name}: the other place is untouched");
            }
        }
        assert_ne!(want[0].0, want[1].0, "{name}");
    });
}

/// What sampling needs of rows, after their logits: all tokens of a small vocabulary, likeliest first, and their weight.
#[test]
fn the_likeliest_tokens_of_rows_come_in_order() {
    each(|name, b| {
        let seqs = [Bench::one(B, 0, Attend::Here), Bench::one(A, 1, Attend::Here)];
        let step = b.prepare(0, &StepDesc { logit_rows: &[0, 1], ..b.desc(&seqs, &[17, 71]) }).unwrap();
        let (cx, vocab, factors) = (b.context(0, &step), b.shape.vocab, [1.0, 0.5]);
        b.accel.enqueue(&cx, RowOp::Embed(&b.embed), cx.all()).unwrap();
        b.accel.enqueue(&cx, b.logits(Residual::None), cx.all()).unwrap();
        b.accel.top(cx.lane, &b.shape, &b.ws, &factors).unwrap();
        b.rt.synchronize_all().unwrap();
        let tops = b.span(b.ws.top_rows(2));
        for (row, factor) in factors.into_iter().enumerate() {
            let bytes = b.span(b.ws.logit_rows(&b.shape, &(row..row + 1)));
            let logits: Vec<f32> =
                bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
            let mut want: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
            want.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let (got, sum) = top_of(&tops[row * TOP_BYTES..][..TOP_BYTES], vocab);
            assert_eq!(got, want, "{name}: row {row}");
            let exact: f64 = logits.iter().map(|x| (f64::from(x - want[0].0) * factor as f64).exp()).sum();
            assert!(
                (f64::from(sum) / exact - 1.0).abs() <= top_error(vocab),
                "{name}: row {row}: {sum}, {exact}"
            );
        }
    });
}

/// Rows of the residual stream leave one sub-batch, cross to the host and back, and go on in another.
#[test]
fn hidden_rows_cross_the_link() {
    each(|name, b| {
        let seqs = [Bench::one(B, 0, Attend::Here), Bench::one(A, 1, Attend::Here)];
        let steps = [0, 1].map(|sub| b.prepare(sub, &b.desc(&seqs, &[17, 71])).unwrap());
        let (cx, other) = (b.context(0, &steps[0]), b.context(1, &steps[1]));
        let rows: Range<usize> = 0..2;
        let floats = |span: RowSpan| f32s(&b.span(span));
        let halfway = || {
            (0..4).for_each(|stage| layer(b, &cx, stage));
            b.rt.synchronize_all().unwrap();
        };
        halfway();
        let (hidden, delta) =
            (floats(b.ws.hidden_rows(&b.shape, &rows)), floats(b.ws.delta_rows(&b.shape, &rows)));
        (4..6).for_each(|stage| layer(b, &cx, stage));
        b.rt.synchronize_all().unwrap();
        let want = floats(b.ws.delta_rows(&b.shape, &rows));
        halfway();
        b.accel.enqueue(&cx, RowOp::Fold(Residual::Delta), rows.clone()).unwrap();
        let folded = b.rt.record(LANE).unwrap();
        let (from, to) = (b.ws.hidden_rows(&b.shape, &rows), b.subs[1].ws.hidden_rows(&b.shape, &rows));
        let host = b.rt.pinned(from.bytes).unwrap();
        b.rt.wait(Lane::DeviceToHost, &folded).unwrap();
        b.rt.download_pinned(Lane::DeviceToHost, from.ptr, &host, 0, from.bytes).unwrap();
        let there = b.rt.record(Lane::DeviceToHost).unwrap();
        b.rt.wait(Lane::HostToDevice, &there).unwrap();
        b.rt.upload_pinned(Lane::HostToDevice, to.ptr, &host, 0..to.bytes).unwrap();
        let back = b.rt.record(Lane::HostToDevice).unwrap();
        b.rt.wait(LANE, &back).unwrap();
        b.accel
            .enqueue(&other, RowOp::FfnUp { layer: &b.layer, residual: Residual::None }, rows.clone())
            .unwrap();
        b.accel.enqueue(&other, RowOp::FfnDown(&b.layer), rows.clone()).unwrap();
        b.rt.synchronize_all().unwrap();
        // SAFETY: all of the pinned memory, and all work is done.
        let crossed = f32s(unsafe { std::slice::from_raw_parts(host.host(), host.len()) });
        let sums: Vec<f32> = hidden.iter().zip(&delta).map(|(h, d)| h + d).collect();
        assert_eq!(bytes(&crossed), bytes(&sums), "{name}: what crossed is whole");
        let got = floats(b.subs[1].ws.delta_rows(&b.shape, &rows));
        assert_eq!(bytes(&got), bytes(&want), "{name}: the other sub-batch goes on with the same bits");
    });
}
