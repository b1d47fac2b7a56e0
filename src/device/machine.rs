//! Finds the description of a machine by name: one of `hardware/`, or a file.

use std::path::Path;

use crate::hardware::{self, Hardware};
use crate::{Result, small_file};

/// Maximum size of a description in bytes.
const MAX_TOML: u64 = 1 << 20;

/// The machine called `name`, or described by the file of that name; `None` if there is neither.
///
/// # Errors
/// If the file cannot be read or is no description: see [`hardware::parse`].
pub fn find_machine(name: &str) -> Result<Option<Hardware>> {
    if let Some(found) = hardware::named(name) {
        return Ok(Some(found));
    }
    match small_file::read_text(Path::new(name), MAX_TOML)? {
        Some(text) => hardware::parse(name, &text).map(Some),
        None => Ok(None),
    }
}

/// The names of all machines in `hardware/`, for messages.
pub fn machine_names() -> String {
    hardware::names().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_come_by_name_and_from_files() {
        assert_eq!(find_machine("t4-xeon").unwrap(), hardware::named("t4-xeon"));
        assert_eq!(find_machine("nosuch").unwrap(), None);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("box.toml");
        let name = file.to_str().unwrap();
        std::fs::write(&file, include_str!("../../hardware/t4-xeon.toml")).unwrap();
        let found = find_machine(name).unwrap().unwrap();
        assert_eq!((found.name.as_str(), found.cpu), ("box", hardware::named("t4-xeon").unwrap().cpu));
        std::fs::write(&file, "[cpu]\ncores = 8\n").unwrap();
        assert!(find_machine(name).unwrap_err().to_string().contains("cpu.dram_bytes: missing"));
    }
}
