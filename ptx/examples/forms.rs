//! Counts the forms of instructions in PTX files: `cargo run --release --example forms FILE...`

use std::collections::BTreeMap;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut forms: BTreeMap<String, usize> = BTreeMap::new();
    let mut failed = false;
    for path in std::env::args().skip(1) {
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(problem) => {
                eprintln!("{path}: {problem}");
                return ExitCode::FAILURE;
            }
        };
        if let Err(problem) = tandem_ptx::Module::parse(&text) {
            eprintln!("{path}: {problem}");
            failed = true;
        }
        for form in tandem_ptx::forms(&text) {
            *forms.entry(form).or_default() += 1;
        }
    }
    let mut forms: Vec<_> = forms.into_iter().collect();
    forms.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    for (form, count) in forms {
        println!("{count:8} {form}");
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
