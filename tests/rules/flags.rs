//! Messages of the library name settings, not flags: the command line has its own words for them.

use regex::Regex;

use crate::rooms::{code, files, repository};

/// Whole commands, which a user of the library can run, too.
const COMMANDS: [&str; 2] = ["tandem doctor --gpu", "cargo run --features"];

/// Flags in code, behind which no other program's command stands.
fn flags(code: &str) -> Vec<String> {
    let flag = Regex::new(r#"(?:^|[\s"(`])(--[a-z][a-z-]*)"#).unwrap();
    let without = COMMANDS.iter().fold(code.to_owned(), |code, command| code.replace(command, ""));
    flag.captures_iter(&without).map(|found| found[1].to_owned()).collect()
}

#[test]
fn the_library_names_no_flags() {
    let src = repository().join("src");
    let mut wrong = Vec::new();
    for path in files(&src) {
        let name = path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
        if name.starts_with("cli/") || name.ends_with("/tests.rs") || !name.ends_with(".rs") {
            continue;
        }
        let found = flags(&code(&std::fs::read_to_string(&path).unwrap()));
        wrong.extend(found.into_iter().map(|flag| format!("src/{name}: {flag}")));
    }
    assert!(
        wrong.is_empty(),
        "write `setting` in a message, and let src/cli/flags.rs say its flag:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn flags_are_found_in_messages() {
    let code = r#"f("raise --ctx or use --device cpu"); g("tandem doctor --gpu says more"); a--; h("a--b");"#;
    assert_eq!(flags(code), ["--ctx", "--device"]);
}
