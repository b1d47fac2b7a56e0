//! `tandem bench --trace`: requests of a trace on the real engine.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::command::{assert_error, json as json_of, run, stderr, stdout, tandem};

const TINY: &str = "synth:tiny-llama,dtype=f32,seed=3";

fn bench(home: &Path, line: &str) -> Value {
    json_of(&run(tandem(home).args(["bench", "-m", TINY, "--json"]).args(line.split_whitespace())))
}

fn number(report: &Value, name: &str) -> f64 {
    report[name].as_f64().unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn a_trace_is_served_on_the_cpu_and_reported_as_a_simulation_is() {
    let home = tempfile::tempdir().unwrap();
    // So many steps that a pause of the machine is not most of the time.
    let all = bench(home.path(), "--trace synthetic:8..20,60,12,0 --device cpu");
    let [report] = &all["strategies"].as_array().unwrap()[..] else { panic!("{all}") };
    assert_eq!(report["strategy"], "cpu-only");
    assert_eq!((&report["requests"]["finished"], &report["requests"]["failed"]), (&12.into(), &0.into()));
    for name in ["throughput_tok_s", "steady_tok_s", "makespan_s", "cpu_busy"] {
        assert!(number(report, name) > 0.0, "{name}: {report}");
    }
    let tokens = number(report, "throughput_tok_s") * number(report, "makespan_s");
    assert!((tokens - 720.0).abs() < 1e-6, "{tokens} tokens");
    assert!(report["gpu_busy"].is_null() && report["tpot_s"]["gpu"]["p50"].is_null(), "{report}");
    for p in ["p50", "p90", "p99"] {
        assert!(report["ttft_s"][p].as_f64().unwrap() > 0.0);
        assert!(report["tpot_s"]["host"][p].as_f64().unwrap() > 0.0);
    }
    assert_eq!(report["link_bytes"], json!({ "to_device": 0, "to_host": 0 }), "there is no link");
    assert_eq!(all["workload"]["requests"], 12);
}

#[test]
fn rows_that_are_no_requests_and_requests_that_do_not_fit_fail_and_the_rest_are_served() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("trace.csv");
    let rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n0.0,5,4\n0.1,many,4\n0.2,6,3\n-1,6,3\n0.3,7,2\n";
    std::fs::write(&path, rows).unwrap();
    let mut command = tandem(home.path());
    command.args(["bench", "-m", TINY, "--json", "--device", "cpu", "--trace"]).arg(&path);
    let output = run(&mut command);
    let report = &json_of(&output)["strategies"][0];
    assert_eq!((&report["requests"]["finished"], &report["requests"]["failed"]), (&3.into(), &2.into()));
    assert!(stderr(&output).contains("line 3, column ContextTokens"), "{}", stderr(&output));
    // Requests come at their times, measured by this computer's clock.
    assert!(number(report, "makespan_s") >= 0.3, "{report}");
    let mut table = tandem(home.path());
    table.args(["bench", "-m", TINY, "--device", "cpu", "--trace"]).arg(&path);
    let text = stdout(&run(&mut table));
    assert!(text.contains("cpu-only") && text.contains("2 failed: no request: line 3"), "{text}");
}

/// An accelerator whose time is this computer's: what each unit did is measured.
#[test]
fn busy_fractions_of_an_accelerator_are_measured() {
    let home = tempfile::tempdir().unwrap();
    let line =
        "--device emulated --hardware t4-xeon --strategy gpu-only,fastdecode --trace synthetic:40,6,8,0";
    let all = bench(home.path(), line);
    let [alone, shared] = &all["strategies"].as_array().unwrap()[..] else { panic!("{all}") };
    for report in [alone, shared] {
        for name in ["gpu_busy", "cpu_busy", "link_busy", "gpu_bubbles"] {
            assert!((0.0..=1.0).contains(&number(report, name)), "{name}: {report}");
        }
        assert!(number(report, "gpu_busy") > 0.0, "{report}");
    }
    // Beside the tokens, the host's rows and their attention cross, and the pages of prompts.
    let crossed = |report: &Value, way: &str| report["link_bytes"][way].as_u64().unwrap();
    assert_eq!(crossed(alone, "to_device"), 0, "{alone}");
    assert!(
        crossed(shared, "to_device") > 0 && crossed(shared, "to_host") > crossed(alone, "to_host"),
        "{all}"
    );
    // Decode attention is the CPU's, or nobody's.
    assert!(number(shared, "cpu_busy") > 0.0 && number(alone, "cpu_busy") == 0.0, "{all}");
}

#[test]
fn in_emulated_time_requests_arrive_and_are_served_in_that_time() {
    let home = tempfile::tempdir().unwrap();
    let line = "--device emulated:t4-xeon --strategy gpu-only --seed 5 --trace synthetic:16,8,10,";
    let run = |rate: &str| bench(home.path(), &format!("{line}{rate}"));
    let (offline, online, slow) = (run("0"), run("400"), run("0.5"));
    let of = |all: &Value| all["strategies"][0].clone();
    assert_eq!(run("400"), online, "the same in every run");
    for all in [&offline, &online, &slow] {
        let report = of(all);
        assert_eq!(report["requests"]["finished"], 10);
        for name in ["gpu_busy", "cpu_busy", "link_busy", "gpu_bubbles"] {
            assert!((0.0..=1.0).contains(&number(&report, name)), "{name}: {report}");
        }
        assert!(report["tpot_s"]["gpu"]["p50"].as_f64().unwrap() > 0.0);
    }
    assert!(number(&of(&offline), "gpu_busy") > 0.0, "{offline}");
    // Requests that come one after the other wait for nobody.
    let first = |all: &Value| of(all)["ttft_s"]["p99"].as_f64().unwrap();
    assert!(first(&slow) < first(&offline), "{} {}", first(&slow), first(&offline));
    assert!(number(&of(&slow), "makespan_s") > 2.0 && number(&of(&slow), "gpu_busy") < 0.1, "{slow}");
}

#[test]
fn schedulers_are_compared_in_one_call() {
    let home = tempfile::tempdir().unwrap();
    let line = "--device emulated:t4-xeon --strategy gpu-only,fastdecode,neo --kv-pages 6 --trace synthetic:40,30,12,0";
    let all = bench(home.path(), line);
    let reports = all["strategies"].as_array().unwrap();
    let names: Vec<&str> = reports.iter().map(|r| r["strategy"].as_str().unwrap()).collect();
    assert_eq!(names, ["gpu-only", "fastdecode", "neo"]);
    for report in reports {
        assert_eq!(report["requests"]["finished"], 12, "{report}");
    }
    // Six pages hold two of these requests: the others live on the host, or wait.
    assert_eq!(all["kv_tokens"]["gpu"], 192);
    assert_eq!(reports[0]["requests"]["on_host"], 0);
    let steps = |r: &Value| r["flows"].as_array().unwrap().iter().filter_map(Value::as_u64).sum::<u64>();
    assert!(reports.iter().all(|r| steps(r) > 0 && Some(steps(r)) <= r["iterations"].as_u64()));
    assert!(reports[1]["requests"]["on_host"].as_u64() > Some(0), "{}", reports[1]);
}

#[test]
fn a_load_latency_plot_and_a_timeline_of_each_scheduler_are_drawn() {
    let home = tempfile::tempdir().unwrap();
    let (plot, drawn) = (home.path().join("p.svg"), home.path().join("t.svg"));
    let mut command = tandem(home.path());
    let line =
        "--device emulated:t4-xeon --strategy gpu-only,apex --kv-pages 6 --trace synthetic:20,10,12,500";
    command.args(["bench", "-m", TINY, "--json"]).args(line.split_whitespace());
    let out = run(command.arg("--plot").arg(&plot).arg("--timeline").arg(&drawn));
    let all = json_of(&out);
    assert_eq!(all["strategies"][1]["requests"]["finished"], 12, "{all}");
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let svg = read(&plot);
    for want in [
        "time per token, from arrival",
        "time to the first token",
        "requests of the GPU, of the host",
        "apex",
    ] {
        assert!(svg.contains(want), "{want}: {svg}");
    }
    let svg = read(&drawn);
    assert!(svg.contains("(a)  gpu-only") && svg.contains("(b)  apex") && svg.contains(">GPU<"), "{svg}");
}

#[test]
fn what_makes_no_sense_is_refused_in_a_sentence() {
    let home = tempfile::tempdir().unwrap();
    let trace = "--trace synthetic:4,4,4,0";
    for (line, code, want) in [
        ("--trace synthetic:4,4", 2, "synthetic"),
        ("--trace no-such.csv", 1, "no-such.csv"),
        ("--trace /dev/full", 1, "the header is longer than 65536 bytes; is this a CSV file?"),
        ("--trace synthetic:4,4,1000000000000000000,0", 2, "N: "),
        ("--rate 3", 2, "--trace"),
        ("--timeline t.svg", 2, "add --trace"),
        ("--parallel 3", 2, "--trace"),
        ("--strategy neo,apex", 2, "bench --trace compares several"),
        ("--strategy neo", 2, "schedules many requests; use it with"),
        (&format!("{trace} --gen 3"), 2, "cannot be used with"),
        (&format!("{trace} --device cpu --strategy neo"), 2, "needs an accelerator"),
        (&format!("{trace} --device emulated --strategy neo,helm"), 2, "--strategy helm: cannot be compared"),
        (&format!("{trace} --plot out.png"), 2, "wanted the name of an .svg file"),
        (&format!("{trace} --rate -1"), 2, "--rate -1.0: requests per second; wanted"),
    ] {
        let output = run(tandem(home.path()).args(["bench", "-m", TINY]).args(line.split_whitespace()));
        assert_error(&output, code, want);
    }
}
