//! What the tokenizer of a file may take of time and memory, and what becomes of its panics.
//!
//! The `tokenizers` crate calls our normalizers and patterns from places that drop errors, and panics on some of its
//! own input. [`guarded`] sets the budget of one call, and turns both into an error. Nobody sees the report of a panic
//! that is caught here.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind, set_hook, take_hook};
use std::sync::Once;

/// Steps of patterns for a call, and for each byte of its text. Real patterns take some ten a byte; a pattern at this
/// limit takes about a second for a megabyte.
const STEPS: u64 = 1 << 26;
const STEPS_PER_BYTE: u64 = 128;
/// Bytes of normalized text for a call, and for each byte of its text. Real normalizers write at most three bytes
/// (`▁`) for one, but for a few characters.
const NORMALIZED: usize = 1 << 20;
const NORMALIZED_PER_BYTE: usize = 4;

thread_local! {
    static STEPS_LEFT: Cell<u64> = const { Cell::new(0) };
    static NORMALIZED_LEFT: Cell<usize> = const { Cell::new(0) };
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// An error on its way through a crate that would drop it.
struct Refusal(String);

/// Runs `work` on `bytes` bytes of text.
///
/// # Errors
/// Those of `work`, what [`refuse`] said, or that it panicked.
pub(super) fn guarded<T>(bytes: usize, work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                report(panic);
            }
        }));
    });
    STEPS_LEFT.set(STEPS.saturating_add(STEPS_PER_BYTE.saturating_mul(bytes as u64)));
    NORMALIZED_LEFT.set(NORMALIZED.saturating_add(NORMALIZED_PER_BYTE.saturating_mul(bytes)));
    GUARDED.set(true);
    // What a panic may leave half done is dropped: a tokenizer that did not load, or the caches of one call.
    let result = catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(false);
    result.unwrap_or_else(|payload| Err(reason(payload)))
}

fn reason(payload: Box<dyn Any + Send>) -> String {
    match payload.downcast::<Refusal>() {
        Ok(refusal) => refusal.0,
        Err(payload) => {
            let said = payload.downcast_ref::<&str>().copied();
            let said = said.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            format!("its parts do not fit together ({})", said.unwrap_or("no reason given"))
        }
    }
}

/// Ends the [`guarded`] call.
pub(super) fn refuse(why: String) -> ! {
    resume_unwind(Box::new(Refusal(why)))
}

/// Ends the [`guarded`] call because its patterns took too long.
pub(super) fn exceeded() -> ! {
    refuse("its patterns take too many steps on this text".into())
}

/// The steps left to a call.
pub(super) struct Steps(u64);

impl Steps {
    pub(super) fn new() -> Steps {
        Steps(STEPS_LEFT.get())
    }

    pub(super) fn take(&mut self, steps: u64) {
        match self.0.checked_sub(steps) {
            Some(left) => self.0 = left,
            None => exceeded(),
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        STEPS_LEFT.set(self.0);
    }
}

/// Ends the [`guarded`] call if a normalizer is about to make a piece of text, or has made one, of more than the bytes
/// that are left.
pub(super) fn check_normalized(bytes: usize) {
    if bytes > NORMALIZED_LEFT.get() {
        refuse("normalizer: it makes this text more than four times as long".into());
    }
}

/// Takes the bytes of a finished piece.
pub(super) fn spend_normalized(bytes: usize) {
    check_normalized(bytes);
    NORMALIZED_LEFT.set(NORMALIZED_LEFT.get() - bytes);
}
