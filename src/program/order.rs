//! Which operation waits for which. Events are derived from what operations read and write, never placed by hand.

use rustc_hash::{FxHashMap, FxHashSet};

use super::op::{Buffer, Kind, Op, Program, Region};
use super::unit::Unit;

/// What has touched a buffer.
#[derive(Default)]
struct History {
    /// The last writer of each part.
    writers: Vec<(Region, usize)>,
    /// The readers of each part since it was last written.
    readers: Vec<(Region, usize)>,
}

/// For each operation, the earlier ones that it must not start before: writers of what it reads, readers and writers of
/// what it overwrites. Ascending. What the order of in-order lanes implies already is left out: operations of its own lane, those
/// before another of their lane that it waits for, and those that an earlier operation of its lane has waited for, itself or by what it
/// has waited for.
pub fn waits(program: &Program) -> Vec<Vec<usize>> {
    let mut histories: FxHashMap<Buffer, History> = FxHashMap::default();
    let mut all = Vec::with_capacity(program.ops.len());
    let mut known = Known::default();
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
        known.reduce(program, op, &mut waits, &all);
        all.push(waits);
    }
    all
}

/// Whether the lane of both keeps their order anyway.
fn in_order(earlier: &Op, later: &Op) -> bool {
    earlier.unit == later.unit && earlier.unit != Unit::Host
}

/// What the lanes have waited for, themselves or by what they have waited for.
#[derive(Default)]
struct Known {
    /// By a lane and by an in-order lane that it waits for: the last operation, and all before it.
    lanes: [Lanes; 4],
    /// Operations of the host, in any order, by the lane that has waited for them; and as a list, in the order in which they became known.
    host: [FxHashSet<usize>; 4],
    list: [Vec<usize>; 4],
    /// By two lanes, how much of the second one's list the first one has.
    read: [[usize; 4]; 4],
    /// For each operation of an in-order lane, what its lane knew behind its waits: the others, and how much of its list.
    at: Vec<(Lanes, usize)>,
}

/// The last operation of each in-order lane.
type Lanes = [Option<usize>; 4];

impl Known {
    /// Takes out of `waits`, ascending, what is implied. Whether operations of a cohort are carried out is decided when they are
    /// issued: others cannot rely on them. Carries end, or begin, in a job of the host, which is in no lane's order: nothing is implied
    /// by them or with them.
    fn reduce(&mut self, program: &Program, op: &Op, waits: &mut Vec<usize>, all: &[Vec<usize>]) {
        let (ops, lane) = (&program.ops, op.unit as usize);
        let carries = |op: &Op| matches!(op.kind, Kind::Carry { .. });
        let (in_order, certain) = (op.unit != Unit::Host, !program.is_of_cohort(op) && !carries(op));
        let mut last = [None; 4];
        for &w in waits.iter().filter(|&&w| ops[w].unit != Unit::Host) {
            let of = &ops[w];
            if !carries(of) && (!program.is_of_cohort(of) || of.sub_batch == op.sub_batch) {
                last[of.unit as usize] = Some(w);
            }
        }
        let known = |known: &Known, w: usize| match ops[w].unit {
            Unit::Host => known.host[lane].contains(&w),
            unit => known.lanes[lane][unit as usize].is_some_and(|l| l >= w),
        };
        waits.retain(|&w| {
            let unit = ops[w].unit;
            if carries(&ops[w]) || carries(op) {
                return true;
            }
            let later = unit != Unit::Host && last[unit as usize].is_some_and(|l| l > w);
            !(later || in_order && known(self, w))
        });
        if in_order && certain {
            let sure = |w: usize| !program.is_of_cohort(&ops[w]) && !carries(&ops[w]);
            // From the last, since earlier ones are often implied by it.
            waits.reverse();
            waits.retain(|&w| {
                let implied = sure(w) && known(self, w);
                if sure(w) && !implied {
                    self.done(lane, w, ops, all, &sure);
                }
                !implied
            });
            waits.reverse();
        }
        self.at.push((self.lanes[lane], self.list[lane].len()));
    }

    /// A lane has waited for an operation: so it has for those that this one had to wait for.
    fn done(&mut self, lane: usize, w: usize, ops: &[Op], all: &[Vec<usize>], sure: &impl Fn(usize) -> bool) {
        if ops[w].unit == Unit::Host {
            if self.host[lane].insert(w) {
                self.list[lane].push(w);
                all[w].iter().filter(|&&b| sure(b)).for_each(|&b| self.done(lane, b, ops, all, sure));
            }
            return;
        }
        let (of, (lanes, list)) = (ops[w].unit as usize, self.at[w]);
        if of == lane {
            return;
        }
        for (known, of) in self.lanes[lane].iter_mut().zip(lanes) {
            *known = (*known).max(of);
        }
        self.lanes[lane][of] = self.lanes[lane][of].max(Some(w));
        for i in self.read[lane][of]..list {
            let host = self.list[of][i];
            if self.host[lane].insert(host) {
                self.list[lane].push(host);
            }
        }
        self.read[lane][of] = self.read[lane][of].max(list);
    }
}

fn meet(entries: &[(Region, usize)], region: &Region, waits: &mut Vec<usize>) {
    waits.extend(entries.iter().filter(|(r, _)| r.overlaps(region)).map(|&(_, by)| by));
}

/// Removes what operation `at` overwrites from the entries of earlier operations. Later users wait on `at`, which already waits on all
/// earlier users.
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
