//! Counts which experts rows choose, for an engine that was asked to ([`Engine::count_choices`](crate::engine::Engine::count_choices)).

use std::ops::Range;

use super::{HostStep, HostWorkspace};
use crate::model::{RouterCounts, RouterProfile};

/// Adds the choices of `rows`, whose experts have just been chosen in `layer`. Rows of a sequence that follow each other in the step
/// are also compared: those of different steps are not, since nothing of a step outlives it.
pub(in crate::engine) fn count_choices(
    profile: &mut RouterProfile,
    layer: usize,
    ws: &HostWorkspace,
    step: &HostStep,
    rows: &Range<usize>,
) {
    let (Some(experts), of) = (&ws.experts, &mut profile.layers[layer]) else { return };
    if of.counts.is_empty() {
        return;
    }
    for run in step.runs(rows) {
        add(of, experts.ids(run), profile.used as usize);
    }
}

/// Adds the choices `ids` of consecutive rows of a sequence, `used` each.
fn add(of: &mut RouterCounts, ids: &[u32], used: usize) {
    let mut before: Option<&[u32]> = None;
    for row in ids.chunks_exact(used) {
        row.iter().for_each(|&e| of.counts[e as usize] += 1);
        if let Some(before) = before {
            of.followers += 1;
            of.repeated += row.iter().filter(|e| before.contains(e)).count() as u64;
        }
        before = Some(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_compared_with_the_row_before_them() {
        let mut of = RouterCounts { counts: vec![0; 6], ..RouterCounts::default() };
        add(&mut of, &[0, 1, 1, 0, 2, 3, 3, 5], 2);
        assert_eq!(of, RouterCounts { counts: vec![2, 2, 1, 2, 0, 1], followers: 3, repeated: 3 });
        // Another sequence.
        add(&mut of, &[3, 5], 2);
        assert_eq!((of.followers, of.repeated), (3, 3));
    }
}
