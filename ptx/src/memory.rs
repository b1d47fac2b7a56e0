//! Global memory: the caller's.

/// How an access is ordered (PTX ISA 8, "Memory Consistency Model").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Semantics {
    /// In no order.
    Weak,
    /// `.nc`: of memory that is constant while the kernel runs.
    Constant,
    /// `.volatile`: not left out, merged or kept.
    Volatile,
    /// `.relaxed`.
    Relaxed,
    /// `.acquire`.
    Acquire,
    /// `.release`.
    Release,
}

/// Whom an order is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The block.
    Cta,
    /// The device.
    Gpu,
    /// Everyone, the host too.
    Sys,
}

/// An address that the memory does not have, or not like that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("global memory, {bytes} bytes at {address:#x}: {problem}")]
pub struct MemoryFault {
    /// The first byte accessed.
    pub address: u64,
    /// Bytes accessed.
    pub bytes: usize,
    /// What is wrong: freed, outside, read only.
    pub problem: String,
}

/// Memory by global addresses. The interpreter checks alignment; which addresses exist the memory knows.
///
/// Addresses from [`SHARED_WINDOW`] on are the interpreter's own.
pub trait Memory {
    /// Reads `out.len()` bytes.
    ///
    /// # Errors
    /// Some of the bytes may not be read.
    fn read(&mut self, address: u64, out: &mut [u8], semantics: Semantics) -> Result<(), MemoryFault>;

    /// Writes bytes.
    ///
    /// # Errors
    /// Some of the bytes may not be written. None is written then.
    fn write(&mut self, address: u64, bytes: &[u8], semantics: Semantics) -> Result<(), MemoryFault>;

    /// Replaces a number of `bytes` (2, 4 or 8) by `update` of it, in one step for everyone who uses the memory, and
    /// returns the old one. `update` may be called more than once.
    ///
    /// # Errors
    /// As read and write.
    fn atomic(
        &mut self,
        address: u64,
        bytes: usize,
        update: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, MemoryFault>;

    /// `membar`, `fence`: the caller that shares the memory with others orders its accesses.
    fn fence(&mut self, _scope: Scope) {}
}

/// Generic addresses of shared memory: no address of a host or a device looks like these.
pub const SHARED_WINDOW: u64 = 1 << 56;
/// Generic addresses of local memory.
pub const LOCAL_WINDOW: u64 = 2 << 56;
/// Generic addresses of parameters.
pub const PARAM_WINDOW: u64 = 3 << 56;
/// Addresses of a module's own `.global` and `.const` arrays, which are read only.
pub const CONSTANT_WINDOW: u64 = 4 << 56;

/// Separate buffers, with nothing around them: memory of tests.
#[derive(Debug, Default, Clone)]
pub struct Buffers {
    buffers: Vec<(u64, Vec<u8>)>,
}

impl Buffers {
    /// None.
    pub fn new() -> Buffers {
        Buffers::default()
    }

    /// A new buffer with these bytes, aligned to 1024: its address.
    pub fn add(&mut self, bytes: &[u8]) -> u64 {
        let last = self.buffers.last().map_or(0x10_0000, |(at, bytes)| at + bytes.len() as u64);
        // At least 1024 bytes between two, so that an index that runs over hits neither.
        let address = (last + 1024).next_multiple_of(1024);
        self.buffers.push((address, bytes.to_vec()));
        address
    }

    /// A new buffer with these words.
    pub fn add_words(&mut self, words: &[u32]) -> u64 {
        self.add(&words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>())
    }

    /// The bytes of the buffer at this address.
    ///
    /// # Panics
    /// No buffer begins there.
    pub fn bytes(&self, address: u64) -> &[u8] {
        let found = self.buffers.iter().find(|(at, _)| *at == address);
        &found.expect("an address that `add` returned").1
    }

    /// The same as words.
    ///
    /// # Panics
    /// No buffer begins there.
    pub fn words(&self, address: u64) -> Vec<u32> {
        let word = |b: &[u8]| b.iter().rev().fold(0, |v, b| v << 8 | u32::from(*b));
        self.bytes(address).chunks_exact(4).map(word).collect()
    }

    /// Whether all buffers hold the same bytes as the other memory's.
    pub fn same_as(&self, other: &Buffers) -> bool {
        self.buffers == other.buffers
    }

    fn slice(&mut self, address: u64, bytes: usize) -> Result<&mut [u8], MemoryFault> {
        let fault = || MemoryFault { address, bytes, problem: "in no buffer".into() };
        let after = self.buffers.partition_point(|(at, _)| *at <= address);
        let (at, buffer) = self.buffers[..after].last_mut().ok_or_else(fault)?;
        let from = usize::try_from(address - *at).map_err(|_| fault())?;
        from.checked_add(bytes).and_then(|end| buffer.get_mut(from..end)).ok_or_else(fault)
    }
}

impl Memory for Buffers {
    fn read(&mut self, address: u64, out: &mut [u8], _: Semantics) -> Result<(), MemoryFault> {
        out.copy_from_slice(self.slice(address, out.len())?);
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8], _: Semantics) -> Result<(), MemoryFault> {
        self.slice(address, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    fn atomic(
        &mut self,
        address: u64,
        bytes: usize,
        update: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, MemoryFault> {
        let slice = self.slice(address, bytes)?;
        let old = slice.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b));
        slice.copy_from_slice(&update(old).to_le_bytes()[..bytes]);
        Ok(old)
    }
}
