//! Mixtures of experts: the choice of a router, places sorted by expert, every grouped product, and the sum.

use super::numbers::{U, bits, floats, some, value, words};
use super::probe::{LANE, Probe, Worst};
use super::products::has_machine_code;
use super::{Depth, quantised};
use crate::Result;
use crate::device::kernels::experts::{
    ChooseArgs, CombineArgs, ExpertMatrices, ExpertProductArgs, GROUP_BYTES, GatherArgs, NONE, RouteArgs,
    SortArgs, choose, combine, experts_product, gather, group_capacity, most_tokens, route_logits, sort,
};
use crate::device::kernels::product::{Epilogue, Matrix};
use crate::device::kernels::quant::{PackedLayout, pack};
use crate::device::runtime::DevPtr;
use crate::host::Pool;
use crate::model::RouterWeights;
use crate::reference;
use crate::reference::dequant::dequantise_row;
use crate::tensor::{DType, Half};

/// Experts, of which the last is computed elsewhere; a row's choices; elements of a row.
const EXPERTS: usize = 3;
const USED: usize = 2;
const D: usize = 256;

/// Router, sort, rows and sums; then the products of every type of weights.
pub fn experts(p: &mut Probe, depth: Depth) {
    for &act in p.half_types() {
        for rows in [3, 40] {
            p.check(&format!("{rows} rows' logits of experts in {}", act.name()), |p| logits(p, act, rows));
        }
    }
    for (count, of) in
        [(60, RouterWeights::OfChosen), (200, RouterWeights::OfAll), (300, RouterWeights::OfAll)]
    {
        p.check(&format!("choice of {count} experts"), |p| choice(p, count, of));
    }
    for rows in [5, 700] {
        p.check(&format!("places of {rows} rows' experts"), |p| places(p, rows));
    }
    p.check("rows to experts", gathered);
    p.check("sum of experts", combined);
    // Quick: one type of weights of either kind, and no kernel that a driver would compile for long.
    let quick = |act: Half, dtype: DType| match dtype {
        DType::Q4_K => act == Half::F16 && has_machine_code(p),
        dtype => !dtype.is_quantised(),
    };
    let mut cases = Vec::new();
    for &act in p.half_types() {
        let dense = if act == Half::F16 { DType::F16 } else { DType::BF16 };
        cases.extend(PackedLayout::dtypes().chain([dense]).map(|dtype| (act, dtype)));
    }
    cases.retain(|&(act, dtype)| depth == Depth::Full || quick(act, dtype));
    for (act, dtype) in cases {
        products(p, act, dtype);
    }
}

/// Sums of at most D/32 + 14 roundings, with a bias; one more row of weights is the gate of a shared expert.
fn logits(p: &Probe, act: Half, rows: usize) -> Result<Worst> {
    let count = 9;
    let (w, x, b) = (some(1, (count + 1) * D), some(2, rows * D), some(12, count));
    let x: Vec<u16> = x.iter().map(|&x| bits(act, x)).collect();
    let (router, gate_w) = (p.up(&floats(&w[..count * D]))?, p.up(&floats(&w[count * D..]))?);
    let (x_dev, bias) = (p.up(&halves(&x))?, p.up(&floats(&b))?);
    let (logits, gate) = (p.out(rows * count * 4)?, p.out(rows * 4)?);
    let args = RouteArgs {
        router: router.ptr(),
        gate_w: gate_w.ptr(),
        act,
        x: x_dev.ptr(),
        ldx: D,
        logits: logits.ptr(),
        gate: gate.ptr(),
        bias: bias.ptr(),
        rows,
        experts: count,
        d: D,
    };
    route_logits(&*p.rt, LANE, &args)?;
    let sum = |row: usize, e: usize| {
        let (w, x) = (&w[e * D..][..D], &x[row * D..][..D]);
        let parts = w.iter().zip(x).map(|(&w, &x)| f64::from(w) * value(act, x));
        let (sum, size) = parts.fold((0.0, 0.0), |(sum, size), part| (sum + part, size + part.abs()));
        let b = b.get(e).map_or(0.0, |&b| f64::from(b));
        (sum + b, (D as f64 / 32.0 + 14.0) * U * (size + b.abs()))
    };
    let all = Worst::of(&p.floats(&logits)?, (0..rows * count).map(|i| sum(i / count, i % count)));
    Ok(all.max(Worst::of(&p.floats(&gate)?, (0..rows).map(|row| sum(row, count)))))
}

/// Ids exactly; a weight is off by its exponent's rounding, two ulp of each exponential, and those of a sum and a quotient.
fn choice(p: &Probe, count: usize, of: RouterWeights) -> Result<Worst> {
    let (rows, used) = (3, 8);
    let logits: Vec<f32> = some(3, rows * count).iter().map(|x| 4.0 * x).collect();
    let logits_dev = p.up(&floats(&logits))?;
    let (ids, weights) = (p.out(rows * used * 4)?, p.out(rows * used * 4)?);
    let (ids_at, weights_at, experts) = (ids.ptr(), weights.ptr(), count);
    let args =
        ChooseArgs { logits: logits_dev.ptr(), ids: ids_at, weights: weights_at, rows, experts, used, of };
    choose(&*p.rt, LANE, &args)?;
    let route = |row: &[f32]| reference::route(row, used, of == RouterWeights::OfChosen);
    let want: Vec<(usize, f64)> = logits.chunks_exact(count).flat_map(route).collect();
    let chosen = Worst::of(&p.words(&ids)?, want.iter().map(|c| (c.0 as f64, 0.0)));
    let allowed = |w: f64| (16.0 + count as f64 / 16.0 + used as f64 + 24.0) * U * w;
    Ok(chosen.max(Worst::of(&p.floats(&weights)?, want.iter().map(|c| (c.1, allowed(c.1))))))
}

/// Experts of rows, by chance, each at most once a row; the slots of the experts: one has none.
fn chosen(rows: usize) -> (Vec<u32>, [u32; EXPERTS]) {
    let first = some(4, rows).into_iter().map(|x| ((x + 1.0) * 1.5) as u32 % EXPERTS as u32);
    (first.flat_map(|e| [e, (e + 1) % EXPERTS as u32]).collect(), [1, 0, NONE])
}

/// Places of choices, rows of places, and groups as (slot, first place, count).
fn sorted(ids: &[u32], slots: &[u32], tokens: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let (mut places, mut rows, mut groups, mut next) = (vec![NONE; ids.len()], Vec::new(), Vec::new(), 0);
    for (e, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot != NONE) {
        let first = next;
        for (i, place) in places.iter_mut().enumerate().filter(|(i, _)| ids[*i] == e as u32) {
            *place = next;
            rows.push((i / USED) as u32);
            next += 1;
        }
        for at in (first..next).step_by(tokens) {
            groups.extend([slot, at, (next - at).min(tokens as u32), 0]);
        }
    }
    rows.resize(ids.len(), NONE);
    groups.resize(group_capacity(ids.len(), slots.len(), tokens) * GROUP_BYTES / 4, 0);
    (places, rows, groups)
}

fn places(p: &Probe, rows: usize) -> Result<Worst> {
    let ((ids, slots), tokens) = (chosen(rows), 8);
    let want = sorted(&ids, &slots, tokens);
    let (ids_dev, slots_dev) = (p.up(&words(&ids))?, p.up(&words(&slots))?);
    let (places, rows_of) = (p.out(ids.len() * 4)?, p.out(ids.len() * 4)?);
    let groups = p.out(want.2.len() * 4)?;
    let args = SortArgs {
        ids: ids_dev.ptr(),
        slots: slots_dev.ptr(),
        places: places.ptr(),
        rows_of: rows_of.ptr(),
        groups: groups.ptr(),
        rows,
        used: USED,
        experts: EXPERTS,
        tokens,
    };
    sort(&*p.rt, LANE, &args)?;
    let places = Worst::of_bytes(&p.bytes(&places)?, &words(&want.0));
    let rows = Worst::of_bytes(&p.bytes(&rows_of)?, &words(&want.1));
    Ok(places.max(rows).max(Worst::of_bytes(&p.bytes(&groups)?, &words(&want.2))))
}

fn gathered(p: &Probe) -> Result<Worst> {
    let rows = 5;
    let (ids, slots) = chosen(rows);
    let (_, rows_of, _) = sorted(&ids, &slots, 8);
    let x: Vec<u16> = some(5, rows * D).iter().map(|&x| bits(Half::F16, x)).collect();
    let (x_dev, rows_dev, xs) = (p.up(&halves(&x))?, p.up(&words(&rows_of))?, p.out(ids.len() * D * 2)?);
    let args =
        GatherArgs { rows_of: rows_dev.ptr(), x: x_dev.ptr(), ldx: D, xs: xs.ptr(), places: ids.len(), d: D };
    gather(&*p.rt, LANE, &args)?;
    let row = |&row: &u32| match row {
        // As the output was.
        NONE => vec![0xffff; D],
        row => x[row as usize * D..][..D].to_vec(),
    };
    Ok(Worst::of_bytes(&p.bytes(&xs)?, &halves(&rows_of.iter().flat_map(row).collect::<Vec<_>>())))
}

/// A factor and an addition of each choice, and some of the sigmoid.
fn combined(p: &Probe) -> Result<Worst> {
    let rows = 5;
    let (ids, slots) = chosen(rows);
    let (places, _, _) = sorted(&ids, &slots, 8);
    let (out, weights) = (some(6, ids.len() * D), some(7, ids.len()));
    let (shared, gate) = (some(8, rows * D), some(9, rows));
    let (out_dev, weights_dev) = (p.up(&floats(&out))?, p.up(&floats(&weights))?);
    let (gate_dev, places_dev, delta) = (p.up(&floats(&gate))?, p.up(&words(&places))?, p.out(rows * D * 4)?);
    p.rt.upload(LANE, delta.ptr(), &floats(&shared))?;
    let args = CombineArgs {
        out: out_dev.ptr(),
        places: places_dev.ptr(),
        weights: weights_dev.ptr(),
        shared: delta.ptr(),
        gate: gate_dev.ptr(),
        delta: delta.ptr(),
        rows,
        used: USED,
        d: D,
    };
    combine(&*p.rt, LANE, &args)?;
    let want = |i: usize| {
        let (row, column) = (i / D, i % D);
        let mut sum = f64::from(shared[i]) / (1.0 + (-f64::from(gate[row])).exp());
        let mut size = 4.0 * sum.abs();
        for j in (row * USED..(row + 1) * USED).filter(|&j| places[j] != NONE) {
            let part = f64::from(weights[j]) * f64::from(out[places[j] as usize * D + column]);
            (sum, size) = (sum + part, size + part.abs());
        }
        (sum, 2.0 * (USED + 4) as f64 * U * size)
    };
    Ok(Worst::of(&p.floats(&delta)?, (0..rows * D).map(want)))
}

/// Rows of weights by chance, as a file has them.
fn rows_of_file(dtype: DType, act: Half, n: usize, k: usize) -> Vec<u8> {
    if dtype.is_quantised() {
        return quantised(dtype, n, k, 11);
    }
    halves(&some(11, n * k).iter().map(|&w| bits(act, 0.1 * w)).collect::<Vec<_>>())
}

fn halves(x: &[u16]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Two matrices, by rows in groups that are full and groups that are not, with every kernel for them.
fn products(p: &mut Probe, act: Half, dtype: DType) {
    let (n, k, slots) = (80, D, 2);
    let row_bytes = dtype.row_bytes(k).expect("whole blocks");
    let file = rows_of_file(dtype, act, slots * n, k);
    let (mut values, mut part) = (Vec::new(), Vec::new());
    for row in file.chunks_exact(row_bytes) {
        let mut decoded = vec![0f32; k];
        dequantise_row(dtype, row, &mut decoded);
        let largest = decoded.iter().fold(0f64, |m, &w| m.max(f64::from(w).abs()));
        // A minimum is no larger than the largest weight of its block; with the code's product, four of them.
        part.push(if dtype.is_quantised() { 4.0 * largest } else { 0.0 });
        values.extend(decoded.into_iter().map(f64::from));
    }
    let matrix = Matrix::of(dtype, n, k);
    let mut weights = Vec::new();
    for slot in file.chunks_exact(n * row_bytes) {
        match &matrix {
            Matrix::Dense { .. } => weights.extend_from_slice(slot),
            Matrix::Quantised(layout) => {
                let mut packed = vec![0; layout.bytes()];
                pack(layout, &|r| &slot[r * row_bytes..][..row_bytes], &Pool::new(1), &mut packed);
                weights.extend(packed);
            }
        }
    }
    // Behind each matrix its bias.
    let (at, biases) = (weights.len() / slots, some(13, slots * n));
    let stride = (at + 4 * n).next_multiple_of(16);
    let mut both = vec![0; slots * stride];
    for (slot, to) in both.chunks_exact_mut(stride).enumerate() {
        to[..at].copy_from_slice(&weights[slot * at..][..at]);
        to[at..at + 4 * n].copy_from_slice(&floats(&biases[slot * n..][..n]));
    }
    let w = ExpertMatrices { ptr: DevPtr::NULL, bias: DevPtr::NULL, stride, matrix };
    let most = most_tokens(p.rt.info(), &matrix);
    for tokens in [4, 8, 16, 32, 64].into_iter().filter(|&tokens| tokens <= most) {
        // Slot 1 first, of one row; then slot 0, of more than a group.
        let counts = [1, tokens + 1];
        let places: usize = counts.iter().sum();
        let x: Vec<u16> = some(10, places * k).iter().map(|&x| bits(act, x)).collect();
        let mut args = ExpertProductArgs {
            w,
            act,
            x: DevPtr::NULL,
            ldx: k,
            y: DevPtr::NULL,
            ldy: n,
            groups: DevPtr::NULL,
            rows: places,
            used: 1,
            experts: slots,
            tokens,
            epilogue: Epilogue::F32,
        };
        let kernel = args.plan(p.rt.info()).kernel;
        if !p.has(&kernel) {
            continue;
        }
        let mut groups = vec![1, 0, 1, 0, 0, 1, tokens as u32, 0, 0, 1 + tokens as u32, 1, 0];
        groups.resize(group_capacity(places, slots, tokens) * GROUP_BYTES / 4, 0);
        p.check(&format!("{kernel} of groups of 1 and {tokens}"), |p| {
            let (weights, x_dev, groups) = (p.up(&both)?, p.up(&halves(&x))?, p.up(&words(&groups))?);
            let y = p.out(places * n * 4)?;
            (args.w.ptr, args.w.bias) = (weights.ptr(), weights.ptr().add(at));
            (args.x, args.y, args.groups) = (x_dev.ptr(), y.ptr(), groups.ptr());
            experts_product(&*p.rt, LANE, &args)?;
            // As products of one matrix: k + 64 additions at most, in which tensor cores may truncate, and the bias.
            let want = |i: usize| {
                let (place, row) = (i / n, i % n + if i / n == 0 { n } else { 0 });
                let mut sum = f64::from(biases[row]);
                let mut size = sum.abs();
                for (w, &x) in values[row * k..][..k].iter().zip(&x[place * k..]) {
                    let x = value(act, x);
                    sum += w * x;
                    size += (w * x).abs() + part[row] * x.abs();
                }
                (sum, 2.0 * (k + 64) as f64 * U * size)
            };
            Ok(Worst::of(&p.floats(&y)?, (0..places * n).map(want)))
        });
    }
}
