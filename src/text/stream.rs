//! Turns token bytes into text that can be printed at once.
//!
//! A token may end inside a UTF-8 character, and a stop string may be spread over several tokens.
//! The decoder therefore holds back up to three bytes of an unfinished character, and any text that
//! could still turn out to be the start of a stop string. Invalid UTF-8 becomes U+FFFD exactly as in
//! [`String::from_utf8_lossy`] over the whole output.

/// The output of one push, or of the end.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamOutput {
    /// Text that will not change any more.
    pub text: String,
    /// Whether a stop string has been reached: `text` is then the last output, without the stop string.
    pub stopped: bool,
}

/// Incremental decoder of one generated sequence.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    stops: Vec<String>,
    /// An unfinished character.
    bytes: Vec<u8>,
    /// Decoded text that may be the start of a stop string.
    held: String,
    strip_space: bool,
    /// Whether the output includes the stop string.
    keep_stop: bool,
    stopped: bool,
}

impl StreamDecoder {
    /// A decoder that stops at the first occurrence of any of `stops`. Empty ones are ignored.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> StreamDecoder {
        let stops = stops.into_iter().map(Into::into).filter(|s: &String| !s.is_empty()).collect();
        StreamDecoder { stops, ..Default::default() }
    }

    /// Drops one leading space of the output, as SentencePiece decoders do for a text that starts
    /// with their first token (see [`Tokenizer::adds_space_prefix`](super::Tokenizer::adds_space_prefix)).
    #[must_use]
    pub fn strip_leading_space(mut self, strip: bool) -> StreamDecoder {
        self.strip_space = strip;
        self
    }

    /// Whether the output ends with the stop string instead of in front of it.
    #[must_use]
    pub fn keep_stop(mut self, keep: bool) -> StreamDecoder {
        self.keep_stop = keep;
        self
    }

    /// Other stop strings from here on; text held back for the old ones counts.
    pub fn stop_at(&mut self, stops: impl IntoIterator<Item = impl Into<String>>) {
        self.stops = stops.into_iter().map(Into::into).filter(|s: &String| !s.is_empty()).collect();
    }

    /// Whether a stop string has been reached. Later pushes yield nothing.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Takes the bytes of the next token.
    pub fn push(&mut self, bytes: &[u8]) -> StreamOutput {
        if self.stopped {
            return StreamOutput { text: String::new(), stopped: true };
        }
        let mut bytes = bytes;
        if self.strip_space && !bytes.is_empty() {
            self.strip_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.bytes.extend_from_slice(bytes);
        let keep = unfinished(&self.bytes);
        let ready = self.bytes.len() - keep;
        self.held.push_str(&String::from_utf8_lossy(&self.bytes[..ready]));
        self.bytes.drain(..ready);
        self.release(false)
    }

    /// Ends the sequence and returns all text held back.
    pub fn finish(&mut self) -> StreamOutput {
        if self.stopped {
            return StreamOutput { text: String::new(), stopped: true };
        }
        self.held.push_str(&String::from_utf8_lossy(&self.bytes));
        self.bytes.clear();
        self.release(true)
    }

    /// Releases the part of `held` that can no longer be part of a stop string.
    fn release(&mut self, end: bool) -> StreamOutput {
        let keep = if end { 0 } else { self.stops.iter().map(|s| overlap(&self.held, s)).max().unwrap_or(0) };
        let ready = self.held.len() - keep;
        let found =
            self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop.len()))).min();
        if let Some((at, length)) = found
            && at <= ready
        {
            self.stopped = true;
            self.held.truncate(if self.keep_stop { at + length } else { at });
            return StreamOutput { text: std::mem::take(&mut self.held), stopped: true };
        }
        // If a stop string was found after the start of another that may still complete, the earlier one would win:
        // wait, so that the result does not depend on how the bytes were divided.
        let rest = self.held.split_off(ready);
        StreamOutput { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }
}

/// The length of the longest end of `text` that is a proper start of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let (text, stop) = (text.as_bytes(), stop.as_bytes());
    // Both are UTF-8, so an equal run of bytes that starts a character in one starts it in the other.
    (1..stop.len().min(text.len() + 1)).rev().find(|&n| text.ends_with(&stop[..n])).unwrap_or(0)
}

/// Number of bytes at the end that begin a character and that more bytes could complete.
fn unfinished(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let tail = &bytes[bytes.len() - back..];
        if tail[0] & 0xc0 != 0x80 {
            // An incomplete sequence, unlike an invalid one, has no error length.
            let open = matches!(std::str::from_utf8(tail), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none());
            return if open { back } else { 0 };
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(decoder: &mut StreamDecoder, bytes: &[u8], cuts: &[usize]) -> (String, bool) {
        let mut text = String::new();
        let mut at = 0;
        for &cut in cuts.iter().chain([&bytes.len()]) {
            let to = (at + cut).min(bytes.len());
            let out = decoder.push(&bytes[at..to]);
            text.push_str(&out.text);
            at = to;
        }
        let last = decoder.finish();
        text.push_str(&last.text);
        (text, last.stopped)
    }

    /// Bytes with every kind of damage: cut, overlong, surrogate, too large, stray continuation.
    fn damaged() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            any::<char>().prop_map(|c| c.to_string().into_bytes()),
            prop::sample::select(vec![
                b"ab".to_vec(),
                b"<".to_vec(),
                b"<|".to_vec(),
                b"END".to_vec(),
                "é".into(),
                "👩\u{200d}🚀".into(),
                vec![0xf0, 0x9f],
                vec![0xf0, 0x9f, 0x91],
                vec![0xe4, 0xb8],
                vec![0xc3],
                vec![0x80],
                vec![0xff],
                vec![0xed, 0xa0, 0x80],
                vec![0xf4, 0x90, 0x80, 0x80],
                vec![0xc0, 0xaf],
                vec![0xe0, 0x80],
            ]),
            prop::collection::vec(any::<u8>(), 0..3),
        ];
        prop::collection::vec(part, 0..20).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn any_split_equals_lossy_decoding_of_the_whole(
            bytes in damaged(), cuts in prop::collection::vec(0usize..6, 0..40)
        ) {
            let (text, stopped) = run(&mut StreamDecoder::default(), &bytes, &cuts);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
            prop_assert!(!stopped);
        }

        #[test]
        fn with_stops_it_is_the_text_up_to_the_first_occurrence(
            bytes in damaged(), cuts in prop::collection::vec(0usize..6, 0..40)
        ) {
            let stops = ["END", "<|x", "b<", "ab<|<|", "é", "\u{fffd}\u{fffd}", ""];
            let whole = String::from_utf8_lossy(&bytes).into_owned();
            let first = stops.iter().filter(|s| !s.is_empty()).filter_map(|s| whole.find(s)).min();
            let (text, stopped) = run(&mut StreamDecoder::new(stops), &bytes, &cuts);
            prop_assert_eq!(stopped, first.is_some());
            prop_assert_eq!(text.as_str(), &whole[..first.unwrap_or(whole.len())]);
        }
    }

    #[test]
    fn half_a_character_waits_for_the_rest() {
        let mut d = StreamDecoder::default();
        let rocket = "🚀".as_bytes();
        assert_eq!(d.push(&rocket[..1]).text, "");
        assert_eq!(d.push(&rocket[1..3]).text, "");
        assert_eq!(d.push(&rocket[3..]).text, "🚀");
        assert_eq!(d.push(&[0xe4]).text, "");
        assert_eq!(d.finish().text, "\u{fffd}");
    }

    #[test]
    fn a_stop_string_over_three_tokens_never_shows() {
        let mut d = StreamDecoder::new(["<|end|>"]);
        assert_eq!(d.push(b"Hi <|").text, "Hi ");
        assert_eq!(d.push(b"en").text, "");
        assert_eq!(d.push(b"d|> more"), StreamOutput { text: String::new(), stopped: true });
        assert_eq!(d.push(b"x"), StreamOutput { text: String::new(), stopped: true });
        let mut d = StreamDecoder::new(["<|end|>"]);
        assert_eq!(d.push(b"a<|e").text, "a");
        assert_eq!(d.push(b"xit").text, "<|exit", "a false start comes out");
    }

    #[test]
    fn the_leading_space_goes_once() {
        let mut d = StreamDecoder::default().strip_leading_space(true);
        assert_eq!(d.push(b" Hello").text, "Hello");
        assert_eq!(d.push(b" world").text, " world");
    }
}
