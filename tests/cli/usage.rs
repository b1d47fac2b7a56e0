//! The command line as scripts see it: exit codes, one sentence per error, clean standard output.

use std::process::Stdio;

use crate::support::command::{assert_error, json, run, stderr, stdout, tandem};

fn home() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn usage_errors_exit_with_2_and_one_sentence() {
    let home = home();
    for (line, want) in [
        ("frobnicate", "unrecognized subcommand"),
        ("generate --no-such-flag x", "unexpected argument '--no-such-flag'"),
        ("generate --temp hot x", "'--temp"),
        ("generate -n -1 x", "-1 is not in 0..=4294967295"),
        ("generate --top-p 1.5 x", "out of range"),
        ("generate --threads 0 x", "'--threads"),
        ("generate --device gpu x", "choose one of auto, cpu"),
        ("generate --strategy best x", "'best'"),
        ("generate --kv-type f8 x", "'f8'"),
        ("generate -f a.txt x", "cannot be used with"),
        ("generate --logprobs 3 x", "--json"),
        // Negative numbers are values, not options.
        ("generate --temp -1 x", "the temperature (0 to 100) is out of range"),
        ("generate --weights-node first x", "the numbers of nodes, like 1 or 1,2 or 1-3, or interleave"),
        ("generate --temp NaN x", "the temperature (0 to 100) is out of range"),
        ("generate --top-k -2 x", "-2 is not in -1..=4294967295"),
        ("generate --repeat-last-n -2 x", "-2 is not in -1..=4294967295"),
        ("generate --min-p -0.1 x", "out of range"),
        ("generate --seed -2 x", "a whole number from 0, or random, is wanted"),
        ("generate --threads -1 x", "-1 is not in 1..=1024"),
        ("generate --ctx -1 x", "'--ctx"),
        ("generate --gpu-memory -1G x", "a size is a number"),
        ("bench --gen -1", "-1 is not in"),
        ("bench --prompt -1", "-1 is not in"),
        ("inspect", "<MODEL>"),
        ("inspect a -m b", "cannot be used with"),
        ("help nosuch", "unrecognized subcommand 'nosuch'"),
        ("generate --raw --system s x", "cannot be used with"),
        ("perplexity", "<FILE>"),
        ("bench --batch 0", "'--batch"),
        ("bench --prompt 0 --gen 0", "nothing to measure"),
        ("pull", "<NAME>"),
        ("pull --list x", "cannot be used with"),
        ("pull nosuch", "no such model; known names are smollm2-135m"),
        ("-v -q doctor", "cannot be used with"),
    ] {
        let output = run(tandem(home.path()).args(line.split(' ')));
        assert_error(&output, 2, want);
    }
}

#[test]
fn devices_and_strategies_that_cannot_be_honoured_are_errors() {
    let home = home();
    for (line, want) in [
        ("--strategy neo", "--strategy neo: schedules many requests; use it with generate --prompts"),
        ("--device cpu --strategy gpu-only", "--strategy gpu-only: needs an accelerator"),
        ("--device emulated --strategy cpu-only", "--strategy cpu-only: runs on the CPU"),
        ("--device cpu --gpu-memory 6GiB", "--gpu-memory: this runs on the CPU"),
        ("--gpu-memory 0", "--gpu-memory: 0 bytes"),
        ("--gpu-memory many", "a size is a number"),
    ] {
        for command in ["generate -m nosuch x", "bench -m nosuch", "perplexity -m nosuch x"] {
            let words = command.split(' ').chain(line.split(' '));
            assert_error(&run(tandem(home.path()).args(words)), 2, want);
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_missed_before_anything_is_fetched() {
    let home = home();
    if tandem::device::check(&tandem::device::Kind::Cuda(0)).is_ok() {
        println!("skipped: this machine has a GPU");
        return;
    }
    for line in [
        "--device cuda",
        "--device cuda:1",
        "--strategy gpu-only",
        "--strategy helm",
        "--strategy lia",
        "--strategy stream",
        "--boundary 3",
        "--gpu-memory 6GiB",
    ] {
        let words = "generate -m nosuch x".split(' ').chain(line.split(' '));
        assert_error(&run(tandem(home.path()).args(words)), 1, "--device cuda: ");
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    let home = home();
    for line in ["--help", "--version", "generate --help", "pull -h", "help", "help bench"] {
        let output = run(tandem(home.path()).args(line.split(' ')));
        assert_eq!(output.status.code(), Some(0), "{line}");
        assert!(!stdout(&output).is_empty() && stderr(&output).is_empty(), "{line}");
    }
    let output = run(&mut tandem(home.path()));
    assert_eq!(output.status.code(), Some(2));
    assert!(stdout(&output).is_empty() && stderr(&output).contains("Usage:"));
    // Options stand where they belong.
    let help = stdout(&run(tandem(home.path()).args(["generate", "--help"])));
    let at = |option: &str| help.find(&format!("{option} ")).unwrap_or_else(|| panic!("{option}: {help}"));
    assert!(at("--json") < at("--verbose") && at("--verbose") < help.find("Sampling:").unwrap(), "{help}");
    assert!(help.find("Sampling:").unwrap() < at("--temp") && at("--temp") < help.find("Engine:").unwrap());
}

#[test]
fn an_empty_model_name_is_told() {
    let home = home();
    for line in [["generate", "-m", "", "x"], ["tokenize", "-m", " ", "x"]] {
        assert_error(&run(tandem(home.path()).args(line)), 2, "the model's name is empty");
    }
}

#[test]
fn doctor_reports_one_json_object() {
    let home = home();
    let report = json(&run(tandem(home.path()).args(["doctor", "--json", "--no-probe"])));
    assert_eq!(report["isa"]["tiers"][0]["name"], "reference");
    assert_eq!(report["isa"]["tiers"][0]["available"], true);
    assert!(report["cpu"]["threads"].as_u64().unwrap() >= 1);
    for tier in report["isa"]["tiers"].as_array().unwrap() {
        let explained = tier["available"] == true || tier["why_not"].is_string();
        assert!(explained, "{tier}");
    }
    assert_eq!(report["cache"]["home"], home.path().to_str().unwrap());
    let forced =
        run(tandem(home.path()).args(["doctor", "--json", "--no-probe"]).env("TANDEM_ISA", "reference"));
    assert_eq!(json(&forced)["isa"]["selected"], "reference");
    // A doctor must not die of what it should diagnose.
    let broken = run(tandem(home.path()).args(["doctor", "--json", "--no-probe"]).env("TANDEM_ISA", "mmx"));
    assert!(json(&broken)["isa"]["problem"].as_str().unwrap().contains("no such tier"));
}

#[test]
fn a_kernel_is_forced_by_its_name() {
    let home = home();
    let with = |isa: &str, kernel: &str| {
        let args = ["generate", "-v", "--device", "cpu", "-m", "synth:tiny-llama,seed=3", "-n", "3", "hi"];
        run(tandem(home.path()).args(args).env("TANDEM_ISA", isa).env("TANDEM_LINEAR", kernel))
    };
    let told = with("reference", "reference");
    let stderr = String::from_utf8_lossy(&told.stderr).into_owned();
    assert!(told.status.success(), "{stderr}");
    assert!(stderr.contains("TANDEM_LINEAR: reference multiplies"), "{stderr}");
    assert!(stderr.contains("products on the CPU: ") && stderr.contains(" by reference"), "{stderr}");
    assert_error(
        &with("reference", "vnni"),
        2,
        "TANDEM_LINEAR: no kernel of tier reference is called `vnni`; it has reference",
    );
    // Every way to an engine looks at it, and what is measured with it is not kept for runs without it.
    let forced = |args: &[&str], kernel: &str| {
        run(tandem(home.path()).args(args).env("TANDEM_ISA", "reference").env("TANDEM_LINEAR", kernel))
    };
    let tiny = "synth:tiny-llama,seed=3";
    let trace = ["bench", "-m", tiny, "--device", "emulated:t4-xeon", "--trace", "synthetic:8,4,2,0"];
    assert_error(&forced(&trace, "vnni"), 2, "TANDEM_LINEAR: no kernel");
    for args in [&["tune", "--quick"][..], &["profile", "-m", tiny, "--device", "cpu"]] {
        assert_error(&forced(args, "reference"), 2, "TANDEM_LINEAR: what reference alone takes is not kept");
    }
}

#[test]
fn doctor_measures_the_limits() {
    let home = home();
    let report = json(&run(tandem(home.path()).args(["doctor", "--json"])));
    for peak in report["limits"]["peaks"].as_array().unwrap() {
        assert!(peak["gop_s"].as_f64().unwrap() > 0.0, "{peak}");
    }
    match report["limits"]["read_gb_s"].as_f64() {
        Some(rate) => assert!(rate > 0.1, "{rate} GB/s"),
        None => println!("skipped: too little memory to measure bandwidth"),
    }
}

#[test]
fn a_closed_stdout_is_one_sentence_and_no_panic() {
    let home = home();
    // A pipe whose reader is gone.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = run(tandem(home.path()).args(["doctor", "--no-probe"]).stdout(writer.try_clone().unwrap()));
    assert_error(&output, 1, "stdout was closed");
    let output =
        run(tandem(home.path()).args(["-q", "doctor", "--no-probe"]).stdout(writer.try_clone().unwrap()));
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(1), ""));
    let output = run(tandem(home.path()).arg("--help").stdout(writer));
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(1), ""));
    // Closed from the start.
    let script = format!("exec {} doctor --no-probe >&-", env!("CARGO_BIN_EXE_tandem"));
    let output = run(std::process::Command::new("sh").args(["-c", &script]).env("TANDEM_HOME", home.path()));
    assert_error(&output, 1, "stdout was closed");
    let script = format!("exec {} --help >&-", env!("CARGO_BIN_EXE_tandem"));
    let output = run(std::process::Command::new("sh").args(["-c", &script]));
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(1), ""));
}

#[test]
fn a_full_stdout_is_one_sentence() {
    let home = home();
    let Ok(full) = std::fs::File::options().write(true).open("/dev/full") else {
        println!("skipped: no /dev/full");
        return;
    };
    let output = run(tandem(home.path()).args(["doctor", "--no-probe"]).stdout(full));
    assert_error(&output, 1, "stdout: ");
}

#[test]
fn a_closed_stderr_hurts_nobody() {
    let home = home();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = run(tandem(home.path()).args(["pull", "nosuch"]).stderr(writer).stdout(Stdio::piped()));
    assert_eq!(output.status.code(), Some(2));
}

/// A limit on the size of files is an error of the write, as a full disk is, and leaves nothing behind.
#[test]
fn a_file_that_may_not_grow_is_one_sentence() {
    let home = home();
    let to = home.path().join("steps.json");
    let tandem = env!("CARGO_BIN_EXE_tandem");
    let script = format!(
        "ulimit -f 8; exec {tandem} simulate --spec llama-2-7b --hardware t4-xeon --trace synthetic:50,10,20,0 --timeline {} >/dev/null",
        to.display()
    );
    let mut shell = std::process::Command::new("bash");
    let output = run(shell.args(["-c", &script]).env("TANDEM_HOME", home.path()));
    assert_error(&output, 1, "larger than a file may be here (ulimit -f)");
    assert!(
        std::fs::read_dir(home.path()).unwrap().flatten().all(|e| !e.path().is_file()),
        "nothing is left"
    );
}

/// More threads than cores would wait for each other.
#[test]
fn threads_beyond_the_cores_are_told_and_not_started() {
    let home = home();
    let args = "generate -m synth:tiny-llama --json -n 2 --threads 999 x";
    let output = run(tandem(home.path()).args(args.split(' ')));
    let said = stderr(&output);
    assert_eq!(said.matches("--threads 999: this process may use").count(), 1, "{said}");
    let threads = json(&output)["plan"]["threads"].as_u64().unwrap() as usize;
    assert!(threads <= std::thread::available_parallelism().unwrap().get(), "{threads}");
}

#[test]
fn the_whole_context_can_be_measured() {
    let home = home();
    for (args, code) in [
        ("--prompt 0 --depth 448 --gen 64", 0),
        ("--prompt 512 --gen 0", 0),
        ("--prompt 0 --depth 448 --gen 65", 2),
        ("--prompt 513 --gen 0", 2),
    ] {
        let line = format!("bench -m synth:tiny-llama,ctx=512 --repeat 1 {args}");
        let output = run(tandem(home.path()).args(line.split(' ')));
        assert_eq!(output.status.code(), Some(code), "{args}: {}", stderr(&output));
    }
}
