//! Files of one folder of `src/` do not import each other in a circle.
//!
//! The nodes of a folder are its modules, a file or a subfolder each; its `mod.rs` is their parent and no node. An
//! import of a name that a `mod.rs` re-exports counts as an import of the module where the name is defined. What a
//! module uses of its parents, and a parent of its submodules, is no edge: parents hold the types that submodules share.

use std::collections::{BTreeMap, BTreeSet};

use crate::rooms::{code, files, repository};

/// A path of modules and names, from the root of the crate.
type Name = Vec<String>;

#[derive(Default)]
struct Module {
    file: String,
    /// Every path of its code with at least two parts, as written.
    paths: Vec<Name>,
    /// What its `use` lines bring in: the name here, and the path as written.
    names: BTreeMap<String, Name>,
    /// Paths of which it brings in everything.
    globs: Vec<Name>,
}

/// Identifiers and punctuation, `::` as one token.
fn tokens(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let length = match word {
            0 if rest.starts_with("::") => 2,
            0 => first.len_utf8(),
            n => n,
        };
        if !first.is_whitespace() {
            found.push(&rest[..length]);
        }
        rest = &rest[length..];
    }
    found
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

impl Module {
    fn read(file: String, code: &str) -> Self {
        let mut module = Self { file, ..Self::default() };
        let tokens = tokens(code);
        let mut at = 0;
        while at < tokens.len() {
            if tokens[at] == "use" && tokens.get(at + 1) != Some(&"<") {
                at = module.tree(&tokens, at + 1, &[]);
            } else if is_name(tokens[at]) && tokens.get(at + 1) == Some(&"::") {
                let mut path = vec![tokens[at].to_owned()];
                at += 1;
                while tokens.get(at) == Some(&"::") && tokens.get(at + 1).is_some_and(|t| is_name(t)) {
                    path.push(tokens[at + 1].to_owned());
                    at += 2;
                }
                module.paths.push(path);
            }
            at += 1;
        }
        module
    }

    /// Reads the tree of a `use` from `at`, below `prefix`; returns the place behind it.
    fn tree(&mut self, tokens: &[&str], mut at: usize, prefix: &[String]) -> usize {
        let mut path = prefix.to_vec();
        while at < tokens.len() {
            match tokens[at] {
                "::" => {
                    at += 1;
                    continue;
                }
                "{" => {
                    at += 1;
                    while tokens[at] != "}" {
                        at = self.tree(tokens, at, &path);
                        if tokens[at] == "," {
                            at += 1;
                        }
                    }
                    return at + 1;
                }
                "*" => {
                    self.globs.push(path.clone());
                    self.paths.push(path);
                    return at + 1;
                }
                "self" if !path.is_empty() => at += 1,
                token if is_name(token) => {
                    path.push(token.to_owned());
                    at += 1;
                    if tokens[at] == "::" {
                        continue;
                    }
                }
                _ => break,
            }
            if tokens[at] != "::" {
                let mut name = path.last().cloned().unwrap_or_default();
                if tokens[at] == "as" {
                    name = tokens[at + 1].to_owned();
                    at += 2;
                }
                // `use x as _` brings in a trait without its name, which counts all the same.
                self.paths.push(path.clone());
                self.names.insert(name, path);
                return at;
            }
        }
        at
    }
}

/// Every module of the crate that is built without tests, by its path.
struct Crate(BTreeMap<Name, Module>);

impl Crate {
    /// From files with their path below `src/`.
    fn new<'a>(sources: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        let mut modules = BTreeMap::new();
        for (file, text) in sources {
            let inside = file.strip_suffix(".rs").expect("a Rust file");
            let mut name: Name = inside.split('/').map(str::to_owned).collect();
            if name.last().is_some_and(|n| n == "mod") || name == ["lib"] {
                name.pop();
            }
            modules.insert(name, Module::read(file.to_owned(), &code(&text)));
        }
        Self(modules)
    }

    /// The module that defines what `path`, written in the module `from`, names: `None` for other crates and locals.
    fn defines(&self, from: &[String], path: &[String], depth: usize) -> Option<Name> {
        let first = path.first()?;
        let (mut at, mut rest) = match first.as_str() {
            "crate" => (Name::new(), &path[1..]),
            "self" => (from.to_vec(), &path[1..]),
            "super" => {
                let ups = path.iter().take_while(|p| *p == "super").count();
                (from[..from.len().checked_sub(ups)?].to_vec(), &path[ups..])
            }
            _ => {
                let child = [from, std::slice::from_ref(first)].concat();
                if self.0.contains_key(&child) {
                    (child, &path[1..])
                } else {
                    return self.brought_in(from, path, depth);
                }
            }
        };
        while let Some(next) = rest.first() {
            let child = [at.as_slice(), std::slice::from_ref(next)].concat();
            if !self.0.contains_key(&child) {
                break;
            }
            (at, rest) = (child, &rest[1..]);
        }
        if rest.is_empty() {
            return Some(at);
        }
        Some(self.brought_in(&at, rest, depth).unwrap_or(at))
    }

    /// Where a name comes from that a `use` of the module `at` brings in.
    fn brought_in(&self, at: &[String], path: &[String], depth: usize) -> Option<Name> {
        let module = self.0.get(at)?;
        if depth > 8 {
            return None;
        }
        if let Some(source) = module.names.get(&path[0]) {
            if source[0] == path[0] && source.len() == 1 {
                return None;
            }
            return self.defines(at, &[source, &path[1..]].concat(), depth + 1);
        }
        None
    }

    /// For each folder, which of its modules import which, with an example of each: the file and the path as written.
    fn edges(&self) -> BTreeMap<Name, BTreeMap<(String, String), String>> {
        let mut folders = BTreeMap::<Name, BTreeMap<_, _>>::new();
        for (from, module) in &self.0 {
            for path in &module.paths {
                let Some(to) = self.defines(from, path, 0) else { continue };
                let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
                if let (Some(a), Some(b)) = (from.get(shared), to.get(shared)) {
                    folders
                        .entry(from[..shared].to_vec())
                        .or_default()
                        .entry((a.clone(), b.clone()))
                        .or_insert_with(|| format!("src/{} uses {}", module.file, path.join("::")));
                }
            }
        }
        folders
    }

    /// The circles of every folder, each a set of modules that reach each other: the folder, its modules in the circle, and an
    /// example of each import within.
    fn circles(&self) -> Vec<(String, String, String)> {
        let mut found = Vec::new();
        for (folder, edges) in self.edges() {
            let mut reach: BTreeSet<(String, String)> = edges.keys().cloned().collect();
            loop {
                let more: Vec<_> = reach
                    .iter()
                    .flat_map(|(a, b)| {
                        reach.iter().filter(move |(c, _)| c == b).map(|(_, d)| (a.clone(), d.clone()))
                    })
                    .filter(|pair| !reach.contains(pair))
                    .collect();
                if more.is_empty() {
                    break;
                }
                reach.extend(more);
            }
            let mutual = |a: &String, b: &String| {
                reach.contains(&(a.clone(), b.clone())) && reach.contains(&(b.clone(), a.clone()))
            };
            let nodes: BTreeSet<&String> = edges.keys().map(|(a, _)| a).collect();
            for node in &nodes {
                let circle: Vec<&String> = nodes.iter().copied().filter(|n| mutual(n, node)).collect();
                if circle.first() != Some(node) {
                    continue;
                }
                let within = edges.iter().filter(|((a, b), _)| circle.contains(&a) && circle.contains(&b));
                let told: Vec<String> = within.map(|((a, b), e)| format!("  {a} -> {b}: {e}")).collect();
                let members: Vec<&str> = circle.iter().map(|n| n.as_str()).collect();
                found.push((folder.join("/"), members.join(" "), told.join("\n")));
            }
        }
        found
    }
}

#[test]
fn modules_of_a_folder_import_each_other_in_no_circle() {
    let src = repository().join("src");
    let paths = files(&src);
    let inside = paths.iter().map(|p| p.strip_prefix(&src).unwrap().to_str().unwrap());
    let built = inside.filter(|n| n.ends_with(".rs") && !n.ends_with("tests.rs") && *n != "main.rs");
    let modules = Crate::new(built.map(|n| (n, std::fs::read_to_string(src.join(n)).unwrap())));
    let circles = modules.circles();
    let found: Vec<String> =
        circles.iter().map(|(folder, _, imports)| format!("src/{folder}\n{imports}")).collect();
    assert!(found.is_empty(), "modules that import each other in a circle:\n{}", found.join("\n"));
}

/// A circle is found through re-exports, subfolders, groups and paths in code; parents, tests and comments make none.
#[test]
fn circles_are_found_however_they_are_written() {
    let read = |sources: &[(&'static str, &str)]| {
        let sources: Vec<_> = sources.iter().map(|(file, text)| (*file, (*text).to_owned())).collect();
        Crate::new(sources).circles().into_iter().map(|(folder, ..)| folder).collect::<Vec<_>>()
    };
    let parent = ("a/mod.rs", "mod b;\nmod c;\npub use b::{B, deep::{D as E}};\nuse c::C;\n");
    let c = ("a/c.rs", "use super::B;\n");
    let deep = ("a/b/deep.rs", "pub struct D;\n");
    // b uses c by a path, c uses b by what the parent re-exports.
    let b = ("a/b/mod.rs", "pub mod deep;\nfn f() { super::c::g() }\n");
    assert_eq!(read(&[parent, b, c, deep]), ["a"]);
    // The same where the use is in b's submodule, and c names b's submodule by its other name.
    let b = ("a/b/mod.rs", "pub mod deep;\n");
    assert_eq!(read(&[parent, b, c, deep]), [""; 0]);
    let upward = ("a/b/deep.rs", "use crate::a::{self as up, c::{C}};\n");
    let named = ("a/c.rs", "use super::E as _;\n");
    assert_eq!(read(&[parent, b, named, upward]), ["a"]);
    // An imported module's items, three modules in a circle.
    let three = [
        ("a/mod.rs", "pub struct Shared;\n"),
        ("a/b.rs", "use super::c;\nuse super::Shared;\nfn f() { c::g() }\n"),
        ("a/c.rs", "use super::d::*;\n"),
        ("a/d.rs", "fn f() -> crate::a::b::B { B }\n"),
    ];
    assert_eq!(read(&three), ["a"]);
    // Tests, comments and parents.
    let none = [
        ("a/mod.rs", "mod b;\nmod c;\nuse b::B;\nuse c::C;\npub struct Shared;\n"),
        ("a/b.rs", "use super::{Shared, C};\n"),
        (
            "a/c.rs",
            "use super::Shared; // super::b\n#[cfg(test)]\nmod tests {\n    use super::super::b::B;\n}\n",
        ),
    ];
    assert_eq!(read(&none), [""; 0]);
}
