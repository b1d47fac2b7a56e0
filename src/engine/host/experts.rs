//! Experts: a router chooses some for each row; each expert's weights are read once for all rows that chose it.
//!
//! ```text
//! norm ─► router ─► choose ─► sort by expert ─► (gate, up, activation) of all chosen │ down of all ─► Σ w·y of each row
//!              └──────────────────────────── ffn_up ────────────────────────────────┘└─────── ffn_down ────────────┘
//! ```
//! Each of the two products is one job of the pool over (expert, columns), whatever the number of experts. A row's outputs are
//! added in the order of its choices, so its bits depend on no other row.

use std::ops::Range;

use super::expert_rows::{ExpertRows, NO_PLACE, Sorted};
use super::ffn::activate;
use super::{HostContext, HostWorkspace, each_row};
use crate::engine::prepare::{Mixture, Mlp};
use crate::host::Pieces;
use crate::model::{Experts, RouterWeights, route};
use crate::simd::linear::{Acts, Linear, Out, Part, linear, linear_parts, linear_rows};
use crate::tensor::RowsMut;

impl HostContext<'_> {
    /// Chooses the experts of `rows`, whose normed inputs are in the workspace's `acts`, and computes their activations.
    pub(super) fn experts_up(&self, ws: &mut HostWorkspace, m: &Mixture, rows: Range<usize>) {
        let HostWorkspace { acts, experts, .. } = ws;
        let e = experts.as_mut().expect("a workspace of a model with experts");
        self.choose(acts, e, m, rows.clone());
        self.sort(e, m, rows.clone(), None);
        if let Some(shared) = &m.shared {
            let (act, up) = (e.shared_act.rows_mut(rows.clone()), e.shared_up.rows_mut(rows.clone()));
            self.activations(&shared.mlp, acts, act, up);
        }
        self.chosen_up(acts, e, m, rows);
    }

    /// delta = Σ weight · W·act of the chosen experts, plus what the shared one gives.
    pub(super) fn experts_down(&self, ws: &mut HostWorkspace, m: &Mixture, rows: Range<usize>) {
        let HostWorkspace { acts, delta, experts, .. } = ws;
        let e = experts.as_mut().expect("a workspace of a model with experts");
        // The rows of the activations before: the places are the same.
        self.sort(e, m, rows.clone(), None);
        if let Some(shared) = &m.shared {
            let out = Out { w: &shared.mlp.down, ldo: delta.width(), out: delta.rows_mut(rows.clone()) };
            linear_rows(self.pool, self.host.mode, e.shared_act.view(rows.clone()), acts, &mut [out]);
        }
        self.chosen_down(e, m, rows.clone());
        let gate = m.shared.as_ref().map(|_| e.gate.rows(rows.clone()));
        self.add_chosen(e, m, rows.clone(), delta.view_mut(rows), &|r, delta| match gate {
            Some(gate) => {
                let g = 1.0 / (1.0 + (-gate[r]).exp());
                delta.iter_mut().for_each(|x| *x *= g);
            }
            None => delta.fill(0.0),
        });
    }

    /// delta = Σ weight · what those of the chosen experts give that are `own`, of rows that the device routes: their normed inputs
    /// are in `delta`, choices and weights in their places.
    pub(in crate::engine) fn own_experts(
        &self,
        ws: &mut HostWorkspace,
        m: &Mixture,
        own: &[bool],
        rows: Range<usize>,
    ) {
        let HostWorkspace { acts, delta, experts, .. } = ws;
        let e = experts.as_mut().expect("a workspace of a model with experts");
        let d = delta.width();
        acts.reset(rows.len(), d).copy_from_slice(delta.rows(rows.clone()));
        self.sort(e, m, rows.clone(), Some(own));
        self.chosen_up(acts, e, m, rows.clone());
        self.chosen_down(e, m, rows.clone());
        self.add_chosen(e, m, rows.clone(), delta.view_mut(rows), &|_, delta| delta.fill(0.0));
    }

    /// What the chosen experts that are `own` give after [`HostContext::own_experts`], f32 `[rows][k][d]` in the order of choices, with
    /// zeros for the others.
    pub(in crate::engine) fn own_outputs(
        &self,
        ws: &mut HostWorkspace,
        m: &Mixture,
        own: &[bool],
        rows: Range<usize>,
    ) -> Vec<f32> {
        let e = ws.experts.as_mut().expect("a workspace of a model with experts");
        // Other rows may have been sorted since.
        self.sort(e, m, rows.clone(), Some(own));
        let (d, out) = (ws.delta.width(), e.out.rows(rows));
        let mut all = vec![0.0; e.sorted.places.len() * d];
        for (to, &place) in all.chunks_exact_mut(d).zip(&e.sorted.places) {
            if place != NO_PLACE {
                to.copy_from_slice(&out[place as usize * d..][..d]);
            }
        }
        all
    }

    /// act = activations of the chosen experts of `rows`, sorted before, whose normed inputs are `acts`.
    fn chosen_up(&self, acts: &mut Acts, e: &mut ExpertRows, m: &Mixture, rows: Range<usize>) {
        let ExpertRows { act, up, inputs, sorted, .. } = e;
        // A single row is everybody's input.
        let single = rows.len() == 1;
        if !single {
            self.gather(acts, inputs, sorted);
        }
        let (k, ffn) = (self.host.kernels, self.model.spec.ffn);
        let x = if single { acts } else { inputs };
        let (mut act, mut up) = (act.rows_mut(rows.clone()), up.rows_mut(rows));
        let mut parts: Vec<Part<'_>> = Vec::with_capacity(sorted.parts.len());
        for part in &sorted.parts {
            let Mlp { gate, up: first, .. } = &m.experts[part.expert];
            let len = part.len * first.n();
            let out = act.split_off_mut(..len).expect("a row of each place");
            let second = gate.as_ref().map(|_| (first, up.split_off_mut(..len).expect("as many")));
            let rows = if single { 0..1 } else { part.inputs() };
            parts.push(Part { w: gate.as_ref().unwrap_or(first), second, rows, out });
        }
        linear_parts(self.pool, self.host.mode, x, &mut parts, &|act, up| activate(k, ffn, act, up));
        if m.experts.iter().all(|e| e.gate.is_none()) {
            // Without a gate there is nothing to combine.
            parts.iter_mut().for_each(|p| activate(k, ffn, p.out, &[]));
        }
    }

    /// out = W·act of the chosen experts of `rows`, sorted before.
    fn chosen_down(&self, e: &mut ExpertRows, m: &Mixture, rows: Range<usize>) {
        let ExpertRows { act, out, inputs, sorted, .. } = e;
        let width = act.width() / m.used;
        self.spread(act.rows(rows.clone()), width, inputs, sorted);
        let mut rest = out.rows_mut(rows);
        let mut parts: Vec<Part<'_>> = Vec::with_capacity(sorted.parts.len());
        for part in &sorted.parts {
            let w = &m.experts[part.expert].down;
            let out = rest.split_off_mut(..part.len * w.n()).expect("a row of each place");
            parts.push(Part { w, second: None, rows: part.inputs(), out });
        }
        linear_parts(self.pool, self.host.mode, inputs, &mut parts, &|_, _| ());
    }

    /// delta = `begin`, then + weight · out of each choice that has a place, in their order.
    fn add_chosen(
        &self,
        e: &ExpertRows,
        m: &Mixture,
        rows: Range<usize>,
        delta: RowsMut<'_>,
        begin: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let (used, sorted) = (m.used, &e.sorted);
        let (out, weights) = (e.out.rows(rows.clone()), e.weights.rows(rows));
        let d = out.len() / sorted.places.len().max(1);
        each_row(self.pool, delta, used * d, |r, delta| {
            begin(r, delta);
            for i in r * used..(r + 1) * used {
                let (w, place) = (weights[i], sorted.places[i]);
                if place == NO_PLACE {
                    continue;
                }
                let at = place as usize * d;
                for (x, y) in delta.iter_mut().zip(&out[at..at + d]) {
                    *x += w * y;
                }
            }
        });
    }

    /// The router's logits, the choice and its weights, and the logit of the shared expert's gate.
    fn choose(&self, x: &mut Acts, e: &mut ExpertRows, m: &Mixture, rows: Range<usize>) {
        let (used, of) = (m.used, self.router_weights());
        let count = m.router.n();
        let logits = Out { w: &m.router, out: e.logits.rows_mut(rows.clone()), ldo: count };
        match &m.shared {
            None => linear(self.pool, self.host.mode, x, &mut [logits]),
            Some(shared) => {
                let gate = Out { w: &shared.gate, out: e.gate.rows_mut(rows.clone()), ldo: 1 };
                linear(self.pool, self.host.mode, x, &mut [logits, gate]);
            }
        }
        let ids = Pieces::new(&mut e.ids[rows.start * used..rows.end * used], used);
        let weights = RowsMut::new(e.weights.rows_mut(rows.clone()), used);
        let logits = e.logits.view(rows);
        // About as long as so many times as many elements of other operations of rows.
        const EACH: usize = 8;
        each_row(self.pool, (ids, weights), EACH * count, |r, (ids, weights)| {
            route(logits.row(r), of, ids, weights);
        });
    }

    fn router_weights(&self) -> RouterWeights {
        self.model.spec.experts.as_ref().map_or(RouterWeights::OfAll, |e: &Experts| e.weights)
    }

    fn sort(&self, e: &mut ExpertRows, m: &Mixture, rows: Range<usize>, own: Option<&[bool]>) {
        let mut sorted = std::mem::take(&mut e.sorted);
        let align = |expert: usize, rows: usize| {
            let Mlp { gate, up, down, .. } = &m.experts[expert];
            let of = |w: &Linear| w.part_alignment(rows, self.host.mode);
            gate.as_ref().map_or(1, of).max(of(up)).max(of(down))
        };
        sorted.sort(e.ids(rows), m.used, m.experts.len(), &align, own);
        e.sorted = sorted;
    }

    /// Copies the row of every place of `x` to `inputs`.
    fn gather(&self, x: &Acts, inputs: &mut Acts, sorted: &Sorted) {
        let (x, d) = (x.f32(), x.k());
        self.fill(inputs, d, sorted, |place| {
            let at = sorted.rows[place] as usize * d;
            &x[at..at + d]
        });
    }

    /// Copies the rows of all places, of `width`, to `inputs`.
    fn spread(&self, act: &[f32], width: usize, inputs: &mut Acts, sorted: &Sorted) {
        self.fill(inputs, width, sorted, |place| &act[place * width..(place + 1) * width]);
    }

    /// The inputs of all parts: `row` of each place, and zeros between parts.
    fn fill<'x>(
        &self,
        inputs: &mut Acts,
        width: usize,
        sorted: &Sorted,
        row: impl Fn(usize) -> &'x [f32] + Sync,
    ) {
        let to = RowsMut::new(inputs.reset(sorted.inputs, width), width);
        each_row(self.pool, to, width, |i, to| {
            let part = sorted.parts[sorted.parts.partition_point(|p| p.input <= i) - 1];
            match i - part.input {
                n if n < part.len => to.copy_from_slice(row(part.place + n)),
                _ => to.fill(0.0),
            }
        });
    }
}
