//! How many cores this process may use.

use std::sync::OnceLock;

use core_affinity::CoreId;

/// The cores that this process may use, as its affinity mask was at the first call: a thread that has been
/// pinned since would see only its own.
pub fn cores() -> &'static [CoreId] {
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default())
}

/// Cores allowed by the affinity mask and the cgroup's CPU quota, at least 1.
pub fn allowed() -> usize {
    let affinity = match cores().len() {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        n => n,
    };
    affinity.min(quota().unwrap_or(usize::MAX)).max(1)
}

/// Lets the current thread run on any of [`cores`] again.
pub fn unpin_current() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a zeroed set is a valid, empty one; CPU_SET is called with numbers that fit the set; the
        // pointer is to a live set of the size given. A refusal changes nothing, and only speed depends on it.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cores()
                .iter()
                .filter(|c| c.id < libc::CPU_SETSIZE as usize)
                .for_each(|c| libc::CPU_SET(c.id, &mut set));
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
        }
    }
}

/// Whole cores that a cgroup-v2 quota amounts to (rounded up); `None` without a quota.
pub fn quota() -> Option<usize> {
    let text = std::fs::read_to_string("/sys/fs/cgroup/cpu.max").ok()?;
    parse_quota(&text)
}

fn parse_quota(text: &str) -> Option<usize> {
    let mut words = text.split_whitespace();
    let quota: u64 = words.next()?.parse().ok()?;
    let period: u64 = words.next()?.parse().ok().filter(|&p| p > 0)?;
    Some((quota.div_ceil(period) as usize).max(1))
}

#[cfg(test)]
mod tests {
    use super::{cores, parse_quota, unpin_current};

    #[test]
    fn quota_rounds_up_to_whole_cores() {
        assert_eq!(parse_quota("max 100000"), None);
        assert_eq!(parse_quota("150000 100000"), Some(2));
        assert_eq!(parse_quota("50000 100000"), Some(1));
        assert_eq!(parse_quota("nonsense"), None);
        assert_eq!(parse_quota("100 0"), None);
    }
    #[test]
    fn a_pinned_thread_does_not_lose_the_other_cores() {
        let all = cores();
        if all.len() < 2 {
            println!("skipped: one core only");
            return;
        }
        std::thread::spawn(move || {
            assert!(core_affinity::set_for_current(all[0]));
            assert_eq!(super::cores().len(), all.len());
            assert_eq!(core_affinity::get_core_ids().unwrap().len(), 1);
            unpin_current();
            assert_eq!(core_affinity::get_core_ids().unwrap().len(), all.len());
        })
        .join()
        .unwrap();
    }
}
