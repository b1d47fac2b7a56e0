//! What an iteration looks like without its numbers, and the small programs of that shape.

use rustc_hash::FxHashMap;

use super::run::Run;
use super::unroll;
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::plan::Sizes;
use crate::plan::cost::{self, Scan};
use crate::plan::operation::list_words;
use crate::program::{
    Flow, Group, Iteration, Kind, Kv, LayerPlacement, MoveRequest, Op, Phase, Placement, RequestId, Side,
    SubBatch, Wants, Work, cohort_pieces, copy_lanes_pay, lower, waits,
};

/// Layers of a run that are priced; the others take as long as one more than these.
const PRICED: usize = 4;

/// Runs of layers above which all layers are priced.
const MOST_RUNS: usize = 4;

/// Which layers are alike.
pub(super) struct LayerKinds {
    /// Each kind's first layer, and how many there are.
    pub counts: Vec<(usize, usize)>,
    /// For each layer, the first of its kind.
    firsts: Vec<usize>,
    /// Windows of the layers: no window first, each once.
    pub windows: Vec<Option<u64>>,
    /// Runs of neighbours of one kind: first layer, how many.
    runs: Vec<(usize, usize)>,
    /// Layers that are priced of each run.
    priced: Vec<usize>,
    /// Whether decode rows have pages copied to the device: then each request has operations of its own.
    pub streams_decode: bool,
    /// The same of prompts whose keys and values are not on the host as a whole.
    streams_prompts: bool,
    /// Pieces that a cohort's attention of a layer is.
    pieces: u32,
    /// Whether weights of layers cross the link.
    streams_weights: bool,
}

impl LayerKinds {
    pub fn of(sizes: &Sizes, placement: &Placement) -> LayerKinds {
        let mut counts: Vec<(usize, usize)> = Vec::new();
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        let mut windows = vec![None];
        let mut firsts = Vec::with_capacity(placement.layers.len());
        for (layer, at) in placement.layers.iter().enumerate() {
            let block = &sizes.blocks[layer];
            let like = |other: usize| sizes.blocks[other] == *block && placement.layers[other] == *at;
            let kind = counts.iter().position(|&(other, _)| like(other)).unwrap_or_else(|| {
                counts.push((layer, 0));
                counts.len() - 1
            });
            counts[kind].1 += 1;
            firsts.push(counts[kind].0);
            match runs.last_mut() {
                Some((.., n, k)) if *k == kind => *n += 1,
                _ => runs.push((layer, 1, kind)),
            }
            if !windows.contains(&block.window) {
                windows.push(block.window);
            }
        }
        let few = runs.len() <= MOST_RUNS;
        let priced = runs.iter().map(|&(_, n, _)| if few { n.min(PRICED) } else { n }).collect();
        let streams =
            |at: &LayerPlacement| at.kv == Side::Host && at.decode.attention() == Some(Side::Device);
        let streams_decode = placement.layers.iter().any(streams);
        let streams_prompts = placement.layers.iter().any(|at| at.kv == Side::Host);
        LayerKinds {
            streams_decode,
            streams_prompts,
            pieces: cohort_pieces(placement),
            streams_weights: placement.layers.iter().any(|at| at.weights.is_staged()),
            counts,
            firsts,
            windows,
            runs: runs.into_iter().map(|(layer, n, _)| (layer, n)).collect(),
            priced,
        }
    }

    /// Whether pages of a group are copied, layer by layer.
    fn copied(&self, group: &Group) -> bool {
        group.phase == Phase::Prefill && (group.kv == Kv::Host || self.streams_prompts)
    }

    /// Whether two neighbours are priced as one: what is stored of a prompt has copies of its own.
    fn alike(&self, a: &Group, b: &Group) -> bool {
        a.phase == b.phase && a.kv == b.kv && (!self.copied(a) || (a.first == 0 && b.first == 0))
    }

    /// The place of a layer's window.
    fn window(&self, window: Option<u64>) -> usize {
        self.windows.iter().position(|w| *w == window).expect("a window of some layer")
    }

    /// Where a layer is: its run, and its position in the run as far as prices depend on it. In steps with copies that other operations
    /// wait for, each layer keeps a position of its own: how much of a copy is hidden depends on the layers before it.
    fn place(&self, layer: u32, copies: bool) -> (usize, Place) {
        let layer = layer as usize;
        let run = self.runs.iter().rposition(|&(first, _)| first <= layer).unwrap_or(0);
        let ((first, n), priced) = (self.runs[run], self.priced[run]);
        let place = match layer - first {
            within if n == priced || copies => Place::Layer(within),
            within if within + 1 == n => Place::Last,
            within => Place::Layer(within.min(1)),
        };
        (run, place)
    }
}

/// See [`LayerKinds::place`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    /// So many layers behind the first of the run.
    Layer(usize),
    /// The last one.
    Last,
}

/// Rows that go the same way, in sums.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RowSums {
    phase: Phase,
    kv: Kv,
    /// Tokens that are stored, as far as it matters: see [`stored`].
    first: u32,
    rows: u64,
    wanted: u64,
    /// Words of the lists that say which they are.
    words: u64,
    /// Pages with stored tokens, and of these those with new ones, too.
    pages: [u64; 2],
    /// For each group, the pages with new tokens, where these are copied.
    copies: Vec<u64>,
    /// For each window, what all rows see, and what the rows that want logits see.
    scans: Vec<[Scan; 2]>,
}

impl RowSums {
    /// Sums of the classes of a sub-batch, or of the pieces that a cohort is attended in.
    pub fn of(batch: &SubBatch, kinds: &LayerKinds, pieces: u32) -> Vec<RowSums> {
        let cuts = cuts(batch, kinds, pieces);
        let windows = &kinds.windows;
        let page = PAGE_TOKENS as u32;
        let mut all: Vec<RowSums> = Vec::new();
        let mut last: Option<&Group> = None;
        for (at, group) in (0u32..).zip(&batch.groups) {
            let copied = kinds.copied(group);
            if !last.is_some_and(|l| kinds.alike(l, group)) || cuts.contains(&at) {
                all.push(RowSums {
                    phase: group.phase,
                    kv: group.kv,
                    first: if copied { stored(group.first) } else { page + 1 },
                    rows: 0,
                    wanted: 0,
                    words: 0,
                    pages: [0; 2],
                    copies: Vec::new(),
                    scans: vec![[Scan::default(); 2]; windows.len()],
                });
            }
            last = Some(group);
            let class = all.last_mut().expect("one has just been put there");
            let wanted = group.wanted();
            class.rows += u64::from(group.tokens);
            class.wanted += u64::from(wanted);
            class.words += list_words(group);
            if copied {
                class.pages[0] += u64::from(group.first.div_ceil(page));
                class.pages[1] += u64::from(!group.first.is_multiple_of(page));
                class.copies.push(u64::from(group.end().div_ceil(page) - group.first / page));
            }
            for (window, scans) in windows.iter().zip(&mut class.scans) {
                scans[0] = scans[0].plus(scan(group, group.tokens, *window));
                scans[1] = scans[1].plus(scan(group, wanted, *window));
            }
        }
        all
    }
}

/// Where pieces of a cohort begin, but for the first of a class: as [`lower()`](crate::program::lower()) cuts them.
fn cuts(batch: &SubBatch, kinds: &LayerKinds, pieces: u32) -> Vec<u32> {
    let mut cuts = Vec::new();
    if pieces <= 1 {
        return cuts;
    }
    let mut from = 0;
    for class in batch.groups.chunk_by(|a, b| kinds.alike(a, b)) {
        let count = class.len() as u32;
        let n = pieces.min(count);
        cuts.extend((1..n).map(|i| from + i * count / n));
        from += count;
    }
    cuts
}

/// A step in sums, by sub-batch and class.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sums(Vec<Vec<RowSums>>);

impl Sums {
    pub fn of(iteration: &Iteration, kinds: &LayerKinds) -> Sums {
        let of = |(b, batch): (usize, &SubBatch)| {
            let cohort = iteration.flow == Flow::Async && b > 0;
            RowSums::of(batch, kinds, if cohort { kinds.pieces } else { 1 })
        };
        Sums(iteration.sub_batches.iter().enumerate().map(of).collect())
    }

    /// Whether keys and values of a request are on both sides.
    pub fn split(&self) -> bool {
        self.0.iter().flatten().any(|c| matches!(c.kv, Kv::Split { .. }))
    }

    /// Tokens whose keys and values are read, in the mean over the layers.
    pub fn stored(&self, sizes: &Sizes, kinds: &LayerKinds) -> u64 {
        sizes.mean_by_window(|window| {
            let at = kinds.window(window);
            self.0.iter().flatten().map(|c| c.scans[at][0].kv_tokens).sum()
        })
    }

    /// Words of the lists of a sub-batch.
    pub fn words(&self, sub_batch: usize) -> u64 {
        self.0[sub_batch].iter().map(|c| c.words).sum()
    }

    /// Rows of a sub-batch that want logits.
    pub fn wanted(&self, sub_batch: usize) -> u64 {
        self.0[sub_batch].iter().map(|c| c.wanted).sum()
    }
}

/// What the last `rows` rows of a group see; without a window as programs count it.
fn scan(group: &Group, rows: u32, window: Option<u64>) -> Scan {
    let (n, end) = (u64::from(rows), u64::from(group.end()));
    match window {
        _ if rows == 0 => Scan::default(),
        None if rows == group.tokens => {
            Scan { rows: n, kv_tokens: end, pairs: n * (u64::from(group.first) + n.div_ceil(2)) }
        }
        None => Scan { rows: n, kv_tokens: end, pairs: n * end },
        window => {
            let alike = cost::Group { sequences: 1, rows: n, past: end - n, causal: true };
            Scan { rows: n, kv_tokens: alike.tokens_read(window), pairs: alike.pairs(window) }
        }
    }
}

/// The rows that wait for pages that move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Waiter {
    sub_batch: usize,
    class: usize,
    /// Whether new tokens go to the last of the pages: then they wait as well as attention does.
    adds: bool,
}

/// Moves of pages to one side that somebody waits for: up to the last that he waits for, from where another's end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MovesToSide {
    pub to: Side,
    /// `None`: no rows of this step.
    by: Option<Waiter>,
    /// Pages of each request.
    pub pages: Vec<u64>,
}

impl MovesToSide {
    /// The moves of an iteration, to the host first. Copies of one direction run in the order of the moves.
    pub fn of(iteration: &Iteration, kinds: &LayerKinds) -> Vec<MovesToSide> {
        if iteration.moves.is_empty() {
            return Vec::new();
        }
        let mut wanted: Vec<RequestId> = iteration.moves.iter().map(|m| m.request).collect();
        wanted.sort_unstable();
        let mut classes: FxHashMap<RequestId, (usize, usize, u32)> = FxHashMap::default();
        for (b, batch) in iteration.sub_batches.iter().enumerate() {
            let mut class = 0;
            for (at, group) in batch.groups.iter().enumerate() {
                class += usize::from(at > 0 && !kinds.alike(&batch.groups[at - 1], group));
                if wanted.binary_search(&group.request).is_ok() {
                    classes.insert(group.request, (b, class, group.first));
                }
            }
        }
        let mut all = Vec::new();
        for to in [Side::Host, Side::Device] {
            let moves: Vec<_> =
                iteration.moves.iter().filter(|m| m.to == to && !m.pages.is_empty()).collect();
            let by = |at: usize| {
                let &(sub_batch, class, first) = classes.get(&moves[at].request)?;
                let adds = moves[at].pages.contains(&(first / PAGE_TOKENS as u32));
                Some(Waiter { sub_batch, class, adds })
            };
            let mut begin = 0;
            for at in 0..moves.len() {
                let last = by(at).is_some() && (at + 1..moves.len()).all(|later| by(later) != by(at));
                if last || at + 1 == moves.len() {
                    let pages = moves[begin..=at].iter().map(|m| u64::from(m.pages.end - m.pages.start));
                    all.push(MovesToSide { to, by: by(at), pages: pages.collect() });
                    begin = at + 1;
                }
            }
        }
        all
    }
}

/// A class: its phase, where its keys and values are, and whether none, some or all of its rows want logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Class {
    phase: Phase,
    kv: Kv,
    /// 0, 1, or 2 for all.
    wanted: u8,
    /// Tokens that are stored, as far as it matters: see [`stored`].
    first: u32,
}

/// The fewest stored tokens whose copies wait as those of `first` do: there are none, or whole pages, which new tokens leave alone, or
/// a page that both share, alone or behind others.
fn stored(first: u32) -> u32 {
    let page = PAGE_TOKENS as u32;
    match (first / page, first % page) {
        (0, 0) => 0,
        (0, _) => 1,
        (_, 0) => page,
        _ => page + 1,
    }
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    flow: Flow,
    pick: bool,
    /// Whether rows that the host attends cross on the copy lanes.
    copy_lanes: bool,
    /// Whether experts that are streamed are so for its prompts.
    streams_experts: bool,
    /// For each sub-batch, its classes and where it is parked.
    batches: Vec<(Vec<Class>, Option<(usize, Place)>)>,
    /// Moves of pages: their destination, and the rows that wait for them.
    moves: Vec<(Side, Option<Waiter>)>,
}

impl Shape {
    pub fn of(
        placement: &Placement,
        iteration: &Iteration,
        kinds: &LayerKinds,
        sums: &Sums,
        moved: &[MovesToSide],
    ) -> Shape {
        let class = |c: &RowSums| {
            let wanted = match c.wanted {
                0 => 0,
                n if n == c.rows => 2,
                _ => 1,
            };
            Class { phase: c.phase, kv: c.kv, wanted, first: c.first }
        };
        let batches: Vec<Vec<Class>> = sums.0.iter().map(|b| b.iter().map(class).collect()).collect();
        let copied = |c: &Class| c.phase == Phase::Prefill && c.kv == Kv::Host && c.first > 0;
        let copies = !moved.is_empty() || batches.iter().flatten().any(copied);
        let at = iteration.sub_batches.iter().map(|b| b.at.map(|at| kinds.place(at, copies)));
        Shape {
            flow: iteration.flow,
            pick: iteration.pick,
            copy_lanes: copy_lanes_pay(placement, iteration),
            streams_experts: placement.streams_experts(iteration.prompt_rows()),
            batches: batches.into_iter().zip(at).collect(),
            moves: moved.iter().map(|m| (m.to, m.by)).collect(),
        }
    }

    fn has_prompts_to_host(&self) -> bool {
        let classes = self.batches.iter().flat_map(|(classes, _)| classes);
        classes.into_iter().any(|c| c.phase == Phase::Prefill && c.kv == Kv::Host)
    }

    /// The smallest iteration of this shape, over runs of these lengths in layers.
    fn iteration(&self, runs: &[usize]) -> Iteration {
        let mut slot = 0;
        let mut group = |class: &Class| {
            slot += 1;
            Group {
                request: RequestId { slot, generation: 0 },
                phase: class.phase,
                first: class.first,
                tokens: if class.wanted == 2 { 1 } else { 2 },
                kv: class.kv,
                wants: if class.wanted == 0 { Wants::Nothing } else { Wants::Last },
            }
        };
        let layer = |(run, place): (usize, Place)| {
            let within = if let Place::Layer(within) = place { within } else { runs[run] - 1 };
            (runs[..run].iter().sum::<usize>() + within) as u32
        };
        let mut sub_batches = Vec::new();
        for (classes, at) in &self.batches {
            let groups = classes.iter().map(&mut group).collect();
            sub_batches.push(SubBatch { groups, at: at.map(layer) });
        }
        let moves = self.moves.iter().map(|&(to, by)| {
            slot += 1;
            let stranger = RequestId { slot, generation: 0 };
            let group = by.map(|by| &sub_batches[by.sub_batch].groups[by.class]);
            let request = group.map_or(stranger, |g| g.request);
            let whole = group.map_or(0, |g| g.first / PAGE_TOKENS as u32);
            let adds = by.is_some_and(|by| by.adds);
            MoveRequest { request, to, pages: 0..(whole + u32::from(adds)).max(1) }
        });
        let moves = moves.collect();
        Iteration { sub_batches, moves, flow: self.flow, pick: self.pick, top: false }
    }
}

/// Operations that take equally long, whatever the numbers of their rows are: of one sort in layers of one kind.
#[derive(PartialEq)]
pub(super) struct Alike {
    /// One of them, in the first layer of the kind.
    op: Op,
    /// Pages to staging memory: whether it is for the last layer.
    last: bool,
    /// Pages of whole requests: which of the moves.
    pub moved: Option<usize>,
}

impl Alike {
    /// Those of a small program's operation in the `layer` of the model that its own stands for.
    fn of(op: &Op, at: usize, layer: Option<usize>, ends: bool) -> Alike {
        let staged = |slot: Option<u8>| slot.map(|_| 0);
        // The slot says where, not how long.
        let (kind, last, moved) = match op.kind {
            Kind::Stream { experts, .. } => (Kind::Stream { slot: 0, experts }, false, None),
            Kind::Append { mailbox, staged: s } => (Kind::Append { mailbox, staged: staged(s) }, false, None),
            Kind::Attend { part, from_mailbox, to_mailbox, staged: s } => {
                (Kind::Attend { part, from_mailbox, to_mailbox, staged: staged(s) }, false, None)
            }
            // They are the first operations.
            Kind::PageIn { staged: None } | Kind::PageOut { staged: None } => (op.kind, false, Some(at)),
            Kind::PageIn { staged: s } => (Kind::PageIn { staged: staged(s) }, ends, None),
            Kind::PageOut { staged: s } => (Kind::PageOut { staged: staged(s) }, false, None),
            kind => (kind, false, None),
        };
        let op = Op {
            kind,
            layer: layer.map(|l| l as u32),
            rows: 0..0,
            work: Work { device_experts: op.work.device_experts, ..Work::default() },
            reads: Vec::new(),
            writes: Vec::new(),
            ..op.clone()
        };
        Alike { op, last, moved }
    }

    /// Calls `each` with operations that have the numbers of a step: a copy for each request, or all at once.
    pub fn filled(&self, sums: &Sums, sizes: &Sizes, kinds: &LayerKinds, mut each: impl FnMut(&Op)) {
        let of = &self.op;
        let classes = &sums.0[of.sub_batch as usize][of.groups.start as usize..of.groups.end as usize];
        let logits = of.wanted_only || matches!(of.kind, Kind::Head { .. } | Kind::Pick);
        let mut op = of.clone();
        match of.kind {
            Kind::Stream { .. } => {}
            Kind::PageIn { .. } => {
                // The last layer of rows without logits only adds to the page that new tokens begin in.
                let needed = |c: &RowSums| if self.last && c.wanted == 0 { c.pages[1] } else { c.pages[0] };
                op.work.pages = classes.iter().map(needed).sum();
            }
            Kind::PageOut { .. } => {
                for &pages in classes.iter().flat_map(|c| &c.copies) {
                    op.work.pages = pages;
                    each(&op);
                }
                return;
            }
            _ => op.work.rows = classes.iter().map(|c| if logits { c.wanted } else { c.rows }).sum(),
        }
        if let Kind::Attend { .. } = of.kind {
            let at = kinds.window(of.layer.and_then(|l| sizes.blocks[l as usize].window));
            let sum =
                classes.iter().map(|c| c.scans[at][usize::from(logits)]).fold(Scan::default(), Scan::plus);
            (op.work.kv_tokens, op.work.pairs) = (sum.kv_tokens, sum.pairs);
        }
        each(&op);
    }
}

/// The programs of a shape.
pub(super) struct Template {
    /// What there is to price.
    pub ops: Vec<Alike>,
    /// A few layers of each run.
    pub base: Run,
    /// Programs with one more layer of a run, and how many layers the run has beyond those of the base.
    pub longer: Vec<(Run, f64)>,
}

impl Template {
    /// # Errors
    /// The shape cannot be lowered.
    pub fn new(shape: &Shape, placement: &Placement, kinds: &LayerKinds) -> Result<Template> {
        let mut ops = Vec::new();
        let mut program = |layers: &[usize]| program(shape, placement, kinds, layers, &mut ops);
        // Copies of a prompt's pages run ahead by what the layers before leave of time, and end early in the last one; copies of whole
        // requests run beside as many layers as they take; and a streamed layer's weights run ahead until the link or the device has
        // made up what the other was ahead, which takes the more layers the nearer the two are: nothing repeats, so all are priced.
        let whole = shape.has_prompts_to_host() || !shape.moves.is_empty() || kinds.streams_weights;
        let each: Vec<usize> = match whole {
            true => kinds.runs.iter().map(|&(_, n)| n).collect(),
            false => kinds.priced.clone(),
        };
        let few: Vec<usize> = each.iter().map(|&n| unroll::lowered(n)).collect();
        let parked = shape.batches.iter().any(|(_, at)| at.is_some());
        let known = if few == each || parked { None } else { unrolled(program(&few)?, &few, &each) };
        let base = known.map_or_else(|| program(&each), Ok)?;
        let mut longer = Vec::new();
        for (i, (&(_, n), &priced)) in kinds.runs.iter().zip(&each).enumerate() {
            if n > priced {
                let mut more = each.clone();
                more[i] += 1;
                longer.push((program(&more)?, (n - priced) as f64));
            }
        }
        Ok(Template { ops, base, longer })
    }
}

/// A shape's program over the given number of layers of each run. Operations to price that `ops` lacks are added to it.
fn program(
    shape: &Shape,
    placement: &Placement,
    kinds: &LayerKinds,
    of_runs: &[usize],
    ops: &mut Vec<Alike>,
) -> Result<Run> {
    let layers: Vec<usize> =
        kinds.runs.iter().zip(of_runs).flat_map(|(&(first, _), &n)| first..first + n).collect();
    let at = layers.iter().map(|&l| placement.layers[l]).collect();
    // The iteration has fewer rows than it stands for.
    let copy_lane_rows = if shape.copy_lanes { 0 } else { u32::MAX };
    let stream_rows = if shape.streams_experts { 0 } else { u32::MAX };
    let small = Placement { layers: at, copy_lane_rows, stream_rows, ..placement.clone() };
    let mut program = lower(&small, &shape.iteration(of_runs))?;
    let waits = waits(&program);
    // What they read and write has been looked at.
    for op in &mut program.ops {
        (op.reads, op.writes) = (Vec::new(), Vec::new());
    }
    let priced = program.ops.iter().enumerate().map(|(at, op)| {
        let layer = op.layer.map(|l| kinds.firsts[layers[l as usize]]);
        let ends = op.layer.is_some_and(|l| l as usize + 1 == layers.len());
        let alike = Alike::of(op, at, layer, ends);
        ops.iter().position(|known| *known == alike).unwrap_or_else(|| {
            ops.push(alike);
            ops.len() - 1
        })
    });
    Ok(Run { priced: priced.collect(), waits, program })
}

/// A program of `few` layers of each run, extended to all layers; `None` if the others do not repeat these.
fn unrolled(mut run: Run, few: &[usize], each: &[usize]) -> Option<Run> {
    // From the last, so that the layers before one are still few.
    for at in (0..few.len()).rev() {
        let more = each[at] - few[at];
        if more > 0 {
            unroll::repeat(&mut run, few[..at].iter().sum::<usize>() as u32, more / 2)?;
        }
    }
    Some(run)
}

#[cfg(test)]
mod tests;
