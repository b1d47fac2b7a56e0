//! Which operation waits for which: nobody places events by hand, they follow from what operations read and write.

use std::collections::HashMap;

use super::op::{Buffer, Op, Program, Region, Unit};

/// What has touched a buffer.
#[derive(Default)]
struct History {
    /// Parts and who wrote them last; none covered by a later one.
    writers: Vec<(Region, usize)>,
    /// Parts and who read them since they were written.
    readers: Vec<(Region, usize)>,
}

/// For each operation, the earlier ones that it must not start before: writers of what it reads, readers and writers of
/// what it overwrites. Ascending. What the order of an in-order lane implies already is left out.
pub fn waits(program: &Program) -> Vec<Vec<usize>> {
    let mut histories: HashMap<Buffer, History> = HashMap::new();
    let mut all = Vec::with_capacity(program.ops.len());
    for (at, op) in program.ops.iter().enumerate() {
        let mut waits = Vec::new();
        for region in &op.reads {
            let history = histories.entry(region.buffer).or_default();
            meet(&history.writers, region, &mut waits);
            history.readers.push((region.clone(), at));
        }
        for region in &op.writes {
            let history = histories.entry(region.buffer).or_default();
            meet(&history.writers, region, &mut waits);
            meet(&history.readers, region, &mut waits);
            let stays = |(r, by): &(Region, usize)| *by == at || !covers(region, r);
            history.writers.retain(stays);
            history.readers.retain(stays);
            history.writers.push((region.clone(), at));
        }
        waits.sort_unstable();
        waits.dedup();
        waits.retain(|&w| w != at && !in_order(&program.ops[w], op));
        all.push(waits);
    }
    all
}

/// Whether the lane of both keeps their order anyway.
fn in_order(earlier: &Op, later: &Op) -> bool {
    earlier.unit == later.unit && earlier.unit != Unit::Host
}

fn meet(entries: &[(Region, usize)], region: &Region, waits: &mut Vec<usize>) {
    waits.extend(entries.iter().filter(|(r, _)| r.overlaps(region)).map(|&(_, by)| by));
}

fn covers(outer: &Region, inner: &Region) -> bool {
    outer.layers.start <= inner.layers.start
        && inner.layers.end <= outer.layers.end
        && outer.span.start <= inner.span.start
        && inner.span.end <= outer.span.end
}
