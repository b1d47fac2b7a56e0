//! Looks for markers at the end of a text that goes on: what may have begun is held back.

/// Takes the text in front of a marker, and the marker if it is there; else all that cannot belong to it. Space in front of the
/// marker is left out.
pub(super) fn cut(text: &mut String, marker: &str) -> (String, bool) {
    let end = |before: &str| before.trim_end().len();
    if let Some(at) = text.find(marker) {
        let before = text[..end(&text[..at])].to_owned();
        text.drain(..at + marker.len());
        return (before, true);
    }
    let safe = end(&text[..text.len() - begun(text, marker)]);
    (text.drain(..safe).collect(), false)
}

/// Bytes at the end of a text with which a marker may begin.
pub(super) fn begun(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
}
