//! A device's self-test as a user meets it, on the stand-in for the driver: `doctor --gpu`, and what the first run does by itself.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::support::command::{self, assert_error, json, run, stderr, stdout};
use crate::support::fake_driver;

const MODEL: &str = "synth:tiny-llama,dtype=q4_0,seed=1";

/// Tokens of the model on a device of the stand-in.
fn generate(home: &Path, device: &str, env: &[(&str, &str)]) -> Option<Output> {
    let mut tandem = fake_driver::tandem(home)?;
    tandem.args(["generate", "-m", MODEL, "-n", "8", "--raw", "--temp", "0", "--device", device, "hello"]);
    if device == "cuda" {
        // A fast CPU is predicted to be no slower with a tiny model.
        tandem.args(["--strategy", "gpu-only"]);
    }
    Some(run(tandem.envs(env.iter().copied())))
}

/// The report of `doctor --gpu`, and the run.
fn doctor(home: &Path, env: &[(&str, &str)]) -> Option<(Value, Output)> {
    let mut tandem = fake_driver::tandem(home)?;
    let out = run(tandem.args(["doctor", "--gpu", "--json", "--no-probe"]).envs(env.iter().copied()));
    let report: Value = serde_json::from_str(&stdout(&out)).expect("one JSON object");
    Some((report["self_test"].clone(), out))
}

fn outcome<'a>(test: &'a Value, group: &str) -> &'a Value {
    let groups = test["groups"].as_array().expect("groups");
    groups.iter().find(|g| g["name"] == group).unwrap_or_else(|| panic!("no {group}: {test}"))
}

/// The files of verdicts, and what they say.
fn verdicts(home: &Path) -> Vec<(String, String)> {
    let folder = home.join("self-test");
    let names = command::tree(&folder);
    names.into_iter().map(|n| (n.clone(), std::fs::read_to_string(folder.join(n)).unwrap())).collect()
}

/// Every kernel that a device would be given is launched, and right. What no check launches is the path of another device.
#[test]
fn all_kernels_are_right_and_none_is_left_out() {
    for sm in ["90", "80"] {
        let home = tempfile::tempdir().unwrap();
        let Some((test, out)) = doctor(home.path(), &[("FAKE_SM", sm)]) else { return };
        assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
        let groups = test["groups"].as_array().unwrap();
        assert_eq!(groups.len(), 11);
        for group in groups {
            assert_eq!(group["outcome"], "passed", "{group}");
            assert!(group["checks"].as_u64().unwrap() > 0, "{group}");
            assert!(group["worst"].as_f64().unwrap() <= 1.0, "{group}");
        }
        // The kernels of a T4 that newer devices have others for.
        let others = ["gemm_f16_128x128_sync", "gemm_f16_128x64_sync"];
        assert_eq!(test["untested"], Value::from(others.to_vec()));
        let kernels: u64 = groups.iter().map(|g| g["kernels"].as_u64().unwrap()).sum();
        println!("sm_{sm}: {kernels} kernels in {:.1} s", test["seconds"].as_f64().unwrap());
    }
}

/// A wrong kernel of each group is found, in that group, and the exit code says so. Several at a time: a run takes seconds.
#[test]
fn a_wrong_kernel_fails_its_group() {
    let planted: [&[(&str, &str)]; 3] = [
        &[
            ("norm_rms_f16_warp", "embed & norm"),
            ("gemv_bf16", "products, dense"),
            // Checked together: there and back.
            ("pages_", "rows & pages"),
            ("softcap", "logits & pick"),
        ],
        &[
            ("linear_q6_k_f16_t16", "products, quantised"),
            ("attention_merge", "attention, decode"),
            ("rope_append_whole", "rope & append"),
            ("publish_rows_f16", "rows & pages"),
        ],
        &[
            ("prefill_attention_f16_d80", "attention, prefill"),
            ("activation_geglu", "activation"),
            ("experts_linear_q4_k_f16", "experts"),
        ],
    ];
    for wrong in planted {
        let home = tempfile::tempdir().unwrap();
        let names = wrong.iter().map(|(kernel, _)| *kernel).collect::<Vec<_>>().join(",");
        let Some((test, out)) = doctor(home.path(), &[("FAKE_WRONG", &names)]) else { return };
        let said = stderr(&out);
        assert_eq!(out.status.code(), Some(1), "{names}: {said}");
        let line = said.lines().find_map(|l| l.split_once("the self-test of Fake 0 failed: "));
        let line = line.unwrap_or_else(|| panic!("{names}: {said}")).1;
        for (kernel, group) in wrong {
            assert!(line.contains(group), "{kernel}: {line}");
            let found = outcome(&test, group);
            assert_eq!(found["outcome"], "failed", "{kernel}: {found}");
            let failed = found["failed"].as_object().unwrap();
            assert!(
                !failed.is_empty() && failed.keys().all(|name| name.starts_with(kernel)),
                "{kernel}: {found}"
            );
        }
        let others = test["groups"].as_array().unwrap().iter();
        let others = others.filter(|g| wrong.iter().all(|(_, group)| g["name"] != *group));
        others.for_each(|g| assert_eq!(g["outcome"], "passed", "{names}: {g}"));
    }
}

/// The report in text has a line to copy.
#[test]
fn a_failure_has_a_line_to_report() {
    let home = tempfile::tempdir().unwrap();
    let Some(mut tandem) = fake_driver::tandem(home.path()) else { return };
    let out = run(tandem.args(["doctor", "--gpu", "--no-probe"]).env("FAKE_WRONG", "cast_f16"));
    let text = stdout(&out);
    let line = text.lines().find(|l| l.starts_with("! to report")).unwrap_or_else(|| panic!("{text}"));
    for part in [env!("CARGO_PKG_VERSION"), "Fake 0 sm_90", "CUDA 13.0", "activation: cast_f16: ", "wanted"] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[test]
fn without_a_gpu_there_is_one_sentence() {
    let home = tempfile::tempdir().unwrap();
    let mut tandem = command::tandem(home.path());
    // An empty folder has no driver; a machine that has one elsewhere is not asked.
    let out = run(tandem.env("LD_LIBRARY_PATH", home.path()).args(["doctor", "--gpu=cuda:7", "--no-probe"]));
    assert_error(&out, 1, "cuda");
    let out = run(command::tandem(home.path()).args(["doctor", "--gpu=emulated", "--no-probe"]));
    assert_error(&out, 2, "it runs plain functions");
}

/// Kernels that others can replace are left out: the tokens are those of a device where they are right.
#[test]
fn a_run_goes_round_wrong_kernels() {
    let home = tempfile::tempdir().unwrap();
    let Some(right) = generate(home.path(), "cuda", &[]) else { return };
    assert_eq!(right.status.code(), Some(0), "{}", stderr(&right));
    assert!(!stderr(&right).contains("self-test"), "{}", stderr(&right));
    for (kernel, instead) in [
        ("gemv_q4_0_f16", "gemm runs instead"),
        ("linear_q4_0_f16", "gemm runs instead"),
        ("gemm_f16_128x128_sm90a", "the kernel of older GPUs"),
        ("prefill_attention_bf16_d64_sm90a", "the kernel of older GPUs"),
        ("recorded work", "steps are launched kernel by kernel"),
    ] {
        let home = tempfile::tempdir().unwrap();
        for again in [false, true] {
            let out = generate(home.path(), "cuda", &[("FAKE_WRONG", kernel)]).unwrap();
            let said = stderr(&out);
            assert_eq!(out.status.code(), Some(0), "{kernel}: {said}");
            assert_eq!(stdout(&out), stdout(&right), "{kernel}, again: {again}: {said}");
            let notice = said.lines().filter(|l| l.contains(kernel) && l.contains(instead)).count();
            assert_eq!(notice, 1, "{kernel}, again: {again}: {said}");
        }
    }
}

/// A device whose kernels of experts are wrong has none of them: the CPU computes them, beside a device that does the rest.
#[test]
fn experts_run_on_the_cpu_where_their_kernels_are_wrong() {
    let home = tempfile::tempdir().unwrap();
    let mixture = |home: &Path, strategy: &str, env: &[(&str, &str)]| -> Option<Output> {
        let mut tandem = fake_driver::tandem(home)?;
        let model = "synth:tiny-mixtral,layers=2,dtype=q4_k,seed=2";
        tandem.args(["generate", "-m", model, "-n", "4", "--raw", "--temp", "0", "--json"]);
        tandem.args(["--device", "cuda", "--strategy", strategy, "hello"]);
        Some(run(tandem.envs(env.iter().copied())))
    };
    let Some(right) = mixture(home.path(), "cpu-moe", &[]) else { return };
    let right = json(&right);
    let home = tempfile::tempdir().unwrap();
    let wrong = [("FAKE_WRONG", "experts_")];
    // Whatever is asked for that has no experts there.
    let out = mixture(home.path(), "cpu-moe", &wrong).unwrap();
    assert_eq!(json(&out)["tokens"], right["tokens"]);
    let said = stderr(&out);
    let told =
        said.lines().filter(|l| l.contains("experts_") && l.contains("experts run on the CPU")).count();
    assert_eq!(told, 1, "{said}");
    // What wants them there is refused, with what can be done.
    let out = mixture(home.path(), "gpu-only", &wrong).unwrap();
    assert_eq!((out.status.code(), stdout(&out).as_str()), (Some(1), ""));
    assert!(stderr(&out).contains("run on the CPU only for now; use --strategy cpu-moe"), "{}", stderr(&out));
    let out = mixture(home.path(), "auto", &wrong).unwrap();
    assert_eq!(json(&out)["tokens"], right["tokens"]);
}

/// Without the self-test the same kernels make the tokens wrong, so the way round them is what makes them right.
#[test]
fn wrong_kernels_make_wrong_tokens_where_a_verdict_admits_them() {
    let home = tempfile::tempdir().unwrap();
    let Some(right) = generate(home.path(), "cuda", &[]) else { return };
    // The verdict of the right device is there.
    let out = generate(home.path(), "cuda", &[("FAKE_WRONG", "gemv_q4_0_f16")]).unwrap();
    assert_ne!(stdout(&out), stdout(&right), "the planted mistake changes nothing: {}", stderr(&out));
}

/// Where nothing replaces a kernel, `auto` runs on the CPU and `cuda` says what failed.
#[test]
fn a_device_without_a_right_kernel_is_not_used() {
    let home = tempfile::tempdir().unwrap();
    let Some(cpu) = generate(home.path(), "cpu", &[]) else { return };
    let wrong = [("FAKE_WRONG", "rope_append")];
    let out = generate(home.path(), "auto", &wrong).unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert_eq!(stdout(&out), stdout(&cpu));
    assert!(
        stderr(&out).contains("running on the CPU: Fake 0: its self-test failed: rope_append"),
        "{}",
        stderr(&out)
    );
    let refused = generate(home.path(), "cuda", &wrong).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    for part in ["rope_append", "wanted", "the device is not used", "tandem doctor --gpu", "--device cpu"] {
        assert!(stderr(&refused).contains(part), "{part}: {}", stderr(&refused));
    }
    // A device that a kernel takes away.
    let home = tempfile::tempdir().unwrap();
    let out = generate(home.path(), "auto", &[("FAKE_FAIL", "cuLaunchKernel:719:5")]).unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
    assert_eq!(stdout(&out), stdout(&cpu));
    assert!(stderr(&out).contains("running on the CPU: Fake 0: its self-test failed"), "{}", stderr(&out));
}

/// One verdict for a program, a driver and a device, which later runs use.
#[test]
fn a_verdict_is_kept_for_the_same_program_driver_and_device() {
    let home = tempfile::tempdir().unwrap();
    let Some(first) = generate(home.path(), "cuda", &[]) else { return };
    let launches = |out: &Output| -> u64 {
        let said = stderr(out);
        let line = said.lines().rfind(|l| l.ends_with(" launches")).expect("the stand-in counts");
        line.split(' ').nth(2).unwrap().parse().unwrap()
    };
    let kept = verdicts(home.path());
    assert_eq!(kept.len(), 1);
    let second = generate(home.path(), "cuda", &[]).unwrap();
    assert!(launches(&second) < launches(&first), "{} after {}", launches(&second), launches(&first));
    assert_eq!(verdicts(home.path()), kept);

    // Another driver is another verdict, and the first one stays.
    let other = generate(home.path(), "cuda", &[("FAKE_VERSION", "12040")]).unwrap();
    assert_eq!(launches(&other), launches(&first));
    let both = verdicts(home.path());
    assert!(both.len() == 2 && both.contains(&kept[0]), "{both:?}");

    // A damaged file is as none.
    let path = home.path().join("self-test").join(&kept[0].0);
    std::fs::write(&path, &kept[0].1[..kept[0].1.len() / 2]).unwrap();
    let again = generate(home.path(), "cuda", &[]).unwrap();
    assert_eq!((launches(&again), stdout(&again)), (launches(&first), stdout(&first)));
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(serde_json::from_str::<Value>(&text).is_ok_and(|v| v["about"]["device"] == "Fake 0"), "{text}");

    // What the doctor finds takes its place.
    doctor(home.path(), &[("FAKE_WRONG", "activation_relu")]).unwrap();
    let found: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(
        (&found["depth"], &outcome(&found, "activation")["outcome"]),
        (&"full".into(), &"failed".into())
    );
}

/// A kernel that took the device away in the middle of a test is left out of the next one, which makes up for the rest.
#[test]
fn a_test_that_was_cut_short_goes_on_without_the_kernel() {
    let home = tempfile::tempdir().unwrap();
    let Some(right) = generate(home.path(), "cuda", &[]) else { return };
    let (name, text) = verdicts(home.path()).remove(0);
    let mut cut: Value = serde_json::from_str(&text).unwrap();
    let groups = cut["groups"].as_array_mut().unwrap();
    let at = groups.iter().position(|g| g["name"] == "products, quantised").unwrap();
    groups[at]["outcome"] = "failed".into();
    groups[at]["failed"] = serde_json::json!({ "gemv_q4_0_f16": "an illegal access" });
    groups[at + 1..].iter_mut().for_each(|g| g["outcome"] = "not_run".into());
    std::fs::write(home.path().join("self-test").join(&name), cut.to_string()).unwrap();

    let out = generate(home.path(), "cuda", &[]).unwrap();
    assert_eq!((out.status.code(), stdout(&out)), (Some(0), stdout(&right)), "{}", stderr(&out));
    assert!(
        stderr(&out).contains("gemv_q4_0_f16 failed the self-test (an illegal access)"),
        "{}",
        stderr(&out)
    );
    let whole: Value = serde_json::from_str(&verdicts(home.path())[0].1).unwrap();
    for group in whole["groups"].as_array().unwrap() {
        let quantised = group["name"] == "products, quantised";
        assert_eq!(group["outcome"], if quantised { "failed" } else { "passed" }, "{group}");
    }
    assert_eq!(outcome(&whole, "products, quantised")["failed"].as_object().unwrap().len(), 1);
}

/// The kernels on the host, where this build has them: no driver, nothing planted.
#[test]
fn the_kernels_on_the_host_are_right() {
    if let Some(why) = tandem::device::built::NO_EMULATION {
        return println!("skipped: {why}");
    }
    let home = tempfile::tempdir().unwrap();
    let args = ["doctor", "--gpu=emulated:kernels", "--json", "--no-probe"];
    let report = json(&run(command::tandem(home.path()).args(args)));
    let groups = report["self_test"]["groups"].as_array().unwrap();
    assert!(groups.len() == 11 && groups.iter().all(|g| g["outcome"] == "passed"), "{}", report["self_test"]);
}
