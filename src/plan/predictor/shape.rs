//! What an iteration looks like without its numbers, and the small programs of that shape.

use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::plan::Sizes;
use crate::plan::cost::{self, Scan};
use crate::program::order::waits;
use crate::program::{
    Flow, Group, Iteration, Kind, Kv, LayerPlacement, Op, Phase, Placement, Program, RequestId, Side,
    SubBatch, Wants, lower,
};

/// Layers of a run that are priced; the others take as long as one more than these.
const PRICED: usize = 4;

/// Runs of layers above which all layers are priced.
const MOST_RUNS: usize = 4;

/// Which layers are alike.
pub(super) struct Kinds {
    /// Each kind's first layer, and how many there are.
    pub counts: Vec<(usize, usize)>,
    /// Windows of the layers: no window first, each once.
    pub windows: Vec<Option<u64>>,
    /// Runs of neighbours of one kind: first layer, how many.
    runs: Vec<(usize, usize)>,
    /// Layers that are priced of each run.
    priced: Vec<usize>,
    /// Whether decode rows have pages copied to the device: then each request has operations of its own.
    pub streams_decode: bool,
}

impl Kinds {
    pub fn of(sizes: &Sizes, placement: &Placement) -> Kinds {
        let mut counts: Vec<(usize, usize)> = Vec::new();
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        let mut windows = vec![None];
        for (layer, at) in placement.layers.iter().enumerate() {
            let block = &sizes.blocks[layer];
            let like = |other: usize| sizes.blocks[other] == *block && placement.layers[other] == *at;
            let kind = counts.iter().position(|&(other, _)| like(other)).unwrap_or_else(|| {
                counts.push((layer, 0));
                counts.len() - 1
            });
            counts[kind].1 += 1;
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
        Kinds {
            streams_decode,
            counts,
            windows,
            runs: runs.into_iter().map(|(layer, n, _)| (layer, n)).collect(),
            priced,
        }
    }

    /// Where a layer is: its run, and its place in it as far as it matters.
    fn place(&self, layer: u32) -> (usize, Place) {
        let layer = layer as usize;
        let run = self.runs.iter().rposition(|&(first, _)| first <= layer).unwrap_or(0);
        let ((first, n), priced) = (self.runs[run], self.priced[run]);
        let place = match layer - first {
            within if n == priced => Place::Layer(within),
            within if within + 1 == n => Place::Last,
            within => Place::Layer(within.min(1)),
        };
        (run, place)
    }
}

/// See [`Kinds::place`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Place {
    /// So many layers behind the first of the run.
    Layer(usize),
    /// The last one.
    Last,
}

/// Sums over rows that go the same way.
pub(super) struct Rows {
    rows: u64,
    wanted: u64,
    /// Pages with stored tokens, with new ones, and with both.
    pages: [u64; 3],
    /// By window: what all rows see, and what those see that want logits.
    scans: Vec<[Scan; 2]>,
}

impl Rows {
    /// Of the classes of a sub-batch.
    pub fn of(batch: &SubBatch, windows: &[Option<u64>]) -> Vec<Rows> {
        let mut all: Vec<Rows> = Vec::new();
        let mut last: Option<&Group> = None;
        for group in &batch.groups {
            if !last.is_some_and(|l| alike(l, group)) {
                all.push(Rows {
                    rows: 0,
                    wanted: 0,
                    pages: [0; 3],
                    scans: vec![[Scan::default(); 2]; windows.len()],
                });
            }
            last = Some(group);
            let class = all.last_mut().expect("one has just been put there");
            class.rows += u64::from(group.tokens);
            class.wanted += u64::from(group.wanted());
            let page = PAGE_TOKENS as u32;
            class.pages[0] += u64::from(group.first.div_ceil(page));
            class.pages[1] += u64::from(group.end().div_ceil(page) - group.first / page);
            class.pages[2] += u64::from(!group.first.is_multiple_of(page));
            for (window, scans) in windows.iter().zip(&mut class.scans) {
                let logits = group.wanted();
                scans[0] = scans[0].plus(scan(group, group.tokens, *window));
                scans[1] = scans[1].plus(scan(group, logits, *window));
            }
        }
        all
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

/// Whether two neighbours are priced as one. Prompts are few, and those on the host have moves of pages of their own.
fn alike(a: &Group, b: &Group) -> bool {
    a.phase == Phase::Decode && a.phase == b.phase && a.kv == b.kv
}

/// A class: its phase, where its keys and values are, and whether none, some or all of its rows want logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Class {
    phase: Phase,
    kv: Kv,
    /// 0, 1, or 2 for all.
    wanted: u8,
    /// Whether it is the beginning of a prompt: nothing is stored.
    begins: bool,
}

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    flow: Flow,
    pick: bool,
    /// Of each sub-batch, its classes and where it is parked.
    batches: Vec<(Vec<Class>, Option<(usize, Place)>)>,
}

impl Shape {
    pub fn of(iteration: &Iteration, kinds: &Kinds) -> Shape {
        let classes = |batch: &SubBatch| {
            let mut all: Vec<Class> = Vec::new();
            let mut last: Option<&Group> = None;
            for g in &batch.groups {
                let wanted = match g.wanted() {
                    0 => 0,
                    n if n == g.tokens => 2,
                    _ => 1,
                };
                let begins = g.phase == Phase::Prefill && g.first == 0;
                match all.last_mut() {
                    Some(class) if last.is_some_and(|l| alike(l, g)) => {
                        if class.wanted != wanted {
                            class.wanted = 1;
                        }
                    }
                    _ => all.push(Class { phase: g.phase, kv: g.kv, wanted, begins }),
                }
                last = Some(g);
            }
            all
        };
        let of = |batch: &SubBatch| (classes(batch), batch.at.map(|at| kinds.place(at)));
        Shape {
            flow: iteration.flow,
            pick: iteration.pick,
            batches: iteration.sub_batches.iter().map(of).collect(),
        }
    }

    fn has_prompts_to_host(&self) -> bool {
        let classes = self.batches.iter().flat_map(|(classes, _)| classes);
        classes.into_iter().any(|c| c.phase == Phase::Prefill && c.kv == Kv::Host)
    }

    /// The smallest iteration of this shape, over runs of so many layers.
    fn iteration(&self, runs: &[usize]) -> Iteration {
        let mut slot = 0;
        let mut group = |class: &Class| {
            slot += 1;
            Group {
                request: RequestId { slot, generation: 0 },
                phase: class.phase,
                first: u32::from(!class.begins),
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
        Iteration { sub_batches, moves: Vec::new(), flow: self.flow, pick: self.pick }
    }
}

/// A small program.
pub(super) struct Run {
    pub program: Program,
    pub waits: Vec<Vec<usize>>,
    /// Of each of its layers, the one of the model that it stands for.
    layers: Vec<usize>,
}

impl Run {
    /// An operation with the numbers of these rows, by sub-batch and class.
    pub fn filled(&self, op: usize, rows: &[Vec<Rows>], sizes: &Sizes, windows: &[Option<u64>]) -> Op {
        let of = &self.program.ops[op];
        let classes = &rows[of.sub_batch as usize][of.groups.start as usize..of.groups.end as usize];
        let layer = of.layer.map(|l| self.layers[l as usize]);
        let logits = of.wanted_only || matches!(of.kind, Kind::Head { .. } | Kind::Pick);
        let mut work = of.work;
        match of.kind {
            Kind::Stream { .. } => {}
            Kind::PageIn { .. } => {
                // The last layer of rows without logits only adds to the page that new tokens begin in.
                let last = of.layer.is_some_and(|l| l as usize + 1 == self.layers.len());
                let needed = |c: &Rows| if last && c.wanted == 0 { c.pages[2] } else { c.pages[0] };
                work.pages = classes.iter().map(needed).sum();
            }
            Kind::PageOut { .. } => work.pages = classes.iter().map(|c| c.pages[1]).sum(),
            _ => work.rows = classes.iter().map(|c| if logits { c.wanted } else { c.rows }).sum(),
        }
        if let Kind::Attend { .. } = of.kind {
            let window = layer.and_then(|l| sizes.blocks[l].window);
            let at = windows.iter().position(|w| *w == window).expect("a window of some layer");
            let sum =
                classes.iter().map(|c| c.scans[at][usize::from(logits)]).fold(Scan::default(), Scan::plus);
            (work.kv_tokens, work.pairs) = (sum.kv_tokens, sum.pairs);
        }
        Op { work, layer: layer.map(|l| l as u32), reads: Vec::new(), writes: Vec::new(), ..of.clone() }
    }
}

/// The programs of a shape.
pub(super) struct Template {
    /// A few layers of each run.
    pub base: Run,
    /// With one layer more of a run, and how many the run has beyond those of the base.
    pub longer: Vec<(Run, f64)>,
}

impl Template {
    /// # Errors
    /// The shape cannot be lowered.
    pub fn new(shape: &Shape, placement: &Placement, kinds: &Kinds) -> Result<Template> {
        let program = |priced: &[usize]| -> Result<Run> {
            let layers: Vec<usize> =
                kinds.runs.iter().zip(priced).flat_map(|(&(first, _), &n)| first..first + n).collect();
            let at = layers.iter().map(|&l| placement.layers[l]).collect();
            let small = Placement { layers: at, ..placement.clone() };
            let program = lower(&small, &shape.iteration(priced))?;
            Ok(Run { waits: waits(&program), program, layers })
        };
        // Copies of a prompt's pages run ahead by what the layers before leave of time, and end early in the last one: nothing
        // repeats, so all layers are priced.
        let whole = shape.has_prompts_to_host();
        let each: Vec<usize> = match whole {
            true => kinds.runs.iter().map(|&(_, n)| n).collect(),
            false => kinds.priced.clone(),
        };
        let base = program(&each)?;
        let mut longer = Vec::new();
        for (i, (&(_, n), &priced)) in kinds.runs.iter().zip(&each).enumerate() {
            if n > priced {
                let mut more = each.clone();
                more[i] += 1;
                longer.push((program(&more)?, (n - priced) as f64));
            }
        }
        Ok(Template { base, longer })
    }
}
