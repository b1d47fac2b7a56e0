//! An accelerator's operations, timed by its own clock: each over all layers of the walk, as one recorded graph where the
//! device records such steps, so that launches cost what they cost in a real step.

use std::sync::Arc;

use super::grid::{Grid, Point, PointPace, TimeBudget};
use super::{Subject, walk};
use crate::Result;
use crate::cache::PAGE_TOKENS;
use crate::device::{
    Accelerator, Attend, Buffer, DevPtr, EmbedWeight, Lane, LayerPages, LayerWeights, Limits, LinearWeight,
    NormWeight, PageMove, Residual, RowOp, Runtime, Shape, StepContext, StepDesc, StepSeq, SubBatches,
    Workspace,
};
use crate::engine::{LayerLayout, Upload, activation_type, host_pages, linear_shapes, separate_gate_up};
use crate::profile::limits::device_time;
use crate::profile::sample::{Effort, Samples, sample};
use crate::profile::tables::{Curve, LayerTable, SideTable, Surface};
use crate::tensor::{DType, Half};

/// Points (size, seconds) by which operation they are of.
#[derive(Default, Clone)]
struct OfLayer {
    project: Vec<(f64, f64)>,
    append: Vec<(f64, f64)>,
    attend: Vec<(f64, f64, f64)>,
    attend_prompt: Vec<(f64, f64, f64)>,
    out_proj: Vec<(f64, f64)>,
    ffn_up: Vec<(f64, f64)>,
    ffn_down: Vec<(f64, f64)>,
}

/// A model on the device, ready to run steps of any kind.
struct Rig<'a> {
    subject: &'a Subject<'a>,
    accel: &'a Arc<dyn Accelerator>,
    shape: Shape,
    limits: Limits,
    /// Layers of the walk with their kinds.
    layers: Vec<(usize, LayerWeights)>,
    embed: EmbedWeight,
    head: (NormWeight, LinearWeight),
    kv: Buffer,
    ws: Workspace,
    lists: DevPtr,
    _memory: Buffer,
    _weights: Vec<Buffer>,
}

/// Times every point of the grid. `progress` is called after each.
///
/// # Errors
/// Weights that the device cannot multiply; no memory on it for two layers of each kind; a device that failed.
pub(super) fn measure(
    subject: &Subject<'_>,
    accel: &Arc<dyn Accelerator>,
    kinds: &[usize],
    progress: &dyn Fn(),
) -> Result<SideTable> {
    let grid = Grid::new(subject.spec, subject.effort);
    let rig = Rig::new(subject, accel, kinds, &grid)?;
    let n_kinds = kinds.iter().max().map_or(0, |k| k + 1);
    let mut of = vec![OfLayer::default(); n_kinds];
    let (mut embed, mut head, mut pick) = (Vec::new(), Vec::new(), Vec::new());
    let deadline = TimeBudget::new(subject.effort);
    for &point in grid.points() {
        if deadline.pace() != PointPace::Over {
            rig.time(point, &mut of, [&mut embed, &mut head, &mut pick])?;
        }
        progress();
    }
    let moves = |out: bool| -> Result<Curve> {
        let at = |pages| Ok((pages as f64, rig.moves(pages, out)?));
        Ok(Curve::new([1, 8, 32].into_iter().map(at).collect::<Result<_>>()?))
    };
    let (page_out, page_in) = (moves(true)?, moves(false)?);
    let layer = |of: OfLayer| LayerTable {
        project: Curve::new(of.project),
        append: Curve::new(of.append),
        attend: Surface::new(&of.attend),
        attend_prompt: Surface::new(&of.attend_prompt),
        out_proj: Curve::new(of.out_proj),
        ffn_up: Curve::new(of.ffn_up),
        ffn_down: Curve::new(of.ffn_down),
    };
    Ok(SideTable {
        embed: Curve::new(embed),
        layers: of.into_iter().map(layer).collect(),
        head: Curve::new(head),
        pick: Curve::new(pick),
        page_out,
        page_in,
        ..SideTable::default()
    })
}

impl<'a> Rig<'a> {
    fn new(
        subject: &'a Subject<'a>,
        accel: &'a Arc<dyn Accelerator>,
        kinds: &[usize],
        grid: &Grid,
    ) -> Result<Rig<'a>> {
        let (spec, source, runtime) = (subject.spec, subject.weights, accel.runtime());
        let act = activation_type(&**accel, spec, source)?;
        let kv = accel.activations_for(DType::BF16).unwrap_or(Half::F16);
        let shape = Shape::of(spec, act, kv);
        accel.check(&shape)?;
        let context = grid.context();
        let rows = grid.rows().max(accel.row_bucket(grid.sequences()));
        let sequences = accel.row_bucket(grid.sequences());
        let pages_per_sequence = context.div_ceil(PAGE_TOKENS);
        let limits = Limits { rows, logit_rows: sequences, sequences, pages_per_sequence };
        let layouts = (0..spec.n_layers)
            .map(|layer| LayerLayout::new(&**accel, spec, source, layer, act))
            .collect::<Result<Vec<_>>>()?;
        let bytes: Vec<u64> = layouts.iter().map(|l| l.bytes as u64).collect();
        // Several times the device's cache, and no more than half of its memory.
        let cache = 4 * u64::from(runtime.info().l2_bytes);
        let walk = walk(kinds, &bytes, cache.min(runtime.memory_free()? / 2));
        let mut upload = Upload::new(accel, spec, source, act, subject.pool, &|_| ());
        let tables = upload.tables(context)?;
        let mut layers = Vec::with_capacity(walk.len());
        for &layer in &walk {
            let layout = &layouts[layer];
            let at = upload.layer(layout)?;
            layers.push((kinds[layer], layout.at(at, tables[layout.layer])));
        }
        let head = upload.head()?;
        let embed = upload.embedding(Some(&head.1))?;
        let buffers = upload.finish()?;
        let linears = linear_shapes(&**accel, spec, source)?;
        let separate = separate_gate_up(&**accel, spec, source)?;
        let plan = SubBatches::plan(&**accel, &shape, &[limits], &linears, separate, false);
        let zeroed = |bytes: usize| -> Result<Buffer> {
            let buffer = Buffer::new(runtime, bytes)?;
            runtime.fill(Lane::Compute, buffer.ptr(), 0, buffer.len())?;
            Ok(buffer)
        };
        let memory = zeroed(plan.bytes())?;
        let sub = plan.at(memory.ptr())[0];
        let budget = match subject.effort {
            Effort::Quick => 64 << 20,
            Effort::Full => cache.max(1 << 30),
        };
        let kv = zeroed(budget.min(runtime.memory_free()? / 2).max(shape.page_bytes() as u64) as usize)?;
        runtime.synchronize_all()?;
        Ok(Rig {
            subject,
            accel,
            shape,
            limits,
            layers,
            embed,
            head,
            kv,
            ws: sub.ws,
            lists: sub.lists,
            _memory: memory,
            _weights: buffers,
        })
    }

    fn runtime(&self) -> &Arc<dyn Runtime> {
        self.accel.runtime()
    }

    /// Times one point, if there is memory for its keys and values.
    fn time(&self, point: Point, to: &mut [OfLayer], ends: [&mut Vec<(f64, f64)>; 3]) -> Result<()> {
        let rows = point.total_rows();
        let each = (point.past + point.rows).div_ceil(PAGE_TOKENS);
        let layer_bytes = each * point.sequences * self.shape.page_bytes();
        let n_kv = self.kv.len() / layer_bytes;
        if n_kv == 0 {
            return Ok(());
        }
        let pages: Vec<u32> = (0..(each * point.sequences) as u32).collect();
        let seqs: Vec<StepSeq<'_>> = pages
            .chunks_exact(each)
            .enumerate()
            .map(|(i, pages)| StepSeq {
                pages,
                first_pos: point.past,
                row0: i * point.rows,
                n_rows: point.rows,
                attend: Attend::Here,
            })
            .collect();
        let tokens: Vec<u32> = (0..rows).map(|i| ((i * 7919 + 13) % self.shape.vocab) as u32).collect();
        let decode = point.rows == 1;
        let wanted: Vec<u32> = if decode { (0..rows as u32).collect() } else { Vec::new() };
        let launch_rows = if decode { self.accel.row_bucket(rows) } else { rows };
        let desc = StepDesc {
            seqs: &seqs,
            tokens: &tokens,
            logit_rows: &wanted,
            cuts: &[],
            epoch: 0,
            launch_rows: launch_rows.min(self.limits.rows),
        };
        let lane = Lane::Compute;
        let prepare = || self.accel.prepare(lane, &self.shape, &self.limits, &desc, self.lists);
        let step = prepare()?;
        let cx = StepContext { lane, shape: &self.shape, ws: &self.ws, step: &step };
        let (a, all) = (self.accel, || cx.all());
        // As steps are recorded: single rows, up to so many.
        let graph = decode && step.graph_key.is_some();
        let kv = |i: usize| self.kv.ptr().add((i % n_kv) * layer_bytes);
        let n = rows as f64;
        let [embed, head, pick] = ends;
        // A step's lists are written once a step: they count here.
        let lists =
            sample(self.subject.effort, || device_time(self.runtime(), lane, || prepare().map(drop)))?;
        let once = self.seconds(graph, &|| a.enqueue(&cx, RowOp::Embed(&self.embed), all()))?;
        embed.push((n, lists.typical() + once));
        for (kind, of) in to.iter_mut().enumerate() {
            let layers: Vec<(usize, &LayerWeights)> =
                self.layers.iter().enumerate().filter(|(_, l)| l.0 == kind).map(|(i, l)| (i, &l.1)).collect();
            let each = |run: &dyn Fn(usize, &LayerWeights) -> Result<()>| -> Result<f64> {
                let seconds = self.seconds(graph, &|| layers.iter().try_for_each(|(i, l)| run(*i, l)))?;
                Ok(seconds / layers.len().max(1) as f64)
            };
            of.project.push((
                n,
                each(&|_, l| a.enqueue(&cx, RowOp::Project { layer: l, residual: Residual::Delta }, all()))?,
            ));
            of.append.push((n, each(&|i, _| a.enqueue(&cx, RowOp::Append { kv: kv(i) }, all()))?));
            let attend = each(&|i, l| a.enqueue(&cx, RowOp::Attend { layer: l, kv: kv(i) }, all()))?;
            let window = layers.first().filter(|(_, l)| l.windowed).and(self.shape.window);
            if decode {
                of.attend.push((point.sequences as f64, point.seen(window), attend));
            }
            if point.sequences == 1 {
                of.attend_prompt.push((point.rows as f64, point.seen(window), attend));
            }
            of.out_proj.push((n, each(&|_, l| a.enqueue(&cx, RowOp::OutProj(l), all()))?));
            let after = |l: &LayerWeights| Residual::after(l.post_attn);
            of.ffn_up.push((
                n,
                each(&|_, l| a.enqueue(&cx, RowOp::FfnUp { layer: l, residual: after(l) }, all()))?,
            ));
            of.ffn_down.push((n, each(&|_, l| a.enqueue(&cx, RowOp::FfnDown(l), all()))?));
        }
        if decode {
            let (norm, matrix) = &self.head;
            let run = || {
                a.enqueue(&cx, RowOp::Logits { norm: *norm, head: matrix, residual: Residual::Delta }, all())
            };
            head.push((n, self.seconds(graph, &run)?));
            pick.push((n, self.seconds(graph, &|| a.enqueue(&cx, RowOp::Argmax, all()))?));
        }
        Ok(())
    }

    /// Seconds of what `enqueue` puts on the compute lane.
    fn seconds(&self, graph: bool, enqueue: &dyn Fn() -> Result<()>) -> Result<f64> {
        let runtime = self.runtime();
        // Once outside of a recording: what a kernel's first launch brings along has no place in it.
        enqueue()?;
        let recorded = if graph { runtime.capture(&mut || enqueue())? } else { None };
        let run = || {
            device_time(runtime, Lane::Compute, || match &recorded {
                Some(graph) => runtime.replay(graph),
                None => enqueue(),
            })
        };
        let samples: Samples = sample(self.subject.effort, run)?;
        Ok(samples.typical())
    }

    /// Seconds of moving pages of one layer to the host, or from it.
    fn moves(&self, pages: usize, out: bool) -> Result<f64> {
        let (runtime, bytes) = (self.runtime(), self.shape.page_bytes());
        let pages = pages.min(self.kv.len() / bytes).max(1);
        // Memory as the engine's host pages.
        let host = host_pages(&**runtime, self.subject.pool, pages * bytes)?;
        let moves: Vec<PageMove> =
            (0..pages as u32).map(|p| PageMove { device: p, host: p, tokens: PAGE_TOKENS as u32 }).collect();
        let (accel, shape) = (self.accel, &self.shape);
        let layers = [LayerPages { device: self.kv.ptr(), host: host.device() }];
        let lane = if out { Lane::DeviceToHost } else { Lane::HostToDevice };
        let run = || {
            device_time(runtime, lane, || match out {
                true => accel.gather_pages(lane, shape, &layers, &moves),
                false => accel.scatter_pages(lane, shape, &layers, &moves),
            })
        };
        Ok(sample(self.subject.effort, run)?.typical())
    }
}
