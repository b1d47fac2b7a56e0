//! Running a test's cases in processes of their own whose CUDA driver is a stand-in (`fake_cuda.c`): a driver is loaded once.
//!
//! A module of tests that uses it has an ignored test `inside`, which runs the case named by `FAKE_CASE`.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tandem::device::Runtime;
use tandem::device::built::{self, MODULES};

/// The folder with the stand-in, if there is a C compiler.
fn stand_in() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fake-cuda-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for the stand-in");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_cuda.c");
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-w", "-o"]).arg(folder.join("libcuda.so")).arg(source);
        match cc.output() {
            Ok(out) if out.status.success() => Some(folder),
            Ok(out) => panic!("{}", String::from_utf8_lossy(&out.stderr)),
            Err(_) => None,
        }
    };
    BUILT.get_or_init(build).as_deref()
}

/// The cases of a module of tests.
pub struct Cases(&'static str);

impl Cases {
    /// Those of the module of this `module_path!()`.
    pub const fn of(module: &'static str) -> Cases {
        Cases(module)
    }

    /// Runs `case` of the module's `inside` with the stand-in: what it said.
    pub fn child(&self, case: &str, env: &[(&str, &str)]) -> Option<String> {
        let Some(folder) = stand_in() else {
            println!("skipped: no C compiler for the stand-in of the driver");
            return None;
        };
        if let Err(why) = built::NVCC {
            println!("skipped: no kernels to run: {why}");
            return None;
        }
        let (_room, module) = self.0.split_once("::").expect("a module of a room");
        let mut command = Command::new(std::env::current_exe().expect("this test has a path"));
        command.args(["--exact", &format!("{module}::inside")]);
        command.args(["--ignored", "--nocapture", "--test-threads=1"]);
        command.env("LD_LIBRARY_PATH", folder).env("FAKE_CASE", case).env("TANDEM_TEST_DEVICE", "cuda");
        let out = command.envs(env.iter().copied()).output().expect("it starts");
        let text =
            format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success(), "{case}: {text}");
        assert!(text.contains("running 1 test\n"), "{case}: no {module}::inside: {text}");
        Some(text)
    }

    /// As [`Cases::child`]; everything was given back to the driver, once, when nothing used it and nothing was recorded.
    pub fn run(&self, case: &str, env: &[(&str, &str)]) -> Option<String> {
        let text = self.child(case, env)?;
        for rule in ["leaked", "no ", "still", "gave back", "cu"].map(|r| format!("fake driver: {r}")) {
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

/// How often the stand-in was called by a name, or something of a name happened to it. Inside a case.
pub fn count(name: &str) -> i32 {
    type Count = extern "C" fn(*const c_char) -> c_int;
    let folder = std::env::var("LD_LIBRARY_PATH").expect("a case runs with the stand-in");
    let path = CString::new(format!("{folder}/libcuda.so")).expect("no NUL");
    let name = CString::new(name).expect("no NUL");
    // SAFETY: the stand-in is loaded already; its function has this signature and does not keep the name.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let function: *mut c_void = libc::dlsym(library, c"fake_count".as_ptr());
        assert!(!function.is_null(), "the stand-in counts");
        std::mem::transmute::<*mut c_void, Count>(function)(name.as_ptr())
    }
}

/// A kernel that the device has, and the bytes of its parameters.
pub fn some_kernel(rt: &dyn Runtime) -> (&'static str, usize) {
    let all = MODULES.iter().flat_map(|m| m.kernels);
    let kernel = all.into_iter().find(|k| rt.has_kernel(k.name)).expect("a kernel");
    (kernel.name, kernel.params as usize)
}
