//! The driver: whether there is one, how new it is, which devices it has.

use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};

use super::errors::{describe, device, version};
use crate::Result;

/// A device as the driver lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedDevice {
    /// Its name.
    pub name: String,
    /// Compute capability: 10 * major + minor.
    pub sm: u32,
    /// Bytes of memory.
    pub memory: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory of one block.
    pub shared_per_block: u32,
    /// Bytes of the level-two cache.
    pub l2: u32,
    /// Bytes a second at the highest clock of its memory; 0 if the driver does not say.
    pub memory_bw: u64,
    /// Highest clock of its multiprocessors in kHz; 0 if the driver does not say.
    pub clock_khz: u32,
    /// Whether it can read and write host memory in place.
    pub maps_host_memory: bool,
}

/// A driver that works.
#[derive(Debug, Clone, Copy)]
pub struct Driver {
    /// `13000` is CUDA 13.0.
    pub version: u32,
}

/// Finds and starts the driver.
///
/// # Errors
/// If there is no driver, or it does not start.
pub fn find_driver() -> Result<Driver> {
    static FOUND: OnceLock<std::result::Result<Driver, (String, String)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let what = || "`device` cuda".to_owned();
        // SAFETY: loading the driver runs its initialisers, as in every CUDA program.
        if !unsafe { sys::is_culib_present() } {
            return Err((
                what(),
                "no CUDA driver found (libcuda.so.1); run on the CPU with `device` cpu".into(),
            ));
        }
        let mut number = 0;
        // SAFETY: the library is there, which is what these need; the number outlives the call.
        let (begun, asked) = unsafe { (sys::cuInit(0), sys::cuDriverGetVersion(&mut number)) };
        match (begun, asked) {
            (CUresult::CUDA_SUCCESS, CUresult::CUDA_SUCCESS) => Ok(Driver { version: number as u32 }),
            (CUresult::CUDA_ERROR_NO_DEVICE, _) => {
                Err((what(), "the CUDA driver finds no GPU; run on the CPU with `device` cpu".into()))
            }
            (CUresult::CUDA_ERROR_STUB_LIBRARY, _) => Err((
                what(),
                "the libcuda.so found first is the toolkit's stub, not a driver; mend LD_LIBRARY_PATH".into(),
            )),
            (CUresult::CUDA_SUCCESS, problem) | (problem, _) => {
                let known = if number > 0 { format!(" {}", version(number as u32)) } else { String::new() };
                Err((
                    what(),
                    format!(
                        "the CUDA driver{known} does not start: {}; is its kernel module of the same version?",
                        describe(problem)
                    ),
                ))
            }
        }
    });
    found.clone().map_err(|(what, problem)| device(what, problem))
}

impl Driver {
    /// The driver's devices.
    ///
    /// # Errors
    /// The driver's error.
    pub fn devices(&self) -> Result<Vec<ListedDevice>> {
        let mut count = 0;
        // SAFETY: the driver was started; the number outlives the call.
        check("CUDA driver", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        (0..count as u32).map(|ordinal| listed(self.device(ordinal)?)).collect()
    }

    /// The handle of a device.
    pub(super) fn device(&self, ordinal: u32) -> Result<CUdevice> {
        let mut count = 0;
        // SAFETY: as above.
        check("CUDA driver", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        if ordinal >= count as u32 {
            let has = match count {
                0 => "no GPU is visible (CUDA_VISIBLE_DEVICES?)".to_owned(),
                1 => "there is one GPU, cuda:0".to_owned(),
                n => format!("there are {n} GPUs, cuda:0 to cuda:{}", n - 1),
            };
            return Err(device(format!("`device` cuda:{ordinal}"), format!("no such device; {has}")));
        }
        let mut handle = 0;
        // SAFETY: as above.
        check("CUDA driver", unsafe { sys::cuDeviceGet(&mut handle, ordinal as i32) })?;
        Ok(handle)
    }
}

pub(super) fn check(what: &str, code: CUresult) -> Result<()> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(device(what, describe(code))) }
}

/// Queries the properties of a device.
pub(super) fn listed(handle: CUdevice) -> Result<ListedDevice> {
    use CUdevice_attribute::*;
    let attribute = |which| -> Result<u32> {
        let mut value = 0;
        // SAFETY: a device of the driver, which was started; the number outlives the call.
        check("CUDA driver", unsafe { sys::cuDeviceGetAttribute(&mut value, which, handle) })?;
        Ok(value as u32)
    };
    // Two transfers a cycle.
    let transfers = 2 * 1000 * u64::from(attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0));
    let width = u64::from(attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0)) / 8;
    let mut name = [0u8; 256];
    // SAFETY: as above; the driver writes at most the length given, with a NUL.
    check("CUDA driver", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, handle)
    })?;
    let mut memory = 0usize;
    // SAFETY: as above.
    check("CUDA driver", unsafe { sys::cuDeviceTotalMem_v2(&mut memory, handle) })?;
    let end = name.iter().position(|&b| b == 0).unwrap_or(name.len());
    Ok(ListedDevice {
        name: String::from_utf8_lossy(&name[..end]).into_owned(),
        sm: 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        memory: memory as u64,
        multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        l2: attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        memory_bw: transfers.saturating_mul(width),
        clock_khz: attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE).unwrap_or(0),
        maps_host_memory: attribute(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)? != 0,
    })
}
