//! `tandem profile` as scripts see it: its JSON, what it keeps, and what it refuses.

use std::path::Path;
use std::process::Output;

use crate::support::command::{assert_error, json, run, stderr, stdout, tandem};
use serde_json::Value as Json;

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
    positive(&report["limits"]["host_attention"], "alone_bw");
    positive(&report["limits"]["host_attention"], "beside_copies_bw");
    assert_eq!(report["limits"]["host_attention"]["copies"], "link");
    positive(&report["limits"]["hand_over"], "spinning_s");
    positive(&report["limits"]["hand_over"], "parked_s");
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
    let attention = &report["limits"]["host_attention"];
    let rate = |name: &str| attention[name].as_f64().unwrap();
    let share = (rate("beside_copies_bw") / rate("alone_bw")).min(1.0);
    let planned_share = planned["hardware"]["efficiency"]["cpu_beside_copies"].as_f64().unwrap();
    assert!((planned_share - share).abs() < 1e-9, "{planned_share} for {share}");
    assert_eq!(planned["hardware"]["gpu"]["bw"], report["limits"]["device"]["copy_bw"]);
    // Of another machine: the sentence names what differs.
    let text = std::fs::read_to_string(&file).unwrap();
    let cpu_name = report["identity"]["cpu"].as_str().unwrap();
    std::fs::write(&file, text.replace(cpu_name, "i486")).unwrap();
    assert_error(&plan(name), 2, "a profile of something else: the CPU is i486 there and ");
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

/// Every time of a curve is finite, positive or zero, and not a little less than that of fewer rows: that would be noise.
#[track_caller]
fn rises(curve: &Json) {
    let points = curve.as_array().unwrap_or_else(|| panic!("{curve}"));
    assert!(!points.is_empty(), "no points");
    let mut before = (0.0, 0.0);
    for p in points {
        let (x, y) = (p[0].as_f64().unwrap(), p[1].as_f64().unwrap());
        assert!(x > before.0 && (y >= before.1 || y < before.1 / 1.25) && y < 10.0, "{curve}");
        before = (x, y);
    }
}

#[track_caller]
fn has_tables(side: &Json, kinds: usize) {
    ["embed", "head", "pick"].iter().for_each(|end| rises(&side[end]));
    let layers = side["layers"].as_array().unwrap();
    assert_eq!(layers.len(), kinds, "{side}");
    for layer in layers {
        ["project", "append", "out_proj", "ffn_up", "ffn_down"].iter().for_each(|op| rises(&layer[op]));
        for op in ["attend", "attend_prompt"] {
            let lines = layer[op].as_array().unwrap();
            assert!(lines.len() > 1, "{layer}");
            lines.iter().for_each(|line| rises(&line[1]));
        }
    }
}

#[test]
fn a_models_operations_are_timed_and_held_against_real_steps() {
    let home = tempfile::tempdir().unwrap();
    let line = "-m synth:tiny-llama --device cpu --quick --json";
    let first = json(&profile(home.path(), line));
    assert_eq!(first["identity"]["model"]["hash"].as_str().unwrap().len(), 16);
    let (tables, calibration) = (&first["model"]["tables"], &first["model"]["calibration"]);
    has_tables(&tables["host"], 1);
    assert_eq!(tables["device"], Json::Null);
    let steps = calibration["steps"].as_array().unwrap();
    assert!(steps.iter().any(|s| s["calibrates"] == true) && steps.iter().any(|s| s["calibrates"] == false));
    for step in steps {
        for field in ["predicted_s", "calibrated_s", "executed_s"] {
            positive(step, field);
        }
    }
    // A step that calibrates is predicted as it was executed: the factors are where they belong. At another context nothing is.
    let operations = calibration["operations"].as_array().unwrap();
    let factors = tables["factors"].as_array().unwrap();
    let sane = factors.iter().all(|f| (0.26..3.9).contains(&f["factor"].as_f64().unwrap()));
    for step in steps.iter().filter(|s| s["calibrates"] == true) {
        let (rows, past) = (step["sequences"].as_u64().unwrap(), step["past"].as_u64().unwrap());
        let of_step =
            |o: &&Json| (o["rows"].as_u64(), o["tokens"].as_u64()) == (Some(rows), Some(rows * (past + 1)));
        assert_eq!(operations.iter().filter(of_step).count(), 9, "{operations:?}");
        let (calibrated, executed) = (positive(step, "calibrated_s"), positive(step, "executed_s"));
        assert!(!sane || (calibrated / executed - 1.0).abs() < 1e-6, "{calibrated} for {executed}: {step}");
    }
    let pasts = |calibrates: bool| -> Vec<u64> {
        let of = steps.iter().filter(|s| s["calibrates"] == calibrates);
        of.map(|s| s["past"].as_u64().unwrap()).collect()
    };
    assert!(pasts(false).iter().all(|p| !pasts(true).contains(p)), "{steps:?}");
    let second = json(&profile(home.path(), line));
    assert_eq!((&second["cached"], &second["model"]), (&Json::Bool(true), &first["model"]));
    // Limits are measured once for the machine and all models on it.
    let other = json(&profile(home.path(), "-m synth:tiny-qwen3,dtype=q8_0 --device cpu --quick --json"));
    assert_eq!((&other["cached"], &other["limits"]), (&Json::Bool(false), &first["limits"]));
    // Plans for this model are by its tables, for another they are not.
    let plan = |model: &str| {
        let line =
            format!("-m {model} --hardware auto --prompt-len 63 --gen-len 2 --strategy cpu-only --json");
        json(&run(tandem(home.path()).arg("plan").args(line.split(' '))))
    };
    let (by_tables, by_roofline) = (plan("synth:tiny-llama"), plan("synth:tiny-llama,dtype=q4_0"));
    assert_eq!((&by_tables["times"], &by_roofline["times"]), (&"tables".into(), &"roofline".into()));
    let step = by_tables["candidates"][0]["t_decode_step_s"].as_f64().unwrap();
    let known = steps.iter().find(|s| s["sequences"] == 1 && s["past"] == 63).unwrap();
    let ratio = step / positive(known, "calibrated_s");
    assert!((0.9..1.1).contains(&ratio), "{step} for {known}");
    let text = stdout(&profile(home.path(), "-m synth:tiny-llama --device cpu --quick"));
    assert!(text.contains("ffn_down, x") && text.contains("factors come from these"), "{text}");
}

/// Layers with a window and without, on both sides.
#[test]
fn every_kind_of_layer_is_timed_on_both_sides() {
    let home = tempfile::tempdir().unwrap();
    let report = json(&profile(home.path(), "-m synth:tiny-gemma3 --device emulated --quick --json"));
    let (tables, calibration) = (&report["model"]["tables"], &report["model"]["calibration"]);
    let kinds: Vec<_> = tables["kinds"].as_array().unwrap().iter().map(|k| k.as_u64().unwrap()).collect();
    assert_eq!(kinds.iter().max(), Some(&1), "{kinds:?}");
    for side in ["host", "device"] {
        has_tables(&tables[side], 2);
        let steps = calibration["steps"].as_array().unwrap();
        assert!(steps.iter().any(|s| s["side"] == side), "{calibration}");
    }
    rises(&tables["device"]["page_out"]);
    rises(&tables["device"]["page_in"]);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let home = tempfile::tempdir().unwrap();
    assert_error(&profile(home.path(), "--device gpu"), 2, "choose one of auto, cpu, cuda");
    assert_error(&profile(home.path(), "--device cpu --quick -m synth:nosuch"), 2, "synth:nosuch");
    assert_error(
        &profile(home.path(), "--device cpu --quick -o /nosuch/folder/file.json"),
        1,
        "/nosuch/folder/file.json",
    );
}
