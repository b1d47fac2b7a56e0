//! `tandem simulate`: what scripts and readers see of it.

use std::path::Path;
use std::process::Stdio;

use crate::support::command::{assert_error, json, run, stderr, stdout, tandem};
use serde_json::Value as Json;

fn simulated(line: &str) -> std::process::Output {
    let home = tempfile::tempdir().unwrap();
    run(tandem(home.path()).arg("simulate").args(line.split(' ')))
}

const MACHINE: &str = "--spec llama-2-7b --hardware t4-xeon";

#[test]
fn json_has_every_strategy_with_its_figures() {
    let report =
        json(&simulated(&format!("{MACHINE} --trace synthetic:100,20,30,2 --gpu-memory 14GiB --json")));
    let all = report["strategies"].as_array().unwrap();
    let names: Vec<_> = all.iter().map(|s| s["strategy"].as_str().unwrap()).collect();
    assert_eq!(names, ["gpu-only", "fastdecode", "neo", "apex", "auto"]);
    for s in all {
        let number = |v: &Json| v.as_f64().unwrap_or_else(|| panic!("{v} in {s}"));
        for key in ["throughput_tok_s", "steady_tok_s", "makespan_s"] {
            assert!(number(&s[key]) > 0.0, "{s}");
        }
        let tokens = number(&s["throughput_tok_s"]) * number(&s["makespan_s"]);
        assert!((tokens - 600.0).abs() < 1e-6, "{s}");
        for p in ["p50", "p90", "p99"] {
            assert!(number(&s["ttft_s"][p]) > 0.0, "{s}");
            let (gpu, host) = (&s["tpot_s"]["gpu"][p], &s["tpot_s"]["host"][p]);
            assert!(gpu.is_number() || host.is_number(), "{s}");
        }
        for key in ["gpu_busy", "cpu_busy"] {
            assert!((0.0..=1.0).contains(&number(&s[key])), "{s}");
        }
        assert_eq!(
            (s["requests"]["finished"].as_u64(), s["requests"]["failed"].as_u64()),
            (Some(30), Some(0))
        );
    }
    assert!(
        all[1]["tpot_s"]["gpu"]["p50"].is_null() && all[1]["cpu_busy"].as_f64() > Some(0.0),
        "{}",
        all[1]
    );
}

#[test]
fn the_same_seed_says_the_same_and_the_table_names_everybody() {
    let line = format!("{MACHINE} --trace synthetic:50..200,5..30,40,5 --strategy neo,gpu-only,neo --seed 3");
    let (a, b) = (simulated(&line), simulated(&line));
    let text = stdout(&a);
    assert_eq!(text, stdout(&b));
    assert_eq!(text.matches("\nneo ").count(), 1, "named twice, run once: {text}");
    assert!(text.contains("gpu-only") && text.contains("1.00x") && !text.contains("fastdecode"), "{text}");
    assert_ne!(text, stdout(&simulated(&line.replace("--seed 3", "--seed 4"))));
}

fn trace(text: &str, rest: &str) -> std::process::Output {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("t.csv");
    std::fs::write(&path, text).unwrap();
    run(tandem(home.path())
        .arg("simulate")
        .args(MACHINE.split(' '))
        .arg("--trace")
        .arg(&path)
        .args(rest.split(' ')))
}

#[test]
fn bad_rows_fail_one_by_one_and_the_rest_go_on() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,5\n-1,10,5\n1,0,5\n2,20,6\n3,9999,3\n";
    let out = trace(text, "--strategy gpu-only --json");
    let said = stderr(&out);
    assert!(said.contains("line 3, column TIMESTAMP: -1 is a negative time"), "{said}");
    assert!(said.contains("line 4, column ContextTokens: 0 tokens"), "{said}");
    assert!(said.contains("1 of 3 requests were cut to the context of 4096 tokens"), "{said}");
    let report = json(&out);
    let requests = &report["strategies"][0]["requests"];
    assert_eq!(requests["finished"].as_u64().unwrap() + requests["failed"].as_u64().unwrap(), 5, "{report}");
    assert!(requests["failed"].as_u64().unwrap() >= 2, "{report}");
}

#[test]
fn what_makes_no_sense_is_told_in_a_sentence() {
    for (line, want) in [
        ("--trace synthetic:1,2,3", "3 values, wanted 4"),
        ("--trace synthetic:1,2,3,0 --strategy helm", "choose some of gpu-only, fastdecode, neo, apex, auto"),
        ("--trace synthetic:1,2,3,0 --rate -1", "--rate -1.0: requests per second; wanted"),
        ("--trace synthetic:1,2,3,0 --rate nan", "--rate NaN: requests per second; wanted"),
        ("--trace synthetic:1,2,3,0 --gpu-memory 0", "--gpu-memory: 0 bytes"),
        ("--trace synthetic:1,2,3,0 --plot x.png", "wanted the name of an .svg file"),
        ("--trace synthetic:1,2,3,0 --limit 0", "invalid value '0'"),
    ] {
        let out = simulated(&format!("{MACHINE} {line}"));
        assert_error(&out, 2, want);
    }
    let out = simulated(&format!("{MACHINE} --trace synthetic:1,2,3,0 --gpu-memory 4GiB --boundary 0"));
    assert_error(&out, 1, "weights and activations take");
    assert_error(&simulated(&format!("{MACHINE} --trace /nonexistent.csv")), 1, "/nonexistent.csv");
}

/// File, line and column, whatever is wrong.
#[test]
fn a_trace_that_is_none_is_told_with_its_file_and_line() {
    let rows = |rows: &str| trace(&format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n"), "--json");
    for (out, want) in [
        (trace("", "--json"), "t.csv: is empty"),
        (trace("a,b\n1,2\n", "--json"), "t.csv: line 1: no column of prompt lengths: the header is \"a,b\""),
        (trace("ContextTokens,GeneratedTokens\n", "--json"), "t.csv: has a header and no rows"),
        (rows("0,0,5"), "t.csv: no good row; line 2, column ContextTokens: 0 tokens"),
        (rows("-1,10,5"), "t.csv: no good row; line 2, column TIMESTAMP: -1 is a negative time"),
        (rows("nan,10,5"), "line 2, column TIMESTAMP: nan is no number of seconds"),
        (rows("1e300,10,5"), "line 2, column TIMESTAMP: 1e300 is no number of seconds"),
        (rows("0,99999999999999999999,5"), "line 2, column ContextTokens: \"99999999999999999999\""),
        (rows("0,5,-3"), "line 2, column GeneratedTokens: \"-3\""),
        (rows("0,5"), "line 2, column GeneratedTokens"),
    ] {
        assert_error(&out, 1, want);
    }
}

/// Special files that never end, binary ones, and a pipe.
#[test]
fn a_file_without_an_end_is_refused_and_a_pipe_is_read() {
    let text = "is longer than 65536 bytes; is this a CSV file?";
    for file in ["/dev/zero", "/dev/full", "/proc/self/exe"] {
        let begun = std::time::Instant::now();
        assert_error(&simulated(&format!("{MACHINE} --trace {file} --json")), 1, "line 1");
        assert!(begun.elapsed().as_secs() < 20, "{file}: {:?}", begun.elapsed());
    }
    assert_error(&simulated(&format!("{MACHINE} --trace /dev/zero --json")), 1, text);
    assert_error(&simulated(&format!("{MACHINE} --trace /dev/null --json")), 1, "/dev/null: is empty");
    let piped = |text: Vec<u8>| {
        let home = tempfile::tempdir().unwrap();
        let mut command = tandem(home.path());
        command.arg("simulate").args(MACHINE.split(' '));
        command.args(["--trace", "/dev/stdin", "--strategy", "gpu-only", "--json"]);
        let streams = [Stdio::piped(), Stdio::piped(), Stdio::piped()];
        let [stdin, stdout, stderr] = streams;
        let mut child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn().unwrap();
        // Who refuses a file reads no more of it.
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), &text).ok();
        child.wait_with_output().unwrap()
    };
    let report = json(&piped(b"ContextTokens,GeneratedTokens\n10,5\n20,6\n".to_vec()));
    assert_eq!(report["strategies"][0]["requests"]["finished"], 2, "{report}");
    assert_error(&piped(vec![b'x'; 1 << 20]), 1, text);
    assert_error(&piped([0xff, 0xfe, 0, b'\n'].repeat(1000)), 1, "no column of prompt lengths");
}

/// A machine's description with a number that is none.
#[test]
fn machines_that_cannot_be_are_told_with_the_field() {
    let home = tempfile::tempdir().unwrap();
    let good =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/hardware/t4-xeon.toml")).unwrap();
    let path = home.path().join("box.toml");
    let at = |text: &[u8]| {
        std::fs::write(&path, text).unwrap();
        let line = format!("--spec llama-2-7b --hardware {} --trace synthetic:1,2,3,0", path.display());
        simulated(&line)
    };
    assert_eq!(at(good.as_bytes()).status.code(), Some(0));
    let line = good.lines().find(|l| l.starts_with("read_bw")).expect("a bandwidth");
    for (number, want) in [
        ("nan", "box.toml: cpu.read_bw: NaN, wanted bytes/s"),
        ("-nan", "box.toml: cpu.read_bw: NaN, wanted bytes/s"),
        ("inf", "box.toml: cpu.read_bw: inf, wanted bytes/s"),
        ("-45e9", "box.toml: cpu.read_bw: -45000000000, wanted bytes/s"),
        ("0", "box.toml: cpu.read_bw: 0, wanted bytes/s"),
        ("\"fast\"", "box.toml: cpu.read_bw: a string, wanted bytes/s"),
        ("1e999", "is not TOML: floating-point number overflowed"),
        ("[", "box.toml: line "),
    ] {
        assert_error(&at(good.replace(line, &format!("read_bw = {number}")).as_bytes()), 1, want);
    }
    assert_error(&at(b"\xff\xfe\0"), 1, "box.toml: not UTF-8 text");
    assert_error(&at(&vec![b'#'; (1 << 20) + 1]), 1, "1048577 bytes, at most 1048576");
    assert_error(
        &simulated("--spec llama-2-7b --hardware /dev/zero --trace synthetic:1,2,3,0"),
        1,
        "/dev/zero: a device",
    );
}

#[test]
fn made_up_requests_that_make_no_sense_are_told() {
    for (source, want) in [
        ("1,2,3,nan", "RATE: \"nan\" requests per second"),
        ("1,2,3,inf", "RATE: \"inf\""),
        ("1,2,3,-1", "RATE: \"-1\""),
        ("0,2,3,0", "IN: \"0\" tokens"),
        ("1,9..2,3,0", "OUT: 9..2 tokens: the first number is larger"),
        ("1,2,1000000000000000000,0", "N: \"1000000000000000000\" requests"),
        ("1,2,1e18,0", "N: \"1e18\" requests; wanted a whole number from 1 to 4000000"),
        ("1,2,0,0", "N: \"0\" requests"),
        ("1,2,-3,0", "N: \"-3\" requests"),
        ("1,-2,3,0", "OUT: \"-2\" tokens"),
        ("1e9,2,3,0", "IN: \"1e9\" tokens"),
        ("99999999,2,3,0", "IN: \"99999999\" tokens"),
        ("1,2,3,1e300", "RATE: \"1e300\""),
        ("1,2,99999999999,0", "N: \"99999999999\" requests"),
    ] {
        assert_error(&simulated(&format!("{MACHINE} --trace synthetic:{source}")), 2, want);
    }
}

#[test]
fn a_timeline_shows_a_few_steps_of_each_strategy_and_changes_no_figure() {
    let home = tempfile::tempdir().unwrap();
    let line = "--trace synthetic:100,60,60,0 --gpu-memory 14GiB --strategy gpu-only,neo,apex --json";
    let with = |name: &str, rest: &str| {
        let path = home.path().join(name);
        let mut command = tandem(home.path());
        command.arg("simulate").args(MACHINE.split(' ')).args(line.split(' '));
        let out = run(command.arg("--timeline").arg(&path).args(rest.split_whitespace()));
        (out, path)
    };
    let (out, path) = with("t.json", "--timeline-steps 4");
    assert_eq!(json(&out), json(&simulated(&format!("{MACHINE} {line}"))));
    let events: Vec<Json> = serde_json::from_str(&read(&path)).unwrap();
    let named = |e: &&Json| e["name"] == "process_name";
    let names: Vec<_> = events.iter().filter(named).map(|e| e["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["gpu-only", "neo", "apex"]);
    for pid in 1..=3 {
        let of = || events.iter().filter(move |e| e["pid"] == pid && e["ph"] == "X");
        let steps = of().map(|e| e["args"]["step"].as_u64().unwrap()).max().unwrap() + 1;
        assert_eq!(steps, 4, "{pid}");
        // Every layer is multiplied in every step, and no lane does two things at a time.
        assert!(of().filter(|e| e["args"]["layer"] == 31).count() >= 4, "{pid}");
        for tid in 0..4 {
            let mut spans: Vec<(f64, f64)> = of()
                .filter(|e| e["tid"] == tid)
                .map(|e| (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap()))
                .collect();
            spans.sort_by(|a, b| a.0.total_cmp(&b.0));
            for w in spans.windows(2) {
                assert!(w[0].0 + w[0].1 <= w[1].0 + 1e-3, "{pid}, lane {tid}: {w:?}");
            }
        }
    }
    // The CPU attends for neo and for apex, not for gpu-only.
    let host =
        |pid: u64| events.iter().filter(|e| e["pid"] == pid && e["tid"] == 3 && e["ph"] == "X").count();
    assert!(host(1) == 0 && host(2) > 0 && host(3) > 0, "{} {} {}", host(1), host(2), host(3));
    let (out, path) = with("t.svg", "--timeline-from 0.5");
    assert!(out.status.success(), "{}", stderr(&out));
    let svg = read(&path);
    assert!(svg.starts_with("<svg") && svg.contains("(c)  apex") && svg.contains(">step 1<"), "{svg}");
}

#[test]
fn timelines_that_make_no_sense_are_told() {
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let line = format!("{MACHINE} --trace synthetic:10,5,4,0 --strategy gpu-only");
    for (rest, code, want) in [
        ("--timeline t.txt".to_owned(), 2, "ends in .json"),
        ("--timeline-from 3".into(), 2, "--timeline"),
        (format!("--timeline {} --timeline-from nan", file("t.svg")), 2, "\"nan\" is no time"),
        (format!("--timeline {} --timeline-from 1e6", file("t.svg")), 2, "every run is over before"),
        (format!("--timeline {} --timeline-steps 0", file("t.svg")), 2, "0"),
        (format!("--timeline {}", file("missing/t.svg")), 1, "missing"),
        (format!("--plot {}", file("missing/p.svg")), 1, "missing"),
    ] {
        assert_error(&simulated(&format!("{line} {rest}")), code, want);
    }
    assert!(!home.path().join("t.svg").exists());
}

#[test]
fn the_picture_is_an_svg_with_a_line_for_each_strategy() {
    let home = tempfile::tempdir().unwrap();
    for (i, source) in ["synthetic:60,16,20,0", "synthetic:60,16,20,1"].iter().enumerate() {
        let path = home.path().join(format!("{i}.svg"));
        let mut command = tandem(home.path());
        command.arg("simulate").args(MACHINE.split(' ')).args([
            "--trace",
            source,
            "--strategy",
            "gpu-only,apex",
            "--plot",
        ]);
        let out = run(command.arg(&path));
        assert!(out.status.success(), "{}", stderr(&out));
        let svg = read(&path);
        assert!(svg.starts_with("<svg") && svg.matches("<polyline").count() >= 2, "{svg}");
        let axis = if i == 0 { "throughput over gpu-only" } else { "requests per second" };
        assert!(svg.contains(axis) && svg.contains("apex"), "{svg}");
        assert_eq!(svg.contains("requests of the GPU, of the host"), i == 1);
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Keys and values in 8 bits: almost twice the tokens on either side, and more answers of long requests.
#[test]
fn eight_bits_make_room_for_more_requests() {
    let home = tempfile::tempdir().unwrap();
    let with = |kv: &str| {
        let line = "simulate --spec llama-3.1-8b --hardware a10g-g5 --strategy gpu-only,neo --json --trace synthetic:4000,300,80,0 --kv-type";
        json(&run(tandem(home.path()).args(line.split(' ')).arg(kv)))
    };
    let (bf16, q8) = (with("bf16"), with("q8"));
    assert_eq!((&bf16["kv_type"], &q8["kv_type"]), (&"bf16".into(), &"q8".into()));
    for side in ["gpu", "host"] {
        let tokens = |of: &Json| of["kv_tokens"][side].as_f64().unwrap();
        let ratio = tokens(&q8) / tokens(&bf16);
        // 256 bytes and 132 of a head of 128, on either side of a page.
        assert!((ratio - 256.0 / 132.0).abs() < 0.02, "{side}: {ratio}");
    }
    for strategy in 0..2 {
        let rate = |of: &Json| of["strategies"][strategy]["throughput_tok_s"].as_f64().unwrap();
        assert!(rate(&q8) > 1.02 * rate(&bf16), "{strategy}: {} and {}", rate(&q8), rate(&bf16));
    }
}

/// The workspace of all requests is sized by the longest that the GPU can hold.
#[test]
fn one_request_of_any_length_takes_no_memory_from_the_others() {
    let at = |rows: &str| {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.csv");
        std::fs::write(&path, format!("input_tokens,output_tokens\n{rows}")).unwrap();
        let line = "simulate --spec llama-3.1-8b --hardware a10g-g5 --strategy gpu-only --json --trace";
        run(tandem(home.path()).args(line.split(' ')).arg(&path))
    };
    let (short, both) = (at("10,5\n"), at("130000,5\n10,5\n"));
    assert!(stderr(&both).contains("1 of 2 requests are longer than the GPU can hold"), "{}", stderr(&both));
    let (short, both) = (json(&short), json(&both));
    assert!(short["kv_tokens"]["gpu"].as_u64().unwrap() > 50_000, "{short}");
    assert_eq!(short["kv_tokens"], both["kv_tokens"], "{both}");
    let requests = &both["strategies"][0]["requests"];
    assert_eq!((&requests["finished"], &requests["failed"]), (&1.into(), &1.into()), "{requests}");
    // One that the GPU can hold has its workspace.
    let long = json(&at("30000,5\n10,5\n"));
    assert_eq!(long["strategies"][0]["requests"]["failed"], 0, "{long}");
}

/// A strategy that failed requests did other work than one that served them.
#[test]
fn no_gain_is_given_over_a_run_with_other_failures() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("t.csv");
    std::fs::write(&path, "input_tokens,output_tokens\n60000,5\n10,5\n").unwrap();
    let line = "simulate --spec llama-3.1-8b --hardware a10g-g5 --strategy gpu-only,vllm,auto --trace";
    let done = run(tandem(home.path()).args(line.split(' ')).arg(&path));
    let text = stdout(&done);
    let row = |name: &str| {
        let row = text.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("{text}"));
        row.split_whitespace().nth(3).unwrap().to_owned()
    };
    assert_eq!([row("gpu-only"), row("vllm"), row("auto")], ["1.00x", "1.00x", "-"], "{text}");
    let told = "auto: no gain over gpu-only, of which 1 requests failed, not 0: the rest is other work";
    assert!(text.contains(told), "{text}");
    let report = json(&run(tandem(home.path()).args(line.split(' ')).arg(&path).arg("--json")));
    let failed: Vec<_> = report["strategies"].as_array().unwrap().iter().map(|s| &s["failed"]).collect();
    assert_eq!(failed, [1, 1, 0], "{report}");
}

#[test]
fn what_the_user_set_is_refused_rather_than_changed() {
    for (line, want) in [
        (
            format!("{MACHINE} --trace synthetic:10,5,4,0 --kv-pages 100000"),
            "--kv-pages 100000: t4-xeon has room for",
        ),
        (format!("{MACHINE} --trace synthetic:10,5,4,0 --gpu-memory 100GB"), "--gpu-memory"),
        (format!("{MACHINE} --trace synthetic:10,5,4,0 --host-memory 100TB"), "--host-memory"),
        (format!("{MACHINE} --trace synthetic:10,5,4,1 --rate 5e-324"), "--rate 5e-324"),
        (format!("{MACHINE} --trace synthetic:10,5,4,1 --rate 1e308"), "--rate 1e308"),
    ] {
        assert_error(&simulated(&line), 2, want);
    }
    let home = tempfile::tempdir().unwrap();
    let plan = "plan --spec qwen3-8b --hardware rtx4060-laptop --gpu-memory 100GB";
    assert_error(&run(tandem(home.path()).args(plan.split(' '))), 2, "--gpu-memory");
}

const BUSY: &str = "--spec llama-2-7b --hardware t4-xeon --trace synthetic:300..500,100..200,200,0.9";

/// With targets strategies are as fast as they can be within them; the result says who keeps them, and by how much none does.
#[test]
fn targets_of_latency_are_kept_or_said_to_be_missed() {
    let strategies = |flags: &str| {
        let report = json(&simulated(&format!("{BUSY} --strategy gpu-only,neo,apex,auto --json {flags}")));
        (report["strategies"].as_array().unwrap().clone(), report)
    };
    let (free, report) = strategies("--seed 0");
    assert!(report.get("targets").is_none());
    for s in &free {
        assert_eq!((&s["within_targets"], &s["keeps_targets"]), (&Json::from(200), &Json::Null), "{s}");
        let (goodput, makespan) = (s["goodput_req_s"].as_f64().unwrap(), s["makespan_s"].as_f64().unwrap());
        assert!((goodput * makespan - 200.0).abs() < 1e-6, "{s}");
    }
    // NEO's rows wait for each other: half of its requests miss 0.1 s, unless that is asked for.
    let late = |s: &Json| s["tpot_s"]["gpu"]["p90"].as_f64().unwrap() > 0.1;
    assert!(late(&free[1]), "{}", free[1]);
    let (within, report) = strategies("--tpot-target 0.1");
    for s in &within {
        assert_eq!(s["keeps_targets"], true, "{s}");
        assert!(s["within_targets"].as_u64().unwrap() >= 180, "{s}");
    }
    assert_eq!(report["targets"]["tpot_s"], 0.1);
    assert_eq!(report["targets"]["nearest"], Json::Null);
    // Both together: only auto.
    let (both, _) = strategies("--tpot-target 0.1 --ttft-target 2");
    let kept: Vec<bool> = both.iter().map(|s| s["keeps_targets"].as_bool().unwrap()).collect();
    assert_eq!(kept, [false, false, false, true], "{both:?}");
    // What cannot be kept is said before the run and behind it, and what is said to be near is kept.
    let output = simulated(&format!("{BUSY} --strategy auto --tpot-target 0.01 --json"));
    assert!(stderr(&output).contains("--tpot-target 0.01: no strategy can keep it"), "{}", stderr(&output));
    let nearest = json(&output)["targets"]["nearest"]["tpot_s"].as_f64().unwrap();
    let text = stdout(&simulated(&format!("{BUSY} --strategy auto --tpot-target {nearest}")));
    assert!(text.contains("; kept by auto"), "{nearest}: {text}");
    for (flags, says) in [
        ("--ttft-target 0", "a number of seconds above 0"),
        ("--ttft-target -1", "a number of seconds above 0"),
        ("--tpot-target nan", "a number of seconds above 0"),
        ("--tpot-target soon", "a target is a number of seconds"),
        ("--target-percentile 95", "of no target"),
        ("--ttft-target 1 --target-percentile 0", "1..=100"),
    ] {
        assert_error(&simulated(&format!("{BUSY} {flags}")), 2, says);
    }
}

#[test]
fn records_have_a_line_for_each_request_of_each_strategy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("requests.csv");
    let flags = format!("--strategy gpu-only,auto --ttft-target 1 --json --records {}", path.display());
    let report = json(&simulated(&format!("{BUSY} {flags}")));
    let text = std::fs::read_to_string(&path).unwrap();
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap().split(',').collect();
    let rows: Vec<Vec<&str>> = lines.map(|l| l.split(',').collect()).collect();
    assert_eq!((rows.len(), rows.iter().all(|r| r.len() == head.len())), (400, true));
    let at = |name: &str| head.iter().position(|h| *h == name).unwrap();
    for s in report["strategies"].as_array().unwrap() {
        let own: Vec<&Vec<&str>> = rows.iter().filter(|r| s["strategy"] == r[0]).collect();
        let in_time = own.iter().filter(|r| r[at("in_time")] == "1").count();
        assert_eq!(Json::from(in_time), s["within_targets"], "{s}");
        let last = own.iter().map(|r| r[at("finished_s")].parse::<f64>().unwrap()).fold(0.0, f64::max);
        assert!((last - s["makespan_s"].as_f64().unwrap()).abs() < 1e-5, "{s}");
    }
    let nowhere = format!("{BUSY} --records {}", dir.path().join("no/such.csv").display());
    assert_error(&simulated(&nowhere), 1, "no/such.csv");
}

#[test]
fn energy_and_cost_are_told_where_the_description_says() {
    let line = "--spec llama-2-7b --hardware t4-g4dn --trace synthetic:373,45,40,0 --strategy gpu-only,apex --energy";
    let report = json(&simulated(&format!("{line} --json")));
    for s in report["strategies"].as_array().unwrap() {
        let of = |key: &str| s[key].as_f64().unwrap();
        let energy = |key: &str| s["energy"][key].as_f64().unwrap();
        // hardware/t4-g4dn.toml: 25 to 80 W, 10 to 70 W, 1.204 an hour.
        let watts = 35.0 + 55.0 * of("cpu_busy") + 60.0 * of("gpu_busy");
        let rate = of("throughput_tok_s");
        assert!((energy("watts") - watts).abs() < 1e-6, "{s}");
        assert!((energy("joules_per_token") / (watts / rate) - 1.0).abs() < 1e-9, "{s}");
        assert!(
            (energy("cost_per_million_tokens") / (1e6 * 1.204 / 3600.0 / rate) - 1.0).abs() < 1e-9,
            "{s}"
        );
    }
    let text = stdout(&simulated(line));
    assert!(text.contains("J/token  cost/Mtok"), "{text}");
    let none = simulated(&format!("{MACHINE} --trace synthetic:100,20,3,0 --energy"));
    assert_error(&none, 2, "--energy: t4-xeon says nothing of watts; give a description a section [power]");
}

#[test]
fn answers_may_end_before_they_must_and_cohorts_may_be_several() {
    let line =
        "--spec llama-2-7b --hardware t4-xeon --trace synthetic:200..600,20..500,200,0 --strategy neo --json";
    let rate = |flags: &str| {
        let report = json(&simulated(&format!("{line}{flags}")));
        assert_eq!(report["strategies"][0]["failed"], 0, "{report}");
        report["strategies"][0]["throughput_tok_s"].as_f64().unwrap()
    };
    let (known, allowed) = (rate(""), rate(" --max-answer 1024 --lengths allowed"));
    let learned = rate(" --max-answer 1024");
    assert!(allowed < learned && learned < 1.01 * known, "{allowed} {learned} {known}");
    let several = "--spec llama-3.1-8b --hardware a10-xeon --trace synthetic:300,300,60,0 --strategy apex --kv-pages 400 --json";
    let flows = |cohorts: u32| {
        let report = json(&simulated(&format!("{several} --cohorts {cohorts}")));
        assert_eq!(report["strategies"][0]["failed"], 0, "{report}");
        report["strategies"][0]["flows"].clone()
    };
    assert_ne!(flows(1), flows(4));
    assert_error(&simulated(&format!("{line} --cohorts 9")), 2, "--cohorts");
    assert_error(&simulated(&format!("{line} --lengths guessed")), 2, "--lengths");
    assert_error(&simulated(&format!("{line} --lengths allowed")), 2, "--max-answer");
}

/// A model that does not fit the GPU is split, as HELM splits it, and requests are scheduled over the split.
#[test]
fn a_model_that_does_not_fit_is_split() {
    let line = "--spec llama-3.1-70b --hardware h200-sxm --trace synthetic:200..400,50..100,40,0 --json";
    let found = simulated(line);
    assert!(stderr(&found).contains("blocks stay on the host (--boundary "), "{}", stderr(&found));
    let report = json(&found);
    assert!(report["boundary"].as_u64() >= Some(2), "{report}");
    for s in report["strategies"].as_array().unwrap() {
        assert_eq!((s["requests"]["finished"].as_u64(), s["failed"].as_u64()), (Some(40), Some(0)), "{s}");
        // Blocks on the host are computed there, for requests of the GPU, too.
        assert!(s["cpu_busy"].as_f64() > Some(0.2), "{s}");
    }
    let rate = |boundary: u32| {
        let flags = format!("{line} --strategy gpu-only,apex --boundary {boundary}");
        let report = json(&simulated(&flags));
        [0, 1].map(|i| report["strategies"][i]["throughput_tok_s"].as_f64().unwrap())
    };
    let (few, many) = (rate(12), rate(40));
    assert!(few[0] > many[0], "more blocks on the slower side: {few:?} {many:?}");
    assert!(few[1] > 0.97 * few[0] && many[1] > 0.97 * many[0], "{few:?} {many:?}");
    assert_error(&simulated(&format!("{line} --boundary 0")), 1, "blocks on the host (--boundary)");
    assert_error(&simulated(&format!("{line} --boundary 81")), 2, "--boundary 81: leaves the GPU no block");
}
