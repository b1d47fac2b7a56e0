//! `--gpu`: a device's kernels against the host's arithmetic, as rows of the report.

use std::path::PathBuf;

use tandem::device::{GroupReport, SelfTest, Verdict};
use tandem::hub::Cache;

/// Where verdicts are kept; `None` without a cache folder.
pub fn verdicts() -> Option<PathBuf> {
    Cache::from_env().ok().map(|cache| cache.home().join("self-test"))
}

/// Rows of the report: a mark, the subject, the finding.
pub fn describe(test: &SelfTest) -> Vec<(char, String, String)> {
    let about = &test.about;
    let device = format!("{}, {}, in {:.1} s", about.device, about.driver(), test.seconds);
    let mut rows = vec![('+', "self-test".to_owned(), device)];
    for group in &test.groups {
        let (mark, found) = verdict(group);
        rows.push((mark, "kernels".into(), format!("{}: {found}", group.name)));
    }
    if !test.untested.is_empty() {
        let (n, names) = (test.untested.len(), test.untested.join(" "));
        rows.push(('-', "kernels".into(), format!("{n} that no check runs: {names}")));
    }
    if !test.passed() {
        rows.push(('!', "to report".into(), line(test)));
    }
    rows
}

fn verdict(group: &GroupReport) -> (char, String) {
    let checks = format!("{} checks of {} kernels in {:.1} s", group.checks, group.kernels, group.seconds);
    let why = group.why.as_deref().unwrap_or("no reason");
    match group.outcome {
        Verdict::Passed => {
            ('+', format!("right; {checks}, errors up to {:.0}% of those allowed", 100.0 * group.worst))
        }
        Verdict::Failed => {
            let each = group.failed.iter().map(|(kernel, why)| format!("{kernel} ({why})"));
            ('!', format!("WRONG: {}", each.collect::<Vec<_>>().join("; ")))
        }
        Verdict::Skipped => ('-', format!("skipped: {why}")),
        Verdict::NotRun => ('!', format!("not run: {why}")),
    }
}

/// One line that says all that a report needs: program, device, driver, and the first failure of each group.
fn line(test: &SelfTest) -> String {
    let about = &test.about;
    let mut parts = vec![
        format!("tandem {} build {}", about.version, about.build),
        format!("{} sm_{}", about.device, about.sm),
        about.driver(),
    ];
    for group in test.groups.iter().filter(|g| g.outcome == Verdict::Failed) {
        for (kernel, why) in group.failed.iter().take(1) {
            let more = group.failed.len() - 1;
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            parts.push(format!("{}: {kernel}{more}: {why}", group.name));
        }
    }
    for group in test.groups.iter().filter(|g| g.outcome == Verdict::NotRun) {
        parts.push(format!("{}: not run", group.name));
    }
    parts.join(" | ")
}

/// What failed, as an error.
pub fn sentence(test: &SelfTest) -> String {
    let bad = |g: &&GroupReport| matches!(g.outcome, Verdict::Failed | Verdict::NotRun);
    let names: Vec<_> = test.groups.iter().filter(bad).map(|g| g.name.as_str()).collect();
    format!("the self-test of {} failed: {}", test.about.device, names.join("; "))
}
