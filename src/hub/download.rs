//! One file, from a URL to a verified file on disk.
//!
//! Bytes go to `PATH.part`, which outlives the process: the next attempt asks only for the rest. A
//! server that ignores the range sends everything again, and so do we start again. Length and
//! SHA-256 decide in the end; a part that fails them is deleted, and `PATH` appears by a rename.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use ureq::Body;

use super::http::{ATTEMPTS, Headers, Http, HttpFailure, Patience, pause};
use crate::progress::{Progress, WorkUnit};
use crate::{Error, Result};

/// A file to fetch.
pub(super) struct Want<'a> {
    pub url: &'a str,
    /// Shown to the user.
    pub what: &'a str,
    pub bytes: Option<u64>,
    /// In hexadecimal. Without it the length is all there is to check, and nothing is resumed.
    pub sha256: Option<&'a str>,
    pub headers: Headers<'a>,
}

/// Where the bytes of `path` gather.
pub(super) fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Fetches `want` into `path`, unless it is there already, whole and right.
pub(super) fn fetch(http: &Http, want: &Want<'_>, path: &Path, progress: &dyn Progress) -> Result<()> {
    if let (Ok(meta), Some(sha)) = (std::fs::metadata(path), want.sha256)
        && want.bytes.is_none_or(|b| b == meta.len())
        && sha256_of(path, progress)? == sha
    {
        return Ok(());
    }
    let part = part_of(path);
    let resumed = want.sha256.is_some() && std::fs::metadata(&part).is_ok_and(|m| m.len() > 0);
    match attempt(http, want, &part, progress) {
        // The beginning may have been damaged, or of another version of the file: once more from zero.
        Err(Error::Format { .. }) if resumed => {
            progress.note(&format!("{}: the unfinished download was no good; starting over", want.what));
            attempt(http, want, &part, progress)
        }
        other => other,
    }
    .inspect_err(|_| drop_if_empty(&part))?;
    std::fs::rename(&part, path).map_err(|e| Error::io(path, e))
}

/// Removes a part that holds nothing to resume.
fn drop_if_empty(part: &Path) {
    if std::fs::metadata(part).is_ok_and(|m| m.len() == 0) {
        let _ = std::fs::remove_file(part);
    }
}

/// Fills `part` and verifies it. `Error::Format` means that the content was wrong (and is deleted).
fn attempt(http: &Http, want: &Want<'_>, part: &Path, progress: &dyn Progress) -> Result<()> {
    let mut sink = Sink::open(part, want.sha256.is_some())?;
    progress.begin(want.what, want.bytes, WorkUnit::Bytes);
    let outcome = fill(http, want, &mut sink, progress);
    progress.end();
    outcome?;
    sink.file.sync_all().map_err(|e| Error::io(part, e))?;
    let (got_len, got_sha) = (sink.len, hex(&sink.hash.finalize()));
    let problem = if let Some(bytes) = want.bytes.filter(|&b| b != got_len) {
        format!("{got_len} bytes arrived, {bytes} were expected; the download was deleted")
    } else if let Some(sha) = want.sha256.filter(|&s| s != got_sha) {
        format!("checksum mismatch: sha256 {got_sha}, expected {sha}; the download was deleted")
    } else {
        return Ok(());
    };
    std::fs::remove_file(part).map_err(|e| Error::io(part, e))?;
    Err(Error::format(want.url, problem))
}

/// The `.part` file, with the hash of what it holds so far.
struct Sink {
    path: PathBuf,
    file: File,
    len: u64,
    hash: Sha256,
}

impl Sink {
    fn open(path: &Path, keep: bool) -> Result<Sink> {
        let err = |e| Error::io(path, e);
        let mut file =
            File::options().read(true).write(true).create(true).truncate(!keep).open(path).map_err(err)?;
        let mut hash = Sha256::new();
        let len = feed(&mut file, &mut hash, &mut |_| {}).map_err(err)?;
        Ok(Sink { path: path.to_owned(), file, len, hash })
    }

    fn start_over(&mut self) -> Result<()> {
        let err = |e| Error::io(&self.path, e);
        self.file.set_len(0).map_err(err)?;
        self.file.seek(SeekFrom::Start(0)).map_err(err)?;
        (self.len, self.hash) = (0, Sha256::new());
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| no_space(&self.path, e))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }
}

/// Asks for what `sink` lacks until it lacks nothing.
fn fill(http: &Http, want: &Want<'_>, sink: &mut Sink, progress: &dyn Progress) -> Result<()> {
    if want.bytes.is_some_and(|b| sink.len > b) {
        sink.start_over()?;
    }
    if let Some(bytes) = want.bytes {
        require_space(&sink.path, bytes - sink.len, want.what)?;
    }
    let mut fruitless = 0;
    let mut received = false;
    loop {
        if want.bytes.is_some_and(|b| sink.len == b) {
            return Ok(());
        }
        let before = sink.len;
        let failure = match one_request(http, want, sink, progress)? {
            None => return Ok(()),
            Some(failure) => failure,
        };
        if sink.len > before {
            (fruitless, received) = (0, true);
        }
        fruitless += 1;
        // A host that was there a moment ago may come back.
        let failure = match failure {
            HttpFailure::Unreachable(why) if received => HttpFailure::Passing(why, None),
            other => other,
        };
        if let HttpFailure::Passing(why, _) = &failure
            && fruitless < ATTEMPTS
        {
            progress.note(&format!("{}: {why}; trying again at byte {}", want.what, sink.len));
        }
        pause(failure, fruitless)?;
        if want.sha256.is_none() {
            sink.start_over()?;
        }
    }
}

/// One request and its body. `Ok(None)` when the body ended as announced; disk errors are final.
fn one_request(
    http: &Http,
    want: &Want<'_>,
    sink: &mut Sink,
    progress: &dyn Progress,
) -> Result<Option<HttpFailure>> {
    let mut headers = want.headers.to_vec();
    if sink.len > 0 {
        headers.push(("range", format!("bytes={}-", sink.len)));
    }
    let patience = http.patience();
    // On a thread of its own, so that this one can tell the user that it waits.
    let asked = std::thread::scope(|scope| {
        let (answers, answer) = mpsc::channel();
        let (url, headers) = (want.url, &headers[..]);
        scope.spawn(move || {
            let _ = answers.send(http.get(url, headers));
        });
        answer.recv_timeout(patience.told).or_else(|_| {
            progress.note(&waits(want.what, patience.told));
            answer.recv()
        })
    });
    let mut response = match asked {
        Ok(Ok(response)) => response,
        Ok(Err(failure)) => return Ok(Some(failure)),
        Err(_) => return Ok(Some(HttpFailure::Final(format!("{}: the request was cut short", want.url)))),
    };
    let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
    match response.status().as_u16() {
        206 if range_start(header("content-range")) == Some(sink.len) => {}
        // No such range: what we have is longer than the file, or not of this file.
        206 | 416 if sink.len > 0 => {
            sink.start_over()?;
            return Ok(Some(HttpFailure::Passing(
                format!("{}: the server refuses the range", want.url),
                None,
            )));
        }
        206 | 416 => return Ok(Some(HttpFailure::Final(format!("{}: a range nobody asked for", want.url)))),
        _ => sink.start_over()?,
    }
    let rest = header("content-length").and_then(|v| v.parse::<u64>().ok());
    let end = rest.and_then(|r| r.checked_add(sink.len)).or(want.bytes);
    if let (Some(end), None) = (end, want.bytes) {
        progress.end();
        progress.begin(want.what, Some(end), WorkUnit::Bytes);
        require_space(&sink.path, end.saturating_sub(sink.len), want.what)?;
    }
    progress.at(sink.len);
    let body = Arriving::start(std::mem::replace(response.body_mut(), Body::builder().data("")));
    let mut watch = Watch::start(patience, sink.len);
    // Without a length, the disk is the only bound.
    let mut unchecked = 0;
    loop {
        let chunk = match body.chunks.recv_timeout(watch.step()) {
            Ok(Ok(chunk)) => chunk,
            // The sender is gone: the body has ended.
            Err(mpsc::RecvTimeoutError::Disconnected) if end.is_some_and(|e| sink.len < e) => {
                return Ok(Some(HttpFailure::Passing("the connection was dropped".into(), None)));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
            Ok(Err(e)) => {
                return Ok(Some(HttpFailure::Passing(format!("the connection was dropped ({e})"), None)));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => Vec::new(),
        };
        if !chunk.is_empty() {
            sink.write(&chunk)?;
            unchecked += chunk.len() as u64;
            progress.at(sink.len);
        }
        // More than was promised: the length check that follows will say so.
        if want.bytes.is_some_and(|l| sink.len > l) {
            return Ok(None);
        }
        if end.is_none() && unchecked >= CHECKED {
            unchecked = 0;
            require_space(&sink.path, MARGIN, want.what)?;
        }
        match watch.at(sink.len) {
            Pace::Good => {}
            Pace::Waiting => progress.note(&waits(want.what, patience.told)),
            Pace::Stalled(why) => {
                let kept = match want.sha256 {
                    Some(_) => "; pull again to go on from there",
                    None => "",
                };
                let why = format!("{}: {why}; {} bytes have arrived{kept}", want.url, sink.len);
                return Ok(Some(HttpFailure::Final(why)));
            }
        }
    }
}

/// Bytes of a body without a length between two looks at the free space of the disk.
const CHECKED: u64 = 16 << 20;
/// Bytes that such a body leaves free on the disk.
const MARGIN: u64 = 512 << 20;

fn waits(what: &str, told: Duration) -> String {
    format!("{what}: nothing has arrived for {} s; still waiting", told.as_secs_f64())
}

/// A body, read by a thread of its own so that the one that writes it can keep the time. The thread ends with the body, at the
/// client's own timeout, or when nobody takes its chunks.
struct Arriving {
    chunks: mpsc::Receiver<std::io::Result<Vec<u8>>>,
}

impl Arriving {
    fn start(body: Body) -> Arriving {
        let (sender, chunks) = mpsc::sync_channel(4);
        std::thread::spawn(move || {
            let mut body = body.into_reader();
            let mut buffer = vec![0u8; 256 << 10];
            loop {
                let read = match body.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(n) => Ok(buffer[..n].to_vec()),
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                    Err(e) => Err(e),
                };
                let last = read.is_err();
                if sender.send(read).is_err() || last {
                    return;
                }
            }
        });
        Arriving { chunks }
    }
}

/// Whether a body arrives fast enough.
enum Pace {
    Good,
    /// To be told, once for each silence.
    Waiting,
    /// Too slow to go on, and how.
    Stalled(String),
}

/// Watches a body arrive.
struct Watch {
    patience: Patience,
    len: u64,
    last: Instant,
    told: bool,
    /// Start of the time over which the rate is taken, and the length then.
    since: (Instant, u64),
}

impl Watch {
    fn start(patience: Patience, len: u64) -> Watch {
        let now = Instant::now();
        Watch { patience, len, last: now, told: false, since: (now, len) }
    }

    /// How long to wait for bytes before looking at the time again.
    fn step(&self) -> Duration {
        (self.patience.told / 4).min(Duration::from_millis(500))
    }

    fn at(&mut self, len: u64) -> Pace {
        let now = Instant::now();
        if len > self.len {
            (self.len, self.last, self.told) = (len, now, false);
        }
        let silent = now - self.last;
        if silent >= self.patience.silence {
            return Pace::Stalled(format!(
                "nothing has arrived for {} s",
                self.patience.silence.as_secs_f64()
            ));
        }
        if now - self.since.0 >= self.patience.window {
            if len - self.since.1 < self.patience.least {
                return Pace::Stalled(format!(
                    "{} bytes in {} s are too slow",
                    len - self.since.1,
                    self.patience.window.as_secs_f64()
                ));
            }
            self.since = (now, len);
        }
        if silent >= self.patience.told && !self.told {
            self.told = true;
            return Pace::Waiting;
        }
        Pace::Good
    }
}

/// The first byte of `bytes 100-199/200`.
fn range_start(content_range: Option<&str>) -> Option<u64> {
    content_range?.trim().strip_prefix("bytes ")?.split('-').next()?.trim().parse().ok()
}

/// Fails with the numbers if the file system of `path` has no room for `bytes`.
pub(super) fn require_space(path: &Path, bytes: u64, what: &str) -> Result<()> {
    let Some(free) = free_space(path) else { return Ok(()) };
    if bytes <= free {
        return Ok(());
    }
    Err(Error::Capacity(format!(
        "{what} needs {} MB more on the disk of {}, which has {} MB free; free some, or set TANDEM_HOME to another disk",
        bytes.div_ceil(1_000_000),
        path.display(),
        free / 1_000_000
    )))
}

/// Bytes that this user may still write on the file system of `path` (or of its nearest parent).
pub(super) fn free_space(path: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let existing = path.ancestors().find(|p| p.exists())?;
    let c_path = std::ffi::CString::new(existing.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `c_path` is a C string and `stat` is room for the struct that the call fills.
    let ok = unsafe { libc::statvfs(c_path.as_ptr(), stat.as_mut_ptr()) } == 0;
    // SAFETY: the call succeeded, so it filled `stat`.
    let stat = ok.then(|| unsafe { stat.assume_init() })?;
    // The field types differ between platforms.
    #[allow(clippy::unnecessary_cast)]
    Some((stat.f_bavail as u64).saturating_mul(stat.f_frsize as u64))
}

/// A full disk as a capacity error, anything else as it is.
pub(super) fn no_space(path: &Path, error: std::io::Error) -> Error {
    if error.kind() == std::io::ErrorKind::StorageFull {
        return Error::Capacity(format!(
            "the disk of {} is full; free some space and pull again: what has arrived is kept",
            path.display()
        ));
    }
    Error::io(path, error)
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn sha256_of(path: &Path, progress: &dyn Progress) -> Result<String> {
    let err = |e| Error::io(path, e);
    let mut file = File::open(path).map_err(err)?;
    let mut hash = Sha256::new();
    progress.begin("checking", file.metadata().ok().map(|m| m.len()), WorkUnit::Bytes);
    let fed = feed(&mut file, &mut hash, &mut |at| progress.at(at));
    progress.end();
    fed.map_err(err)?;
    Ok(hex(&hash.finalize()))
}

/// Hashes the rest of `file`; how many bytes that were.
fn feed(file: &mut File, hash: &mut Sha256, at: &mut dyn FnMut(u64)) -> std::io::Result<u64> {
    let mut buffer = vec![0u8; 256 << 10];
    let mut total = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(total),
            n => {
                hash.update(&buffer[..n]);
                total += n as u64;
                at(total);
            }
        }
    }
}

/// Lower-case hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers with `head`, then writes `chunk` with a pause before each, until the client is gone.
    fn server(head: &'static str, chunk: &'static [u8], pause: Duration) -> String {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let url = format!("http://{}/m.gguf", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.read(&mut [0; 4096]);
                let mut sent = stream.write_all(head.as_bytes());
                while sent.is_ok() {
                    std::thread::sleep(pause);
                    sent = stream.write_all(chunk);
                }
            }
        });
        url
    }

    #[derive(Default)]
    struct Notes(std::sync::Mutex<Vec<String>>);

    impl Progress for Notes {
        fn note(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
    }

    /// What a pull with little patience says and keeps of a file of 1000 bytes.
    fn impatient(url: &str) -> (String, Vec<String>, u64) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let ms = Duration::from_millis;
        let http = Http::patient(Patience { told: ms(40), silence: ms(160), window: ms(300), least: 1000 });
        let want = Want { url, what: "m.gguf", bytes: Some(1000), sha256: Some("00"), headers: &[] };
        let notes = Notes::default();
        let error = fetch(&http, &want, &path, &notes).unwrap_err().to_string();
        let kept = std::fs::metadata(part_of(&path)).map_or(0, |m| m.len());
        (error, notes.0.into_inner().unwrap(), kept)
    }

    #[test]
    fn a_body_that_stalls_or_drips_ends_in_a_sentence_and_the_part_stays() {
        let head = "HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nbeginning";
        let (error, notes, kept) = impatient(&server(head, b"", Duration::from_secs(5)));
        assert!(error.contains("nothing has arrived for 0.16 s; 9 bytes have arrived"), "{error}");
        assert!(notes.iter().any(|n| n.contains("still waiting")), "{notes:?}");
        assert_eq!(kept, 9);
        let (error, _, kept) = impatient(&server(head, b"x", Duration::from_millis(10)));
        assert!(error.contains("too slow") && error.contains("pull again"), "{error}");
        assert!((9..1000).contains(&kept), "{kept}");
    }

    #[test]
    fn a_body_without_an_end_is_bounded_by_the_listed_length() {
        let endless = server("HTTP/1.1 200 OK\r\n\r\n", &[7; 4096], Duration::ZERO);
        let (error, _, kept) = impatient(&endless);
        assert!(error.contains("1000 were expected") && kept == 0, "{error}");
    }

    #[test]
    fn content_range() {
        assert_eq!(range_start(Some("bytes 100-199/200")), Some(100));
        assert_eq!(range_start(Some("bytes */200")), None);
        assert_eq!(range_start(None), None);
    }

    #[test]
    fn no_disk_has_that_much_room() {
        let dir = tempfile::tempdir().unwrap();
        assert!(require_space(dir.path(), 1, "x").is_ok());
        let error = require_space(&dir.path().join("not/yet/there"), u64::MAX, "the model").unwrap_err();
        assert!(matches!(error, Error::Capacity(_)), "{error:?}");
        assert!(error.to_string().contains("the model needs"), "{error}");
    }

    #[test]
    fn sha256_of_a_known_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        let want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256_of(&path, &crate::progress::Silent).unwrap(), want);
    }
}
