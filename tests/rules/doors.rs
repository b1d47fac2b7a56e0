//! What a folder offers stands in its `mod.rs`: modules are private, and what others use of them is re-exported.

use std::collections::BTreeMap;

use regex::Regex;

use crate::rooms::{code, files, repository};

/// Number of public modules of each room that has any. The numbers only fall. What stays public, and why:
///
/// - kernels and oracles (`amx`, `reference`, `simd`, `device::kernels`): tests and benches import them file by file;
/// - `device::{cuda, emulated, kernels}`: folders, each with its own `mod.rs` as its interface; `device::built` (constants of the build) and
///   `device::emulated::ffi` (the kernels compiled for the host) are namespaces: their short names need the module's;
/// - `model::formats::{gguf, safetensors}`: one file format each, with the same names in both; `model::synth` is a namespace (`synth::parse`,
///   `synth::spec`);
/// - `program::virtual_machine`: a namespace; other modules have a `run`, `Costs` and `Timeline` too.
const OPEN: [(&str, usize); 6] =
    [("amx", 7), ("device", 19), ("model", 4), ("program", 1), ("reference", 11), ("simd", 3)];

#[test]
fn public_modules_get_fewer() {
    let src = repository().join("src");
    let line = Regex::new(r"(?m)^\s*pub mod \w+(?:;| \{)").unwrap();
    let mut open = BTreeMap::<String, usize>::new();
    for path in files(&src) {
        let inside = path.strip_prefix(&src).unwrap().to_str().unwrap();
        let Some((room, _)) = inside.split_once('/').filter(|_| inside.ends_with(".rs")) else { continue };
        let count = line.find_iter(&code(&std::fs::read_to_string(&path).unwrap())).count();
        *open.entry(room.to_owned()).or_default() += count;
    }
    open.retain(|_, count| *count > 0);
    let listed: BTreeMap<String, usize> =
        OPEN.iter().map(|(room, count)| ((*room).to_owned(), *count)).collect();
    assert_eq!(
        open, listed,
        "public modules by room, against the list: more need a door (`mod` and `pub use`), fewer a new number"
    );
}
