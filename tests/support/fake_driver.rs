//! Running tests in processes of their own whose CUDA driver is a stand-in (`fake_cuda/`): a driver is loaded once.
//!
//! A module of tests with [`Cases`] has an ignored test `inside`, which runs the case named by `FAKE_CASE`. [`again`] runs tests of
//! a room once more, with the stand-in as the device.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tandem::device::Runtime;
use tandem::device::built::{self, MODULES};

/// The kernels' host emulation, which the stand-in runs kernels with, if this build has one.
const EMULATION: Option<&str> = option_env!("TANDEM_EMULATION_ARCHIVE");

/// How long a process may take.
const PATIENCE: Duration = Duration::from_secs(300);

/// The folder with the stand-in, if there is a C compiler. It is built once for what it is made of.
pub fn stand_in() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(build).as_deref()
}

fn build() -> Option<PathBuf> {
    let sources = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_cuda"));
    let files = fs::read_dir(sources).expect("its sources").map(|f| f.expect("a file").path());
    let mut files: Vec<PathBuf> = files.collect();
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in &files {
        fs::read(file).expect("a source").hash(&mut hasher);
    }
    if let Some(archive) = EMULATION {
        let about = fs::metadata(archive).expect("the kernels' emulation");
        (archive, about.len(), about.modified().expect("a time")).hash(&mut hasher);
    }
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = tmp.join(format!("fake-cuda-{:016x}", hasher.finish()));
    let library = folder.join("libcuda.so");
    if library.is_file() {
        return Some(folder);
    }
    fs::create_dir_all(&folder).expect("a folder for the stand-in");
    // Rooms run beside each other: it appears when it is whole.
    let unfinished = folder.join(format!("unfinished-{}", std::process::id()));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O3", "-w", "-I"]).arg(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/host"));
    cc.arg("-o").arg(&unfinished).args(files.iter().filter(|f| f.extension().is_some_and(|e| e == "c")));
    if let Some(archive) = EMULATION {
        // A copy of its own, whatever the program has.
        cc.args(["-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL", "-Wl,--whole-archive"]).arg(archive);
        cc.args(["-Wl,--no-whole-archive", "-lstdc++", "-lm"]);
    }
    match cc.arg("-lpthread").output() {
        Ok(out) if out.status.success() => {}
        Ok(out) => panic!("{}", String::from_utf8_lossy(&out.stderr)),
        Err(_) => return None,
    }
    fs::rename(&unfinished, &library).expect("the stand-in gets its name");
    Some(folder)
}

/// Whether the stand-in can run kernels; says why it cannot.
pub fn executes() -> bool {
    let whole = EMULATION.is_some() && built::NVCC.is_ok();
    if !whole {
        println!("skipped: a stand-in for the driver that runs kernels: {:?}", built::NO_EMULATION);
    }
    whole
}

/// The command line, with the stand-in as its driver, late and not tiny.
pub fn tandem(home: &Path) -> Option<Command> {
    let folder = stand_in().filter(|_| executes())?;
    let mut command = super::command::tandem(home);
    command.env("LD_LIBRARY_PATH", folder).envs([
        ("FAKE_ORDER", "late"),
        ("FAKE_MEMORY", "17179869184"),
        ("FAKE_CHECKS", "5"),
    ]);
    Some(command)
}

/// This program, with the stand-in as its driver.
fn program() -> Option<Command> {
    let Some(folder) = stand_in() else {
        println!("skipped: no C compiler for the stand-in of the driver");
        return None;
    };
    if let Err(why) = built::NVCC {
        println!("skipped: no kernels to run: {why}");
        return None;
    }
    let mut command = Command::new(std::env::current_exe().expect("this test has a path"));
    command.env("LD_LIBRARY_PATH", folder).env("TANDEM_TEST_DEVICE", "cuda").arg("--test-threads=1");
    Some(command)
}

/// Runs it to its end: whether it succeeded, and what it said.
fn output(command: &mut Command) -> (bool, String) {
    let mut said = tempfile::tempfile().expect("a file for what it says");
    let both = || Stdio::from(said.try_clone().expect("a handle"));
    let mut child = command.stdin(Stdio::null()).stdout(both()).stderr(both()).spawn().expect("it starts");
    let begun = Instant::now();
    let status = loop {
        match child.try_wait().expect("it can be waited for") {
            Some(status) => break Some(status),
            None if begun.elapsed() > PATIENCE => break None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    if status.is_none() {
        child.kill().and_then(|()| child.wait()).expect("it ends");
    }
    let mut bytes = Vec::new();
    std::io::Seek::rewind(&mut said).expect("from the beginning");
    std::io::Read::read_to_end(&mut said, &mut bytes).expect("what it said");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    match status {
        Some(status) => (status.success(), if status.success() { text } else { format!("{text}\n{status}") }),
        None => (false, format!("{text}\nstill at it after {PATIENCE:?}")),
    }
}

/// The cases of a module of tests.
pub struct Cases(&'static str);

impl Cases {
    /// Those of the module of this `module_path!()`.
    pub const fn of(module: &'static str) -> Cases {
        Cases(module)
    }

    /// Runs `case` of the module's `inside` with the stand-in: whether it succeeded, and what it said.
    pub fn tried(&self, case: &str, env: &[(&str, &str)]) -> Option<(bool, String)> {
        let (_room, module) = self.0.split_once("::").expect("a module of a room");
        let mut command = program()?;
        command.args(["--exact", &format!("{module}::inside"), "--ignored", "--nocapture"]);
        let (succeeded, text) = output(command.env("FAKE_CASE", case).envs(env.iter().copied()));
        assert!(text.contains("running 1 test\n"), "{case}: no {module}::inside: {text}");
        Some((succeeded, text))
    }

    /// Runs `case` of the module's `inside` with the stand-in: what it said.
    pub fn child(&self, case: &str, env: &[(&str, &str)]) -> Option<String> {
        let (succeeded, text) = self.tried(case, env)?;
        assert!(succeeded, "{case} {env:?}: {text}");
        Some(text)
    }

    /// As [`Cases::child`]; everything was given back to the driver, once, when nothing used it and nothing was recorded.
    pub fn run(&self, case: &str, env: &[(&str, &str)]) -> Option<String> {
        let text = self.child(case, env)?;
        for rule in RULES.map(|r| format!("fake driver: {r}")) {
            assert!(!text.contains(&rule), "{case}: {text}");
        }
        Some(text)
    }

    /// The error of `case` is of the given kind and contains all parts.
    pub fn says(&self, case: &str, env: &[(&str, &str)], parts: &[&str]) {
        let Some(text) = self.run(case, env) else { return };
        let error = text.lines().find_map(|l| l.split_once("error: ")).map(|(_, e)| e);
        let error = error.unwrap_or_else(|| panic!("{case}: no error in {text}"));
        for part in parts {
            assert!(error.contains(part), "{case}: {part:?} wanted in {error:?}");
        }
    }
}

/// How complaints of the stand-in about the program begin.
const RULES: [&str; 5] = ["leaked", "no ", "still", "gave back", "cu"];

/// Runs the tests of this program whose names contain one of `tests`, on the stand-in, in this order of execution (`FAKE_ORDER`):
/// whether they succeeded, and what was said.
pub fn tried_again(tests: &[&str], order: &str, env: &[(&str, &str)]) -> Option<(bool, String)> {
    tried_on(None, tests, order, env)
}

/// As [`tried_again`], if a core is given on this one alone.
fn tried_on(
    core: Option<usize>,
    tests: &[&str],
    order: &str,
    env: &[(&str, &str)],
) -> Option<(bool, String)> {
    if std::env::var_os("TANDEM_TEST_DEVICE").is_some_and(|device| !device.is_empty()) {
        println!("skipped: the stand-in for the driver, since TANDEM_TEST_DEVICE names the devices");
        return None;
    }
    if !executes() {
        return None;
    }
    let mut command = program()?;
    // A device that is not tiny. The tests of a room share one runtime, which lives as long as the process. Races within a kernel
    // do not depend on what is in other streams: they are looked for elsewhere.
    let roomy =
        [("FAKE_ORDER", order), ("FAKE_MEMORY", "17179869184"), ("FAKE_KEEPS", "1"), ("FAKE_CHECKS", "5")];
    command.args(tests).args(["--skip", "stand_in::"]).envs(roomy).envs(env.iter().copied());
    if let Some(core) = core {
        confine(&mut command, core);
    }
    let (succeeded, text) = output(&mut command);
    assert!(!text.contains("running 0 tests"), "{tests:?}: nothing ran: {text}");
    Some((succeeded, text))
}

/// As [`tried_again`]: they succeed, and the driver has nothing to complain of. What was said.
pub fn again(tests: &[&str], order: &str, env: &[(&str, &str)]) -> Option<String> {
    again_on(None, tests, order, env)
}

fn again_on(core: Option<usize>, tests: &[&str], order: &str, env: &[(&str, &str)]) -> Option<String> {
    let begun = Instant::now();
    let (succeeded, text) = tried_on(core, tests, order, env)?;
    assert!(succeeded, "{tests:?}, {order}, {env:?}: {text}");
    for rule in RULES.map(|r| format!("fake driver: {r}")) {
        assert!(!text.contains(&rule), "{tests:?}, {order}: {text}");
    }
    let result = text.lines().find(|l| l.starts_with("test result")).unwrap_or_default();
    let launches = text.lines().rfind(|l| l.ends_with(" launches")).unwrap_or_default();
    let took = begun.elapsed().as_secs_f64();
    println!("{tests:?}, {order}, {env:?}: {result}, {launches}, {took:.1} s");
    Some(text)
}

/// As [`again`] with `FAKE_PLAIN`: kernels did run by plain loops.
pub fn again_plainly(tests: &[&str], order: &str, env: &[(&str, &str)]) {
    again_plainly_on(None, tests, order, env);
}

/// As [`again_plainly`], in as many processes as are wanted, each in an order of its own (`FAKE_ORDER=calls:N`) and with the environment of
/// its number. A process has a core for itself and no other: so its threads do not spin for each other, which takes many times as long.
pub fn again_plainly_in(
    processes: u64,
    tests: &[&str],
    env: impl Fn(u64) -> Vec<(&'static str, String)> + Sync,
) {
    let next = AtomicU64::new(0);
    let work = |core| {
        loop {
            let process = next.fetch_add(1, Ordering::Relaxed);
            if process >= processes {
                return;
            }
            let env = env(process);
            let env: Vec<(&str, &str)> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
            again_plainly_on(Some(core), tests, &format!("calls:{process}"), &env);
        }
    };
    std::thread::scope(|s| cores().into_iter().for_each(|core| drop(s.spawn(move || work(core)))));
}

fn again_plainly_on(core: Option<usize>, tests: &[&str], order: &str, env: &[(&str, &str)]) {
    let env: Vec<_> = [("FAKE_PLAIN", "1")].into_iter().chain(env.iter().copied()).collect();
    if let Some(text) = again_on(core, tests, order, &env) {
        assert!(text.contains(" kernels by plain loops"), "{tests:?}: none by plain loops: {text}");
    }
}

/// The cores that this process may use.
fn cores() -> Vec<usize> {
    // SAFETY: a set of bits, for which zeros are a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set has the size that is given.
    let code = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &mut set) };
    assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: cores below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// The command runs on one core.
fn confine(command: &mut Command, core: usize) {
    // SAFETY: a set of bits, for which zeros are a value, and a core below its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        set
    };
    let pin = move || {
        // SAFETY: the set has the size that is given.
        match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec it makes a system call and touches nothing else.
    unsafe { command.pre_exec(pin) };
}

/// The orders in which work runs: `late`, and as many seeds as `TANDEM_FAKE_SEEDS` says, or `otherwise`.
pub fn orders(otherwise: u64) -> Vec<String> {
    let seeds = std::env::var("TANDEM_FAKE_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(otherwise);
    let seeds = (0..seeds).map(|seed| format!("seed:{seed}"));
    std::iter::once("late".to_owned()).chain(seeds).collect()
}

/// A function of the stand-in. Inside a case.
///
/// # Safety
/// `F` is the function's type.
pub unsafe fn function<F: Copy>(name: &str) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "a function");
    let folder = std::env::var("LD_LIBRARY_PATH").expect("a case runs with the stand-in");
    let path = CString::new(format!("{folder}/libcuda.so")).expect("no NUL");
    let name = CString::new(name).expect("no NUL");
    // SAFETY: the stand-in is loaded already; both names end in NUL. The type is the caller's promise.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let function: *mut c_void = libc::dlsym(library, name.as_ptr());
        assert!(!function.is_null(), "the stand-in has {name:?}");
        std::mem::transmute_copy::<*mut c_void, F>(&function)
    }
}

/// How often the stand-in was called by a name, or something of a name happened to it. Inside a case.
pub fn count(name: &str) -> i32 {
    type Count = extern "C" fn(*const c_char) -> c_int;
    let name = CString::new(name).expect("no NUL");
    // SAFETY: the function has this signature and does not keep the name.
    unsafe { function::<Count>("fake_count")(name.as_ptr()) }
}

/// A kernel that the device has, and the bytes of its parameters.
pub fn some_kernel(rt: &dyn Runtime) -> (&'static str, usize) {
    let all = MODULES.iter().flat_map(|m| m.kernels);
    let kernel = all.into_iter().find(|k| rt.has_kernel(k.name)).expect("a kernel");
    (kernel.name, kernel.params as usize)
}
