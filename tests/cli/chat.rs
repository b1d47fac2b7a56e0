//! `tandem chat` without a terminal: each line of standard input is a turn or a command.

use std::io::Write;
use std::process::Stdio;

use crate::support::command::{assert_error, stderr, stdout, tandem};

fn talk(args: &str, lines: &str) -> std::process::Output {
    let home = tempfile::tempdir().unwrap();
    let mut child = tandem(home.path())
        .args(["chat", "-m", "synth:tiny-llama,ctx=512"])
        .args(args.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that has ended reads no more.
    let _ = child.stdin.take().unwrap().write_all(lines.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn each_line_is_a_turn_and_later_turns_compute_what_is_new() {
    // Random weights have no chat template: a turn of one message is continued, so each begins anew.
    let long = "x".repeat(100);
    let lines = format!("{long}\n/clear\n{long}\n/clear\n\"\"\"two\nlines\"\"\"\n/stats\n/bye\nnot read\n");
    let out = talk("-n 5 -v", &lines);
    assert!(out.status.success(), "{}", stderr(&out));
    let said = stdout(&out);
    let said: Vec<&str> = said.lines().collect();
    assert_eq!(said.len(), 4, "{said:?}");
    assert_eq!(said[0], said[1], "the same turn again");
    assert_eq!(said[0].split_whitespace().count(), 5);
    assert!(said[3].starts_with("3 turns; 209 prompt tokens, 96 of them were there"), "{}", said[3]);
    assert!(stderr(&out).contains("100 prompt tokens, 96 of them were there; 5 tokens"), "{}", stderr(&out));
}

#[test]
fn what_goes_wrong_ends_the_program_where_nobody_sits() {
    assert_error(&talk("", "/frobnicate\nhi\n"), 2, "no such command");
    assert_error(&talk("--system brief --load talk.json", "hi\n"), 2, "cannot be used with");
    assert_error(&talk("", "/set temp hot\n"), 2, "a number is wanted");
    assert_error(&talk("", "/load /nonexistent/talk.json\n"), 1, "/nonexistent/talk.json");
    assert_error(
        &talk("--ctx 40", &format!("{}\n", "x".repeat(50))),
        1,
        "a prompt of 50 tokens does not fit the context of 40; raise --ctx",
    );
    assert_error(&talk("--strategy neo", "hi\n"), 2, "schedules many requests");
}

#[test]
fn a_conversation_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    let out = talk("-n 3", &format!("hello\n/save {}\n", file.display()));
    assert!(out.status.success(), "{}", stderr(&out));
    let messages: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!((&messages[0]["role"], &messages[0]["content"]), (&"user".into(), &"hello".into()));
    assert_eq!(messages[1]["role"], "assistant");
    assert_eq!(messages[1]["content"].as_str().unwrap().trim_end(), stdout(&out).trim_end());
}
