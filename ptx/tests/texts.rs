//! Every form that nvcc emits for the kernels is known: all texts of a folder are read.

#[path = "common/texts.rs"]
mod folder;

use tandem_ptx::Module;

#[test]
fn all_texts_are_read() {
    let texts = folder::texts();
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
