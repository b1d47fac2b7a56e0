//! Any bytes as a safetensors file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::model::formats::safetensors;
use tandem::tensor::Bytes;

fuzz_target!(|data: &[u8]| {
    let (skip, raw) = (|name: &str| name.starts_with("skip"), |name: &str| name.starts_with("raw"));
    if let Ok(found) = safetensors::parse(&Bytes::copy_of(data), &skip, &raw) {
        let floats = found.tensors.iter().map(|(_, t)| t.data.len());
        let total: usize = floats.chain(found.raw.iter().map(|(_, r)| r.data.len())).sum();
        assert!(total <= data.len(), "tensors overlap: {total} bytes of {}", data.len());
    }
});
