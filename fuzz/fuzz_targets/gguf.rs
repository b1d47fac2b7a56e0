//! Any bytes as a GGUF file: refused, or a model that holds what it promises.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::model::formats::gguf::Gguf;
use tandem::model::{describe, from_gguf, validate};
use tandem::tensor::Bytes;

fuzz_target!(|data: &[u8]| {
    let Ok(file) = Gguf::parse(Bytes::copy_of(data)) else { return };
    for (name, t) in &file.tensors {
        assert!(t.data.len() <= data.len(), "{name} is longer than its file");
    }
    let Ok(model) = from_gguf(file, "fuzz.gguf".into()) else { return };
    validate(&model.spec, &model.weights).expect("a loaded model is valid");
    describe(&model);
});
