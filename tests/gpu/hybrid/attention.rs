//! Attention in parts and elsewhere.

use super::bench::*;
use crate::support::gpu::Rng;
use crate::support::gpu::memory::{LANE, bytes, encode};
use tandem::device::{Attend, Buffer, PartialRows, RowOp, StepContext, StepSeq, Workspace};

#[test]
fn attention_in_two_parts_is_attention() {
    each(|name, b| {
        b.decode(Attend::Here, |_| ());
        let (whole, other) = (b.attn(1), b.attn(0));
        let (pages, q) = (b.pages(), b.q(1));
        let want = b.expected(&pages, &q);
        b.assert_attention(name, &whole, &want);
        for from in [32, 64] {
            // The part before `from`, as another device would give it.
            let first = b.shape.window.map_or(0, |w| A.1 + 1 - w);
            let (mut m, mut s, mut o) = (vec![], vec![], vec![]);
            for head in 0..b.shape.n_heads {
                let part = b.attend(&pages, &q, head, first.min(from)..from);
                m.push(part.m as f32);
                s.push(part.s as f32);
                o.extend(part.o.iter().map(|&x| x as f32));
            }
            let [m, s, o] = [m, s, o].map(|x| Buffer::from_bytes(&b.rt, LANE, bytes(&x)).unwrap());
            let there = PartialRows { m: m.ptr(), s: s.ptr(), o: o.ptr() };
            b.decode(Attend::From { from }, |cx| {
                b.accel.enqueue(cx, RowOp::Merge { layer: &b.layer, other: &there }, cx.all()).unwrap()
            });
            b.assert_attention(&format!("{name}, from {from}"), &b.attn(1), &want);
            assert_eq!(b.attn(0), other, "{name}: the other row's bits");
        }
    });
}

#[test]
fn rows_attended_elsewhere_are_published_and_collected() {
    each(|name, b| {
        b.decode(Attend::Here, |_| ());
        let (other, pages, q) = (b.attn(0), b.pages(), b.q(1));
        assert_eq!(b.epoch(), 0, "{name}: nothing was published");
        b.decode(Attend::Elsewhere, |_| ());
        assert_eq!(b.epoch(), EPOCH + 3, "{name}");
        // What was published are the bits that stay here otherwise.
        let (qd, kvd, hd) = (b.shape.q_dim(), b.shape.kv_dim(), b.shape.head_dim);
        let row = b.mailbox_halves(b.mailbox.row_at(&b.shape, 0), b.shape.qkv_dim());
        assert_eq!(row[..qd], q, "{name}: q");
        let page = b.page_shape();
        for (value, x) in [(false, &row[qd..qd + kvd]), (true, &row[qd + kvd..])] {
            for (head, x) in x.chunks_exact(hd).enumerate() {
                let at = (A.0[A.1 / PAGE] as usize * page.bytes() + page.at(head, value, A.1 % PAGE)) / 2;
                assert_eq!(x, &pages[at..at + hd], "{name}: head {head}, values {value}");
            }
        }
        assert_eq!(b.attn(0), other, "{name}: the other row's bits");
        // The other way: any o comes back as it is.
        let mut rng = Rng::new(5);
        let o: Vec<u16> = (0..qd).map(|_| encode(b.shape.act, rng.normal())).collect();
        for (i, x) in o.iter().enumerate() {
            // SAFETY: inside the mailbox, and no work is in flight.
            unsafe {
                b.mailbox.memory.host().add(b.mailbox.out_at(&b.shape, 0)).cast::<u16>().add(i).write(*x)
            };
        }
        b.decode(Attend::Elsewhere, |cx| b.accel.enqueue(cx, RowOp::Collect(&b.mailbox), cx.all()).unwrap());
        assert_eq!(b.attn(1), o, "{name}");
        assert_eq!(b.attn(0), other, "{name}: the other row's bits");
    });
}

/// The tokens before a boundary from a copy of their pages in a staging area, the rest from the layer's own: both parts made
/// here, then merged.
#[test]
fn old_pages_in_a_staging_area_are_attended_here() {
    each(|name, b| {
        b.decode(Attend::Here, |_| ());
        let (other, pages, q) = (b.attn(0), b.pages(), b.q(1));
        let want = b.expected(&pages, &q);
        let bytes = b.shape.page_bytes();
        let staging = Buffer::new(&b.rt, PAGES * bytes).unwrap();
        let far = b.subs[1].ws.partial;
        for to in [0, 32, 64] {
            // Whatever is not listed may be anything.
            b.rt.fill(LANE, staging.ptr(), 0xff, staging.len()).unwrap();
            let staged = [6u32, 1];
            for (at, from) in staged.iter().zip(&A.0[..to / PAGE]) {
                let page = b.download(b.kv.add(*from as usize * bytes), bytes);
                b.rt.upload(LANE, staging.ptr().add(*at as usize * bytes), &page).unwrap();
            }
            b.decode(Attend::From { from: to }, |cx| {
                // The other row is partial in neither step.
                let old = StepSeq {
                    pages: &staged[..to / PAGE],
                    first_pos: A.1,
                    row0: 1,
                    n_rows: 1,
                    attend: Attend::UpTo { to },
                };
                let seqs = [Bench::one(B, 0, Attend::Elsewhere), old];
                let step = b.prepare(1, &b.desc(&seqs, &[17, 71])).unwrap();
                let ws = Workspace { partial: far, ..*cx.ws };
                let upto = StepContext { step: &step, ws: &ws, ..*cx };
                b.accel
                    .enqueue(&upto, RowOp::Attend { layer: &b.layer, kv: staging.ptr() }, upto.all())
                    .unwrap();
                b.accel.enqueue(cx, RowOp::Merge { layer: &b.layer, other: &far }, cx.all()).unwrap();
            });
            b.assert_attention(&format!("{name}, up to {to}"), &b.attn(1), &want);
            assert_eq!(b.attn(0), other, "{name}: the other row's bits");
            assert!(b.pages() == pages, "{name}: the pages");
        }
    });
}
