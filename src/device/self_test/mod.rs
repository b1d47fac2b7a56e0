//! Checks a device's kernels against the host's arithmetic, before anybody relies on them.
//!
//! Each group launches its kernels on small problems with numbers by chance and compares every element with its definition in
//! f64, within what the kernel's arithmetic allows. The [quick](Depth::Quick) part takes about a second on a GPU, [all of
//! it](Depth::Full) some ten. `tandem doctor --gpu` prints the report; [`self_test_opened_gpus`] makes every GPU pass the quick
//! part when it is opened, once for each program, driver and device (`vet`).
//!
//! A kernel that fails is not used: `vet` has which others take its place.

mod report;
mod store;
mod vet;
mod watch;

#[cfg(tandem_kernels)]
mod attention;
#[cfg(tandem_kernels)]
mod ends;
#[cfg(tandem_kernels)]
mod exchange;
#[cfg(tandem_kernels)]
mod experts;
#[cfg(tandem_kernels)]
mod layer;
#[cfg(tandem_kernels)]
mod numbers;
#[cfg(tandem_kernels)]
mod probe;
#[cfg(tandem_kernels)]
mod products;

pub use report::{About, Depth, GroupReport, SelfTest, Verdict};
pub use vet::self_test_opened_gpus;
pub(super) use vet::vetted;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use self::store::Store;
use super::runtime::Runtime;
use crate::Result;

/// What fails where recorded work does: no kernel.
const GRAPHS: &str = "recorded work";

/// Runs the self-test on `runtime`, without kernels in `known`, which failed before.
///
/// # Errors
/// [`crate::Error::Unsupported`] if this program has no kernels.
#[cfg(tandem_kernels)]
fn run(runtime: &Arc<dyn Runtime>, depth: Depth, known: &BTreeSet<String>) -> Result<SelfTest> {
    use self::probe::Probe;
    use self::watch::Watch;
    use crate::device::built::MODULES;

    const GROUPS: [(&str, fn(&mut Probe, Depth)); 11] = [
        ("embed & norm", ends::embed_and_norm),
        ("products, dense", products::dense),
        ("products, quantised", products::quantised_products),
        ("experts", experts::experts),
        ("attention, decode", attention::decode),
        ("attention, prefill", attention::prefill),
        ("rope & append", layer::rope),
        ("activation", layer::activation),
        ("rows & pages", exchange::exchange),
        ("logits & pick", ends::logits),
        ("graphs", exchange::graphs),
    ];
    let begun = std::time::Instant::now();
    let watch = Arc::new(Watch::watching(runtime.clone(), known.clone()));
    let mut probe = Probe::new(watch.clone());
    let (mut groups, mut before) = (Vec::new(), BTreeSet::new());
    for (name, group) in GROUPS {
        let at = std::time::Instant::now();
        probe.begin_group();
        group(&mut probe, depth);
        let launched = watch.launched();
        let kernels = launched.difference(&before).count();
        groups.push(probe.end_group(name, kernels, at.elapsed().as_secs_f64()));
        before = launched;
    }
    // What the tests and the benches of kernels launch is no model's.
    let used = |name: &&str| !["conformance", "peak"].iter().any(|other| name.starts_with(other));
    let all: BTreeSet<&str> = MODULES.iter().flat_map(|m| m.kernels).map(|k| k.name).filter(used).collect();
    let untested = all.into_iter().filter(|name| runtime.has_kernel(name) && !before.contains(*name));
    Ok(SelfTest {
        about: About::of(runtime.info()),
        depth,
        groups,
        untested: untested.map(str::to_owned).collect(),
        seconds: begun.elapsed().as_secs_f64(),
    })
}

#[cfg(not(tandem_kernels))]
fn run(runtime: &Arc<dyn Runtime>, _depth: Depth, _known: &BTreeSet<String>) -> Result<SelfTest> {
    Err(crate::Error::Unsupported(format!("{}: no kernels for it in this build", runtime.info().name)))
}

/// Runs all of the self-test on `runtime`, and keeps the verdict in the folder `keep`.
///
/// # Errors
/// [`crate::Error::Unsupported`] if this program has no kernels; [`crate::Error::Io`] if the verdict cannot be kept.
pub(super) fn all_of(runtime: &Arc<dyn Runtime>, keep: Option<&Path>) -> Result<SelfTest> {
    let report = run(runtime, Depth::Full, &BTreeSet::new())?;
    if let Some(folder) = keep {
        Store::at(folder).save(&report)?;
    }
    Ok(report)
}

/// `n` rows of `k` numbers by chance, as a file has them.
#[cfg(tandem_kernels)]
fn quantised(dtype: crate::tensor::DType, n: usize, k: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; n * dtype.row_bytes(k).expect("whole blocks")];
    crate::tensor::quantise_row(dtype, &numbers::some(seed, n * k), &mut bytes);
    bytes
}
