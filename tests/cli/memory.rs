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
    let Some(path) = smollm2() else { return };
    stays_within(&path, &["-n", "64", "Once upon a time"]);
}

/// A long prompt reads rows all over the embedding, which is packed as the head and mapped for its rows.
#[test]
#[cfg(target_os = "linux")]
fn a_long_prompt_stays_within_the_models_size_and_fifteen_percent() {
    let prompt = concat!(env!("CARGO_MANIFEST_DIR"), "/LICENSE-APACHE");
    for path in [smollm2(), gemma3()].into_iter().flatten() {
        stays_within(&path, &["--ctx", "4096", "-n", "4", "-f", prompt]);
    }
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
