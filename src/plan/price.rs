//! Seconds of a placement: a prompt's steps and a decode step, stage by stage.
//!
//! ```text
//! stage    a run of units (embedding, blocks, head) that are placed alike: max(Σ units, units · δ)
//! block    max(compute + exchanges, loads, stores)        loads run under the block before (LIA §5.3)
//! step     Σ stages + link, where the hidden state crosses between stages
//! decode   gen steps, each priced in the middle of the answer: costs are linear in the context
//! ```

use serde::Serialize;

use super::cost::{Batch, Costs, Direction, Group};
use super::sizes::Sizes;
use super::sublayer::{BlockTime, Resident, block_time};
use crate::cache::PAGE_TOKENS;
use crate::program::{LayerPlacement, Phase, Placement, Side, Sublayer};

/// What is to be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// Tokens of a prompt.
    pub prompt: u64,
    /// Decode steps.
    pub gen_len: u64,
    /// Sequences.
    pub batch: u64,
    /// Most rows of a prefill step.
    pub chunk: u64,
}

impl Workload {
    /// Tokens of a sequence at the end.
    pub fn context(&self) -> u64 {
        self.prompt + self.gen_len
    }

    /// The prefill's steps: how many of each kind, and what one has. Whole prompts where some fit in a step, otherwise
    /// pieces of one prompt, priced in the middle of it.
    pub fn prefill_steps(&self) -> Vec<(u64, Group)> {
        let mut steps = Vec::new();
        if self.chunk >= self.prompt {
            let together = (self.chunk / self.prompt).min(self.batch);
            steps.push((self.batch / together, Group::prompts(together, self.prompt)));
            if !self.batch.is_multiple_of(together) {
                steps.push((1, Group::prompts(self.batch % together, self.prompt)));
            }
        } else {
            let (whole, rest) = (self.prompt / self.chunk, self.prompt % self.chunk);
            let piece = |rows, past| Group { sequences: 1, rows, past, causal: true };
            steps.push((self.batch * whole, piece(self.chunk, (whole - 1) * self.chunk / 2)));
            if rest > 0 {
                steps.push((self.batch, piece(rest, whole * self.chunk)));
            }
        }
        steps
    }

    /// A decode step in the middle of the answer.
    pub fn decode_step(&self) -> Group {
        Group::decode(self.batch, self.prompt + self.gen_len.saturating_sub(1) / 2)
    }
}

/// How keys and values of a GPU's block that its pages cannot hold are attended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Spilled {
    /// Copied to staging buffers, the next while one is attended (HELM §4.2.3).
    Streamed,
    /// Attended in place by the CPU while the GPU attends its own; the partial results are merged.
    Split,
}

/// A run of units that are placed alike.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct UnitRun {
    /// `embedding`, `blocks 1-20`, `blocks 21-36 and head`, `link`.
    pub name: String,
    /// `cpu`, `gpu`, both for a block that is shared, or `link`.
    pub side: &'static str,
    /// Units in it; 0 of the link.
    pub units: usize,
    /// Seconds of the whole prefill.
    pub prefill_s: f64,
    /// Seconds of one decode step.
    pub decode_step_s: f64,
}

/// Seconds of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Times {
    /// Seconds of the prefill.
    pub prefill: f64,
    /// Seconds of one decode step.
    pub step: f64,
    /// Seconds by stage.
    pub stages: Vec<UnitRun>,
    /// How spilled keys and values are attended in decode, if any are.
    pub spilled: Option<Spilled>,
}

/// Seconds of both products of a feed-forward of `rows` rows, all of it on `side`.
fn feed_forward(costs: &dyn Costs, layer: usize, side: Side, rows: u64) -> f64 {
    [Sublayer::Up, Sublayer::Down].map(|s| costs.product(side, layer, s, rows)).iter().sum()
}

/// Seconds of the experts that `side` has of a divided layer.
pub(crate) fn experts_of_side(
    costs: &dyn Costs,
    sizes: &Sizes,
    layer: usize,
    at: &LayerPlacement,
    side: Side,
    rows: u64,
) -> f64 {
    let all = |rows| feed_forward(costs, layer, side, rows);
    sizes.seconds_of_experts(layer, side, at.device_experts, rows, all)
}

/// Seconds of a block among blocks like it, all terms apart. `spilled` of the stored tokens of each sequence are on the
/// host although the block's pages are on the GPU.
pub fn block(
    costs: &dyn Costs,
    sizes: &Sizes,
    layer: usize,
    at: &LayerPlacement,
    phase: Phase,
    groups: &[Group],
    spilled: u64,
) -> (BlockTime, Option<Spilled>) {
    let batch = Batch { phase, groups };
    let policy = at.policy(phase);
    let residents = Resident { weights: at.weights, kv: at.kv };
    let mut t = block_time(costs, sizes, layer, policy, policy.side(Sublayer::Down), residents, &batch);
    if at.is_divided() {
        let rows = batch.rows();
        let part = |side| experts_of_side(costs, sizes, layer, at, side, rows);
        let ways = costs.transfer(Direction::ToHost, sizes.hidden(rows))
            + 2.0 * costs.transfer(Direction::ToHost, rows)
            + costs.transfer(Direction::ToDevice, 2 * sizes.hidden(rows));
        t.compute +=
            part(Side::Device).max(part(Side::Host) + ways) - feed_forward(costs, layer, Side::Device, rows);
    }
    if spilled == 0 || at.kv == Side::Host || policy.attention() != Some(Side::Device) {
        return (t, None);
    }
    let part = |causal: bool, past: &dyn Fn(&Group) -> u64| -> Vec<Group> {
        groups.iter().map(|g| Group { past: past(g), causal, ..*g }).collect()
    };
    let (resident, host) =
        (part(true, &|g| g.past.saturating_sub(spilled)), part(false, &|g| g.past.min(spilled)));
    let (resident, host) = (Batch { phase, groups: &resident }, Batch { phase, groups: &host });
    let window = sizes.blocks[layer].window;
    let gpu = costs.attention(Side::Device, layer, &batch);
    let bytes = batch.tokens_read(window).saturating_sub(resident.tokens_read(window)) * sizes.kv_token();
    let streamed = gpu.max(costs.transfer(Direction::ToDevice, bytes));
    let rows = batch.rows() * sizes.spec.q_dim() as u64;
    let split = costs
        .attention(Side::Device, layer, &resident)
        .max(costs.transfer(Direction::ToHost, 2 * rows) + costs.attention(Side::Host, layer, &host))
        + costs.transfer(Direction::ToDevice, 4 * rows);
    let (seconds, how) =
        if split < streamed { (split, Spilled::Split) } else { (streamed, Spilled::Streamed) };
    t.compute += seconds - gpu;
    (t, Some(how))
}

/// Of `past` stored tokens of each sequence of `work`, those that the GPU's pages cannot hold. If they do not hold all that there
/// will be, the oldest leave above 80% of its pages, down to 65% (the engine's pager, HELM §4.2): those that stay take 73% of
/// them on average.
pub fn spilled_tokens(placement: &Placement, work: &Workload, past: u64) -> u64 {
    let (page, batch) = (PAGE_TOKENS as u64, work.batch.max(1));
    if placement.device_pages as u64 >= batch * work.context().div_ceil(page) {
        return 0;
    }
    let share = |percent: u64| placement.device_pages as u64 * percent / 100 * page / batch;
    if past <= share(80) { 0 } else { past - share(73) }
}

/// Seconds of every unit of a step of `work`, and of the crossings in front of it.
fn step(
    costs: &dyn Costs,
    sizes: &Sizes,
    placement: &Placement,
    work: &Workload,
    phase: Phase,
    group: Group,
    logits: u64,
) -> (Vec<(f64, f64)>, Option<Spilled>) {
    let groups = [group];
    let rows = group.total_rows();
    let carry = |from: Side, to: Side, rows: u64| match (from, to) {
        (Side::Host, Side::Device) => costs.transfer(Direction::ToDevice, sizes.hidden(rows)),
        (Side::Device, Side::Host) => costs.transfer(Direction::ToHost, sizes.hidden(rows)),
        _ => 0.0,
    };
    let placement = &*placement.at_rows(if phase == Phase::Prefill { rows } else { 0 });
    let spilled = spilled_tokens(placement, work, group.past);
    let mut out = vec![(costs.embed(placement.embedding, rows), 0.0)];
    let mut before = placement.embedding;
    let mut how = None;
    for (i, layer) in placement.layers.iter().enumerate() {
        let (t, spill) = block(costs, sizes, i, layer, phase, &groups, spilled);
        how = how.or(spill);
        let policy = layer.policy(phase);
        let wrap = policy.side(Sublayer::Down) != policy.side(Sublayer::Qkv);
        // In a run of blocks whose vector begins and ends on different sides the crossing is part of the block.
        let crossing = if wrap { 0.0 } else { carry(before, policy.side(Sublayer::Qkv), rows) };
        out.push((t.overlapped(), crossing));
        before = policy.side(Sublayer::Down);
    }
    let batch = Batch { phase, groups: &groups };
    let stored = sizes.mean_by_window(|window| batch.tokens_read(window));
    let head = costs.head_beside(placement.head, logits, stored);
    out.push((head, carry(before, placement.head, logits)));
    (out, how)
}

fn like(placement: &Placement, unit: usize) -> LayerPlacement {
    match unit {
        0 => LayerPlacement::all(placement.embedding),
        u if u == placement.layers.len() + 1 => LayerPlacement::all(placement.head),
        u => placement.layers[u - 1],
    }
}

fn side_of(at: &LayerPlacement) -> &'static str {
    let has = |side| at.prefill.0.contains(&side) || at.decode.0.contains(&side);
    match (has(Side::Host), has(Side::Device)) {
        (true, false) => "cpu",
        (false, true) => "gpu",
        _ => "both",
    }
}

/// `embedding and blocks 1-20`.
fn name_of(first: usize, last: usize, layers: usize) -> String {
    let mut parts = Vec::new();
    if first == 0 {
        parts.push("embedding".to_owned());
    }
    let (from, to) = (first.max(1), last.min(layers));
    match to.checked_sub(from) {
        Some(0) => parts.push(format!("block {from}")),
        Some(_) => parts.push(format!("blocks {from}-{to}")),
        None => {}
    }
    if last == layers + 1 {
        parts.push("head".to_owned());
    }
    match &parts[..] {
        [a, b, c] => format!("{a}, {b} and {c}"),
        _ => parts.join(" and "),
    }
}

/// Seconds of one unit in all of a run's steps, and of the crossing in front of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct UnitTime {
    /// In the whole prefill.
    pub prefill: f64,
    /// In one decode step.
    pub step: f64,
    /// Crossings in the whole prefill.
    pub link_prefill: f64,
    /// The crossing in one decode step.
    pub link_step: f64,
}

/// Every unit of `placement`, and how spilled keys and values are attended in decode.
pub fn units(
    costs: &dyn Costs,
    sizes: &Sizes,
    placement: &Placement,
    work: &Workload,
) -> (Vec<UnitTime>, Option<Spilled>) {
    let mut out = vec![UnitTime::default(); placement.layers.len() + 2];
    let steps = work.prefill_steps();
    for (i, &(count, group)) in steps.iter().enumerate() {
        let mut add = |count: u64, logits: u64| {
            if count > 0 {
                let (times, _) = step(costs, sizes, placement, work, Phase::Prefill, group, logits);
                for (unit, (t, link)) in out.iter_mut().zip(times) {
                    unit.prefill += count as f64 * t;
                    unit.link_prefill += count as f64 * link;
                }
            }
        };
        // Of a prompt in pieces, the last piece has logits.
        let whole = group.past == 0 && group.rows == work.prompt;
        let with = if i + 1 == steps.len() { work.batch.min(count) } else { 0 };
        if whole {
            add(count, group.sequences);
        } else {
            add(count - with, 0);
            add(with, 1);
        }
    }
    let (times, spilled) = step(costs, sizes, placement, work, Phase::Decode, work.decode_step(), work.batch);
    for (unit, (t, link)) in out.iter_mut().zip(times) {
        (unit.step, unit.link_step) = (t, link);
    }
    (out, spilled)
}

/// Runs of units that are placed alike: (first, last).
pub(super) fn runs_of(placement: &Placement) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for unit in 0..placement.layers.len() + 2 {
        match runs.last_mut() {
            Some((first, last)) if like(placement, *first) == like(placement, unit) => *last = unit,
            _ => runs.push((unit, unit)),
        }
    }
    runs
}

/// Units `first..=last`, which take these seconds.
pub(super) fn stage_of(
    placement: &Placement,
    first: usize,
    last: usize,
    prefill_s: f64,
    decode_step_s: f64,
) -> UnitRun {
    UnitRun {
        name: name_of(first, last, placement.layers.len()),
        side: side_of(&like(placement, first)),
        units: last + 1 - first,
        prefill_s,
        decode_step_s,
    }
}

/// Seconds of `work` by `placement`.
pub fn price(costs: &dyn Costs, sizes: &Sizes, placement: &Placement, work: &Workload) -> Times {
    let (units, spilled) = units(costs, sizes, placement, work);
    let steps: u64 = work.prefill_steps().iter().map(|(count, _)| count).sum();
    let stage = |&(first, last): &(usize, usize)| {
        let at = like(placement, first);
        let issue = |phase: Phase| {
            let each = at.policy(phase).0.map(|side| costs.issue(side)).into_iter().fold(0.0, f64::max);
            (last + 1 - first) as f64 * each
        };
        let units = &units[first..=last];
        let prefill = units.iter().map(|u| u.prefill).sum::<f64>().max(steps as f64 * issue(Phase::Prefill));
        let step = units.iter().map(|u| u.step).sum::<f64>().max(issue(Phase::Decode));
        stage_of(placement, first, last, prefill, step)
    };
    let mut stages: Vec<UnitRun> = runs_of(placement).iter().map(stage).collect();
    let (prefill_s, decode_step_s) =
        units.iter().fold((0.0, 0.0), |(a, b), u| (a + u.link_prefill, b + u.link_step));
    if prefill_s > 0.0 || decode_step_s > 0.0 {
        stages.push(UnitRun { name: "link".into(), side: "link", units: 0, prefill_s, decode_step_s });
    }
    Times {
        prefill: stages.iter().map(|s| s.prefill_s).sum(),
        step: stages.iter().map(|s| s.decode_step_s).sum(),
        stages,
        spilled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::synth;
    use crate::plan::{Roofline, hardware};
    use crate::program::{Policy, Residence};

    fn work() -> Workload {
        Workload { prompt: 512, gen_len: 128, batch: 1, chunk: 512 }
    }

    #[test]
    fn steps_cover_every_prompt_once() {
        for (prompt, batch, chunk) in
            [(512, 1, 512), (512, 1, 100), (100, 7, 512), (1, 3, 1), (1000, 3, 256), (512, 4, 512)]
        {
            let w = Workload { prompt, gen_len: 1, batch, chunk };
            let steps = w.prefill_steps();
            assert_eq!(steps.iter().map(|(n, g)| n * g.total_rows()).sum::<u64>(), prompt * batch, "{w:?}");
            assert!(steps.iter().all(|(_, g)| g.total_rows() <= chunk.max(1)), "{w:?}");
            let pairs: u64 = steps.iter().map(|(n, g)| n * g.pairs(None)).sum();
            let whole = batch * prompt * (prompt + 1) / 2;
            assert!(pairs.abs_diff(whole) * 20 <= whole, "{w:?}: {pairs} of {whole}");
        }
    }

    /// HELM's running example, in the engine's own pricing: 20 blocks at 45 GB/s, 16 and the head at 218 GB/s.
    #[test]
    fn a_boundary_is_two_stages_and_a_link() {
        let s = Sizes::of_spec(&synth::parse("qwen3-8b").unwrap().spec);
        let mut h = hardware::named("rtx4060-laptop").unwrap();
        // HELM's arithmetic has neither.
        (h.efficiency.gpu_launch_s, h.efficiency.hand_over_s) = (0.0, 0.0);
        let w = Workload { prompt: 1, gen_len: 1, batch: 1, chunk: 1 };
        let t = price(&Roofline::new(&h, &s), &s, &Placement::boundary(21, 36, 10, 10), &w);
        let names: Vec<_> = t.stages.iter().map(|s| (s.name.as_str(), s.side, s.units)).collect();
        assert_eq!(
            names,
            [
                ("embedding and blocks 1-20", "cpu", 21),
                ("blocks 21-36 and head", "gpu", 17),
                ("link", "link", 0)
            ]
        );
        assert!((t.step - 0.2055).abs() < 2e-4, "{}", t.step);
        assert!((t.stages[0].decode_step_s - 0.1715).abs() < 2e-4, "{:?}", t.stages);
        assert!((t.stages[2].decode_step_s - 5.5e-6).abs() < 1e-7);
    }

    #[test]
    fn streaming_long_prompts_beats_computing_them_on_the_cpu() {
        let s = Sizes::of_spec(&synth::parse("qwen3-8b").unwrap().spec);
        let h = hardware::named("rtx4060-laptop").unwrap();
        let costs = Roofline::new(&h, &s);
        let in_place = Placement::boundary(21, 36, 64, 64);
        let mut streams = in_place.clone();
        for l in streams.layers.iter_mut().filter(|l| l.weights == Residence::Host) {
            (l.weights, l.prefill) = (Residence::Streamed, Policy::all(Side::Device));
        }
        let times = |p, prompt, chunk| price(&costs, &s, p, &Workload { prompt, chunk, ..work() });
        let (a, b) = (times(&in_place, 2048, 2048), times(&streams, 2048, 2048));
        assert!(b.prefill < 0.5 * a.prefill, "{} {}", b.prefill, a.prefill);
        assert!((a.step - b.step).abs() < 1e-4 * a.step);
        assert!(times(&streams, 16, 16).prefill > times(&in_place, 16, 16).prefill);
    }

    /// HELM's missing term: evicted pages cross the link for every token, 276 ms of them at 30 000 tokens, unless the CPU
    /// attends them where they are.
    #[test]
    fn spilled_pages_cost_the_link_or_the_cpu() {
        let s = Sizes::of_spec(&synth::parse("qwen3-8b").unwrap().spec);
        let mut h = hardware::named("rtx3090-epyc").unwrap();
        h.accelerator.as_mut().unwrap().1.h2d_bw = 16e9;
        let w = Workload { prompt: 30_000, gen_len: 1, batch: 1, chunk: 512 };
        let with = |h: &hardware::Hardware, pages| {
            price(&Roofline::new(h, &s), &s, &Placement::all(Side::Device, 36, pages), &w)
        };
        let all = with(&h, 1000);
        assert_eq!(all.spilled, None);
        h.cpu.read_bw = 1e9;
        let streamed = with(&h, 0);
        assert_eq!(streamed.spilled, Some(Spilled::Streamed));
        let link = 30_000.0 * 147_456.0 / 16e9;
        let gain = streamed.step - all.step;
        assert!(gain < link && gain > link - all.step, "{gain} of {link}");
        h.cpu.read_bw = 54e9;
        let split = with(&h, 0);
        assert_eq!(split.spilled, Some(Spilled::Split));
        assert!(split.step < 0.5 * streamed.step);
    }

    #[test]
    fn names_say_which_units() {
        for (first, last, want) in [
            (0, 5, "embedding, blocks 1-4 and head"),
            (0, 0, "embedding"),
            (1, 1, "block 1"),
            (2, 5, "blocks 2-4 and head"),
            (5, 5, "head"),
            (0, 1, "embedding and block 1"),
        ] {
            assert_eq!(name_of(first, last, 4), want);
        }
    }
}
