//! Tile instructions in software, so that the AMX kernels run and are tested with the same machine code on a CPU
//! without AMX.
//!
//! Such a CPU raises #UD at a tile instruction, which Linux delivers as SIGILL. The handler here decodes
//! the instruction at the interrupted address, executes it on tile state that belongs to the thread,
//! writes memory and steps over it. Any other instruction is passed to the previous handler. An instruction that real
//! hardware would refuse (#UD, #GP) ends the process with a message that names it, as a test should.
//!
//! The two AVX512-FP16 instructions that the tier uses are emulated in the same way (`fp16`), since the tier uses them
//! on CPUs with tiles; and the one of AVX-VNNI that the AVX2 tier uses (`vnni`).
//!
//! Opt-in only, by [`install`] or `TANDEM_AMX=emulate`: a trap costs 5-10 us (two shared cores of a virtual
//! Zen 4) and a product 1-3 us more, a thousand times what hardware needs. Tile instructions that follow
//! each other directly share a trap: 512 x 512 x 512 in bf16 takes 0.1-0.2 s.
//!
//! The handler is async-signal-safe: it allocates nothing, takes no lock, and its thread-local state has
//! a constant initialiser and no destructor, so that reaching it is an address computation.

mod decode;
mod fp16;
mod registers;
mod tiles;
mod vnni;

use std::cell::UnsafeCell;
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use decode::{Base, Insn, Mem, Op, decode};
use tiles::{TileFault, Tiles};

thread_local! {
    /// This thread's tile registers. On Linux a new thread inherits a configuration.
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles::INHERITED) };
}

static INSTALLED: AtomicBool = AtomicBool::new(false);
/// The previous action of SIGILL.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Whether tile instructions are emulated in this process.
pub fn installed() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Emulates tile instructions from now on, in every thread. Call it before anything calls
/// [`available`](super::available) and remembers the answer. If the hardware has tiles and the process may use them,
/// this changes nothing.
///
/// # Errors
/// If the system refuses to install the signal handler.
pub fn install() -> Result<(), &'static str> {
    static DONE: OnceLock<Result<(), &'static str>> = OnceLock::new();
    *DONE.get_or_init(|| {
        if super::hardware().is_ok() {
            return Ok(());
        }
        tiles::choose_level();
        registers::prepare();
        // SAFETY: plain data for which all-zero is a valid value (default action, empty mask).
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: reads the present action into `old`.
        if unsafe { libc::sigaction(libc::SIGILL, std::ptr::null(), &mut old) } != 0 {
            return Err("AMX emulation: the SIGILL action cannot be read");
        }
        // Set before the handler can run, so the handler never waits for it.
        let _ = PREVIOUS.set(old);
        // SAFETY: as above.
        let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
        new.sa_sigaction = on_sigill as *const () as usize;
        // No SA_ONSTACK: alternate stacks are small, and the interrupted stack is sound.
        new.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // SAFETY: `on_sigill` has the signature that SA_SIGINFO asks for and is async-signal-safe.
        if unsafe { libc::sigaction(libc::SIGILL, &new, std::ptr::null_mut()) } != 0 {
            return Err("AMX emulation: the SIGILL handler cannot be installed");
        }
        INSTALLED.store(true, Ordering::Release);
        Ok(())
    })
}

/// General registers in encoding order, as indices into the saved context.
const REGS: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

type Gregs = [libc::greg_t; 23];

unsafe extern "C" fn on_sigill(sig: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes the interrupted thread's context, ours to change until
    // the handler returns.
    let machine = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
    let (gregs, fpregs) = (&mut machine.gregs, machine.fpregs.cast::<u8>());
    let trapped = gregs[libc::REG_RIP as usize];
    loop {
        let rip = gregs[libc::REG_RIP as usize];
        // SAFETY: the CPU just fetched the instruction there, or is about to: tile instructions do not
        // branch, so the bytes after one are an instruction, and readable.
        let Some(insn) = (unsafe { decode(rip as usize as *const u8) }) else {
            // SAFETY: as above; the registers are those of the interrupted thread.
            let Some(len) = (unsafe { vectors(rip as usize as *const u8, fpregs, gregs) }) else { break };
            gregs[libc::REG_RIP as usize] = rip + len as libc::greg_t;
            continue;
        };
        let done = TILES.with(|tiles| {
            // SAFETY: this thread's state, touched only here; SIGILL is blocked while its handler runs, and
            // the handler executes no tile instruction, so there is one reference at a time.
            let tiles = unsafe { &mut *tiles.get() };
            // SAFETY: the operands are those of the interrupted instruction: if its memory is bad, the
            // access faults here as it would have there.
            unsafe { execute(insn, gregs, tiles) }
        });
        match done {
            // The next instruction is often a tile instruction too, which saves a trap.
            Ok(()) => gregs[libc::REG_RIP as usize] = rip + insn.len as libc::greg_t,
            Err(fault) => refuse(insn, fault, rip),
        }
    }
    if gregs[libc::REG_RIP as usize] == trapped {
        // Not a tile instruction. SAFETY: the arguments come from the kernel.
        unsafe { chain(sig, info, context) }
    }
}

/// Executes the instruction at `code` if it is one of those on vectors; its length.
///
/// # Safety
/// `code` points to an instruction whose bytes are all readable; the registers are those of its thread's signal context.
unsafe fn vectors(code: *const u8, fpregs: *mut u8, gregs: &Gregs) -> Option<usize> {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(op) = fp16::decode(code) {
            return fp16::execute(op, fpregs).then_some(fp16::LEN);
        }
        let (op, len) = vnni::decode(code)?;
        let next = code as usize + len;
        let address = |mem| {
            let (at, index) = address(mem, gregs, next);
            at.wrapping_add(index)
        };
        vnni::execute(op, fpregs, address).then_some(len)
    }
}

/// The address and the stride (the scaled index) of a memory operand.
fn address(mem: Mem, gregs: &Gregs, next: usize) -> (usize, usize) {
    let reg = |r: u8| gregs[REGS[r as usize & 15] as usize] as usize;
    let base = match mem.base {
        Base::None => 0,
        Base::Reg(r) => reg(r),
        Base::Rip => next,
    };
    (base.wrapping_add(mem.disp as isize as usize), mem.index.map_or(0, |r| reg(r) << mem.scale))
}

/// # Safety
/// `insn` was interrupted in the context `gregs`; its memory operand is the program's own.
unsafe fn execute(insn: Insn, gregs: &Gregs, tiles: &mut Tiles) -> Result<(), TileFault> {
    let next = gregs[libc::REG_RIP as usize] as usize + insn.len;
    match insn.op {
        Op::LoadConfig(mem) => {
            let (at, index) = address(mem, gregs, next);
            // SAFETY: the instruction reads 64 bytes there, at any alignment.
            let config = unsafe { (at.wrapping_add(index) as *const [u8; 64]).read_unaligned() };
            tiles.load_config(&config)
        }
        Op::StoreConfig(mem) => {
            let (at, index) = address(mem, gregs, next);
            // SAFETY: the instruction writes 64 bytes there, at any alignment.
            unsafe { (at.wrapping_add(index) as *mut [u8; 64]).write_unaligned(tiles.store_config()) };
            Ok(())
        }
        Op::Release => {
            tiles.release();
            Ok(())
        }
        Op::Zero(t) => tiles.zero(t),
        Op::Load(t, mem) => {
            let (at, stride) = address(mem, gregs, next);
            tiles.load(t, |row, bytes| {
                let from = at.wrapping_add(stride.wrapping_mul(row)) as *const u8;
                // SAFETY: the instruction reads that many bytes of each row; `bytes` is our own tile.
                unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
            })
        }
        Op::Store(t, mem) => {
            let (at, stride) = address(mem, gregs, next);
            tiles.store(t, |row, bytes| {
                let to = at.wrapping_add(stride.wrapping_mul(row)) as *mut u8;
                // SAFETY: the instruction writes that many bytes of each row; `bytes` is our own tile.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
            })
        }
        Op::Dot(dot, dst, a, b) => tiles.dot(dot, dst, a, b),
    }
}

/// Passes a signal that is not ours to the previous handler.
///
/// # Safety
/// The arguments must be those of the running signal handler.
unsafe fn chain(sig: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let old = PREVIOUS.get();
    match old {
        Some(old) if old.sa_sigaction != libc::SIG_DFL && old.sa_sigaction != libc::SIG_IGN => {
            // SAFETY: the kernel accepted this address as a handler of the kind that its flags say.
            unsafe {
                if old.sa_flags & libc::SA_SIGINFO != 0 {
                    let f: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(old.sa_sigaction);
                    f(sig, info, context);
                } else {
                    let f: extern "C" fn(libc::c_int) = std::mem::transmute(old.sa_sigaction);
                    f(sig);
                }
            }
        }
        _ => {
            // Default action (a fault cannot be ignored): restore it and return to the instruction, which
            // faults again and ends the process as if we had never been here.
            // SAFETY: all-zero is the default action with an empty mask.
            unsafe {
                let default: libc::sigaction = std::mem::zeroed();
                libc::sigaction(sig, &default, std::ptr::null_mut());
            }
        }
    }
}

/// Text on the stack: a signal handler must not allocate.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        let n = s.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + n].copy_from_slice(&s.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

/// Ends the process as hardware would have, but says why.
fn refuse(insn: Insn, fault: TileFault, rip: libc::greg_t) -> ! {
    let mut line = Line { bytes: [0; 256], len: 0 };
    let _ = writeln!(line, "AMX emulation: {} at {rip:#x}: {fault}", insn.op);
    // SAFETY: writes our bytes to standard error; abort is async-signal-safe.
    unsafe {
        libc::write(2, line.bytes.as_ptr().cast(), line.len);
        libc::abort()
    }
}
