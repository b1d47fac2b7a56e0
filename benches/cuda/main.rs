//! Every GPU kernel against the limits measured in the same run: GB/s of a copy, TFLOP/s of the matrix units.
//!
//!   cargo bench --bench cuda                       Llama-3-8B and SmolLM2 shapes on the GPU of this machine
//!   cargo bench --bench cuda -- gemm bf16          only lines that contain all words
//!   cargo bench --bench cuda -- --json FILE        the table as JSON too
//!   cargo bench --bench cuda -- --load             instead: how long each file of kernels takes to load, its registers
//!   cargo bench --bench cuda -- --peak             instead: the peak of the matrix units alone
//!   cargo bench --bench cuda -- --sweep            instead: products of 5 rows and more by every number of splits of k
//!   cargo bench --bench cuda -- --test             tiny shapes in host emulation, answers checked, no timing
//!   cargo bench --bench cuda -- --tiny             the same on the GPU, or on the stand-in for its driver
//!
//! Answers are verified before anything is timed. Weights are cold: each call takes the next of enough copies to
//! overflow the L2, as in a forward pass; calls are recorded as a graph, as decode runs them. Without a GPU there is
//! nothing to time, and it says so; where numbers were asked for (--json, --load, --peak) that is an error.

fn main() {
    #[cfg(tandem_kernels)]
    run::main();
    #[cfg(not(tandem_kernels))]
    println!(
        "skipped: this build has no kernels ({})",
        tandem::device::built::NO_ABI.unwrap_or("no reason known")
    );
}

#[cfg(tandem_kernels)]
mod attention;
#[cfg(tandem_kernels)]
mod data;
#[cfg(tandem_kernels)]
mod dense;
#[cfg(tandem_kernels)]
mod elementwise;
#[cfg(tandem_kernels)]
mod exchange;
#[cfg(tandem_kernels)]
mod host_attention;
#[cfg(tandem_kernels)]
mod load;
#[cfg(tandem_kernels)]
mod measure;
#[cfg(tandem_kernels)]
mod peak;
#[cfg(tandem_kernels)]
mod quant;
#[cfg(tandem_kernels)]
mod run;
#[cfg(tandem_kernels)]
mod sweep;
