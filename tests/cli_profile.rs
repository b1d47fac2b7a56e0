//! `tandem profile` as scripts see it: its JSON, what it keeps, and what it refuses.

mod support;

use std::path::Path;
use std::process::Output;

use serde_json::Value as Json;
use support::{assert_error, json, run, stderr, stdout, tandem};

fn profile(home: &Path, line: &str) -> Output {
    run(tandem(home).arg("profile").args(line.split(' ')))
}

#[track_caller]
fn positive(value: &Json, field: &str) -> f64 {
    let x = value[field].as_f64().unwrap_or_else(|| panic!("{field}: {value}"));
    assert!(x > 0.0, "{field}: {value}");
    x
}

#[test]
fn the_cpu_is_measured_once_and_kept() {
    let home = tempfile::tempdir().unwrap();
    let first = json(&profile(home.path(), "--device cpu --quick --json"));
    assert_eq!((first["cached"].as_bool(), first["quick"].as_bool()), (Some(false), Some(true)), "{first}");
    assert_eq!(first["identity"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(first["limits"]["device"], Json::Null);
    let cpu = &first["limits"]["cpu"];
    for field in ["threads", "memory_bytes", "llc_bytes", "read_bytes"] {
        positive(cpu, field);
    }
    let read = cpu["read"].as_array().unwrap();
    assert_eq!(read.last().unwrap()["threads"], cpu["threads"]);
    read.iter().for_each(|b| assert!(positive(b, "bytes_s") > 1e8));
    for rate in cpu["matrix"].as_array().unwrap() {
        positive(rate, "ops_s");
    }
    // The second time it is the same to the digit, from the file that the first has named.
    let second = json(&profile(home.path(), "--device cpu --quick --json"));
    assert_eq!(second["cached"], true);
    assert_eq!((&second["limits"], &second["file"]), (&first["limits"], &first["file"]));
    let file = Path::new(first["file"].as_str().unwrap());
    assert!(file.starts_with(home.path().join("profiles")) && file.is_file());
    let out = profile(home.path(), "--device cpu --quick");
    let (text, err) = (stdout(&out), stderr(&out));
    assert!(text.contains("read (threads)") && text.contains("measured before"), "{text}");
    assert_eq!(err, "", "nothing to say");
}

#[test]
fn a_damaged_profile_is_told_of_and_measured_anew() {
    let home = tempfile::tempdir().unwrap();
    let first = json(&profile(home.path(), "--device cpu --quick --json"));
    std::fs::write(first["file"].as_str().unwrap(), "{\"identity\":").unwrap();
    let out = profile(home.path(), "--device cpu --quick --json");
    assert_eq!(json(&out)["cached"], false);
    assert!(
        stderr(&out).contains("measuring again:") && stderr(&out).contains("not a profile"),
        "{}",
        stderr(&out)
    );
    assert_eq!(json(&profile(home.path(), "--device cpu --quick --json"))["cached"], true);
}

#[test]
fn the_emulated_device_and_its_link_are_measured() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&profile(home.path(), "--device emulated --quick --json"));
    let device = &report["limits"]["device"];
    for field in [
        "memory_bytes",
        "copy_bw",
        "matrix_flops",
        "launch_s",
        "step_s",
        "round_trip_s",
        "wake_s",
        "lane_wait_s",
    ] {
        positive(device, field);
    }
    for way in ["to_device", "to_host"] {
        for field in ["latency_s", "pinned_bw", "pageable_bw", "busy_bw"] {
            positive(&device[way], field);
        }
    }
    assert_eq!(report["identity"]["device"]["name"], device["name"]);
    // It is another profile than that of the CPU alone.
    assert_eq!(json(&profile(home.path(), "--device cpu --quick --json"))["cached"], false);
}

#[test]
fn a_copy_plans_for_this_machine_and_for_no_other() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("mine.json");
    let name = file.to_str().unwrap();
    let report = json(&profile(home.path(), &format!("--device emulated --quick --json -o {name}")));
    let plan = |hardware: &str| {
        let line = format!("--spec qwen3-4b --hardware {hardware} --strategy cpu-only --json");
        run(tandem(home.path()).arg("plan").args(line.split(' ')))
    };
    let planned = json(&plan(name));
    let cpu = &report["limits"]["cpu"];
    let read = cpu["read"].as_array().unwrap().last().unwrap();
    assert_eq!(planned["hardware"]["cpu"]["read_bw"], read["bytes_s"]);
    assert_eq!(planned["hardware"]["gpu"]["bw"], report["limits"]["device"]["copy_bw"]);
    // Of another machine: the sentence names what differs.
    let text = std::fs::read_to_string(&file).unwrap();
    let cpu_name = report["identity"]["cpu"].as_str().unwrap();
    std::fs::write(&file, text.replace(cpu_name, "i486")).unwrap();
    assert_error(&plan(name), 2, "a profile of another machine: the CPU is i486 there and ");
    std::fs::write(&file, text.replace("\"schema\": ", "\"schema\": 9")).unwrap();
    assert_error(&plan(name), 1, "a profile of schema 9");
    std::fs::write(&file, &text[..text.len() / 2]).unwrap();
    assert_error(&plan(name), 1, "not a profile");
}

/// `plan --hardware auto` takes what was measured: the CPU's rates of both are the same.
#[test]
fn plan_reads_what_was_measured() {
    let home = tempfile::tempdir().unwrap();
    let plan = || {
        let line = "--spec qwen3-4b --hardware auto --json --strategy cpu-only";
        let out = run(tandem(home.path()).arg("plan").args(line.split(' ')));
        (json(&out)["hardware"]["cpu"]["read_bw"].clone(), stderr(&out))
    };
    let (first, said) = plan();
    assert!(said.contains("measuring this machine in a hurry"), "{said}");
    let (second, said) = plan();
    assert_eq!((first, said.as_str()), (second, ""), "measured once");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let home = tempfile::tempdir().unwrap();
    assert_error(&profile(home.path(), "--device gpu"), 2, "choose one of auto, cpu, cuda");
    assert_error(
        &profile(home.path(), "--device cpu --quick -o /nosuch/folder/file.json"),
        1,
        "/nosuch/folder/file.json",
    );
}
