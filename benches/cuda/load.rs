//! How long the driver takes to load each file of kernels, and what it makes of them: registers, local memory.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tandem::Result;
use tandem::device::Runtime;
use tandem::device::built::MODULES;
use tandem::device::cuda::CudaRuntime;

/// Loads everything that this build has for the device, a file at a time; one line a file and one a kernel.
///
/// # Errors
/// The driver refuses a file.
pub fn run(rt: &CudaRuntime) -> Result<Value> {
    let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for module in MODULES {
        let kernels = files.entry(module.name).or_default();
        kernels.extend(module.kernels.iter().map(|k| k.name).filter(|name| rt.has_kernel(name)));
        kernels.sort_unstable();
        kernels.dedup();
    }
    println!("| file | kernel | load ms | registers | local bytes | shared bytes |");
    println!("|---|---|---:|---:|---:|---:|");
    let (mut total, mut out) = (0.0, Vec::new());
    for (file, kernels) in files.into_iter().filter(|(_, kernels)| !kernels.is_empty()) {
        let (mut ms, mut rows) = (0.0, Vec::new());
        for kernel in kernels {
            let usage = rt.kernel_usage(kernel)?;
            let took = usage.load.as_secs_f64() * 1e3;
            ms += took;
            println!(
                "| {file} | {kernel} | {took:.1} | {} | {} | {} |",
                usage.registers, usage.local, usage.shared
            );
            rows.push(json!({
                "kernel": kernel, "registers": usage.registers, "local": usage.local, "shared": usage.shared,
            }));
        }
        total += ms;
        out.push(json!({ "file": file, "ms": ms, "kernels": rows }));
    }
    println!("all files: {total:.0} ms");
    let info = rt.info();
    Ok(json!({ "device": info.name, "sm": info.sm, "driver": info.driver, "ms": total, "files": out }))
}
