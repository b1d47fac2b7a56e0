//! The limits that this process's control groups set on processor time and memory.
//!
//! A limit may sit on any ancestor of the group, in the files of version 1 or 2 of the interface, so all are read and
//! the tightest counts. Inside a container whose namespace hides the ancestors, the root's files are the container's
//! own.

use std::path::{Path, PathBuf};

/// The memory limit of a group, and the bytes left under it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit.
    pub limit: u64,
    /// Bytes that can still be allocated; file pages that the kernel may drop count as free.
    pub free: u64,
}

/// The tightest limit on processor time, in processors.
pub fn cpu_quota() -> Option<f64> {
    folders("cpu").iter().filter_map(|f| quota_in(f)).min_by(f64::total_cmp)
}

/// The limit of the group with the least memory left, among those that set one.
pub fn cgroup_memory() -> Option<MemoryLimit> {
    folders("memory").iter().filter_map(|f| memory_in(f)).min_by_key(|m| m.free)
}

/// Bytes that this process can still allocate: the system's available memory (free, or droppable file pages), within
/// the limits of its control groups. `None` if the system does not report it.
pub fn memory_available() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = field(&info, "MemAvailable:")?;
    Some(kib.saturating_mul(1024).min(cgroup_memory().map_or(u64::MAX, |m| m.free)))
}

/// The folders of this process's group for `controller`, innermost first, up to the root's.
fn folders(controller: &str) -> Vec<PathBuf> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    folders_of(&groups, controller, Path::new("/sys/fs/cgroup"))
}

fn folders_of(groups: &str, controller: &str, root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in groups.lines() {
        // `4:cpu,cpuacct:/a/b` in version 1, `0::/a/b` in version 2.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let base = match controllers {
            "" => root.to_owned(),
            // Controllers mounted together appear under each one's name, through a symbolic link.
            c if c.split(',').any(|c| c == controller) => root.join(controller),
            _ => continue,
        };
        let inner = base.join(path.trim_start_matches('/'));
        found.extend(inner.ancestors().take_while(|p| p.starts_with(&base)).map(Path::to_owned));
    }
    found
}

fn number(folder: &Path, file: &str) -> Option<u64> {
    std::fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
}

fn quota_in(folder: &Path) -> Option<f64> {
    let (quota, period) = match std::fs::read_to_string(folder.join("cpu.max")) {
        // `150000 100000`, or `max 100000` for no limit.
        Ok(text) => {
            let (quota, period) = text.trim().split_once(' ')?;
            (quota.parse().ok()?, period.parse().ok()?)
        }
        // No limit is -1, which is no u64.
        Err(_) => (number(folder, "cpu.cfs_quota_us")?, number(folder, "cpu.cfs_period_us")?),
    };
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

fn memory_in(folder: &Path) -> Option<MemoryLimit> {
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    // Version 1 reports the sums over child groups under separate names.
    let (limit, used, prefix) = match number(folder, "memory.max") {
        Some(limit) => (limit, number(folder, "memory.current")?, ""),
        None => {
            (number(folder, "memory.limit_in_bytes")?, number(folder, "memory.usage_in_bytes")?, "total_")
        }
    };
    // No limit is close to 2^63 in version 1, `max` (no number) in version 2.
    if limit >= 1 << 60 {
        return None;
    }
    let files: u64 =
        ["inactive_file", "active_file"].iter().filter_map(|k| field(&stat, &format!("{prefix}{k}"))).sum();
    Some(MemoryLimit { limit, free: limit.saturating_sub(used.saturating_sub(files)) })
}

/// The number after `key` at the start of a line.
fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.split_whitespace().next() == Some(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, files: &[(&str, &str)]) {
        std::fs::create_dir_all(dir).unwrap();
        files.iter().for_each(|(name, text)| std::fs::write(dir.join(name), text).unwrap());
    }

    #[test]
    fn every_ancestor_is_asked_in_both_versions() {
        let root = Path::new("/sys/fs/cgroup");
        let v1 = folders_of("4:memory:/x\n2:cpu,cpuacct:/a/b\n0::/\n", "cpu", root);
        let want = ["/sys/fs/cgroup/cpu/a/b", "/sys/fs/cgroup/cpu/a", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup"];
        assert_eq!(v1, want.map(PathBuf::from));
        let v2 = folders_of("0::/user.slice/run.scope\n", "cpu", root);
        let want = ["/sys/fs/cgroup/user.slice/run.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"];
        assert_eq!(v2, want.map(PathBuf::from));
        assert!(folders_of("nonsense\n\n:", "cpu", root).is_empty());
    }

    #[test]
    fn quotas_of_both_versions() {
        let dir = tempfile::tempdir().unwrap();
        for (i, (files, want)) in [
            (vec![("cpu.max", "150000 100000\n")], Some(1.5)),
            (vec![("cpu.max", "max 100000\n")], None),
            (vec![("cpu.max", "100 0\n")], None),
            (vec![("cpu.max", "nonsense\n")], None),
            (vec![("cpu.cfs_quota_us", "50000\n"), ("cpu.cfs_period_us", "100000\n")], Some(0.5)),
            (vec![("cpu.cfs_quota_us", "-1\n"), ("cpu.cfs_period_us", "100000\n")], None),
            (vec![], None),
        ]
        .into_iter()
        .enumerate()
        {
            let folder = dir.path().join(i.to_string());
            write(&folder, &files);
            assert_eq!(quota_in(&folder), want, "{files:?}");
        }
    }

    #[test]
    fn pages_of_files_count_as_free_memory() {
        let dir = tempfile::tempdir().unwrap();
        let (v2, v1) = (dir.path().join("2"), dir.path().join("1"));
        let stat = "anon 300\ninactive_file 500\nactive_file 100\nslab 5\n";
        write(&v2, &[("memory.max", "1000\n"), ("memory.current", "900\n"), ("memory.stat", stat)]);
        assert_eq!(memory_in(&v2), Some(MemoryLimit { limit: 1000, free: 700 }));
        write(&v2, &[("memory.max", "max\n")]);
        assert_eq!(memory_in(&v2), None);
        let stat = "inactive_file 1\ntotal_inactive_file 500\ntotal_active_file 0\n";
        let file = |limit| [("memory.limit_in_bytes", limit), ("memory.usage_in_bytes", "900\n")];
        write(&v1, &file("1000\n"));
        write(&v1, &[("memory.stat", stat)]);
        assert_eq!(memory_in(&v1), Some(MemoryLimit { limit: 1000, free: 600 }));
        write(&v1, &file("9223372036854771712\n"));
        assert_eq!(memory_in(&v1), None, "version 1 has no word for no limit");
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(memory_available().is_none_or(|m| m > 0));
    }
}
