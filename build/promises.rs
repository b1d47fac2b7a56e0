//! What a kernel file promises of its kernels in its header comment; a build that finds otherwise fails.
//!
//! ```text
//! // no-spill all                                        at no target
//! // no-spill decode_attention_bf16_d128 decode_attention_bf16_d64
//! // may-spill 75 decode_attention_f16_d128              but these may, at this target
//! // no-stack all                                        no local memory: a thread's arrays are in registers
//! // may-stack 75 conformance_mma                        why: ...
//! // entry-registers 168 all                             what `setmaxnreg` adds and takes later rests on it
//! ```
//!
//! Every file promises both `no-spill` and `no-stack` for all of its kernels, and
//! `entry-registers` for those with `setmaxnreg`.

use crate::usage::Usage;

/// The promises of a file.
#[derive(Default)]
pub struct Promises {
    no_spill: Named,
    no_stack: Named,
    registers: Vec<(u32, String)>,
}

/// Kernels that a promise is about, and exceptions from it: target and kernel.
#[derive(Default)]
struct Named {
    all: Vec<String>,
    except: Vec<(String, String)>,
}

impl Named {
    fn covers(&self, kernel: &str, target: &str) -> bool {
        self.promised(kernel) && !self.except.iter().any(|(t, k)| t == target && (k == kernel || k == "all"))
    }

    fn promised(&self, kernel: &str) -> bool {
        self.all.iter().any(|name| name == "all" || name == kernel)
    }
}

impl Promises {
    /// What the comment that opens `source` says.
    ///
    /// # Errors
    /// `entry-registers` without a number.
    pub fn of(source: &str) -> Result<Promises, String> {
        let mut this = Promises::default();
        for line in source.lines().take_while(|line| line.starts_with("//")) {
            // What follows a colon is for people.
            let line = line.split(':').next().unwrap_or_default();
            let mut words = line.split([' ', ',']).filter(|w| !w.is_empty()).skip(1).map(str::to_owned);
            let promise = words.next();
            match promise.as_deref() {
                Some("no-spill") => this.no_spill.all.extend(words),
                Some("no-stack") => this.no_stack.all.extend(words),
                Some(may @ ("may-spill" | "may-stack")) => {
                    let named = if may == "may-spill" { &mut this.no_spill } else { &mut this.no_stack };
                    let target = words.next().unwrap_or_default();
                    named.except.extend(words.map(|kernel| (target.clone(), kernel)));
                }
                Some("entry-registers") => {
                    let number = words.next().and_then(|n| n.parse().ok());
                    let number = number.ok_or("`entry-registers` wants a number, then kernels")?;
                    this.registers.extend(words.map(|kernel| (number, kernel)));
                }
                _ => {}
            }
        }
        Ok(this)
    }

    /// Registers at entry that `kernel` is promised.
    pub fn registers(&self, kernel: &str) -> Option<u32> {
        self.registers.iter().find(|(_, name)| name == "all" || name == kernel).map(|(number, _)| *number)
    }

    /// A name that no kernel of the file has: a typing error would silently check nothing.
    pub fn unknown<'a>(&'a self, kernels: &[&str]) -> Option<&'a str> {
        let both = [&self.no_spill, &self.no_stack];
        let named = both.iter().flat_map(|n| n.all.iter().chain(n.except.iter().map(|(_, kernel)| kernel)));
        let names = named.chain(self.registers.iter().map(|(_, kernel)| kernel));
        names.map(String::as_str).find(|&n| n != "all" && !kernels.contains(&n))
    }

    /// The first kernel that a file says nothing about.
    pub fn silent(&self, kernels: &[&str]) -> Option<String> {
        kernels.iter().find_map(|k| match (self.no_spill.promised(k), self.no_stack.promised(k)) {
            (false, _) => Some(format!("no-spill {k}")),
            (_, false) => Some(format!("no-stack {k}")),
            _ => None,
        })
    }

    /// What the assembler made of a kernel against what was promised: a sentence for each promise that is broken.
    pub fn broken(&self, u: &Usage, target: &str) -> Vec<String> {
        let mut broken = Vec::new();
        if u.spilled > 0 && self.no_spill.covers(&u.kernel, target) {
            broken.push(format!("{} spills ({} bytes, {} registers)", u.kernel, u.spilled, u.registers));
        }
        // Spills lie on the stack, too.
        if u.stack > 0 && u.spilled == 0 && self.no_stack.covers(&u.kernel, target) {
            broken.push(format!("{} has {} bytes of local memory", u.kernel, u.stack));
        }
        match self.registers(&u.kernel) {
            Some(promised) if promised != u.registers => broken.push(format!(
                "{} has {} registers at entry, its setmaxnreg needs {promised}",
                u.kernel, u.registers
            )),
            _ => {}
        }
        broken
    }
}
