//! An error as OpenAI's API reports it: a status, and `{"error": {"message", "type", "param", "code"}}`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use crate::Error;

/// Seconds after which a client is asked to try again.
const RETRY: HeaderValue = HeaderValue::from_static("1");

/// See the [module](self).
#[derive(Debug, Clone)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
    /// Further fields.
    more: Vec<(&'static str, Value)>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: String) -> ApiError {
        ApiError { status, message, kind, param: None, code, more: Vec::new() }
    }

    /// A request that makes no sense, or that this server does not understand.
    pub fn bad(param: &str, message: impl Into<String>) -> ApiError {
        let error = ApiError::of_request(StatusCode::BAD_REQUEST, message);
        ApiError { param: Some(param.to_owned()), ..error }
    }

    /// A request that is at fault as a whole.
    pub fn of_request(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", None, message.into())
    }

    /// A value that others support.
    pub fn unsupported(param: &str, why: &str) -> ApiError {
        ApiError { code: Some("unsupported_value"), ..ApiError::bad(param, format!("{param}: {why}")) }
    }

    /// A prompt that does not fit.
    pub fn too_long(param: &str, tokens: usize, context: usize) -> ApiError {
        let message = format!(
            "this prompt has {tokens} tokens, the context has {context}; shorten it, or start the server with a larger context"
        );
        ApiError {
            code: Some("context_length_exceeded"),
            more: vec![("n_prompt_tokens", tokens.into()), ("n_ctx", context.into())],
            ..ApiError::bad(param, message)
        }
    }

    /// No key, or one that is unknown.
    pub fn key() -> ApiError {
        let message = "this server needs an API key: Authorization: Bearer KEY, or X-Api-Key: KEY".into();
        ApiError::new(StatusCode::UNAUTHORIZED, "invalid_request_error", Some("invalid_api_key"), message)
    }

    /// Nothing is there.
    pub fn not_found(code: &'static str, message: String) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", Some(code), message)
    }

    /// As many requests wait as may.
    pub fn queue_full(most: usize) -> ApiError {
        let message = format!("{most} requests run or wait, as many as this server takes; try again");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("queue_full"), message)
    }

    /// As many requests of one key wait as may.
    pub fn key_queue_full(most: usize) -> ApiError {
        let message =
            format!("{most} requests of this key run or wait, as many as one key may have; try again");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("key_queue_full"), message)
    }

    /// Not now; `code` says why.
    pub fn unavailable(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "service_unavailable_error",
            Some(code),
            message.into(),
        )
    }

    /// A failure of ours.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", None, message.into())
    }

    /// A library's error about `param` of a request.
    pub fn from_engine(error: &Error, param: &str) -> ApiError {
        match error {
            Error::Usage(why) => ApiError::bad(param, why.clone()),
            Error::Capacity(why) => {
                ApiError { code: Some("context_length_exceeded"), ..ApiError::bad(param, why.clone()) }
            }
            Error::Unavailable(why) => ApiError::unavailable("unavailable", why.clone()),
            other => ApiError::internal(other.to_string()),
        }
    }

    /// The status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The body.
    pub fn body(&self) -> Value {
        let mut error = Map::new();
        error.insert("message".into(), json!(self.message));
        error.insert("type".into(), json!(self.kind));
        error.insert("param".into(), json!(self.param));
        error.insert("code".into(), json!(self.code));
        error.extend(self.more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        json!({ "error": error })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                headers.insert(header::RETRY_AFTER, RETRY);
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}
