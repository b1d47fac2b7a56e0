//! `GET /openapi.json`: what the endpoints take and give, for programs.

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

pub(super) const PATH: &str = "/openapi.json";

/// The description; its version is that of the program.
fn text() -> String {
    include_str!("../openapi.json").replacen("VERSION", env!("CARGO_PKG_VERSION"), 1)
}

pub(super) async fn run() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_is_described() {
        let document: serde_json::Value = serde_json::from_str(&text()).unwrap();
        let mut described: Vec<_> = document["paths"].as_object().unwrap().keys().cloned().collect();
        described.sort();
        let mut served: Vec<_> = super::super::PATHS.map(|p| p.replace('*', "")).into();
        served.retain(|path| path != PATH);
        served.sort();
        assert_eq!(described, served);
        assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    }
}
