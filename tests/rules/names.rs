//! One name, one meaning: types that are visible beyond their file share few names.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;

use crate::rooms::{code, files, repository};

/// Names of types that two or more files of `src/` define. The number only falls.
///
/// Counted are the names of structs, enums, traits, unions and type aliases that are visible beyond the file that defines them (`pub`,
/// `pub(crate)`, `pub(super)`, `pub(in ...)`) in the code that is built without tests. A file's private types are its own affair, as
/// local variables are; so are associated types.
const SHARED: usize = 52;

/// Names of types in a file's code that other files can use.
fn types(code: &str) -> Vec<String> {
    let item = r"(?m)^\s*pub(?:\([^)]*\))? (?:unsafe )?(?:struct|enum|trait|union|type) (\w+)";
    Regex::new(item).unwrap().captures_iter(code).map(|found| found[1].to_owned()).collect()
}

#[test]
fn names_of_types_are_shared_by_fewer() {
    let src = repository().join("src");
    let mut defined = BTreeMap::<String, BTreeSet<String>>::new();
    for path in files(&src) {
        let name = path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
        if !name.ends_with(".rs") || name.ends_with("/tests.rs") {
            continue;
        }
        for found in types(&code(&std::fs::read_to_string(&path).unwrap())) {
            defined.entry(found).or_default().insert(name.clone());
        }
    }
    assert!(defined.len() > 500, "{} types: does the rule still find them?", defined.len());
    defined.retain(|_, files| files.len() > 1);
    let told: Vec<String> = defined.iter().map(|(name, files)| format!("{name}: {files:?}")).collect();
    assert_eq!(
        told.len(),
        SHARED,
        "names with more than one meaning: for a new type take a name that says what it is; if there are fewer, lower the number\n{}",
        told.join("\n")
    );
}

#[test]
fn types_are_found_by_who_sees_them() {
    let text = "pub struct A;\n    pub(super) enum B {}\nstruct C;\npub unsafe trait D {}\npub(in crate::x) type E = u8;\n    type F = u8;\npub fn g() {}";
    assert_eq!(types(text), ["A", "B", "D", "E"]);
}
