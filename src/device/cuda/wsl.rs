//! WSL, where Windows' driver owns the GPU.
//!
//! It pages device memory out to the host's memory where Linux' driver is out of memory: no call fails, and everything runs at the
//! speed of the link. So below WSL the program asks how much is free before it allocates, and leaves more of it alone.

use std::fs::read_to_string;
use std::path::Path;
use std::sync::OnceLock;

/// Whether this is Linux below Windows.
pub fn on_wsl() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let text = |path: &str| read_to_string(path).unwrap_or_default();
        Path::new("/dev/dxg").exists()
            || is_kernel_of_wsl(&text("/proc/sys/kernel/osrelease"))
            || has_driver_of_wsl(&text("/proc/self/maps"))
    })
}

/// `5.15.153.1-microsoft-standard-WSL2`.
fn is_kernel_of_wsl(release: &str) -> bool {
    release.to_ascii_lowercase().contains("microsoft")
}

/// Windows' driver, which is always in a folder of this name, also in a container that hides the rest. `maps` lists the files that
/// are loaded.
fn has_driver_of_wsl(maps: &str) -> bool {
    maps.lines().any(|line| line.contains("/usr/lib/wsl/") && line.contains("libcuda"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wsl_is_known_by_its_kernel_and_by_its_driver() {
        for (release, want) in [
            ("5.15.153.1-microsoft-standard-WSL2\n", true),
            ("4.19.84-Microsoft-standard\n", true),
            ("6.5.0-1025-azure\n", false),
            ("6.8.0-45-generic\n", false),
            ("", false),
        ] {
            assert_eq!(is_kernel_of_wsl(release), want, "{release}");
        }
        let line = |path: &str| format!("7f2a4c000000-7f2a4c200000 r-xp 00000000 08:20 1234    {path}\n");
        for (path, want) in [
            ("/usr/lib/wsl/lib/libcuda.so.1", true),
            ("/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1", true),
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.560.35", false),
            ("/usr/lib/wsl/lib/libdxcore.so", false),
        ] {
            assert_eq!(has_driver_of_wsl(&line(path)), want, "{path}");
        }
    }
}
