//! pip's settings: what it was told about the network holds here too.

use std::path::Path;

use super::env;
use crate::small_file;

/// Longest configuration file read.
const MAX_INI: u64 = 1 << 20;

/// A setting of pip's `[global]` or `[install]` section, from the nearest configuration file that has it.
pub(super) fn pip_setting(key: &str) -> Option<String> {
    let mut files: Vec<String> = env("PIP_CONFIG_FILE").into_iter().collect();
    files.extend(env("VIRTUAL_ENV").map(|d| format!("{d}/pip.conf")));
    files.extend(env("XDG_CONFIG_HOME").map(|d| format!("{d}/pip/pip.conf")));
    for below in [".config/pip/pip.conf", ".pip/pip.conf"] {
        files.extend(env("HOME").map(|d| format!("{d}/{below}")));
    }
    files.extend(["/etc/xdg/pip/pip.conf".to_owned(), "/etc/pip.conf".to_owned()]);
    let read = |file: &String| small_file::read_text(Path::new(file), MAX_INI).ok()?;
    files.iter().filter_map(read).find_map(|text| ini_value(&text, key))
}

fn ini_value(text: &str, key: &str) -> Option<String> {
    let mut section = "";
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            section = name.trim();
        } else if let Some((k, v)) = line.split_once(['=', ':'])
            && matches!(section, "global" | "install")
            && k.trim() == key
            && !v.trim().is_empty()
        {
            return Some(v.trim().to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pip_configuration() {
        let text = "[list]\nindex-url = no\n[global]\n# index-url = no\nindex-url = https://m/simple\n";
        assert_eq!(ini_value(text, "index-url").as_deref(), Some("https://m/simple"));
        assert_eq!(ini_value(text, "cert"), None);
    }
}
