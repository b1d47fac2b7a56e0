//! The command line, and what is measured in which order.

use std::sync::Arc;

use tandem::Result;
use tandem::device::cuda::{self, CudaOptions};
use tandem::device::{Runtime, built};

use crate::measure::Bench;
use crate::{attention, dense, elementwise, exchange, host_attention, load, peak, quant, sweep};

/// What is asked for.
#[derive(Default)]
struct Asked {
    test: bool,
    tiny: bool,
    load: bool,
    peak: bool,
    sweep: bool,
    json: Option<String>,
    words: Vec<String>,
}

pub fn main() {
    let mut asked = Asked::default();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--test" => asked.test = true,
            "--tiny" => asked.tiny = true,
            "--load" => asked.load = true,
            "--peak" => asked.peak = true,
            "--sweep" => asked.sweep = true,
            "--bench" => {} // Cargo's
            "--json" => asked.json = Some(args.next().expect("--json wants a file")),
            word => asked.words.push(word.to_owned()),
        }
    }
    if let Err(e) = on_a_device(&asked) {
        eprintln!("bench cuda: {e}");
        std::process::exit(1);
    }
}

fn on_a_device(asked: &Asked) -> Result<()> {
    if asked.test {
        return match emulated() {
            Some(rt) => measure(rt, asked),
            None => {
                println!("skipped: {}", built::NO_EMULATION.unwrap_or("no kernels"));
                Ok(())
            }
        };
    }
    // As for the tests: an older GPU's kernels on whatever is there.
    let sm = std::env::var("TANDEM_TEST_SM").ok().filter(|v| !v.is_empty());
    let sm = sm.map(|v| v.parse().unwrap_or_else(|_| panic!("TANDEM_TEST_SM={v}: not a number")));
    let rt = match cuda::open(&CudaOptions { pretend_sm: sm, ..CudaOptions::default() }) {
        Ok(rt) => rt,
        Err(e) => {
            println!("skipped: NOTHING WAS MEASURED: {e}");
            let numbers = asked.load || asked.peak || asked.sweep || asked.json.is_some();
            return if numbers { Err(e) } else { Ok(()) };
        }
    };
    if asked.load {
        return write(asked, &load::run(&rt)?);
    }
    measure(rt, asked)
}

fn write(asked: &Asked, value: &serde_json::Value) -> Result<()> {
    if let Some(path) = &asked.json {
        let text = serde_json::to_string_pretty(value).expect("plain values");
        std::fs::write(path, text).unwrap_or_else(|e| panic!("{path}: {e}"));
    }
    Ok(())
}

fn emulated() -> Option<Arc<dyn Runtime>> {
    use tandem::device::emulated::{EmulatedOptions, EmulatedRuntime};
    cfg!(tandem_emulation).then(|| {
        Arc::new(EmulatedRuntime::new(EmulatedOptions::default()).expect("an emulated device starts")) as _
    })
}

fn measure(rt: Arc<dyn Runtime>, asked: &Asked) -> Result<()> {
    let info = rt.info().clone();
    println!("{}, sm_{}, {} multiprocessors", info.name, info.sm, info.multiprocessors);
    let mut bench = Bench::new(rt, asked.test || asked.tiny, asked.words.clone())?;
    if !bench.test {
        println!("copy: {:.0} GB/s (read + written)", bench.copy / 1e9);
    }
    peak::run(&mut bench)?;
    if asked.peak {
        return write(asked, &bench.json());
    }
    if asked.sweep {
        sweep::run(&mut bench)?;
        return write(asked, &bench.json());
    }
    // The most telling first.
    dense::decode(&mut bench)?;
    dense::prefill(&mut bench)?;
    quant::decode(&mut bench)?;
    attention::decode(&mut bench)?;
    attention::prefill(&mut bench)?;
    exchange::round_trip(&mut bench)?;
    exchange::pages(&mut bench)?;
    host_attention::run(&mut bench)?;
    elementwise::norms(&mut bench)?;
    elementwise::logits(&mut bench)?;
    elementwise::top_k(&mut bench)?;
    elementwise::embeddings(&mut bench)?;
    elementwise::rope(&mut bench)?;
    elementwise::activations(&mut bench)?;
    if asked.test {
        sweep::run(&mut bench)?;
    }
    bench.finish();
    write(asked, &bench.json())
}
