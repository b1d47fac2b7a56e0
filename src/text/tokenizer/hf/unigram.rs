//! Unigram: the cut of a text into tokens whose scores (log-probabilities) have the largest sum.
//!
//! The crate's algorithm, on the sorted tokens instead of a trie of hash maps: those that a text begins with are found
//! by narrowing a range of them byte by byte. Its memory is the tokens and 12 bytes for each.

use super::budget::Steps;

/// What an unknown character has less than the token of the lowest score.
const UNKNOWN_PENALTY: f64 = 10.0;

#[derive(Debug)]
pub(super) struct HfUnigram {
    tokens: Vec<(String, f64)>,
    /// Ids in the order of their tokens; of equal ones only the last.
    sorted: Vec<u32>,
    unk_id: Option<u32>,
    unknown_score: f64,
    byte_fallback: bool,
}

/// The best way to a place in the text.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    /// Where its last token begins, and that token.
    last: Option<(usize, Option<u32>)>,
}

impl HfUnigram {
    pub(super) fn new(
        tokens: Vec<(String, f64)>,
        unk_id: Option<usize>,
        byte_fallback: bool,
    ) -> Result<HfUnigram, String> {
        if unk_id.is_some_and(|id| id >= tokens.len()) {
            return Err("unk_id is larger than the vocabulary".into());
        }
        let count = u32::try_from(tokens.len()).map_err(|_| "too many tokens")?;
        let mut sorted: Vec<u32> = (0..count).collect();
        let text = |id: u32| tokens[id as usize].0.as_bytes();
        // Of equal tokens the last one counts.
        sorted.sort_unstable_by(|&a, &b| text(a).cmp(text(b)).then(b.cmp(&a)));
        sorted.dedup_by(|later, first| text(*later) == text(*first));
        let lowest = tokens.iter().map(|(_, score)| *score).fold(f64::INFINITY, f64::min);
        Ok(HfUnigram {
            sorted,
            unk_id: unk_id.map(|id| id as u32),
            unknown_score: lowest - UNKNOWN_PENALTY,
            byte_fallback,
            tokens,
        })
    }

    fn bytes(&self, id: u32) -> &[u8] {
        self.tokens[id as usize].0.as_bytes()
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        let at = self.sorted.binary_search_by(|&id| self.bytes(id).cmp(token.as_bytes())).ok()?;
        Some(self.sorted[at])
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(|(token, _)| token.as_str())
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// Appends the tokens of `text`.
    ///
    /// # Errors
    /// If it has an unknown character, and there is no unknown token.
    pub(super) fn tokenize(&self, text: &str, out: &mut Vec<u32>) -> Result<(), String> {
        let best = self.best_ways(text)?;
        // From the end: the places where tokens begin, and whether they are unknown.
        let mut pieces: Vec<(usize, bool)> = Vec::new();
        let mut end = text.len();
        while end > 0 {
            let (start, id) = best[end].last.expect("every character has a way to its end");
            let unknown = id == self.unk_id;
            match pieces.last_mut() {
                // Unknown characters in a row are one token.
                Some((begin, true)) if unknown => *begin = start,
                _ => pieces.push((start, unknown)),
            }
            end = start;
        }
        let mut pieces = pieces.into_iter().rev().peekable();
        while let Some((start, _)) = pieces.next() {
            let end = pieces.peek().map_or(text.len(), |&(next, _)| next);
            self.push(&text[start..end], out)?;
        }
        Ok(())
    }

    /// The best way to every place where a character ends.
    fn best_ways(&self, text: &str) -> Result<Vec<Best>, String> {
        let mut steps = Steps::new();
        let mut best = vec![Best { score: 0.0, last: None }; text.len() + 1];
        for (start, c) in text.char_indices() {
            let here = best[start].score;
            let mut reach = |end: usize, score: f64, id: Option<u32>| {
                let way = &mut best[end];
                if way.last.is_none() || score > way.score {
                    *way = Best { score, last: Some((start, id)) };
                }
            };
            let mut has_character = false;
            let mut candidates = &self.sorted[..];
            for (depth, &byte) in text.as_bytes()[start..].iter().enumerate() {
                // Those with a byte at `depth` have agreed so far; one without it ends here and was taken.
                steps.take(1);
                let at = |&id: &u32| self.bytes(id).get(depth).copied();
                let low = candidates.partition_point(|id| at(id) < Some(byte));
                let high = candidates.partition_point(|id| at(id) <= Some(byte));
                candidates = &candidates[low..high];
                let Some(&first) = candidates.first() else { break };
                if self.bytes(first).len() == depth + 1 {
                    let end = start + depth + 1;
                    reach(end, self.tokens[first as usize].1 + here, Some(first));
                    has_character |= depth + 1 == c.len_utf8();
                }
            }
            if !has_character {
                let unk =
                    self.unk_id.ok_or("model: the text has an unknown character, and there is no unk_id")?;
                reach(start + c.len_utf8(), self.unknown_score + here, Some(unk));
            }
        }
        Ok(best)
    }

    fn push(&self, piece: &str, out: &mut Vec<u32>) -> Result<(), String> {
        if let Some(id) = self.token_to_id(piece) {
            out.push(id);
            return Ok(());
        }
        if self.byte_fallback {
            let bytes: Option<Vec<u32>> =
                piece.bytes().map(|byte| self.token_to_id(&format!("<0x{byte:02X}>"))).collect();
            if let Some(bytes) = bytes {
                out.extend(bytes);
                return Ok(());
            }
        }
        out.push(self.unk_id.ok_or("model: the text has an unknown character, and there is no unk_id")?);
        Ok(())
    }
}
