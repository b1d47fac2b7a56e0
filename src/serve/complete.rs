//! From a request whose fields are read to its answer: a place in the queue, tokens of its prompts, the engine.

use std::sync::Arc;

use axum::response::{IntoResponse, Response};

use super::answer::{Writing, refuse, stream, whole};
use super::app::{App, Open, unix_time};
use super::choice::Reading;
use super::error::ApiError;
use super::form::{Form, Head};
use super::model::Model;
use super::places::{Taken, Tenant};
use super::record::Record;
use super::run::{Order, Run};
use super::settings::Settings;
use crate::text::Constraint;

/// A request for completions.
pub(super) struct Asked {
    pub form: Form,
    pub settings: Settings,
    /// Its prompts, at least one.
    pub prompts: Vec<Vec<u32>>,
    /// Log-probabilities of each token, and of this many likely ones.
    pub logprobs: Option<usize>,
    /// How many of the answers to each prompt are told, if these are the best of more.
    pub best: Option<usize>,
    /// The form of the answers.
    pub constraint: Option<Constraint>,
    pub reading: Reading,
    /// The texts of the prompts, to put in front of the answers.
    pub echo: Option<Vec<String>>,
    pub tenant: Tenant,
    pub places: Taken,
}

/// Runs work that takes the processor, or waits for a process, away from the threads that serve connections.
pub(super) async fn apart<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&Model) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let app = app.clone();
    let work = move || work(&app.ready()?.model);
    let failed = |_| ApiError::internal("the request could not be prepared");
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}

/// # Errors
/// If a prompt is longer than the context.
pub(super) fn check_length(prompts: &[Vec<u32>], context: usize, param: &str) -> Result<(), ApiError> {
    match prompts.iter().map(Vec::len).find(|&n| n > context) {
        Some(n) => Err(ApiError::too_long(param, n, context)),
        None => Ok(()),
    }
}

/// Computes and answers.
pub(super) async fn answer(
    app: Arc<App>,
    asked: Result<Asked, ApiError>,
    id: String,
    open: Open,
    mut record: Record,
) -> Response {
    let (asked, loaded) = match asked.and_then(|asked| Ok((asked, app.ready()?))) {
        Ok(both) => both,
        Err(error) => return refuse(record, error),
    };
    let Asked { form, settings, prompts, logprobs, best, constraint, mut reading, echo, tenant, places } =
        asked;
    reading.salt = app.seed();
    let choices = prompts.len() * settings.n;
    let targets = loaded.model.targets.with(settings.targets);
    record.asks(prompts.iter().map(Vec::len).sum(), choices, settings.stream, targets);
    let order = Order {
        tenant,
        settings: &settings,
        prompts: &prompts,
        logprobs,
        ranked: best.is_some(),
        echo: echo.as_deref(),
        constraint,
        reading,
    };
    let run = Run::start(&loaded.model, order, places, (open, record)).await;
    let run = match run {
        Ok(run) => run,
        Err(error) => return error.into_response(),
    };
    let writing = Writing {
        head: Head { form, id, created: unix_time(), model: app.options.name.clone() },
        echo,
        n: settings.n,
        best,
        choices,
        logprobs: logprobs.is_some(),
        include_usage: settings.include_usage,
        keep_alive: app.options.keep_alive,
    };
    if settings.stream { stream(run, writing) } else { whole(run, &writing).await }
}
