//! Asynchronous products of a warpgroup (PTX ISA 9.7.15): d[64][n] += a[64][16] * b[n][16]^T.
//!
//! Each warp of the four has 16 rows. A product may read its operands at any time until its group has been waited for, and
//! its registers have no value until then. It runs there, as late as it may, or at once.

use super::Context;
use super::bulk::swizzled;
use super::lanes::Words;
use super::spaces::Shared;
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem};
use crate::instruction::Wgmma;
use crate::number::{Format, canonical};
use crate::options::Landing;

/// A NaN that no arithmetic makes: what accumulators hold in flight.
const IN_FLIGHT: u32 = 0x7fdf_1e1d;

/// A product that has not run.
#[derive(Debug)]
struct Product {
    wgmma: Wgmma,
    group: u32,
    a: Operand,
    b: u64,
    accumulate: bool,
}

#[derive(Debug)]
enum Operand {
    Registers(Box<[Words; 4]>),
    Descriptor(u64),
}

/// Accumulators in flight: registers, what they hold for the products so far, and for how many.
#[derive(Debug)]
struct Sums {
    first: u32,
    values: Vec<Words>,
    pending: u32,
}

/// A warp's products in flight.
#[derive(Debug, Default)]
pub(crate) struct Products {
    queue: Vec<Product>,
    groups: u32,
    sums: Vec<Sums>,
}

impl Products {
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }
}

impl Warp {
    pub(super) fn wgmma(&mut self, cx: &mut Context<'_>, wgmma: &Wgmma) -> Outcome {
        let fault = |problem: &str| Problem::of_warp(FaultKind::Operand(problem.into()));
        let one = |values: &[u64; 32]| values.iter().all(|v| *v == values[0]).then_some(values[0]);
        let descriptor =
            |slot: u32| one(&self.doubles[slot as usize]).ok_or_else(|| fault("descriptors of lanes differ"));
        let a = match wgmma.a_descriptor {
            Some(slot) => Operand::Descriptor(descriptor(slot)?),
            None => Operand::Registers(Box::new(wgmma.a.map(|r| self.words[r as usize]))),
        };
        let b = descriptor(wgmma.b)?;
        let accumulate = match self.predicates[wgmma.accumulate as usize] {
            0 => false,
            u32::MAX => true,
            _ => return Err(fault("some lanes accumulate, others do not")),
        };
        let first = wgmma.d[0];
        let product = Product { wgmma: wgmma.clone(), group: self.products.groups, a, b, accumulate };
        // What is read must be there already: the instruction that waits knows nothing of it.
        operands(&product, &cx.shared, self.number % 4).map_err(Problem::of_warp)?;
        if !self.products.sums.iter().any(|s| s.first == first) {
            let values = wgmma.d.iter().map(|r| self.words[*r as usize]).collect();
            self.products.sums.push(Sums { first, values, pending: 0 });
            for r in &wgmma.d {
                self.words[*r as usize] = [IN_FLIGHT; 32];
            }
        }
        if let Some(sums) = self.products.sums.iter_mut().find(|s| s.first == first) {
            sums.pending += 1;
        }
        self.products.queue.push(product);
        cx.stats.mma += wgmma.d.len() as u64 / 4;
        if cx.options.copies == Landing::AtOnce { self.run_products(cx, u32::MAX) } else { Ok(()) }
    }

    pub(super) fn commit_products(&mut self) {
        self.products.groups += 1;
    }

    /// Until at most `pending` groups run.
    pub(super) fn wait_products(&mut self, cx: &mut Context<'_>, pending: u32) -> Outcome {
        self.run_products(cx, self.products.groups.saturating_sub(pending))
    }

    /// Runs the products of groups before `end`.
    fn run_products(&mut self, cx: &mut Context<'_>, end: u32) -> Outcome {
        let done = self.products.queue.iter().take_while(|p| p.group < end).count();
        let products: Vec<Product> = self.products.queue.drain(..done).collect();
        for product in products {
            let (a, b) = operands(&product, &cx.shared, self.number % 4).map_err(Problem::of_warp)?;
            let first = product.wgmma.d[0];
            let Some(at) = self.products.sums.iter().position(|s| s.first == first) else { continue };
            let sums = &mut self.products.sums[at];
            if sums.values.len() != product.wgmma.d.len() {
                let problem = "accumulators in flight with another n".into();
                return Err(Problem::of_warp(FaultKind::Operand(problem)));
            }
            multiply(&mut sums.values, &a, &b, product.accumulate);
            sums.pending -= 1;
            if sums.pending > 0 {
                continue;
            }
            let sums = self.products.sums.swap_remove(at);
            for (r, values) in product.wgmma.d.iter().zip(sums.values) {
                let register = &mut self.words[*r as usize];
                if *register != [IN_FLIGHT; 32] {
                    let problem = "accumulators were written while a product had them".into();
                    return Err(Problem::of_warp(FaultKind::Operand(problem)));
                }
                *register = values;
            }
        }
        Ok(())
    }
}

/// Start, leading and stride offset of a descriptor, in bytes (9.7.15.5.1.2.2).
fn offsets(descriptor: u64) -> Result<[u64; 3], FaultKind> {
    if descriptor >> 62 != 1 || descriptor >> 49 & 7 != 0 {
        return Err(FaultKind::Operand(format!("descriptor {descriptor:#x}: swizzle by 128 bytes only")));
    }
    Ok([0, 16, 32].map(|at| (descriptor >> at & 0x3fff) << 4))
}

/// 8 elements next to each other.
fn chunk(shared: &Shared, address: u64, format: Format) -> Result<[f32; 8], FaultKind> {
    let mut bytes = [0; 16];
    shared.read(swizzled(address), &mut bytes)?;
    Ok(std::array::from_fn(|i| format.value(u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))))
}

/// Rows of 16 elements along k: of a from `first` on, or of b.
fn by_k(
    shared: &Shared,
    descriptor: u64,
    rows: std::ops::Range<u64>,
    format: Format,
) -> Result<Vec<[f32; 16]>, FaultKind> {
    let [start, _, stride] = offsets(descriptor)?;
    rows.map(|row| {
        let at = start + row / 8 * stride + row % 8 * 128;
        let (low, high) = (chunk(shared, at, format)?, chunk(shared, at + 16, format)?);
        Ok(std::array::from_fn(|k| if k < 8 { low[k] } else { high[k - 8] }))
    })
    .collect()
}

/// b whose rows run along n: 64 columns in a line of 128 bytes, the next 64 `leading` bytes on.
fn by_n(shared: &Shared, descriptor: u64, n: usize, format: Format) -> Result<Vec<[f32; 16]>, FaultKind> {
    let [start, leading, stride] = offsets(descriptor)?;
    let mut columns = vec![[0.0; 16]; n];
    for k in 0..16u64 {
        for c in 0..n as u64 / 8 {
            let at = start + c / 8 * leading + k / 8 * stride + k % 8 * 128 + c % 8 * 16;
            for (i, value) in chunk(shared, at, format)?.into_iter().enumerate() {
                columns[c as usize * 8 + i][k as usize] = value;
            }
        }
    }
    Ok(columns)
}

/// A warp's 16 rows of a, and all of b as [n][16].
fn operands(p: &Product, shared: &Shared, warp: u32) -> Result<(Vec<[f32; 16]>, Vec<[f32; 16]>), FaultKind> {
    let (n, format) = (p.wgmma.d.len() * 2, p.wgmma.format);
    let a = match &p.a {
        Operand::Descriptor(a) => by_k(shared, *a, u64::from(warp) * 16..u64::from(warp) * 16 + 16, format)?,
        // As a of mma m16n8k16.
        Operand::Registers(words) => {
            let mut a = vec![[0.0; 16]; 16];
            for lane in 0..32 {
                for (i, word) in words.iter().enumerate() {
                    for half in 0..2 {
                        let (row, col) = (lane / 4 + 8 * (i % 2), lane % 4 * 2 + 8 * (i / 2) + half);
                        a[row][col] = format.value(word[lane] >> (16 * half) & 0xffff);
                    }
                }
            }
            a
        }
    };
    let b =
        if p.wgmma.b_by_n { by_n(shared, p.b, n, format)? } else { by_k(shared, p.b, 0..n as u64, format)? };
    Ok((a, b))
}

/// d[4 j + i] of a lane: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2. Sums are in the order of k.
fn multiply(d: &mut [Words], a: &[[f32; 16]], b: &[[f32; 16]], accumulate: bool) {
    for (i, values) in d.iter_mut().enumerate() {
        for (lane, value) in values.iter_mut().enumerate() {
            let (row, col) = (lane / 4 + 8 * (i % 4 / 2), i / 4 * 8 + lane % 4 * 2 + i % 2);
            let start = if accumulate { f32::from_bits(*value) } else { 0.0 };
            let sum = a[row].iter().zip(&b[col]).fold(start, |sum, (x, y)| sum + x * y);
            *value = canonical(sum);
        }
    }
}
