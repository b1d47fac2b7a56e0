//! The vector registers of an interrupted thread. They are in the signal frame, in the standard format of XSAVE. CPUID gives the
//! offsets of its parts; since a virtual machine may take long to execute CPUID, it is queried once, before the handler is
//! installed.
//!
//! refs: Intel SDM vol. 1 ch. 13 (XSAVE)

use std::arch::x86_64::__cpuid_count;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Offsets of the upper halves of zmm0-15, and of zmm16-31, in the format of XSAVE; 0: unknown.
static UPPER: AtomicUsize = AtomicUsize::new(0);
static HIGH: AtomicUsize = AtomicUsize::new(0);

/// Determines where registers lie. Call it before the handler is installed.
pub fn prepare() {
    if is_x86_feature_detected!("avx512f") {
        UPPER.store(__cpuid_count(0xd, 6).ebx as usize, Ordering::Relaxed);
        HIGH.store(__cpuid_count(0xd, 7).ebx as usize, Ordering::Relaxed);
    }
}

/// Vector registers in a signal frame: (bit of XSTATE_BV, offset, bytes a register) of their parts.
pub struct Registers {
    area: *mut u8,
    parts: [(u32, usize, usize); 4],
    /// Parts of registers 0 to 15.
    low: &'static [usize],
}

impl Registers {
    /// All registers of 512 bits; `None` if the frame has no AVX-512 state.
    ///
    /// # Safety
    /// `area` is the `fpregs` of a signal context that the kernel passed, and nothing else refers to it.
    pub unsafe fn zmm(area: *mut u8) -> Option<Registers> {
        let (upper, high) = (UPPER.load(Ordering::Relaxed), HIGH.load(Ordering::Relaxed));
        // SAFETY: the caller's promise.
        let features = unsafe { features(area) }?;
        let known = features >> 5 & 7 == 7 && upper != 0 && high != 0;
        let parts = [XMM, YMM, (6, upper, 32), (7, high, 64)];
        known.then_some(Registers { area, parts, low: &[0, 1, 2] })
    }

    /// Registers 0 to 15 of 256 bits, of which bytes 0 to 32 count; `None` if the frame has no AVX state.
    ///
    /// # Safety
    /// As [`Registers::zmm`].
    pub unsafe fn ymm(area: *mut u8) -> Option<Registers> {
        // SAFETY: the caller's promise.
        let features = unsafe { features(area) }?;
        (features >> 2 & 1 == 1).then_some(Registers { area, parts: [XMM, YMM, YMM, YMM], low: &[0, 1] })
    }

    /// The parts of register `r`, as indices, and its number within them.
    fn of_register(&self, r: u8) -> (&'static [usize], usize) {
        if r < 16 { (self.low, r as usize) } else { (&[3], r as usize - 16) }
    }

    /// XSTATE_BV: parts whose bit is clear are all zeros, whatever their bytes hold.
    fn present(&self) -> *mut u64 {
        self.area.wrapping_add(512).cast()
    }

    /// # Safety
    /// `r < 32`, or 16 of [`Registers::ymm`]; the frame still exists.
    pub unsafe fn read(&self, r: u8) -> [u8; 64] {
        let (mut out, mut at) = ([0u8; 64], 0);
        let (parts, i) = self.of_register(r);
        for &part in parts {
            let (bit, offset, bytes) = self.parts[part];
            // SAFETY: the frame has this part, as was checked, with 16 registers.
            unsafe {
                if self.present().read_unaligned() >> bit & 1 == 1 {
                    let from = self.area.add(offset + i * bytes);
                    from.copy_to_nonoverlapping(out.as_mut_ptr().add(at), bytes);
                }
            }
            at += bytes;
        }
        out
    }

    /// # Safety
    /// As [`Registers::read`].
    pub unsafe fn write(&self, r: u8, value: [u8; 64]) {
        let mut at = 0;
        let (parts, i) = self.of_register(r);
        for &part in parts {
            let (bit, offset, bytes) = self.parts[part];
            // SAFETY: as in `read`.
            unsafe {
                let present = self.present().read_unaligned();
                if present >> bit & 1 == 0 {
                    self.area.add(offset).write_bytes(0, 16 * bytes);
                    self.present().write_unaligned(present | 1 << bit);
                }
                let to = self.area.add(offset + i * bytes);
                to.copy_from_nonoverlapping(value.as_ptr().add(at), bytes);
            }
            at += bytes;
        }
    }
}

/// xmm0-15 from byte 160, upper halves of ymm0-15 from 576: these are fixed.
const XMM: (u32, usize, usize) = (1, 160, 16);
const YMM: (u32, usize, usize) = (2, 576, 16);

/// The features whose state a frame has; `None` if it has none but that of FXSAVE.
///
/// # Safety
/// As [`Registers::zmm`].
unsafe fn features(area: *mut u8) -> Option<u64> {
    if area.is_null() {
        return None;
    }
    // SAFETY: a frame has 512 bytes in the format of FXSAVE; those from 464 on are the kernel's own: a magic number,
    // a size, the features that follow.
    let (magic, features) = unsafe {
        (area.add(464).cast::<u32>().read_unaligned(), area.add(472).cast::<u64>().read_unaligned())
    };
    (magic == 0x4650_5853).then_some(features)
}
