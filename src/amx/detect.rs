//! May this process use AMX tiles? Three parties have to agree: the CPU (CPUID), the operating system's
//! context switch (XCR0), and, because the state is 8 KiB per thread, the kernel on request of each
//! process (`arch_prctl(ARCH_REQ_XCOMP_PERM)`).
//!
//! The permission covers existing threads and is inherited by new ones, but the kernel refuses it once a thread has an
//! alternate signal stack too small for the larger signal frame. So request it early, before pools start: [`hardware`]
//! does so on its first call.
//!
//! refs: Intel SDM vol. 1 ch. 18 (tiles), vol. 2 CPUID leaves 07H, 1DH, 1EH; Linux
//! Documentation/arch/x86/xstate.rst

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

const ARCH_GET_XCOMP_PERM: libc::c_int = 0x1022;
const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
/// XCR0 component of the tile configuration.
const XFEATURE_XTILECFG: u32 = 17;
/// XCR0 component of the tile data: the one that needs permission.
const XFEATURE_XTILEDATA: u32 = 18;

/// Whether this process may use AMX tiles in hardware: [`available`](super::available), without emulation.
///
/// # Errors
/// The first missing requirement, as a sentence.
pub fn hardware() -> Result<(), &'static str> {
    static FOUND: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *FOUND.get_or_init(|| cpu().and_then(|()| request_permission()))
}

/// Checks CPUID and XCR0.
fn cpu() -> Result<(), &'static str> {
    let max_leaf = __cpuid(0).eax;
    let leaf7 = if max_leaf >= 7 { __cpuid_count(7, 0).edx } else { 0 };
    features(leaf7)?;
    // CPUID(1).ECX[27]: the OS uses XSAVE, so XGETBV does not fault.
    if __cpuid(1).ecx & (1 << 27) == 0 {
        return Err("the operating system does not use xsave, so it cannot keep tiles");
    }
    // SAFETY: OSXSAVE is set (checked above), as XGETBV requires.
    let xcr0 = unsafe { xcr0() };
    tile_state(xcr0)?;
    if max_leaf < 0x1e {
        return Err("this CPU describes no tile palette (CPUID leaf 1DH is missing)");
    }
    let palette = __cpuid_count(0x1d, 1);
    let tmul = __cpuid_count(0x1e, 0).ebx;
    palette_one(palette.eax, palette.ebx, palette.ecx, tmul)
}

/// CPUID(7,0).EDX: amx_bf16 is bit 22, amx_tile 24, amx_int8 25.
fn features(edx: u32) -> Result<(), &'static str> {
    let has = |bit: u32| edx >> bit & 1 == 1;
    match (has(24), has(22), has(25)) {
        (false, _, _) => Err("this CPU reports no amx_tile"),
        (_, false, _) => Err("this CPU reports no amx_bf16"),
        (_, _, false) => Err("this CPU reports no amx_int8"),
        _ => Ok(()),
    }
}

/// XCR0 bits 17 and 18: the OS saves tile configuration and data.
fn tile_state(xcr0: u64) -> Result<(), &'static str> {
    let both = 1 << XFEATURE_XTILECFG | 1 << XFEATURE_XTILEDATA;
    if xcr0 & both == both {
        Ok(())
    } else {
        Err(
            "the CPU has AMX, but the operating system (or hypervisor) does not enable tile state (XCR0 bits 17, 18)",
        )
    }
}

/// Checks that palette 1 is as the kernels here assume: 8 tiles of 16 rows of 64 bytes, products up to 16 x 64 bytes.
/// CPUID(1DH,1): EAX[31:16] bytes per tile, EBX[15:0] bytes per row, EBX[31:16] tile names, ECX[15:0]
/// rows; CPUID(1EH,0).EBX: [7:0] maximal K in rows, [23:8] maximal N in bytes.
fn palette_one(eax: u32, ebx: u32, ecx: u32, tmul: u32) -> Result<(), &'static str> {
    let (bytes_per_tile, bytes_per_row, names, rows) = (eax >> 16, ebx & 0xffff, ebx >> 16, ecx & 0xffff);
    let (max_k, max_n) = (tmul & 0xff, tmul >> 8 & 0xffff);
    if bytes_per_tile >= 1024 && bytes_per_row >= 64 && names >= 8 && rows >= 16 && max_k >= 16 && max_n >= 64
    {
        Ok(())
    } else {
        Err("this CPU's tile palette 1 is smaller than 8 tiles of 16 rows of 64 bytes")
    }
}

/// # Safety
/// CPUID(1).ECX\[27\] (OSXSAVE) must be set.
#[target_feature(enable = "xsave")]
unsafe fn xcr0() -> u64 {
    // SAFETY: the caller guarantees OSXSAVE; register 0 always exists.
    unsafe { _xgetbv(0) }
}

/// Asks the kernel for the 8 KiB of tile data per thread. The request may be repeated; the permission is never revoked.
fn request_permission() -> Result<(), &'static str> {
    // SAFETY: the two arch_prctl calls take an integer, and a pointer to a u64 that lives across the call.
    unsafe {
        if libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA as libc::c_ulong) != 0
        {
            return Err(match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EINVAL) => "the kernel knows no tile permission (Linux 5.16 or newer is needed)",
                Some(libc::ENOSPC) => {
                    "the kernel refused tile permission: a thread's alternate signal stack is too small for it"
                }
                _ => "the kernel refused tile permission (arch_prctl ARCH_REQ_XCOMP_PERM)",
            });
        }
        let mut granted = 0u64;
        let rc = libc::syscall(libc::SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &raw mut granted);
        if rc != 0 || granted >> XFEATURE_XTILEDATA & 1 == 0 {
            return Err("the kernel accepted the request for tile permission, but did not grant it");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_bit_has_its_own_reason() {
        let all = 1 << 22 | 1 << 24 | 1 << 25;
        assert_eq!(features(all), Ok(()));
        assert!(features(0).unwrap_err().contains("amx_tile"));
        assert!(features(all & !(1 << 22)).unwrap_err().contains("amx_bf16"));
        assert!(features(all & !(1 << 25)).unwrap_err().contains("amx_int8"));
        assert_eq!(tile_state(0x602e7), Ok(()));
        assert!(tile_state(0x202e7).is_err());
        assert!(tile_state(0x402e7).is_err());
    }

    #[test]
    fn sapphire_rapids_palette_is_accepted_and_smaller_ones_are_not() {
        // The values of a Xeon 8480: 8192 bytes in total, 1024 per tile, 64 per row, 8 names, 16 rows; K 16, N 64.
        assert_eq!(palette_one(0x0400_2000, 0x0008_0040, 0x10, 0x4010), Ok(()));
        assert!(palette_one(0x0400_2000, 0x0008_0040, 0x08, 0x4010).is_err());
        assert!(palette_one(0x0400_2000, 0x0004_0040, 0x10, 0x4010).is_err());
        assert!(palette_one(0x0400_2000, 0x0008_0040, 0x10, 0x2010).is_err());
    }

    #[test]
    fn the_answer_agrees_with_the_kernel() {
        let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let listed = ["amx_tile", "amx_bf16", "amx_int8"]
            .iter()
            .all(|f| flags.split_whitespace().any(|word| word == *f));
        match hardware() {
            Ok(()) => assert!(listed, "detected AMX that /proc/cpuinfo does not list"),
            Err(why) => {
                assert!(!listed || why.contains("kernel") || why.contains("operating system"), "{why}");
                println!("no AMX hardware here: {why}");
            }
        }
    }
}
