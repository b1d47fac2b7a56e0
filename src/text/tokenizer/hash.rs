//! A fast seeded hash for the tables: the standard one would take half of a vocabulary's load time.
//!
//! Eight bytes at a time are folded in by a 64 x 64 -> 128 bit multiplication whose halves are then
//! combined, as wyhash does. The seed is random, so that a file cannot be made to collide.

use std::hash::{BuildHasher, RandomState};

/// A hash function with a random seed.
#[derive(Debug, Clone, Copy)]
pub struct Hash {
    seed: u64,
}

impl Hash {
    /// Another function of the family.
    pub fn new() -> Hash {
        // Odd, hence never zero, which would absorb every input.
        Hash { seed: RandomState::new().hash_one(0) | 1 }
    }

    /// The hash of one word.
    pub fn word(self, word: u64) -> u64 {
        fold(fold(word ^ self.seed, 0x9e37_79b9_7f4a_7c15) ^ self.seed, 0xa076_1d64_78bd_642f)
    }

    /// The hash of a text.
    pub fn bytes(self, bytes: &[u8]) -> u64 {
        let mut h = self.seed ^ bytes.len() as u64;
        let (words, tail) = bytes.as_chunks::<8>();
        for word in words {
            h = fold(h ^ u64::from_le_bytes(*word), 0x9e37_79b9_7f4a_7c15);
        }
        let mut last = [0; 8];
        last[..tail.len()].copy_from_slice(tail);
        self.word(h ^ u64::from_le_bytes(last))
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn similar_keys_spread_over_the_table() {
        let hash = Hash::new();
        let keys = 1 << 14;
        // Throwing n balls into 2n bins hits about 0.79 n of them; below 0.72 n is clustering.
        let hit = |place: &dyn Fn(u64) -> u64| {
            let mut bins = vec![false; keys * 2];
            (0..keys as u64).for_each(|i| bins[place(i) as usize % (keys * 2)] = true);
            bins.iter().filter(|&&b| b).count()
        };
        for (name, n) in [
            ("texts", hit(&|i| hash.bytes(format!("<unused{i}>").as_bytes()))),
            ("pairs", hit(&|i| hash.word((i << 32) | (i + 1)))),
            ("small", hit(&|i| hash.word(i))),
        ] {
            assert!(n > keys * 72 / 100, "{name}: {n} of {} bins", keys * 2);
        }
        assert_ne!(hash.bytes(b"ab"), hash.bytes(b"ab\0"), "the length counts");
    }
}
