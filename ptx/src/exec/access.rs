//! Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.12).

use super::Context;
use super::lanes::{Doubles, lanes};
use super::spaces::within;
use super::warp::Warp;
use crate::fault::{FaultKind, Outcome, Problem, Space};
use crate::instruction::{Access, Address, Place};
use crate::memory::{CONSTANT_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Semantics};

/// Most bytes that a thread accesses at once.
const MOST: usize = 16;

/// The space that an address is in, and the address there.
pub(super) fn resolve(place: Place, address: u64) -> Result<(Space, u64), FaultKind> {
    let offset = address & (SHARED_WINDOW - 1);
    let window = address - offset;
    Ok(match place {
        Place::Shared => (Space::Shared, address),
        Place::Local => (Space::Local, address),
        Place::Param => (Space::Param, address),
        Place::Constant | Place::Global if window == CONSTANT_WINDOW => (Space::Constant, offset),
        Place::Global if window == 0 => (Space::Global, address),
        Place::Generic => match window {
            0 => (Space::Global, address),
            SHARED_WINDOW => (Space::Shared, offset),
            LOCAL_WINDOW => (Space::Local, offset),
            PARAM_WINDOW => (Space::Param, offset),
            CONSTANT_WINDOW => (Space::Constant, offset),
            _ => return Err(FaultKind::Operand(format!("{address:#x} is in no space"))),
        },
        Place::Constant | Place::Global => {
            return Err(FaultKind::Operand(format!("{address:#x} is an address of another space")));
        }
    })
}

/// Addresses must be multiples of all bytes of the access.
pub(super) fn align(space: Space, address: u64, bytes: u32) -> Result<(), FaultKind> {
    if address.is_multiple_of(u64::from(bytes)) {
        Ok(())
    } else {
        Err(FaultKind::Misaligned { space, address, bytes })
    }
}

/// Whether all 32 lanes access bytes that lie next to each other, in order.
fn is_row(addresses: &Doubles, bytes: u64, mask: u32) -> bool {
    mask == u32::MAX && (1..32).all(|i| addresses[i] == addresses[0].wrapping_add(i as u64 * bytes))
}

impl Warp {
    pub(super) fn addresses(&self, address: &Address) -> Doubles {
        let base = address.base as usize;
        if address.wide {
            self.doubles[base].map(|b| b.wrapping_add(address.offset as u64))
        } else {
            self.words[base].map(|b| u64::from(b.wrapping_add(address.offset as u32)))
        }
    }

    pub(super) fn load(&mut self, cx: &mut Context<'_>, access: &Access, mask: u32) -> Outcome {
        let each = usize::from(access.bytes) * usize::from(access.count);
        let addresses = self.addresses(&access.address);
        let mut buffer = [0u8; MOST * 32];
        let plain = matches!(access.semantics, Semantics::Weak | Semantics::Constant);
        let row = plain
            && access.place == Place::Global
            && is_row(&addresses, each as u64, mask)
            && addresses[0].is_multiple_of(each as u64)
            && addresses[0] < SHARED_WINDOW;
        // A row that the memory refuses is read again lane by lane, for the fault to name the thread.
        let done = row
            && cx.memory.read(addresses[0], &mut buffer[..each * 32], access.semantics).is_ok()
            && cx.note_read(addresses[0], each * 32, access.semantics).is_ok();
        if !done {
            for lane in lanes(mask) {
                let out = &mut buffer[lane * each..][..each];
                self.read(cx, access.place, lane, addresses[lane], out, access.semantics)
                    .map_err(|kind| Problem::of_lane(lane, kind))?;
            }
        }
        let bytes = usize::from(access.bytes);
        for (element, register) in access.registers[..usize::from(access.count)].iter().enumerate() {
            let at = |lane: usize| &buffer[lane * each + element * bytes..];
            let values: Doubles = match (bytes, access.signed) {
                (1, false) => std::array::from_fn(|i| u64::from(at(i)[0])),
                (1, true) => std::array::from_fn(|i| i64::from(at(i)[0] as i8) as u64),
                (2, false) => std::array::from_fn(|i| u64::from(u16::from_le_bytes(fixed(at(i))))),
                (2, true) => std::array::from_fn(|i| i64::from(i16::from_le_bytes(fixed(at(i)))) as u64),
                (4, false) => std::array::from_fn(|i| u64::from(u32::from_le_bytes(fixed(at(i))))),
                (4, true) => std::array::from_fn(|i| i64::from(i32::from_le_bytes(fixed(at(i)))) as u64),
                _ => std::array::from_fn(|i| u64::from_le_bytes(fixed(at(i)))),
            };
            self.set_values(*register, values, mask);
        }
        Ok(())
    }

    pub(super) fn store(&mut self, cx: &mut Context<'_>, access: &Access, mask: u32) -> Outcome {
        let bytes = usize::from(access.bytes);
        let each = bytes * usize::from(access.count);
        let addresses = self.addresses(&access.address);
        let mut buffer = [0u8; MOST * 32];
        for (element, register) in access.registers[..usize::from(access.count)].iter().enumerate() {
            let values = self.values(*register);
            for (lane, value) in values.iter().enumerate() {
                let at = lane * each + element * bytes;
                buffer[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
            }
        }
        let row = access.semantics == Semantics::Weak
            && access.place == Place::Global
            && is_row(&addresses, each as u64, mask)
            && addresses[0].is_multiple_of(each as u64)
            && addresses[0] < SHARED_WINDOW;
        if row
            && cx.note_write(addresses[0], each * 32).is_ok()
            && cx.memory.write(addresses[0], &buffer[..each * 32], Semantics::Weak).is_ok()
        {
            return Ok(());
        }
        for lane in lanes(mask) {
            let from = &buffer[lane * each..][..each];
            self.write(cx, access.place, lane, addresses[lane], from, access.semantics)
                .map_err(|kind| Problem::of_lane(lane, kind))?;
        }
        Ok(())
    }

    pub(super) fn read(
        &self,
        cx: &mut Context<'_>,
        place: Place,
        lane: usize,
        address: u64,
        out: &mut [u8],
        semantics: Semantics,
    ) -> Result<(), FaultKind> {
        let bytes = out.len() as u32;
        let (space, at) = resolve(place, address)?;
        align(space, at, bytes)?;
        match space {
            Space::Shared => cx.shared.read(at, out)?,
            Space::Local => {
                let own = &self.local[lane * self.local_bytes..][..self.local_bytes];
                out.copy_from_slice(&own[within(space, at, bytes, own.len())?]);
            }
            Space::Param => out.copy_from_slice(&cx.params[within(space, at, bytes, cx.params.len())?]),
            Space::Constant => {
                out.copy_from_slice(&cx.constants[within(space, at, bytes, cx.constants.len())?]);
            }
            Space::Global => {
                cx.note_read(at, out.len(), semantics)?;
                cx.memory.read(at, out, semantics)?;
            }
        }
        Ok(())
    }

    pub(super) fn write(
        &mut self,
        cx: &mut Context<'_>,
        place: Place,
        lane: usize,
        address: u64,
        bytes: &[u8],
        semantics: Semantics,
    ) -> Result<(), FaultKind> {
        let (space, at) = resolve(place, address)?;
        let length = bytes.len() as u32;
        align(space, at, length)?;
        match space {
            Space::Shared => cx.shared.write(at, bytes)?,
            Space::Local => {
                let own = &mut self.local[lane * self.local_bytes..][..self.local_bytes];
                let range = within(space, at, length, own.len())?;
                own[range].copy_from_slice(bytes);
            }
            Space::Param | Space::Constant => return Err(FaultKind::ReadOnly(space)),
            Space::Global => {
                cx.note_write(at, bytes.len())?;
                cx.memory.write(at, bytes, semantics)?;
            }
        }
        Ok(())
    }
}

fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[..N]);
    out
}
