//! Limits and wishes that do not fit the figures of a machine.

use tandem::Error;
use tandem::plan::Hardware;

/// Refuses to tell of energy where nothing is known of it.
///
/// # Errors
/// `--energy` of a machine whose description has no watts.
pub fn check_energy(asked: bool, hardware: &Hardware) -> tandem::Result<()> {
    match asked && hardware.power.is_none() {
        true => Err(Error::usage(format!(
            "--energy: {} says nothing of watts; give a description a section [power] with cpu_idle_w, cpu_busy_w, gpu_idle_w and gpu_busy_w",
            hardware.name
        ))),
        false => Ok(()),
    }
}

/// Refuses limits on memory that the machine does not have: they would change the plan without a word.
///
/// # Errors
/// `--gpu-memory` or `--host-memory` above the machine's, with the numbers.
pub fn check_memory(hardware: &Hardware, gpu: Option<u64>, host: Option<u64>) -> tandem::Result<()> {
    let gpu_has = hardware.accelerator.map_or(0, |(gpu, _)| gpu.mem_bytes as u64);
    let host_has = hardware.cpu.dram_bytes as u64;
    for (flag, wanted, has, whose) in
        [("--gpu-memory", gpu, gpu_has, "GPU"), ("--host-memory", host, host_has, "host")]
    {
        if let Some(bytes) = wanted.filter(|&b| b > has && has > 0) {
            let gb = |bytes: u64| bytes as f64 / 1e9;
            return Err(tandem::Error::usage(format!(
                "{flag}: {:.2} GB, the {whose} of {} has {:.2} GB; set at most that",
                gb(bytes),
                hardware.name,
                gb(has)
            )));
        }
    }
    Ok(())
}
