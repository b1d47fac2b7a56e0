//! How many cores this process may use.

/// Cores allowed by the affinity mask and the cgroup's CPU quota, at least 1.
pub fn allowed() -> usize {
    let affinity = std::thread::available_parallelism().map_or(1, |n| n.get());
    affinity.min(quota().unwrap_or(usize::MAX)).max(1)
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
    use super::parse_quota;

    #[test]
    fn quota_rounds_up_to_whole_cores() {
        assert_eq!(parse_quota("max 100000"), None);
        assert_eq!(parse_quota("150000 100000"), Some(2));
        assert_eq!(parse_quota("50000 100000"), Some(1));
        assert_eq!(parse_quota("nonsense"), None);
        assert_eq!(parse_quota("100 0"), None);
    }
}
