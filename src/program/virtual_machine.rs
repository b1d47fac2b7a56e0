//! A machine that only keeps time: runs a program over a clock and a table of costs.
//!
//! The device's lanes run their operations in the order of issue, the host takes the oldest operation that is ready; an
//! operation starts when its lane is free and what it waits for ([`super::order::waits`]) is done.

use serde::Serialize;

use super::op::{Op, Program, Unit};
use super::order::waits;

/// How long operations take.
pub trait Costs {
    /// Seconds of one operation on its unit, alone.
    fn seconds(&self, op: &Op) -> f64;
}

impl<F: Fn(&Op) -> f64> Costs for F {
    fn seconds(&self, op: &Op) -> f64 {
        self(op)
    }
}

/// When an operation ran.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Span {
    /// Which, by place in the program.
    pub op: usize,
    /// Where.
    pub unit: Unit,
    /// Seconds since the program began.
    pub start: f64,
    /// Seconds since the program began.
    pub end: f64,
}

/// What a run took.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Timeline {
    /// In the order of the program.
    pub spans: Vec<Span>,
}

impl Timeline {
    /// Seconds until the last operation is done.
    pub fn seconds(&self) -> f64 {
        self.spans.iter().map(|s| s.end).fold(0.0, f64::max)
    }

    /// Seconds that a unit worked.
    pub fn busy(&self, unit: Unit) -> f64 {
        self.spans.iter().filter(|s| s.unit == unit).map(|s| s.end - s.start).sum()
    }

    /// Seconds during which both units worked.
    pub fn overlap(&self, a: Unit, b: Unit) -> f64 {
        let of = |unit| {
            let mut spans: Vec<_> =
                self.spans.iter().filter(|s| s.unit == unit).map(|s| (s.start, s.end)).collect();
            spans.sort_by(|x, y| x.0.total_cmp(&y.0));
            spans
        };
        let (a, b) = (of(a), of(b));
        let (mut i, mut j, mut both) = (0, 0, 0.0);
        while i < a.len() && j < b.len() {
            both += (a[i].1.min(b[j].1) - a[i].0.max(b[j].0)).max(0.0);
            if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
        }
        both
    }
}

/// Runs `program` by `costs`.
pub fn run(program: &Program, costs: &impl Costs) -> Timeline {
    let waits = waits(program);
    let none = Span { op: 0, unit: Unit::Host, start: 0.0, end: f64::NAN };
    let mut spans = vec![none; program.ops.len()];
    let mut queues: Vec<Vec<usize>> = Unit::ALL
        .iter()
        .map(|&u| (0..program.ops.len()).rev().filter(|&i| program.ops[i].unit == u).collect())
        .collect();
    let mut free = [0.0f64; Unit::ALL.len()];
    // When everything that an operation waits for is done, once all of it has been placed.
    let ready = |spans: &[Span], op: usize| -> Option<f64> {
        waits[op].iter().try_fold(0.0f64, |t, &w| {
            let end = spans[w].end;
            (!end.is_nan()).then_some(t.max(end))
        })
    };
    let mut left = program.ops.len();
    while left > 0 {
        let before = left;
        for (lane, &unit) in Unit::ALL.iter().enumerate() {
            loop {
                let queue = &queues[lane];
                let next = match unit {
                    // In order.
                    Unit::Gpu | Unit::H2d | Unit::D2h => {
                        queue.last().and_then(|&op| Some((queue.len() - 1, op, ready(&spans, op)?)))
                    }
                    // The oldest of those that are ready when the workers are free, or else the first to become so. Only
                    // operations whose predecessors all have a time can be judged: the oldest others may still
                    // come first, so the search ends at the first of them.
                    Unit::Host => {
                        let known = queue
                            .iter()
                            .enumerate()
                            .rev()
                            .map_while(|(at, &op)| Some((at, op, ready(&spans, op)?)));
                        known.fold(None, |best: Option<(usize, usize, f64)>, c| match best {
                            Some(b) if b.2.max(free[lane]) <= c.2.max(free[lane]) => Some(b),
                            _ => Some(c),
                        })
                    }
                };
                let Some((at, op, ready)) = next else { break };
                queues[lane].remove(at);
                let start = ready.max(free[lane]);
                let end = start + costs.seconds(&program.ops[op]);
                spans[op] = Span { op, unit, start, end };
                free[lane] = end;
                left -= 1;
            }
        }
        // Waits point backwards in the program, so the earliest operation left can always be placed.
        assert!(left < before, "operations wait for each other in a circle");
    }
    Timeline { spans }
}
