//! Activations of experts, and which rows are whose.

use std::ops::Range;

use super::row_buffer::RowBuffer;
use crate::model::{Experts, ModelSpec};
use crate::simd::Isa;
use crate::simd::linear::{Acts, ActsBytes, Linear, Mode, Need};
use crate::tensor::DType;

/// The activations of all rows that have experts; sub-batches have disjoint rows of it, as of the whole workspace.
///
/// A row has k places in `act` and `out`. The places of the rows of an operation are sorted by expert, so that an expert's rows
/// follow each other; [`Sorted`] says which place is whose.
pub(super) struct ExpertRows {
    /// Logits of the router, `[rows][E]`.
    pub logits: RowBuffer,
    /// The chosen experts of a row, `[rows][k]`.
    pub ids: Vec<u32>,
    /// Their weights, `[rows][k]`.
    pub weights: RowBuffer,
    /// Logit of the shared expert's gate, `[rows][1]`.
    pub gate: RowBuffer,
    /// Activation of the chosen experts, `[rows · k][I]`.
    pub act: RowBuffer,
    /// The factor of the activation.
    pub up: RowBuffer,
    /// What they give, `[rows · k][d]`.
    pub out: RowBuffer,
    /// Activation of the shared expert, `[rows][I of it]`.
    pub shared_act: RowBuffer,
    /// The factor of it.
    pub shared_up: RowBuffer,
    /// Inputs of the experts, sorted.
    pub inputs: Acts,
    pub sorted: Sorted,
    used: usize,
}

/// The rows of an operation, sorted by expert. Within an expert they ascend.
#[derive(Debug, Default)]
pub(super) struct Sorted {
    /// The experts that have rows.
    pub parts: Vec<Chosen>,
    /// The row of each place, counted from the operation's first.
    pub rows: Vec<u32>,
    /// The place of each row's k-th choice, or [`NO_PLACE`].
    pub places: Vec<u32>,
    /// Rows of the experts' inputs, with those between the parts.
    pub inputs: usize,
    counts: Vec<u32>,
}

/// The place of a choice whose expert is computed elsewhere.
pub(super) const NO_PLACE: u32 = u32::MAX;

/// An expert with rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen {
    pub expert: usize,
    /// Its first place, and how many follow.
    pub place: usize,
    pub len: usize,
    /// Where its inputs begin.
    pub input: usize,
}

impl Chosen {
    pub fn inputs(&self) -> Range<usize> {
        self.input..self.input + self.len
    }
}

impl Sorted {
    /// Sorts the choices `ids` of rows with `used` each, of `count` experts. The inputs of an expert with so many rows begin at a
    /// multiple of what `align` says, and the next ones behind another. Only those of `own` experts get places, if some are computed
    /// elsewhere; choices that come from there may be any number.
    pub fn sort(
        &mut self,
        ids: &[u32],
        used: usize,
        count: usize,
        align: &dyn Fn(usize, usize) -> usize,
        own: Option<&[bool]>,
    ) {
        let is_own = |e: u32| own.is_none_or(|own| own.get(e as usize).is_some_and(|&own| own));
        self.counts.clear();
        self.counts.resize(count, 0);
        ids.iter().filter(|&&e| is_own(e)).for_each(|&e| self.counts[e as usize] += 1);
        self.parts.clear();
        let (mut place, mut input) = (0, 0usize);
        for (expert, next) in self.counts.iter_mut().enumerate() {
            let len = std::mem::replace(next, place as u32) as usize;
            if len > 0 {
                let align = align(expert, len);
                input = input.next_multiple_of(align);
                self.parts.push(Chosen { expert, place, len, input });
                (place, input) = (place + len, (input + len).next_multiple_of(align));
            }
        }
        self.inputs = input;
        self.rows.resize(ids.len(), 0);
        self.places.resize(ids.len(), 0);
        for (i, &e) in ids.iter().enumerate() {
            if !is_own(e) {
                self.places[i] = NO_PLACE;
                continue;
            }
            let next = &mut self.counts[e as usize];
            self.rows[*next as usize] = (i / used) as u32;
            self.places[i] = *next;
            *next += 1;
        }
    }

    /// Most rows of inputs of so many choices of `count` experts, where `aligned` says from how many rows on those of an expert begin at a
    /// multiple of what.
    fn most_inputs(places: usize, count: usize, aligned: Option<(usize, usize)>) -> usize {
        let Some((from, align)) = aligned else { return places };
        // Rows are left free behind an expert whose inputs are aligned, and in front of it.
        let gaps = (2 * (places / from)).min(count.min(places));
        (places + (align - 1) * gaps).next_multiple_of(align)
    }
}

impl ExpertRows {
    /// Without room for rows; `None` for a model without experts.
    pub fn new(spec: &ModelSpec) -> Option<ExpertRows> {
        let e = spec.experts.as_ref()?;
        let [logits, weights, gate, act, up, out, shared_act, shared_up] =
            widths(spec, e).map(RowBuffer::new);
        let (ids, inputs, sorted) = (Vec::new(), Acts::default(), Sorted::default());
        let used = e.used;
        Some(ExpertRows {
            logits,
            ids,
            weights,
            gate,
            act,
            up,
            out,
            shared_act,
            shared_up,
            inputs,
            sorted,
            used,
        })
    }

    /// Makes room for rows `0..rows`.
    pub fn reserve(&mut self, rows: usize) {
        let ExpertRows { logits, weights, gate, act, up, out, shared_act, shared_up, .. } = self;
        [logits, weights, gate, act, up, out, shared_act, shared_up]
            .into_iter()
            .for_each(|b| b.reserve(rows));
        let places = rows * self.used;
        if self.ids.len() < places {
            self.ids.reserve_exact(places - self.ids.len());
            self.ids.resize(places, 0);
        }
    }

    /// The choices of `rows` and their weights, for those that were made elsewhere.
    pub fn choices_mut(&mut self, rows: Range<usize>) -> (&mut [u32], &mut [f32]) {
        let ids = &mut self.ids[rows.start * self.used..rows.end * self.used];
        (ids, self.weights.rows_mut(rows))
    }

    /// The choices of `rows`.
    pub fn ids(&self, rows: Range<usize>) -> &[u32] {
        &self.ids[rows.start * self.used..rows.end * self.used]
    }

    /// Bytes for `rows` rows, without the inputs.
    pub fn bytes(spec: &ModelSpec, rows: usize) -> usize {
        let Some(e) = &spec.experts else { return 0 };
        let floats = rows * widths(spec, e).iter().sum::<usize>();
        // Ids; rows and places of those that are sorted.
        size_of::<f32>() * floats + 3 * size_of::<u32>() * rows * e.used
    }

    /// Bytes of the inputs of up to `rows` rows, multiplied by matrices of these types: [d, I] and [I, d].
    pub fn inputs_bytes(spec: &ModelSpec, rows: usize, types: [&[DType]; 2], isa: Isa, mode: Mode) -> usize {
        let Some(e) = &spec.experts else { return 0 };
        let of_type = |&dtype: &DType| Linear::parts_aligned_from(dtype, isa, rows, mode);
        let inputs = Sorted::most_inputs(
            rows * e.used,
            e.count,
            types.into_iter().flatten().filter_map(of_type).min(),
        );
        let mut bytes = ActsBytes::default();
        for (types, k) in types.into_iter().zip([spec.d_model, e.d_ff]) {
            bytes.add(inputs, k, Need::default(), true);
            for &dtype in types {
                // An expert may have any number of the rows.
                for (_, need) in Linear::needs_up_to(dtype, isa, false, rows, mode) {
                    bytes.add(inputs, k, need, true);
                }
            }
        }
        bytes.total()
    }
}

/// Elements of a row of logits, weights, gate, act, up, out, shared_act, shared_up.
fn widths(spec: &ModelSpec, e: &Experts) -> [usize; 8] {
    let (act, shared) = (e.used * e.d_ff, e.shared.unwrap_or(0));
    let gated = |n: usize| if spec.gated() { n } else { 0 };
    let gate = usize::from(e.shared.is_some());
    [e.count, e.used, gate, act, gated(act), e.used * spec.d_model, shared, gated(shared)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Every choice has one place, among those of its expert, and places of an expert are in the order of rows.
        #[test]
        fn every_choice_has_a_place(
            ids in prop::collection::vec(0u32..9, 0..40),
            used in 1usize..4,
            from in prop::sample::select(vec![1usize, 2, 3, 100]),
            own in prop::option::of(prop::collection::vec(any::<bool>(), 9)),
        ) {
            let ids = &ids[..ids.len() / used * used];
            let mut s = Sorted::default();
            let align = |_, len| if len >= from { 16 } else { 1 };
            s.sort(&[5, 5], 1, 9, &align, None);
            s.sort(ids, used, 9, &align, own.as_deref());
            let mut seen = vec![false; ids.len()];
            for (i, &place) in s.places.iter().enumerate() {
                if own.as_ref().is_some_and(|own| !own[ids[i] as usize]) {
                    prop_assert_eq!(place, NO_PLACE);
                    continue;
                }
                let part = s.parts.iter().find(|p| (p.place..p.place + p.len).contains(&(place as usize))).unwrap();
                prop_assert_eq!(part.expert, ids[i] as usize);
                prop_assert_eq!(s.rows[place as usize] as usize, i / used);
                prop_assert!(!std::mem::replace(&mut seen[place as usize], true));
            }
            for part in &s.parts {
                let align = align(part.expert, part.len);
                prop_assert!(part.len > 0 && part.input % align == 0 && part.inputs().end <= s.inputs);
                prop_assert!(align == 1 || part.inputs().end.next_multiple_of(16) <= s.inputs);
                prop_assert!(s.rows[part.place..part.place + part.len].is_sorted());
            }
            prop_assert!(s.parts.windows(2).all(|p| p[0].expert < p[1].expert && p[0].inputs().end <= p[1].input));
            prop_assert!(s.inputs <= Sorted::most_inputs(ids.len(), 9, Some((from, 16))));
        }
    }
}
