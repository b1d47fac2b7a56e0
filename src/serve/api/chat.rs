//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;

use crate::Error;
use crate::serve::app::App;
use crate::serve::complete::{Asked, answer, apart, check_length};
use crate::serve::error::ApiError;
use crate::serve::fields::{Chat, Common};
use crate::serve::form::Form;
use crate::serve::places::Tenant;
use crate::serve::record::Record;
use crate::serve::settings::{Settings, out_of_range};
use crate::serve::wanted::Wanted;
use crate::serve::{body, conversation};

pub(super) const PATH: &str = "/v1/chat/completions";

/// Most likely tokens with log-probabilities, for each token.
const MOST_TOP: u32 = 20;

pub(super) async fn run(State(app): State<Arc<App>>, request: Request) -> Response {
    let (open, id) = (app.open(), app.id("chatcmpl"));
    let record = Record::new(app.clone(), PATH, id.clone());
    let asked = asked(&app, request).await;
    answer(app, asked, id, open, record).await
}

async fn asked(app: &Arc<App>, request: Request) -> Result<Asked, ApiError> {
    let loaded = app.ready()?;
    let tenant = Tenant::of(&request);
    let bytes = body::read(app, request).await?;
    let (fields, mut common): (Chat, Common) = (bytes.parse()?, bytes.parse()?);
    drop(bytes);
    common.max_tokens = fields.max_completion_tokens.or(common.max_tokens);
    if common.max_tokens == Some(0) {
        let name =
            if fields.max_completion_tokens.is_some() { "max_completion_tokens" } else { "max_tokens" };
        return Err(out_of_range(name, "at least 1"));
    }
    let logprobs = logprobs(&fields)?;
    let chat = &loaded.model.chat;
    let wanted = Wanted::content(common.response_format.as_ref())?.with_tools(&fields, chat)?;
    let mut settings = Settings::of(common, &loaded.model, || app.seed())?;
    let conversation = conversation::of(&fields, wanted.has_tools(), chat)?;
    let places = loaded.places.take(tenant, settings.n, "n")?;
    let prepared = apart(app, move |model| {
        let chat = &model.chat;
        let tokens = chat.answers(vec![conversation]).tokens.remove(0).map_err(|e| match e {
            // What the template has against the messages.
            Error::Run(why) => ApiError::bad("messages", why),
            e => ApiError::from_engine(&e, "messages"),
        })?;
        let thinks = (chat.thinks(), chat.has_begun_thinking(&tokens));
        let channels = chat.channels(&tokens, wanted.has_tools());
        Ok((tokens, wanted.prepare(model, thinks, channels)?))
    });
    let (prompt, (constraint, reading)) = prepared.await?;
    if constraint.is_some() || reading.thinks {
        settings.ending.shown = chat.markers();
    }
    if let Some(channels) = &reading.channels {
        settings.ending.parting = channels.tokens();
    }
    let prompts = vec![prompt];
    check_length(&prompts, loaded.model.context, "messages")?;
    Ok(Asked {
        form: Form::Chat,
        settings,
        prompts,
        logprobs,
        best: None,
        constraint,
        reading,
        echo: None,
        tenant,
        places,
    })
}

fn logprobs(fields: &Chat) -> Result<Option<usize>, ApiError> {
    match (fields.logprobs.unwrap_or(false), fields.top_logprobs) {
        (false, Some(n)) if n > 0 => Err(out_of_range("top_logprobs", "logprobs beside it")),
        (true, Some(n)) if n > MOST_TOP => Err(out_of_range("top_logprobs", "at most 20")),
        (true, n) => Ok(Some(n.unwrap_or(0) as usize)),
        (false, _) => Ok(None),
    }
}
