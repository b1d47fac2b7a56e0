//! Writes starting points for the fuzzer into fuzz/corpus/<target>/ (git-ignored: they are made, not kept).

use std::fs;
use std::path::Path;

use tandem::model::{export, load, synth};
use tandem::tensor::DType;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for target in ["gguf", "safetensors", "config"] {
        fs::create_dir_all(corpus.join(target))?;
    }
    for name in synth::names() {
        let spec = Path::new(env!("CARGO_MANIFEST_DIR")).join("../specs").join(name).with_added_extension("json");
        fs::copy(spec, corpus.join("config").join(name))?;
    }
    for name in ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3"] {
        let model = load(&format!("synth:{name},dtype=q4_0,layers=1"))?;
        let bytes = export::to_gguf(&model)?;
        fs::write(corpus.join("gguf").join(name), &bytes)?;
        // The header alone is where the fuzzer can do most.
        fs::write(corpus.join("gguf").join(format!("{name}-header")), &bytes[..bytes.len().min(4096)])?;
        let dir = std::env::temp_dir().join(format!("tandem-seed-{}-{name}", std::process::id()));
        export::to_hf_folder(&model, &dir, DType::BF16, 1)?;
        let st = fs::read(dir.join("model.safetensors"))?;
        fs::write(corpus.join("safetensors").join(name), &st[..st.len().min(8192)])?;
        fs::remove_dir_all(&dir)?;
    }
    let good = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[8,12]}}"#;
    let mut small = (good.len() as u64).to_le_bytes().to_vec();
    small.extend_from_slice(good);
    small.extend_from_slice(&[0; 12]);
    fs::write(corpus.join("safetensors").join("small"), small)?;
    Ok(())
}
