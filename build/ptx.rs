//! Compiles `cuda/*.cu` to PTX for every target, lowered to the least version of the language, and in parts.
//!
//! A file whose header has a line `// modules q4_0 q4_1` becomes a module for each of these words: the kernels
//! whose names contain it. A GPU loads a module at a time, and a model needs few formats.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::{Cache, Sources};
use crate::promises::Promises;
use crate::tools::{self, Nvcc, Ptxas};
use crate::{Part, Result, assemble, isa, jobs, report};

/// A virtual architecture to compile for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// 10 * major + minor.
    pub sm: u32,
    /// With instructions of exactly this GPU (`90a`): no later one runs them.
    pub exact: bool,
}

impl Target {
    pub fn name(self) -> String {
        format!("{}{}", self.sm, if self.exact { "a" } else { "" })
    }

    /// The GPUs that get machine code made of this target's PTX; others compile the PTX.
    pub fn devices(self) -> &'static [u32] {
        match self.sm {
            75 => &[75],
            80 => &[80, 86, 89],
            _ => &[90],
        }
    }
}

/// T4; A10, 3090, 4060, L40S; H100 and later. Files named `*_sm90a.cu` are for the last one only.
const EVERY: [Target; 3] =
    [Target { sm: 75, exact: false }, Target { sm: 80, exact: false }, Target { sm: 90, exact: false }];
const SM90A: Target = Target { sm: 90, exact: true };

const FLAGS: [&str; 4] = ["-O3", "--std=c++17", "-Icuda/include", "--ptx"];
const SOURCES: Sources = Sources { include: &["cuda/include"], never: Some("cuda/host") };
/// Lowered texts are made again when the rules change.
const RULES: [&str; 2] = [include_str!("isa.rs"), include_str!("ptx.rs")];

/// One file, or a part of it, compiled for one target.
pub struct Module {
    pub target: Target,
    /// `gemv` of `cuda/gemv.cu`, `linear_quant.q4_0` of a file in parts.
    pub name: String,
    /// A hash of the PTX: machine code is assembled again when the text changes, not when its source does.
    pub digest: u64,
    /// The PTX: the text, and compressed.
    pub ptx: PathBuf,
    pub ptx_gz: PathBuf,
    /// PTX language version.
    pub version: isa::Version,
    pub kernels: Vec<Kernel>,
    pub promises: Promises,
    /// Instructions that the version was not lowered for.
    pub unknown: Vec<String>,
}

/// A kernel of a module.
pub struct Kernel {
    pub name: String,
    /// Bytes of the parameter struct.
    pub params: u32,
    /// Registers at entry that the kernel's `setmaxnreg` needs.
    pub registers: Option<u32>,
}

pub struct Compiled {
    pub nvcc: String,
    pub ptxas: Ptxas,
    pub modules: Vec<Module>,
    /// Of the module of the same place.
    pub code: Vec<Vec<assemble::Code>>,
}

/// Compiles and assembles all files that changed.
///
/// # Errors
/// A kernel does not compile or assemble, or is not what its file promises.
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
    let ptxas = tools::ptxas(&nvcc)?;
    // Tools that show source lines beside machine code want them; the program is larger for it.
    let lines = tools::variable("TANDEM_LINEINFO").is_some_and(|v| v != "0");
    let cache = Cache::open()?;
    let mut units: Vec<(PathBuf, Target)> = Vec::new();
    for file in kernel_files()? {
        units.extend(targets(&file).iter().map(|t| (file.clone(), *t)));
    }
    let modules = jobs::run(&units, |(file, target)| unit(&nvcc, &cache, file, *target, lines))?;
    let mut modules: Vec<Module> = modules.into_iter().flatten().collect();
    unique(&modules)?;
    share(&mut modules)?;
    for module in modules.iter().filter(|m| !m.unknown.is_empty()) {
        println!(
            "cargo::warning=cuda/{}.cu for {}: build/isa.rs does not know {}; it keeps PTX {}.{} of this nvcc, which \
             older drivers do not load",
            module.name,
            module.target.name(),
            module.unknown.join(", "),
            module.version.0,
            module.version.1
        );
    }
    let code = assemble::all(&ptxas, &cache, &modules, lines)?;
    cache.report("report.txt", &report::table(&ptxas.version, &modules, &code));
    cache.report("ptx.txt", &report::texts(&modules));
    cache.expire();
    Ok(Part::Made(Compiled { nvcc: nvcc.version, ptxas, modules, code }))
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

pub fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// A file for a target: its modules.
fn unit(nvcc: &Nvcc, cache: &Cache, file: &Path, target: Target, lines: bool) -> Result<Vec<Module>> {
    let arch = target.name();
    let flags: Vec<&str> = FLAGS.into_iter().chain(lines.then_some("-lineinfo")).collect();
    let key = SOURCES.key(file, &(&flags, &arch, &nvcc.version))?;
    let ptx = cache.get(key, "ptx", |to| {
        let mut command = Command::new(&nvcc.nvcc);
        command.args(&flags).arg(format!("-arch=compute_{arch}")).arg(file).arg("-o").arg(to);
        tools::outputs(&mut command).map(drop)
    })?;
    let source = read(file)?;
    let parts: Vec<Option<String>> = match header(&source, "modules") {
        Some(words) => words.split_whitespace().map(|w| Some(w.to_owned())).collect(),
        None => vec![None],
    };
    let of_part = |part: &Option<String>| {
        let key = Cache::key_of(&(key, part, lines, RULES));
        let least = cache.get(key, "least.ptx", |to| {
            let whole = read(&ptx)?;
            let lowered = match part {
                Some(part) => isa::lower(&select(&whole, part), target.sm, target.exact, lines),
                None => isa::lower(&whole, target.sm, target.exact, lines),
            };
            let unknown: Vec<String> = lowered.unknown.into_iter().collect();
            fs::write(to, format!("// unknown: {}\n{}", unknown.join(" "), lowered.text))
                .map_err(|e| format!("{}: {e}", to.display()))
        })?;
        module(cache, file, target, part.as_deref(), least, &source)
    };
    let modules: Vec<Module> = parts.iter().map(of_part).collect::<Result<_>>()?;
    let named: Vec<&str> = modules.iter().flat_map(|m| m.kernels.iter().map(|k| k.name.as_str())).collect();
    let all = read(&ptx)?.matches(".entry ").count();
    if named.len() != all {
        let problem = "every kernel must be of one part";
        return Err(format!("{}: `modules`: {} of {all} kernels; {problem}", file.display(), named.len()));
    }
    let promises = Promises::of(&source).map_err(|e| format!("{}: {e}", file.display()))?;
    // Kernels that a target lacks (bf16 below 80) are no typing errors.
    if let (90, Some(name)) = (target.sm, promises.unknown(&named)) {
        return Err(format!("{}: a promise about {name}: the file has no such kernel", file.display()));
    }
    match promises.silent(&named) {
        Some(missing) => Err(format!("{}: its header must say `// {missing}` (or `all`)", file.display())),
        None => Ok(modules),
    }
}

fn module(
    cache: &Cache,
    file: &Path,
    target: Target,
    part: Option<&str>,
    ptx: PathBuf,
    source: &str,
) -> Result<Module> {
    let text = read(&ptx)?;
    let digest = Cache::key_of(&text);
    let promises = Promises::of(source).map_err(|e| format!("{}: {e}", file.display()))?;
    let mut kernels = entries(&text);
    for (kernel, body) in kernels.iter_mut().zip(text.split(".entry ").skip(1)) {
        if body.contains("setmaxnreg") {
            let promised = promises.registers(&kernel.name);
            let missing = || format!("{}: `// entry-registers N {}`: missing", file.display(), kernel.name);
            kernel.registers = Some(promised.ok_or_else(missing)?);
        }
    }
    let unknown = text.lines().next().and_then(|line| line.strip_prefix("// unknown: ")).unwrap_or_default();
    let ptx_gz = cache.get(digest, "ptx.gz", |to| compress(&ptx, to))?;
    let part = part.map_or(String::new(), |part| format!(".{part}"));
    Ok(Module {
        target,
        name: stem(file) + &part,
        version: version(&text, file)?,
        kernels,
        promises,
        unknown: unknown.split_whitespace().map(str::to_owned).collect(),
        digest,
        ptx,
        ptx_gz,
    })
}

/// PTX is text and shrinks tenfold, machine code fivefold.
pub fn compress(from: &Path, to: &Path) -> Result<()> {
    use std::io::Write as _;
    let bytes = fs::read(from).map_err(|e| format!("{}: {e}", from.display()))?;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let made = encoder.write_all(&bytes).and_then(|()| encoder.finish());
    made.and_then(|bytes| fs::write(to, bytes)).map_err(|e| format!("{}: {e}", to.display()))
}

/// The words of a line of the header comment that begins with `name`.
fn header<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = source.lines().take_while(|line| line.starts_with("//"));
    lines.find_map(|line| line.strip_prefix("// ")?.strip_prefix(name)?.strip_prefix(' '))
}

/// The text with only those kernels whose names contain `part`, as a word between underscores.
fn select(ptx: &str, part: &str) -> String {
    let wanted =
        |kernel: &str| kernel.ends_with(&format!("_{part}")) || kernel.contains(&format!("_{part}_"));
    let mut out = String::new();
    let (mut inside, mut keep) = (false, true);
    for line in ptx.lines() {
        if let Some((_, rest)) = line.split_once(".entry ") {
            (inside, keep) = (true, wanted(rest.split('(').next().unwrap_or_default().trim()));
        }
        if keep {
            let _ = writeln!(out, "{line}");
        }
        // A function's body ends in a brace of its own line; those of blocks inside are indented or behind others.
        if inside && line == "}" {
            (inside, keep) = (false, true);
        }
    }
    out
}

/// Names after `.entry`, and the size of the parameter: `.visible .entry name(`, then
/// `.param .align 8 .b8 name_param_0[48]`.
fn entries(ptx: &str) -> Vec<Kernel> {
    let after = ptx.split(".entry ").skip(1);
    let entry = |rest: &str| {
        let (name, rest) = rest.split_once('(')?;
        let parameter = rest.split_once(')')?.0;
        let bytes = parameter.rsplit_once('[').and_then(|(_, n)| n.split(']').next()?.parse().ok());
        Some(Kernel { name: name.trim().to_owned(), params: bytes.unwrap_or(0), registers: None })
    };
    after.filter_map(entry).collect()
}

fn version(ptx: &str, file: &Path) -> Result<isa::Version> {
    let number = ptx.lines().find_map(|line| line.strip_prefix(".version "));
    let parse = |text: &str| {
        let (major, minor) = text.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    number.and_then(parse).ok_or_else(|| format!("{}: the PTX has no `.version`", file.display()))
}

/// Most files use nothing that came after compute capability 8.0: for 9.0 they share the text of 8.0.
fn share(modules: &mut [Module]) -> Result<()> {
    let ampere = Target { sm: 80, exact: false };
    let hopper = Target { sm: 90, exact: false };
    for at in 0..modules.len() {
        if modules[at].target != hopper {
            continue;
        }
        let older = modules.iter().find(|m| m.target == ampere && m.name == modules[at].name);
        let Some(older) = older else { continue };
        let (this, other) = (read(&modules[at].ptx)?, read(&older.ptx)?);
        let differs =
            |(a, b): (&str, &str)| a != b && ![".version ", ".target "].iter().any(|d| a.starts_with(d));
        if this.lines().count() == other.lines().count() && !this.lines().zip(other.lines()).any(differs) {
            let (ptx, ptx_gz) = (older.ptx.clone(), older.ptx_gz.clone());
            let (digest, version) = (older.digest, older.version);
            let module = &mut modules[at];
            (module.ptx, module.ptx_gz, module.digest, module.version) = (ptx, ptx_gz, digest, version);
        }
    }
    Ok(())
}

/// Kernels are launched by name: two files must not have one of the same name.
fn unique(modules: &[Module]) -> Result<()> {
    let mut owners = std::collections::BTreeMap::new();
    for module in modules {
        for kernel in &module.kernels {
            let owner = *owners.entry(&kernel.name).or_insert(&module.name);
            if *owner != module.name {
                return Err(format!("kernel {}: in {owner} and in {}", kernel.name, module.name));
            }
        }
    }
    Ok(())
}
