//! `tandem tune` as scripts see it: its JSON, what it keeps, and tables that cannot be used.

use std::path::Path;

use crate::support::command::{json, run, stderr, stdout, tandem};
use serde_json::Value as Json;

fn doctor(home: &Path) -> (Json, String) {
    let out = run(tandem(home).args(["doctor", "--no-probe", "--json"]));
    (json(&out), stderr(&out))
}

/// A quick run, as the file that a long one would have kept.
fn measured(home: &Path) -> (std::path::PathBuf, Json) {
    let mut report = json(&run(tandem(home).args(["tune", "--quick", "--json"])));
    let file = std::path::PathBuf::from(report["file"].as_str().unwrap());
    assert!(file.starts_with(home.join("tuning")), "{}", file.display());
    assert_eq!(report["kept"], false);
    for not_kept in ["file", "kept"] {
        report.as_object_mut().unwrap().remove(not_kept);
    }
    (file, report)
}

fn put(file: &Path, text: &str) {
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, text).unwrap();
}

#[test]
fn a_quick_look_keeps_nothing() {
    let home = tempfile::tempdir().unwrap();
    let (file, report) = measured(home.path());
    assert!(!file.exists());
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.iter().any(|f| f["entry"] == "chunk_bytes" && f["dtype"] == "bf16"), "{report}");
    let (seen, said) = doctor(home.path());
    assert_eq!((seen["tuning"]["measured"].as_bool(), said.as_str()), (Some(false), ""));
    let text = stdout(&run(tandem(home.path()).args(["tune", "--quick"])));
    assert!(text.contains("bf16   chunk_bytes") && text.contains("not kept"), "{text}");
}

/// The contests of the AMX tier, on emulated tiles: every kernel that a table may choose runs, and its answers are right.
#[test]
fn entries_of_the_amx_tier_are_tried() {
    let home = tempfile::tempdir().unwrap();
    let tune = |json: &[&str]| {
        let mut command = tandem(home.path());
        run(command
            .args(["tune", "--quick"])
            .args(json)
            .env("TANDEM_AMX", "emulate")
            .env("TANDEM_ISA", "amx"))
    };
    let out = tune(&["--json"]);
    #[cfg(target_arch = "x86_64")]
    let runs = cfg!(target_os = "linux") && is_x86_feature_detected!("avx512vnni");
    #[cfg(not(target_arch = "x86_64"))]
    let runs = false;
    if !runs {
        assert!(stderr(&out).contains("TANDEM_ISA=amx: "), "{}", stderr(&out));
        println!("skipped: {}", stderr(&out));
        return;
    }
    let report = json(&out);
    let of = |entry: &str, dtype: &str| -> Vec<Json> {
        let findings = report["findings"].as_array().unwrap();
        findings.iter().filter(|f| f["entry"] == entry && f["dtype"] == dtype).cloned().collect()
    };
    for entry in ["int8_tiles_from", "tiles_from", "fine_tiles_from", "half_up_to"] {
        assert!(!of(entry, "q4_k").is_empty() && of(entry, "bf16").is_empty(), "{entry}: {report}");
    }
    for dtype in ["bf16", "f16"] {
        let packing = of("tiles_at_load", dtype);
        let tokens: Vec<_> = packing.iter().map(|f| f["tokens"].as_u64().unwrap()).collect();
        assert_eq!(tokens, [1, 16, 512], "{dtype}: decoding one, several, prefill");
        for f in &packing {
            assert!(f["candidates"][1]["packed_per_s"].as_f64().unwrap() > 0.0, "what it costs to load: {f}");
            let chosen = report["tuning"]["linear"][dtype]["tiles_at_load"].as_bool().unwrap();
            assert_eq!(f["chosen"], u64::from(chosen), "{f}");
        }
    }
    let text = stdout(&tune(&[]));
    assert!(text.contains("bf16   tiles_at_load") && text.contains("(packed at "), "{text}");
}

#[test]
fn a_kept_table_is_the_one_in_use() {
    let home = tempfile::tempdir().unwrap();
    let (file, mut report) = measured(home.path());
    report["tuning"]["linear"]["q4_0"]["ahead_bytes"] = 8192.into();
    put(&file, &report.to_string());
    let (seen, said) = doctor(home.path());
    assert_eq!(said, "");
    assert_eq!(seen["tuning"]["measured"], true);
    assert_eq!(seen["tuning"]["entries"], report["tuning"]);
    let text = stdout(&run(tandem(home.path()).args(["doctor", "--no-probe"])));
    assert!(
        text.contains("measured on this machine (tandem tune)") && text.contains("ahead 8192 B"),
        "{text}"
    );
}

#[test]
fn tables_that_cannot_be_used_are_told_of_and_the_defaults_stand() {
    let home = tempfile::tempdir().unwrap();
    let (file, good) = measured(home.path());
    let with = |change: &dyn Fn(&mut Json)| {
        let mut report = good.clone();
        change(&mut report);
        report.to_string()
    };
    for (text, why) in [
        (String::new(), "not a tuning table"),
        (good.to_string()[..80].to_owned(), "not a tuning table"),
        (with(&|r| r["cpu"] = "i486".into()), "of CPU i486"),
        (with(&|r| r["version"] = "0.0.1".into()), "of version 0.0.1"),
        (with(&|r| r["tuning"]["linear"]["bf16"]["chunk_bytes"] = 7.into()), "chunk_bytes is 7"),
    ] {
        put(&file, &text);
        let (seen, said) = doctor(home.path());
        assert_eq!(seen["tuning"]["measured"], false, "{why}");
        assert!(said.contains(why) && said.contains("defaults are used"), "{why}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        // What computes goes on, and says it as well.
        let out =
            run(tandem(home.path()).args("generate -m synth:tiny-llama -n 2 --device cpu hi".split(' ')));
        assert!(out.status.success() && stderr(&out).contains("tuning table is ignored"), "{}", stderr(&out));
    }
    // `tune` itself begins anew.
    let out = run(tandem(home.path()).args(["tune", "--quick", "--json"]));
    assert_eq!((out.status.success(), stderr(&out).contains("ignored")), (true, false));
}

/// A model of 16-bit floats whose weights are packed into tiles when it is loaded says what it says without, on emulated tiles:
/// in deterministic mode to the token.
#[test]
fn floats_packed_at_load_change_no_deterministic_result() {
    #[cfg(target_arch = "x86_64")]
    let runs = cfg!(target_os = "linux") && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let runs = false;
    if !runs {
        return println!("skipped: 16-bit floats are packed for CPUs with AVX512_BF16");
    }
    let home = tempfile::tempdir().unwrap();
    let (file, report) = measured(home.path());
    let said = |dtype: &str, packed: bool, mode: &str| {
        let mut report = report.clone();
        report["tuning"]["linear"][dtype]["tiles_at_load"] = packed.into();
        put(&file, &report.to_string());
        let line = format!(
            "generate -m synth:tiny-llama,dtype={dtype} -n 6 --device cpu --raw{mode} aaaabbbbccccdd"
        );
        let mut command = tandem(home.path());
        let out = run(command.args(line.split(' ')).env("TANDEM_AMX", "emulate").env("TANDEM_ISA", "amx"));
        assert!(out.status.success() && !stderr(&out).contains("ignored"), "{}", stderr(&out));
        stdout(&out)
    };
    for dtype in ["bf16", "f16"] {
        let mode = " --deterministic";
        assert_eq!(said(dtype, true, mode), said(dtype, false, mode), "{dtype}");
        assert!(!said(dtype, true, "").trim().is_empty(), "{dtype}: the fast kernels of packed rows");
    }
}

/// The same tokens whatever the table says: with the widest and the narrowest entries, fast and deterministic.
#[test]
fn entries_change_no_results() {
    let home = tempfile::tempdir().unwrap();
    let (file, report) = measured(home.path());
    let said = |change: &dyn Fn(&mut Json), mode: &str| {
        let mut report = report.clone();
        for (_, entries) in report["tuning"]["linear"].as_object_mut().unwrap().iter_mut() {
            change(entries);
        }
        put(&file, &report.to_string());
        let line =
            format!("generate -m synth:tiny-llama,dtype=q4_0 -n 8 --device cpu --raw{mode} aaaabbbbccccdd");
        let out = run(tandem(home.path()).args(line.split(' ')));
        assert!(out.status.success(), "{}", stderr(&out));
        assert!(!stderr(&out).contains("ignored"), "{}", stderr(&out));
        stdout(&out)
    };
    for mode in ["", " --deterministic"] {
        let narrow = said(
            &|e| {
                for (entry, value) in [
                    ("ahead_from", 3),
                    ("groups_of_1", 1),
                    ("groups_of_2", 1),
                    ("groups_of_4", 1),
                    ("groups_of_8", 1),
                    ("chunk_bytes", 4096),
                ] {
                    e[entry] = value.into();
                }
            },
            mode,
        );
        let wide = said(
            &|e| {
                for (entry, value) in [
                    ("ahead_from", 1),
                    ("groups_of_1", 4),
                    ("groups_of_2", 4),
                    ("groups_of_4", 4),
                    ("groups_of_8", 2),
                    ("chunk_bytes", 1 << 20),
                ] {
                    e[entry] = value.into();
                }
            },
            mode,
        );
        assert_eq!(narrow, wide, "{mode}");
    }
}
