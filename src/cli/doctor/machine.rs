//! Facts that the system reports in /proc and /sys; `None` for those it does not report.

use std::path::Path;

use serde::Serialize;
use tandem::host::{cgroup_memory, cpu_quota, memory_available};

use crate::cli::progress::megabytes;

fn read(path: impl AsRef<Path>) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Processors.
#[derive(Debug, Serialize)]
pub struct CpuFacts {
    pub model: String,
    /// Processors of the machine.
    pub online: usize,
    /// Processors that this process may run on.
    pub allowed: usize,
    /// Processors' worth of time that the control group grants, if it limits it.
    pub cgroup_quota: Option<f64>,
    /// Threads that the engine uses: the smaller of the two.
    pub threads: usize,
}

impl CpuFacts {
    pub fn describe(&self) -> String {
        let quota = self.cgroup_quota.map_or(String::new(), |q| format!(", cgroup quota {q:.2}"));
        format!("{} ({} online, {} allowed{quota})", self.threads, self.online, self.allowed)
    }
}

pub fn cpu() -> CpuFacts {
    let info = read("/proc/cpuinfo").unwrap_or_default();
    let model =
        info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':').map(|(_, v)| v.trim()));
    // SAFETY: sysconf takes no pointers.
    let online = usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1);
    let allowed = core_affinity::get_core_ids().map_or(online, |c| c.len()).max(1);
    CpuFacts {
        model: model.unwrap_or("unknown").into(),
        online,
        allowed,
        cgroup_quota: cpu_quota(),
        threads: tandem::host::allowed_cores(),
    }
}

/// Memory, in bytes.
#[derive(Debug, Serialize)]
pub struct Memory {
    pub total: Option<u64>,
    /// Bytes that this process can still allocate, within the control group's limit.
    pub available: Option<u64>,
    /// The control group's limit, if it has one.
    pub cgroup_limit: Option<u64>,
}

impl Memory {
    /// Bytes that may still be used.
    pub fn usable(&self) -> u64 {
        self.available.unwrap_or(1 << 30)
    }

    pub fn describe(&self) -> String {
        let show = |b: Option<u64>| b.map_or("unknown".into(), megabytes);
        let limit = self.cgroup_limit.map_or(String::new(), |l| format!(", cgroup limit {}", megabytes(l)));
        format!("{} available of {}{limit}", show(self.available), show(self.total))
    }
}

pub fn memory() -> Memory {
    let info = read("/proc/meminfo").unwrap_or_default();
    let total = kibibytes(&info, "MemTotal:");
    Memory {
        total,
        available: memory_available(),
        // A limit beyond the machine's memory has no effect.
        cgroup_limit: cgroup_memory().map(|m| m.limit).filter(|&l| total.is_none_or(|t| l < t)),
    }
}

fn kibibytes(info: &str, key: &str) -> Option<u64> {
    let line = info.lines().find_map(|l| l.split_once(key).map(|(_, v)| v))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Pages larger than 4 KiB.
#[derive(Debug, Serialize)]
pub struct HugePages {
    /// `always`, `madvise` or `never`.
    pub transparent: Option<String>,
    /// Explicitly reserved pages (hugetlbfs).
    pub reserved: Option<u64>,
}

impl HugePages {
    pub fn describe(&self) -> (char, String) {
        let reserved = self.reserved.unwrap_or(0);
        let (mark, text) = match self.transparent.as_deref() {
            Some("always") => ('+', "transparent: always".to_owned()),
            Some("madvise") => ('+', "transparent: madvise (large buffers may ask for them)".to_owned()),
            Some("never") => {
                ('!', "transparent: never; large matrices cost more address look-ups".to_owned())
            }
            Some(other) => ('!', format!("transparent: {other}")),
            None => ('-', "this system does not tell".to_owned()),
        };
        (mark, format!("{text}, {reserved} reserved"))
    }
}

pub fn huge_pages() -> HugePages {
    let setting = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let info = read("/proc/meminfo").unwrap_or_default();
    HugePages {
        transparent: setting.as_deref().and_then(bracketed).map(Into::into),
        reserved: info.lines().find_map(|l| l.strip_prefix("HugePages_Total:")?.trim().parse().ok()),
    }
}

/// The choice in `always [madvise] never`.
fn bracketed(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(choice, _)| choice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_files() {
        assert_eq!(bracketed("always [madvise] never"), Some("madvise"));
        assert_eq!(bracketed("always"), None);
        let info = "MemTotal:       1000 kB\nMemAvailable:   10 kB\n";
        assert_eq!(kibibytes(info, "MemAvailable:"), Some(10 * 1024));
        assert_eq!(kibibytes("Node 0 MemTotal:  5 kB", "MemTotal:"), Some(5 * 1024));
        assert_eq!(kibibytes(info, "SwapTotal:"), None);
    }

    #[test]
    fn this_machine_has_a_processor() {
        let cpu = cpu();
        assert!(cpu.threads >= 1 && cpu.threads <= cpu.allowed, "{cpu:?}");
    }
}
