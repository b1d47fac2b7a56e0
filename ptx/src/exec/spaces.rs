//! Memory that is not the caller's, and which bytes a launch has used how.

use std::collections::HashMap;

use crate::fault::{FaultKind, Space};

/// A block's shared memory.
pub(crate) struct Shared {
    pub bytes: Vec<u8>,
    /// A bit a byte, if reads before writes are faults.
    written: Option<Vec<u64>>,
}

impl Shared {
    pub fn new(size: usize, watch: bool) -> Shared {
        Shared { bytes: vec![0; size], written: watch.then(|| vec![0; size.div_ceil(64)]) }
    }

    /// For another block: what the last one left is garbage to it.
    pub fn forget(&mut self) {
        if let Some(written) = &mut self.written {
            written.fill(0);
        }
    }

    pub fn range(&self, address: u64, bytes: u32) -> Result<std::ops::Range<usize>, FaultKind> {
        within(Space::Shared, address, bytes, self.bytes.len())
    }

    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), FaultKind> {
        let bytes = out.len() as u32;
        let range = self.range(address, bytes)?;
        if let Some(written) = &self.written
            && !words_of(&range).all(|(word, bits)| written[word] & bits == bits)
        {
            return Err(FaultKind::Uninitialised { address, bytes });
        }
        out.copy_from_slice(&self.bytes[range]);
        Ok(())
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), FaultKind> {
        let range = self.range(address, bytes.len() as u32)?;
        self.mark(range.clone(), true);
        self.bytes[range].copy_from_slice(bytes);
        Ok(())
    }

    /// Notes that these bytes have, or do not have, a value.
    pub fn mark(&mut self, range: std::ops::Range<usize>, has_value: bool) {
        if let Some(written) = &mut self.written {
            for (word, bits) in words_of(&range) {
                if has_value {
                    written[word] |= bits;
                } else {
                    written[word] &= !bits;
                }
            }
        }
    }
}

/// The words of a bit a byte that a range is in, and its bits there.
fn words_of(range: &std::ops::Range<usize>) -> impl Iterator<Item = (usize, u64)> + use<> {
    let (mut at, end) = (range.start, range.end);
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let stop = end.min((at / 64 + 1) * 64);
        let word = (at / 64, (u64::MAX >> (64 - (stop - at))) << (at % 64));
        at = stop;
        Some(word)
    })
}

/// The place of bytes in a space of `size` bytes.
pub(crate) fn within(
    space: Space,
    address: u64,
    bytes: u32,
    size: usize,
) -> Result<std::ops::Range<usize>, FaultKind> {
    let end = address.checked_add(u64::from(bytes)).filter(|end| *end <= size as u64);
    let end = end.ok_or(FaultKind::Outside { space, address, bytes, size: size as u64 })?;
    Ok(address as usize..end as usize)
}

const PAGE: u64 = 4096;

#[derive(Clone)]
struct Page {
    written: [u64; 64],
    constant: [u64; 64],
}

/// Bytes of global memory that a launch wrote, and that it read as constant: none may be both (PTX ISA 9.7.9.9).
#[derive(Default)]
pub(crate) struct Tracker {
    pages: HashMap<u64, Box<Page>>,
}

impl Tracker {
    pub fn write(&mut self, address: u64, bytes: usize) -> Result<(), FaultKind> {
        self.note(address, bytes, true)
    }

    pub fn constant(&mut self, address: u64, bytes: usize) -> Result<(), FaultKind> {
        self.note(address, bytes, false)
    }

    fn note(&mut self, mut address: u64, bytes: usize, write: bool) -> Result<(), FaultKind> {
        let end = address.saturating_add(bytes as u64);
        while address < end {
            // Up to 64 bytes of one word of a page.
            let stop = end.min((address / 64 + 1) * 64);
            let bits = (u64::MAX >> (64 - (stop - address))) << (address % 64);
            let page = self
                .pages
                .entry(address / PAGE)
                .or_insert_with(|| Box::new(Page { written: [0; 64], constant: [0; 64] }));
            let word = (address % PAGE / 64) as usize;
            let (own, other) = if write {
                (&mut page.written[word], page.constant[word])
            } else {
                (&mut page.constant[word], page.written[word])
            };
            if other & bits != 0 {
                let first = (other & bits).trailing_zeros();
                return Err(FaultKind::NotConstant { address: address / 64 * 64 + u64::from(first) });
            }
            *own |= bits;
            address = stop;
        }
        Ok(())
    }
}
