//! How a server listens, whom it lets in, and what it bounds.

use std::sync::Arc;
use std::time::Duration;

use super::cors::Cors;
use super::keys::Keys;

/// Where lines of the log go: one for each request, without the text of prompts and answers. `detail` is true of a line that
/// only a verbose log has.
pub type Log = Arc<dyn Fn(&str, bool) + Send + Sync>;

/// A server's options.
#[derive(Clone)]
pub struct Options {
    /// The address to listen at, by name or number.
    pub host: String,
    /// The port; 0 for any that is free.
    pub port: u16,
    /// The model's name in answers.
    pub name: String,
    /// Keys of which a client needs one; without any, everybody is let in.
    pub keys: Keys,
    /// Origins whose pages may use it from a browser.
    pub cors: Cors,
    /// Requests that wait at most, beside those that run. Others are refused (429).
    pub queue: usize,
    /// Requests of one key that wait at most beside as many as run; without keys, all are of one.
    pub queue_per_key: Option<usize>,
    /// Most bytes of a request's body (413).
    pub body: usize,
    /// Most bytes of bodies that are read or parsed at a time, of all connections (503).
    pub bodies: usize,
    /// Most connections at a time; more wait in the system's queue.
    pub connections: usize,
    /// Time for a client to send the head of a request, also of the next one on its connection.
    pub head_time: Duration,
    /// Time for a client to send the body.
    pub body_time: Duration,
    /// Time in which a client reads something of what is there for it.
    pub write_time: Duration,
    /// Pause after which a stream without news gets a comment, so that nobody between takes it for dead.
    pub keep_alive: Duration,
    /// The log.
    pub log: Log,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            host: "127.0.0.1".into(),
            port: 0,
            name: "tandem".into(),
            keys: Keys::default(),
            cors: Cors::default(),
            queue: 1024,
            queue_per_key: None,
            body: 4 << 20,
            bodies: 256 << 20,
            connections: 4096,
            head_time: Duration::from_secs(30),
            body_time: Duration::from_secs(60),
            write_time: Duration::from_secs(60),
            keep_alive: Duration::from_secs(15),
            log: Arc::new(|_, _| ()),
        }
    }
}
