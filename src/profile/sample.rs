//! Timing something several times: a warm-up, then runs until there are enough or time is up.

use std::time::{Duration, Instant};

/// How much time measurements may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// A couple of seconds in all: for tests, and where no profile was made yet.
    Quick,
    /// About half a minute in all.
    Full,
}

impl Effort {
    /// Time for one point of a table, its warm-up aside. A slow operation takes longer: it runs at least twice.
    pub fn per_point(self) -> Duration {
        match self {
            Effort::Quick => Duration::from_millis(8),
            Effort::Full => Duration::from_millis(120),
        }
    }

    /// Most runs of one point.
    pub fn most(self) -> usize {
        match self {
            Effort::Quick => 5,
            Effort::Full => 41,
        }
    }
}

/// Seconds of several runs of the same thing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Samples {
    seconds: Vec<f64>,
}

impl Samples {
    /// Samples of these seconds.
    pub fn new(seconds: Vec<f64>) -> Samples {
        Samples { seconds }
    }

    /// One more.
    pub fn push(&mut self, seconds: f64) {
        self.seconds.push(seconds);
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.seconds.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.seconds.is_empty()
    }

    /// What a run takes when nothing disturbs it: the first quartile. Whatever else the machine does only makes a run
    /// longer, so the median of a busy machine says less; the least of all would be luck. Zero of none.
    pub fn typical(&self) -> f64 {
        self.quantile(0.25)
    }

    /// The middle one. Zero of none.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The mean. Zero of none.
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len().max(1) as f64
    }

    /// The value below which a share `q` of the samples lies.
    pub fn quantile(&self, q: f64) -> f64 {
        let mut s = self.seconds.clone();
        s.sort_by(f64::total_cmp);
        match s.len() {
            0 => 0.0,
            n => s[((n - 1) as f64 * q) as usize],
        }
    }
}

/// Seconds of `run`, which times itself: after a warm-up, until `effort` has enough.
///
/// # Errors
/// The first that `run` has.
pub fn sample<E>(effort: Effort, mut run: impl FnMut() -> Result<f64, E>) -> Result<Samples, E> {
    run()?;
    let (begun, mut samples) = (Instant::now(), Samples::default());
    while samples.len() < 2 || begun.elapsed() < effort.per_point() && samples.len() < effort.most() {
        samples.push(run()?);
    }
    Ok(samples)
}

/// Seconds of `run` by the host's clock.
pub fn timed(run: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    run();
    begun.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_disturbs_a_few_runs_does_not_show() {
        let s = Samples::new(vec![9.0, 1.0, 1.1, 8.0, 1.2, 1.3, 7.0, 1.05]);
        assert_eq!((s.typical(), s.median()), (1.05, 1.2));
        assert_eq!(Samples::default().typical(), 0.0);
        assert_eq!(Samples::new(vec![3.0]).quantile(1.0), 3.0);
    }

    #[test]
    fn a_warm_up_is_not_counted_and_the_number_is_bounded() {
        let mut runs = 0;
        let s = sample(Effort::Quick, || {
            runs += 1;
            Ok::<_, ()>(runs as f64)
        })
        .unwrap();
        assert_eq!((s.len(), runs), (Effort::Quick.most(), Effort::Quick.most() + 1));
        assert_eq!(s.quantile(0.0), 2.0);
        let mut slow = 0;
        let s = sample(Effort::Quick, || {
            slow += 1;
            std::thread::sleep(Effort::Quick.per_point());
            Ok::<_, ()>(0.1)
        });
        assert_eq!((s.unwrap().len(), slow), (2, 3));
        assert_eq!(sample(Effort::Quick, || Err::<f64, _>("no")), Err("no"));
    }
}
