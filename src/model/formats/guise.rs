//! Recognises files that are mistaken for models, from their first bytes.

/// The kind of file that begins with `bytes`, if users commonly mistake it for a model.
pub(crate) fn guise(bytes: &[u8]) -> Option<&'static str> {
    let starts = |with: &[u8]| bytes.starts_with(with);
    let text = bytes.trim_ascii_start();
    let page = |with: &str| text.get(..with.len()).is_some_and(|t| t.eq_ignore_ascii_case(with.as_bytes()));
    Some(match () {
        () if starts(b"version https://git-lfs") => {
            "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        }
        () if page("<!doctype") || page("<html") => "a web page; is the address of the download right?",
        () if starts(b"PK\x03\x04") => "a zip archive (PyTorch weights?); GGUF and safetensors can be read",
        () if starts(b"\x80\x02") || starts(b"\x80\x03") || starts(b"\x80\x04") => {
            "a Python pickle (PyTorch weights?); GGUF and safetensors can be read"
        }
        () if starts(b"GGUF") => "a GGUF file",
        () if starts(b"tjgg") || starts(b"fmgg") || starts(b"lmgg") => {
            "a ggml file from before GGUF; convert the model again"
        }
        () if starts(b"\x1f\x8b") || starts(b"\x28\xb5\x2f\xfd") || starts(b"\xfd7zXZ") => {
            "a compressed file; unpack it first"
        }
        () if bytes.get(8) == Some(&b'{') && bytes.get(4..8) == Some(&[0; 4]) => {
            "a safetensors file; give the folder that holds it and its config.json"
        }
        () if text.starts_with(b"{") => "JSON",
        () => return None,
    })
}

/// `problem`, followed by the kind of file that `bytes` suggest, or by `otherwise` if they suggest none.
pub(crate) fn suspect(problem: &str, bytes: &[u8], otherwise: &str) -> String {
    match guise(bytes) {
        Some(guise) => format!("{problem}; this is {guise}"),
        None => format!("{problem}; {otherwise}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accidents_are_recognised() {
        for (bytes, want) in [
            (&b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"[..], "Git LFS"),
            (b"\r\n<!DOCTYPE html><html>", "web page"),
            (b"<HTML>", "web page"),
            (b"PK\x03\x04\x14", "zip"),
            (b"\x80\x02}q\x00", "pickle"),
            (b"tjgg\x03\0\0\0", "before GGUF"),
            (b"\x1f\x8b\x08", "compressed"),
            (b"\x10\0\0\0\0\0\0\0{\"a\":1}", "safetensors"),
            (b"{\"model_type\": 1}", "JSON"),
        ] {
            let found = guise(bytes).unwrap_or_else(|| panic!("{want}"));
            assert!(found.contains(want), "{want}: {found}");
        }
        for nothing in [&b""[..], b"hello", b"\0\0\0\0\0\0\0\0", b"<h"] {
            assert_eq!(guise(nothing), None);
        }
    }
}
