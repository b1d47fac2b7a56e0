//! Writes what was found and made, as `built.rs` in OUT_DIR; the embedded PTX and its index too.

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::PathBuf;

use crate::ptx::Compiled;
use crate::{Part, Result};

/// Writes `built.rs` and the compressed PTX.
pub fn write(no_abi: Option<&str>, ptx: &Part<Compiled>, no_emulation: Option<&str>) -> Result<()> {
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("Cargo sets OUT_DIR"));
    let mut text = String::new();
    let (nvcc, modules) = match ptx {
        Part::Made(compiled) => (Ok(compiled.nvcc.as_str()), &compiled.modules[..]),
        Part::Missing(why) => (Err(why.as_str()), &[][..]),
    };
    // Writing to a String cannot fail.
    let _ = writeln!(
        text,
        "/// Version of the nvcc that compiled the kernels, or why there is none.\npub const NVCC: std::result::Result<&str, &str> = {nvcc:?};"
    );
    let _ = writeln!(
        text,
        "/// Why the kernels' launch code was left out.\npub const NO_ABI: Option<&str> = {no_abi:?};"
    );
    let _ = writeln!(
        text,
        "/// Why host emulation is not linked.\npub const NO_EMULATION: Option<&str> = {no_emulation:?};"
    );
    let _ = writeln!(text, "/// The embedded PTX.\npub static MODULES: &[Module] = &[");
    for module in modules {
        let target = module.target;
        let name = format!("{}.{}{}.ptx.gz", module.name, target.sm, if target.exact { "a" } else { "" });
        let path = out.join(&name);
        let read = |p: &PathBuf| fs::read(p).map_err(|e| format!("{}: {e}", p.display()));
        let bytes = compress(&read(&module.ptx)?);
        fs::write(&path, &bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        let _ = writeln!(
            text,
            "Module {{ name: {:?}, sm: {}, exact: {}, version: {:?}, kernels: &{:?}, \
             gzip: include_bytes!({:?}) }},",
            module.name, target.sm, target.exact, module.version, module.kernels, path
        );
    }
    let _ = writeln!(text, "];");
    let path = out.join("built.rs");
    fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// PTX is text and shrinks tenfold.
fn compress(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).and_then(|()| encoder.finish()).expect("writing to memory does not fail")
}
