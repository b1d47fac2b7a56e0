//! HTTP with the patience of a package manager: proxies, company certificates, retries.

use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ureq::http::Response;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use super::env;
use crate::{Error, Result, small_file};

/// Longest file of certificates read. Systems have some 200 KiB.
const MAX_PEM: u64 = 16 << 20;

/// Attempts in a row without a single byte of progress before giving up.
pub(super) const ATTEMPTS: u32 = 5;
/// Longest document that is read into memory (an index page, a listing of a repository).
const TEXT_LIMIT: u64 = 64 << 20;

/// Time for a document that is read into memory, its body included.
const TEXT_TIME: Duration = Duration::from_secs(120);

/// How long a download is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Without a byte: then the user is told.
    pub told: Duration,
    /// Without a byte: then the download ends.
    pub silence: Duration,
    /// The time in which [`least`](Patience::least) bytes have to arrive.
    pub window: Duration,
    /// See [`window`](Patience::window).
    pub least: u64,
}

impl Patience {
    /// Told after 10 s, over after 60 s without a byte, or with less than 1 KB/s over two minutes.
    const USUAL: Patience = Patience {
        told: Duration::from_secs(10),
        silence: Duration::from_secs(60),
        window: Duration::from_secs(120),
        least: 120_000,
    };
}

/// Request headers.
pub(super) type Headers<'a> = &'a [(&'a str, String)];

/// A client; nothing is read from the environment before its first request.
pub(super) struct Http {
    agent: OnceLock<Agent>,
    patience: Patience,
}

/// Why a request brought nothing.
pub(super) enum HttpFailure {
    /// Trying again is pointless.
    Final(String),
    /// Worth another attempt, after the delay that the server asked for, if it did.
    Passing(String, Option<Duration>),
    /// The host cannot be reached at all.
    Unreachable(String),
}

impl Http {
    pub(super) fn new() -> Http {
        Http { agent: OnceLock::new(), patience: Patience::USUAL }
    }

    /// The same with less patience.
    #[cfg(test)]
    pub(super) fn patient(patience: Patience) -> Http {
        Http { agent: OnceLock::new(), patience }
    }

    pub(super) fn patience(&self) -> Patience {
        self.patience
    }

    fn agent(&self) -> &Agent {
        self.agent.get_or_init(|| {
            let tls = match certificates() {
                Some(certs) => TlsConfig::builder().root_certs(RootCerts::from(certs)).build(),
                None => TlsConfig::default(),
            };
            // Proxies come from HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY (ureq reads them).
            Agent::config_builder()
                .tls_config(tls)
                .http_status_as_error(false)
                .user_agent(concat!("tandem/", env!("CARGO_PKG_VERSION")))
                .timeout_connect(Some(Duration::from_secs(20)))
                .timeout_recv_response(Some(Duration::from_secs(60)))
                // Longer than our own patience, which has the better sentence.
                .timeout_per_read(Some(Duration::from_secs(90)))
                .build()
                .new_agent()
        })
    }

    /// One GET. A status of 2xx or 416 is an answer, everything else a failure.
    pub(super) fn get(&self, url: &str, headers: Headers<'_>) -> Result<Response<Body>, HttpFailure> {
        let mut request = self.agent().get(url);
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let response = request.call().map_err(|e| failure(url, &e))?;
        let status = response.status();
        if status.is_success() || status.as_u16() == 416 {
            return Ok(response);
        }
        let told = response.headers().get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok());
        let what = format!("{url}: the server answers {status}");
        Err(match status.as_u16() {
            408 | 425 | 429 | 500..=599 => {
                HttpFailure::Passing(what, told.map(|s: u64| Duration::from_secs(s.min(60))))
            }
            401 | 403 => HttpFailure::Final(format!("{what}; does it need a login (HF_TOKEN)?")),
            404 | 410 => HttpFailure::Final(format!("{what}; no such model or file there")),
            _ => HttpFailure::Final(what),
        })
    }

    /// The body of a document, and its content type.
    pub(super) fn text(&self, url: &str, headers: Headers<'_>) -> Result<(String, String)> {
        let mut attempt = 0;
        loop {
            let read = self.get(url, headers).and_then(|mut response| {
                let kind = response.headers().get("content-type").and_then(|v| v.to_str().ok());
                let kind = kind.unwrap_or_default().to_owned();
                text_of(url, response.body_mut().as_reader()).map(|body| (kind, body))
            });
            match read {
                Ok(answer) => return Ok(answer),
                Err(failure) => {
                    attempt += 1;
                    pause(failure, attempt)?;
                }
            }
        }
    }
}

/// A body of bounded length and time as text.
fn text_of(url: &str, mut body: impl Read) -> Result<String, HttpFailure> {
    let (began, mut all, mut buffer) = (Instant::now(), Vec::new(), vec![0; 64 << 10]);
    loop {
        match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => all.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(failure(url, &ureq::Error::from(e))),
        }
        if all.len() as u64 > TEXT_LIMIT {
            return Err(HttpFailure::Final(format!("{url}: a document of more than {TEXT_LIMIT} bytes")));
        }
        if began.elapsed() > TEXT_TIME {
            let why = format!("{url}: only {} bytes have arrived in {} s", all.len(), TEXT_TIME.as_secs());
            return Err(HttpFailure::Final(why));
        }
    }
    String::from_utf8(all).map_err(|_| HttpFailure::Final(format!("{url}: the document is no UTF-8")))
}

/// Waits before attempt number `attempt + 1`, or says why there will be none.
pub(super) fn pause(failure: HttpFailure, attempt: u32) -> Result<()> {
    match failure {
        HttpFailure::Final(why) => Err(Error::Network(why)),
        HttpFailure::Unreachable(why) => Err(Error::Network(why)),
        HttpFailure::Passing(why, _) if attempt >= ATTEMPTS => {
            Err(Error::Network(format!("{why}; gave up after {attempt} attempts")))
        }
        HttpFailure::Passing(_, told) => {
            // 0.25, 0.5, 1, 2 s: a hiccup costs little, a restarting server gets its time.
            let wait = Duration::from_millis(125 << attempt.min(6));
            std::thread::sleep(told.map_or(wait, |t| t.max(wait)));
            Ok(())
        }
    }
}

/// What an error of the client means for the next attempt.
pub(super) fn failure(url: &str, error: &ureq::Error) -> HttpFailure {
    let what = format!("{url}: {error}");
    let unreachable = || HttpFailure::Unreachable(format!("cannot reach {url} ({error})"));
    match error {
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::ConnectProxyFailed(_) => {
            unreachable()
        }
        ureq::Error::Io(e) => match e.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable => {
                unreachable()
            }
            // rustls reports a certificate that it does not trust as InvalidData; so is text that is none.
            ErrorKind::InvalidData if e.to_string().contains("certificate") => HttpFailure::Final(format!(
                "{what}; behind a company proxy, point SSL_CERT_FILE at its certificates"
            )),
            ErrorKind::InvalidData => HttpFailure::Final(what),
            // Of no kind of its own: a name that could not be looked up, for want of a network or of the host.
            _ if e.to_string().starts_with("failed to lookup address") => {
                HttpFailure::Passing(format!("cannot reach {url} ({e})"), None)
            }
            _ => HttpFailure::Passing(what, None),
        },
        ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => unreachable(),
        ureq::Error::Timeout(ureq::Timeout::RecvResponse) => {
            HttpFailure::Final(format!("{url}: no answer within 60 s"))
        }
        ureq::Error::Timeout(_) | ureq::Error::Protocol(_) | ureq::Error::BodyStalled => {
            HttpFailure::Passing(what, None)
        }
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => HttpFailure::Final(format!(
            "{what}; behind a company proxy, point SSL_CERT_FILE at its certificates"
        )),
        _ => HttpFailure::Final(what),
    }
}

/// The certificates that this machine trusts: those the user names, and the system's. `None` leaves
/// the list that is built in (Mozilla's).
fn certificates() -> Option<Vec<Certificate<'static>>> {
    let named = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"];
    let system = [
        "/etc/ssl/certs/ca-certificates.crt",
        "/etc/pki/tls/certs/ca-bundle.crt",
        "/etc/ssl/ca-bundle.pem",
        "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
        "/etc/ssl/cert.pem",
    ];
    let mut files: Vec<String> = named.into_iter().filter_map(env).collect();
    files.extend(super::pip::pip_setting("cert"));
    files.extend(system.iter().find(|f| Path::new(f).is_file()).map(|f| f.to_string()));
    files.sort();
    files.dedup();
    let mut certs = Vec::new();
    for file in files {
        let Ok(Some(pem)) = small_file::read(Path::new(&file), MAX_PEM) else { continue };
        certs.extend(parse_pem(&pem).filter_map(|item| match item {
            Ok(PemItem::Certificate(c)) => Some(c),
            _ => None,
        }));
    }
    (!certs.is_empty()).then_some(certs)
}
