//! Whether tiles are available, in hardware or emulated.

use super::{detect, emulate};

/// Whether this process may use AMX tiles with bf16 and int8; otherwise why not.
///
/// True on hardware with permission (requested here, once), and also where tile instructions are
/// emulated ([`emulate::install`] was called, or `TANDEM_AMX=emulate` is set: for tests, slow).
///
/// # Errors
/// The first missing requirement, as a sentence.
pub fn available() -> Result<(), &'static str> {
    match detect::hardware() {
        Ok(()) => Ok(()),
        Err(_) if emulate::installed() => Ok(()),
        Err(_) if std::env::var_os("TANDEM_AMX").is_some_and(|v| v == "emulate") => emulate::install(),
        Err(why) => Err(why),
    }
}
