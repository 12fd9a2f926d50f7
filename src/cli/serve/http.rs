//! HTTP layer: routes and API key.

use super::error::ApiError;
use super::job::Job;
use super::request::{Completion, Endpoint, parse};
use super::response::Reply;
use super::state::ServerState;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use crossbeam_channel::TrySendError;
use serde_json::{Value, json};
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Largest request body in bytes.
const BODY: usize = 4 << 20;

/// Starts the server on a thread of its own. On SIGINT or SIGTERM the server shuts down and sets `stop`.
///
/// # Errors
/// Failure to create a thread or the runtime.
pub(super) fn start(
    listener: TcpListener,
    state: Arc<ServerState>,
    stop: Arc<AtomicBool>,
) -> io::Result<JoinHandle<io::Result<()>>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    std::thread::Builder::new().name("serve".into()).spawn(move || {
        let outcome = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            axum::serve(listener, router(state)).with_graceful_shutdown(terminated(stop)).await
        });
        runtime.shutdown_background();
        outcome
    })
}

/// Waits for SIGINT or SIGTERM.
async fn terminated(stop: Arc<AtomicBool>) {
    let wait = |kind| async move {
        match signal(kind) {
            Ok(mut signals) => {
                signals.recv().await;
            }
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        () = wait(SignalKind::interrupt()) => {}
        () = wait(SignalKind::terminate()) => {}
    }
    stop.store(true, Ordering::Relaxed);
}

fn router(state: Arc<ServerState>) -> Router {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(text))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is nothing at this address") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes another method")
        })
        .layer(middleware::from_fn_with_state(state.clone(), authorize))
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(state)
}

/// The key of an `Authorization` header; the scheme is case-insensitive.
fn bearer(header: &str) -> Option<&str> {
    let (scheme, key) = header.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(key)
}

/// Rejects requests without the API key.
async fn authorize(
    State(state): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Some(key) = &state.key {
        let sent = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
        let sent = sent.and_then(bearer).unwrap_or_default();
        // hashes are compared in constant time
        if blake3::hash(sent.as_bytes()) != blake3::hash(key.as_bytes()) {
            let message = "the API key is missing, or it is another";
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key"));
        }
    }
    Ok(next.run(request).await)
}

async fn models(State(state): State<Arc<ServerState>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [state.describe()]}))
}

async fn model(
    State(state): State<Arc<ServerState>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if name == state.name {
        return Ok(Json(state.describe()));
    }
    let message = format!("The model `{name}` does not exist");
    Err(ApiError::new(StatusCode::NOT_FOUND, message).with_code("model_not_found"))
}

/// Request body, or an error in reading it.
type Body = Result<Bytes, BytesRejection>;

async fn chat(State(state): State<Arc<ServerState>>, body: Body) -> Result<Response, ApiError> {
    answer(state, Endpoint::Chat, body).await
}

async fn text(State(state): State<Arc<ServerState>>, body: Body) -> Result<Response, ApiError> {
    answer(state, Endpoint::Text, body).await
}

async fn answer(state: Arc<ServerState>, endpoint: Endpoint, body: Body) -> Result<Response, ApiError> {
    let body = body.map_err(|e| ApiError::new(e.status(), e.body_text()))?;
    let shared = state.clone();
    let parsed = tokio::task::spawn_blocking(move || parse(&shared, endpoint, &body)).await;
    let Completion { generation, stream, include_usage } =
        parsed.map_err(|e| ApiError::internal(e.to_string()))??;
    let (sender, events) = mpsc::unbounded_channel();
    let reply = Reply::new(endpoint, &state.name, generation.prompt.len());
    match state.queue.try_send(Job { generation, events: sender }) {
        Ok(()) => {}
        Err(TrySendError::Full(_)) => {
            let message = "too many requests wait already: try again later";
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message));
        }
        Err(TrySendError::Disconnected(_)) => return Err(ApiError::stopped()),
    }
    if stream { Ok(reply.streamed(events, include_usage)) } else { reply.whole(events).await }
}

#[cfg(test)]
mod tests {
    use super::bearer;

    #[test]
    fn the_scheme_of_a_key_is_case_insensitive() {
        assert_eq!(["Bearer k", "bearer k", "BEARER k"].map(bearer), [Some("k"); 3]);
        assert_eq!(["k", "Basic k", "Bearerk"].map(bearer), [None; 3]);
    }
}
