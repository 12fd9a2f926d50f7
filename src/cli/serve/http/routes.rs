//! Routes.

use super::auth;
use super::connections;
use crate::cli::serve::api::{ApiError, Endpoint, Json, Reply, Request, parse};
use crate::cli::serve::generate::{Job, Refused};
use crate::cli::serve::state::ServerState;
use crate::train::signals::Signals;
use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Router, middleware};
use futures_util::StreamExt;
use serde_json::json;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread::JoinHandle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, timeout_at};

/// Channel to end the server.
pub type Ending = (mpsc::Sender<()>, mpsc::Receiver<()>);

/// Starts the server on a separate thread. It ends on a signal, or a message of `ending`; then it closes the queue.
///
/// # Errors
/// Failure to create a thread, the runtime, or a signal handler.
pub fn start(
    listener: TcpListener,
    state: Arc<ServerState>,
    (ending, mut ended): Ending,
) -> io::Result<JoinHandle<()>> {
    // blocking threads parse requests, whose values may take much memory
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(2)
        .enable_all()
        .build()?;
    let listener = {
        let _inside = runtime.enter();
        for number in Signals::numbers() {
            let (mut signals, ending) = (signal(SignalKind::from_raw(number))?, ending.clone());
            runtime.spawn(async move {
                signals.recv().await;
                let _ = ending.try_send(());
            });
        }
        tokio::net::TcpListener::from_std(listener)?
    };
    std::thread::Builder::new().name("serve".into()).spawn(move || {
        let end = async {
            ended.recv().await;
            state.queue.close();
        };
        runtime.block_on(connections::serve(listener, router(state.clone()), state.limits, end));
        runtime.shutdown_background();
    })
}

fn router(state: Arc<ServerState>) -> Router {
    let answers = |endpoint: Endpoint| {
        post(move |State(state): State<Arc<ServerState>>, body: Body| answer(state, endpoint, body))
    };
    let router = Router::new()
        .route(auth::HEALTH, get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", answers(Endpoint::Chat))
        .route("/v1/completions", answers(Endpoint::Text))
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is nothing at this address") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes another method")
        })
        .layer(middleware::from_fn_with_state(state.clone(), auth::check));
    let router = match state.key {
        Some(_) => router.layer(middleware::from_fn(auth::allow_pages)),
        None => router,
    };
    router.with_state(state)
}

async fn health() -> Json {
    Json(json!({"status": "ok"}))
}

async fn models(State(state): State<Arc<ServerState>>) -> Json {
    Json(json!({"object": "list", "data": [state.describe()]}))
}

async fn model(
    State(state): State<Arc<ServerState>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json, ApiError> {
    let name = name.map(|Path(name)| name).map_err(|e| ApiError::new(e.status(), e.body_text()))?;
    let (named, loaded) = (state.step_in(&name), state.step());
    if name == state.name || (named.is_some() && named == loaded) {
        return Ok(Json(state.describe()));
    }
    Err(ApiError::no_model(&name, &state.name, loaded))
}

async fn answer(state: Arc<ServerState>, endpoint: Endpoint, body: Body) -> Result<Response, ApiError> {
    let (body, held) = read(&state, body).await?;
    let shared = state.clone();
    let parsed = tokio::task::spawn_blocking(move || parse(&shared, endpoint, &body)).await;
    let Request { generation, stream, include_usage } =
        parsed.map_err(|e| ApiError::internal(e.to_string()))??;
    let (sender, events) = mpsc::unbounded_channel();
    let reply = Reply::new(endpoint, &state.name, &generation);
    state.queue.push(Job { generation, events: sender, _held: held }).map_err(|refused| match refused {
        Refused::Full => ApiError::busy("too many requests wait already"),
        Refused::Closed => ApiError::stopped(),
    })?;
    if stream { reply.streamed(events, include_usage).await } else { reply.whole(events).await }
}

/// Reads a body within the limits on size, on all bodies together, and on time.
async fn read(state: &ServerState, body: Body) -> Result<(Vec<u8>, Option<OwnedSemaphorePermit>), ApiError> {
    let limits = state.limits;
    let end = Instant::now() + limits.body_time;
    let slow = |_| {
        let message = format!("the body did not arrive within {} s", limits.body_time.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
    };
    let large = || {
        let message = format!("the body has more than {} bytes", limits.body_bytes);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    // by its Content-Length, before it arrives
    if body.size_hint().lower() > limits.body_bytes as u64 {
        return Err(large());
    }
    let mut parts = body.into_data_stream();
    let (mut bytes, mut held) = (Vec::new(), None::<OwnedSemaphorePermit>);
    while let Some(part) = timeout_at(end, parts.next()).await.map_err(slow)? {
        let part = part.map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, e.to_string()))?;
        if bytes.len() + part.len() > limits.body_bytes {
            return Err(large());
        }
        let more = state.room.clone().try_acquire_many_owned(part.len() as u32);
        let more = more.map_err(|_| ApiError::busy("too many large requests wait already"))?;
        match &mut held {
            Some(held) => held.merge(more),
            None => held = Some(more),
        }
        bytes.extend_from_slice(&part);
    }
    Ok((bytes, held))
}
