//! The CPU's sublayers, timed one by one.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::grid::{Grid, Point, PointPace, TimeBudget};
use super::{Subject, walk};
use crate::cache::{HUGE_FROM, KvGeometry, KvType, PAGE_TOKENS, PagePool};
use crate::engine::{Host, HostSeq, HostStep, HostWorkspace, Prepared, Residual};
use crate::host::memory_available;
use crate::model::ModelSpec;
use crate::profile::limits::last_level_cache;
use crate::profile::sample::{Effort, Samples};
use crate::profile::tables::{Curve, LayerTable, SideTable, Surface};
use crate::simd::linear::Mode;
use crate::{Error, Result};

fn geometry(spec: &ModelSpec, n_layers: usize) -> KvGeometry {
    KvGeometry { n_layers, n_kv_heads: spec.n_kv_heads, head_dim: spec.head_dim, dtype: KvType::BF16 }
}

/// Samples of the operations of one kind of layer at one point: of each run the mean over its layers.
#[derive(Default, Clone)]
struct OfLayer {
    project: Samples,
    append: Samples,
    attend: Samples,
    out_proj: Samples,
    ffn_up: Samples,
    ffn_down: Samples,
}

impl OfLayer {
    /// The mean over the layers of a run is a sample of `to`.
    fn means(self, to: &mut OfLayer) {
        let pairs = [
            (self.project, &mut to.project),
            (self.append, &mut to.append),
            (self.attend, &mut to.attend),
            (self.out_proj, &mut to.out_proj),
            (self.ffn_up, &mut to.ffn_up),
            (self.ffn_down, &mut to.ffn_down),
        ];
        for (of_run, to) in pairs {
            if !of_run.is_empty() {
                to.push(of_run.mean());
            }
        }
    }
}

/// Samples of one point.
#[derive(Default, Clone)]
struct Recorded {
    embed: Samples,
    layers: Vec<OfLayer>,
    head: Samples,
    pick: Samples,
}

/// A model on the CPU, ready to run steps of any kind.
struct Rig<'a> {
    subject: &'a Subject<'a>,
    kinds: &'a [usize],
    walk: Vec<usize>,
    host: Host,
    model: Prepared,
    /// For keys and values.
    memory: memmap2::MmapMut,
    ws: HostWorkspace,
    step: HostStep,
}

/// How often the points are gone through. Whatever else the machine does comes and goes within seconds: each point is timed at
/// several times.
pub(super) fn passes(effort: Effort) -> usize {
    match effort {
        Effort::Quick => 1,
        Effort::Full => 3,
    }
}

/// Times every point of the grid. `progress` is called after each, in each pass.
///
/// # Errors
/// A damaged model; no memory for it.
pub(super) fn measure(subject: &Subject<'_>, kinds: &[usize], progress: &dyn Fn()) -> Result<SideTable> {
    let grid = Grid::new(subject.spec, subject.effort);
    let mut rig = Rig::new(subject, kinds, &grid)?;
    let deadline = TimeBudget::new(subject.effort);
    let n_kinds = kinds.iter().max().map_or(0, |k| k + 1);
    let empty = Recorded { layers: vec![OfLayer::default(); n_kinds], ..Recorded::default() };
    let mut points: Vec<(Point, Recorded)> = grid.points().iter().map(|&p| (p, empty.clone())).collect();
    for pass in 0..passes(subject.effort) {
        for (point, recorded) in &mut points {
            // Every point is timed once before any is timed again.
            let pace = if pass == 0 || deadline.pace() == PointPace::Calm {
                deadline.pace()
            } else {
                PointPace::Over
            };
            rig.time(*point, pace, recorded)?;
            progress();
        }
    }
    points.retain(|(_, recorded)| !recorded.embed.is_empty());
    Ok(table(subject, kinds, n_kinds, &points))
}

/// Memory for keys and values, written all over: small numbers in every format, and pages that are the process's own,
/// not the system's page of zeros.
fn memory(bytes: usize, large: bool) -> Result<memmap2::MmapMut> {
    let mut map = memmap2::MmapMut::map_anon(bytes)
        .map_err(|e| Error::Capacity(format!("no memory for {} MB of keys and values: {e}", bytes >> 20)))?;
    #[cfg(target_os = "linux")]
    let _ = map.advise(if large { memmap2::Advice::HugePage } else { memmap2::Advice::NoHugePage }); // only speed depends on it
    let _ = large;
    map.fill(0x3c);
    Ok(map)
}

/// Curves through what was recorded.
fn table(subject: &Subject<'_>, kinds: &[usize], n_kinds: usize, points: &[(Point, Recorded)]) -> SideTable {
    let by_rows = |of: &dyn Fn(&Recorded) -> &Samples| {
        // Of several contexts the shortest: what longer ones cost the others is the factors' business.
        let shortest = |p: &Point| {
            let same = points.iter().filter(|(q, r)| q.total_rows() == p.total_rows() && !of(r).is_empty());
            same.map(|(q, _)| q.past).min() == Some(p.past)
        };
        let point = |(p, r): &(Point, Recorded)| {
            let samples = of(r);
            (!samples.is_empty() && shortest(p)).then(|| (p.total_rows() as f64, samples.typical()))
        };
        Curve::new(points.iter().filter_map(point).collect())
    };
    let layer = |kind: usize| {
        let first = kinds.iter().position(|&k| k == kind).expect("a kind has a layer");
        let window = subject.spec.window_of(first);
        let attention = |prompts: bool| {
            let of = |(p, r): &(Point, Recorded)| {
                let attend = &r.layers[kind].attend;
                let (n, wanted) = match prompts {
                    // Single rows are prompts of one row.
                    true => (p.rows, p.sequences == 1),
                    false => (p.sequences, p.rows == 1),
                };
                (wanted && !attend.is_empty()).then(|| (n as f64, p.seen(window), attend.typical()))
            };
            Surface::new(&points.iter().filter_map(of).collect::<Vec<_>>())
        };
        LayerTable {
            project: by_rows(&|r| &r.layers[kind].project),
            append: by_rows(&|r| &r.layers[kind].append),
            attend: attention(false),
            attend_prompt: attention(true),
            out_proj: by_rows(&|r| &r.layers[kind].out_proj),
            ffn_up: by_rows(&|r| &r.layers[kind].ffn_up),
            ffn_down: by_rows(&|r| &r.layers[kind].ffn_down),
        }
    };
    SideTable {
        embed: by_rows(&|r| &r.embed),
        layers: (0..n_kinds).map(layer).collect(),
        head: by_rows(&|r| &r.head),
        pick: by_rows(&|r| &r.pick),
        ..SideTable::default()
    }
}

impl<'a> Rig<'a> {
    fn new(subject: &'a Subject<'a>, kinds: &'a [usize], grid: &Grid) -> Result<Rig<'a>> {
        let (spec, pool) = (subject.spec, subject.pool);
        let host = Host::new(spec, subject.isa, Mode::Fast, pool.threads(), grid.context())?;
        let model = Prepared::new(spec.clone(), subject.weights, subject.isa, pool, &|_| ())?;
        let llc = last_level_cache();
        let bytes: Vec<u64> = (0..spec.n_layers).map(|i| model.layer(i).bytes() as u64).collect();
        let walk = walk(kinds, &bytes, llc + llc / 2);
        let budget = match subject.effort {
            Effort::Quick => 64 << 20,
            Effort::Full => (2 * llc).max(1 << 30),
        };
        let budget = budget.min(memory_available().unwrap_or(1 << 30) / 8).max(4096) as usize;
        // In large pages where those of an engine for the same contexts would be.
        let layer_bytes = KvGeometry::pages_for(grid.context()) * geometry(spec, 1).bytes_per_page();
        let memory = memory(budget, layer_bytes >= HUGE_FROM)?;
        let ws = HostWorkspace::new(spec);
        Ok(Rig { subject, kinds, walk, host, model, memory, ws, step: HostStep::default() })
    }

    /// Times one point, if there is time and memory for it.
    fn time(&mut self, point: Point, pace: PointPace, to: &mut Recorded) -> Result<()> {
        if pace == PointPace::Over {
            return Ok(());
        }
        let each = (point.past + point.rows).div_ceil(PAGE_TOKENS);
        let n_pages = each * point.sequences;
        let layer_bytes = n_pages * geometry(self.subject.spec, 1).bytes_per_page();
        // Layers have pages of their own as far as memory goes, then share them in turns.
        let n_kv = (self.memory.len() / layer_bytes.max(1)).min(self.walk.len());
        if n_kv == 0 {
            return Ok(());
        }
        let base = NonNull::new(self.memory.as_mut_ptr()).expect("a mapping is not at 0");
        let (geometry, len) = (geometry(self.subject.spec, n_kv), self.memory.len());
        // SAFETY: the mapping outlives the pool, which is dropped at the end of this call; nobody else touches it meanwhile.
        let cache = unsafe { PagePool::over(geometry, n_pages, base, len, Box::new(()))? };
        let pages: Vec<u32> = (0..n_pages as u32).collect();
        let effort = self.subject.effort;
        let (time, most) = match pace {
            PointPace::Calm => (effort.per_point() / passes(effort) as u32, effort.most() / passes(effort)),
            _ => (Duration::ZERO, 1),
        };
        let begun = Instant::now();
        if pace == PointPace::Calm {
            // Caches warm up with the first runs; in a run that takes as long as this they would have anyway.
            for _ in 0..2 {
                if begun.elapsed() < time {
                    let layers = vec![OfLayer::default(); to.layers.len()];
                    self.walk(point, &cache, &pages, &mut Recorded { layers, ..Recorded::default() });
                }
            }
        }
        let begun = Instant::now();
        for run in 0..most {
            if run > 0 && begun.elapsed() >= time {
                break;
            }
            self.walk(point, &cache, &pages, to);
        }
        Ok(())
    }

    /// One step through the layers of the walk.
    fn walk(&mut self, point: Point, cache: &PagePool, pages: &[u32], to: &mut Recorded) {
        let each = pages.len() / point.sequences;
        let seqs: Vec<HostSeq<'_>> = pages
            .chunks_exact(each)
            .map(|pages| HostSeq { pages, first_pos: point.past, n_rows: point.rows, tokens: HostSeq::ALL })
            .collect();
        let (rows, vocab) = (0..point.total_rows(), self.subject.spec.vocab);
        // Logits of single rows only: those of prompts are wanted of the last row, which is a single row's work.
        let wanted = if point.rows == 1 { rows.clone() } else { 0..0 };
        let mut clock = Clock(Instant::now());
        let tokens = rows.clone().map(|i| ((i * 7919 + 13) % vocab) as u32);
        self.host.prepare(&mut self.step, 0, &seqs, tokens, wanted.clone());
        let (ws, step) = (&mut self.ws, &mut self.step);
        ws.reserve(rows.end, wanted.len());
        let cx = self.host.with(&self.model, self.subject.pool);
        cx.embed(ws, step, rows.clone());
        let mut once = clock.lap();
        let mut layers = vec![OfLayer::default(); to.layers.len()];
        let (mut residual, mut attends) = (Residual::None, Vec::with_capacity(self.walk.len()));
        for (i, &layer) in self.walk.iter().enumerate() {
            let (kind, l, kv) =
                (self.kinds[layer], self.model.layer(layer), cache.layer(i % cache.geometry().n_layers));
            let of = &mut layers[kind];
            cx.project(ws, step, l, residual, rows.clone());
            of.project.push(clock.lap());
            cx.append(ws, step, &kv, rows.clone());
            of.append.push(clock.lap());
            cx.attend(ws, step, l, &kv, rows.clone());
            attends.push((l.windowed(), kind, clock.lap()));
            cx.out_proj(ws, l, rows.clone());
            of.out_proj.push(clock.lap());
            cx.ffn_up(ws, l, l.after_attention(), rows.clone());
            of.ffn_up.push(clock.lap());
            cx.ffn_down(ws, l, rows.clone());
            of.ffn_down.push(clock.lap());
            residual = l.after_ffn();
        }
        // The first attention with a window, and the first without, make the plan that all others use: that is the step's.
        for windowed in [false, true] {
            let of: Vec<f64> = attends.iter().filter(|a| a.0 == windowed).map(|a| a.2).collect();
            if let [first, rest @ ..] = &of[..]
                && !rest.is_empty()
            {
                once += (first - Samples::new(rest.to_vec()).median()).max(0.0);
            }
        }
        let mut seen = [false; 2];
        for &(windowed, kind, seconds) in &attends {
            let planned = std::mem::replace(&mut seen[usize::from(windowed)], true);
            // Where there is only the planning one, it is better than none.
            if planned || attends.iter().filter(|a| a.0 == windowed).count() == 1 {
                layers[kind].attend.push(seconds);
            }
        }
        for (of, to) in layers.into_iter().zip(&mut to.layers) {
            of.means(to);
        }
        to.embed.push(once);
        if !wanted.is_empty() {
            clock.lap();
            cx.head(ws, residual, wanted.clone(), 0);
            to.head.push(clock.lap());
            let mut picked = Vec::with_capacity(wanted.len());
            cx.pick(ws, wanted, &mut picked);
            to.pick.push(clock.lap());
        }
    }
}

/// Time since the last look.
struct Clock(Instant);

impl Clock {
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.0).as_secs_f64();
        self.0 = now;
        seconds
    }
}
