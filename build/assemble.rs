//! Assembles PTX to the machine code of the GPUs that the program brings it for, and holds it against what the
//! kernels' files promise ([`promises`](crate::promises)).

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use crate::cache::Cache;
use crate::ptx::{Module, compress, read};
use crate::tools::{self, Ptxas};
use crate::usage::{self, Usage};
use crate::{Result, jobs};

/// Machine code of a module for one GPU.
pub struct Code {
    /// 10 * major + minor.
    pub sm: u32,
    pub gz: PathBuf,
    pub usage: Vec<Usage>,
    /// What assembling took, when it was done: what a driver would take for the PTX.
    pub milliseconds: u64,
}

/// The code of all modules, in their order.
///
/// # Errors
/// The assembler's; kernels that are not what their files promise, all of them at once.
pub fn all(ptxas: &Ptxas, cache: &Cache, modules: &[Module], lines: bool) -> Result<Vec<Vec<Code>>> {
    let mut units: Vec<(&Module, u32)> = Vec::new();
    for module in modules {
        units.extend(module.target.devices().iter().map(|sm| (module, *sm)));
    }
    let made = jobs::run(&units, |(module, sm)| one(ptxas, cache, module, *sm, lines))?;
    let mut made = made.into_iter();
    Ok(modules.iter().map(|m| made.by_ref().take(m.target.devices().len()).collect()).collect())
}

fn one(ptxas: &Ptxas, cache: &Cache, module: &Module, sm: u32, lines: bool) -> Result<Code> {
    let arch = format!("{sm}{}", if module.target.exact { "a" } else { "" });
    let key = Cache::key_of(&(module.digest, &arch, &ptxas.version, lines));
    let [log, gz] = cache.get_both(key, ["log", "cubin.gz"], |[log, gz]| {
        let cubin = gz.with_extension("plain");
        let mut command = Command::new(&ptxas.path);
        command.args(["-v", &format!("-arch=sm_{arch}")]).args(lines.then_some("-lineinfo"));
        let begun = Instant::now();
        let (out, err) = tools::outputs(command.arg(&module.ptx).arg("-o").arg(&cubin))?;
        let took = begun.elapsed().as_millis();
        compress(&cubin, gz)?;
        let _ = fs::remove_file(&cubin);
        fs::write(log, format!("assembled in {took} ms\n{out}{err}"))
            .map_err(|e| format!("{}: {e}", log.display()))
    })?;
    let log = read(&log)?;
    let took =
        log.lines().next().and_then(|l| l.strip_prefix("assembled in ")?.strip_suffix(" ms")?.parse().ok());
    let usage = usage::parse(&log);
    let mut broken: Vec<String> = usage.iter().flat_map(|u| module.promises.broken(u, &arch)).collect();
    broken.extend(usage::advisories(&log).into_iter().map(str::to_owned));
    if !broken.is_empty() {
        return Err(format!("cuda/{}.cu for sm_{arch}: {}", module.name, broken.join("; ")));
    }
    Ok(Code { sm, gz, usage, milliseconds: took.unwrap_or(0) })
}
