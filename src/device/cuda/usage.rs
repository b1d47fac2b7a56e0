//! The resources that the driver's assembler gave a kernel: its registers and local memory on this device.

use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUfunction_attribute};

use super::CudaRuntime;
use super::errors::device;
use crate::Result;

/// Resources of a loaded kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelUsage {
    /// Registers per thread at entry (`setmaxnreg` moves them later).
    pub registers: u32,
    /// Bytes of local memory per thread: spills, and arrays indexed at run time.
    pub local: u32,
    /// Bytes of static shared memory.
    pub shared: u32,
    /// How long this call took to load the kernel. The first kernel of a file loads, and may compile, the file.
    pub load: Duration,
}

impl CudaRuntime {
    /// Loads a kernel, if it is not loaded yet, and reads its attributes.
    ///
    /// # Errors
    /// If there is no such kernel for this device, or the driver cannot load it.
    pub fn kernel_usage(&self, kernel: &str) -> Result<KernelUsage> {
        let Some(found) = self.modules.get(kernel) else {
            return Err(device(kernel, "this program has no such kernel for this device"));
        };
        self.context.bind()?;
        let begun = Instant::now();
        let function = self.modules.function(found, 0)?;
        let read = |which| -> Result<u32> {
            let mut value = 0;
            // SAFETY: a loaded function, and a number that outlives the call.
            let code = unsafe { sys::cuFuncGetAttribute(&mut value, which, function) };
            self.context.check(&format!("kernel {kernel}: its attributes"), code)?;
            Ok(value.max(0) as u32)
        };
        let registers = read(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        let local = read(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        let shared = read(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        // The time is taken only now: a driver that loads lazily does so at the queries above.
        Ok(KernelUsage { registers, local, shared, load: begun.elapsed() })
    }
}
