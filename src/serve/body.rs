//! Reads the JSON body of a request: in bounded time, with a bound for each and one for all.

use std::time::Duration;

use axum::extract::Request;
use axum::http::{StatusCode, header};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout_at};

use super::app::App;
use super::error::ApiError;

/// Bytes that are read beyond a body's limit, so that a client that sends no more than that hears why it is refused.
const DISCARDED: usize = 16 << 20;
/// Time in which these are read.
const PATIENCE: Duration = Duration::from_secs(5);

/// The bytes of a body, which count as being read until they are dropped.
pub(super) struct Bytes {
    bytes: Vec<u8>,
    _room: Vec<OwnedSemaphorePermit>,
}

impl Bytes {
    /// What the body says. Fields that nobody knows are ignored.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        let mut reader = serde_json::Deserializer::from_slice(&self.bytes);
        let value = serde_path_to_error::deserialize(&mut reader).map_err(|e| {
            let path = e.path().to_string();
            let error = e.into_inner();
            match (error.is_data(), path.as_str()) {
                (true, ".") => match missing(&error) {
                    Some(field) => ApiError::bad(&field, error.to_string()),
                    None => ApiError::of_request(StatusCode::BAD_REQUEST, error.to_string()),
                },
                (true, path) => ApiError::bad(path, format!("{path}: {error}")),
                _ => ApiError::of_request(
                    StatusCode::BAD_REQUEST,
                    format!("the body is no valid JSON: {error}"),
                ),
            }
        })?;
        let ends = reader.end().map_err(|e| {
            ApiError::of_request(StatusCode::BAD_REQUEST, format!("the body is no valid JSON: {e}"))
        });
        ends.map(|()| value)
    }
}

/// The field that serde misses.
fn missing(error: &serde_json::Error) -> Option<String> {
    let message = error.to_string();
    let (field, _) = message.strip_prefix("missing field `")?.split_once('`')?;
    Some(field.to_owned())
}

/// Reads the body of a request.
///
/// # Errors
/// If it is declared as something else than JSON (415), is too large (413), takes too long (408), or breaks off.
pub(super) async fn read(app: &App, request: Request) -> Result<Bytes, ApiError> {
    let headers = request.headers();
    if let Some(kind) = headers.get(header::CONTENT_TYPE)
        && !is_json(kind.as_bytes())
    {
        let why = "the body is declared as something else than application/json";
        return Err(ApiError::of_request(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
    }
    let (limit, mut body) = (app.options.body, request.into_body());
    let until = Instant::now() + app.options.body_time;
    let (mut bytes, mut room, mut left) = (Vec::new(), Vec::new(), limit);
    loop {
        let slow = |_| ApiError::of_request(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time");
        let Some(frame) = timeout_at(until, body.frame()).await.map_err(slow)? else { break };
        let broken = |e| ApiError::of_request(StatusCode::BAD_REQUEST, format!("the body breaks off: {e}"));
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if data.len() > left {
            drop((bytes, room));
            discard(body).await;
            let why = format!("the body has more than {limit} bytes");
            return Err(ApiError::of_request(StatusCode::PAYLOAD_TOO_LARGE, why));
        }
        left -= data.len();
        let full = |_| ApiError::unavailable("busy", "too many large requests arrive at a time");
        let kilobytes = (data.len() >> 10) as u32 + 1;
        room.push(app.bodies.clone().try_acquire_many_owned(kilobytes).map_err(full)?);
        bytes.extend_from_slice(&data);
    }
    Ok(Bytes { bytes, _room: room })
}

/// Reads on for a while: a client that is still sending would not read the answer.
async fn discard(mut body: axum::body::Body) {
    let until = Instant::now() + PATIENCE;
    let mut left = DISCARDED;
    while let Ok(Some(Ok(frame))) = timeout_at(until, body.frame()).await {
        let length = frame.data_ref().map_or(0, |data| data.len());
        let Some(rest) = left.checked_sub(length) else { return };
        left = rest;
    }
}

/// Whether a media type is JSON's, whatever its parameters.
fn is_json(kind: &[u8]) -> bool {
    let essence = kind.split(|&b| b == b';').next().unwrap_or_default().trim_ascii();
    essence.eq_ignore_ascii_case(b"application/json")
        || (essence.len() > 5 && essence[essence.len() - 5..].eq_ignore_ascii_case(b"+json"))
}
