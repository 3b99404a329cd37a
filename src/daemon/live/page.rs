//! The page at `/`, and what it reads once a second.
//!
//! It comes whole, with nothing from elsewhere, and asks for nothing but `live.json` and `map.json`: a policy says so to browsers, too. Names in it are others', and are shown as text.

use std::sync::Arc;

use axum::extract::{RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::json;
use crate::daemon::Daemon;
use crate::daemon::admin::session_statuses;
use crate::daemon::paced::{self, Page};
use crate::ids::SessionId;

const PAGE: &str = include_str!("page.html");
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'";

pub(in crate::daemon) async fn page() -> impl IntoResponse {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE)
}

const JSON: [(header::HeaderName, &str); 3] = [
    (header::CONTENT_TYPE, "application/json"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
];

pub(in crate::daemon) async fn figures(State(daemon): State<Arc<Daemon>>) -> Response {
    let node = Arc::clone(&daemon);
    let figures = move || {
        let (live, sessions) = (node.live_node(), json::Sessions::of(session_statuses(&node)));
        serde_json::to_string(&json::live(&live, sessions)).expect("names of fields are strings")
    };
    paced::answer(JSON, daemon.paced.get(Page::Live, figures).await)
}

/// `?session=7`: where that one's memory lies.
pub(in crate::daemon) async fn map(State(daemon): State<Arc<Daemon>>, RawQuery(wanted): RawQuery) -> Response {
    let number = wanted.as_deref().and_then(|wanted| wanted.strip_prefix("session=")?.parse().ok());
    let Some(number) = number else {
        return (StatusCode::BAD_REQUEST, "map.json?session=NUMBER\n").into_response();
    };
    match daemon.address_map(SessionId(number)).await {
        Some(reply) => (JSON, json::address_map(number, &reply).to_string()).into_response(),
        None => (StatusCode::NOT_FOUND, "there is no such session\n").into_response(),
    }
}
