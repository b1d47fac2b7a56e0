//! The lists of a step: what the accelerator has to know of the sequences of a sub-batch, for each way of attending.

use super::RealMachine;
use super::lowered::Lowered;
use super::run::Part;
use super::sizes::Mode;
use crate::Result;
use crate::device::accelerator::{Attend, Step, StepDesc, StepSeq};
use crate::device::runtime::Lane;
use crate::program::{Phase, Side, Unit};

impl RealMachine {
    /// Enqueues the lists of every sub-batch that the device has to do with. `repeated`: of a step that decodes; if it is all on
    /// the device, it is padded to a bucket of rows.
    pub(super) fn prepare_lists(
        &self,
        lowered: &Lowered,
        parts: &[Part<'_>],
        repeated: bool,
    ) -> Result<Vec<Vec<(Mode, Step)>>> {
        let Some(d) = &self.device else { return Ok(Vec::new()) };
        let padded = repeated && lowered.one_unit == Some(Unit::Gpu);
        let mut all = Vec::with_capacity(parts.len());
        for ((part, facts), on_device) in parts.iter().zip(&lowered.parts).zip(&d.parts) {
            let mut lists = Vec::new();
            if facts.on_device {
                let rows = part.tokens.len();
                let launch_rows = if padded { d.accel.row_bucket(rows) } else { rows };
                let logit_rows: Vec<u32> = part.wanted.iter().map(|&r| r as u32).collect();
                for &(mode, memory) in &on_device.lists {
                    let desc = StepDesc {
                        seqs: &sequences(part, mode),
                        tokens: &part.tokens,
                        logit_rows: &logit_rows,
                        cuts: &facts.cuts,
                        epoch: 0,
                        launch_rows,
                    };
                    lists.push((mode, d.accel.prepare(Lane::Compute, &d.shape, &d.limits, &desc, memory)?));
                }
            }
            all.push(lists);
        }
        Ok(all)
    }
}

/// The sequences of a sub-batch, in a layer that is attended so.
fn sequences<'a>(part: &Part<'a>, mode: Mode) -> Vec<StepSeq<'a>> {
    let mut row0 = 0;
    let sequence = |(group, rows): (&crate::program::Group, &super::Rows<'a>)| {
        let n_rows = group.tokens as usize;
        let side = mode[usize::from(group.phase == Phase::Decode)];
        row0 += n_rows;
        StepSeq {
            pages: rows.table.pages(),
            first_pos: group.first as usize,
            row0: row0 - n_rows,
            n_rows,
            attend: if side == Side::Device { Attend::Here } else { Attend::Elsewhere },
        }
    };
    part.groups.iter().zip(part.rows).map(sequence).collect()
}
