//! GPT-2's reversible alphabet: each of the 256 bytes as one printable character.
//!
//! Byte-level vocabularies are stored in this alphabet, so that no token text holds a space or a
//! control character: byte 0x20 is written `Ġ`, 0x0A `Ċ`. Printable Latin-1 stands for itself, the
//! other 68 bytes take the characters from U+0100 in order.

use super::raw;

/// The character of `byte`.
pub fn byte_to_char(byte: u8) -> char {
    let code = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => byte as u32,
        0..=0x20 => 0x100 + byte as u32,
        0x7f..=0xa0 => 0x121 + (byte - 0x7f) as u32,
        0xad => 0x143,
    };
    char::from_u32(code).expect("the alphabet ends at U+0143")
}

/// The byte that `c` stands for, if it is in the alphabet.
pub fn char_to_byte(c: char) -> Option<u8> {
    Some(match c as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code as u8,
        code @ 0x100..=0x120 => (code - 0x100) as u8,
        code @ 0x121..=0x142 => (code - 0x121) as u8 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    })
}

/// The bytes that a byte-level token text stands for. Characters outside of the alphabet, which
/// only malformed or added tokens have, stand for themselves.
pub fn decode(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    for c in text.chars() {
        match char_to_byte(c) {
            Some(b) => bytes.push(b),
            None => raw::push(&mut bytes, c),
        }
    }
    bytes
}

/// Writes `text` in the alphabet.
pub fn encode(text: &str) -> String {
    text.bytes().map(byte_to_char).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_a_bijection_with_the_published_landmarks() {
        let mut seen = std::collections::HashSet::new();
        for b in 0..=255 {
            assert!(seen.insert(byte_to_char(b)), "byte {b} shares a character");
            assert_eq!(char_to_byte(byte_to_char(b)), Some(b));
        }
        assert_eq!(encode(" \n\t\u{7f}é"), "ĠĊĉġÃ©");
        assert_eq!(byte_to_char(0xad), 'Ń');
        assert_eq!(decode("ĠHiĊ"), b" Hi\n");
        assert_eq!(char_to_byte('中'), None);
    }
}
