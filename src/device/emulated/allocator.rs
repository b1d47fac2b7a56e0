//! Allocates ranges of a reservation: first fit; neighbouring free ranges merge.

use std::collections::BTreeMap;

/// Alignment of every allocation, the same as CUDA's.
pub(super) const ALIGN: usize = 256;

/// Untouched bytes between two allocations: a kernel that writes past an end writes here.
pub(super) const GUARD: usize = 256;

/// Offsets within a reservation.
pub(super) struct Allocator {
    /// Free ranges: start to length. Never adjacent.
    free: BTreeMap<usize, usize>,
    /// Allocations, ascending: start and bytes asked for. Every operand of an operation is looked up here.
    live: Vec<(usize, usize)>,
    /// Bytes that all allocations together may take, and do take (rounded up to [`ALIGN`], without guards).
    capacity: usize,
    used: usize,
}

/// Why an allocation failed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The cap is reached.
    Full,
    /// Each free range is too small.
    Fragmented,
}

fn rounded(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(ALIGN)
}

impl Allocator {
    /// `reservation` bytes of address space, of which `capacity` can be in use.
    pub fn new(reservation: usize, capacity: usize) -> Allocator {
        Allocator { free: BTreeMap::from([(0, reservation)]), live: Vec::new(), capacity, used: 0 }
    }

    /// Bytes left under the cap.
    pub fn left(&self) -> usize {
        self.capacity - self.used
    }

    /// Allocates a range of `bytes`, followed by a guard.
    pub fn take(&mut self, bytes: usize) -> Result<usize, NoRoom> {
        let size = rounded(bytes).filter(|&s| s <= self.left()).ok_or(NoRoom::Full)?;
        let whole = size + GUARD;
        let (&start, &len) = self.free.iter().find(|&(_, &len)| len >= whole).ok_or(NoRoom::Fragmented)?;
        self.free.remove(&start);
        if len > whole {
            self.free.insert(start + whole, len - whole);
        }
        self.live.insert(self.behind(start), (start, bytes));
        self.used += size;
        Ok(start)
    }

    /// Frees the allocation that begins at `start`. Returns its bytes, or `None` if no allocation begins there.
    pub fn give_back(&mut self, start: usize) -> Option<usize> {
        let at = self.live.binary_search_by_key(&start, |live| live.0).ok()?;
        let (_, bytes) = self.live.remove(at);
        let size = rounded(bytes).expect("it was rounded when taken");
        self.used -= size;
        let (mut start, mut len) = (start, size + GUARD);
        if let Some(next) = self.free.remove(&(start + len)) {
            len += next;
        }
        if let Some((&before, &before_len)) = self.free.range(..start).next_back()
            && before + before_len == start
        {
            self.free.remove(&before);
            (start, len) = (before, before_len + len);
        }
        self.free.insert(start, len);
        Some(bytes)
    }

    /// The allocation that `at` lies in: its start and bytes.
    pub fn find(&self, at: usize) -> Option<(usize, usize)> {
        let (start, bytes) = self.live[..self.behind(at)].last().copied()?;
        (at < start + bytes).then_some((start, bytes))
    }

    /// All allocations: start and bytes.
    pub fn live(&self) -> impl Iterator<Item = (usize, usize)> {
        self.live.iter().copied()
    }

    /// The index after the last allocation that begins at or before `at`.
    fn behind(&self, at: usize) -> usize {
        self.live.partition_point(|live| live.0 <= at)
    }
}

/// The bytes from the end of an allocation of `bytes` to the next: padding and guard.
pub(super) fn slack(bytes: usize) -> usize {
    rounded(bytes).expect("it was rounded when taken") - bytes + GUARD
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_of_the_cap() {
        let mut a = Allocator::new(1 << 20, 1024);
        let first = a.take(1).unwrap();
        assert_eq!(a.left(), 768);
        assert_eq!(a.take(769), Err(NoRoom::Full));
        a.take(768).unwrap();
        assert_eq!((a.left(), a.take(1)), (0, Err(NoRoom::Full)));
        assert_eq!(a.give_back(first), Some(1));
        assert_eq!((a.give_back(first), a.left()), (None, 256));
        assert_eq!(a.take(usize::MAX), Err(NoRoom::Full), "rounding up does not overflow");
    }

    #[test]
    fn holes_are_reused_and_merge() {
        let mut a = Allocator::new(3 * 512, 1 << 20);
        let at: Vec<_> = (0..3).map(|_| a.take(256).unwrap()).collect();
        assert_eq!(a.take(256), Err(NoRoom::Fragmented));
        a.give_back(at[0]).unwrap();
        a.give_back(at[2]).unwrap();
        assert_eq!(a.take(1024), Err(NoRoom::Fragmented));
        a.give_back(at[1]).unwrap();
        assert_eq!(a.take(1280), Ok(0));
    }

    proptest! {
        /// Allocations never overlap or touch; freeing them all gives the whole reservation back.
        #[test]
        fn ranges_are_disjoint(steps in prop::collection::vec((1usize..3000, any::<bool>()), 1..80)) {
            let total = 64 << 10;
            let mut a = Allocator::new(total, total);
            let mut held: Vec<(usize, usize)> = Vec::new();
            for (size, free) in steps {
                if free && !held.is_empty() {
                    let (start, bytes) = held.swap_remove(size % held.len());
                    prop_assert_eq!(a.find(start + bytes - 1), Some((start, bytes)));
                    prop_assert_eq!(a.give_back(start), Some(bytes));
                    prop_assert_eq!(a.find(start), None);
                } else if let Ok(start) = a.take(size) {
                    prop_assert_eq!(start % ALIGN, 0);
                    for &(s, b) in &held {
                        prop_assert!(start + size + GUARD <= s || s + b + GUARD <= start);
                    }
                    prop_assert_eq!(a.find(start + size), None);
                    held.push((start, size));
                }
                let used: usize = held.iter().map(|(_, b)| b.next_multiple_of(ALIGN)).sum();
                prop_assert_eq!(a.left(), total - used);
            }
            for (start, _) in held {
                a.give_back(start).unwrap();
            }
            prop_assert_eq!(a.free, BTreeMap::from([(0, total)]));
        }
    }
}
