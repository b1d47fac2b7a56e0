//! Tokens that are not UTF-8, in vocabularies of text.
//!
//! A GGUF file may write a token as any bytes: one byte of a character, Latin-1. A vocabulary is text here, so each byte that is
//! no part of a character is written as a character of its own, from the end of the last private plane, and becomes the byte again
//! when a token is decoded.

use std::borrow::Cow;

/// The character of byte 0; bytes from 0x80 on are used.
const BASE: u32 = 0x10_fe00;

/// The character for a byte that is no part of a character.
pub fn char_of(byte: u8) -> char {
    char::from_u32(BASE + u32::from(byte)).expect("below the last code point")
}

/// A token's bytes as text.
pub fn spelled(token: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(token) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => {
            let mut text = String::with_capacity(4 * token.len());
            for chunk in token.utf8_chunks() {
                text.push_str(chunk.valid());
                text.extend(chunk.invalid().iter().map(|&b| char_of(b)));
            }
            Cow::Owned(text)
        }
    }
}

/// Appends the bytes of one character of a token.
pub fn push(bytes: &mut Vec<u8>, c: char) {
    match (c as u32).wrapping_sub(BASE) {
        byte @ 0x80..=0xff => bytes.push(byte as u8),
        _ => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
    }
}

/// The bytes of a token's text: the inverse of [`spelled`].
pub fn bytes_of(text: &str) -> Vec<u8> {
    // Most tokens have no such character, all of which begin with this byte.
    if !text.as_bytes().contains(&0xf4) {
        return text.into();
    }
    let mut bytes = Vec::with_capacity(text.len());
    text.chars().for_each(|c| push(&mut bytes, c));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_come_back() {
        for token in
            [&b"caf\xe9"[..], b"\xe4\xb8", b"\xff", "中é".as_bytes(), b"", b"\xf4\x8f\xbf", b"a\x80b\xc3"]
        {
            assert_eq!(bytes_of(&spelled(token)), token);
        }
        assert!(matches!(spelled("▁the".as_bytes()), Cow::Borrowed(_)));
    }
}
