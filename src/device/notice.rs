//! Notices from a device while it works, such as that loading takes long or that a slower path was taken. The library
//! prints nothing; callers may listen.

use std::sync::OnceLock;

static LISTENER: OnceLock<fn(&str)> = OnceLock::new();

/// Registers `listener`, which is called with each sentence on the thread that reports it. Only the first listener of a
/// process is kept.
pub fn listen_to_notices(listener: fn(&str)) {
    let _ = LISTENER.set(listener);
}

/// Passes a sentence to the listener, if there is one.
pub(crate) fn say(sentence: &str) {
    if let Some(listener) = LISTENER.get() {
        listener(sentence);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    fn printing(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                printing(&path, found);
            } else if std::fs::read_to_string(&path).unwrap().contains(concat!("eprint", "ln!(")) {
                found.push(path.display().to_string());
            }
        }
    }

    /// The command line handles `--quiet`, so every notice has to go through the listener.
    #[test]
    fn nothing_but_the_command_line_writes_to_standard_error() {
        let mut found = Vec::new();
        printing(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        found.retain(|path| !path.contains("/src/cli/") && !path.ends_with("/src/main.rs"));
        assert!(found.is_empty(), "{found:?}");
    }
}
