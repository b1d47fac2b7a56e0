//! Slots that are given out again and again: an id names the slot and how often it has been given out, so that an id kept
//! too long names nothing instead of whoever came after.

use crate::program::RequestId;

/// Values by [`RequestId`]. Insertion, look-up and removal take constant time.
#[derive(Debug, Clone)]
pub struct SlotMap<T> {
    /// By slot: how often it has been given out before.
    generations: Vec<u32>,
    /// By slot: what is there.
    values: Vec<Option<T>>,
    /// Slots that hold nothing.
    free: Vec<u32>,
}

impl<T> Default for SlotMap<T> {
    fn default() -> Self {
        SlotMap { generations: Vec::new(), values: Vec::new(), free: Vec::new() }
    }
}

impl<T> SlotMap<T> {
    /// Puts a value into a free slot.
    pub fn insert(&mut self, value: T) -> RequestId {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.generations.push(0);
            self.values.push(None);
            u32::try_from(self.values.len() - 1).expect("fewer than 2³² slots")
        });
        self.values[slot as usize] = Some(value);
        RequestId { slot, generation: self.generations[slot as usize] }
    }

    /// Takes a value out; its slot is free, and `id` names nothing any more.
    pub fn remove(&mut self, id: RequestId) -> Option<T> {
        let generation = self.generations.get_mut(id.slot as usize)?;
        let value = self.values[id.slot as usize].take_if(|_| *generation == id.generation)?;
        *generation = generation.wrapping_add(1);
        self.free.push(id.slot);
        Some(value)
    }

    /// The value that `id` names, if it is still there.
    pub fn get(&self, id: RequestId) -> Option<&T> {
        let generation = self.generations.get(id.slot as usize)?;
        self.values[id.slot as usize].as_ref().filter(|_| *generation == id.generation)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut T> {
        let generation = self.generations.get(id.slot as usize)?;
        self.values[id.slot as usize].as_mut().filter(|_| *generation == id.generation)
    }

    /// Values there.
    pub fn len(&self) -> usize {
        self.values.len() - self.free.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots there have ever been: all ids' slots are below.
    pub fn capacity(&self) -> usize {
        self.values.len()
    }

    /// What is in each slot.
    pub fn values_mut(&mut self) -> &mut [Option<T>] {
        &mut self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_id_kept_too_long_names_nothing() {
        let mut slots = SlotMap::default();
        let a = slots.insert('a');
        assert_eq!(slots.remove(a), Some('a'));
        let b = slots.insert('b');
        assert_eq!((a.slot, b.slot, slots.capacity()), (0, 0, 1), "the slot is used again");
        assert!(slots.get(a).is_none() && slots.get_mut(a).is_none() && slots.remove(a).is_none());
        assert_eq!((slots.get(b), slots.len()), (Some(&'b'), 1));
        assert_eq!(slots.get(RequestId { slot: 7, generation: 0 }), None);
    }

    proptest! {
        #[test]
        fn slots_agree_with_a_map(ops in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 0..200)) {
            let mut slots = SlotMap::default();
            let mut model = std::collections::HashMap::new();
            let mut ids = Vec::new();
            for (n, (insert, which)) in ops.into_iter().enumerate() {
                if insert || ids.is_empty() {
                    let id = slots.insert(n);
                    prop_assert!(model.insert(id, n).is_none(), "{id:?} was given out twice");
                    ids.push(id);
                } else {
                    let id = ids[which.index(ids.len())];
                    prop_assert_eq!(slots.remove(id), model.remove(&id));
                }
                prop_assert_eq!(slots.len(), model.len());
            }
            for id in ids {
                prop_assert_eq!(slots.get(id), model.get(&id));
            }
        }
    }
}
