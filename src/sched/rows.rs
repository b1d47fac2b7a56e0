//! Rows of a sub-batch while they are chosen, and what they cost.

use crate::program::{Flow, Group, Iteration, Kv, Phase, Side, SubBatch};

use super::draft::Draft;
use super::predict::Predict;
use super::strategy::Limits;
use super::view::RequestView;

/// One row in this many of a step is reserved for prompts.
const KEPT_FOR_PROMPTS: u32 = 8;

/// Sums over rows that costs depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RowLoad {
    /// All rows.
    pub rows: u64,
    /// Rows of prompts, the tokens of their sequences, and pairs of a row and a token it sees.
    pub prompt: (u64, u64, u64),
    /// Decode rows attended on the device, and their sequences' tokens.
    pub device: (u64, u64),
    /// Decode rows attended on the host, and their sequences' tokens.
    pub host: (u64, u64),
}

impl RowLoad {
    /// Of these groups.
    pub fn of<'a>(groups: impl IntoIterator<Item = &'a Group>) -> RowLoad {
        let mut load = RowLoad::default();
        groups.into_iter().for_each(|group| load.add(group));
        load
    }

    /// With one more group.
    pub fn with(mut self, group: &Group) -> RowLoad {
        self.add(group);
        self
    }

    /// Adds a group. Inlined, since rollouts call it for each row of each of their steps.
    #[inline]
    pub fn add(&mut self, group: &Group) {
        let (rows, end) = (u64::from(group.tokens), u64::from(group.end()));
        self.rows += rows;
        match (group.phase, group.kv) {
            (Phase::Prefill, _) => {
                self.prompt.0 += rows;
                self.prompt.1 += end;
                self.prompt.2 += rows * u64::from(group.first) + rows * (rows + 1) / 2;
            }
            (Phase::Decode, Kv::Host) => self.host = (self.host.0 + 1, self.host.1 + end),
            (Phase::Decode, _) => self.device = (self.device.0 + 1, self.device.1 + end),
        }
    }

    /// Without one of its groups.
    pub fn without(mut self, group: &Group) -> RowLoad {
        let one = RowLoad::of([group]);
        self.rows -= one.rows;
        self.prompt =
            (self.prompt.0 - one.prompt.0, self.prompt.1 - one.prompt.1, self.prompt.2 - one.prompt.2);
        self.device = (self.device.0 - one.device.0, self.device.1 - one.device.1);
        self.host = (self.host.0 - one.host.0, self.host.1 - one.host.1);
        self
    }

    /// Seconds of the products: NEO's T_l.
    pub fn linear(&self, costs: &dyn Predict) -> f64 {
        if self.rows == 0 { 0.0 } else { costs.linear(self.rows) }
    }

    /// Seconds of attention on the device: NEO's T_ga, and T_pf of prompts.
    pub fn device_attention(&self, costs: &dyn Predict) -> f64 {
        let (rows, kv) = self.device;
        let decode = if rows == 0 { 0.0 } else { costs.device_attention(rows, kv, kv) };
        let (rows, kv, pairs) = self.prompt;
        decode + if rows == 0 { 0.0 } else { costs.device_attention(rows, kv, pairs) }
    }

    /// Seconds of attention on the host and of handing it over: NEO's T_ca + t_launch.
    pub fn host_attention(&self, costs: &dyn Predict) -> f64 {
        let (rows, kv) = self.host;
        if rows == 0 {
            return 0.0;
        }
        costs.host_attention(rows, kv) + costs.launch() * f64::from(costs.layers())
    }
}

/// A sub-batch while it is filled.
#[derive(Debug, Clone, Default)]
pub(super) struct SubBatchRows {
    /// Groups by kind, in the order of the sub-batch.
    kinds: [Vec<Group>; 4],
    /// The sums that their cost depends on.
    pub load: RowLoad,
}

/// The place of a group's kind: prompts to the host, prompts on the device, decode on the device, decode on the host.
fn kind(group: &Group) -> usize {
    match (group.phase, group.kv) {
        (Phase::Prefill, Kv::Host) => 0,
        (Phase::Prefill, _) => 1,
        (Phase::Decode, Kv::Device | Kv::Split { .. }) => 2,
        (Phase::Decode, Kv::Host) => 3,
    }
}

impl SubBatchRows {
    /// Adds a group.
    pub fn push(&mut self, group: Group) {
        self.load.add(&group);
        self.kinds[kind(&group)].push(group);
    }

    /// The newest of the prompts whose keys and values go to the host.
    pub fn last_to_host(&self) -> Option<&Group> {
        self.kinds[0].last()
    }

    /// Removes it.
    pub fn drop_last_to_host(&mut self) {
        if let Some(group) = self.kinds[0].pop() {
            self.load = self.load.without(&group);
        }
    }

    /// Without decode rows on the host.
    pub fn on_device(&self) -> SubBatchRows {
        let mut rows = self.clone();
        rows.kinds[3].clear();
        let load = rows.load;
        rows.load = RowLoad { rows: load.rows - load.host.0, host: (0, 0), ..load };
        rows
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.load.rows == 0
    }

    /// As a sub-batch.
    pub fn batch(self) -> SubBatch {
        SubBatch::of(self.kinds.concat())
    }

    /// An iteration of these rows alone.
    pub fn alone(self) -> Iteration {
        let sub_batches = if self.is_empty() { Vec::new() } else { vec![self.batch()] };
        Iteration { sub_batches, moves: Vec::new(), flow: Flow::Serial, pick: true, top: false }
    }

    /// Decode rows of the device's requests, those first that have waited longest. They leave room for prompts where there are
    /// some.
    pub fn decode(draft: &Draft<'_>, prompts: &[(&RequestView, Side)], limits: &Limits) -> SubBatchRows {
        let decode = longest_waiting(draft.of(Side::Device, Phase::Decode).collect());
        let most = match prompts.is_empty() {
            true => limits.rows,
            // With a single row, prompts and decode rows take turns.
            false if limits.rows == 1 => {
                let waited = decode.first().map_or(0, |job| job.waited);
                u32::from(prompts.iter().all(|(job, _)| job.waited <= waited))
            }
            false => limits.rows - (limits.rows / KEPT_FOR_PROMPTS).max(1),
        };
        let mut rows = SubBatchRows::default();
        decode.iter().take(most as usize).for_each(|job| rows.push(job.group(1, Side::Device)));
        rows
    }

    /// Prompts in chunks, up to `most` rows of all kinds.
    pub fn prompts(&mut self, prompts: &[(&RequestView, Side)], most: u32) {
        for &(job, side) in prompts {
            let room = u64::from(most) - self.load.rows;
            if room == 0 {
                break;
            }
            let tokens = u64::from(job.prompt - job.stored).min(room) as u32;
            self.push(job.group(tokens, side));
        }
    }
}

/// Those that have waited longest first; otherwise in the order of admission.
pub(super) fn longest_waiting(mut jobs: Vec<&RequestView>) -> Vec<&RequestView> {
    if jobs.windows(2).any(|pair| pair[0].waited < pair[1].waited) {
        jobs.sort_by_key(|job| std::cmp::Reverse(job.waited));
    }
    jobs
}
