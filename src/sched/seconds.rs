//! Seconds that may not be known, in eight bytes: strategies and rollouts go over a thousand requests many times a step.

use std::fmt;

/// See the [module](self): an `Option<f64>` of half the size. Not a number stands for none.
#[derive(Clone, Copy)]
pub struct OptionalSeconds(f64);

impl OptionalSeconds {
    /// Not known, or not asked for.
    pub const NONE: OptionalSeconds = OptionalSeconds(f64::NAN);

    /// The seconds, if there are any.
    #[inline]
    pub fn get(self) -> Option<f64> {
        (!self.0.is_nan()).then_some(self.0)
    }

    /// Whether there are any.
    #[inline]
    pub fn is_some(self) -> bool {
        !self.0.is_nan()
    }

    /// Whether there are none.
    #[inline]
    pub fn is_none(self) -> bool {
        self.0.is_nan()
    }

    /// The seconds, or `other`.
    #[inline]
    pub fn unwrap_or(self, other: f64) -> f64 {
        if self.0.is_nan() { other } else { self.0 }
    }
}

impl From<Option<f64>> for OptionalSeconds {
    fn from(seconds: Option<f64>) -> OptionalSeconds {
        OptionalSeconds(seconds.unwrap_or(f64::NAN))
    }
}

impl Default for OptionalSeconds {
    fn default() -> OptionalSeconds {
        OptionalSeconds::NONE
    }
}

impl PartialEq for OptionalSeconds {
    fn eq(&self, other: &OptionalSeconds) -> bool {
        self.get() == other.get()
    }
}

impl fmt::Debug for OptionalSeconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_an_option() {
        for seconds in [None, Some(0.0), Some(1.5), Some(f64::INFINITY)] {
            let packed = OptionalSeconds::from(seconds);
            assert_eq!(packed.get(), seconds);
            assert_eq!((packed.is_some(), packed.is_none()), (seconds.is_some(), seconds.is_none()));
            assert_eq!(packed.unwrap_or(7.0), seconds.unwrap_or(7.0));
            assert_eq!(packed, OptionalSeconds::from(seconds));
            assert_eq!(format!("{packed:?}"), format!("{seconds:?}"));
        }
        assert_ne!(OptionalSeconds::NONE, OptionalSeconds::from(Some(0.0)));
        assert_eq!(OptionalSeconds::default(), OptionalSeconds::NONE);
    }
}
