//! Operations that run in the order of the program, in one pass over them: steps of the device alone, and those where the host attends one
//! sub-batch.

use super::{Costs, OpSpan, Timeline};
use crate::program::iteration::Flow;
use crate::program::op::Program;
use crate::program::unit::{PerUnit, Unit};

/// As [`super::place`] of a program whose host has nothing to choose among: each of its operations becomes ready no earlier than the one
/// before it. Then the oldest that is ready is always the next one. `None`: it has, or there are cohorts.
pub(super) fn straight(
    program: &Program,
    waits: &[Vec<usize>],
    costs: &impl Costs,
    takes: &dyn Fn(usize) -> f64,
    (backlog, begin): (f64, f64),
) -> Option<Timeline> {
    if program.flow == Flow::Async {
        return None;
    }
    let mut free = PerUnit::from_fn(|unit| {
        let from = if unit == Unit::Host { backlog } else { begin };
        from + costs.before(program, unit)
    });
    let mut spans: Vec<OpSpan> = Vec::with_capacity(program.ops.len());
    let mut last = 0.0;
    for (i, op) in program.ops.iter().enumerate() {
        let ready = waits[i].iter().fold(0.0f64, |t, &w| t.max(spans[w].end));
        if op.unit == Unit::Host {
            if ready < last {
                return None;
            }
            last = ready;
        }
        let start = ready.max(free[op.unit]);
        let end = start + takes(i);
        free[op.unit] = end;
        spans.push(OpSpan { op: i, unit: op.unit, start, end, detached: false });
    }
    Some(Timeline { spans, after: costs.after(program) })
}

#[cfg(test)]
mod tests {
    use super::super::{search, waits};
    use super::*;
    use crate::program::op::{Kind, Op};
    use crate::program::{
        Group, Iteration, Kv, LayerPlacement, Phase, Placement, Policy, RequestId, Residence, Side, SubBatch,
        Wants, lower,
    };

    /// The search finds the same times, whatever operations take, and there are programs where only it does.
    #[test]
    fn the_order_of_the_program_is_that_of_the_search_where_the_host_has_no_choice() {
        let mut state = 1u64;
        let mut draw = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let (mut same, mut others) = (0, 0);
        for _ in 0..600 {
            let mut placement = Placement::all(Side::Device, 4, 64);
            if draw(3) == 0 {
                let device = LayerPlacement::all(Side::Device);
                placement.layers[2] = match draw(3) {
                    0 => LayerPlacement::all(Side::Host),
                    1 => LayerPlacement { weights: Residence::Streamed, ..device },
                    _ => LayerPlacement {
                        decode: Policy::ATTENTION_ON_HOST,
                        prefill: Policy::ATTENTION_ON_HOST,
                        kv: Side::Host,
                        ..device
                    },
                };
            }
            let (mut slot, both) = (0, draw(2) == 0);
            let mut batch = || {
                let groups = (0..draw(20)).map(|_| {
                    slot += 1;
                    Group {
                        request: RequestId { slot, generation: 0 },
                        phase: Phase::Decode,
                        first: 40,
                        tokens: 1,
                        kv: if both && draw(2) == 0 { Kv::Host } else { Kv::Device },
                        wants: Wants::Last,
                    }
                });
                SubBatch::of(groups.collect())
            };
            let sub_batches = vec![batch(), batch()];
            let flow = if draw(2) == 0 { Flow::Serial } else { Flow::TwoLanes };
            let iteration = Iteration { sub_batches, flow, ..Iteration::serial(Vec::new(), true) };
            let program = lower(&placement, &iteration).unwrap();
            // As long as in a step, or anything.
            let anything = draw(3) == 0;
            let seconds = |op: &Op| match (op.unit, op.kind) {
                _ if anything => draw(50),
                (Unit::Host, Kind::Attend { .. }) => 30 + draw(30),
                (Unit::Host, _) => draw(3),
                _ => 3 + draw(5),
            };
            let seconds: Vec<f64> = program.ops.iter().map(seconds).map(|s| s as f64).collect();
            let (waits, costs) = (waits(&program), |_: &Op| 0.0);
            let (takes, free) = (|i: usize| seconds[i], (draw(30) as f64, draw(30) as f64));
            let by_search = search(&program, &waits, &costs, &takes, free, &|_| 0.0);
            match straight(&program, &waits, &costs, &takes, free) {
                Some(timeline) => {
                    assert_eq!(timeline, by_search.0);
                    same += 1;
                }
                None => others += 1,
            }
        }
        println!("{same} in the order of the program, {others} in another");
        assert!(same >= 200 && others >= 200, "{same} {others}");
    }
}
