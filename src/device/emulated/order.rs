//! Checks that work of different lanes on the same bytes is ordered.
//!
//! Every lane has a vector clock. It holds, for each lane, the number of the last operation that precedes everything
//! enqueued on this lane from now on. Waiting for an event joins the event's clock; work that the host has seen done
//! joins all clocks. For each range of bytes we keep the last writer and the readers since. Work that touches bytes of
//! another lane's work that its clock does not cover is a race, whether or not the timing of this run would have shown
//! it. Work on bytes that the host is still using in place is a race, too.
//!
//! refs   Lamport 1978; Mattern 1989 (vector clocks); FastTrack (Flanagan & Freund 2009)

use std::ops::Range;

use super::op::Span;
use crate::device::runtime::Lane;

const LANES: usize = Lane::ALL.len();

/// For each lane, the number of an operation, which stands for it and all earlier ones.
pub(super) type LaneClock = [u64; LANES];

fn join(into: &mut LaneClock, other: &LaneClock) {
    into.iter_mut().zip(other).for_each(|(a, &b)| *a = b.max(*a));
}

/// The last writer and readers of a range; 0 means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Touched {
    /// Lane and number of the last write.
    written: (usize, u64),
    read: [u64; LANES],
}

/// A race: the other lane (or the host), and whether the other side wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Race {
    /// The other lane; `None` is the host, which uses the bytes in place.
    pub with: Option<Lane>,
    pub wrote: bool,
    pub at: u64,
}

/// Bytes that were touched together.
#[derive(Debug, Clone, Copy)]
struct Piece {
    start: u64,
    /// One past the last.
    end: u64,
    by: Touched,
}

/// Bytes that the host uses in place until it reports the end of the use.
struct InUse {
    id: u64,
    reads: Vec<Span>,
    writes: Vec<Span>,
}

/// The clocks, and who touched which bytes.
#[derive(Default)]
pub(super) struct Order {
    lanes: [LaneClock; LANES],
    host: LaneClock,
    /// The last work of each lane that touched something.
    entered: LaneClock,
    /// Disjoint pieces by address. Most spans repeat those of earlier work: they are found by binary search and changed
    /// in place.
    bytes: Vec<Piece>,
    /// Scratch: the pieces that replace some of `bytes`.
    pieces: Vec<Piece>,
    /// Scratch: where the spans of the current work were found.
    places: Vec<usize>,
    /// In-place uses by the host, few at a time.
    in_use: Vec<InUse>,
    uses: u64,
}

impl Order {
    /// The clock of everything that precedes the next work enqueued on `lane`.
    fn before(&self, lane: Lane) -> LaneClock {
        let mut clock = self.lanes[lane as usize];
        join(&mut clock, &self.host);
        clock
    }

    /// Enters operation `seq` of `lane`. Changes nothing if there is a race.
    pub fn enter(&mut self, lane: Lane, seq: u64, reads: &[Span], writes: &[Span]) -> Result<(), Race> {
        let mut clock = self.before(lane);
        let me = lane as usize;
        let mut places = std::mem::take(&mut self.places);
        places.clear();
        for (spans, write) in [(reads, false), (writes, true)] {
            for span in spans.iter().filter(|s| s.len > 0) {
                places.push(self.check(&clock, me, span, write)?);
                self.check_host(span, write)?;
            }
        }
        let mut at = places.iter().copied();
        let mut guess = || at.next().unwrap_or_default();
        reads.iter().filter(|s| s.len > 0).for_each(|span| self.read(me, seq, span, guess()));
        let written = Touched { written: (me, seq), read: [0; LANES] };
        writes.iter().filter(|s| s.len > 0).for_each(|span| self.put(span, Some(written), guess()));
        self.places = places;
        clock[me] = seq;
        self.lanes[me] = clock;
        self.entered[me] = seq;
        Ok(())
    }

    /// The clock of a mark with number `seq` after everything enqueued on `lane`.
    pub fn mark(&mut self, lane: Lane, seq: u64) -> LaneClock {
        let mut clock = self.before(lane);
        clock[lane as usize] = seq;
        self.lanes[lane as usize] = clock;
        clock
    }

    /// Orders later work of `lane` after `clock`.
    pub fn wait(&mut self, lane: Lane, clock: &LaneClock) {
        join(&mut self.lanes[lane as usize], clock);
    }

    /// Records that the host has seen everything up to `clock` done.
    pub fn seen(&mut self, clock: &LaneClock) {
        join(&mut self.host, clock);
        // All later work is ordered after all earlier work, so there is nothing left to track.
        if self.host.iter().zip(&self.entered).all(|(seen, last)| seen >= last) {
            self.bytes.clear();
        }
    }

    /// Checks an access of the host to bytes: it must have seen all conflicting work of the lanes done.
    pub fn host(&self, reads: &[Span], writes: &[Span]) -> Result<(), Race> {
        for (spans, write) in [(reads, false), (writes, true)] {
            for span in spans.iter().filter(|s| s.len > 0) {
                // The host is checked as a lane of its own, none of whose work is among the touched pieces.
                self.check(&self.host, LANES, span, write)?;
            }
        }
        Ok(())
    }

    /// Begins an in-place use by the host, which ends when [`Order::used`] is called with the returned number.
    /// Meanwhile no lane accepts conflicting work.
    pub fn uses(&mut self, reads: Vec<Span>, writes: Vec<Span>) -> u64 {
        self.uses += 1;
        self.in_use.push(InUse { id: self.uses, reads, writes });
        self.uses
    }

    /// Ends an in-place use by the host.
    pub fn used(&mut self, id: u64) {
        self.in_use.retain(|u| u.id != id);
    }

    fn check_host(&self, span: &Span, write: bool) -> Result<(), Race> {
        for used in &self.in_use {
            let written = used.writes.iter().find(|s| s.overlaps(span)).map(|s| (s, true));
            let read = used.reads.iter().find(|s| write && s.overlaps(span)).map(|s| (s, false));
            if let Some((s, wrote)) = written.or(read) {
                return Err(Race { with: None, wrote, at: s.ptr.0.max(span.ptr.0) });
            }
        }
        Ok(())
    }

    /// Forgets all accesses to these bytes (they were just allocated).
    pub fn forget(&mut self, span: &Span) {
        if span.len > 0 {
            self.put(span, None, usize::MAX);
        }
    }

    /// The indices of the pieces that overlap a span.
    fn over(&self, span: &Span) -> Range<usize> {
        let first = self.bytes.partition_point(|p| p.end <= span.ptr.0);
        let more = self.bytes[first..].iter().take_while(|p| p.start < span.end()).count();
        first..first + more
    }

    /// Checks an access to a span. Returns the index of the first piece that overlaps it.
    fn check(&self, clock: &LaneClock, me: usize, span: &Span, write: bool) -> Result<usize, Race> {
        let over = self.over(span);
        for piece in &self.bytes[over.clone()] {
            let at = piece.start.max(span.ptr.0);
            let (writer, seq) = piece.by.written;
            if writer != me && seq > clock[writer] {
                return Err(Race { with: Some(Lane::ALL[writer]), wrote: true, at });
            }
            let reader = (0..LANES).find(|&l| l != me && piece.by.read[l] > clock[l]);
            if let (true, Some(reader)) = (write, reader) {
                return Err(Race { with: Some(Lane::ALL[reader]), wrote: false, at });
            }
        }
        Ok(over.start)
    }

    /// The piece at `at`, if it is exactly this span.
    fn whole(&mut self, span: &Span, at: usize) -> Option<&mut Touched> {
        let piece = self.bytes.get_mut(at)?;
        ((piece.start, piece.end) == (span.ptr.0, span.end())).then_some(&mut piece.by)
    }

    /// Enters a read; the span may be found at index `place`.
    fn read(&mut self, me: usize, seq: u64, span: &Span, place: usize) {
        if let Some(by) = self.whole(span, place) {
            by.read[me] = seq;
            return;
        }
        let (start, end, over) = (span.ptr.0, span.end(), self.over(span));
        let with = |mut by: Touched| {
            by.read[me] = seq;
            by
        };
        let nobody = with(Touched::default());
        let mut pieces = std::mem::take(&mut self.pieces);
        let mut at = start;
        for p in &self.bytes[over.clone()] {
            if p.start < start {
                pieces.push(Piece { end: start, ..*p });
            }
            if at < p.start {
                pieces.push(Piece { start: at, end: p.start, by: nobody });
            }
            at = p.end.min(end);
            pieces.push(Piece { start: p.start.max(start), end: at, by: with(p.by) });
            if p.end > end {
                pieces.push(Piece { start: end, ..*p });
            }
        }
        if at < end {
            pieces.push(Piece { start: at, end, by: nobody });
        }
        self.replace(over, pieces);
    }

    /// Sets the accesses of all bytes of a span, or clears them with `None`.
    fn put(&mut self, span: &Span, by: Option<Touched>, place: usize) {
        if let (Some(by), Some(before)) = (by, self.whole(span, place)) {
            *before = by;
            return;
        }
        let (start, end, over) = (span.ptr.0, span.end(), self.over(span));
        let mut pieces = std::mem::take(&mut self.pieces);
        let (first, last) = (self.bytes[over.clone()].first(), self.bytes[over.clone()].last());
        pieces.extend(first.filter(|p| p.start < start).map(|p| Piece { end: start, ..*p }));
        pieces.extend(by.map(|by| Piece { start, end, by }));
        pieces.extend(last.filter(|p| p.end > end).map(|p| Piece { start: end, ..*p }));
        self.replace(over, pieces);
    }

    fn replace(&mut self, over: Range<usize>, mut pieces: Vec<Piece>) {
        self.bytes.splice(over, pieces.drain(..));
        self.pieces = pieces;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::runtime::DevPtr;
    use Lane::{Compute, DeviceToHost, HostToDevice};

    fn span(at: u64, len: usize) -> Span {
        Span { ptr: DevPtr(at), len }
    }

    #[test]
    fn lanes_that_share_bytes_need_an_event() {
        let mut o = Order::default();
        o.enter(HostToDevice, 1, &[], &[span(100, 50)]).unwrap();
        let race = Race { with: Some(HostToDevice), wrote: true, at: 149 };
        assert_eq!(o.enter(Compute, 1, &[span(149, 10)], &[]), Err(race));
        o.enter(Compute, 1, &[span(150, 10)], &[span(90, 10)]).unwrap();
        let event = o.mark(HostToDevice, 2);
        o.wait(Compute, &event);
        o.enter(Compute, 2, &[span(100, 50)], &[]).unwrap();
        // The next upload must not overtake the reader.
        let race = Race { with: Some(Compute), wrote: false, at: 100 };
        assert_eq!(o.enter(HostToDevice, 3, &[], &[span(100, 1)]), Err(race));
        let event = o.mark(Compute, 3);
        o.seen(&event);
        o.enter(HostToDevice, 3, &[], &[span(100, 1)]).unwrap();
    }

    #[test]
    fn the_host_waits_for_what_it_touches() {
        let mut o = Order::default();
        o.enter(DeviceToHost, 1, &[span(0, 8)], &[span(100, 8)]).unwrap();
        let race = Race { with: Some(DeviceToHost), wrote: true, at: 104 };
        assert_eq!(o.host(&[span(104, 8)], &[]), Err(race));
        // Concurrent reads are allowed.
        o.host(&[span(0, 8)], &[]).unwrap();
        assert!(o.host(&[], &[span(0, 8)]).is_err());
        let event = o.mark(DeviceToHost, 2);
        o.seen(&event);
        o.host(&[], &[span(0, 8), span(100, 8)]).unwrap();
    }

    #[test]
    fn lanes_wait_for_what_the_host_uses() {
        let mut o = Order::default();
        let reading = o.uses(vec![span(0, 8)], vec![]);
        let writing = o.uses(vec![], vec![span(100, 8)]);
        // Concurrent reads are allowed; everything else is refused.
        o.enter(Compute, 1, &[span(0, 8)], &[span(8, 8)]).unwrap();
        let race = Race { with: None, wrote: false, at: 7 };
        assert_eq!(o.enter(Compute, 2, &[], &[span(7, 4)]), Err(race));
        let race = Race { with: None, wrote: true, at: 104 };
        assert_eq!(o.enter(DeviceToHost, 1, &[span(104, 8)], &[]), Err(race));
        o.used(writing);
        o.enter(DeviceToHost, 1, &[span(104, 8)], &[]).unwrap();
        assert!(o.enter(Compute, 2, &[], &[span(0, 1)]).is_err(), "the other use goes on");
        o.used(reading);
        o.enter(Compute, 2, &[], &[span(0, 1)]).unwrap();
    }

    #[test]
    fn order_is_transitive() {
        let mut o = Order::default();
        o.enter(HostToDevice, 1, &[], &[span(0, 8)]).unwrap();
        let event = o.mark(HostToDevice, 2);
        o.wait(Compute, &event);
        let event = o.mark(Compute, 1);
        o.wait(DeviceToHost, &event);
        o.enter(DeviceToHost, 1, &[span(0, 8)], &[]).unwrap();
    }

    #[test]
    fn what_is_allocated_again_has_no_past() {
        let mut o = Order::default();
        o.enter(Compute, 1, &[], &[span(0, 8)]).unwrap();
        o.forget(&span(0, 8));
        o.enter(DeviceToHost, 1, &[], &[span(0, 8)]).unwrap();
    }

    /// Compared with a model that keeps one entry per byte.
    #[test]
    fn ranges_agree_with_bytes() {
        let mut o = Order::default();
        let mut naive = [Touched::default(); 64];
        let mut seq = [0u64; 3];
        let mut state = 7u64;
        let mut random = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let mut races = 0;
        for _ in 0..4000 {
            let lane = Lane::ALL[random(3) as usize];
            let (at, write) = (random(60), random(2) == 0);
            let s = span(at, 1 + random(64 - at) as usize);
            if random(4) == 0 {
                let from = Lane::ALL[random(3) as usize];
                seq[from as usize] += 1;
                let mark = o.mark(from, seq[from as usize]);
                o.wait(lane, &mark);
            }
            let clock = o.before(lane);
            let me = lane as usize;
            let bytes = &mut naive[at as usize..s.end() as usize];
            let race = bytes.iter().any(|t| {
                let written = t.written.0 != me && t.written.1 > clock[t.written.0];
                written || write && (0..3).any(|l| l != me && t.read[l] > clock[l])
            });
            seq[me] += 1;
            let (r, w): (&[Span], &[Span]) = if write { (&[], &[s]) } else { (&[s], &[]) };
            assert_eq!(o.enter(lane, seq[me], r, w).is_err(), race);
            races += race as u32;
            if race {
                seq[me] -= 1;
                continue;
            }
            for t in bytes {
                match write {
                    true => *t = Touched { written: (me, seq[me]), read: [0; 3] },
                    false => t.read[me] = seq[me],
                }
            }
        }
        assert!((400..3600).contains(&races), "{races} races: both outcomes were seen");
    }
}
