//! Progress of long work: whoever starts it listens, and prints or draws what is told. Nothing is told unless a method
//! says otherwise.

/// Listens to work, from any of its threads.
pub trait Progress: Sync {
    /// A stretch of work on `what` begins: `total` of `unit` (if known).
    fn begin(&self, _what: &str, _total: Option<u64>, _unit: WorkUnit) {}
    /// So much of it is done.
    fn at(&self, _done: u64) {}
    /// The stretch is over.
    fn end(&self) {}
    /// A sentence that everybody should read.
    fn note(&self, _message: &str) {}
    /// A sentence for those who want to know more.
    fn detail(&self, _message: &str) {}
}

/// What a stretch of work is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkUnit {
    /// Bytes.
    Bytes,
    /// Steps, tokens or other things.
    Things,
}

/// Listens to nothing.
pub struct Silent;

impl Progress for Silent {}
