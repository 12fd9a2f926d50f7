//! HTTP layer: routes, API key, and responses, whole or as server-sent events.

use super::Served;
use super::request::{Kind, Question, Refused, question};
use super::work::{Event, Finish, Job, Told};
use crate::log::unix_time;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use crossbeam_channel::TrySendError;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::SystemTime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;

/// Largest request body in bytes.
const BODY: usize = 4 << 20;

/// An unpredictable number, as a seed or a response id.
pub(super) fn random() -> u64 {
    RandomState::new().hash_one(SystemTime::now())
}

/// Starts the server on a thread of its own. On SIGINT or SIGTERM the server shuts down and sets `stop`.
///
/// # Errors
/// Failure to create a thread or the runtime.
pub(super) fn start(
    listener: TcpListener,
    served: Arc<Served>,
    stop: Arc<AtomicBool>,
) -> io::Result<JoinHandle<io::Result<()>>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    std::thread::Builder::new().name("serve".into()).spawn(move || {
        let outcome = runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            axum::serve(listener, router(served)).with_graceful_shutdown(ended(stop)).await
        });
        runtime.shutdown_background();
        outcome
    })
}

/// Waits for SIGINT or SIGTERM.
async fn ended(stop: Arc<AtomicBool>) {
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

fn router(served: Arc<Served>) -> Router {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(text))
        .fallback(|| async {
            refused(Refused::new(StatusCode::NOT_FOUND, "there is nothing at this address"))
        })
        .method_not_allowed_fallback(|| async {
            refused(Refused::new(StatusCode::METHOD_NOT_ALLOWED, "this address takes another method"))
        })
        .layer(middleware::from_fn_with_state(served.clone(), authorize))
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(served)
}

/// Response if all copies have shut down.
fn ending() -> Refused {
    Refused::new(StatusCode::SERVICE_UNAVAILABLE, "what would have answered has ended")
}

fn refused(r: Refused) -> Response {
    (r.status, Json(r.body())).into_response()
}

/// Rejects requests without the API key.
async fn authorize(State(served): State<Arc<Served>>, request: Request, next: Next) -> Response {
    let Some(key) = &served.key else { return next.run(request).await };
    let sent = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    let sent = sent.and_then(|v| v.strip_prefix("Bearer ")).unwrap_or_default();
    // constant-time comparison
    let same =
        sent.len() == key.len() && sent.bytes().zip(key.bytes()).fold(0, |all, (a, b)| all | (a ^ b)) == 0;
    match same {
        true => next.run(request).await,
        false => refused(Refused {
            code: Some("invalid_api_key"),
            ..Refused::new(StatusCode::UNAUTHORIZED, "the API key is missing, or it is another")
        }),
    }
}

fn described(served: &Served) -> Value {
    let mut model =
        json!({"id": served.name, "object": "model", "created": served.created, "owned_by": "ft"});
    let copies = || served.copies.iter().filter(|c| !c.is_gone());
    // the newest step among the copies
    if let Some(step) = copies().filter_map(Told::step).max() {
        model["step"] = json!(step);
    }
    if served.copies.len() > 1 {
        let told = |c: &Told| match c.step() {
            Some(step) => json!({"device": c.device, "step": step}),
            None => json!({"device": c.device}),
        };
        model["copies"] = copies().map(told).collect();
    }
    model
}

/// Model name in responses; for a run it includes the step.
fn name_of(model: &str, step: Option<u64>) -> String {
    step.map_or_else(|| model.to_string(), |step| format!("{model}:step-{step}"))
}

async fn models(State(served): State<Arc<Served>>) -> Response {
    Json(json!({"object": "list", "data": [described(&served)]})).into_response()
}

async fn model(State(served): State<Arc<Served>>, Path(name): Path<String>) -> Response {
    if name == served.name {
        return Json(described(&served)).into_response();
    }
    let message = format!("The model `{name}` does not exist");
    refused(Refused { code: Some("model_not_found"), ..Refused::new(StatusCode::NOT_FOUND, message) })
}

async fn chat(State(served): State<Arc<Served>>, body: Result<Bytes, BytesRejection>) -> Response {
    answer(served, Kind::Chat, body).await.unwrap_or_else(refused)
}

async fn text(State(served): State<Arc<Served>>, body: Result<Bytes, BytesRejection>) -> Response {
    answer(served, Kind::Text, body).await.unwrap_or_else(refused)
}

async fn answer(
    served: Arc<Served>,
    kind: Kind,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refused> {
    let body = body.map_err(|e| Refused::new(e.status(), e.body_text()))?;
    let asked = served.clone();
    let asked = tokio::task::spawn_blocking(move || question(&asked, kind, &body)).await;
    let failed = |why: String| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, why);
    let question = asked.map_err(|e| failed(e.to_string()))??;
    let (sender, events) = mpsc::unbounded_channel();
    let reply = Reply {
        kind,
        id: format!("{}-{:016x}", if kind == Kind::Chat { "chatcmpl" } else { "cmpl" }, random()),
        created: unix_time(),
        model: served.name.clone(),
        prompt: question.prompt.len(),
    };
    let Question { stream, usage, .. } = question;
    match served.queue.try_send(Job { question, answer: sender }) {
        Ok(()) => {}
        Err(TrySendError::Full(_)) => {
            let message = "too many requests wait already: try again later";
            return Err(Refused::new(StatusCode::TOO_MANY_REQUESTS, message));
        }
        Err(TrySendError::Disconnected(_)) => {
            return Err(ending());
        }
    }
    if stream {
        return Ok(reply.streamed(events, usage));
    }
    reply.whole(events).await
}

/// Fields common to all parts of a response.
struct Reply {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    /// Tokens of the prompt.
    prompt: usize,
}

impl Reply {
    fn usage(&self, tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": tokens,
            "total_tokens": self.prompt + tokens,
        })
    }

    /// Sets the model name, once the answering step is known.
    fn begin(&mut self, step: Option<u64>) {
        self.model = name_of(&self.model, step);
    }

    async fn whole(mut self, mut events: mpsc::UnboundedReceiver<Event>) -> Result<Response, Refused> {
        let mut text = String::new();
        loop {
            match events.recv().await {
                Some(Event::Begin(step)) => self.begin(step),
                Some(Event::Text(piece)) => text.push_str(&piece),
                Some(Event::End(finish, tokens)) => {
                    let (object, choice) = match self.kind {
                        Kind::Chat => {
                            ("chat.completion", json!({"message": {"role": "assistant", "content": text}}))
                        }
                        Kind::Text => ("text_completion", json!({"text": text})),
                    };
                    let mut body = self.part(object, Some((choice, Some(finish))));
                    body["usage"] = self.usage(tokens);
                    return Ok(Json(body).into_response());
                }
                Some(Event::Failed(why)) => {
                    return Err(Refused::new(StatusCode::INTERNAL_SERVER_ERROR, why));
                }
                None => return Err(ending()),
            }
        }
    }

    /// An API object with at most one choice.
    fn part(&self, object: &str, choice: Option<(Value, Option<Finish>)>) -> Value {
        let choices: Vec<Value> = choice
            .into_iter()
            .map(|(mut choice, finish)| {
                choice["index"] = json!(0);
                choice["logprobs"] = Value::Null;
                choice["finish_reason"] = json!(finish.map(Finish::word));
                choice
            })
            .collect();
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    /// A chunk of a streamed response.
    fn piece(&self, text: Option<&str>, finish: Option<Finish>) -> Value {
        match (self.kind, text) {
            (Kind::Chat, Some(text)) => {
                self.part("chat.completion.chunk", Some((json!({"delta": {"content": text}}), finish)))
            }
            (Kind::Chat, None) => self.part("chat.completion.chunk", Some((json!({"delta": {}}), finish))),
            (Kind::Text, text) => {
                self.part("text_completion", Some((json!({"text": text.unwrap_or_default()}), finish)))
            }
        }
    }

    fn streamed(mut self, events: mpsc::UnboundedReceiver<Event>, usage: bool) -> Response {
        let said = |v: &Value| sse::Event::default().data(v.to_string());
        let all = UnboundedReceiverStream::new(events).map(move |event| match event {
            Event::Begin(step) => {
                self.begin(step);
                let delta = json!({"delta": {"role": "assistant", "content": ""}});
                let first = || self.part("chat.completion.chunk", Some((delta, None)));
                (self.kind == Kind::Chat).then(|| said(&first())).into_iter().collect()
            }
            Event::Text(text) => vec![said(&self.piece(Some(&text), None))],
            Event::End(finish, tokens) => {
                let mut last = vec![said(&self.piece(None, Some(finish)))];
                if usage {
                    let object =
                        if self.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" };
                    let mut part = self.part(object, None);
                    part["usage"] = self.usage(tokens);
                    last.push(said(&part));
                }
                last.push(sse::Event::default().data("[DONE]"));
                last
            }
            Event::Failed(why) => {
                vec![said(&Refused::new(StatusCode::INTERNAL_SERVER_ERROR, why).body())]
            }
        });
        Sse::new(flat(all)).into_response()
    }
}

/// Flattens a stream of lists.
fn flat(
    lists: impl tokio_stream::Stream<Item = Vec<sse::Event>> + Send + 'static,
) -> impl tokio_stream::Stream<Item = Result<sse::Event, Infallible>> + Send + 'static {
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(async move {
        let mut lists = std::pin::pin!(lists);
        loop {
            // a disconnected client drops the receiver; this ends the stream and with it the generation
            let list = tokio::select! {
                list = lists.next() => list,
                () = sender.closed() => None,
            };
            let Some(list) = list else { return };
            for event in list {
                if sender.send(Ok(event)).await.is_err() {
                    return;
                }
            }
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}
