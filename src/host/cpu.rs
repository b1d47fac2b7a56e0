//! The cores that this process may use.

use std::sync::OnceLock;

use core_affinity::CoreId;

/// The cores that this process may use, by the affinity mask at the first call: a thread that has been pinned since
/// would see only its own core.
pub fn cores() -> &'static [CoreId] {
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default())
}

/// Cores allowed by the affinity mask and the cgroup's CPU quota, at least 1.
pub fn allowed_cores() -> usize {
    let affinity = match cores().len() {
        0 => std::thread::available_parallelism().map_or(1, |n| n.get()),
        n => n,
    };
    affinity.min(quota().unwrap_or(usize::MAX)).max(1)
}

/// As [`allowed_cores`], less one core for the thread that drives a device: it issues work and waits for it while the
/// others compute. With two cores both compute, since half of the arithmetic is worth more than a free core for that
/// thread.
pub fn cores_beside_device() -> usize {
    match allowed_cores() {
        all @ 0..=2 => all,
        all => all - 1,
    }
}

/// Lets the current thread run on any of [`cores`] again.
pub fn unpin_current_thread() {
    unpin(0);
}

/// A thread of this process, by both of its ids: one is quick to compare, the system knows the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Thread {
    id: std::thread::ThreadId,
    number: libc::pid_t,
}

impl Thread {
    /// The current thread.
    pub fn current() -> Thread {
        #[cfg(target_os = "linux")]
        // SAFETY: gettid takes nothing and cannot fail.
        let number = unsafe { libc::gettid() };
        #[cfg(not(target_os = "linux"))]
        let number = 0;
        Thread { id: std::thread::current().id(), number }
    }

    /// Whether this is the current thread.
    pub fn is_current(self) -> bool {
        self.id == std::thread::current().id()
    }

    /// Lets the thread run on any of [`cores`] again, if it has not ended.
    pub fn unpin(self) {
        if std::path::Path::new(&format!("/proc/self/task/{}", self.number)).exists() {
            unpin(self.number);
        }
    }
}

/// Lets the current thread run on `on` alone, without choosing one of them.
pub(super) fn confine_current_thread(on: &[CoreId]) {
    confine(0, on);
}

/// 0 is the current thread.
fn unpin(thread: libc::pid_t) {
    confine(thread, cores());
}

fn confine(thread: libc::pid_t, on: &[CoreId]) {
    #[cfg(not(target_os = "linux"))]
    let _ = (thread, on);
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a zeroed set is a valid, empty one; CPU_SET is called with numbers that fit the set; the
        // pointer is to a live set of the size given. A refusal changes nothing, and only speed depends on it.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            on.iter()
                .filter(|c| c.id < libc::CPU_SETSIZE as usize)
                .for_each(|c| libc::CPU_SET(c.id, &mut set));
            libc::sched_setaffinity(thread, size_of::<libc::cpu_set_t>(), &set);
        }
    }
}

/// Whole cores that the control groups' quota amounts to (rounded up); `None` without a quota.
fn quota() -> Option<usize> {
    super::cgroup::cpu_quota().map(whole_cores)
}

fn whole_cores(quota: f64) -> usize {
    (quota.ceil() as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::{cores, unpin_current_thread, whole_cores};

    #[test]
    fn quota_rounds_up_to_whole_cores() {
        for (quota, cores) in [(0.1, 1), (1.0, 1), (1.5, 2), (8.0, 8)] {
            assert_eq!(whole_cores(quota), cores, "{quota}");
        }
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
            unpin_current_thread();
            assert_eq!(core_affinity::get_core_ids().unwrap().len(), all.len());
        })
        .join()
        .unwrap();
    }
}
