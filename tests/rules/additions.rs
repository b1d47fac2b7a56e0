//! What additions touch, by git: the table of docs/architecture.md names the last additions of each kind, with the files that each took.

use std::process::Command;

use regex::Regex;

use crate::rooms::repository;

/// Kinds of additions, and the files of which a commit that adds one, and only one, is an addition. Earlier ones may be missing in the
/// table, the last of a kind may not.
const KINDS: [(&str, &str); 4] = [
    ("a weight type", ":(glob)src/tensor/formats/*.rs"),
    ("a model family", ":(glob)src/model/arch/*.rs"),
    ("a strategy of placement", ":(glob)src/plan/choose/*.rs"),
    ("a machine's description", ":(glob)hardware/*.toml"),
];

struct Row {
    kind: String,
    subject: String,
    files: usize,
}

/// The rows `| kind | commit's subject | files | ...` below the heading of the last additions.
fn table(text: &str) -> Vec<Row> {
    let (_, part) =
        text.split_once("\n## What the last additions touched\n").expect("the section of additions");
    let part = part.split("\n## ").next().unwrap();
    let row = Regex::new(r"(?m)^\| (an? [^|]+?) \| ([^|]+?) \| (\d+) \|").unwrap();
    let rows = row.captures_iter(part);
    rows.map(|r| Row { kind: r[1].into(), subject: r[2].into(), files: r[3].parse().unwrap() }).collect()
}

/// What git says; `None` if it cannot.
fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").arg("-C").arg(repository()).args(args).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Files of the program and its kernels, without tests.
fn counts(file: &str) -> bool {
    !file.is_empty() && !file.ends_with("/tests.rs") && !file.contains("/tests/")
}

#[test]
fn the_last_additions_took_the_files_that_the_table_says() {
    let whole = git(&["rev-parse", "--is-shallow-repository"]);
    if whole.as_deref().map(str::trim) != Some("false") {
        println!("skipped: files of additions are not counted: no git, or not the whole history");
        return;
    }
    let text = std::fs::read_to_string(repository().join("docs/architecture.md")).unwrap();
    let rows = table(&text);
    assert!(rows.len() >= KINDS.len(), "{} rows", rows.len());
    let log = git(&["log", "--no-merges", "--format=%H %s"]).expect("a history");
    for Row { kind, subject, files } in &rows {
        assert!(KINDS.iter().any(|(known, _)| known == kind), "{kind}: no such kind");
        let commit = log.lines().find_map(|line| line.split_once(' ').filter(|(_, s)| s == subject));
        let (hash, _) = commit.unwrap_or_else(|| panic!("no commit is called {subject:?}"));
        let shown = git(&["show", "--format=", "--name-only", hash, "--", "src", "cuda", "hardware"]);
        let touched = shown.unwrap().lines().filter(|file| counts(file)).count();
        assert_eq!(touched, *files, "files of {subject:?}");
    }
    for (kind, path) in KINDS {
        let args = [
            "log",
            "--no-merges",
            "--no-renames",
            "--diff-filter=A",
            "--name-only",
            "--format=%x00%s",
            "--",
            path,
        ];
        let log = git(&args).unwrap();
        let last = log.split('\0').skip(1).find_map(added_one).expect("an addition");
        assert!(
            rows.iter().any(|row| row.kind == kind && row.subject == last),
            "the last addition of {kind} has no row in docs/architecture.md: {last:?}"
        );
    }
}

/// The subject of a commit that added one file, by `log --name-only`.
fn added_one(commit: &str) -> Option<&str> {
    let (subject, files) = commit.split_once('\n')?;
    (files.lines().filter(|file| !file.is_empty()).count() == 1).then_some(subject)
}

#[test]
fn rows_are_read_below_their_heading() {
    let text = "| a device | no | 3 |\n## What the last additions touched\n\n| kind | commit | files |\n|---|---|---|\n\
                | a weight type | Weight type: `x` | 12 | why |\n\n## Tests\n| a family | no | 4 |\n";
    let rows = table(&format!("\n{text}"));
    assert_eq!(rows.len(), 1);
    assert_eq!((&*rows[0].kind, &*rows[0].subject, rows[0].files), ("a weight type", "Weight type: `x`", 12));
    assert_eq!(added_one("A file\n\nsrc/a.rs\n"), Some("A file"));
    assert_eq!(added_one("A file becomes two\n\nsrc/a.rs\nsrc/b.rs\n"), None);
    assert!(counts("src/a.rs") && !counts("src/a/tests.rs") && !counts(""));
}
