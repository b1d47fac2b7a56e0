//! The kernels of this build that a device runs: of every file the best target, loaded when it is first used.

use std::collections::{BTreeSet, HashMap};
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUjit_option, CUmodule, CUresult};

use super::context::{Context, Relaxed};
use super::errors::{cuda_of_ptx, describe, device, driver_release, version};
use super::gate;
use crate::Result;
use crate::device::built::{self, Module};

/// Dynamic shared memory that every kernel may have without asking.
const SHARED_DEFAULT: u32 = 48 << 10;

/// A kernel that the device can run.
pub(super) struct Kernel {
    pub name: &'static str,
    /// Bytes of its parameter struct.
    pub params: u32,
    module: usize,
    function: OnceLock<Function>,
    /// Dynamic shared memory that it was granted.
    shared: AtomicU32,
}

#[derive(Clone, Copy)]
pub(super) struct Function(pub CUfunction);

// SAFETY: a function is a handle that the driver lets any thread use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

struct Loaded(CUmodule);

// SAFETY: as for functions.
unsafe impl Send for Loaded {}

pub(super) struct Modules {
    context: Arc<Context>,
    modules: Vec<&'static Module>,
    loaded: Mutex<HashMap<usize, Loaded>>,
    kernels: HashMap<&'static str, Kernel>,
}

/// Of every file, the target that a GPU of capability `sm` runs best: its own, else the newest before it.
fn best(all: &'static [Module], sm: u32) -> Vec<&'static Module> {
    let names: BTreeSet<&str> = all.iter().map(|m| m.name).collect();
    let best = |name| {
        let fitting = all.iter().filter(|m| m.name == name && m.runs_on(sm));
        fitting.max_by_key(|m| (m.exact, m.sm))
    };
    names.into_iter().filter_map(best).collect()
}

impl Modules {
    /// Chooses; nothing is loaded yet.
    ///
    /// # Errors
    /// The build has no kernels, or none that this device or driver runs.
    pub fn choose(context: Arc<Context>, sm: u32, driver: u32) -> Result<Modules> {
        if let Err(why) = built::NVCC {
            return Err(device(
                "--device cuda",
                format!(
                    "this program was built without GPU kernels ({why}); run scripts/get-nvcc and build again, \
                     or use --device cpu"
                ),
            ));
        }
        let modules = best(built::MODULES, sm);
        let Some(newest) = modules.iter().map(|m| m.version).max() else {
            let targets: BTreeSet<u32> = built::MODULES.iter().map(|m| m.sm).collect();
            let least = targets.first().copied().unwrap_or_default();
            return Err(device(
                &context.name,
                format!(
                    "compute capability {}.{}, the kernels need {}.{} or later; run on the CPU with --device cpu",
                    sm / 10,
                    sm % 10,
                    least / 10,
                    least % 10
                ),
            ));
        };
        let needed = cuda_of_ptx(newest);
        if driver < needed {
            return Err(too_old(&context.name, newest, driver));
        }
        let mut kernels = HashMap::new();
        for (at, module) in modules.iter().enumerate() {
            for &(name, params) in module.kernels {
                let function = OnceLock::new();
                let shared = AtomicU32::new(SHARED_DEFAULT);
                kernels.insert(name, Kernel { name, params, module: at, function, shared });
            }
        }
        Ok(Modules { context, modules, loaded: Mutex::default(), kernels })
    }

    pub fn get(&self, kernel: &str) -> Option<&Kernel> {
        self.kernels.get(kernel)
    }

    /// The function of a kernel, which may use `shared` bytes of dynamic shared memory.
    pub fn function(&self, kernel: &Kernel, shared: u32) -> Result<CUfunction> {
        let function = match kernel.function.get() {
            Some(function) => *function,
            None => {
                let function = self.load(kernel)?;
                *kernel.function.get_or_init(|| function)
            }
        };
        if shared > kernel.shared.load(Ordering::Relaxed) {
            let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a module that stays loaded.
            let code = unsafe { sys::cuFuncSetAttribute(function.0, which, shared as i32) };
            self.context
                .check(&format!("kernel {}: {shared} bytes of shared memory refused", kernel.name), code)?;
            kernel.shared.fetch_max(shared, Ordering::Relaxed);
        }
        Ok(function.0)
    }

    fn load(&self, kernel: &Kernel) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let _relaxed = Relaxed::enter();
        let module = match loaded.get(&kernel.module) {
            Some(Loaded(module)) => *module,
            None => {
                let module = self.compile(self.modules[kernel.module])?;
                loaded.insert(kernel.module, Loaded(module));
                module
            }
        };
        let name = CString::new(kernel.name).expect("names of kernels have no NUL");
        let mut function = std::ptr::null_mut();
        // SAFETY: a loaded module, a name that ends in NUL, a handle that outlives the call.
        let code = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        self.context.check(&format!("kernel {}", kernel.name), code)?;
        Ok(Function(function))
    }

    /// The driver's assembler at work on one file.
    fn compile(&self, module: &Module) -> Result<CUmodule> {
        let text = CString::new(module.ptx()).expect("PTX has no NUL");
        let mut log = vec![0u8; 16 << 10];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_GENERATE_LINE_INFO,
        ];
        // Numbers travel as addresses.
        let size = std::ptr::without_provenance_mut::<c_void>(log.len());
        let yes = std::ptr::without_provenance_mut::<c_void>(1);
        let mut values = [log.as_mut_ptr().cast::<c_void>(), size, yes];
        let mut handle = std::ptr::null_mut();
        // SAFETY: the text ends in NUL; there are as many values as options, of the kinds that these take;
        // the driver writes at most the size given to the log.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &mut handle,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        let what = format!("cuda/{}.cu for {}", module.name, module.target());
        match code {
            CUresult::CUDA_SUCCESS => Ok(handle),
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                let driver = super::driver::find()?.version;
                Err(too_old(&self.context.name, module.version, driver))
            }
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(crate::Error::Capacity(format!(
                "{}: no memory left to load {what}; grant the program less (--gpu-memory)",
                self.context.name
            ))),
            code => {
                let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
                let said = String::from_utf8_lossy(&log[..end]);
                let said = said.trim();
                let colon = if said.is_empty() { "" } else { ": " };
                self.context.check(&what, code).map_err(|_| {
                    device(
                        &self.context.name,
                        format!("{what}: the driver cannot load it: {}{colon}{said}", describe(code)),
                    )
                })?;
                unreachable!("success was matched above")
            }
        }
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let all = std::mem::take(self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner));
        let context = self.context.clone();
        // Unloading may synchronise the context, in which another runtime may be recording.
        gate::quietly(move || {
            context.settle();
            if context.bind().is_ok() {
                for (_, Loaded(module)) in all {
                    // SAFETY: loaded once, unloaded once, and nothing is in flight.
                    let _ = unsafe { sys::cuModuleUnload(module) };
                }
            }
        });
    }
}

fn too_old(name: &str, ptx: (u32, u32), driver: u32) -> crate::Error {
    let needed = cuda_of_ptx(ptx);
    device(
        name,
        format!(
            "the driver is too old for this program's kernels: it knows CUDA {}, they are PTX {}.{} and need \
             CUDA {} (driver {} or later); update the driver, or run on the CPU with --device cpu",
            version(driver),
            ptx.0,
            ptx.1,
            version(needed),
            driver_release(needed)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_gets_its_best_target() {
        let targets =
            |sm: u32| -> BTreeSet<String> { best(built::MODULES, sm).iter().map(|m| m.target()).collect() };
        if built::MODULES.is_empty() {
            println!("skipped: no PTX in this build ({:?})", built::NVCC);
            return;
        }
        let only = |t: &str| BTreeSet::from([t.to_owned()]);
        assert_eq!(targets(70), BTreeSet::new());
        assert_eq!(targets(75), only("75"));
        for sm in [80, 86, 89] {
            assert_eq!(targets(sm), only("80"), "{sm}");
        }
        assert!(targets(90).is_subset(&BTreeSet::from(["90".to_owned(), "90a".to_owned()])));
        assert_eq!(targets(120), only("90"), "90a runs on 90 only");
    }

    #[test]
    fn an_old_driver_is_told_what_is_needed() {
        let text = too_old("cuda:0 (NVIDIA T4)", (9, 0), 12020).to_string();
        for part in ["cuda:0 (NVIDIA T4)", "CUDA 12.2", "PTX 9.0", "CUDA 13.0", "driver 580"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
