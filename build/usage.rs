//! What ptxas says of a kernel: its registers, its memory, and what it warns of.

/// A kernel as the assembler made it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Usage {
    pub kernel: String,
    /// Of a thread, at the kernel's entry (`setmaxnreg` changes them later).
    pub registers: u32,
    /// Bytes of a thread's local memory: arrays indexed at run time, and spills.
    pub stack: u32,
    /// Bytes stored and loaded because registers ran out.
    pub spilled: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
    /// What assembling it took (0: the assembler does not say, before CUDA 12.9).
    pub milliseconds: u32,
}

/// Reads the log of `ptxas -v`.
pub fn parse(log: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(Usage { kernel, ..Usage::default() });
        }
        let Some(usage) = found.last_mut() else { continue };
        if line.contains("bytes spill stores") {
            let of = |what| number_before(line, what);
            usage.stack += of(" bytes stack frame");
            usage.spilled += of(" bytes spill stores") + of(" bytes spill loads");
        }
        usage.registers = usage.registers.max(number_before(line, " registers"));
        usage.shared = usage.shared.max(number_before(line, " bytes smem"));
        if let Some((_, time)) = line.split_once("Compile time = ") {
            usage.milliseconds = time.split('.').next().and_then(|ms| ms.parse().ok()).unwrap_or(0);
        }
    }
    found
}

/// Lines that announce slow code: serialised wgmma, ignored `setmaxnreg`, whatever is numbered C75xx.
pub fn advisories(log: &str) -> Vec<&str> {
    let slow = |line: &&str| line.contains("Potential Performance Loss") || line.contains("(C75");
    log.lines().filter(slow).map(str::trim).collect()
}

/// The number that ends right before `what`, 0 if there is none.
fn number_before(line: &str, what: &str) -> u32 {
    let before = line.split_once(what).map_or("", |(before, _)| before);
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    before[digits..].parse().unwrap_or(0)
}
