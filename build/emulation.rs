//! Compiles the kernels of `cuda/` as C++, with the emulator of `cuda/host/` that runs them on the host.
//!
//! Kernels are compiled with ThreadSanitizer's instrumentation, but without its library: the emulator
//! supplies the functions that every memory access calls, and checks races, bounds and initialisation.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Sources};
use crate::{Part, Result, abi, jobs, ptx, tools};

const FLAGS: [&str; 11] = [
    "-std=c++17",
    "-O2",
    // Kernels see shared memory through pointers of many types, as nvcc lets them.
    "-fno-strict-aliasing",
    "-Wno-psabi",
    "-g1",
    "-fPIC",
    "-Icuda/include",
    "-Icuda/host",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    "-c",
];
/// A kernel's accesses are reported to the emulator; contraction would make sums differ from nvcc's rules.
/// A loop that became a call of memset would not be reported; entries and exits of functions need not be.
const KERNEL_FLAGS: [&str; 6] = [
    "-fsanitize=thread",
    "--param=tsan-instrument-func-entry-exit=0",
    "-fno-tree-loop-distribute-patterns",
    "-ffp-contract=off",
    "-x",
    "c++",
];
const SOURCES: Sources = Sources { include: &["cuda/include", "cuda/host"], never: None };

/// Whether this build asks for it: `cargo test` and `cargo bench` do.
pub fn wanted() -> bool {
    std::env::var_os("CARGO_FEATURE_HOST_EMULATION").is_some()
}

/// Compiles what changed and links it.
///
/// # Errors
/// The compiler's, with its message.
pub fn build() -> Result<Part<()>> {
    if !wanted() {
        return Ok(Part::Missing("the feature host-emulation is off".into()));
    }
    let target = std::env::var("TARGET").unwrap_or_default();
    if target != "x86_64-unknown-linux-gnu" {
        return Ok(Part::Missing(format!("it needs x86-64 Linux with glibc, this is {target}")));
    }
    let compiler =
        match cc::Build::new().cpp(true).cargo_metadata(false).cargo_warnings(false).try_get_compiler() {
            Ok(compiler) => compiler,
            Err(e) => return Ok(Part::Missing(format!("no C++ compiler ({e}); `apt install g++`"))),
        };
    let version = match tools::output(Command::new(compiler.path()).arg("--version")) {
        Ok(version) => version,
        Err(e) => return Ok(Part::Missing(format!("no C++ compiler ({e}); `apt install g++`"))),
    };
    let mut units: Vec<(PathBuf, bool)> = ptx::kernel_files()?.into_iter().map(|f| (f, true)).collect();
    units.extend(files("cuda/host", "cu")?.into_iter().map(|f| (f, true)));
    units.extend(files("cuda/host", "cpp")?.into_iter().map(|f| (f, false)));
    if !units.iter().any(|(_, kernel)| !kernel) {
        return Ok(Part::Missing("cuda/host/ has no emulator".into()));
    }
    let cache = Cache::open()?;
    let objects = jobs::run(&units, |(file, kernel)| {
        let flags = || FLAGS.iter().chain(kernel.then_some(&KERNEL_FLAGS).into_iter().flatten());
        let key = SOURCES.key(file, &(flags().collect::<Vec<_>>(), &version))?;
        cache.get(key, "o", |to| {
            let mut command = Command::new(compiler.path());
            command.args(flags()).arg(file).arg("-o").arg(to);
            tools::outputs(&mut command).map(drop)
        })
    })?;
    archive(&objects)?;
    abi::declare_emulator()?;
    cache.expire();
    Ok(Part::Made(()))
}

/// Makes a library of which everything is linked: kernels register themselves, nobody calls them by name.
fn archive(objects: &[PathBuf]) -> Result<()> {
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("Cargo sets OUT_DIR"));
    let library = out.join("libtandem_emulation.a");
    // An archive that exists would keep members whose files are gone.
    if library.exists() {
        fs::remove_file(&library).map_err(|e| format!("{}: {e}", library.display()))?;
    }
    tools::outputs(Command::new("ar").arg("crs").arg(&library).args(objects))?;
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static:+whole-archive=tandem_emulation");
    println!("cargo::rustc-link-lib=dylib=stdc++");
    // For tests: their stand-in for the driver runs kernels by a copy of its own.
    println!("cargo::rustc-env=TANDEM_EMULATION_ARCHIVE={}", library.display());
    Ok(())
}

fn files(folder: &str, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(format!("{folder}: {e}")),
    };
    let mut found: Vec<_> = entries.flatten().map(|e| e.path()).collect();
    found.retain(|path: &PathBuf| path.extension() == Some(Path::new(extension).as_os_str()));
    found.sort();
    Ok(found)
}
