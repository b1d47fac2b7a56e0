//! Any bytes as a safetensors file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::model::formats::safetensors;
use tandem::tensor::Bytes;

fuzz_target!(|data: &[u8]| {
    if let Ok(tensors) = safetensors::parse(&Bytes::copy_of(data), &|name| name.starts_with("skip")) {
        let total: usize = tensors.iter().map(|(_, t)| t.data.len()).sum();
        assert!(total <= data.len(), "tensors overlap: {total} bytes of {}", data.len());
    }
});
