//! Which accelerator kernels this build contains, and why others are missing (`build/info.rs`).

/// A kernel file, or a part of one, compiled for one target: PTX, which the driver of any later GPU compiles, and
/// machine code of common ones.
#[derive(Debug)]
pub struct Module {
    /// `gemv` for `cuda/gemv.cu`; `linear_quant.q4_0` for a file compiled in parts.
    pub name: &'static str,
    /// Compute capability it was compiled for: 75, 80, 90.
    pub sm: u32,
    /// Whether it runs on exactly that capability (`90a`); other modules also run on all later ones.
    pub exact: bool,
    /// Version of the PTX language: (9, 0) is CUDA 13.0's.
    pub version: (u32, u32),
    /// Its kernels.
    pub kernels: &'static [Kernel],
    /// Its machine code, by ascending capability.
    pub code: &'static [Code],
    ptx: &'static [u8],
}

/// A kernel of a [`Module`].
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: &'static str,
    /// Bytes of its parameter struct.
    pub params: u32,
    /// Registers per thread at entry, for a kernel that relies on the number: with another number its `setmaxnreg`
    /// waits forever.
    pub registers: Option<u32>,
}

/// Machine code of a [`Module`] for one GPU.
#[derive(Debug)]
pub struct Code {
    /// The compute capability: 86 runs on 8.6 and on later ones of the same major number.
    pub sm: u32,
    gzip: &'static [u8],
}

impl Module {
    /// The PTX text.
    pub fn ptx(&self) -> Vec<u8> {
        unpack(self.ptx)
    }

    /// What is embedded of the text, for telling builds apart.
    pub(super) fn bytes(&self) -> &'static [u8] {
        self.ptx
    }

    /// `80` or `90a`.
    pub fn target(&self) -> String {
        format!("{}{}", self.sm, if self.exact { "a" } else { "" })
    }

    /// Whether a GPU of capability `sm` runs it.
    pub fn runs_on(&self, sm: u32) -> bool {
        if self.exact { sm == self.sm } else { sm >= self.sm }
    }

    /// The machine code that a GPU of capability `sm` runs best: its own, else the newest before it of the same
    /// major number. `None` if the driver has to compile the PTX.
    pub fn code_for(&self, sm: u32) -> Option<&'static Code> {
        let runs = |code: &&Code| match self.exact {
            true => code.sm == sm,
            false => code.sm / 10 == sm / 10 && code.sm <= sm,
        };
        self.code.iter().filter(runs).max_by_key(|code| code.sm)
    }
}

impl Code {
    /// What is embedded, for telling builds apart.
    pub(super) fn bytes(&self) -> &'static [u8] {
        self.gzip
    }

    /// The image in the form that drivers load.
    pub fn image(&self) -> Vec<u8> {
        unpack(self.gzip)
    }
}

fn unpack(gzip: &[u8]) -> Vec<u8> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let mut decoder = flate2::read::GzDecoder::new(gzip);
    decoder.read_to_end(&mut bytes).expect("the build embedded what it compressed");
    bytes
}

include!(concat!(env!("OUT_DIR"), "/built.rs"));
