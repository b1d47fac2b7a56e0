//! Documentation says something: no item is documented by a pronoun.

use regex::Regex;

use crate::rooms::{files, repository};

/// Lines of documentation that name nothing.
fn empty(text: &str) -> Vec<&str> {
    let word = "(?:[Bb]oth|[Ww]hich|[Hh]ow (?:much|many)|[Ww]hat there is|[Aa]ll(?: of (?:them|it|these))?|[Ee]ach|[Tt]h(?:is|at|ese|ose)|[Ii]t|[Oo]nes?)";
    let nothing = Regex::new(&format!(r"(?m)^[ \t]*//[/!] {word}\.$")).unwrap();
    let sole = |at: usize| {
        let before = text[..at].lines().next_back().unwrap_or_default().trim();
        !before.starts_with("///") && !before.starts_with("//!")
    };
    let found = nothing.find_iter(text).filter(|m| sole(m.start()));
    found.map(|m| m.as_str().trim()).collect()
}

#[test]
fn documentation_names_things() {
    let mut wrong = Vec::new();
    for path in files(&repository().join("src")) {
        let name = path.strip_prefix(repository()).unwrap().to_str().unwrap().to_owned();
        if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            wrong.extend(empty(&text).into_iter().map(|line| format!("{name}: {line}")));
        }
    }
    assert!(wrong.is_empty(), "say what it is:\n{}", wrong.join("\n"));
}

#[test]
fn pronouns_are_found_where_they_stand_alone() {
    let text = "/// Both.\nfn a() {}\n/// Adds two scans:\n/// both.\nfn b() {}\n    /// All of them.\n    c: u8,\n/// Both sides.\n";
    assert_eq!(empty(text), ["/// Both.", "/// All of them."]);
}
