//! Which rows and contexts are measured, the most telling first: time may end before the list does.

use std::time::{Duration, Instant};

use crate::model::ModelSpec;
use crate::profile::sample::Effort;

/// One step to be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Point {
    /// Sequences.
    pub sequences: usize,
    /// New rows of each.
    pub rows: usize,
    /// Tokens stored of each.
    pub past: usize,
}

impl Point {
    const fn decode(sequences: usize, past: usize) -> Point {
        Point { sequences, rows: 1, past }
    }

    const fn prompt(rows: usize, past: usize) -> Point {
        Point { sequences: 1, rows, past }
    }

    /// Rows in all.
    pub fn total_rows(&self) -> usize {
        self.sequences * self.rows
    }

    /// Mean tokens that a row sees with a window or without.
    pub fn seen(&self, window: Option<usize>) -> f64 {
        let of = |row: usize| (self.past + row + 1).min(window.unwrap_or(usize::MAX));
        (0..self.rows).map(of).sum::<usize>() as f64 / self.rows as f64
    }
}

/// All of them, within a model's context.
pub(super) struct Grid {
    points: Vec<Point>,
}

impl Grid {
    pub fn new(spec: &ModelSpec, effort: Effort) -> Grid {
        let mut points = match effort {
            Effort::Quick => vec![
                Point::decode(1, 31),
                Point::decode(1, 255),
                Point::prompt(64, 0),
                Point::decode(4, 31),
                Point::decode(4, 255),
                Point::decode(16, 31),
                Point::prompt(16, 0),
                Point::prompt(64, 192),
            ],
            Effort::Full => {
                let mut all = vec![
                    Point::decode(1, 127),
                    Point::decode(1, 1023),
                    Point::decode(8, 127),
                    Point::prompt(256, 0),
                    Point::decode(8, 1023),
                    Point::decode(2, 127),
                    Point::decode(4, 127),
                    Point::decode(32, 127),
                    Point::prompt(64, 0),
                    Point::prompt(512, 0),
                ];
                all.extend([3, 6, 12, 16, 24, 48, 64].map(|n| Point::decode(n, 127)));
                all.extend([31, 511, 2047, 4095, 8191].map(|past| Point::decode(1, past)));
                all.extend([2, 4, 8].map(|n| Point::decode(n, 31)));
                for n in [2, 4, 16, 32] {
                    all.extend([511, 1023, 2047, 4095].map(|past| Point::decode(n, past)));
                }
                all.extend(
                    [(16, 0), (128, 0), (64, 1024), (256, 1024), (512, 1024), (256, 3584), (512, 3584)]
                        .map(|(rows, past)| Point::prompt(rows, past)),
                );
                all
            }
        };
        points.retain(|p| p.past + p.rows <= spec.max_context);
        if points.is_empty() {
            points.push(Point::decode(1, 0));
        }
        Grid { points }
    }

    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// Most tokens of a sequence.
    pub fn context(&self) -> usize {
        self.points.iter().map(|p| p.past + p.rows).max().unwrap_or(1)
    }

    /// Most rows of a step.
    pub fn rows(&self) -> usize {
        self.points.iter().map(Point::total_rows).max().unwrap_or(1)
    }

    /// Most sequences of a step.
    pub fn sequences(&self) -> usize {
        self.points.iter().map(|p| p.sequences).max().unwrap_or(1)
    }
}

/// Time for all points of one side: when it is over, points are timed once; when twice as much is, no more at all.
pub(super) struct TimeBudget {
    begun: Instant,
    time: Duration,
}

/// How often a point is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PointPace {
    /// As often as the effort says.
    Calm,
    /// Once.
    Hurry,
    /// Not at all.
    Over,
}

impl TimeBudget {
    pub fn new(effort: Effort) -> TimeBudget {
        let time = match effort {
            Effort::Quick => Duration::from_secs(4),
            Effort::Full => Duration::from_secs(25),
        };
        TimeBudget { begun: Instant::now(), time }
    }

    pub fn pace(&self) -> PointPace {
        match self.begun.elapsed() {
            t if t < self.time => PointPace::Calm,
            t if t < 2 * self.time => PointPace::Hurry,
            _ => PointPace::Over,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;

    #[test]
    fn points_fit_the_context_and_are_all_different() {
        let mut spec = synth::spec("tiny-llama").unwrap();
        for effort in [Effort::Quick, Effort::Full] {
            for context in [1, 40, 2048, 1 << 20] {
                spec.max_context = context;
                let grid = Grid::new(&spec, effort);
                assert!(grid.context() <= context && !grid.points().is_empty());
                for (i, p) in grid.points().iter().enumerate() {
                    assert!(!grid.points()[..i].contains(p), "{p:?}");
                    assert!(p.total_rows() <= grid.rows() && p.sequences <= grid.sequences());
                }
            }
        }
    }

    #[test]
    fn a_row_sees_itself_what_is_before_it_and_no_more_than_the_window() {
        assert_eq!(Point::decode(8, 127).seen(None), 128.0);
        assert_eq!(Point::decode(8, 127).seen(Some(100)), 100.0);
        assert_eq!(Point::prompt(4, 0).seen(None), 2.5);
        assert_eq!(Point::prompt(4, 0).seen(Some(2)), 1.75);
    }
}
