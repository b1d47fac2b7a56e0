//! Skeleton.

/// Threads that run chunks of a job.
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// A pool of `threads` (the caller is one of them).
    pub fn new(threads: usize) -> Pool {
        Pool { threads }
    }
    /// How many threads take part.
    pub fn threads(&self) -> usize {
        self.threads
    }
    /// Runs `f(chunk, worker)` for every chunk in 0..chunks, each exactly once, in any order and on
    /// any worker (0..threads); returns when all are done.
    pub fn run(&self, chunks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        for c in 0..chunks {
            f(c, 0);
        }
    }
}
