//! Every form that nvcc emits for the kernels is known: all texts of a folder are read.

use std::path::PathBuf;

use tandem_ptx::Module;

/// The `.ptx` files below `$TANDEM_PTX_DIR`.
fn texts() -> Option<Vec<PathBuf>> {
    let Some(folder) = std::env::var_os("TANDEM_PTX_DIR").filter(|f| !f.is_empty()) else {
        println!("skipped: TANDEM_PTX_DIR names no folder of .ptx files");
        return None;
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
    Some(found)
}

#[test]
fn all_texts_are_read() {
    let Some(texts) = texts() else { return };
    let (mut kernels, mut instructions) = (0, 0);
    let mut problems = Vec::new();
    for path in &texts {
        let text = std::fs::read_to_string(path).unwrap();
        match Module::parse(&text) {
            Ok(module) => {
                // Nothing may be lost: one kernel an `.entry`, of the parameter size beside it.
                let entries: Vec<&str> = text.split(".entry ").skip(1).collect();
                assert_eq!(module.kernels().count(), entries.len(), "{}", path.display());
                for (kernel, entry) in module.kernels().zip(entries) {
                    assert!(entry.starts_with(kernel.name), "{}: {}", path.display(), kernel.name);
                    let bytes = entry.split(['[', ']']).nth(1).and_then(|n| n.parse().ok());
                    assert_eq!(Some(kernel.param_bytes), bytes, "{}: {}", path.display(), kernel.name);
                    kernels += 1;
                    instructions += kernel.instructions;
                }
            }
            Err(problem) => problems.push(format!("{}: {problem}", path.display())),
        }
    }
    assert!(problems.is_empty(), "{} of {} texts:\n{}", problems.len(), texts.len(), problems.join("\n"));
    println!("{} texts, {kernels} kernels, {instructions} instructions", texts.len());
}
