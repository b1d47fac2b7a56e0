//! Translates operations of the host's workers into calls of its sublayers.

use std::ops::Range;

use super::carry::{Place, What};
use super::device::rows_of;
use super::mail::{Mail, MailboxRows};
use super::parts::PartMail;
use super::tally::ChoiceTally;
use crate::Result;
use crate::cache::{LayerKv, PAGE_TOKENS, PagePool};
use crate::device::{Mailbox, Shape};
use crate::engine::divided::Divided;
use crate::engine::host::{Host, HostSeq, HostStep, HostWorkspace, Residual, count_choices, whole};
use crate::engine::options::Options;
use crate::engine::prepare::Prepared;
use crate::host::Pool;
use crate::model::{ModelSpec, RouterProfile};
use crate::program::{Cargo, Kind, Op, Part, Placement, Sublayer};
use crate::simd::Isa;
use crate::simd::attention::AttnOut;

/// The CPU's half of a model.
pub(super) struct HostHalf {
    model: Prepared,
    pool: Pool,
    host: Host,
    /// Pages of layers with keys and values on the host.
    kv: Option<PagePool>,
    /// Pages away from the device, of the other layers.
    far: Option<PagePool>,
    /// For each layer, whether its keys and values are on the device, and its place among the layers of that side.
    places: Vec<(bool, usize)>,
    /// For each layer whose experts are divided, which of them are the host's.
    own_experts: Vec<Option<Vec<bool>>>,
    /// For each of these layers, the choices of the step, if experts follow them.
    chosen: Vec<Option<ChoiceTally>>,
    /// The sub-batches.
    pub parts: Vec<HostPart>,
    /// The model's shape on the device, if there is one.
    pub shape: Option<Shape>,
    /// The choices of routers, if they are counted.
    pub choices: Option<Box<RouterProfile>>,
    /// Panics after this many more operations (tests).
    #[cfg(test)]
    pub panics_at: Option<usize>,
    /// Delays attention at random.
    #[cfg(test)]
    pub delays: Option<u64>,
    /// Delays attention by this time.
    #[cfg(test)]
    pub delay: std::time::Duration,
}

/// The host's state of a sub-batch.
pub(super) struct HostPart {
    pub ws: HostWorkspace,
    step: HostStep,
    /// The step over pages away from the device.
    far_step: HostStep,
    /// Rows that want logits, ascending.
    wanted: Vec<usize>,
    /// Whether only these rows are left.
    compact: bool,
    /// Their likeliest tokens.
    pub picked: Vec<Option<u32>>,
    /// Rows that come from the device and go back to it.
    pub mailbox: Option<Mailbox>,
    /// Partial attention on its way to the device.
    pub parts: Option<PartMail>,
}

impl HostPart {
    pub fn new(spec: &ModelSpec, mailbox: Option<Mailbox>, parts: Option<PartMail>) -> HostPart {
        HostPart {
            ws: HostWorkspace::new(spec),
            step: HostStep::default(),
            far_step: HostStep::default(),
            wanted: Vec::new(),
            compact: false,
            picked: Vec::new(),
            mailbox,
            parts,
        }
    }
}

impl HostHalf {
    pub fn new(
        spec: &ModelSpec,
        options: &Options,
        model: Prepared,
        pool: Pool,
        (kv, far): (Option<PagePool>, Option<PagePool>),
        places: Vec<(bool, usize)>,
        parts: Vec<HostPart>,
        shape: Option<Shape>,
    ) -> Result<HostHalf> {
        let host = Host::new(spec, options.isa, options.mode, pool.threads(), options.context)?
            .with_readers(options.readers);
        Ok(HostHalf {
            model,
            pool,
            host,
            kv,
            far,
            own_experts: vec![None; places.len()],
            chosen: vec![None; places.len()],
            places,
            parts,
            shape,
            choices: None,
            #[cfg(test)]
            panics_at: None,
            #[cfg(test)]
            delays: None,
            #[cfg(test)]
            delay: std::time::Duration::ZERO,
        })
    }

    /// The same for a placement that may divide experts: those that the device has not are the host's.
    pub fn dividing(mut self, placement: &Placement, router: Option<&RouterProfile>) -> HostHalf {
        let of = |l| Some(Divided::of(self.model.spec(), placement, router, l)?.on_host());
        self.own_experts = (0..placement.layers.len()).map(of).collect();
        self
    }

    /// Counts the choices of rows in layers whose experts are divided.
    pub fn counting(mut self) -> HostHalf {
        let of = |own: &Option<Vec<bool>>| own.as_ref().map(|own| ChoiceTally::of(own.len()));
        self.chosen = self.own_experts.iter().map(of).collect();
        self
    }

    /// The choices of `layer` since they were cleared.
    pub fn chosen(&mut self, layer: usize) -> &mut ChoiceTally {
        self.chosen[layer].as_mut().expect("a layer whose choices are counted")
    }

    /// The device has expert `to` of `layer` from now on, and the host `from`.
    pub fn exchange(&mut self, layer: usize, from: u32, to: u32) {
        let own = self.own_experts[layer].as_mut().expect("a layer whose experts are divided");
        (own[from as usize], own[to as usize]) = (true, false);
    }

    /// The host's threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub fn isa(&self) -> Isa {
        self.model.isa()
    }

    pub fn bytes_per_step(&self) -> u64 {
        self.model.bytes_per_step()
    }

    /// Writes zeros to every other token of these pages, which touches every cache line, since neighbouring tokens
    /// share lines.
    pub fn touch(&mut self, pages: &[u32]) {
        let Some(kv) = &mut self.kv else { return };
        let zeros = vec![0.0; kv.geometry().n_kv_heads * kv.geometry().head_dim];
        for layer in 0..kv.geometry().n_layers {
            let kv = kv.layer(layer);
            for pos in (0..pages.len() * PAGE_TOKENS).step_by(2) {
                // SAFETY: the pool is borrowed mutably, so nothing else writes or attends.
                unsafe { kv.append(pages, pos, &zeros, &zeros) };
            }
        }
    }

    /// Begins a step of a sub-batch. `wanted` are the rows that want logits; `head` says whether the host computes
    /// them.
    pub fn prepare(
        &mut self,
        sub_batch: usize,
        seqs: &[HostSeq<'_>],
        tokens: &[u32],
        wanted: &[usize],
        head: bool,
    ) {
        let part = &mut self.parts[sub_batch];
        self.host.prepare(&mut part.step, 0, seqs, tokens.iter().copied(), wanted.iter().copied());
        part.wanted.clear();
        part.wanted.extend_from_slice(wanted);
        part.picked.clear();
        part.picked.resize(wanted.len(), None);
        part.compact = false;
        part.ws.reserve(tokens.len(), if head { wanted.len() } else { 0 });
    }

    /// Prepares the same rows for attention over pages away from the device.
    pub fn prepare_far(&mut self, sub_batch: usize, seqs: &[HostSeq<'_>]) {
        self.host.prepare(&mut self.parts[sub_batch].far_step, 0, seqs, [], []);
    }

    /// Computes an operation. `alone` says that only the host computes after the last keys and values, so that only
    /// rows that want logits need to go on. `letters` are the places of the operation's rows, if they pass through the
    /// mailbox.
    pub fn compute(&mut self, op: &Op, letters: Option<MailboxRows>, alone: bool) {
        #[cfg(test)]
        if let Some(left) = self.panics_at {
            // Panics only once.
            self.panics_at = left.checked_sub(1);
            assert!(left > 0, "told to panic");
        }
        #[cfg(test)]
        if let Kind::Attend { .. } = op.kind {
            std::thread::sleep(self.delay);
        }
        #[cfg(test)]
        if let (Some(state), Kind::Attend { .. }) = (&mut self.delays, op.kind) {
            *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let sleeps = [0, 0, 200, 1000, 5000][(*state >> 33) as usize % 5];
            std::thread::sleep(std::time::Duration::from_micros(sleeps));
        }
        let HostHalf {
            model, pool, host, kv, far, places, own_experts, chosen, parts, shape, choices, ..
        } = self;
        let HostPart { ws, step, far_step, wanted, compact, picked, mailbox, parts } =
            &mut parts[op.sub_batch as usize];
        let mail = letters.as_ref().map(|letters| Mail {
            mailbox: mailbox.as_ref().expect("a mailbox was planned"),
            shape: shape.as_ref().expect("rows for a device"),
            places: letters.mail.clone(),
        });
        let mail = mail.as_ref();
        if op.wanted_only && alone && !*compact {
            step.keep_wanted(ws);
            *compact = true;
        }
        let rows = if *compact { step.rows() } else { rows_of(op) };
        let cx = host.with(model, pool);
        let l = op.layer.unwrap_or_default() as usize;
        let of = |l: Option<usize>, sublayer: Sublayer, add: bool| match (add, l) {
            (false, _) | (_, None) => Residual::None,
            (true, Some(l)) => match (model.layer_if(l), sublayer) {
                (Some(layer), Sublayer::Out) => layer.after_attention(),
                (Some(layer), _) => layer.after_ffn(),
                // Computed on the device.
                (None, _) => Residual::Delta,
            },
        };
        let pages = || -> LayerKv<'_> {
            let (away, place) = places[l];
            if away { far } else { kv }.as_ref().expect("pages on the host").layer(place)
        };
        // The step decides which pages are attended, and which of their tokens.
        let step = match op.kind {
            Kind::Append { .. } | Kind::Attend { .. } if places[l].0 => far_step,
            _ => step,
        };
        let windowed = model.spec().window_of(l).is_some();
        match op.kind {
            Kind::Embed => cx.embed(ws, step, rows),
            Kind::Project { add } => {
                let residual = of(l.checked_sub(1), Sublayer::Down, add);
                cx.project(ws, step, model.layer(l), residual, rows);
            }
            Kind::Append { mailbox: false, .. } => cx.append(ws, step, &pages(), rows),
            Kind::Append { mailbox: true, .. } => {
                let mail = mail.expect("rows of the mailbox");
                // SAFETY: the machine has waited for the publication, and the device publishes again only after this.
                unsafe { mail.append(&cx, step, &pages(), rows) };
            }
            Kind::Attend { part, from_mailbox, to_mailbox, .. } => {
                if from_mailbox {
                    // SAFETY: as above.
                    unsafe { mail.expect("rows of the mailbox").queries(pool, ws.q.view_mut(rows.clone())) };
                }
                let q = ws.q.view(rows.clone());
                if part != Part::Whole {
                    let (mail, letters) =
                        (mail.expect("rows of the mailbox"), letters.expect("their places"));
                    let parts = parts.as_ref().expect("memory for attention in parts was planned");
                    // SAFETY: the machine has waited for the merge of what was there, and the device merges after this.
                    let out = unsafe { parts.rows(mail.shape, &letters.parts) };
                    return cx.attend_rows(step, windowed, &pages(), rows, q, AttnOut::Partial(out));
                }
                let out = ws.attn.view_mut(rows.clone());
                let out = whole(out, model.sinks(l));
                cx.attend_rows(step, windowed, &pages(), rows.clone(), q, out);
                if to_mailbox {
                    // SAFETY: the machine has waited for the collection of what was there, and the device collects after this.
                    unsafe { mail.expect("rows of the mailbox").answer(pool, ws.attn.view(rows)) };
                }
            }
            Kind::OutProj => cx.out_proj(ws, model.layer(l), rows),
            Kind::FfnUp { add } => {
                cx.ffn_up(ws, model.layer(l), of(Some(l), Sublayer::Out, add), rows.clone());
                if let Some(profile) = choices {
                    count_choices(profile, l, ws, step, &rows);
                }
            }
            Kind::FfnDown => cx.ffn_down(ws, model.layer(l), rows),
            Kind::Experts => {
                let own = own_experts[l].as_ref().expect("a layer whose experts are divided");
                if let Some(chosen) = &mut chosen[l] {
                    chosen.add(rows.len(), ws.chosen(rows.clone()));
                }
                cx.own_experts(ws, model.layer(l).mixture().expect("a layer of experts"), own, rows);
            }
            Kind::Head { add } => {
                let residual = || of(model.spec().n_layers.checked_sub(1), Sublayer::Down, add);
                if *compact {
                    cx.head(ws, residual(), rows, 0);
                    return;
                }
                for (at, run) in runs(wanted, &rows) {
                    cx.head(ws, residual(), run, at);
                }
            }
            Kind::Pick => {
                let at = match *compact {
                    true => 0..wanted.len(),
                    false => {
                        wanted.partition_point(|&r| r < rows.start)..wanted.partition_point(|&r| r < rows.end)
                    }
                };
                let mut found = Vec::with_capacity(at.len());
                cx.pick(ws, at.clone(), &mut found);
                picked[at].copy_from_slice(&found);
            }
            _ => unreachable!("{} is not of the host", op.kind.name()),
        }
    }

    /// hidden += the residual of sublayer `of` of `layer`, before rows leave for the device.
    fn add_residual(&mut self, sub_batch: usize, layer: usize, of: Sublayer, rows: Range<usize>) {
        let cx = self.host.with(&self.model, &self.pool);
        let residual = match (self.model.layer_if(layer), of) {
            (Some(layer), Sublayer::Out) => layer.after_attention(),
            (Some(layer), _) => layer.after_ffn(),
            (None, _) => Residual::Delta,
        };
        cx.add_residual(&mut self.parts[sub_batch].ws, residual, rows);
    }

    /// Converts the rows of `op`, a transfer to the device, to the form that the device expects, and writes them to
    /// their place.
    ///
    /// # Safety
    /// As [`Place::fill`].
    pub unsafe fn fill(&mut self, op: &Op, cargo: Cargo, place: &Place) {
        let (b, layer, rows) = (op.sub_batch as usize, op.layer.unwrap_or_default() as usize, rows_of(op));
        if let Cargo::Hidden { pending: Some(of) } = cargo {
            self.add_residual(b, layer, of, rows.clone());
        }
        let shape = self.shape.as_ref().expect("rows for a device");
        let ws = &mut self.parts[b].ws;
        let &[what] = What::of(cargo) else { unreachable!("{cargo:?} goes to the host") };
        if let (Cargo::Share, Some(_)) = (cargo, shape.exact) {
            let (cx, own) = (self.host.with(&self.model, &self.pool), self.own_experts[layer].as_ref());
            let m = self.model.layer(layer).mixture().expect("a layer of experts");
            let outputs = cx.own_outputs(ws, m, own.expect("a layer whose experts are divided"), rows);
            // SAFETY: the caller's promise.
            return unsafe { place.put(&outputs) };
        }
        // SAFETY: the caller's promise.
        unsafe { place.fill(ws, what, shape, rows) };
    }

    /// Takes rows of `op`, a transfer to the host, from where they have arrived.
    ///
    /// # Safety
    /// As [`Place::take`].
    pub unsafe fn land(&mut self, op: &Op, what: What, place: &Place) {
        let shape = self.shape.as_ref().expect("rows of a device");
        // SAFETY: the caller's promise.
        unsafe { place.take(&mut self.parts[op.sub_batch as usize].ws, what, shape, rows_of(op)) };
    }
}

/// Runs of consecutive numbers of an ascending list inside `rows`, each with its place in the list.
fn runs(list: &[usize], rows: &Range<usize>) -> Vec<(usize, Range<usize>)> {
    let mut found: Vec<(usize, Range<usize>)> = Vec::new();
    for (at, &row) in list.iter().enumerate().filter(|(_, row)| rows.contains(row)) {
        match found.last_mut() {
            Some((_, run)) if run.end == row => run.end += 1,
            _ => found.push((at, row..row + 1)),
        }
    }
    found
}
