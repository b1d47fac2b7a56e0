//! Collects the results of a step: logits or tokens of the rows that wanted them.

use super::chain::Chain;
use super::part::Part;
use super::{HostSide, RealMachine};
use crate::Result;
use crate::device::Lane;
use crate::program::Side;

impl RealMachine {
    /// Waits for the head and copies its results to their places.
    pub(super) fn collect(&mut self, parts: &[Part<'_>], chains: &[Chain], pick: bool) -> Result<()> {
        let (logits, tokens) = self.expected;
        self.argmax.resize(self.argmax.len().max(tokens), None);
        if let (Some(HostSide::Inline(_)), [part], false) = (&self.host, parts, pick)
            && part.places.iter().copied().eq(0..logits)
        {
            self.in_place = true;
            return Ok(());
        }
        self.logits.resize(self.logits.len().max(logits * self.spec.vocab), 0.0);
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

    fn download(&mut self, sub_batch: usize, part: &Part<'_>, pick: bool) -> Result<()> {
        if part.places.is_empty() {
            return Ok(());
        }
        let device = self.device.as_ref().expect("a device");
        let (ws, vocab, rows) = (&device.parts[sub_batch].ws, self.spec.vocab, part.places.len());
        let from = if pick { ws.picked(rows) } else { ws.logit_rows(&device.shape, &(0..rows)) };
        self.bytes.resize(from.bytes, 0);
        device.runtime.download(Lane::Compute, from.ptr, &mut self.bytes)?;
        if pick {
            part.places
                .iter()
                .zip(ws.picked_tokens(&self.bytes))
                .for_each(|(&p, token)| self.argmax[p] = token);
            return Ok(());
        }
        for (&place, row) in part.places.iter().zip(self.bytes.chunks_exact(4 * vocab)) {
            let floats = row.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let to = self.logits[place * vocab..(place + 1) * vocab].iter_mut();
            to.zip(floats).for_each(|(to, x)| *to = x);
        }
        Ok(())
    }
}
