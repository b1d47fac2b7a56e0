//! Paths in comments and documents name files and folders that exist.
//!
//! A path is a name that ends in `.rs`, `.cu`, `.cuh`, `.h`, `.cpp`, `.md` or `.py`, or begins with a folder of the repository. It holds if it
//! is the end of some file's or folder's path (`engine/mod.rs` for `src/engine/mod.rs`), or the beginning of a name in its folder up to
//! a `-`, `_` or `.` (`docs/decisions/0036`). `*` stands for anything within a name, `{a,b}` for either.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;

use crate::rooms::{files, repository};

/// Folders whose files are read, and whose files can be named.
const FOLDERS: [&str; 13] = [
    "benches", "build", "cuda", "docs", "examples", "fuzz", "hardware", "loom", "ptx", "scripts", "specs",
    "src", "tests",
];

/// Names that are not files of this repository: of other programs and libraries, of what a command makes, and placeholders.
const FOREIGN: [&str; 12] = [
    "llama.cpp",
    "Llama.cpp",
    "mkl_cblas.h",
    "mkl_service.h",
    "ggml-common.h",
    "gguf-py/gguf/quants.py",
    "lexer.py",
    // What the GPU bundle writes.
    "results.md",
    "cuda/NAME.cu",
    // What the fuzzer writes.
    "fuzz/corpus/",
    "fuzz/artifacts/TARGET/",
    "fuzz/artifacts/TARGET/crash-",
];

/// The paths of all files and folders from the root, each with its shorter forms: without its first folders.
struct Tree(BTreeSet<String>);

impl Tree {
    fn new<'a>(files: impl Iterator<Item = &'a str>) -> Tree {
        let mut ends = BTreeSet::new();
        for file in files {
            let parts: Vec<&str> = file.split('/').collect();
            for from in 0..parts.len() {
                for to in from + 1..=parts.len() {
                    ends.insert(parts[from..to].join("/"));
                }
            }
        }
        Tree(ends)
    }

    fn has(&self, path: &str) -> bool {
        let path = path.trim_start_matches("../").trim_start_matches("./").trim_end_matches('/');
        if let Some((before, rest)) = path.split_once('{') {
            let Some((names, after)) = rest.split_once('}') else { return false };
            return names.split(',').all(|name| self.has(&format!("{before}{name}{after}")));
        }
        if path.contains('*') {
            let pattern = regex::escape(path).replace(r"\*", "[^/]*");
            let pattern = Regex::new(&format!("^{pattern}$")).unwrap();
            return self.0.iter().any(|p| pattern.is_match(p));
        }
        let longer = |p: &String| p.strip_prefix(path).is_some_and(|rest| rest.starts_with(['-', '_', '.']));
        self.0.contains(path)
            || path.contains('/')
                && self.0.range(path.to_owned()..).take_while(|p| p.starts_with(path)).any(longer)
    }
}

/// The comments of a file; of a document all of it.
fn prose<'a>(name: &str, text: &'a str) -> Vec<(usize, &'a str)> {
    static COMMENT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?:^|\s)//").unwrap());
    let lines = (1..).zip(text.lines());
    if name.ends_with(".md") {
        return lines.collect();
    }
    lines.filter_map(|(n, line)| Some((n, &line[COMMENT.find(line)?.start()..]))).collect()
}

/// The paths that a line names.
fn paths(line: &str) -> Vec<&str> {
    static PATH: LazyLock<Regex> = LazyLock::new(|| {
        let file = r"[\w./*{},-]*[\w*}]\.(?:rs|cuh|cu|cpp|h|md|py)\b";
        let folder = format!(r"\b(?:{})/[\w./*{{}},-]*", FOLDERS.join("|"));
        Regex::new(&format!("{file}|{folder}")).unwrap()
    });
    static WEB: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"https?://\S*").unwrap());
    let urls: Vec<_> = WEB.find_iter(line).map(|url| url.range()).collect();
    let found = PATH.find_iter(line).filter(|m| !urls.iter().any(|url| url.contains(&m.start())));
    // A folder inside a longer name (`.cuda/`, `target/docs/`) is not the repository's.
    let whole = found.filter(|m| !line[..m.start()].ends_with(['/', '.', '-']));
    whole.map(|m| m.as_str().trim_end_matches(['.', ','])).collect()
}

fn below(root: &Path) -> Vec<String> {
    let mut all: Vec<_> = FOLDERS.iter().flat_map(|folder| files(&root.join(folder))).collect();
    all.extend(
        std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file()),
    );
    all.iter().map(|path| path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()).collect()
}

#[test]
fn paths_in_comments_and_documents_exist() {
    let root = repository();
    let all = below(root);
    let tree = Tree::new(all.iter().map(String::as_str));
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for name in &all {
        if ![".rs", ".cu", ".cuh", ".h", ".cpp", ".md"].iter().any(|end| name.ends_with(end)) {
            continue;
        }
        for (n, line) in prose(name, &std::fs::read_to_string(root.join(name)).unwrap()) {
            for path in paths(line) {
                seen += 1;
                if !FOREIGN.contains(&path) && !tree.has(path) {
                    wrong.push(format!("{name}:{n}: {path}"));
                }
            }
        }
    }
    assert!(seen > 500, "{seen} paths are named: does the rule still find them?");
    assert!(wrong.is_empty(), "there is no such file or folder:\n{}", wrong.join("\n"));
}

#[test]
fn paths_are_found_and_looked_up() {
    let line = "// see `engine/mod.rs`, cuda/{norm,rope}.cu and tests/gpu/kernels/ (docs/decisions/0036); llama.cpp, https://a.b/c.md, .cuda/.";
    let found = paths(line);
    let named =
        ["engine/mod.rs", "cuda/{norm,rope}.cu", "tests/gpu/kernels/", "docs/decisions/0036", "llama.cpp"];
    assert_eq!(found, named);
    let files = [
        "src/engine/mod.rs",
        "cuda/norm.cu",
        "cuda/rope_append.cu",
        "tests/gpu/kernels/gemm.rs",
        "docs/decisions/0036-copies.md",
    ];
    let tree = Tree::new(files.into_iter());
    let has: Vec<bool> = found.iter().map(|path| tree.has(path)).collect();
    assert_eq!(has, [true, false, true, true, false], "{found:?}: there is no rope.cu");
    for (path, there) in [
        ("gemm.rs", true),
        ("emm.rs", false),
        ("cuda/rope*.cu", true),
        ("cuda/gemm*.cu", false),
        ("docs/decisions/003", false),
        ("../cuda/norm.cu", true),
        ("norm", false),
    ] {
        assert_eq!(tree.has(path), there, "{path}");
    }
    assert_eq!(prose("a.rs", "let url = \"https://a/b.md\"; // of norm.cu"), [(1, " // of norm.cu")]);
}
