//! What a run occupies: no more than model + KV + 15%.

use std::process::Stdio;

use crate::support::command::tandem;
use crate::support::models::{gemma3, smollm2};

/// Resident besides the model and its context, whatever their size: the binary (code, relocations, its
/// libraries), the tables of a tokenizer of 49 152 words, thread stacks, logits.
const FIXED: u64 = 24 << 20;

#[test]
#[cfg(target_os = "linux")]
fn a_short_prompt_stays_within_the_models_size_and_fifteen_percent() {
    if !alone("a_short_prompt_stays_within_the_models_size_and_fifteen_percent") {
        return;
    }
    let Some(path) = smollm2() else { return };
    stays_within(&path, &["-n", "64", "Once upon a time"]);
}

/// A long prompt reads rows all over the embedding, which is packed as the head and mapped for its rows.
#[test]
#[cfg(target_os = "linux")]
fn a_long_prompt_stays_within_the_models_size_and_fifteen_percent() {
    if !alone("a_long_prompt_stays_within_the_models_size_and_fifteen_percent") {
        return;
    }
    let prompt = concat!(env!("CARGO_MANIFEST_DIR"), "/LICENSE-APACHE");
    for path in [smollm2(), gemma3()].into_iter().flatten() {
        stays_within(&path, &["--ctx", "4096", "-n", "4", "-f", prompt]);
    }
}

/// Whether this process runs this test and no other; if not, runs it in one that does.
///
/// Linux counts the peak of the process that forks into that of the child (`exec` keeps the peak of the memory it
/// leaves): a child of a process in which other tests have loaded models reports their size.
#[cfg(target_os = "linux")]
fn alone(test: &str) -> bool {
    const ALONE: &str = "TANDEM_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let name = format!("memory::{test}");
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let out = command.args([&name, "--exact", "--nocapture"]).env(ALONE, "1").output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("1 passed"), "{name}: {text}");
    text.lines().filter(|l| l.starts_with("peak") || l.starts_with("skipped")).for_each(|l| println!("{l}"));
    false
}

#[cfg(target_os = "linux")]
fn stays_within(path: &std::path::Path, arguments: &[&str]) {
    let home = tempfile::tempdir().unwrap();
    let mut command = tandem(home.path());
    command.args(["generate", "--json", "--raw", "-m"]).arg(path).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    #[allow(clippy::zombie_processes, reason = "wait4 below waits for it")]
    let mut child = command.spawn().unwrap();
    let mut out = String::new();
    std::io::Read::read_to_string(child.stdout.as_mut().unwrap(), &mut out).unwrap();
    // The peak of this child alone: wait4 reports it, where getrusage would mix in all children of the process.
    let mut status = 0;
    // SAFETY: a zeroed rusage is a valid one, and both pointers live through the call.
    let (pid, usage) = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        (libc::wait4(child.id() as i32, &mut status, 0, &mut usage), usage)
    };
    assert_eq!((pid, status), (child.id() as i32, 0), "the run succeeded");
    let report: serde_json::Value = serde_json::from_str(&out).unwrap();
    let planned = |what: &str| report["plan"]["memory"][what].as_u64().unwrap();
    let file = std::fs::metadata(path).unwrap().len();
    let resident = usage.ru_maxrss as u64 * 1024;
    let allowed = (file + planned("kv")) * 115 / 100 + FIXED;
    let mb = |b: u64| b as f64 / 1e6;
    println!(
        "peak {:.1} MB; file {:.1}, KV {:.1}, planned {:.1}; allowed {:.1}; first token after {} ms",
        mb(resident),
        mb(file),
        mb(planned("kv")),
        mb(planned("weights") + planned("kv") + planned("activations")),
        mb(allowed),
        report["timings"]["ttft_ms"]
    );
    assert!(resident <= allowed, "{:.1} MB resident, {:.1} allowed", mb(resident), mb(allowed));
}
