//! How much data overflows the caches.

use super::limits::last_level_cache;
use crate::host::memory_available;

/// At least so much, where the system names no cache or a part of it.
const LEAST: u64 = 192 << 20;
/// At most: a virtual machine may name the cache of a whole socket, of which it has a part.
const MOST: u64 = 1 << 30;

/// Bytes of weights that no cache keeps from one pass over them to the next: a sixteenth more than the largest cache that the system
/// names, 192 MiB to 1 GiB, and at most an eighth of the memory that is available.
pub fn cold_bytes() -> usize {
    bytes(last_level_cache(), memory_available().unwrap_or(u64::MAX)) as usize
}

fn bytes(cache: u64, available: u64) -> u64 {
    (cache + cache / 16).clamp(LEAST, MOST).min(available / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_cache_within_memory() {
        assert_eq!(bytes(32 << 20, 64 << 30), 192 << 20);
        assert_eq!(bytes(480 << 20, 64 << 30), 510 << 20);
        assert_eq!(bytes(4 << 30, 64 << 30), 1 << 30);
        assert_eq!(bytes(480 << 20, 1 << 30), 128 << 20);
        assert!(cold_bytes() > 0);
    }
}
