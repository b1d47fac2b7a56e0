//! Which lanes move the rows that the host attends: publish and collect on the copy lanes, so that the compute lane goes on meanwhile,
//! or on the compute lane itself, which takes fewer calls.
//!
//! ```text
//! compute │ project │ append │ attend (the device's rows) ─────┐ out_proj
//! to host           └► publish ► host attends ─► collect (to device) ┘
//! ```
//! Nothing else is decided here: what waits for what follows from the regions, whatever the lane.

use crate::program::iteration::{Far, Flow, Group, Iteration, Kv};
use crate::program::op::{Kind, Op};
use crate::program::placement::{Phase, Placement, Side, Sublayer};
use crate::program::unit::Unit;

/// Whether the rows of an iteration that the host attends are enough for the copy lanes.
pub(crate) fn pays(placement: &Placement, iteration: &Iteration) -> bool {
    if iteration.flow == Flow::Async {
        // Operations of cohorts may be left out: others cannot rely on their events. And a cohort's rows hide behind nothing of the
        // compute lane that it could not do before.
        return false;
    }
    let attends = [Phase::Prefill, Phase::Decode].map(|phase| {
        placement.layers.iter().any(|l| {
            let policy = l.policy(phase);
            policy.attention() == Some(Side::Host) && policy.side(Sublayer::Qkv) == Side::Device
        })
    });
    let published = |g: &&Group| match g.kv {
        Kv::Host if g.phase == Phase::Decode => true,
        Kv::Split { far: Far::Attend, .. } => true,
        _ => attends[(g.phase == Phase::Decode) as usize],
    };
    let groups = iteration.sub_batches.iter().flat_map(|b| &b.groups);
    groups.filter(published).map(|g| u64::from(g.tokens)).sum::<u64>() >= u64::from(placement.copy_lane_rows)
}

/// Puts publications and collections on the copy lanes, if these have nothing else to do, and the compute lane has: a row behind a
/// streamed layer or a sequence's pages would wait for milliseconds.
pub(super) fn assign(ops: &mut [Op], flow: Flow) {
    let copies = ops.iter().any(|op| matches!(op.unit, Unit::H2d | Unit::D2h));
    let attends = || ops.iter().any(|op| op.unit == Unit::Gpu && matches!(op.kind, Kind::Attend { .. }));
    let two = || flow == Flow::TwoLanes && ops.iter().any(|op| op.sub_batch > 0);
    if copies || !(attends() || two()) {
        return;
    }
    for op in ops {
        match op.kind {
            Kind::Publish { .. } => op.unit = Unit::D2h,
            Kind::Collect => op.unit = Unit::H2d,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{COPY_LANE_ROWS, Program, RequestId, SubBatch, Wants, check, lower, waits};

    /// Two sub-batches, each of a row on the device and some that the host attends.
    fn two_lanes(host: u32) -> (Placement, Iteration, Program) {
        let placement = Placement::all(Side::Device, 4, 100);
        let group = |slot: u32, kv| Group {
            request: RequestId { slot, generation: 0 },
            phase: Phase::Decode,
            first: 40,
            tokens: 1,
            kv,
            wants: Wants::Last,
        };
        let batch = |from: u32| {
            let there = (1..=host).map(|i| group(from + i, Kv::Host));
            SubBatch { groups: [group(from, Kv::Device)].into_iter().chain(there).collect(), at: None }
        };
        let sub_batches = vec![batch(0), batch(1000)];
        let iteration =
            Iteration { sub_batches, flow: Flow::TwoLanes, ..Iteration::serial(Vec::new(), true) };
        let program = lower(&placement, &iteration).unwrap();
        check(&program, &placement, &iteration).unwrap();
        (placement, iteration, program)
    }

    fn units(program: &Program) -> Vec<(&'static str, Unit)> {
        let mail = |op: &&Op| matches!(op.kind, Kind::Publish { .. } | Kind::Collect);
        let mut units: Vec<_> = program.ops.iter().filter(mail).map(|op| (op.kind.name(), op.unit)).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    #[test]
    fn many_rows_leave_the_compute_lane_and_few_stay() {
        let (.., few) = two_lanes(COPY_LANE_ROWS / 2 - 1);
        assert_eq!(units(&few), [("collect", Unit::Gpu), ("publish", Unit::Gpu)]);
        let (placement, iteration, many) = two_lanes(COPY_LANE_ROWS / 2);
        assert_eq!(units(&many), [("collect", Unit::H2d), ("publish", Unit::D2h)]);
        // Nothing to hide behind: all rows wait for the host.
        let alone = SubBatch { groups: iteration.sub_batches[0].groups[1..].to_vec(), at: None };
        let again = SubBatch { groups: iteration.sub_batches[1].groups[1..].to_vec(), at: None };
        let groups = [alone.groups, again.groups].concat();
        let serial =
            Iteration { sub_batches: vec![SubBatch { groups, at: None }], flow: Flow::Serial, ..iteration };
        let program = lower(&placement, &serial).unwrap();
        assert_eq!(units(&program), [("collect", Unit::Gpu), ("publish", Unit::Gpu)]);
    }

    /// A publication waits for its projection and a collection for the host, what is behind it for the collection: the rest follows.
    /// Without that the next projection would wait for the publication, whose rows it overwrites, and a collection for the output
    /// projection before, which reads what it overwrites.
    #[test]
    fn lanes_wait_for_no_more_than_they_must() {
        let (_, _, program) = two_lanes(20);
        let ops = &program.ops;
        for (op, waits) in ops.iter().zip(waits(&program)) {
            let of: Vec<(&str, Unit)> = waits.iter().map(|&w| (ops[w].kind.name(), ops[w].unit)).collect();
            match (op.kind, op.unit) {
                (Kind::Publish { .. }, _) => assert_eq!(of, [("project", Unit::Gpu)], "publish"),
                (Kind::Collect, _) => assert_eq!(of, [("attend", Unit::Host)], "collect"),
                (Kind::OutProj, _) => assert_eq!(of, [("collect", Unit::H2d)], "out_proj"),
                (_, Unit::Gpu) => assert!(of.is_empty(), "{}: {of:?}", op.kind.name()),
                _ => {}
            }
        }
    }
}
