//! ldmatrix, movmatrix, mma (PTX ISA 9.7.14). A lane's group is lane / 4, its place in the group lane % 4.

use super::Context;
use super::bits::byte;
use super::lanes::Words;
use super::warp::Warp;
use crate::fault::{Outcome, Problem, Space};
use crate::instruction::{Address, Mma, MmaKind, Slot};
use crate::number::{Format, canonical};

impl Warp {
    /// Lane i gives the address of row i % 8 of matrix i / 8.
    pub(super) fn load_matrix(
        &mut self,
        cx: &mut Context<'_>,
        count: u8,
        transposed: bool,
        d: [Slot; 4],
        address: &Address,
    ) -> Outcome {
        let addresses = self.addresses(address);
        let matrices = usize::from(count);
        // Before compute capability 8.0 the other lanes' addresses must be valid too (9.7.14.5.15).
        let checked = if cx.kernel.checks_all_rows { 32 } else { matrices * 8 };
        let mut rows = [[0u16; 8]; 32];
        for (lane, at) in addresses.iter().enumerate().take(checked) {
            let mut bytes = [0; 16];
            super::access::align(Space::Shared, *at, 16)
                .and_then(|()| {
                    let used = lane < matrices * 8;
                    if used { cx.shared.read(*at, &mut bytes) } else { cx.shared.range(*at, 16).map(drop) }
                })
                .map_err(|kind| Problem::of_lane(lane, kind))?;
            rows[lane] = std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]));
        }
        for (matrix, d) in d.iter().enumerate().take(matrices) {
            let rows = &rows[matrix * 8..][..8];
            self.words[*d as usize] = std::array::from_fn(|lane| {
                let (group, place) = (lane / 4, lane % 4 * 2);
                let (low, high) = if transposed {
                    (rows[place][group], rows[place + 1][group])
                } else {
                    (rows[group][place], rows[group][place + 1])
                };
                u32::from(low) | u32::from(high) << 16
            });
        }
        Ok(())
    }

    pub(super) fn move_matrix(&mut self, d: Slot, a: Slot) {
        let a = self.words[a as usize];
        let element = |row: usize, col: usize| a[row * 4 + col / 2] >> (col % 2 * 16) & 0xffff;
        self.words[d as usize] = std::array::from_fn(|lane| {
            let (group, place) = (lane / 4, lane % 4 * 2);
            element(place, group) | element(place + 1, group) << 16
        });
    }

    pub(super) fn mma(&mut self, mma: &Mma) {
        let a = mma.a.map(|r| self.words[r as usize]);
        let b = mma.b.map(|r| self.words[r as usize]);
        let c = mma.c.map(|r| self.words[r as usize]);
        let (rows, d) = match mma.kind {
            MmaKind::Half { format, k } => (16, halves(format, k as usize, &a, &b, &c)),
            MmaKind::Bytes { m, k, a_signed, b_signed, saturate } => {
                (m as usize, bytes((m as usize, k as usize), (a_signed, b_signed), saturate, &a, &b, &c))
            }
        };
        for (to, values) in mma.d.iter().zip(d).take(rows / 4) {
            self.words[*to as usize] = values;
        }
    }
}

/// Element i of an accumulator: its row and column.
fn place(lane: usize, i: usize) -> (usize, usize) {
    (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2)
}

/// Products are exact in f32 (but for the ends of the range of bf16) and summed in f32 in the order of k. A device's own
/// order and truncation are not specified.
fn halves(format: Format, k: usize, a: &[Words; 4], b: &[Words; 2], c: &[Words; 4]) -> [Words; 4] {
    let (mut left, mut right, mut sum) = ([[0f32; 16]; 16], [[0f32; 8]; 16], [[0f32; 8]; 16]);
    for lane in 0..32 {
        let (group, place2) = (lane / 4, lane % 4 * 2);
        for part in 0..k / 8 {
            for half in 0..2 {
                let element = |word: u32| format.value(word >> (16 * half) & 0xffff);
                let col = part * 8 + place2 + half;
                left[group][col] = element(a[part * 2][lane]);
                left[group + 8][col] = element(a[part * 2 + 1][lane]);
                right[col][group] = element(b[part][lane]);
            }
        }
        for (i, c) in c.iter().enumerate() {
            let (row, col) = place(lane, i);
            sum[row][col] = f32::from_bits(c[lane]);
        }
    }
    for (sum, left) in sum.iter_mut().zip(&left) {
        for (x, right) in left.iter().zip(&right).take(k) {
            for (sum, y) in sum.iter_mut().zip(right) {
                *sum += x * y;
            }
        }
    }
    std::array::from_fn(|i| {
        std::array::from_fn(|lane| {
            let (row, col) = place(lane, i);
            canonical(sum[row][col])
        })
    })
}

/// Exact; the result wraps, or stops at the ends of its range.
fn bytes(
    (rows, k): (usize, usize),
    (a_signed, b_signed): (bool, bool),
    saturate: bool,
    a: &[Words; 4],
    b: &[Words; 2],
    c: &[Words; 4],
) -> [Words; 4] {
    let (mut left, mut right) = ([[0i32; 32]; 16], [[0i32; 32]; 8]);
    for lane in 0..32 {
        let (group, place4) = (lane / 4, lane % 4 * 4);
        for part in 0..k / 16 {
            for i in 0..4 {
                let col = part * 16 + place4 + i;
                for half in 0..rows / 8 {
                    let word = a[part * (rows / 8) + half][lane];
                    left[group + 8 * half][col] = byte(word, i as u32, a_signed);
                }
                right[group][col] = byte(b[part][lane], i as u32, b_signed);
            }
        }
    }
    std::array::from_fn(|i| {
        std::array::from_fn(|lane| {
            let (row, col) = place(lane, i);
            if row >= rows {
                return 0;
            }
            let dot: i32 = left[row].iter().zip(&right[col]).map(|(x, y)| x * y).sum();
            let c = c[i][lane] as i32;
            (if saturate { c.saturating_add(dot) } else { c.wrapping_add(dot) }) as u32
        })
    })
}
