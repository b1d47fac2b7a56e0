//! Any JSON as a config.json: refused, or sizes from which a list of tensors can be made.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::model::{hf_spec, wanted_tensors};

fuzz_target!(|data: &[u8]| {
    let Ok(json) = serde_json::from_slice(data) else { return };
    let Ok((_, spec)) = hf_spec(&json) else { return };
    if spec.check().is_ok() {
        wanted_tensors(&spec);
    }
});
