//! Writes a model with random weights as a GGUF file, for other engines to run beside this one:
//!
//! ```console
//! $ cargo run --release --example synth_gguf -- synth:llama-3.2-1b,dtype=q4_0 1b-q4_0.gguf
//! ```
//!
//! The whole file is made in memory first.

use std::path::PathBuf;
use std::process::ExitCode;

use tandem::atomic_file;
use tandem::model::{export_gguf, load};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, file] = &args[..] else {
        eprintln!("usage: synth_gguf synth:NAME[,dtype=TYPE] FILE.gguf");
        return ExitCode::from(2);
    };
    match write(name, PathBuf::from(file)) {
        Ok(bytes) => {
            eprintln!("{file}: {:.2} GB", bytes as f64 / 1e9);
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn write(name: &str, file: PathBuf) -> tandem::Result<usize> {
    let bytes = export_gguf(&load(name)?)?;
    atomic_file::replace(&file, |out| out.write_all(&bytes))?;
    Ok(bytes.len())
}
