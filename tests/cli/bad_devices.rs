//! Devices that are less than they seem, on the stand-in for the driver: slices of a GPU, memory that has no end, drivers that refuse,
//! memory that goes and devices that are lost on the way. One sentence, a path that works, and the right tokens.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use crate::support::command::{json, run, stderr, stdout};
use crate::support::fake_driver::{self, stand_in};

const MODEL: &str = "synth:tiny-llama,layers=26,dtype=q8_0,seed=1";

/// Questions about free memory until a model is loaded as planned.
const PLANNED: u32 = 5;

/// A home that keeps verdicts on kernels: the first run of all makes them.
fn home() -> PathBuf {
    static ONCE: OnceLock<PathBuf> = OnceLock::new();
    let make = || {
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bad-devices");
        std::fs::create_dir_all(&home).unwrap();
        if let Some(mut first) = fake_driver::tandem(&home) {
            let words = format!("generate -m {MODEL} -n 1 --device cuda --strategy gpu-only x");
            let out = run(first.args(words.split(' ')));
            assert_eq!(out.status.code(), Some(0), "{}", stderr(&out));
        }
        home
    };
    ONCE.get_or_init(make).clone()
}

/// The command line on the stand-in; `None` where this build has none that runs kernels.
fn tandem(words: &str, env: &[(&str, &str)]) -> Option<Command> {
    let mut tandem = fake_driver::tandem(&home())?;
    tandem.args(words.split(' ')).env("FAKE_CHECKS", "0").envs(env.iter().copied());
    Some(tandem)
}

/// A slice has a name, and is predicted by its share of the whole GPU's figures.
#[test]
fn a_slice_of_a_gpu_is_told_and_counts_as_one() {
    let slice = [
        ("FAKE_NAME", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ("FAKE_UNITS", "16"),
        ("FAKE_MEMORY", "10737418240"),
    ];
    let Some(mut doctor) = tandem("doctor --no-probe --json", &slice) else { return };
    let report = json(&run(&mut doctor));
    let device = &report["cuda"]["devices"][0];
    assert_eq!((&device["slice"], &device["multiprocessors"]), (&"1g.10gb".into(), &16.into()), "{device}");
    let text = stdout(&run(&mut tandem("doctor --no-probe", &slice).unwrap()));
    assert!(text.contains("a slice of a GPU (MIG 1g.10gb) with 16 multiprocessors"), "{text}");

    let words = format!("generate -m {MODEL} --json -n 1 --device cuda --strategy gpu-only x");
    let plan = json(&run(&mut tandem(&words, &slice).unwrap()))["plan"].clone();
    let by = plan["predicted"]["by"].as_str().unwrap_or_else(|| panic!("{plan}"));
    assert!(by.contains("the share of a slice (1g.10gb) in the figures of h100-sxm"), "{by}");
}

/// A folder with the stand-in where Windows' driver is.
fn wsl(home: &Path) -> Option<String> {
    let folder = home.join("usr/lib/wsl/lib");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::copy(stand_in()?.join("libcuda.so"), folder.join("libcuda.so")).unwrap();
    Some(folder.to_str().unwrap().to_owned())
}

/// Below WSL too much is no error but lies in the host's memory: nothing may get there. Another process takes much of
/// the device when everything is planned.
#[test]
fn nothing_spills_to_the_host_below_wsl() {
    let temporary = tempfile::tempdir().unwrap();
    let Some(folder) = wsl(temporary.path()) else { return };
    let spills = "fake driver: spills";
    let generate = |wsl: bool| -> Option<Output> {
        let words = format!("generate -m {MODEL} --json -n 2 --ctx 256 --device cuda --strategy helm x");
        let taken = format!("{PLANNED}:14680064");
        let env = [
            ("FAKE_MEMORY", "39845888"),
            ("FAKE_CONTEXT", "2097152"),
            ("FAKE_SPILLS", "1"),
            ("FAKE_TAKEN", &taken),
        ];
        let mut tandem = tandem(&words, &env)?;
        if wsl {
            tandem.env("LD_LIBRARY_PATH", &folder);
        }
        Some(run(&mut tandem))
    };
    let Some(unaware) = generate(false) else { return };
    assert!(stderr(&unaware).contains(spills), "the stand-in never spills: {}", stderr(&unaware));
    let aware = generate(true).unwrap();
    let said = stderr(&aware);
    assert!(!said.contains(spills) && said.contains("planning again with"), "{said}");
    let memory = json(&aware)["plan"]["memory"].clone();
    for side in ["gpu", "host"] {
        assert!(memory[side]["total"].as_u64() > Some(0), "nothing on the {side}: {memory}");
    }

    let mut doctor = tandem("doctor --no-probe --json", &[]).unwrap();
    assert_eq!(json(&run(doctor.env("LD_LIBRARY_PATH", &folder)))["cuda"]["wsl"], true);
    let mut doctor = tandem("doctor --no-probe", &[]).unwrap();
    let text = stdout(&run(doctor.env("LD_LIBRARY_PATH", &folder)));
    assert!(text.lines().any(|l| l.starts_with("! wsl") && l.contains("Windows' driver")), "{text}");
}
