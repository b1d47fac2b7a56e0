//! Byte-pair encoding: merge the adjacent pair with the best rank until none is left.
//!
//! Ties go to the leftmost pair. A piece of n bytes takes O(n log n): a heap holds the candidate
//! pairs, and a candidate is dropped on popping when either side has since been merged away.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::hash::Hash;
use super::vocab::Vocab;
use super::{bytelevel, spm};
use crate::{Error, Result};

/// The merge table of a byte-level vocabulary.
#[derive(Debug)]
pub struct Bpe {
    /// The token of each single byte. Bytes that never occur in UTF-8 usually have none.
    bytes: Box<[Option<u32>; 256]>,
    merges: PairTable,
    /// Whether a piece that is itself a token is taken whole, regardless of merges (Llama 3).
    pub ignore_merges: bool,
}

/// `(left, right) -> (rank, merged)`, open addressing.
#[derive(Debug)]
struct PairTable {
    slots: Vec<Slot>,
    hash: Hash,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    pair: u64,
    rank: u32,
    merged: u32,
}

const FREE: Slot = Slot { pair: u64::MAX, rank: 0, merged: 0 };

impl PairTable {
    fn with_capacity(n: usize) -> PairTable {
        PairTable { slots: vec![FREE; (n * 2 + 1).next_power_of_two()], hash: Hash::new() }
    }

    /// The slot of `pair`, or the free slot where it belongs.
    fn find(&self, pair: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = self.hash.word(pair) as usize & mask;
        while self.slots[at].pair != pair && self.slots[at].pair != FREE.pair {
            at = (at + 1) & mask;
        }
        at
    }

    fn get(&self, left: u32, right: u32) -> Option<Slot> {
        let slot = self.slots[self.find(key(left, right))];
        (slot.pair != FREE.pair).then_some(slot)
    }
}

fn key(left: u32, right: u32) -> u64 {
    (left as u64) << 32 | right as u64
}

/// One symbol of the piece, in a doubly linked list over a vector. A dead symbol was merged away.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    prev: u32,
    next: u32,
}

const NONE: u32 = u32::MAX;
const DEAD: u32 = u32::MAX;

/// Reused between the pieces of a text.
#[derive(Debug, Default)]
pub struct Scratch {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

/// A pair that could merge: best rank first, then leftmost. `l` and `r` are the tokens it was made
/// of: if either symbol has changed since, the candidate is stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    l: u32,
    r: u32,
    merged: u32,
}

impl Bpe {
    /// Resolves `merges` ("left right", best first) against the vocabulary.
    pub fn new(vocab: &Vocab, merges: &[impl AsRef<str>], ignore_merges: bool) -> Result<Bpe> {
        let bad = |i: usize, problem: String| {
            Error::format(
                "tokenizer.ggml.merges",
                format!("merge {i} ({:?}) {problem}", clip(merges[i].as_ref())),
            )
        };
        if merges.len() >= NONE as usize {
            return Err(Error::format("tokenizer.ggml.merges", "too many merges"));
        }
        let mut table = PairTable::with_capacity(merges.len());
        let mut joined = String::new();
        let mut previous = 0u32;
        for (i, merge) in merges.iter().map(AsRef::as_ref).enumerate() {
            // A token may itself start with a space in vocabularies that are not byte-level.
            let split = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
            let Some(split) = split else {
                return Err(bad(i, "is not two tokens and a space between".into()));
            };
            let (left, right) = (&merge[..split], &merge[split + 1..]);
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            // Merges are usually listed in the order of their resulting ids, so try the next id first.
            let merged = match vocab.get(previous + 1) {
                Some(text) if text == joined => Some(previous + 1),
                _ => vocab.id(&joined),
            };
            let lookup = |text: &str| {
                vocab.id(text).ok_or_else(|| bad(i, format!("names {:?}, which is no token", clip(text))))
            };
            let (left, right) = (lookup(left)?, lookup(right)?);
            let Some(merged) = merged else {
                return Err(bad(i, format!("makes {:?}, which is no token", clip(&joined))));
            };
            previous = merged;
            let at = table.find(key(left, right));
            // The first of two equal merges wins, as it has the better rank.
            if table.slots[at].pair == FREE.pair {
                table.slots[at] = Slot { pair: key(left, right), rank: i as u32, merged };
            }
        }
        let mut bytes = Box::new([None; 256]);
        for b in 0..=255u8 {
            bytes[b as usize] = vocab.id(bytelevel::byte_to_char(b).encode_utf8(&mut [0; 4]));
        }
        Ok(Bpe { bytes, merges: table, ignore_merges })
    }

    /// Appends the tokens of one pre-tokenised piece to `out`.
    ///
    /// A byte that the vocabulary lacks is dropped, as the models' own tokenisers do.
    pub fn encode_piece(&self, vocab: &Vocab, piece: &str, scratch: &mut Scratch, out: &mut Vec<u32>) {
        if self.ignore_merges
            && let Some(id) = vocab.id(&bytelevel::encode(piece))
        {
            out.push(id);
            return;
        }
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        for id in piece.bytes().filter_map(|b| self.bytes[b as usize]) {
            let at = symbols.len() as u32;
            symbols.push(Symbol { id, prev: at.wrapping_sub(1), next: at + 1 });
        }
        let Some(last) = symbols.last_mut() else { return };
        last.next = NONE;
        for at in 1..symbols.len() as u32 {
            self.offer(symbols, heap, at - 1, at);
        }
        while let Some(Reverse(Candidate { left, l, r, merged, .. })) = heap.pop() {
            let Symbol { id, prev, next, .. } = symbols[left as usize];
            if id != l || next == NONE || symbols[next as usize].id != r {
                continue;
            }
            let after = symbols[next as usize].next;
            symbols[next as usize].id = DEAD;
            symbols[left as usize] = Symbol { id: merged, prev, next: after };
            if after != NONE {
                symbols[after as usize].prev = left;
                self.offer(symbols, heap, left, after);
            }
            if prev != NONE {
                self.offer(symbols, heap, prev, left);
            }
        }
        let mut at = 0;
        while at != NONE {
            out.push(symbols[at as usize].id);
            at = symbols[at as usize].next;
        }
    }

    fn offer(&self, symbols: &[Symbol], heap: &mut BinaryHeap<Reverse<Candidate>>, left: u32, right: u32) {
        let (l, r) = (symbols[left as usize].id, symbols[right as usize].id);
        if let Some(slot) = self.merges.get(l, r) {
            heap.push(Reverse(Candidate { rank: slot.rank, left, l, r, merged: slot.merged }));
        }
    }
}

use spm::clip;
