//! The kernels of this build that a device runs: the best target of every module, loaded ahead of time or on first use.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute, CUmodule};

use super::context::{Context, Relaxed};
use super::errors::device;
use super::gate;
use super::image::Loader;
use crate::Result;
use crate::device::built::{self, Module};

/// Bytes of dynamic shared memory that every kernel may use without opting in.
const SHARED_DEFAULT: u32 = 48 << 10;

/// A kernel that the device can run.
pub(super) struct LoadedKernel {
    pub name: &'static str,
    /// Bytes of its parameter struct.
    pub params: u32,
    /// Registers per thread at entry, if the kernel relies on the number.
    registers: Option<u32>,
    module: usize,
    function: OnceLock<Function>,
    /// Bytes of dynamic shared memory that it was granted.
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
    loader: Loader,
    modules: Vec<&'static Module>,
    loaded: Mutex<HashMap<usize, Loaded>>,
    kernels: HashMap<&'static str, LoadedKernel>,
}

/// For every file, the target that a GPU of capability `sm` runs best: its own, else the newest older one.
fn best(all: &'static [Module], sm: u32) -> Vec<&'static Module> {
    let names: BTreeSet<&str> = all.iter().map(|m| m.name).collect();
    let best = |name| {
        let fitting = all.iter().filter(|m| m.name == name && m.runs_on(sm));
        fitting.max_by_key(|m| (m.exact, m.sm))
    };
    names.into_iter().filter_map(best).collect()
}

impl Modules {
    /// Chooses modules for a device of capability `real` that runs the kernels for `sm`; loads nothing yet.
    ///
    /// # Errors
    /// If the build has no kernels, or none that this device and driver can run.
    pub fn choose(context: Arc<Context>, sm: u32, real: u32, driver: u32) -> Result<Modules> {
        if let Err(why) = built::NVCC {
            return Err(device(
                "`device` cuda",
                format!(
                    "this program was built without GPU kernels ({why}); run scripts/get-nvcc and build again, \
                     or use `device` cpu"
                ),
            ));
        }
        let modules = best(built::MODULES, sm);
        if modules.is_empty() {
            let targets: BTreeSet<u32> = built::MODULES.iter().map(|m| m.sm).collect();
            let least = targets.first().copied().unwrap_or_default();
            return Err(device(
                &context.name,
                format!(
                    "compute capability {}.{}, the kernels need {}.{} or later; run on the CPU with `device` cpu",
                    sm / 10,
                    sm % 10,
                    least / 10,
                    least % 10
                ),
            ));
        }
        let loader = Loader::new(context.clone(), real, driver);
        modules.iter().try_for_each(|module| loader.check(module))?;
        let mut kernels = HashMap::new();
        for (at, module) in modules.iter().enumerate() {
            for &built::Kernel { name, params, registers } in module.kernels {
                let function = OnceLock::new();
                let shared = AtomicU32::new(SHARED_DEFAULT);
                kernels.insert(name, LoadedKernel { name, params, registers, module: at, function, shared });
            }
        }
        Ok(Modules { context, loader, modules, loaded: Mutex::default(), kernels })
    }

    pub fn get(&self, kernel: &str) -> Option<&LoadedKernel> {
        self.kernels.get(kernel)
    }

    /// The function of a kernel, which may use `shared` bytes of dynamic shared memory.
    pub fn function(&self, kernel: &LoadedKernel, shared: u32) -> Result<CUfunction> {
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

    fn load(&self, kernel: &LoadedKernel) -> Result<Function> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let _relaxed = Relaxed::enter();
        let module = match loaded.get(&kernel.module) {
            Some(Loaded(module)) => *module,
            None => {
                let module = self.loader.load(self.modules[kernel.module])?;
                loaded.insert(kernel.module, Loaded(module));
                module
            }
        };
        let name = CString::new(kernel.name).expect("names of kernels have no NUL");
        let mut function = std::ptr::null_mut();
        // SAFETY: a loaded module, a name that ends in NUL, a handle that outlives the call.
        let code = unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        self.context.check(&format!("kernel {}", kernel.name), code)?;
        self.check_registers(kernel, function)?;
        Ok(Function(function))
    }

    /// Checks the registers per thread at entry: with another number than its `setmaxnreg` was written for, a kernel
    /// would wait forever.
    fn check_registers(&self, kernel: &LoadedKernel, function: CUfunction) -> Result<()> {
        let Some(wanted) = kernel.registers else { return Ok(()) };
        let mut has = 0;
        let which = CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS;
        // SAFETY: a function of a loaded module; the number outlives the call.
        let code = unsafe { sys::cuFuncGetAttribute(&mut has, which, function) };
        self.context.check(&format!("kernel {}", kernel.name), code)?;
        if has as u32 == wanted {
            return Ok(());
        }
        Err(device(
            format!("kernel {}", kernel.name),
            format!(
                "the driver of {} gives it {has} registers at entry, it was written for {wanted}; update the driver, or \
                 run on the CPU with `device` cpu",
                self.context.name
            ),
        ))
    }

    /// Loads the kernels that `wanted` names. `progress` is called with the number of modules loaded and their total.
    pub fn preload(&self, wanted: &dyn Fn(&str) -> bool, progress: &dyn Fn(usize, usize)) -> Result<()> {
        self.context.bind()?;
        let mut by_module: BTreeMap<usize, Vec<&LoadedKernel>> = BTreeMap::new();
        for kernel in self.kernels.values().filter(|k| wanted(k.name)) {
            by_module.entry(kernel.module).or_default().push(kernel);
        }
        for (done, kernels) in by_module.values().enumerate() {
            progress(done, by_module.len());
            for kernel in kernels {
                self.function(kernel, 0)?;
            }
        }
        progress(by_module.len(), by_module.len());
        Ok(())
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let all = std::mem::take(self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner));
        let context = self.context.clone();
        // Unloading may synchronise the context, in which another runtime may be recording.
        gate::quietly(move || {
            context.wait_for_lanes();
            if context.bind().is_ok() {
                for (_, Loaded(module)) in all {
                    // SAFETY: loaded once, unloaded once, and nothing is in flight.
                    let _ = unsafe { sys::cuModuleUnload(module) };
                }
            }
        });
    }
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
}
