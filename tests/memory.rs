//! What a run occupies: no more than model + KV + 15%.

mod support;

use std::process::Stdio;

use support::{smollm2, tandem};

/// Resident besides the model and its context, whatever their size: the binary (code, relocations, its
/// libraries), the tables of a tokenizer of 49 152 words, thread stacks, logits.
const FIXED: u64 = 24 << 20;

#[test]
#[cfg(target_os = "linux")]
fn generate_stays_within_the_models_size_and_fifteen_percent() {
    let Some(path) = smollm2() else { return };
    let home = tempfile::tempdir().unwrap();
    let mut command = tandem(home.path());
    command.args(["generate", "--json", "--raw", "-n", "64", "-m"]).arg(&path);
    command.arg("Once upon a time").stdout(Stdio::piped()).stderr(Stdio::null());
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
    let file = std::fs::metadata(&path).unwrap().len();
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
