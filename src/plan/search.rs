//! Search in what is monotonic.

/// The largest number up to `limit` that fits, if the smaller ones do where it does; 0 if none does.
pub fn most(limit: usize, mut fits: impl FnMut(usize) -> bool) -> usize {
    if limit == 0 || fits(limit) {
        return limit;
    }
    let (mut least, mut beyond) = (0, limit);
    while beyond - least > 1 {
        let middle = least.midpoint(beyond);
        if fits(middle) { least = middle } else { beyond = middle }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_that_fits() {
        for limit in 0..20 {
            for room in 0..25 {
                assert_eq!(most(limit, |n| n <= room), limit.min(room), "{limit} {room}");
            }
        }
    }
}
