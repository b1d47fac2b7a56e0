//! Where nvcc, ptxas and libclang are: named by variables, installed, or in `.cuda/` (`scripts/get-nvcc`).

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Result;

/// The variables that decide what is found and made.
pub const VARIABLES: [&str; 10] = [
    "NVCC",
    "CUDA_HOME",
    "CUDA_PATH",
    "VIRTUAL_ENV",
    "LIBCLANG_PATH",
    "LLVM_CONFIG_PATH",
    "CXX",
    "TANDEM_NO_CUDA",
    "TANDEM_CUDA_CACHE",
    "TANDEM_LINEINFO",
];

/// How to get what is missing.
pub const REMEDY: &str = "scripts/get-nvcc installs it below .cuda/";

/// The value of a variable, if it is set and not empty.
pub fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|v| !v.is_empty())
}

/// NVIDIA's compiler and assembler.
pub struct Nvcc {
    pub nvcc: PathBuf,
    /// `13.0.88`.
    pub version: String,
}

/// NVIDIA's assembler of PTX.
pub struct Ptxas {
    pub path: PathBuf,
    /// `12.9.86`.
    pub version: String,
}

impl Ptxas {
    /// The CUDA release that it belongs to, as the driver numbers them: 12090.
    pub fn cuda(&self) -> Result<u32> {
        let mut numbers = self.version.split('.').map_while(|n| n.parse::<u32>().ok());
        match (numbers.next(), numbers.next()) {
            (Some(major), Some(minor)) => Ok(1000 * major + 10 * minor),
            _ => Err(format!("{}: version {:?}", self.path.display(), self.version)),
        }
    }
}

/// The assembler of the machine code in the program: of CUDA 12, if there is one below `.cuda/`, since drivers before
/// CUDA 13's refuse code that an assembler of CUDA 13 made. Otherwise nvcc's own.
///
/// # Errors
/// It is there and does not run.
pub fn ptxas(nvcc: &Nvcc) -> Result<Ptxas> {
    let beside = nvcc.nvcc.with_file_name("ptxas");
    let own = if beside.is_file() { beside } else { PathBuf::from("ptxas") };
    let older = PathBuf::from(".cuda/ptxas-12.9/nvidia/cuda_nvcc/bin/ptxas");
    let path = if older.is_file() { older } else { own };
    let version = version_of(&path)?;
    Ok(Ptxas { path, version })
}

/// What `--version` of one of NVIDIA's tools says.
fn version_of(tool: &Path) -> Result<String> {
    let text = output(Command::new(tool).arg("--version"))?;
    let version = text.split(", V").nth(1).and_then(|rest| rest.split_whitespace().next());
    version
        .map(str::to_owned)
        .ok_or_else(|| format!("`{} --version` names no version: {text}", tool.display()))
}

/// Looks for nvcc: `$NVCC`, `$CUDA_HOME` and `$CUDA_PATH`, `PATH`, a virtual environment, `.cuda/`.
///
/// # Errors
/// A variable names an nvcc that is not there or does not run.
pub fn nvcc() -> Result<Option<Nvcc>> {
    if let Some(path) = variable("NVCC") {
        return usable(Path::new(&path)).map(Some).map_err(|e| format!("NVCC={path}: {e}"));
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(variable);
    let mut candidates: Vec<PathBuf> = homes.map(|home| Path::new(&home).join("bin/nvcc")).collect();
    let path = env::var_os("PATH").unwrap_or_default();
    candidates.extend(env::split_paths(&path).map(|folder| folder.join("nvcc")));
    for environment in environments() {
        candidates.push(environment.join("bin/nvcc"));
        candidates.extend(packages(&environment).into_iter().map(|p| p.join("nvidia/cu13/bin/nvcc")));
    }
    match candidates.into_iter().find(|c| c.is_file()) {
        Some(path) => usable(&path).map(Some).map_err(|e| format!("{}: {e}", path.display())),
        None => Ok(None),
    }
}

fn usable(nvcc: &Path) -> Result<Nvcc> {
    Ok(Nvcc { nvcc: nvcc.to_owned(), version: version_of(nvcc)? })
}

/// The folder of a libclang that came with Python packages, for bindgen.
pub fn packaged_libclang() -> Option<PathBuf> {
    let roots = environments().into_iter().flat_map(|e| packages(&e));
    roots.map(|p| p.join("clang/native")).find(|folder| folder.join("libclang.so").is_file())
}

/// Python environments that may hold the compiler.
fn environments() -> Vec<PathBuf> {
    let active = variable("VIRTUAL_ENV").map(PathBuf::from);
    [PathBuf::from(".cuda")].into_iter().chain(active).collect()
}

/// The `site-packages` folders of an environment.
fn packages(environment: &Path) -> Vec<PathBuf> {
    let versions = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    versions.map(|v| v.path().join("site-packages")).filter(|p| p.is_dir()).collect()
}

/// What a command prints to stdout.
///
/// # Errors
/// It does not start or fails; with what it said.
pub fn output(command: &mut Command) -> Result<String> {
    let (out, _) = outputs(command)?;
    Ok(out)
}

/// What a command prints to stdout and to stderr.
///
/// # Errors
/// As [`output`].
pub fn outputs(command: &mut Command) -> Result<(String, String)> {
    let name = command.get_program().to_string_lossy().into_owned();
    let done = command.output().map_err(|e| format!("cannot run {name}: {e}"))?;
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    if !done.status.success() {
        return Err(format!("{name} failed ({}):\n{out}{err}", done.status));
    }
    Ok((out.into_owned(), err.into_owned()))
}
