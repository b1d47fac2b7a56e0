//! The lists of a step: the accelerator's description of a sub-batch's sequences, for each way of attending.

use super::RealMachine;
use super::lowered::Lowered;
use super::mode::Mode;
use super::part::{GroupRows, Part};
use crate::Result;
use crate::device::{Attend, Lane, Step, StepDesc, StepSeq};
use crate::program::{Far, Flow, Group, Kv, Phase, Side, Unit};

/// The lists of a sub-batch.
#[derive(Clone, Default)]
pub(super) struct PartLists {
    /// For each way of attending.
    pub modes: Vec<(Mode, Step)>,
    /// Lists for tokens before the boundaries, if their pages are streamed: for layers without a window, and with one.
    pub far: Vec<(Option<usize>, Step)>,
}

impl RealMachine {
    /// Enqueues the lists of every sub-batch that the device works on. `repeated` marks a decode step; if its own rows run
    /// entirely on the device, they are padded to a bucket of rows.
    pub(super) fn prepare_lists(
        &self,
        lowered: &Lowered,
        parts: &[Part<'_>],
        repeated: bool,
    ) -> Result<Vec<PartLists>> {
        let Some(d) = &self.device else { return Ok(Vec::new()) };
        // A step's own rows beside cohorts are padded, too: they are on the device alone, whatever cohorts do.
        let padded = |b: usize| {
            let beside = lowered.program.flow == Flow::Async && b == 0 && !lowered.parts[b].on_host;
            repeated && (lowered.one_unit == Some(Unit::Gpu) || beside)
        };
        let mut all = Vec::with_capacity(parts.len());
        for (b, ((part, facts), on_device)) in parts.iter().zip(&lowered.parts).zip(&d.parts).enumerate() {
            if let Some(kept) = self.kept_lists(lowered.program.flow, b) {
                all.push(kept);
                continue;
            }
            let mut lists = PartLists::default();
            // A cohort's lists serve all its layers.
            let cohort = lowered.program.flow == Flow::Async && b > 0 && !part.groups.is_empty();
            if facts.on_device || cohort {
                let rows = part.tokens.len();
                let launch_rows = if padded(b) { d.accel.row_bucket(rows) } else { rows };
                let logit_rows: Vec<u32> = match &facts.packed {
                    Some(packed) => packed.rows().map(|r| r as u32).collect(),
                    None => part.wanted.iter().map(|&r| r as u32).collect(),
                };
                let prepare = |seqs: &[StepSeq<'_>], memory| {
                    let desc = StepDesc {
                        seqs,
                        tokens: &part.tokens,
                        logit_rows: &logit_rows,
                        cuts: &facts.cuts,
                        epoch: 0,
                        launch_rows,
                    };
                    d.accel.prepare(Lane::Compute, &d.shape, &d.limits, &desc, memory)
                };
                for &(mode, memory) in &on_device.lists {
                    lists
                        .modes
                        .push((mode, prepare(&sequences(part, |g, r, s| near(mode, g, r, s)), memory)?));
                }
                let streams = |g: &Group| matches!(g.kv, Kv::Split { far: Far::Stream, .. });
                if let Some(far) = &on_device.far_stream
                    && part.groups.iter().any(streams)
                {
                    for &(window, memory) in &far.lists {
                        let away = |g: &Group, _: &GroupRows<'_>, staged| away(window, g, staged);
                        lists.far.push((window, prepare(&sequences(part, away), memory)?));
                    }
                }
            }
            all.push(lists);
        }
        Ok(all)
    }
}

/// The sequences of a sub-batch, with the pages and the attention that `of` returns.
fn sequences<'a>(
    part: &'a Part<'_>,
    of: impl Fn(&Group, &GroupRows<'a>, &'a [u32]) -> (&'a [u32], Attend),
) -> Vec<StepSeq<'a>> {
    let mut row0 = 0;
    let sequence = |((group, rows), staged): ((&'a Group, &'a GroupRows<'_>), &'a Vec<u32>)| {
        let n_rows = group.tokens as usize;
        row0 += n_rows;
        let (pages, attend) = of(group, rows, staged);
        StepSeq { pages, first_pos: group.first as usize, row0: row0 - n_rows, n_rows, attend }
    };
    part.groups.iter().zip(part.rows).zip(&part.staged).map(sequence).collect()
}

/// A group's pages and attention in a layer of this mode.
fn near<'a>(mode: Mode, group: &Group, rows: &GroupRows<'a>, staged: &'a [u32]) -> (&'a [u32], Attend) {
    if mode.attend[usize::from(group.phase == Phase::Decode)] == Side::Host {
        return (&[], Attend::Elsewhere);
    }
    let table = rows.table;
    match (mode.kv, group.kv) {
        (Side::Host, _) => (table.host_pages(), Attend::Here),
        (Side::Device, Kv::Device) => (table.device_pages(), Attend::Here),
        (Side::Device, Kv::Split { boundary, .. }) if is_behind(mode.window, group) => {
            (table.device_pages(), Attend::Since { from: boundary as usize })
        }
        (Side::Device, Kv::Split { boundary, .. }) => {
            (table.device_pages(), Attend::From { from: boundary as usize })
        }
        // A prompt's keys and values pass through staging memory.
        (Side::Device, Kv::Host) if group.phase == Phase::Prefill => (staged, Attend::Here),
        (Side::Device, Kv::Host) => (&[], Attend::Elsewhere),
    }
}

/// A group's pages and attention over pages streamed to staging memory, with the same places of partial results as
/// [`near`].
fn away<'a>(window: Option<usize>, group: &Group, staged: &'a [u32]) -> (&'a [u32], Attend) {
    match group.kv {
        Kv::Split { .. } if is_behind(window, group) => (&[], Attend::Elsewhere),
        Kv::Split { boundary, far: Far::Stream } => (staged, Attend::UpTo { to: boundary as usize }),
        Kv::Split { far: Far::Attend, .. } => (&[], Attend::UpTo { to: 0 }),
        Kv::Device | Kv::Host => (&[], Attend::Elsewhere),
    }
}

/// Whether no row of a group sees pages that have left the device, in layers with this window; the same rule as in
/// programs.
fn is_behind(window: Option<usize>, group: &Group) -> bool {
    match (window, group.kv) {
        (Some(window), Kv::Split { boundary, .. }) => boundary as usize + window <= group.first as usize + 1,
        _ => false,
    }
}
