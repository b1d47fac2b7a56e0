//! Experts of divided layers change places: those that the routers choose come to the device, others give way ([`Residents`]).
//!
//! ```text
//! step n     host   pack b ─┐                        experts of layer 0, b among them
//!            h2d            └─────────────────────────────────────────────────────────► share of layer 0, b to staging
//! step n+1   gpu    staging ─► place of a; the table of places      up, down of b
//!            host                                                   experts, a among them
//! ```
//! Between steps nothing runs, so both sides' tables change at once: each choice is computed once, whatever was exchanged. The copy to the place is
//! within the device's memory, and only here may it be written: no kernel sees half an expert.
//!
//! Packing is a job of the host, whose step waits for it. Each expert crosses behind what the host's experts of a layer give, for which the device
//! waits: until it waits for those of the next layer, the link has nothing to do.

use std::sync::Arc;

use super::device::Weights as LayerOnDevice;
use super::host::HostHalf;
use super::lane::{HostJob, NONE};
use super::work::copied;
use super::{HostSide, RealMachine};
use crate::Result;
use crate::device::{Accelerator, Buffer, Event, ExpertWeights, FeedForward, Lane, NO_SLOT, Pinned};
use crate::engine::divided::Divided;
use crate::engine::options::Options;
use crate::engine::residents::{Exchange, Residents};
use crate::engine::weights::{ExpertImages, LayerSource};
use crate::model::{ModelSpec, RouterProfile, Weights};
use crate::program::{EXPERTS_UNDER_WAY, Placement};
use crate::tensor::Half;

/// What experts are packed from.
struct Source {
    accel: Arc<dyn Accelerator>,
    weights: Weights,
    act: Half,
    /// Of each divided layer.
    images: Vec<ExpertImages>,
}

/// See the [module](self).
pub(super) struct Following {
    source: Arc<Source>,
    /// Of each divided layer, in the order of [`Source::images`].
    layers: Vec<Residents>,
    /// An image for each expert that is under way, on both sides.
    host: Arc<dyn Pinned>,
    device: Buffer,
    /// Bytes of an image.
    bytes: usize,
    under_way: Vec<UnderWay>,
    /// How many of these have been sent.
    sent: usize,
    /// After their crossing, while they are under way.
    arrived: Option<Event>,
    /// After the last crossing of others, and after the last copy out of the staging buffer.
    crossed: Option<Event>,
    free: Option<Event>,
    /// Experts that have changed places.
    exchanged: u64,
    /// The choices in divided layers since they are to be counted.
    choices: Option<Box<RouterProfile>>,
}

/// An expert on its way, by its place among [`Following::layers`].
#[derive(Debug, Clone, Copy)]
struct UnderWay {
    layer: usize,
    exchange: Exchange,
}

impl Following {
    /// For the divided layers of a placement; `None` if there are none, or options do not ask for it.
    ///
    /// # Errors
    /// If the device or the host lacks memory for experts that are under way.
    pub fn new(
        spec: &ModelSpec,
        weights: &Weights,
        options: &Options,
        accel: &Arc<dyn Accelerator>,
        placement: &Placement,
        act: Half,
    ) -> Result<Option<Following>> {
        let Some(pays) = options.follow else { return Ok(None) };
        let router = options.router.as_deref();
        let (mut images, mut layers) = (Vec::new(), Vec::new());
        for layer in 0..spec.n_layers {
            let Some(of) = Divided::of(spec, placement, router, layer) else { continue };
            let like = |e: usize| match router {
                Some(router) => router.probability(layer, e as u32),
                None => of.used as f64 / of.count as f64,
            };
            let probabilities: Vec<f64> = (0..of.count).map(like).collect();
            layers.push(Residents::new(&of.on_device, &probabilities, of.used, pays));
            images.push(ExpertImages::new(&**accel, spec, weights, layer, act)?);
        }
        let Some(bytes) = images.iter().map(|of| of.bytes().iter().sum()).max() else { return Ok(None) };
        let runtime = accel.runtime();
        // Not locked where the system locks no more: copies are slower then.
        let host = runtime.slab(EXPERTS_UNDER_WAY * bytes)?.memory().clone();
        let device = Buffer::new(runtime, EXPERTS_UNDER_WAY * bytes)?;
        let source = Source { accel: accel.clone(), weights: weights.clone(), act, images };
        Ok(Some(Following {
            source: Arc::new(source),
            layers,
            host,
            device,
            bytes,
            under_way: Vec::new(),
            sent: 0,
            arrived: None,
            crossed: None,
            free: None,
            exchanged: 0,
            choices: None,
        }))
    }

    /// Counts the choices in divided layers from now on, or no more.
    pub fn count_choices(&mut self, from: Option<Box<RouterProfile>>, host: &mut HostSide) {
        // Those of the last step are counted where the next one begins.
        host.with(|half| self.count(half));
        self.choices = from;
    }

    /// The choices counted so far, those of the last step included.
    pub fn choices(&mut self, host: &mut HostSide) -> Option<&RouterProfile> {
        host.with(|half| self.count(half));
        self.choices.as_deref()
    }

    /// Counts the choices that rows have made since it last did. Returns the most rows of a layer.
    fn count(&mut self, half: &mut HostHalf) -> usize {
        let mut rows = 0;
        for (of, image) in self.layers.iter_mut().zip(&self.source.images) {
            let chosen = half.chosen(image.layer());
            rows = rows.max(chosen.rows);
            of.count(chosen.rows, &chosen.counts);
            if let Some(choices) = &mut self.choices {
                let counts = &mut choices.layers[image.layer()].counts;
                counts.iter_mut().zip(&chosen.counts).for_each(|(n, &more)| *n += u64::from(more));
            }
            chosen.clear();
        }
        rows
    }

    /// The exchanges that gain most, for a step to begin.
    fn choose(&mut self) -> Vec<UnderWay> {
        let found = self.layers.iter().enumerate();
        let mut found: Vec<UnderWay> =
            found.filter_map(|(layer, of)| Some(UnderWay { layer, exchange: of.best()? })).collect();
        found.sort_by(|a, b| b.exchange.gain.total_cmp(&a.exchange.gain));
        found.truncate(EXPERTS_UNDER_WAY);
        found
    }
}

/// The weights of a divided layer on the device.
fn experts(layer: &mut LayerOnDevice) -> &mut ExpertWeights {
    match layer {
        LayerOnDevice::Resident(weights) => match &mut weights.ffn {
            FeedForward::Experts(experts) => experts,
            FeedForward::Dense(_) | FeedForward::Elsewhere => unreachable!("a layer of experts"),
        },
        _ => unreachable!("a layer whose experts are divided is resident"),
    }
}

impl RealMachine {
    /// Between steps: what has arrived takes its place, and others are sent on their way.
    ///
    /// # Errors
    /// If the device has failed, or a tensor is damaged.
    pub(super) fn follow_router(&mut self) -> Result<()> {
        let Some(mut following) = self.following.take() else { return Ok(()) };
        let done = self.take_their_places(&mut following).and_then(|()| self.pack_experts(&mut following));
        self.following = Some(following);
        done
    }

    /// Experts of divided layers that have changed places.
    pub fn exchanged_experts(&self) -> u64 {
        self.following.as_ref().map_or(0, |following| following.exchanged)
    }

    /// Those that have arrived take their places in both sides' tables. If that fails, the next step begins with all of it again.
    fn take_their_places(&mut self, following: &mut Following) -> Result<()> {
        let Some(arrived) = following.arrived.clone() else { return Ok(()) };
        let runtime = self.device().runtime.clone();
        runtime.wait(Lane::Compute, &arrived)?;
        for (at, &UnderWay { layer, exchange }) in following.under_way.iter().enumerate() {
            let image = &following.source.images[layer];
            let ([up, down], l) = (image.bytes(), image.layer());
            let staged = following.device.ptr().add(at * following.bytes);
            let Exchange { place, from, to, .. } = exchange;
            let weights = experts(&mut self.device_mut().layers[l]);
            runtime.copy(Lane::Compute, weights.up.ptr.add(place * up), staged, up)?;
            runtime.copy(Lane::Compute, weights.down.ptr.add(place * down), staged.add(up), down)?;
            for (e, slot) in [(from, NO_SLOT), (to, place as u32)] {
                runtime.upload(Lane::Compute, weights.slots.add(4 * e as usize), &slot.to_le_bytes())?;
            }
        }
        following.free = Some(runtime.record(Lane::Compute)?);
        for UnderWay { layer, exchange } in following.under_way.drain(..) {
            let (l, Exchange { from, to, .. }) = (following.source.images[layer].layer(), exchange);
            if let Some(host) = &mut self.host {
                host.with(|half| half.exchange(l, from, to));
            }
            following.layers[layer].end(&exchange);
            following.exchanged += 1;
        }
        following.arrived = None;
        following.crossed = Some(arrived);
        Ok(())
    }

    /// Counts the choices of the step before, and packs experts that are to cross.
    fn pack_experts(&mut self, following: &mut Following) -> Result<()> {
        let Some(host) = &mut self.host else { return Ok(()) };
        if host.with(|half| following.count(half)) == 0 {
            return Ok(());
        }
        if self.clock().is_some() {
            // Emulated time is that of what is expected to be chosen.
            for (of, image) in following.layers.iter().zip(&following.source.images) {
                experts(&mut self.device_mut().layers[image.layer()]).uses = of.uses();
                self.work.expect(image.layer(), of.uses());
            }
        }
        // One after the other: those before have their places, or are still being sent.
        let chosen = if following.under_way.is_empty() { following.choose() } else { Vec::new() };
        if chosen.is_empty() {
            return Ok(());
        }
        let runtime = self.device().runtime.clone();
        if let Some(crossed) = following.crossed.take() {
            runtime.synchronize(&crossed)?;
        }
        if let Some(free) = following.free.take() {
            runtime.wait(Lane::HostToDevice, &free)?;
        }
        self.pack(following, &chosen)?;
        chosen.iter().for_each(|x| following.layers[x.layer].begin(&x.exchange));
        (following.under_way, following.sent) = (chosen, 0);
        Ok(())
    }

    /// Sends an expert on its way, if one is packed.
    ///
    /// # Errors
    /// If the device has failed.
    pub(super) fn send_expert(&mut self) -> Result<()> {
        let Some(following) = &mut self.following else { return Ok(()) };
        if following.under_way.is_empty() || following.arrived.is_some() {
            return Ok(());
        }
        let runtime = following.source.accel.runtime().clone();
        if let Some(next) = following.under_way.get(following.sent) {
            let bytes: usize = following.source.images[next.layer].bytes().iter().sum();
            let at = following.sent * following.bytes;
            let to = following.device.ptr().add(at);
            runtime.upload_pinned(Lane::HostToDevice, to, &following.host, at..at + bytes)?;
            following.sent += 1;
        }
        if following.sent == following.under_way.len() {
            following.arrived = Some(runtime.record(Lane::HostToDevice)?);
        }
        Ok(())
    }

    /// Writes the images of some experts to pinned memory, by the host's threads, and waits for it.
    fn pack(&mut self, following: &Following, chosen: &[UnderWay]) -> Result<()> {
        let experts: Vec<(usize, u32)> = chosen.iter().map(|x| (x.layer, x.exchange.to)).collect();
        let bytes: usize = experts.iter().flat_map(|&(l, _)| following.source.images[l].bytes()).sum();
        let clock = self.device().runtime.clock();
        let seconds = clock.map_or(0.0, |clock| clock.rates().host_operation(copied(bytes), false));
        let (source, memory, stride) = (following.source.clone(), following.host.clone(), following.bytes);
        let work = move |half: &mut HostHalf| {
            let Source { accel, weights, act, images } = &*source;
            let source =
                LayerSource { accel: &**accel, weights, act: *act, pool: half.pool(), progress: &|_| () };
            for (at, &(layer, e)) in experts.iter().enumerate() {
                let bytes = images[layer].bytes().iter().sum();
                // SAFETY: inside the memory, of which each expert has a part of `stride` bytes. Nothing else touches it: the issuing thread has
                // waited for the copies that read it before, and enqueues the next ones when this job is done.
                let image = unsafe { std::slice::from_raw_parts_mut(memory.host().add(at * stride), bytes) };
                images[layer].fill(&source, e, image)?;
            }
            Ok(())
        };
        let job = HostJob {
            op: NONE,
            events: vec![],
            after: vec![],
            seconds,
            attends: false,
            detached: None,
            program: None,
            work: Box::new(work),
        };
        let ticket = self.lane_mut().give(job);
        self.lane().wait(ticket)
    }
}
