//! `GET /status`: what the server and its engine do, as one JSON object. The page at `/` shows it.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use crate::cache::PAGE_TOKENS;
use crate::serve::app::App;
use crate::serve::lane_name;
use crate::serve::model::Loaded;

pub(super) const PATH: &str = "/status";

pub(super) async fn run(State(app): State<Arc<App>>) -> Json<Value> {
    let loaded = app.loaded.get();
    let state = match loaded {
        None => "loading",
        Some(loaded) if loaded.model.check().is_err() => "failed",
        Some(_) if app.is_draining() => "draining",
        Some(_) => "ready",
    };
    let mut status = json!({
        "name": app.options.name,
        "version": env!("CARGO_PKG_VERSION"),
        "state": state,
        "uptime_s": app.begun.elapsed().as_secs_f64(),
        "http": app.metrics.by_kind(),
        "tokens": app.metrics.tokens(),
        "latency": app.metrics.recent.json(),
        "targets": app.metrics.in_time(),
        "requests": null,
        "model": null,
        "pages": null,
        "engine": null,
    });
    if let Some(loaded) = loaded {
        engine(&mut status, loaded);
    }
    Json(status)
}

fn engine(to: &mut Value, loaded: &Loaded) {
    let (model, status) = (&loaded.model, loaded.model.client.status());
    let (waiting, running) = status.load;
    to["requests"] = json!({
        "running": running,
        "waiting": waiting,
        "places_taken": loaded.places.taken(),
        "places": loaded.places.most(),
    });
    to["model"] = json!({
        "context": model.context,
        "sequences": model.sequences,
        "placement": model.placement,
        "ttft_target_s": model.targets.ttft,
        "tpot_target_s": model.targets.tpot,
    });
    let side = |i: usize| {
        let (all, free, kept) = (status.pages[i], status.free_pages[i], status.kept_pages[i]);
        json!({ "used": all.saturating_sub(free), "kept": kept, "free": free.saturating_sub(kept) })
    };
    to["pages"] = json!({ "tokens": PAGE_TOKENS, "device": side(0), "host": side(1) });
    let lanes = status.busy.map(|busy| -> Map<String, Value> {
        busy.iter().map(|(unit, &seconds)| (lane_name(unit).into(), json!(seconds))).collect()
    });
    to["engine"] = json!({
        "strategy": status.strategy,
        "steps": status.steps,
        "rows": status.rows,
        "tokens": status.tokens,
        "cached": status.cached,
        "finished": status.ended.0,
        "failed": status.ended.1,
        "swaps": status.swapped,
        "exchanged_experts": status.exchanged_experts,
        "step_seconds": status.seconds.0,
        "predicted_seconds": status.seconds.1,
        "is_emulated": status.is_emulated,
        "lane_seconds": lanes,
        "link_bytes": { "to_device": status.link_bytes[0], "to_host": status.link_bytes[1] },
    });
}
