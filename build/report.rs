//! What the assembler made of the kernels, for people: `target/cuda-cache/report.txt`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::assemble::Code;
use crate::ptx::Module;

/// Three tables: kernels, modules, GPUs.
pub fn table(ptxas: &str, modules: &[Module], code: &[Vec<Code>]) -> String {
    let mut out = format!(
        "kernels: of a thread, but shared memory (static) of a block; ms to assemble; ptxas {ptxas}\n\n"
    );
    // Writing to a String cannot fail.
    let _ = writeln!(
        out,
        "{:<48} {:>6} {:>9} {:>6} {:>7} {:>6} {:>7}",
        "kernel", "target", "registers", "stack", "spilled", "shared", "ms"
    );
    let bytes = |path: &Path| fs::metadata(path).map_or(0, |m| m.len());
    let kib = |bytes: u64| bytes.div_ceil(1024);
    let mut per_module = String::new();
    let mut per_gpu: BTreeMap<String, (usize, u64, u64)> = BTreeMap::new();
    for (module, code) in modules.iter().zip(code) {
        for code in code {
            let target = format!("{}{}", code.sm, if module.target.exact { "a" } else { "" });
            for u in &code.usage {
                let _ = writeln!(
                    out,
                    "{:<48} {target:>6} {:>9} {:>6} {:>7} {:>6} {:>7}",
                    u.kernel, u.registers, u.stack, u.spilled, u.shared, u.milliseconds
                );
            }
            let (n, ptx, ms, size) = (code.usage.len(), module.version, code.milliseconds, bytes(&code.gz));
            let ptx = format!("{}.{}", ptx.0, ptx.1);
            let text = kib(bytes(&module.ptx_gz));
            let _ = writeln!(
                per_module,
                "{:<48} {target:>6} {n:>9} {ptx:>6} {text:>7} {:>6} {ms:>9}",
                module.name,
                kib(size)
            );
            let sum = per_gpu.entry(target).or_default();
            *sum = (sum.0 + n, sum.1 + size, sum.2 + ms);
        }
    }
    let _ = writeln!(
        out,
        "\nmodules: a file, or a part of it; compressed KiB; ms to assemble: what a driver takes for the PTX\n\n\
         {:<48} {:>6} {:>9} {:>6} {:>7} {:>6} {:>9}\n{per_module}",
        "module", "target", "kernels", "PTX", "PTX KiB", "code", "ms"
    );
    let _ = writeln!(out, "GPUs: what the machine code in the program saves at the first run\n");
    let _ = writeln!(out, "{:<8} {:>9} {:>9} {:>9}", "target", "kernels", "code KiB", "ms");
    for (target, (kernels, size, ms)) in per_gpu {
        let _ = writeln!(out, "{target:<8} {kernels:>9} {:>9} {ms:>9}", kib(size));
    }
    out
}

/// Every text of PTX in the program, for `scripts/check-ptx`: target, module, file.
pub fn texts(modules: &[Module]) -> String {
    // A text that two targets share is proven for the older one.
    let mut seen = BTreeSet::new();
    let own = modules.iter().filter(|m| seen.insert(&m.ptx));
    own.map(|m| format!("{} {} {}\n", m.target.name(), m.name, m.ptx.display())).collect()
}
