//! Loads a module into the driver, as machine code or PTX.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::{self, CUjit_option, CUmodule, CUresult};

use super::context::Context;
use super::errors::{describe, device, is_fatal, least_cuda, loads_code, too_old};
use crate::device::built::{CODE_CUDA, Code, Module};
use crate::device::notice;
use crate::{Error, Result};

/// Loads modules for one device.
pub(super) struct Loader {
    context: Arc<Context>,
    /// The device's real compute capability, even if it pretends to have another.
    sm: u32,
    /// CUDA version that the driver knows.
    driver: u32,
    /// Set once the driver has refused machine code that it should load; machine code is then no longer tried.
    refused: AtomicBool,
}

impl Loader {
    pub fn new(context: Arc<Context>, sm: u32, driver: u32) -> Loader {
        Loader { context, sm, driver, refused: AtomicBool::new(false) }
    }

    /// The machine code to try first, if this device and driver can load any.
    fn code(&self, module: &Module) -> Option<&'static Code> {
        let may = loads_code(CODE_CUDA, self.driver) && !self.refused.load(Ordering::Relaxed);
        module.code_for(self.sm).filter(|_| may)
    }

    /// Whether the driver reads the module's PTX.
    fn reads_ptx(&self, module: &Module) -> bool {
        least_cuda(module.version) <= self.driver
    }

    /// Whether the module can be loaded in any form.
    ///
    /// # Errors
    /// If it cannot, naming the driver version that could.
    pub fn check(&self, module: &Module) -> Result<()> {
        match self.code(module).is_some() || self.reads_ptx(module) {
            true => Ok(()),
            false => Err(too_old(&self.context.name, module.version, self.driver)),
        }
    }

    /// Loads machine code if there is any for the device; otherwise, or if the driver refuses it, the driver compiles
    /// the PTX. The context must be current on this thread.
    ///
    /// # Errors
    /// If memory is exhausted, the driver is too old for the PTX, or the driver's compiler reports an error.
    pub fn load(&self, module: &Module) -> Result<CUmodule> {
        let file = module.name.split('.').next().unwrap_or_default();
        if let Some(code) = self.code(module) {
            let what = format!("cuda/{file}.cu for {}", code.sm);
            match give(&code.image()) {
                Ok(handle) => return Ok(handle),
                Err((CUresult::CUDA_ERROR_OUT_OF_MEMORY, _)) => return Err(self.no_memory(&what)),
                Err((problem, _)) if is_fatal(problem) => {
                    self.context.check(&what, problem)?;
                }
                Err((problem, _)) => {
                    if !self.refused.swap(true, Ordering::Relaxed) {
                        notice::say(&format!(
                            "{}: the driver refuses this program's machine code for {} ({}); it compiles the kernels \
                             instead, which takes longer the first time",
                            self.context.name,
                            code.sm,
                            describe(problem)
                        ));
                    }
                }
            }
        }
        let what = format!("cuda/{file}.cu for {}", module.target());
        let mut text = module.ptx();
        text.push(0);
        match give(&text) {
            Ok(handle) => Ok(handle),
            Err((CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, _)) => {
                Err(too_old(&self.context.name, module.version, self.driver))
            }
            Err((CUresult::CUDA_ERROR_OUT_OF_MEMORY, _)) => Err(self.no_memory(&what)),
            Err((problem, said)) => {
                let colon = if said.is_empty() { "" } else { ": " };
                let sentence = format!(
                    "{what}: the driver cannot load it: {}{colon}{said}; update the driver, or run on the CPU with \
                     `device` cpu",
                    describe(problem)
                );
                match self.context.check(&what, problem) {
                    Err(lost) if self.context.is_lost() => Err(lost),
                    _ => Err(device(&self.context.name, sentence)),
                }
            }
        }
    }

    fn no_memory(&self, what: &str) -> Error {
        Error::Capacity(format!(
            "{}: no memory left to load {what}; grant the program less (`gpu_memory`)",
            self.context.name
        ))
    }
}

/// Passes an image to the driver: machine code, or PTX that ends in NUL. On failure returns the error code and the
/// compiler's log.
fn give(image: &[u8]) -> std::result::Result<CUmodule, (CUresult, String)> {
    let mut log = vec![0u8; 16 << 10];
    let mut options = [
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        CUjit_option::CU_JIT_GENERATE_LINE_INFO,
    ];
    // The driver takes numeric option values in place of pointers.
    let size = std::ptr::without_provenance_mut::<c_void>(log.len());
    let yes = std::ptr::without_provenance_mut::<c_void>(1);
    let mut values = [log.as_mut_ptr().cast::<c_void>(), size, yes];
    let mut handle = std::ptr::null_mut();
    // SAFETY: an image is an ELF file, which knows its length, or text that ends in NUL; there are as many values as
    // options, of the kinds that these take; the driver writes at most the size given to the log.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut handle,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    match code {
        CUresult::CUDA_SUCCESS => Ok(handle),
        code => {
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            Err((code, String::from_utf8_lossy(&log[..end]).trim().to_owned()))
        }
    }
}
