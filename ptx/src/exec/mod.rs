//! Execution: a launch's blocks one after the other, a block's warps in turns.

mod access;
mod atomic;
mod barrier;
mod bits;
mod block;
mod bulk;
mod compare;
mod convert;
mod copies;
mod float;
mod half;
mod integer;
mod lanes;
mod matrix;
mod mbarrier;
mod spaces;
mod step;
mod together;
mod warp;
mod wgmma;

use crate::error::line_of;
use crate::fault::{Fault, FaultKind, Problem};
use crate::kernel::Kernel;
use crate::memory::{Memory, Semantics};
use crate::options::{Options, Stats, permutation};

use bulk::BulkCopy;
use spaces::{Shared, Tracker};
use warp::{Position, Warp};

/// What a warp's instructions work on besides its registers.
pub(crate) struct Context<'a> {
    pub kernel: &'a Kernel,
    pub params: &'a [u8],
    pub constants: &'a [u8],
    pub memory: &'a mut dyn Memory,
    pub options: &'a Options,
    pub shared: Shared,
    /// Bulk copies in flight.
    pub bulk: Vec<BulkCopy>,
    /// Of launches of kernels that read through the read-only path.
    pub tracker: Option<Tracker>,
    pub stats: Stats,
}

impl Context<'_> {
    fn note_read(&mut self, address: u64, bytes: usize, semantics: Semantics) -> Result<(), FaultKind> {
        match &mut self.tracker {
            Some(tracker) if semantics == Semantics::Constant => tracker.constant(address, bytes),
            _ => Ok(()),
        }
    }

    fn note_write(&mut self, address: u64, bytes: usize) -> Result<(), FaultKind> {
        self.tracker.as_mut().map_or(Ok(()), |tracker| tracker.write(address, bytes))
    }
}

/// A launch, checked.
pub(crate) struct Launch<'a> {
    pub source: &'a str,
    pub kernel: &'a Kernel,
    pub constants: &'a [u8],
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub dynamic_shared: u32,
    pub params: &'a [u8],
}

impl Launch<'_> {
    /// Runs the blocks.
    pub fn run(&self, memory: &mut dyn Memory, options: &Options) -> Result<Stats, Box<Fault>> {
        let kernel = self.kernel;
        let shared = (kernel.dynamic_shared_at + self.dynamic_shared).max(kernel.static_shared);
        let mut cx = Context {
            kernel,
            params: self.params,
            constants: self.constants,
            memory,
            options,
            shared: Shared::new(shared as usize, options.watch_shared),
            bulk: Vec::new(),
            tracker: kernel.has_constant_loads.then(Tracker::default),
            stats: Stats::default(),
        };
        let threads: u32 = self.block.iter().product();
        let mut warps: Vec<Warp> = (0..threads.div_ceil(32)).map(|n| Warp::new(kernel, n)).collect();
        let all = self.grid.iter().map(|n| u64::from(*n)).product();
        let range = options.blocks.clone().unwrap_or(0..all);
        let range = range.start.min(all)..range.end.min(all);
        for at in permutation(options.order, range.end - range.start) {
            let number = range.start + at;
            let [x, y] = [u64::from(self.grid[0]), u64::from(self.grid[1])];
            let index = [(number % x) as u32, (number / x % y) as u32, (number / (x * y)) as u32];
            let position = Position {
                block: index,
                grid: self.grid,
                threads: self.block,
                dynamic_shared: self.dynamic_shared,
                total_shared: shared,
            };
            block::run(&mut cx, &mut warps, &position)
                .map_err(|(warp, problem)| self.fault(index, warp.map(|w| &warps[w]), *problem))?;
        }
        Ok(cx.stats)
    }

    fn fault(&self, block: [u32; 3], warp: Option<&Warp>, problem: Problem) -> Box<Fault> {
        let [x, y, _] = self.block;
        let thread = warp.zip(problem.lane).map(|(warp, lane)| {
            let n = warp.number * 32 + lane;
            [n % x, n / x % y, n / (x * y)]
        });
        let line = warp.and_then(|w| self.kernel.code.get(w.pc as usize)).map_or(0, |i| i.line);
        Box::new(Fault {
            kernel: self.kernel.name.clone(),
            block: Some(block),
            thread,
            line,
            instruction: line_of(self.source, line),
            kind: problem.kind,
        })
    }
}
