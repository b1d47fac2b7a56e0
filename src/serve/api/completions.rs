//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::serve::app::App;
use crate::serve::body;
use crate::serve::complete::{Asked, answer, apart, check_length};
use crate::serve::error::ApiError;
use crate::serve::fields::{Common, Completion, Prompt};
use crate::serve::form::Form;
use crate::serve::model::Model;
use crate::serve::places::Tenant;
use crate::serve::record::Record;
use crate::serve::settings::{MOST_CHOICES, Settings, out_of_range};
use crate::serve::wanted::Wanted;

pub(super) const PATH: &str = "/v1/completions";

/// Tokens of an answer that asks for no number of them, as in OpenAI's API.
const TOKENS: u32 = 16;
/// Most likely tokens with log-probabilities, for each token.
const MOST_TOP: u32 = 20;

pub(super) async fn run(State(app): State<Arc<App>>, request: Request) -> Response {
    let (open, id) = (app.open(), app.id("cmpl"));
    let record = Record::new(app.clone(), PATH, id.clone());
    let asked = asked(&app, request).await;
    answer(app, asked, id, open, record).await
}

async fn asked(app: &Arc<App>, request: Request) -> Result<Asked, ApiError> {
    let loaded = app.ready()?;
    let tenant = Tenant::of(&request);
    let bytes = body::read(app, request).await?;
    let (fields, mut common): (Completion, Common) = (bytes.parse()?, bytes.parse()?);
    drop(bytes);
    common.max_tokens.get_or_insert(TOKENS);
    if fields.suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix", "text behind the answer is not supported"));
    }
    let n = common.n.unwrap_or(1);
    let best = fields.best_of.filter(|&best| best != n);
    if let Some(best) = best {
        if best < n {
            return Err(out_of_range("best_of", &format!("at least n, which is {n},")));
        }
        if common.stream == Some(true) {
            return Err(ApiError::bad(
                "best_of",
                "best_of: a stream cannot tell which answers will be the best",
            ));
        }
        if best > MOST_CHOICES {
            return Err(out_of_range("best_of", &format!("at most {MOST_CHOICES}")));
        }
        common.n = Some(best);
    }
    let logprobs = fields.logprobs.map(|n| n as usize);
    if fields.logprobs.is_some_and(|n| n > MOST_TOP) {
        return Err(out_of_range("logprobs", "at most 20"));
    }
    let echo = fields.echo.unwrap_or(false);
    let wanted = Wanted::content(common.response_format.as_ref())?;
    let mut settings = Settings::of(common, &loaded.model, || app.seed())?;
    let prompts = several(fields.prompt);
    if prompts.is_empty() {
        return Err(out_of_range("prompt", "at least one prompt"));
    }
    let answers = prompts.len().saturating_mul(settings.n);
    let places = loaded.places.take(tenant, answers, if settings.n > 1 { "n" } else { "prompt" })?;
    let prepare = move |model: &Model| {
        let prepared = prompts.into_iter().map(|one| prepare(model, one, echo));
        let prepared: Vec<(Vec<u32>, String)> = prepared.collect::<Result<_, _>>()?;
        Ok((prepared, wanted.prepare(model, (false, false), None)?))
    };
    let (prepared, (constraint, mut reading)) = apart(app, prepare).await?;
    reading.lists = true;
    if constraint.is_some() {
        settings.ending.shown = loaded.model.chat.markers();
    }
    let (prompts, texts): (Vec<_>, Vec<_>) = prepared.into_iter().unzip();
    check_length(&prompts, loaded.model.context, "prompt")?;
    let echo = echo.then_some(texts);
    let best = best.map(|_| n as usize);
    Ok(Asked {
        form: Form::Text,
        settings,
        prompts,
        logprobs,
        best,
        constraint,
        reading,
        echo,
        tenant,
        places,
    })
}

/// One of the prompts.
enum One {
    Text(String),
    Tokens(Vec<u32>),
}

fn several(prompt: Prompt) -> Vec<One> {
    match prompt {
        Prompt::Text(text) => vec![One::Text(text)],
        // An empty list is one of anything.
        Prompt::Tokens(ids) if ids.is_empty() => Vec::new(),
        Prompt::Tokens(ids) => vec![One::Tokens(ids)],
        Prompt::Texts(texts) => texts.into_iter().map(One::Text).collect(),
        Prompt::ManyTokens(lists) => lists.into_iter().map(One::Tokens).collect(),
    }
}

/// The tokens of a prompt, and its text if that is wanted.
fn prepare(model: &Model, one: One, text: bool) -> Result<(Vec<u32>, String), ApiError> {
    let bad = |e| ApiError::from_engine(&e, "prompt");
    match one {
        One::Text(text) => Ok((model.chat.raw(&text).map_err(bad)?, text)),
        One::Tokens(ids) if ids.is_empty() => Err(out_of_range("prompt", "at least one token")),
        One::Tokens(ids) => {
            let ids = model.chat.tokens(ids).map_err(bad)?;
            let text = if text { model.text_of(&ids) } else { String::new() };
            Ok((ids, text))
        }
    }
}
