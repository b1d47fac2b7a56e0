//! Writes what was found and made, as `built.rs` in OUT_DIR; the embedded kernels and their index too.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::ptx::Compiled;
use crate::{Part, Result};

/// Writes `built.rs` and what it includes.
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
    let cuda = match ptx {
        Part::Made(compiled) => compiled.ptxas.cuda()?,
        Part::Missing(_) => 0,
    };
    let _ = writeln!(
        text,
        "/// The CUDA release of the assembler that made the machine code (12090), 0 if there is none.\npub const CODE_CUDA: u32 = {cuda};"
    );
    // Modules may share a text.
    let mut blobs = BTreeSet::new();
    let mut blob = |from: &Path| -> Result<String> {
        let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let id = format!("B_{}", name.replace('.', "_").to_uppercase());
        if blobs.insert(id.clone()) {
            let path = out.join(&name);
            fs::copy(from, &path).map_err(|e| format!("{}: {e}", path.display()))?;
            let _ = writeln!(text, "static {id}: &[u8] = include_bytes!({path:?});");
        }
        Ok(id)
    };
    let mut list = String::from("/// The embedded kernels.\npub static MODULES: &[Module] = &[\n");
    let code = if let Part::Made(compiled) = ptx { &compiled.code[..] } else { &[] };
    for (module, code) in modules.iter().zip(code) {
        let target = module.target;
        let _ = write!(
            list,
            "Module {{ name: {:?}, sm: {}, exact: {}, version: {:?}, kernels: &[",
            module.name, target.sm, target.exact, module.version
        );
        for k in &module.kernels {
            let _ = write!(
                list,
                "Kernel {{ name: {:?}, params: {}, registers: {:?} }}, ",
                k.name, k.params, k.registers
            );
        }
        let _ = write!(list, "], ptx: {}, code: &[", blob(&module.ptx_gz)?);
        for code in code {
            let _ = write!(list, "Code {{ sm: {}, gzip: {} }}, ", code.sm, blob(&code.gz)?);
        }
        list.push_str("] },\n");
    }
    text.push_str(&list);
    text.push_str("];\n");
    let path = out.join("built.rs");
    fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))
}
