//! Aborts the process if a run does not end: a deadlock is a failure with a seed, not a job that never ends.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

pub struct Watchdog {
    beats: Sender<u64>,
}

impl Watchdog {
    /// No run takes longer than `limit`.
    pub fn new(limit: Duration) -> Watchdog {
        let (beats, heard) = channel::<u64>();
        std::thread::spawn(move || {
            let mut seed = None;
            loop {
                match heard.recv_timeout(limit) {
                    Ok(next) => seed = Some(next),
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        if let Some(seed) = seed {
                            eprintln!("seed {seed} has run for more than {limit:?}: deadlock");
                            std::process::abort();
                        }
                    }
                }
            }
        });
        Watchdog { beats }
    }

    /// The run of this seed begins.
    pub fn begin(&self, seed: u64) {
        self.beats.send(seed).expect("the watchdog watches");
    }
}
