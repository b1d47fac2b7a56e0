//! Kernels on the stand-in for the driver by nvcc's own text: the PTX interpreter (`ptx/`) behind launches, instead of the kernels'
//! C++ reading. Operands of inline PTX, the layout of parameters and what stands under `__CUDACC__` are then what a GPU gets.
//!
//! A process whose environment has `FAKE_PTX` uses it ([`install`]); `FAKE_SM` says for which GPU.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use tandem::device::built::{self, MODULES};
use tandem_ptx::{Memory, MemoryFault, Module, Options, Semantics};

use super::fake_driver::function;

type Launcher = extern "C" fn(
    *const c_char,
    *const u32,
    *const u32,
    u32,
    *const c_void,
    usize,
    *mut c_char,
    usize,
) -> i32;
type Range = extern "C" fn(u64, usize, *mut u64, *mut u64) -> i32;

/// Puts the interpreter behind launches, if the environment asks for it. The stand-in must be loaded.
pub fn install() {
    if std::env::var_os("FAKE_PTX").is_some() {
        // SAFETY: the function has this signature.
        unsafe { function::<extern "C" fn(Launcher)>("fake_set_launcher")(launch) };
    }
}

/// The text that a GPU of `FAKE_SM` would take the kernel from, read once.
fn module(kernel: &str) -> Result<Arc<Module>, String> {
    static READ: Mutex<Option<HashMap<(&str, u32), Arc<Module>>>> = Mutex::new(None);
    let sm: u32 = std::env::var("FAKE_SM").map_or(90, |v| v.parse().expect("FAKE_SM is a number"));
    let has = |m: &&built::Module| m.runs_on(sm) && m.kernels.iter().any(|k| k.name == kernel);
    let of = MODULES.iter().filter(has).max_by_key(|m| (m.exact, m.sm));
    let of = of.ok_or_else(|| format!("no text has it for {sm}"))?;
    let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
    let read = read.get_or_insert_default();
    if let Some(module) = read.get(&(of.name, of.sm)) {
        return Ok(module.clone());
    }
    let text = String::from_utf8(of.ptx()).map_err(|e| e.to_string())?;
    let module = Arc::new(Module::parse(&text).map_err(|e| format!("{}: {e}", of.name))?);
    read.insert((of.name, of.sm), module.clone());
    Ok(module)
}

/// The memory of this process that kernels may touch.
struct Process {
    range: Range,
    /// Known ranges (begin, end), the last used first.
    known: Vec<(u64, u64)>,
}

impl Process {
    fn check(&mut self, address: u64, bytes: usize) -> Result<(), MemoryFault> {
        let end = address.wrapping_add(bytes as u64);
        let inside = |r: &(u64, u64)| r.0 <= address && end <= r.1 && end >= address;
        if let Some(at) = self.known.iter().position(inside) {
            self.known.swap(0, at);
            return Ok(());
        }
        let (mut from, mut to) = (0, 0);
        if (self.range)(address, bytes, &mut from, &mut to) == 0 {
            return Err(MemoryFault { address, bytes, problem: "no device memory is there".into() });
        }
        self.known.insert(0, (from, to));
        Ok(())
    }
}

impl Memory for Process {
    fn read(&mut self, address: u64, out: &mut [u8], _: Semantics) -> Result<(), MemoryFault> {
        self.check(address, out.len())?;
        // SAFETY: the bytes are device memory, or mapped, which stays so while a kernel is in flight; `out` is ours.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8], _: Semantics) -> Result<(), MemoryFault> {
        self.check(address, bytes.len())?;
        // The host looks at single words while kernels write them.
        // SAFETY: as in `read`. A word of a whole, aligned access is written at once.
        unsafe {
            match bytes.len() {
                4 if address.is_multiple_of(4) => {
                    (address as *mut u32).write_volatile(u32::from_le_bytes(bytes.try_into().unwrap()));
                }
                8 if address.is_multiple_of(8) => {
                    (address as *mut u64).write_volatile(u64::from_le_bytes(bytes.try_into().unwrap()));
                }
                n => std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, n),
            }
        }
        Ok(())
    }

    /// One thread executes kernels, and the host only reads what they change.
    fn atomic(
        &mut self,
        address: u64,
        bytes: usize,
        update: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, MemoryFault> {
        let mut word = [0; 8];
        self.read(address, &mut word[..bytes], Semantics::Relaxed)?;
        let old = u64::from_le_bytes(word);
        self.write(address, &update(old).to_le_bytes()[..bytes], Semantics::Relaxed)?;
        Ok(old)
    }

    fn fence(&mut self, _: tandem_ptx::Scope) {
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
}

extern "C" fn launch(
    kernel: *const c_char,
    grid: *const u32,
    block: *const u32,
    shared: u32,
    params: *const c_void,
    len: usize,
    why: *mut c_char,
    room: usize,
) -> i32 {
    // SAFETY: the stand-in calls it with a name, three numbers each, `len` bytes of parameters and room for a message.
    let (kernel, grid, block, params) = unsafe {
        let three = |at: *const u32| [*at, *at.add(1), *at.add(2)];
        let params = std::slice::from_raw_parts(params.cast::<u8>(), len);
        (CStr::from_ptr(kernel).to_string_lossy(), three(grid), three(block), params)
    };
    // SAFETY: the function has this signature.
    let range = unsafe { function::<Range>("fake_range") };
    let mut memory = Process { range, known: Vec::new() };
    let run = || -> Result<(), String> {
        let module = module(&kernel)?;
        let options = Options::default();
        let done = module.launch(&kernel, grid, block, shared, params, &mut memory, &options);
        done.map(drop).map_err(|fault| fault.to_string())
    };
    let Err(problem) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err("the interpreter panicked".into()))
    else {
        return 0;
    };
    let bytes = &problem.as_bytes()[..problem.len().min(room.saturating_sub(1))];
    // SAFETY: `room` bytes, of which the message and its end take at most all.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), why.cast::<u8>(), bytes.len());
        *why.add(bytes.len()) = 0;
    }
    1
}
