//! Checks the map of characters of a SentencePiece model before the `spm_precompiled` crate walks it unchecked.
//!
//! The map is a length, a trie of that length as a double array (Darts) whose values are offsets, and texts that end
//! in NUL, at these offsets. Every walk over UTF-8 text must stay inside of the array, and every value must begin a
//! text.

/// Longest text that one may be replaced by. The longest of SentencePiece's own rules has 33 bytes.
const MAX_TEXT: usize = 256;
/// Most bytes that stand for one byte of the text. `U+FDFA` becomes 11 times as long in NFKC.
const MAX_GROWTH: usize = 16;

/// # Errors
/// What is wrong with the map.
pub(super) fn check(map: &[u8]) -> Result<(), String> {
    let cut_short = || String::from("precompiled_charsmap is cut short");
    let (length, rest) = map.split_first_chunk().ok_or_else(cut_short)?;
    let length = u32::from_le_bytes(*length) as usize / 4 * 4;
    if length == 0 || length > rest.len() {
        return Err(cut_short());
    }
    let (trie, texts) = rest.split_at(length);
    let texts =
        std::str::from_utf8(texts).map_err(|_| "precompiled_charsmap has texts that are not UTF-8")?;
    let units: Vec<u32> = trie.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect();
    let offset = |unit: u32| ((unit >> 10) as usize) << ((unit & 1 << 9) >> 6);

    // Nodes in the order of their depth, so that each value is seen at its shortest text first.
    let root = offset(units[0]);
    let mut seen = vec![false; units.len()];
    let mut level = vec![root];
    let mut depth = 0;
    while !level.is_empty() {
        depth += 1;
        let mut below = Vec::new();
        for node in level {
            // UTF-8 has no NUL here, and no byte above 244.
            for byte in 1..=244usize {
                let unit = *units.get(node ^ byte).ok_or_else(cut_short)?;
                if unit & (1 << 31 | 0xff) != byte as u32 {
                    continue;
                }
                let child = node ^ byte ^ offset(unit);
                if unit >> 8 & 1 == 1 {
                    let value = units.get(child).ok_or_else(cut_short)? & !(1 << 31);
                    let text = texts
                        .get(value as usize..)
                        .ok_or("precompiled_charsmap names a text that it lacks")?;
                    let long = text.bytes().take(MAX_TEXT + 1).position(|b| b == 0);
                    let long = long.unwrap_or(text.len().min(MAX_TEXT + 1));
                    if long > MAX_TEXT || long > MAX_GROWTH * depth {
                        return Err("precompiled_charsmap makes text more than 16 times as long".into());
                    }
                }
                if !*seen.get(child).ok_or_else(cut_short)? {
                    seen[child] = true;
                    below.push(child);
                }
            }
        }
        level = below;
    }
    Ok(())
}

/// The bytes that `text` spells in base 64.
pub(super) fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut buffer, mut bits) = (0u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        buffer = (buffer << 6 | u32::from(value)) & 0xffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((buffer >> bits) as u8);
        }
    }
    Some(bytes)
}
