//! What ptxas says of a kernel's registers, and which kernels must keep everything in them.
//!
//! A kernel file says in its header comment which of its kernels must not spill at any target, and which
//! may at one:
//!
//! ```text
//! // no-spill all
//! // no-spill decode_attention_bf16_d128 decode_attention_bf16_d64
//! // may-spill 75 decode_attention_f16_d128
//! ```

/// A kernel as the assembler made it.
#[derive(Debug)]
pub struct Usage {
    pub kernel: String,
    pub registers: u32,
    /// Bytes of a thread's local memory: arrays indexed at run time, and spills.
    pub stack: u32,
    /// Bytes stored and loaded because registers ran out.
    pub spilled: u32,
}

/// Reads the log of `ptxas -v`.
pub fn parse(log: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(Usage { kernel, registers: 0, stack: 0, spilled: 0 });
        }
        let Some(usage) = found.last_mut() else { continue };
        if line.contains("bytes spill stores") {
            let of = |what| number_before(line, what);
            usage.stack += of(" bytes stack frame");
            usage.spilled += of(" bytes spill stores") + of(" bytes spill loads");
        }
        usage.registers = usage.registers.max(number_before(line, " registers"));
    }
    found
}

/// The number that ends right before `what`, 0 if there is none.
fn number_before(line: &str, what: &str) -> u32 {
    let before = line.split_once(what).map_or("", |(before, _)| before);
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    before[digits..].parse().unwrap_or(0)
}

/// Kernels of a file that must not spill, by its header comment.
pub struct NoSpill {
    must_not: Vec<String>,
    /// Target and kernel.
    may: Vec<(String, String)>,
}

impl NoSpill {
    /// What the comment that opens `source` says.
    pub fn of(source: &str) -> NoSpill {
        let (mut must_not, mut may) = (Vec::new(), Vec::new());
        for line in source.lines().take_while(|line| line.starts_with("//")) {
            let mut words = line.split([' ', ',', ':']).filter(|w| !w.is_empty()).skip(1).map(str::to_owned);
            match words.next().as_deref() {
                Some("no-spill") => must_not.extend(words),
                Some("may-spill") => {
                    let target = words.next().unwrap_or_default();
                    may.extend(words.map(|kernel| (target.clone(), kernel)));
                }
                _ => {}
            }
        }
        NoSpill { must_not, may }
    }

    /// Whether `kernel` must not spill at `target`.
    pub fn covers(&self, kernel: &str, target: &str) -> bool {
        let named = self.must_not.iter().any(|name| name == "all" || name == kernel);
        named && !self.may.iter().any(|(t, k)| t == target && k == kernel)
    }

    /// A name that no kernel of the file has: a typing error would silently check nothing.
    pub fn unknown(&self, kernels: &[(String, u32)]) -> Option<&str> {
        let names = self.must_not.iter().chain(self.may.iter().map(|(_, kernel)| kernel));
        names.map(String::as_str).find(|&n| n != "all" && !kernels.iter().any(|(k, _)| k == n))
    }
}
