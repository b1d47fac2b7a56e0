//! What all requests share: the options, the model once it is there, counters, and whether the server is about to end.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{Notify, Semaphore};

use super::error::ApiError;
use super::metrics::Metrics;
use super::model::Loaded;
use super::options::Options;

/// See the [module](self).
pub(super) struct App {
    pub options: Options,
    pub metrics: Metrics,
    pub loaded: OnceLock<Loaded>,
    /// Seconds since 1970 of the start.
    pub started: u64,
    /// The start.
    pub begun: Instant,
    /// Room for bodies, in KiB.
    pub bodies: Arc<Semaphore>,
    draining: AtomicBool,
    /// Requests that are being answered.
    open: AtomicUsize,
    closed: Notify,
    /// Numbers requests.
    next: AtomicU64,
    /// Makes their ids those of this process.
    salt: u64,
}

impl App {
    pub fn new(options: Options) -> App {
        use std::hash::{BuildHasher, Hasher};
        App {
            metrics: Metrics::default(),
            loaded: OnceLock::new(),
            started: unix_time(),
            begun: Instant::now(),
            bodies: Arc::new(Semaphore::new(options.bodies >> 10)),
            draining: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            closed: Notify::new(),
            next: AtomicU64::new(1),
            // The keys of a new hasher are random.
            salt: std::hash::RandomState::new().build_hasher().finish(),
            options,
        }
    }

    /// The model, if requests may use it now.
    pub fn ready(&self) -> Result<&Loaded, ApiError> {
        if self.is_draining() {
            return Err(ApiError::unavailable(
                "draining",
                "the server is about to end and takes no requests",
            ));
        }
        let loading = || ApiError::unavailable("loading", "the model is being loaded");
        self.loaded.get().ok_or_else(loading)
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// No request is taken from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
        self.closed.notify_waiters();
    }

    /// A request that is being answered until it is dropped.
    pub fn open(self: &Arc<App>) -> Open {
        self.open.fetch_add(1, Ordering::SeqCst);
        Open(self.clone())
    }

    /// Waits until no request is being answered.
    pub async fn idle(&self) {
        loop {
            let closed = self.closed.notified();
            let mut closed = std::pin::pin!(closed);
            // From here on no notification is missed.
            closed.as_mut().enable();
            if self.open.load(Ordering::SeqCst) == 0 {
                return;
            }
            closed.await;
        }
    }

    /// A new id, like `chatcmpl-...`.
    pub fn id(&self, prefix: &str) -> String {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:016x}{n:08x}", self.salt)
    }

    /// A seed for a request that names none.
    pub fn seed(&self) -> u64 {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        // The golden ratio spreads successive numbers; samplers mix seeds themselves.
        (self.salt ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 11
    }
}

/// See [`App::open`].
pub(super) struct Open(Arc<App>);

impl Drop for Open {
    fn drop(&mut self) {
        if self.0.open.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.closed.notify_waiters();
        }
    }
}

/// Seconds since 1970.
pub(super) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
