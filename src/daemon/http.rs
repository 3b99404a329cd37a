//! What is served over HTTP: `/metrics` for Prometheus, `/livez` and `/readyz` for whoever starts and stops daemons.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use super::Daemon;

pub(super) async fn run(daemon: Arc<Daemon>, listener: TcpListener) {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(daemon);
    // Ends only when its listener does.
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the HTTP server failed");
    }
}

async fn metrics(State(daemon): State<Arc<Daemon>>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], daemon.render_metrics())
}

async fn ready(State(daemon): State<Arc<Daemon>>) -> (StatusCode, &'static str) {
    if daemon.is_draining() { (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n") } else { (StatusCode::OK, "ok\n") }
}
