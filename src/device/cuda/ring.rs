//! Tracks the free part of a ring buffer whose parts are given back in the order they were taken.

use std::collections::VecDeque;

/// A ring of `capacity` bytes. Positions count all bytes since the beginning; modulo the capacity they are offsets.
pub(super) struct Ring<T> {
    capacity: u64,
    /// Where the next part may begin.
    head: u64,
    /// Parts in use, oldest first: where each begins, and a token that says when it is free again.
    used: VecDeque<(u64, T)>,
}

impl<T> Ring<T> {
    pub fn new(capacity: usize) -> Ring<T> {
        Ring { capacity: capacity as u64, head: 0, used: VecDeque::new() }
    }

    /// Finds `len` contiguous free bytes and returns their offset. Parts in the way are passed to `wait`, oldest first.
    /// The bytes stay free until [`Ring::take`] marks them as used.
    pub fn place<E>(&mut self, len: usize, mut wait: impl FnMut(T) -> Result<(), E>) -> Result<usize, E> {
        let begin = self.begin(len);
        while let Some((oldest, done)) = self.used.pop_front() {
            if begin + len as u64 <= oldest + self.capacity {
                self.used.push_front((oldest, done));
                break;
            }
            wait(done)?;
        }
        Ok((begin % self.capacity) as usize)
    }

    /// Forgets parts that are free again, oldest first, as far as `done` says so, at most so many.
    pub fn forget<E>(&mut self, most: usize, mut done: impl FnMut(&T) -> Result<bool, E>) -> Result<(), E> {
        for _ in 0..most {
            match self.used.front() {
                Some((_, oldest)) if done(oldest)? => drop(self.used.pop_front()),
                _ => break,
            }
        }
        Ok(())
    }

    /// Marks the bytes placed last as in use until `until`.
    pub fn take(&mut self, len: usize, until: T) {
        let begin = self.begin(len);
        self.head = begin + len as u64;
        self.used.push_back((begin, until));
    }

    /// Where the next part of `len` bytes begins. A part does not wrap around: it skips the end of the ring if too
    /// short.
    fn begin(&self, len: usize) -> u64 {
        let len = len as u64;
        assert!(len <= self.capacity, "{len} bytes in a ring of {}", self.capacity);
        let offset = self.head % self.capacity;
        if offset + len > self.capacity { self.head + self.capacity - offset } else { self.head }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn waits_for_what_is_in_the_way_only() {
        let mut ring = Ring::new(10);
        let place = |ring: &mut Ring<usize>, len, name| {
            let mut waited = Vec::new();
            let at = ring
                .place(len, |t| {
                    waited.push(t);
                    Ok::<_, Infallible>(())
                })
                .unwrap();
            ring.take(len, name);
            (at, waited)
        };
        assert_eq!(place(&mut ring, 4, 0), (0, vec![]));
        assert_eq!(place(&mut ring, 4, 1), (4, vec![]));
        assert_eq!(place(&mut ring, 4, 2), (0, vec![0]), "the last two bytes are skipped");
        assert_eq!(place(&mut ring, 1, 3), (4, vec![1]));
        assert_eq!(place(&mut ring, 10, 4), (0, vec![2, 3]));
    }

    #[test]
    fn parts_that_are_free_again_are_forgotten_in_order() {
        let mut ring = Ring::new(100);
        for part in 0..8 {
            ring.place(10, |_| Ok::<_, Infallible>(())).unwrap();
            ring.take(10, part);
        }
        let forget = |ring: &mut Ring<usize>, most, done: &[usize]| {
            ring.forget(most, |part| Ok::<_, Infallible>(done.contains(part))).unwrap();
            ring.used.iter().map(|(_, part)| *part).collect::<Vec<_>>()
        };
        assert_eq!(forget(&mut ring, 2, &[0, 1, 2, 5]), [2, 3, 4, 5, 6, 7]);
        assert_eq!(forget(&mut ring, 9, &[2, 5]), [3, 4, 5, 6, 7], "not one behind a part in use");
        assert_eq!(forget(&mut ring, 9, &[]).len(), 5);
    }

    proptest! {
        /// Parts that are still in use never overlap.
        #[test]
        fn parts_in_use_are_disjoint(sizes in prop::collection::vec(0usize..=64, 1..200)) {
            let mut ring = Ring::new(64);
            let mut live: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
            for (id, len) in sizes.into_iter().enumerate() {
                let at = ring.place(len, |t| { live.remove(&t); Ok::<_, Infallible>(()) }).unwrap();
                ring.take(len, id);
                prop_assert!(at + len <= 64);
                for &(a, l) in live.values() {
                    prop_assert!(at + len <= a || a + l <= at, "{at}+{len} and {a}+{l}");
                }
                live.insert(id, (at, len));
            }
        }
    }
}
