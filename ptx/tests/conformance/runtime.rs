//! The interpreter as the runtime that the tests of GPUs expect: as much of it as they use.

use std::cell::RefCell;
use std::convert::Infallible;
use std::sync::Arc;

use tandem_ptx::{Buffers, Landing, Memory, Module, Options, Order, Semantics};

use crate::{Shape, folder};

pub enum Lane {
    Compute,
}

pub struct Info {
    pub name: String,
}

pub trait Runtime {
    fn has_kernel(&self, name: &str) -> bool;
    fn info(&self) -> Info;
    fn add(&self, bytes: &[u8]) -> u64;
    fn download(&self, lane: Lane, from: u64, to: &mut [u8]) -> Result<(), tandem_ptx::MemoryFault>;
    fn launch(&self, kernel: &str, shape: &Shape, params: &[u8]);
    /// Of 16-bit elements, `stride` of them from row to row.
    fn tensor_map_2d(
        &self,
        address: u64,
        rows: u64,
        cols: u64,
        stride: u64,
        box_rows: u32,
        box_cols: u32,
    ) -> Result<[u8; 128], Infallible> {
        Ok(tandem_ptx::TensorMap { address, rows, cols, stride, box_rows, box_cols }.encode())
    }
}

/// A text, and how it is run.
struct Interpreter {
    module: Module,
    options: Options,
    memory: RefCell<Buffers>,
}

impl Runtime for Interpreter {
    fn has_kernel(&self, name: &str) -> bool {
        self.module.kernels().any(|k| k.name == name)
    }
    fn info(&self) -> Info {
        Info { name: self.module.target().to_owned() }
    }
    fn add(&self, bytes: &[u8]) -> u64 {
        self.memory.borrow_mut().add(bytes)
    }
    fn download(&self, Lane::Compute: Lane, from: u64, to: &mut [u8]) -> Result<(), tandem_ptx::MemoryFault> {
        self.memory.borrow_mut().read(from, to, Semantics::Weak)
    }
    fn launch(&self, kernel: &str, shape: &Shape, params: &[u8]) {
        let memory = &mut *self.memory.borrow_mut();
        let (grid, block) = ([shape.grid, 1, 1], [shape.block, 1, 1]);
        let done = self.module.launch(kernel, grid, block, shape.shared, params, memory, &self.options);
        done.unwrap_or_else(|e| panic!("{}: {e}", self.module.target()));
    }
}

/// Every target's texts of conformance kernels, in different orders.
pub fn runtimes() -> Vec<Arc<dyn Runtime>> {
    let texts = folder::texts();
    let named = |p: &&std::path::PathBuf| {
        p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("conformance"))
    };
    let orders = [
        (Order::Ascending, Landing::AtWait, 1 << 14),
        (Order::Descending, Landing::AtOnce, 1 << 14),
        (Order::Shuffled(7), Landing::AtWait, 5),
    ];
    let each = texts.iter().filter(named).flat_map(|path| {
        let text = std::fs::read_to_string(path).unwrap();
        orders.map(|(order, copies, turn)| {
            let module = Module::parse(&text).unwrap_or_else(|e| panic!("{e}"));
            let options = Options { order, copies, turn, budget: Some(1 << 20), ..Options::default() };
            #[allow(clippy::arc_with_non_send_sync, reason = "the tests' type; nothing leaves its thread")]
            let runtime: Arc<dyn Runtime> =
                Arc::new(Interpreter { module, options, memory: RefCell::new(Buffers::new()) });
            runtime
        })
    });
    each.collect()
}

pub struct Buffer(u64);

impl Buffer {
    pub fn from_bytes(
        rt: &Arc<dyn Runtime>,
        Lane::Compute: Lane,
        bytes: &[u8],
    ) -> Result<Buffer, Infallible> {
        Ok(Buffer(rt.add(bytes)))
    }
    pub fn new(rt: &Arc<dyn Runtime>, bytes: usize) -> Result<Buffer, Infallible> {
        Ok(Buffer(rt.add(&vec![0; bytes])))
    }
    pub fn ptr(&self) -> u64 {
        self.0
    }
}

pub struct TensorMap {
    pub bytes: [u8; 128],
}

/// `cuda/include/abi/conformance.h`: the map is aligned to 128 bytes, and so the size is a multiple of it.
pub struct ConformanceTmaParams {
    pub map: TensorMap,
    pub out: u64,
    pub x: i32,
    pub y: i32,
    pub box_rows: u32,
    pub box_cols: u32,
    pub pad: [u8; 104],
}

impl Default for ConformanceTmaParams {
    fn default() -> Self {
        ConformanceTmaParams {
            map: TensorMap { bytes: [0; 128] },
            out: 0,
            x: 0,
            y: 0,
            box_rows: 0,
            box_cols: 0,
            pad: [0; 104],
        }
    }
}

impl ConformanceTmaParams {
    pub fn bytes(&self) -> &[u8] {
        let numbers = [self.x as u32, self.y as u32, self.box_rows, self.box_cols];
        let mut all = self.map.bytes.to_vec();
        all.extend(self.out.to_le_bytes());
        all.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        all.extend(self.pad);
        all.leak()
    }
}
