//! The texts of a folder that the environment names.

use std::path::PathBuf;

/// The `.ptx` files below `$TANDEM_PTX_DIR`, sorted; none, and a line, without it.
///
/// # Panics
/// The folder has none.
pub fn texts() -> Vec<PathBuf> {
    let Some(folder) = std::env::var_os("TANDEM_PTX_DIR").filter(|f| !f.is_empty()) else {
        println!("skipped: TANDEM_PTX_DIR names no folder of .ptx files");
        return Vec::new();
    };
    let (mut folders, mut found) = (vec![PathBuf::from(folder)], Vec::new());
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for path in entries.map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "ptx") {
                found.push(path);
            }
        }
    }
    assert!(!found.is_empty(), "no .ptx file below TANDEM_PTX_DIR");
    found.sort();
    found
}
