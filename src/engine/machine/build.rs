//! Builds a machine for a placement, after the dry run has shown that it fits.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::carry::{Areas, cargo};
use super::cohorts::PATIENCE;
use super::crossed::Crossed;
use super::device::DevicePart;
use super::follow::Following;
use super::graphs::Graphs;
use super::host::{HostHalf, HostPart};
use super::host_pages::host_pages;
use super::lane::Started;
use super::lowered::Programs;
use super::sizes::Sizes;
use super::work::HostWork;
use super::{HostSide, RealMachine, RunInfo, load};
use crate::cache::{KvGeometry, PagePool};
use crate::device::{Accelerator, Clock, KernelNeeds, Pinned, load_kernels_beside};
use crate::engine::host::HostWorkspace;
use crate::engine::kv::{FarPolicy, KvPages, KvStore, Pager, Sides};
use crate::engine::memory::{Memory, geometry};
use crate::engine::options::Options;
use crate::engine::prepare::{Prepared, Units};
use crate::host::{Pool, allowed_cores, cores_beside_device};
use crate::model::{ModelSpec, Weights};
use crate::program::{LayerPlacement, Placement, Side};
use crate::simd::linear::Mode;
use crate::{Error, Result};

impl RealMachine {
    /// Checks that the placement can run and fits, then allocates, packs and uploads.
    ///
    /// # Errors
    /// If a policy cannot run, memory does not suffice on either side (with the numbers), the device cannot multiply
    /// the weights, or the device has failed.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: Arc<dyn Accelerator>,
        device_name: &str,
        strategy: &'static str,
        placement: Placement,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<RealMachine> {
        let graphs = Graphs::wanted()?;
        if placement.layers.len() != spec.n_layers {
            return Err(Error::usage(format!(
                "a placement of {} layers for a model of {}",
                placement.layers.len(),
                spec.n_layers
            )));
        }
        let sizes = Sizes::new(spec, weights, options, &*accel)?;
        let cargo = cargo(&placement, sizes.paging(&placement).far > 0)?;
        sizes.check(&placement)?;
        let threads = Some(options.threads.unwrap_or_else(cores_beside_device));
        let in_turn = accel.runtime().turns().is_some();
        // If jobs take turns, the waiting thread runs them.
        let pool = move || if in_turn { Pool::new(1) } else { Pool::pinned(threads) };
        // The pool's leader is the thread of the host's lane, or this thread if the pool is only for loading.
        let (lane, pool) = match placement.uses(Side::Host) || sizes.pages_move(&placement) {
            true => {
                let (lane, pool) = Started::new(pool)?;
                (Some(lane), pool)
            }
            false => (None, pool()),
        };
        let threads = pool.threads();
        // Who spins needs a core: the issuing thread one beside the pool's. A device of threads has none to spare.
        let spare = allowed_cores() > threads && accel.runtime().info().driver > 0;
        let active_wait = spare.then(|| pool.active_wait());
        let units = Units {
            layers: placement.layers.iter().map(LayerPlacement::computes_on_host).collect(),
            head: placement.head == Side::Host,
            node: options.weights_node.clone(),
        };
        let runtime = accel.runtime().clone();
        let kv_geometry = geometry(spec, options.kv_dtype);
        let paging = sizes.paging(&placement);
        let windows = (0..spec.n_layers).map(|l| spec.window_of(l).map(|w| w as u32));
        let placement = placement.with_windows(windows);
        let needs = KernelNeeds::new(&sizes.shape(&placement), &sizes.linears);
        let mut device = load_kernels_beside(&*runtime, &needs, || {
            load::device(spec, weights, options, &accel, &placement, &sizes, &pool, progress)
        })?;

        // Keys and values on the host are pinned if the device reads or writes pages.
        let mut counts = [0, 0];
        let place = |l: &LayerPlacement| {
            let device = l.kv == Side::Device;
            counts[usize::from(device)] += 1;
            (device, counts[usize::from(device)] - 1)
        };
        let places: Vec<(bool, usize)> = placement.layers.iter().map(place).collect();
        let pinned = |n_layers: usize, pages: usize| -> Result<(PagePool, (Arc<dyn Pinned>, usize))> {
            let layer = sizes.pages_bytes(pages) as usize;
            let memory = host_pages(&*runtime, &pool, n_layers * layer)?;
            let base =
                NonNull::new(memory.host()).ok_or_else(|| Error::Capacity("no pinned memory".into()))?;
            let geometry = KvGeometry { n_layers, ..kv_geometry };
            // SAFETY: zeroed memory of that many bytes, kept by the pool; the device copies pages only between operations
            // of the host on the same sequences (the order of programs).
            let pool =
                unsafe { PagePool::over(geometry, pages, base, n_layers * layer, Box::new(memory.clone()))? };
            Ok((pool, (memory, layer)))
        };
        let kv = match counts[0] {
            0 => None,
            n if paging.staged > 0 => {
                let (pool, memory) = pinned(n, paging.host)?;
                device.host_pages = Some(memory);
                Some(pool)
            }
            n => Some(PagePool::new(KvGeometry { n_layers: n, ..kv_geometry }, paging.host)?),
        };
        let far = match paging.far {
            0 => None,
            pages => {
                let (pool, memory) = pinned(counts[1], pages)?;
                device.far_pages = Some(memory);
                Some(pool)
            }
        };
        let (mut isa, mut bytes_per_step) = (device.describe(), device.bytes_per_step);
        let mut work = HostWork::default();
        let following = Following::new(spec, weights, options, &accel, &placement, sizes.shape.act)?;
        let host = match lane {
            None => None,
            Some(lane) => {
                let model = Prepared::part(spec.clone(), weights, options.isa, &units, &pool, progress)?;
                work = HostWork::new(spec, &model, runtime.clock().map(|c| &**c)).dividing(
                    spec,
                    &placement,
                    options.router.as_deref(),
                );
                let part = |p: &DevicePart| HostPart::new(spec, p.mailbox.clone(), p.parts.clone());
                let parts = device.parts.iter().map(part).collect();
                let shape = Some(sizes.shape.clone());
                let half =
                    HostHalf::new(spec, options, model, pool, (kv, far), places.clone(), parts, shape)?
                        .dividing(&placement, options.router.as_deref());
                let half = if following.is_some() { half.counting() } else { half };
                isa = format!("{isa}, cpu {}", half.isa().name());
                bytes_per_step += half.bytes_per_step();
                Some(HostSide::Lane(lane.serve(half, runtime.clone(), active_wait)))
            }
        };

        let sub_batches = 0..sizes.sub_batches as u8;
        let areas: HashMap<_, _> = sub_batches
            .flat_map(|b| cargo.iter().map(move |&(what, to)| (b, what, to)))
            .map(|key| (key, key.1.row_bytes(&sizes.shape) * sizes.limits.rows))
            .collect();
        let areas = Areas::new(&runtime, &areas)?;
        runtime.synchronize_all()?;
        let (on_device, on_host) = (sizes.device(&placement), sizes.host(&placement));
        let alone = sizes.alone(&placement);
        let memory = Memory {
            weights: on_device.weights + on_host.weights,
            kv: on_device.kv + on_host.kv,
            activations: on_device.activations + on_host.activations,
        };
        let store = KvStore {
            pages: KvPages::new(kv_geometry, paging.device, paging.far, paging.host)?,
            sides: Sides::of(&placement),
            pager: sizes.far_pages.is_none().then(|| Pager::new(paging.device, paging.staged_far > 0)),
            staged: paging.staged_far,
            far: FarPolicy::new(options.far, options.times.clone(), paging.streams_far),
        };
        let described = RunInfo {
            device: if alone { device_name.to_string() } else { format!("{device_name}+cpu") },
            strategy,
            isa,
            threads,
            kv_type: sizes.shape.kv.name(),
        };
        let mut machine = RealMachine::empty(spec, placement, described, store, memory);
        machine.sub_batches = sizes.sub_batches;
        machine.deterministic = options.mode == Mode::Deterministic;
        (machine.bytes_per_step, machine.work) = (bytes_per_step, work);
        machine.places = places.into_iter().map(|(_, place)| place).collect();
        machine.host = host;
        (machine.device, machine.areas, machine.graphs) = (Some(device), Some(areas), graphs);
        machine.following = following;
        Ok(machine)
    }

    /// Builds a machine with everything on the CPU: checks that it fits, then allocates and packs. The calling thread
    /// computes with the pool. With a `clock`, it runs in the time of a described machine.
    ///
    /// # Errors
    /// If it does not fit in memory, the options are impossible, or the model is damaged.
    pub fn on_cpu(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        clock: Option<Arc<Clock>>,
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<RealMachine> {
        let n_pages = options.check(spec)?;
        let pool = Pool::pinned(options.threads);
        let memory = Memory::plan(spec, weights, options, pool.threads())?;
        memory.check()?;
        let described = RunInfo {
            device: "cpu".into(),
            strategy: "cpu-only",
            isa: options.isa.name().into(),
            threads: pool.threads(),
            kv_type: options.kv_dtype.name(),
        };
        let geometry = geometry(spec, options.kv_dtype);
        let store = KvStore::all(Side::Host, geometry, n_pages)?;
        let units = Units { node: options.weights_node.clone(), ..Units::all(spec) };
        let model = Prepared::part(spec.clone(), weights, options.isa, &units, &pool, progress)?;
        let work = match &clock {
            Some(clock) => HostWork::new(spec, &model, Some(clock)),
            None => HostWork::default(),
        };
        let kv = PagePool::new(geometry, n_pages)?;
        let places: Vec<(bool, usize)> = (0..spec.n_layers).map(|l| (false, l)).collect();
        let parts = (0..options.sub_batches).map(|_| HostPart::new(spec, None, None)).collect();
        let half = HostHalf::new(spec, options, model, pool, (Some(kv), None), places, parts, None)?;
        let placement = Placement::all(Side::Host, spec.n_layers, n_pages);
        let mut machine = RealMachine::empty(spec, placement, described, store, memory);
        machine.sub_batches = options.sub_batches;
        (machine.work, machine.clock) = (work, clock);
        machine.bytes_per_step = half.bytes_per_step();
        machine.planned =
            options.sub_batches * HostWorkspace::bytes(spec, options.rows(), options.logit_rows());
        machine.places = (0..spec.n_layers).collect();
        machine.host = Some(HostSide::Inline(half));
        Ok(machine)
    }

    /// A machine without either half.
    fn empty(
        spec: &ModelSpec,
        placement: Placement,
        described: RunInfo,
        kv: KvStore,
        memory: Memory,
    ) -> RealMachine {
        RealMachine {
            spec: spec.clone(),
            placement,
            described,
            programs: Programs::default(),
            graphs: Graphs::default(),
            sub_batches: 1,
            kv,
            places: Vec::new(),
            host: None,
            device: None,
            areas: None,
            following: None,
            work: HostWork::default(),
            clock: None,
            memory,
            planned: 0,
            bytes_per_step: 0,
            expected: (0, 0),
            in_place: false,
            logits: Vec::new(),
            stayed: Vec::new(),
            factors: Vec::new(),
            tops: Vec::new(),
            argmax: Vec::new(),
            bytes: Vec::new(),
            trace: None,
            busy: None,
            crossed: Crossed::default(),
            slots: Vec::new(),
            deterministic: false,
            patience: PATIENCE,
            active_step: Duration::ZERO,
            refuses_cohorts: OnceLock::new(),
            #[cfg(test)]
            pretends: None,
        }
    }

    /// A machine that computes nothing: step `fails`, counted from 1, is an error.
    #[cfg(test)]
    pub fn pretending(spec: &ModelSpec, kv: KvStore, fails: Option<usize>) -> RealMachine {
        let described =
            RunInfo { device: "none".into(), strategy: "none", isa: String::new(), threads: 0, kv_type: "" };
        let memory = Memory { weights: 0, kv: 0, activations: 0 };
        let placement = Placement::all(Side::Host, spec.n_layers, 0);
        let mut machine = RealMachine::empty(spec, placement, described, kv, memory);
        machine.pretends = Some((0, fails));
        machine
    }
}
