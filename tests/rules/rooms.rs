//! Rooms depend only downwards: what the files of `src/` name of each other, against the order of docs/architecture.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use regex::Regex;

pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The rooms in the order of the table, from the top of the house to the ground floor: names of folders and files of `src/`.
fn order() -> Vec<String> {
    let text = std::fs::read_to_string(repository().join("docs/architecture.md"))
        .expect("the walk through the rooms");
    let row = Regex::new(r"^\| `(\w+)(?:/|\.rs)`").unwrap();
    let table = text.split("\n## ").next().expect("it begins with the table");
    table.lines().filter_map(|l| Some(row.captures(l)?[1].to_owned())).collect()
}

/// Every file of a folder.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found
}

/// The code that is built without tests: no comments, no module under `#[cfg(test)]`.
pub fn code(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines().map(|l| l.split("//").next().unwrap_or_default());
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            kept += line;
            kept.push('\n');
            continue;
        }
        let item = lines.by_ref().find(|l| !l.trim().starts_with("#[")).unwrap_or_default();
        if item.ends_with('{') {
            // As rustfmt leaves it: the brace that closes an item is the first at its indentation.
            let end = format!("{}}}", &item[..item.len() - item.trim_start().len()]);
            lines.by_ref().find(|l| l.trim_end() == end);
        }
    }
    kept
}

/// What follows `crate::` in paths: the first name of each.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, start) in code.match_indices("crate::") {
        let rest = &code[at + start.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.extend(first_name(rest));
            continue;
        };
        let (mut depth, mut from) = (0, 0);
        for (i, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                ',' | '}' if depth == 0 => {
                    found.extend(first_name(&group[from..i]));
                    from = i + 1;
                    if c == '}' {
                        break;
                    }
                }
                '}' => depth -= 1,
                _ => {}
            }
        }
    }
    found
}

fn first_name(path: &str) -> Option<String> {
    let path = path.trim_start();
    let end = path.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(path.len());
    (end > 0).then(|| path[..end].to_owned())
}

/// The names that a file of `room` may not use: rooms above it.
fn upward<'a>(order: &'a [String], room: &str, imports: &BTreeSet<String>) -> Vec<&'a str> {
    let own = order
        .iter()
        .position(|r| r == room)
        .unwrap_or_else(|| panic!("{room} is not in docs/architecture.md"));
    order[..own].iter().filter(|above| imports.contains(*above)).map(String::as_str).collect()
}

#[test]
fn rooms_depend_only_downwards() {
    let (src, order) = (repository().join("src"), order());
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for path in files(&src) {
        let inside = path.strip_prefix(&src).expect("below src");
        let name = inside.to_str().expect("UTF-8");
        if ["lib.rs", "main.rs"].contains(&name) || name.ends_with("/tests.rs") || !name.ends_with(".rs") {
            continue;
        }
        let room = name.split(['/', '.']).next().expect("a name");
        seen.insert(room.to_owned());
        let imports = imports(&code(&std::fs::read_to_string(&path).expect("a file")));
        wrong.extend(
            upward(&order, room, &imports).into_iter().map(|above| format!("src/{name} uses {above}")),
        );
    }
    assert!(wrong.is_empty(), "against the order of docs/architecture.md:\n{}", wrong.join("\n"));
    let told: BTreeSet<String> = order.iter().cloned().collect();
    assert_eq!(told.len(), order.len(), "a room is told twice");
    assert_eq!(told, seen, "the table and the folders of src/");
}

/// What the rule reads, it reads right: groups, nested groups, paths in the middle of code; no comments, no tests.
#[test]
fn imports_are_found_wherever_they_stand() {
    let text = "
use crate::{Error, plan::{self, memory}, tensor};
use crate::device::runtime::Runtime; // and crate::sim
fn f() -> crate::cache::PagePool { (crate::engine::g)() }
#[cfg(test)]
#[allow(unused)]
mod tests {
    fn h() {
    }
    use crate::cli;
}
use crate::text;
";
    let found = imports(&code(text));
    let found: Vec<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(found, ["Error", "cache", "device", "engine", "plan", "tensor", "text"]);
    let order: Vec<String> = ["engine", "plan", "device", "tensor"].map(str::to_owned).into();
    assert_eq!(upward(&order, "device", &imports(&code(text))), ["engine", "plan"]);
    assert_eq!(upward(&order, "engine", &imports(&code(text))), [""; 0]);
}

#[test]
fn the_picture_of_the_rooms_is_what_its_command_draws() {
    let draw = repository().join("scripts/draw-rooms");
    match std::process::Command::new("python3").arg(draw).arg("--check").output() {
        Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
        Err(e) => println!("skipped: the picture of the rooms is not drawn: python3: {e}"),
    }
}
