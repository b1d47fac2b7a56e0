//! Which operation waits for which. Events are derived from what operations read and write, never placed by hand.

use rustc_hash::FxHashMap;

use super::op::{Buffer, Op, Program, Region, Unit};

/// What has touched a buffer.
#[derive(Default)]
struct History {
    /// The last writer of each part.
    writers: Vec<(Region, usize)>,
    /// The readers of each part since it was last written.
    readers: Vec<(Region, usize)>,
}

/// For each operation, the earlier ones that it must not start before: writers of what it reads, readers and writers of
/// what it overwrites. Ascending. What the order of an in-order lane implies already is left out.
pub fn waits(program: &Program) -> Vec<Vec<usize>> {
    let mut histories: FxHashMap<Buffer, History> = FxHashMap::default();
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
            overwrite(&mut history.writers, region, at);
            overwrite(&mut history.readers, region, at);
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

/// Takes what operation `at` overwrites out of what others have touched: who touches it later waits for `at`, which has waited for them.
/// Without this, an operation would wait for all those before it that read a whole of which it and others each write a part.
fn overwrite(entries: &mut Vec<(Region, usize)>, region: &Region, at: usize) {
    let mut behind = Vec::new();
    entries.retain_mut(|(r, by)| {
        let layers = region.layers.start <= r.layers.start && r.layers.end <= region.layers.end;
        if *by == at || !layers || !r.overlaps(region) {
            return true;
        }
        let (start, end) = (r.span.start, r.span.end);
        if region.span.end < end {
            behind.push((Region { span: region.span.end..end, ..r.clone() }, *by));
        }
        r.span.end = region.span.start;
        start < r.span.end
    });
    entries.append(&mut behind);
}
