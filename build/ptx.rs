//! Compiles `cuda/*.cu` to PTX for every target, and assembles it to see what it needs.
//!
//! PTX is embedded, not machine code: it is smaller, and the driver's own assembler knows its GPU best.
//! It is assembled here all the same, so that an error or a spill shows at the desk and not on the GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Sources};
use crate::spills::{self, NoSpill, Usage};
use crate::tools::{self, Nvcc};
use crate::{Part, Result, jobs};

/// A virtual architecture to compile for, and the real one to assemble for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// 10 * major + minor.
    pub sm: u32,
    /// With instructions of exactly this GPU (`90a`): no later one runs them.
    pub exact: bool,
}

impl Target {
    fn name(self) -> String {
        format!("{}{}", self.sm, if self.exact { "a" } else { "" })
    }
}

/// T4; A10, 3090, 4060, L40S; H100 and later. Files named `*_sm90a.cu` are for the last one only.
const EVERY: [Target; 3] =
    [Target { sm: 75, exact: false }, Target { sm: 80, exact: false }, Target { sm: 90, exact: false }];
const SM90A: Target = Target { sm: 90, exact: true };

const FLAGS: [&str; 5] = ["-O3", "--std=c++17", "-lineinfo", "-Icuda/include", "--ptx"];
const SOURCES: Sources = Sources { include: &["cuda/include"], never: Some("cuda/host") };

/// One file compiled for one target.
pub struct Module {
    pub target: Target,
    /// `gemv` of `cuda/gemv.cu`.
    pub name: String,
    pub ptx: PathBuf,
    /// PTX language version.
    pub version: (u32, u32),
    /// Names, and bytes of the parameter struct.
    pub kernels: Vec<(String, u32)>,
    usage: Vec<Usage>,
}

pub struct Compiled {
    pub nvcc: String,
    pub modules: Vec<Module>,
}

/// Compiles all files that changed.
///
/// # Errors
/// A kernel does not compile or assemble, or spills though its file says that it must not.
pub fn compile() -> Result<Part<Compiled>> {
    if tools::variable("TANDEM_NO_CUDA").is_some_and(|v| v != "0") {
        return Ok(Part::Missing("TANDEM_NO_CUDA is set".into()));
    }
    let Some(nvcc) = tools::nvcc()? else {
        return Ok(Part::Missing(format!(
            "no nvcc found ($NVCC, $CUDA_HOME, PATH, .cuda/); {}",
            tools::REMEDY
        )));
    };
    let cache = Cache::open()?;
    let units: Vec<(PathBuf, Target)> = kernel_files()?
        .into_iter()
        .flat_map(|file| targets(&file).iter().map(|t| (file.clone(), *t)).collect::<Vec<_>>())
        .collect();
    let modules = jobs::run(&units, |(file, target)| unit(&nvcc, &cache, file, *target))?;
    unique(&modules)?;
    cache.report(&table(&modules));
    cache.expire();
    Ok(Part::Made(Compiled { nvcc: nvcc.version, modules }))
}

/// The kernels' files, sorted.
pub fn kernel_files() -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir("cuda").map_err(|e| format!("cuda: {e}"))?;
    let mut files: Vec<_> = entries.flatten().map(|e| e.path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "cu"));
    files.sort();
    Ok(files)
}

fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn targets(file: &Path) -> &'static [Target] {
    if stem(file).ends_with("_sm90a") { &[SM90A] } else { &EVERY }
}

fn unit(nvcc: &Nvcc, cache: &Cache, file: &Path, target: Target) -> Result<Module> {
    let arch = target.name();
    let key = SOURCES.key(file, &(&FLAGS, &arch, &nvcc.version))?;
    let ptx = cache.get(key, "ptx", |to| {
        let mut command = Command::new(&nvcc.nvcc);
        command.args(FLAGS).arg(format!("-arch=compute_{arch}")).arg(file).arg("-o").arg(to);
        tools::outputs(&mut command).map(drop)
    })?;
    let log = cache.get(key, "ptxas", |to| {
        let cubin = to.with_extension("cubin");
        let mut command = Command::new(&nvcc.ptxas);
        command.args(["-v", &format!("-arch=sm_{arch}")]).arg(&ptx).arg("-o").arg(&cubin);
        let (out, err) = tools::outputs(&mut command)?;
        // Only the log is kept.
        let _ = fs::remove_file(&cubin);
        fs::write(to, out + &err).map_err(|e| format!("{}: {e}", to.display()))
    })?;
    let read = |path: &Path| fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()));
    let (source, text) = (read(file)?, read(&ptx)?);
    let kernels = entries(&text);
    let usage = spills::parse(&read(&log)?);
    let must_not = NoSpill::of(&source);
    // Kernels that a target lacks (bf16 below 80) are no typing errors.
    if let (90, Some(name)) = (target.sm, must_not.unknown(&kernels)) {
        return Err(format!(
            "{}: `no-spill` or `may-spill {name}`: the file has no such kernel",
            file.display()
        ));
    }
    let spilling = usage.iter().filter(|u| u.spilled > 0 && must_not.covers(&u.kernel, &arch));
    let spilling: Vec<_> =
        spilling.map(|u| format!("{} ({} bytes, {} registers)", u.kernel, u.spilled, u.registers)).collect();
    if !spilling.is_empty() {
        let all = spilling.join(", ");
        return Err(format!("{}: kernels that must not spill do, for sm_{arch}: {all}", file.display()));
    }
    Ok(Module { target, name: stem(file), ptx, version: version(&text, file)?, kernels, usage })
}

/// Names after `.entry`, and the size of the parameter: `.visible .entry name(`, then
/// `.param .align 8 .b8 name_param_0[48]`.
fn entries(ptx: &str) -> Vec<(String, u32)> {
    let after = ptx.split(".entry ").skip(1);
    let entry = |rest: &str| {
        let (name, rest) = rest.split_once('(')?;
        let parameter = rest.split_once(')')?.0;
        let bytes = parameter.rsplit_once('[').and_then(|(_, n)| n.split(']').next()?.parse().ok());
        Some((name.trim().to_owned(), bytes.unwrap_or(0)))
    };
    after.filter_map(entry).collect()
}

fn version(ptx: &str, file: &Path) -> Result<(u32, u32)> {
    let number = ptx.lines().find_map(|line| line.strip_prefix(".version "));
    let parse = |text: &str| {
        let (major, minor) = text.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    number.and_then(parse).ok_or_else(|| format!("{}: the PTX has no `.version`", file.display()))
}

/// Kernels are launched by name: two files must not have one of the same name.
fn unique(modules: &[Module]) -> Result<()> {
    let mut owners = std::collections::BTreeMap::new();
    for module in modules {
        for (kernel, _) in &module.kernels {
            let owner = *owners.entry(kernel).or_insert(&module.name);
            if *owner != module.name {
                return Err(format!("kernel {kernel}: in cuda/{owner}.cu and in cuda/{}.cu", module.name));
            }
        }
    }
    Ok(())
}

/// Registers, stack and spills of every kernel, for people: `target/cuda-cache/report.txt`.
fn table(modules: &[Module]) -> String {
    let mut out =
        format!("{:<48} {:>6} {:>9} {:>6} {:>7}\n", "kernel", "target", "registers", "stack", "spilled");
    for module in modules {
        for u in &module.usage {
            let (target, of) = (module.target.name(), [u.registers, u.stack, u.spilled]);
            out += &format!("{:<48} {target:>6} {:>9} {:>6} {:>7}\n", u.kernel, of[0], of[1], of[2]);
        }
    }
    out
}
