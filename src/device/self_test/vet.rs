//! Leaves out of a device what fails its self-test.
//!
//! | what fails | what runs instead |
//! |---|---|
//! | `*_sm90a` (wgmma) | the kernels of 8.0, by `mma` |
//! | `gemv_*`, `linear_*` (few rows) | `gemm`, of quantised weights after decoding them |
//! | `experts_*` | experts of such weights are the CPU's |
//! | recorded work | steps are launched kernel by kernel |
//! | anything else | nothing: the device is not opened |

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::store::Store;
use super::watch::Watch;
use super::{About, Depth, GRAPHS, SelfTest, Verdict, run};
use crate::device::notice;
use crate::device::runtime::Runtime;
use crate::{Error, Result};

/// Where verdicts are kept; `Some(None)`: nowhere, GPUs are tested whenever they are opened.
static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();

/// A self-test that took longer than this is told of, in seconds.
const PATIENCE: f64 = 3.0;

/// Makes [`open`](crate::device::open()) test every GPU that it opens, and keep the verdict in `folder`: the same program, driver
/// and device are then not tested again. Without a folder they are, each time. The first call of a process counts.
pub fn self_test_opened_gpus(folder: Option<PathBuf>) {
    let _ = FOLDER.set(folder);
}

/// `runtime` without what fails its self-test, if [`self_test_opened_gpus`] asks for one. `fresh` opens the same device once
/// more, all of its memory, for the time of the test.
///
/// # Errors
/// [`Error::Device`] if a kernel fails that no other can replace; as `fresh`.
pub fn vetted(
    runtime: Arc<dyn Runtime>,
    fresh: &dyn Fn() -> Result<Arc<dyn Runtime>>,
) -> Result<Arc<dyn Runtime>> {
    match FOLDER.get() {
        None => Ok(runtime),
        Some(folder) => {
            let report = verdict(folder.as_deref(), About::of(runtime.info()), fresh)?;
            admitted(runtime, &report)
        }
    }
}

/// The verdict that is kept, or a new one. Of one that a lost device cut short, the rest is made up for.
fn verdict(
    folder: Option<&Path>,
    about: About,
    fresh: &dyn Fn() -> Result<Arc<dyn Runtime>>,
) -> Result<SelfTest> {
    let kept = folder.and_then(|folder| Store::at(folder).load(&about));
    if let Some(report) = kept.as_ref().filter(|report| report.is_complete()) {
        return Ok(report.clone());
    }
    let known = kept.iter().flat_map(|report| report.failed().into_keys()).collect();
    let mut report = run(&fresh()?, Depth::Quick, &known)?;
    if report.seconds > PATIENCE {
        let (name, seconds) = (&about.device, report.seconds);
        notice::say(&format!("{name}: its kernels were checked, once, in {seconds:.1} s"));
    }
    // What failed before was not run again.
    for group in kept.iter().flat_map(|report| &report.groups).filter(|g| !g.failed.is_empty()) {
        let same = report.groups.iter_mut().find(|g| g.name == group.name);
        let same = same.expect("the same program has the same groups");
        same.failed.extend(group.failed.clone());
        same.outcome = Verdict::Failed;
    }
    if let Some(Err(e)) = folder.map(|folder| Store::at(folder).save(&report)) {
        notice::say(&format!("the self-test of {} will be run again: {e}", about.device));
    }
    Ok(report)
}

/// What runs in place of a kernel; `None`: nothing.
fn instead_of(kernel: &str) -> Option<&'static str> {
    match kernel {
        GRAPHS => Some("steps are launched kernel by kernel"),
        k if k.ends_with("_sm90a") => Some("the kernel of older GPUs runs instead"),
        k if k.starts_with("experts_") => Some("experts run on the CPU"),
        k if k.starts_with("gemv_") || k.starts_with("linear_") => Some("gemm runs instead"),
        _ => None,
    }
}

fn admitted(runtime: Arc<dyn Runtime>, report: &SelfTest) -> Result<Arc<dyn Runtime>> {
    let failed = report.failed();
    if failed.is_empty() && report.is_complete() {
        return Ok(runtime);
    }
    let name = &report.about.device;
    let refused = |problem: String| Error::Device { what: format!("{name}: its self-test failed"), problem };
    let without = failed.iter().find(|(kernel, _)| instead_of(kernel).is_none());
    if let Some((kernel, why)) = without {
        let more = match failed.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        return Err(refused(format!(
            "{kernel}{more}: {why}; the device is not used. tandem doctor --gpu says what to report; `device` cpu runs without it"
        )));
    }
    let not_run = report.groups.iter().find(|g| g.outcome == Verdict::NotRun);
    if let Some(group) = not_run {
        let why = group.why.as_deref().unwrap_or("no reason");
        return Err(refused(format!(
            "{} could not be checked: {why}; `device` cpu runs without it",
            group.name
        )));
    }
    // One sentence for all that the same takes the place of: a mistake is rarely one kernel's alone.
    let mut notices = Vec::new();
    for instead in failed.keys().filter_map(|k| instead_of(k)).collect::<BTreeSet<_>>() {
        let same: Vec<_> = failed.iter().filter(|(k, _)| instead_of(k) == Some(instead)).collect();
        let names = same.iter().map(|(k, _)| k.as_str()).collect::<Vec<_>>().join(", ");
        let why = same[0].1;
        notices.push(format!(
            "{name}: {names} failed the self-test ({why}): {instead}, which is slower; tandem doctor --gpu says what to report"
        ));
    }
    Ok(Arc::new(Watch::without(runtime, failed.into_keys().collect(), notices)))
}
