//! Prefix sums, so that the search for a boundary prices every range of units with one subtraction.

/// Seconds of the units on one side, ready for sums over ranges.
#[derive(Debug, Clone)]
pub struct Prefix(Vec<f64>);

impl Prefix {
    /// Prefix sums of these units.
    pub fn new(units: impl IntoIterator<Item = f64>) -> Prefix {
        let mut sums = vec![0.0];
        for t in units {
            sums.push(sums[sums.len() - 1] + t);
        }
        Prefix(sums)
    }

    /// Units.
    pub fn len(&self) -> usize {
        self.0.len() - 1
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sum over units `range`.
    pub fn sum(&self, range: std::ops::Range<usize>) -> f64 {
        self.0[range.end] - self.0[range.start]
    }
}
