//! What a step leaves behind: logits or tokens of the rows that wanted them, where the caller expects them.

use super::run::Part;
use super::{HostSide, RealMachine};
use crate::Result;
use crate::device::runtime::Lane;
use crate::program::Side;

impl RealMachine {
    /// Waits for the head and copies what it left to its places.
    pub(super) fn collect(&mut self, parts: &[Part<'_>], pick: bool) -> Result<()> {
        if self.placement.head == Side::Device {
            return parts.iter().enumerate().try_for_each(|(b, part)| self.from_device(b, part, pick));
        }
        if let Some(HostSide::Lane(lane)) = &self.host {
            lane.wait_all()?;
        }
        let (vocab, host) = (self.spec.vocab, self.host.as_mut().expect("a host"));
        let (logits, argmax) = (&mut self.logits, &mut self.argmax);
        host.with(|half| {
            for (part, done) in parts.iter().zip(&half.parts) {
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

    fn from_device(&mut self, sub_batch: usize, part: &Part<'_>, pick: bool) -> Result<()> {
        if part.places.is_empty() {
            return Ok(());
        }
        let device = self.device.as_ref().expect("a device");
        let ws = &device.parts[sub_batch].ws;
        let (from, width) = if pick { (ws.argmax, 1) } else { (ws.logits, self.spec.vocab) };
        self.bytes.resize(4 * width * part.places.len(), 0);
        device.runtime.download(Lane::Compute, from, &mut self.bytes)?;
        for (&place, row) in part.places.iter().zip(self.bytes.chunks_exact(4 * width)) {
            let words = row.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            match pick {
                true => self.argmax[place..place + 1].iter_mut().zip(words).for_each(|(to, word)| *to = word),
                false => self.logits[place * width..(place + 1) * width]
                    .iter_mut()
                    .zip(words)
                    .for_each(|(to, word)| *to = f32::from_bits(word)),
            }
        }
        Ok(())
    }
}
