//! What executes operations, and a map over it.

use std::ops::{Index, IndexMut};

use serde::Serialize;

use super::placement::Side;

/// What executes an operation: an in-order lane of the device, or the host's workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// The device's compute lane.
    Gpu,
    /// Copies from the host to the device.
    H2d,
    /// Copies from the device to the host.
    D2h,
    /// The host's workers: the oldest operation that is ready, with all of them.
    Host,
}

impl Unit {
    /// The units in the order of their lanes.
    pub const ALL: [Unit; 4] = [Unit::Gpu, Unit::H2d, Unit::D2h, Unit::Host];

    /// What computes on a side.
    pub const fn of(side: Side) -> Unit {
        match side {
            Side::Host => Unit::Host,
            Side::Device => Unit::Gpu,
        }
    }

    /// Its name in messages and timelines.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Gpu => "gpu",
            Unit::H2d => "h2d",
            Unit::D2h => "d2h",
            Unit::Host => "host",
        }
    }
}

/// A value for each [`Unit`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PerUnit<T>([T; Unit::ALL.len()]);

impl<T> PerUnit<T> {
    /// The value that `of` gives for each unit.
    pub fn from_fn(of: impl FnMut(Unit) -> T) -> PerUnit<T> {
        PerUnit(Unit::ALL.map(of))
    }

    /// The values in the order of [`Unit::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Unit, &T)> {
        Unit::ALL.into_iter().zip(&self.0)
    }
}

/// In the order of [`Unit::ALL`].
impl<T> From<[T; Unit::ALL.len()]> for PerUnit<T> {
    fn from(values: [T; Unit::ALL.len()]) -> PerUnit<T> {
        PerUnit(values)
    }
}

impl<T> Index<Unit> for PerUnit<T> {
    type Output = T;

    fn index(&self, unit: Unit) -> &T {
        &self.0[unit as usize]
    }
}

impl<T> IndexMut<Unit> for PerUnit<T> {
    fn index_mut(&mut self, unit: Unit) -> &mut T {
        &mut self.0[unit as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_their_unit() {
        let mut names = PerUnit::from_fn(Unit::name);
        assert_eq!(names.iter().map(|(u, n)| (u, *n)).collect::<Vec<_>>(), Unit::ALL.map(|u| (u, u.name())));
        names[Unit::D2h] = "back";
        assert_eq!(names, PerUnit::from(["gpu", "h2d", "back", "host"]));
    }
}
