//! Runs independent jobs on as many threads as Cargo grants.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Result;

/// The results of `work` for each item, in the items' order.
///
/// # Errors
/// Those of all items that failed, joined: compilers' messages are best seen at once.
pub fn run<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let jobs = std::env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1usize);
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<R>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    let result = work(item);
                    *results[at].lock().expect("no job panics while it stores") = Some(result);
                }
            });
        }
    });
    let mut made = Vec::new();
    let mut failed = Vec::new();
    for result in results {
        match result.into_inner().expect("no job panicked").expect("every job ran") {
            Ok(value) => made.push(value),
            Err(message) => failed.push(message),
        }
    }
    if failed.is_empty() { Ok(made) } else { Err(failed.join("\n")) }
}
