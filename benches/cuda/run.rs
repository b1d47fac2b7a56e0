//! The command line, and what is measured in which order.

use std::sync::Arc;

use tandem::Result;
use tandem::device::built;
use tandem::device::cuda::{self, CudaOptions};
use tandem::device::runtime::Runtime;

use crate::measure::Bench;
use crate::{attention, dense, elementwise, exchange, peak, quant};

pub fn main() {
    let (mut test, mut json, mut words) = (false, None, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--test" => test = true,
            "--bench" => {} // Cargo's
            "--json" => json = Some(args.next().expect("--json wants a file")),
            word => words.push(word.to_owned()),
        }
    }
    let rt: Arc<dyn Runtime> = if test {
        match emulated() {
            Some(rt) => rt,
            None => return println!("skipped: {}", built::NO_EMULATION.unwrap_or("no kernels")),
        }
    } else {
        match cuda::open(&CudaOptions::default()) {
            Ok(rt) => rt,
            Err(e) => return println!("skipped: NOTHING WAS MEASURED: {e}"),
        }
    };
    if let Err(e) = measure(rt, test, words, json) {
        eprintln!("bench cuda: {e}");
        std::process::exit(1);
    }
}

fn emulated() -> Option<Arc<dyn Runtime>> {
    use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime};
    cfg!(tandem_emulation).then(|| {
        Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).expect("an emulated device starts")) as _
    })
}

fn measure(rt: Arc<dyn Runtime>, test: bool, words: Vec<String>, json: Option<String>) -> Result<()> {
    let info = rt.info().clone();
    println!("{}, sm_{}, {} multiprocessors", info.name, info.sm, info.multiprocessors);
    let mut bench = Bench::new(rt, test, words)?;
    if !test {
        println!("copy: {:.0} GB/s (read + written)", bench.copy / 1e9);
    }
    peak::run(&mut bench)?;
    // The most telling first.
    dense::decode(&mut bench)?;
    dense::prefill(&mut bench)?;
    quant::decode(&mut bench)?;
    attention::decode(&mut bench)?;
    attention::prefill(&mut bench)?;
    exchange::round_trip(&mut bench)?;
    exchange::pages(&mut bench)?;
    elementwise::norms(&mut bench)?;
    elementwise::logits(&mut bench)?;
    elementwise::embeddings(&mut bench)?;
    elementwise::rope(&mut bench)?;
    elementwise::activations(&mut bench)?;
    bench.finish();
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&bench.json()).expect("plain values");
        std::fs::write(&path, text).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    Ok(())
}
