//! Rust's side of C headers: the parameter structs in `cuda/include/abi.h`, the emulator's `cuda/host/api.h`.

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
    write("abi.rs", text)?;
    Ok(Part::Made(()))
}

/// Writes the declarations of the host emulator, `emulator.rs`. libclang is there.
///
/// # Errors
/// It finds errors in the header.
pub fn declare_emulator() -> Result<()> {
    // libclang's Python package comes without the compiler's own headers; these two are all it takes.
    let integers =
        "typedef __SIZE_TYPE__ size_t; typedef __UINT32_TYPE__ uint32_t; typedef __UINT64_TYPE__ uint64_t;";
    let own = "own-headers";
    for name in ["stddef.h", "stdint.h"] {
        write(&format!("{own}/{name}"), format!("#ifndef OWN\n#define OWN\n{integers}\n#endif\n"))?;
    }
    let bindings = bindgen::Builder::default()
        .header("cuda/host/api.h")
        .clang_args(["-nostdinc", "-isystem"])
        .clang_arg(out(own).to_string_lossy())
        .allowlist_item("(tandem_emu|TANDEM_EMU)_.*")
        .default_enum_style(bindgen::EnumVariation::Consts)
        .prepend_enum_name(false)
        .derive_default(true)
        .formatter(bindgen::Formatter::None)
        .generate()
        .map_err(|e| format!("cuda/host/api.h: {e}"))?;
    write("emulator.rs", bindings.to_string())
}

fn out(name: &str) -> PathBuf {
    PathBuf::from(std::env::var("OUT_DIR").expect("Cargo sets OUT_DIR")).join(name)
}

fn write(name: &str, text: String) -> Result<()> {
    let path = out(name);
    let folder = path.parent().expect("a file in OUT_DIR has a folder");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&path, text))
        .map_err(|e| format!("{}: {e}", path.display()))
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
        // Its first words; what follows lists every name that it looked for.
        let why =
            e.lines().next().unwrap_or_default().split(" matching").next().unwrap_or_default().to_owned();
        format!("no usable libclang ({why}); {}, `apt install libclang-dev` too", tools::REMEDY)
    })
}

/// Structs whose names end in `Params`, in bindgen's output.
fn parameter_structs(text: &str) -> Vec<String> {
    let tokens: Vec<&str> = text.split_whitespace().collect();
    let names = tokens.windows(2).filter(|w| w[0] == "struct").map(|w| w[1].trim_end_matches(['{', ';']));
    names.filter(|n| n.ends_with("Params")).map(Into::into).collect()
}
