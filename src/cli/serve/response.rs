//! Responses: whole, or as server-sent events.

use super::error::ApiError;
use super::job::{Event, FinishReason, random};
use super::request::Endpoint;
use crate::log::unix_time;
use axum::Json;
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::convert::Infallible;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, UnboundedReceiverStream};

/// Fields common to all parts of a response.
pub(super) struct Reply {
    endpoint: Endpoint,
    id: String,
    created: u64,
    /// Name of the model; for a run it includes the step.
    model: String,
    /// Tokens of the prompt.
    prompt_tokens: usize,
}

impl Reply {
    pub fn new(endpoint: Endpoint, model: &str, prompt_tokens: usize) -> Self {
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:016x}", random());
        Self { endpoint, id, created: unix_time(), model: model.to_string(), prompt_tokens }
    }

    fn usage(&self, tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        })
    }

    /// Adds the step of the weights to the model name, once known.
    fn set_step(&mut self, step: Option<u64>) {
        if let Some(step) = step {
            self.model += &format!(":step-{step}");
        }
    }

    /// The whole answer as one object.
    ///
    /// # Errors
    /// A failed answer; all replicas stopped.
    pub async fn whole(mut self, mut events: mpsc::UnboundedReceiver<Event>) -> Result<Response, ApiError> {
        let mut text = String::new();
        loop {
            match events.recv().await {
                Some(Event::Begin(step)) => self.set_step(step),
                Some(Event::Text(piece)) => text.push_str(&piece),
                Some(Event::End(finish, tokens)) => {
                    let (object, choice) = match self.endpoint {
                        Endpoint::Chat => {
                            ("chat.completion", json!({"message": {"role": "assistant", "content": text}}))
                        }
                        Endpoint::Text => ("text_completion", json!({"text": text})),
                    };
                    let mut body = self.object(object, Some((choice, Some(finish))));
                    body["usage"] = self.usage(tokens);
                    return Ok(Json(body).into_response());
                }
                Some(Event::Failed(why)) => return Err(ApiError::internal(why)),
                None => return Err(ApiError::stopped()),
            }
        }
    }

    /// An API object with at most one choice.
    fn object(&self, object: &str, choice: Option<(Value, Option<FinishReason>)>) -> Value {
        let choices: Vec<Value> = choice
            .into_iter()
            .map(|(mut choice, finish)| {
                choice["index"] = json!(0);
                choice["logprobs"] = Value::Null;
                choice["finish_reason"] = json!(finish);
                choice
            })
            .collect();
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    /// A chunk of a streamed response; `None` for the last, with token counts.
    fn chunk(&self, choice: Option<(Value, Option<FinishReason>)>) -> Value {
        let object =
            if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
        self.object(object, choice)
    }

    /// The answer as server-sent events, with token counts at the end if `include_usage`.
    pub fn streamed(mut self, events: mpsc::UnboundedReceiver<Event>, include_usage: bool) -> Response {
        let event = |v: Value| sse::Event::default().data(v.to_string());
        let chat = self.endpoint == Endpoint::Chat;
        let all = UnboundedReceiverStream::new(events).map(move |e| match e {
            Event::Begin(step) => {
                self.set_step(step);
                let delta = json!({"delta": {"role": "assistant", "content": ""}});
                if chat { vec![event(self.chunk(Some((delta, None))))] } else { Vec::new() }
            }
            Event::Text(text) => {
                let choice = if chat { json!({"delta": {"content": text}}) } else { json!({"text": text}) };
                vec![event(self.chunk(Some((choice, None))))]
            }
            Event::End(finish, tokens) => {
                let choice = if chat { json!({"delta": {}}) } else { json!({"text": ""}) };
                let mut last = vec![event(self.chunk(Some((choice, Some(finish)))))];
                if include_usage {
                    let mut chunk = self.chunk(None);
                    chunk["usage"] = self.usage(tokens);
                    last.push(event(chunk));
                }
                last.push(sse::Event::default().data("[DONE]"));
                last
            }
            Event::Failed(why) => vec![event(ApiError::internal(why).body())],
        });
        Sse::new(flatten(all)).into_response()
    }
}

/// Flattens a stream of lists.
fn flatten(
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
    ReceiverStream::new(receiver)
}
