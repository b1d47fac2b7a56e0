//! Collects the results of a step: logits or tokens of the rows that wanted them.

use super::cohort_turn::CohortJobs;
use super::part::Part;
use super::{HostSide, RealMachine};
use crate::Result;
use crate::device::{Lane, TOP_BYTES, top_error, top_of};
use crate::program::Side;
use crate::text::Top;

impl RealMachine {
    /// Waits for the head and copies its results to their places.
    pub(super) fn collect(&mut self, parts: &[Part<'_>], chains: &[CohortJobs], pick: bool) -> Result<()> {
        let (logits, tokens) = self.expected;
        self.argmax.resize(self.argmax.len().max(tokens), None);
        if let (Some(HostSide::Inline(_)), [part], false) = (&self.host, parts, pick)
            && part.places.iter().copied().eq(0..logits)
        {
            self.in_place = true;
            return Ok(());
        }
        if self.factors.is_empty() {
            self.logits.resize(self.logits.len().max(logits * self.spec.vocab), 0.0);
        }
        let there: Vec<bool> = (0..parts.len()).map(|b| self.has_logits(b, chains)).collect();
        if self.placement.head == Side::Device {
            let mut done = parts.iter().enumerate().filter(|&(b, _)| there[b]);
            return done.try_for_each(|(b, part)| self.download(b, part, pick));
        }
        if let Some(HostSide::Lane(lane)) = &self.host {
            lane.wait_all()?;
        }
        let (vocab, host) = (self.spec.vocab, self.host.as_mut().expect("a host"));
        let (logits, argmax) = (&mut self.logits, &mut self.argmax);
        host.with(|half| {
            for ((part, done), _) in parts.iter().zip(&half.parts).zip(&there).filter(|(_, there)| **there) {
                for (i, &place) in part.places.iter().enumerate() {
                    match pick {
                        true => argmax[place] = done.picked[i],
                        false => logits[place * vocab..(place + 1) * vocab]
                            .copy_from_slice(done.ws.logits.rows(i..i + 1)),
                    }
                }
            }
        });
        Ok(())
    }

    /// The logits of the last step, `[rows that wanted them][V]`.
    pub fn logits(&self) -> &[f32] {
        match &self.host {
            Some(HostSide::Inline(half)) if self.in_place => half.parts[0].ws.logits.rows(0..self.expected.0),
            _ => &self.logits[..self.expected.0 * self.spec.vocab],
        }
    }

    /// The likeliest token of each row of the last step that wanted logits, if tokens were requested.
    pub fn argmax(&self) -> &[Option<u32>] {
        &self.argmax[..self.expected.1]
    }

    /// The likeliest tokens of a row of the last step, if they were expected and the logits are on a device.
    pub fn top(&self, row: usize) -> Option<&Top> {
        self.tops.get(row)?.as_ref()
    }

    /// The logits of one row of the last step, which the caller may change. Those that have stayed on the device are
    /// copied from there.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn logits_row(&mut self, row: usize) -> Result<&mut [f32]> {
        let vocab = self.spec.vocab;
        let own = row * vocab..(row + 1) * vocab;
        self.logits.resize(self.logits.len().max(own.end), 0.0);
        if let (Some(HostSide::Inline(half)), true) = (&self.host, self.in_place) {
            self.logits[own.clone()].copy_from_slice(half.parts[0].ws.logits.rows(row..row + 1));
        }
        if let Some((sub_batch, at)) = self.stayed.get_mut(row).and_then(Option::take) {
            let device = self.device.as_ref().expect("a device");
            let from = device.parts[sub_batch].ws.logit_rows(&device.shape, &(at..at + 1));
            device.runtime.download(Lane::Compute, from.ptr, as_bytes(&mut self.logits[own.clone()]))?;
            self.crossed.add_to_host(from.bytes);
        }
        Ok(&mut self.logits[own])
    }

    fn download(&mut self, sub_batch: usize, part: &Part<'_>, pick: bool) -> Result<()> {
        let Some(&first) = part.places.first() else { return Ok(()) };
        let device = self.device.as_ref().expect("a device");
        let (ws, vocab, rows) = (&device.parts[sub_batch].ws, self.spec.vocab, part.places.len());
        let tops = !pick && !self.factors.is_empty();
        let logits = ws.logit_rows(&device.shape, &(0..rows));
        if !pick && !tops && part.places.iter().copied().eq(first..first + rows) {
            let to = &mut self.logits[first * vocab..(first + rows) * vocab];
            device.runtime.download(Lane::Compute, logits.ptr, as_bytes(to))?;
            self.crossed.add_to_host(logits.bytes);
            return Ok(());
        }
        if tops {
            let factors: Vec<f32> = part.places.iter().map(|&place| self.factors[place]).collect();
            device.accel.top(Lane::Compute, &device.shape, ws, &factors)?;
        }
        let from = match (pick, tops) {
            (true, _) => ws.picked(rows),
            (_, true) => ws.top_rows(rows),
            _ => logits,
        };
        self.bytes.resize(from.bytes, 0);
        device.runtime.download(Lane::Compute, from.ptr, &mut self.bytes)?;
        self.crossed.add_to_host(from.bytes);
        if pick {
            part.places
                .iter()
                .zip(ws.picked_tokens(&self.bytes))
                .for_each(|(&p, token)| self.argmax[p] = token);
            return Ok(());
        }
        if tops {
            let error = top_error(vocab);
            for (i, (&place, row)) in part.places.iter().zip(self.bytes.chunks_exact(TOP_BYTES)).enumerate() {
                let (likeliest, sum) = top_of(row, vocab);
                self.tops[place] = Some(Top { likeliest, vocab, factor: self.factors[place], sum, error });
                self.stayed[place] = Some((sub_batch, i));
            }
            return Ok(());
        }
        for (&place, row) in part.places.iter().zip(self.bytes.chunks_exact(4 * vocab)) {
            as_bytes(&mut self.logits[place * vocab..(place + 1) * vocab]).copy_from_slice(row);
        }
        Ok(())
    }
}

/// The bytes of numbers, in the order of this machine, which is that of every device.
fn as_bytes(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: the same memory; every pattern of bits is a number, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
