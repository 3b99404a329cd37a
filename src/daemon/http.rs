//! What is served over HTTP: a page for people at `/`, `/metrics` for Prometheus, `/livez` and `/readyz` for whoever starts and stops daemons.
//!
//! Anybody who reaches the port may connect, and nobody is asked who they are: so there are only so many connections, each for one request and a moment. One too many takes the place of the oldest, so that who
//! connects and says nothing keeps nobody out, neither here nor from the descriptors that chunks and sessions need.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use axum::routing::get;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::Daemon;
use super::listener::AcceptFailures;
use super::live::page;
use super::metrics::Format;
use super::paced::{self, Page};
use crate::limits;

/// How long a connection may last: a request, its answer, and nothing after it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Serves until the daemon drops it.
pub(super) async fn run(daemon: Arc<Daemon>, listener: TcpListener) {
    let router = Router::new()
        .route("/", get(page::page))
        .route("/live.json", get(page::figures))
        .route("/map.json", get(page::map))
        .route("/metrics", get(metrics))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(daemon);
    let mut connections = JoinSet::new();
    let mut by_age: VecDeque<AbortHandle> = VecDeque::new();
    let mut failures = AcceptFailures::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                failures.reset();
                while connections.try_join_next().is_some() {}
                by_age.retain(|connection| !connection.is_finished());
                while connections.len() >= limits::HTTP_CONNECTIONS_MAX {
                    if let Some(oldest) = by_age.pop_front() {
                        oldest.abort();
                    }
                    // Its descriptor is closed before the next is accepted.
                    connections.join_next().await;
                }
                by_age.push_back(connections.spawn(serve(stream, router.clone())));
            }
            Err(error) => failures.note("the HTTP port", &listener, &error).await,
        }
    }
}

async fn serve(stream: TcpStream, router: Router) {
    let mut server = auto::Builder::new(TokioExecutor::new()).http1_only();
    server.http1().keep_alive(false);
    let connection = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match tokio::time::timeout(PATIENCE, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(error, "an HTTP connection failed"),
        Err(_) => tracing::debug!("an HTTP connection was too slow"),
    }
}

async fn metrics(State(daemon): State<Arc<Daemon>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::of(accept.unwrap_or_default());
    let node = Arc::clone(&daemon);
    let text = daemon.paced.get(Page::Metrics(format), move || node.render_metrics(format)).await;
    paced::answer([(header::CONTENT_TYPE, format.content_type())], text)
}

async fn ready(State(daemon): State<Arc<Daemon>>) -> (StatusCode, &'static str) {
    if daemon.is_draining() { (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n") } else { (StatusCode::OK, "ok\n") }
}
