//! The per-layer sync table and the epochs of mailboxes under every interleaving of the three that hand rows over: the issuing
//! thread, the host's lane, the device.

/// What the file under test takes for `std::sync::atomic`.
mod atomics {
    pub use loom::sync::atomic::{AtomicU32, Ordering};
}
#[path = "../../src/engine/machine/sync.rs"]
mod sync;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::sync::mpsc;
use loom::thread;
use sync::{SyncState, SyncWord};

/// Memory that one side writes and another reads, which loom watches: an access beside a write is a failure.
#[derive(Default)]
struct Memory(UnsafeCell<u32>);

// SAFETY: what is being checked: loom fails the test where two threads touch it without an order.
unsafe impl Sync for Memory {}

impl Memory {
    fn write(&self, value: u32) {
        // SAFETY: loom watches the access.
        self.0.with_mut(|p| unsafe { *p = value });
    }

    fn read(&self) -> u32 {
        // SAFETY: as above.
        self.0.with(|p| unsafe { *p })
    }
}

#[derive(Default)]
struct Shared {
    word: SyncWord,
    out: Memory,
}

/// The issuing thread parks a cohort and looks whenever it comes by; what it finds ready has been written. Twice, in the same place.
#[test]
fn what_is_ready_has_been_written() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let (give, take) = mpsc::channel::<u32>();
        let lane = shared.clone();
        let host = thread::spawn(move || {
            for value in 1..=2 {
                let epoch = take.recv().unwrap();
                assert!(lane.word.begin(epoch), "nobody discards");
                lane.out.write(value);
                lane.word.complete(epoch);
            }
        });
        for value in 1..=2 {
            let epoch = shared.word.park();
            give.send(epoch).unwrap();
            // An iteration in which it is not ready goes on without it.
            while shared.word.look(epoch) == SyncState::Waiting {
                thread::yield_now();
            }
            assert_eq!(shared.word.look(epoch), SyncState::Ready);
            assert_eq!(shared.out.read(), value);
            shared.word.release(epoch);
        }
        host.join().unwrap();
    });
}

/// A cohort that is given up has either not begun, and never will, or is waited for; either way its memory is another's then.
#[test]
fn what_is_given_up_touches_nothing_afterwards() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let (give, take) = mpsc::channel::<u32>();
        let lane = shared.clone();
        let host = thread::spawn(move || {
            for value in [7, 8] {
                let epoch = take.recv().unwrap();
                if lane.word.begin(epoch) {
                    lane.out.write(value);
                    lane.word.complete(epoch);
                }
            }
        });
        let first = shared.word.park();
        give.send(first).unwrap();
        if !shared.word.discard(first) {
            while shared.word.look(first) == SyncState::Waiting {
                thread::yield_now();
            }
            shared.word.release(first);
        }
        // The pages and the buffers are free: somebody else writes there.
        shared.out.write(1);
        let second = shared.word.park();
        assert_ne!(first, second);
        give.send(second).unwrap();
        while shared.word.look(second) == SyncState::Waiting {
            thread::yield_now();
        }
        // A late answer about the first is none about the second.
        assert_eq!((shared.word.look(first), shared.out.read()), (SyncState::Waiting, 8));
        shared.word.release(second);
        host.join().unwrap();
    });
}

#[test]
fn a_failure_is_told_and_its_reason_is_there() {
    loom::model(|| {
        let shared = Arc::new(Shared::default());
        let lane = shared.clone();
        let epoch = shared.word.park();
        let host = thread::spawn(move || {
            assert!(lane.word.begin(epoch));
            // The reason, or a half-written result.
            lane.out.write(99);
            lane.word.fail(epoch);
        });
        match shared.word.look(epoch) {
            SyncState::Waiting => {}
            SyncState::Failed => assert_eq!(shared.out.read(), 99),
            SyncState::Ready => panic!("a failure is no result"),
        }
        host.join().unwrap();
        assert_eq!(shared.word.look(epoch), SyncState::Failed);
        shared.word.release(epoch);
        shared.word.park();
    });
}

/// A mailbox as `cuda/` has it: the device writes rows, then the epoch (release at system scope); the host polls the epoch (acquire),
/// reads the rows and writes the results, and makes them ready; the issuing thread has the device collect them and then publish the
/// next layer's rows in the same place.
#[test]
fn rows_in_a_mailbox_are_read_before_they_are_overwritten() {
    #[derive(Default)]
    struct Mailbox {
        epoch: AtomicU32,
        rows: Memory,
        out: Memory,
        word: SyncWord,
    }
    loom::model(|| {
        let mail = Arc::new(Mailbox::default());
        let (to_host, jobs) = mpsc::channel::<(u32, u32)>();
        let (to_device, lane) = mpsc::channel::<(bool, u32)>();
        let host = {
            let mail = mail.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    let (published, epoch) = jobs.recv().unwrap();
                    assert!(mail.word.begin(epoch));
                    while mail.epoch.load(Ordering::Acquire) != published {
                        thread::yield_now();
                    }
                    mail.out.write(10 * mail.rows.read());
                    mail.word.complete(epoch);
                }
            })
        };
        let device = {
            let mail = mail.clone();
            thread::spawn(move || {
                for layer in 1..=2 {
                    let (collect, published) = lane.recv().unwrap();
                    if collect {
                        assert_eq!(mail.out.read(), 10 * (layer - 1));
                    }
                    mail.rows.write(layer);
                    mail.epoch.store(published, Ordering::Release);
                }
            })
        };
        // The first layer's rows; their attention; collected, then the next layer's.
        let first = mail.word.park();
        to_device.send((false, 1)).unwrap();
        to_host.send((1, first)).unwrap();
        while mail.word.look(first) == SyncState::Waiting {
            thread::yield_now();
        }
        mail.word.release(first);
        let second = mail.word.park();
        to_device.send((true, 2)).unwrap();
        to_host.send((2, second)).unwrap();
        device.join().unwrap();
        host.join().unwrap();
        assert_eq!(mail.word.look(second), SyncState::Ready);
        assert_eq!(mail.out.read(), 20);
    });
}
