//! Responses: whole, or as server-sent events.

use super::error::ApiError;
use crate::cli::serve::generate::{Event, FinishReason, Generation, Spelled, Token, random};
use crate::log::unix_time;
use axum::http::header;
use axum::response::sse::{self, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::poll_fn;
use serde_json::{Map, Value, json};
use std::convert::Infallible;
use std::mem::take;
use tokio::sync::mpsc;

/// Events of a stream waiting for a slow client.
const WAITING: usize = 16;

/// Body of type JSON.
pub struct Json(pub Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "application/json")], self.0.to_string()).into_response()
    }
}

/// API endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Text,
}

/// Fields common to all parts of a response.
pub struct Reply {
    endpoint: Endpoint,
    id: String,
    created: u64,
    /// Name of the model; for a run it includes the step.
    model: String,
    /// Number of replies: one per prompt.
    choices: usize,
    /// Tokens of the prompts.
    prompt_tokens: usize,
    logprobs: bool,
    /// The step named by the request, if any.
    named: Option<u64>,
}

impl Reply {
    pub fn new(endpoint: Endpoint, model: &str, generation: &Generation) -> Self {
        let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
        Self {
            endpoint,
            id: format!("{prefix}-{:016x}", random()),
            created: unix_time(),
            model: model.to_string(),
            choices: generation.prompts.len(),
            prompt_tokens: generation.prompts.iter().map(|p| p.ids.len()).sum(),
            logprobs: generation.logprobs.is_some(),
            named: generation.step,
        }
    }

    fn usage(&self, tokens: usize) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        })
    }

    /// Refuses weights of another step than the request names; called before [`Reply::set_step`].
    fn check_step(&self, loaded: Option<u64>) -> Result<(), ApiError> {
        match self.named {
            Some(named) if loaded != Some(named) => {
                Err(ApiError::no_model(&format!("{}:step-{named}", self.model), &self.model, loaded))
            }
            _ => Ok(()),
        }
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
    /// A failed answer; another step than the request names; the end of the server.
    pub async fn whole(mut self, mut events: mpsc::UnboundedReceiver<Event>) -> Result<Response, ApiError> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        let (mut choices, mut total) = (Vec::new(), 0);
        while choices.len() < self.choices {
            match events.recv().await {
                Some(Event::Begin(step)) => {
                    self.check_step(step)?;
                    self.set_step(step);
                }
                Some(Event::Text(piece, more)) => {
                    text.push_str(&piece);
                    tokens.extend(more);
                }
                Some(Event::End(finish, count)) => {
                    let (text, tokens) = (take(&mut text), take(&mut tokens));
                    let content = match self.endpoint {
                        Endpoint::Chat => json!({"message": {"role": "assistant", "content": text}}),
                        Endpoint::Text => json!({"text": text}),
                    };
                    choices.push(self.choice(choices.len(), content, &tokens, Some(finish)));
                    total += count;
                }
                Some(Event::Failed(why)) => return Err(ApiError::internal(why)),
                None => return Err(ApiError::stopped()),
            }
        }
        let object = if self.endpoint == Endpoint::Chat { "chat.completion" } else { "text_completion" };
        let mut body = self.object(object, choices);
        body["usage"] = self.usage(total);
        Ok(Json(body).into_response())
    }

    /// Completes a choice, given its text in `content`.
    fn choice(
        &self,
        index: usize,
        mut content: Value,
        tokens: &[Token],
        finish: Option<FinishReason>,
    ) -> Value {
        content["index"] = json!(index);
        content["logprobs"] = match self.endpoint {
            _ if !self.logprobs => Value::Null,
            Endpoint::Chat => chat_logprobs(tokens),
            Endpoint::Text => text_logprobs(tokens),
        };
        content["finish_reason"] = json!(finish);
        content
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    /// A part of a streamed response.
    fn chunk(&self, choices: Vec<Value>) -> Value {
        let object =
            if self.endpoint == Endpoint::Chat { "chat.completion.chunk" } else { "text_completion" };
        self.object(object, choices)
    }

    /// The answer as server-sent events, with token counts at the end if `include_usage`.
    ///
    /// # Errors
    /// Another step than the request names.
    pub async fn streamed(
        self,
        mut events: mpsc::UnboundedReceiver<Event>,
        include_usage: bool,
    ) -> Result<Response, ApiError> {
        // the status depends on the step of the weights, if the request names one
        let first = if self.named.is_some() { events.recv().await } else { None };
        if let Some(Event::Begin(step)) = first {
            self.check_step(step)?;
        }
        let (sender, mut receiver) = mpsc::channel(WAITING);
        tokio::spawn(async move {
            // a disconnected client drops the receiver; this drops the events and ends the generation
            tokio::select! {
                () = sender.closed() => {}
                _ = self.stream((first, events), &sender, include_usage) => {}
            }
        });
        Ok(Sse::new(poll_fn(move |context| receiver.poll_recv(context))).into_response())
    }

    /// Sends the chunks of a stream, of the event already received and of the rest; `None` if the client is gone.
    async fn stream(
        mut self,
        (mut first, mut events): (Option<Event>, mpsc::UnboundedReceiver<Event>),
        client: &mpsc::Sender<Result<sse::Event, Infallible>>,
        include_usage: bool,
    ) -> Option<()> {
        let send = async |data: String| client.send(Ok(sse::Event::default().data(data))).await.ok();
        let chat = self.endpoint == Endpoint::Chat;
        let (mut index, mut total) = (0, 0);
        while index < self.choices {
            let event = match first.take() {
                None => events.recv().await,
                first => first,
            };
            let choice = match event {
                Some(Event::Begin(step)) => {
                    self.set_step(step);
                    if !chat {
                        continue;
                    }
                    self.choice(index, json!({"delta": {"role": "assistant", "content": ""}}), &[], None)
                }
                Some(Event::Text(text, tokens)) => {
                    let content =
                        if chat { json!({"delta": {"content": text}}) } else { json!({"text": text}) };
                    self.choice(index, content, &tokens, None)
                }
                Some(Event::End(finish, tokens)) => {
                    total += tokens;
                    index += 1;
                    let content = if chat { json!({"delta": {}}) } else { json!({"text": ""}) };
                    self.choice(index - 1, content, &[], Some(finish))
                }
                Some(Event::Failed(why)) => return send(ApiError::internal(why).body().to_string()).await,
                None => return send(ApiError::stopped().body().to_string()).await,
            };
            send(self.chunk(vec![choice]).to_string()).await?;
        }
        if include_usage {
            let mut chunk = self.chunk(Vec::new());
            chunk["usage"] = self.usage(total);
            send(chunk.to_string()).await?;
        }
        send("[DONE]".into()).await
    }
}

/// Log-probabilities of `/v1/completions`.
fn text_logprobs(tokens: &[Token]) -> Value {
    let top = |t: &Token| -> Option<Map<String, Value>> {
        let own = [(&t.spelled, t.logprob?)];
        let all = t.top.iter().map(|(spelled, x)| (spelled, *x));
        Some(all.chain(own).map(|(spelled, x)| (spelled.text.clone(), json!(x))).collect())
    };
    json!({
        "tokens": tokens.iter().map(|t| &t.spelled.text).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|t| t.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": tokens.iter().map(|t| t.offset).collect::<Vec<_>>(),
    })
}

/// Log-probabilities of `/v1/chat/completions`.
fn chat_logprobs(tokens: &[Token]) -> Value {
    let likely = |spelled: &Spelled, logprob: f32| {
        let bytes = spelled.whole.then_some(spelled.text.as_bytes());
        json!({"token": spelled.text, "logprob": logprob, "bytes": bytes})
    };
    let content = tokens.iter().filter_map(|t| {
        let mut token = likely(&t.spelled, t.logprob?);
        token["top_logprobs"] = t.top.iter().map(|(spelled, x)| likely(spelled, *x)).collect();
        Some(token)
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}
