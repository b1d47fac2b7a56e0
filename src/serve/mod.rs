//! An OpenAI-compatible server over one [`Service`](crate::engine::Service). It knows HTTP and JSON; what a request means is
//! in [`text`](crate::text) and in the batch loop.
//!
//! ```text
//!                            a few async threads                                   the engine's thread
//! client ─► listen ─► api ─► body ─► fields ─► settings, conversation ─► run ─ send ─► Service: step, step, step …
//!    ▲                                              │ apart: template, tokens     │
//!    └───── answer: JSON or a stream of events ◄── form ◄── choice ◄── channel ◄──┘ deliver
//! ```
//!
//! [`Server::start`] listens at once; until [`Server::ready`] gives it a [`Model`], and after [`Server::drain`], requests
//! get 503. A client that goes away drops its `Run`, which cancels its requests.
//!
//! | item | what |
//! |---|---|
//! | [`Server`] | listens, answers, drains |
//! | [`Options`], [`Keys`], [`Cors`], [`Log`] | how it listens, whom it lets in, what it bounds |
//! | [`Model`] | what it serves, once it is loaded |

mod answer;
mod api;
mod app;
mod body;
mod choice;
mod complete;
mod conversation;
mod cors;
mod error;
mod fields;
mod form;
mod keys;
mod listen;
mod metrics;
mod model;
mod options;
mod places;
mod prompt;
mod recent;
mod record;
mod run;
mod settings;
mod socket;
mod wanted;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use self::cors::Cors;
pub use self::keys::Keys;
pub use self::model::Model;
pub use self::options::{Log, Options};

use self::app::App;
use self::model::Loaded;
use crate::program::Unit;
use crate::{Error, Result};

/// Threads that serve connections. They only move tokens; the engine has the cores.
const THREADS: usize = 2;
/// Threads that render templates and tokenise.
const WORKERS: usize = 4;
/// Descriptors beside those of connections.
const FILES: u64 = 256;

/// See the [module](self). Dropping it ends it at once.
pub struct Server {
    app: Arc<App>,
    address: SocketAddr,
    runtime: Option<Runtime>,
    /// Ends the listener, and connections after the answer that they are at.
    end: watch::Sender<bool>,
    listening: JoinHandle<()>,
}

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// If the address cannot be had, or the system refuses threads.
    pub fn start(options: Options) -> Result<Server> {
        let refused = |e: std::io::Error| Error::Run(format!("the server's threads: {e}"));
        allow_files(options.connections as u64 + FILES);
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(THREADS).max_blocking_threads(WORKERS).thread_name("tandem-serve");
        // Its parent may be pinned with a pool: clients would wait for that one core.
        builder.on_thread_start(crate::host::unpin_current_thread);
        let runtime = builder.enable_all().build().map_err(refused)?;
        let (host, port) = (options.host.clone(), options.port);
        let taken =
            |e: std::io::Error| Error::Run(format!("{host}:{port}: {e}; choose another `host` or `port`"));
        let bound = runtime.block_on(TcpListener::bind((host.as_str(), port))).map_err(taken)?;
        let address = bound.local_addr().map_err(refused)?;
        let app = Arc::new(App::new(options));
        let (end, ended) = watch::channel(false);
        let routes = api::routes(app.clone());
        let listening = runtime.spawn(listen::serve(bound, app.clone(), routes, ended));
        Ok(Server { app, address, runtime: Some(runtime), end, listening })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers requests with this model from now on. Only the first model counts.
    pub fn ready(&self, model: Model) {
        let _ = self.app.loaded.set(Loaded::new(model, &self.app.options));
    }

    /// Takes no more requests; those that are being answered go on.
    pub fn drain(&self) {
        self.app.drain();
    }

    /// Waits until no request is being answered, at most for `patience`. Returns whether that is so.
    pub fn is_idle_within(&self, patience: Duration) -> bool {
        let idle = async { tokio::time::timeout(patience, self.app.idle()).await.is_ok() };
        self.runtime().block_on(idle)
    }

    /// Ends: no more connections; those with an answer under way have `patience` to finish it.
    pub fn end(mut self, patience: Duration) {
        self.app.drain();
        let _ = self.end.send(true);
        let listening = &mut self.listening;
        let runtime = self.runtime.take().expect("it has not ended");
        let _ = runtime.block_on(async { tokio::time::timeout(patience, listening).await });
        runtime.shutdown_background();
    }

    /// Calls `hear` with the name of each SIGTERM and SIGINT, as long as it returns true. They do not end the process from now
    /// on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn on_signals(&self, hear: impl Fn(&'static str) -> bool + Clone + Send + 'static) -> Result<()> {
        let refused = |e: std::io::Error| Error::Run(format!("signals: {e}"));
        let _inside = self.runtime().enter();
        for (kind, name) in [(SignalKind::terminate(), "SIGTERM"), (SignalKind::interrupt(), "SIGINT")] {
            let (mut signals, hear) = (signal(kind).map_err(refused)?, hear.clone());
            self.runtime().spawn(async move { while signals.recv().await.is_some() && hear(name) {} });
        }
        Ok(())
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it has not ended")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A unit's name in `/status` and `/metrics`.
fn lane_name(unit: Unit) -> &'static str {
    match unit {
        Unit::Gpu => "gpu",
        Unit::H2d => "to_device",
        Unit::D2h => "to_host",
        Unit::Host => "cpu",
    }
}

/// Raises this process's limit of open files to `wanted`, as far as it may.
fn allow_files(wanted: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit writes one rlimit through the pointer to one, and nothing else.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    if known && limit.rlim_cur < wanted {
        limit.rlim_cur = wanted.min(limit.rlim_max);
        // SAFETY: setrlimit reads one rlimit through the pointer to one. A refusal changes nothing: then fewer connections
        // are accepted at a time.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    }
}
