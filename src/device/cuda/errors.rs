//! Translates the driver's error codes into sentences.

use std::ffi::{CStr, c_char};

use cudarc::driver::sys::{self, CUresult};

use crate::Error;

/// The driver's description of an error, with name and code: `an illegal memory access was encountered
/// (ILLEGAL_ADDRESS, 700)`.
pub(super) fn describe(code: CUresult) -> String {
    let text = |get: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the driver is loaded, since it gave `code`; it stores a pointer to a constant string.
        let known = unsafe { get(code, &mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: as above.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("{code:?}"));
    let name = name.trim_start_matches("CUDA_ERROR_");
    match text(sys::cuGetErrorString) {
        Some(what) => format!("{what} ({name}, {})", code as u32),
        None => format!("{name} ({})", code as u32),
    }
}

/// Whether the code means that the process's work on the device is over: every later call fails too.
pub(super) fn is_fatal(code: CUresult) -> bool {
    use CUresult::*;
    matches!(
        code,
        CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_DEVICE_UNAVAILABLE
            | CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_EXTERNAL_DEVICE
            // The code from a GPU that fell off the bus, or from a driver whose own state is damaged.
            | CUDA_ERROR_UNKNOWN
    )
}

/// The driver release that first knows a CUDA version (10 * (100 * major + minor), as `cuDriverGetVersion` says).
pub fn driver_release(cuda: u32) -> &'static str {
    match cuda {
        0..=12000 => "525",
        12001..=12010 => "530",
        12011..=12020 => "535",
        12021..=12030 => "545",
        12031..=12040 => "550",
        12041..=12050 => "555",
        12051..=12060 => "560",
        12061..=12080 => "570",
        12081..=12090 => "575",
        12091..=13000 => "580",
        13001..=13010 => "590",
        _ => "595",
    }
}

/// The oldest CUDA version with all driver functions that this program calls, whatever its kernels need.
const LEAST_CUDA: u32 = 12000;

/// The CUDA version whose driver runs this program with kernels in a version of the PTX language.
pub fn least_cuda((major, minor): (u32, u32)) -> u32 {
    let cuda = match (major, minor) {
        (..=7, _) => 11000,
        (8, 0..=4) => 12000 + 10 * minor,
        // 12.6 added nothing to the language.
        (8, 5) => 12050,
        (8, 6..) => 12000 + 10 * (minor + 1),
        (9.., minor) => 13000 + 1000 * (major - 9) + 10 * minor,
    };
    cuda.max(LEAST_CUDA)
}

/// Whether a driver loads machine code from the assembler of a CUDA release: it does for its own major version and
/// older ones, but not for later ones, since the file format changed.
pub(super) fn loads_code(made_by: u32, driver: u32) -> bool {
    driver >= LEAST_CUDA && made_by / 1000 <= driver / 1000
}

pub(super) fn too_old(name: &str, ptx: (u32, u32), driver: u32) -> Error {
    let needed = least_cuda(ptx);
    device(
        name,
        format!(
            "the driver is too old for this program's kernels: it knows CUDA {}, they are PTX {}.{} and need \
             CUDA {} (driver {} or later); update the driver, or run on the CPU with `device` cpu",
            version(driver),
            ptx.0,
            ptx.1,
            version(needed),
            driver_release(needed)
        ),
    )
}

/// `12.4` of 12040.
pub(super) fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

pub(super) fn device(what: impl Into<String>, problem: impl Into<String>) -> Error {
    Error::Device { what: what.into(), problem: problem.into() }
}

/// Formats bytes for readers.
pub(super) fn mib(bytes: u64) -> String {
    if bytes >= 10 << 30 {
        format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
    } else {
        format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        // <https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes>
        let table = [((8, 0), 12000), ((8, 2), 12020), ((8, 4), 12040), ((8, 7), 12080), ((8, 8), 12090)];
        for (ptx, cuda) in table {
            assert_eq!(least_cuda(ptx), cuda, "{ptx:?}");
        }
        assert_eq!((least_cuda((9, 0)), driver_release(13000)), (13000, "580"));
        assert_eq!((least_cuda((9, 1)), driver_release(12020)), (13010, "535"));
        assert_eq!((least_cuda((7, 8)), driver_release(least_cuda((7, 0)))), (12000, "525"));
        assert_eq!(version(12080), "12.8");
    }

    #[test]
    fn machine_code_of_a_later_major_release_is_not_for_a_driver() {
        for (made_by, driver, loads) in [
            (12090, 12000, true),
            (12090, 13000, true),
            (13000, 13000, true),
            (13000, 12090, false),
            (12000, 11080, false),
        ] {
            assert_eq!(loads_code(made_by, driver), loads, "{made_by} on {driver}");
        }
    }

    #[test]
    fn an_old_driver_is_told_what_is_needed() {
        let text = too_old("cuda:0 (NVIDIA T4)", (9, 0), 12020).to_string();
        for part in ["cuda:0 (NVIDIA T4)", "CUDA 12.2", "PTX 9.0", "CUDA 13.0", "driver 580"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let text = too_old("cuda:0 (NVIDIA T4)", (7, 8), 11040).to_string();
        assert!(text.contains("CUDA 12.0 (driver 525 or later)"), "{text}");
    }
}
