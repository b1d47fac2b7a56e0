//! Rust's side of the parameter structs in `cuda/include/abi.h`.

use std::fs;
use std::path::PathBuf;

use crate::{Part, Result, tools};

/// Writes `abi.rs` to OUT_DIR.
///
/// # Errors
/// libclang is there, and finds errors in the header.
pub fn generate() -> Result<Part<()>> {
    if let Err(why) = find_libclang() {
        return Ok(Part::Missing(why));
    }
    let bindings = bindgen::Builder::default()
        .header("cuda/include/abi.h")
        .clang_args(["-DTANDEM_BINDGEN", "-Icuda/include"])
        // Addresses have the runtime's own type.
        .blocklist_type("DevPtr")
        .parse_callbacks(Box::new(DevPtrIsPlain))
        .raw_line("use crate::device::runtime::DevPtr;")
        .derive_default(true)
        .derive_debug(true)
        .derive_copy(true)
        // Padding is a field, so `Default` zeroes it and every byte of a struct is initialised.
        .explicit_padding(true)
        .layout_tests(true)
        .formatter(bindgen::Formatter::None)
        .generate()
        .map_err(|e| format!("cuda/include/abi.h: {e}"))?;
    let mut text = bindings.to_string();
    for name in parameter_structs(&text) {
        text += &format!(
            "// SAFETY: bindgen made it of the C struct of the same name, with padding as fields.\n\
             unsafe impl crate::device::runtime::Params for {name} {{}}\n"
        );
    }
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("Cargo sets OUT_DIR")).join("abi.rs");
    fs::write(&out, text).map_err(|e| format!("{}: {e}", out.display()))?;
    Ok(Part::Made(()))
}

/// Tells bindgen that `DevPtr`, which it does not see, has the traits it derives.
#[derive(Debug)]
struct DevPtrIsPlain;

impl bindgen::callbacks::ParseCallbacks for DevPtrIsPlain {
    fn blocklisted_type_implements_trait(
        &self,
        name: &str,
        _: bindgen::callbacks::DeriveTrait,
    ) -> Option<bindgen::callbacks::ImplementsTrait> {
        name.ends_with("DevPtr").then_some(bindgen::callbacks::ImplementsTrait::Yes)
    }
}

/// Loads libclang, which bindgen would otherwise look for itself, and panic when there is none.
fn find_libclang() -> std::result::Result<(), String> {
    if tools::variable("LIBCLANG_PATH").is_none()
        && let Some(folder) = tools::packaged_libclang()
    {
        // SAFETY: this program has one thread here.
        unsafe { std::env::set_var("LIBCLANG_PATH", folder) };
    }
    clang_sys::load().map_err(|e| {
        let why = e.lines().next().unwrap_or_default().to_owned();
        format!("no usable libclang ({why}); {}, `apt install libclang-dev` too", tools::REMEDY)
    })
}

/// Structs whose names end in `Params`, in bindgen's output.
fn parameter_structs(text: &str) -> Vec<String> {
    let tokens: Vec<&str> = text.split_whitespace().collect();
    let names = tokens.windows(2).filter(|w| w[0] == "struct").map(|w| w[1].trim_end_matches(['{', ';']));
    names.filter(|n| n.ends_with("Params")).map(Into::into).collect()
}
