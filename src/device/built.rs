//! What this build of the program contains for accelerators, and why it lacks the rest (`build/info.rs`).

/// A kernel file compiled to PTX for one target.
#[derive(Debug)]
pub struct Module {
    /// `gemv` of `cuda/gemv.cu`.
    pub name: &'static str,
    /// Compute capability that it was compiled for: 75, 80, 90.
    pub sm: u32,
    /// Runs on exactly that capability (`90a`), where others run on it and all later ones.
    pub exact: bool,
    /// Version of the PTX language: (9, 0) is CUDA 13.0's.
    pub version: (u32, u32),
    /// Names of its kernels, and bytes of the parameter struct of each.
    pub kernels: &'static [(&'static str, u32)],
    gzip: &'static [u8],
}

impl Module {
    /// The PTX text.
    pub fn ptx(&self) -> String {
        use std::io::Read;
        let mut text = String::new();
        let mut decoder = flate2::read::GzDecoder::new(self.gzip);
        decoder.read_to_string(&mut text).expect("the build embedded what it compressed");
        text
    }

    /// `80` or `90a`.
    pub fn target(&self) -> String {
        format!("{}{}", self.sm, if self.exact { "a" } else { "" })
    }

    /// Whether a GPU of capability `sm` runs it.
    pub fn runs_on(&self, sm: u32) -> bool {
        if self.exact { sm == self.sm } else { sm >= self.sm }
    }
}

include!(concat!(env!("OUT_DIR"), "/built.rs"));
