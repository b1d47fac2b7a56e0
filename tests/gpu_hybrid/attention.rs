//! Attention in parts and elsewhere.

use super::bench::*;
use super::support::gpu::Rng;
use super::support::gpu::memory::{LANE, bytes, encode};
use tandem::device::accelerator::*;
use tandem::device::runtime::Buffer;

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
            b.decode(Attend::From { from }, |cx| b.accel.merge(cx, &there, cx.all()).unwrap());
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
        // What was published are the values that are rounded when they stay here.
        let (qd, kvd, hd) = (b.shape.q_dim(), b.shape.kv_dim(), b.shape.head_dim);
        let row = b.mailbox_floats(b.mailbox.row_at(&b.shape, 0), b.shape.qkv_dim());
        let row: Vec<u16> = row.iter().map(|&x| encode(b.shape.kv, x)).collect();
        assert_eq!(row[..qd], q, "{name}: q");
        let page = b.page_shape();
        for (value, x) in [(false, &row[qd..qd + kvd]), (true, &row[qd + kvd..])] {
            for (head, x) in x.chunks_exact(hd).enumerate() {
                let at = A.0[A.1 / PAGE] as usize * page.len() + page.at(head, value, A.1 % PAGE);
                assert_eq!(x, &pages[at..at + hd], "{name}: head {head}, values {value}");
            }
        }
        assert_eq!(b.attn(0), other, "{name}: the other row's bits");
        // The other way: any o comes back, rounded.
        let mut rng = Rng::new(5);
        let o: Vec<f32> = (0..qd).map(|_| rng.normal()).collect();
        for (i, x) in o.iter().enumerate() {
            // SAFETY: inside the mailbox, and no work is in flight.
            unsafe {
                b.mailbox.memory.host().add(b.mailbox.out_at(&b.shape, 0)).cast::<f32>().add(i).write(*x)
            };
        }
        b.decode(Attend::Elsewhere, |cx| b.accel.collect(cx, &b.mailbox, cx.all()).unwrap());
        let want: Vec<u16> = o.iter().map(|&x| encode(b.shape.act, x)).collect();
        assert_eq!(b.attn(1), want, "{name}");
        assert_eq!(b.attn(0), other, "{name}: the other row's bits");
    });
}
