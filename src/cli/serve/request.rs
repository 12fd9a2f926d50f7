//! Request validation: unknown or unsupported parameters are rejected by name, never ignored.

use super::error::ApiError;
use super::job::{Generation, random};
use super::parameters::Parameters;
use super::state::ServerState;
use crate::infer::sampling::SamplingOptions;
use axum::http::StatusCode;
use candle_transformers::generation::LogitsProcessor;
use ft_data::PromptFormat;
use serde_json::{Value, json};

/// API endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Chat,
    Text,
}

/// A validated request.
pub(super) struct Completion {
    pub generation: Generation,
    pub stream: bool,
    /// Whether to end a stream with token counts.
    pub include_usage: bool,
}

/// Accepted parameters without effect.
const WITHOUT_EFFECT: [&str; 7] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
];

/// Parses and validates a request body.
///
/// A token limit above the server's, or above the rest of the context, is lowered; the answer then ends
/// with finish reason `length`.
///
/// # Errors
/// Client errors: status 400, or 404 for an unknown model.
pub(super) fn parse(state: &ServerState, endpoint: Endpoint, body: &[u8]) -> Result<Completion, ApiError> {
    let mut p = Parameters::parse(body)?;
    check_model(state, p.take("model"))?;
    for key in WITHOUT_EFFECT {
        p.take(key);
    }
    p.reject_unless_neutral(&[
        ("n", json!(1)),
        ("frequency_penalty", json!(0)),
        ("presence_penalty", json!(0)),
        ("logit_bias", json!({})),
    ])?;
    let prompt = match endpoint {
        Endpoint::Chat => conversation(state, &mut p)?,
        Endpoint::Text => text(state, &mut p)?,
    };
    let left = state.max_positions.saturating_sub(prompt.len());
    if left == 0 {
        let message = format!(
            "This model's maximum context length is {} tokens, and your prompt has {}",
            state.max_positions,
            prompt.len()
        );
        let param = if endpoint == Endpoint::Chat { "messages" } else { "prompt" };
        return Err(ApiError::param(param, message).with_code("context_length_exceeded"));
    }
    let (newer, older) = (p.count("max_completion_tokens")?, p.count("max_tokens")?);
    let max_tokens = newer.or(older).unwrap_or(state.max_tokens).min(state.max_tokens).min(left);
    let sampler = sampler(state, &mut p)?;
    let stop = stop_strings(p.take("stop"))?;
    let stream = p.read("stream", "true or false", Value::as_bool)?.unwrap_or(false);
    let include_usage = include_usage(p.take("stream_options"), stream)?;
    p.finish()?;
    let generation = Generation { prompt, max_tokens, stop, sampler };
    Ok(Completion { generation, stream, include_usage })
}

fn check_model(state: &ServerState, name: Option<Value>) -> Result<(), ApiError> {
    match name {
        Some(Value::String(name)) if name == state.name => Ok(()),
        Some(Value::String(name)) => {
            let message = format!("The model `{name}` does not exist; {:?} is served", state.name);
            let error = ApiError::param("model", message).with_code("model_not_found");
            Err(ApiError { status: StatusCode::NOT_FOUND, ..error })
        }
        Some(_) => Err(ApiError::param("model", "model: a name is wanted")),
        None => Err(ApiError::param("model", "you must provide a model parameter")),
    }
}

fn sampler(state: &ServerState, p: &mut Parameters) -> Result<LogitsProcessor, ApiError> {
    let number = |range: fn(f64) -> bool| move |v: &Value| v.as_f64().filter(|n| range(*n));
    let in_range = number(|t| (0.0..=2.0).contains(&t));
    let temperature = p.read("temperature", "a number from 0 to 2", in_range)?;
    let in_range = number(|p| p > 0.0 && p <= 1.0);
    let top_p = p.read("top_p", "a number above 0 and at most 1", in_range)?;
    let whole = |v: &Value| v.as_u64().or_else(|| v.as_i64().map(|n| n as u64));
    let seed = p.read("seed", "a whole number", whole)?.unwrap_or_else(random);
    Ok(SamplingOptions { temperature, top_p, top_k: None, seed }.sampler(&state.dir)?)
}

/// Up to four stop strings.
fn stop_strings(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let fail =
        || ApiError::param("stop", "stop: a text, or a list of up to four that are not empty, is wanted");
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(s)) => vec![Value::String(s)],
        Some(Value::Array(list)) if list.len() <= 4 => list,
        Some(_) => return Err(fail()),
    };
    let text = |v: Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_string).ok_or_else(fail);
    list.into_iter().map(text).collect()
}

/// `stream_options.include_usage`.
fn include_usage(options: Option<Value>, stream: bool) -> Result<bool, ApiError> {
    let fail = |message: &str| ApiError::param("stream_options", format!("stream_options{message}"));
    match options {
        None => Ok(false),
        Some(Value::Object(_)) if !stream => Err(fail(": belongs to stream = true")),
        Some(Value::Object(o)) => {
            let known = ["include_usage", "include_obfuscation"];
            match o.keys().find(|k| !known.contains(&k.as_str())) {
                Some(k) => Err(fail(&format!(".{k} is not known"))),
                None => Ok(o.get("include_usage").and_then(Value::as_bool).unwrap_or(false)),
            }
        }
        Some(_) => Err(fail(": an object is wanted")),
    }
}

/// Tokens of a text to continue.
fn text(state: &ServerState, p: &mut Parameters) -> Result<Vec<u32>, ApiError> {
    p.reject_unless_neutral(&[
        ("best_of", json!(1)),
        ("echo", json!(false)),
        ("suffix", json!("")),
        ("logprobs", json!(0)),
    ])?;
    let fail = || ApiError::param("prompt", "prompt: one text, or one list of token ids, is wanted");
    let one = match p.take("prompt") {
        Some(Value::Array(mut list)) if list.len() == 1 && !list[0].is_number() => list.remove(0),
        Some(v) => v,
        None => return Err(fail()),
    };
    let ids = match one {
        Value::String(s) => {
            PromptFormat::Text.prompt(&state.prompt.tokenizer, None, &s, &state.prompt.variables)?
        }
        Value::Array(list) => {
            let in_vocabulary = |id: &u32| (*id as usize) < state.vocab;
            let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).filter(in_vocabulary);
            list.iter().map(|v| id(v).ok_or_else(fail)).collect::<Result<_, _>>()?
        }
        _ => return Err(fail()),
    };
    if ids.is_empty() {
        return Err(ApiError::param("prompt", "prompt: it is empty, and there is nothing to go on from"));
    }
    Ok(ids)
}

/// An invalid list of messages.
fn bad_messages(why: &str) -> ApiError {
    ApiError::param("messages", format!("messages: {why}"))
}

/// A message of a conversation.
struct Message {
    role: String,
    content: String,
    /// The whole message, for the chat template.
    value: Value,
}

impl Message {
    /// Parses message `i`.
    fn parse(i: usize, message: Value) -> Result<Self, ApiError> {
        let fail = |why: &str| bad_messages(&format!("{i}: {why}"));
        let Value::Object(mut m) = message else { return Err(fail("an object is wanted")) };
        m.retain(|_, v| !v.is_null());
        let role = match m.get("role").and_then(Value::as_str) {
            // newer name of the system role
            Some("developer") => "system",
            Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
            _ => return Err(fail("role is not system, user, assistant or tool")),
        };
        let role = role.to_string();
        let content = match m.get("content") {
            Some(Value::String(s)) => s.clone(),
            Some(Value::Array(parts)) => parts
                .iter()
                .map(|part| part["text"].as_str().filter(|_| part["type"] == "text"))
                .collect::<Option<String>>()
                .ok_or_else(|| fail("content has a part that is no text"))?,
            None if m.contains_key("tool_calls") => String::new(),
            _ => return Err(fail("content: a text is wanted")),
        };
        m.insert("role".into(), json!(role));
        m.insert("content".into(), json!(content));
        Ok(Self { role, content, value: Value::Object(m) })
    }
}

/// Tokens of a conversation, in the training's prompt form.
fn conversation(state: &ServerState, p: &mut Parameters) -> Result<Vec<u32>, ApiError> {
    p.reject_unless_neutral(&[
        ("logprobs", json!(false)),
        ("top_logprobs", json!(0)),
        ("tools", json!([])),
        ("response_format", json!({"type": "text"})),
        ("modalities", json!(["text"])),
    ])?;
    let choice = p.take("tool_choice");
    if let Some(v) = choice.filter(|v| !["none", "auto"].iter().any(|neutral| v == neutral)) {
        return Err(ApiError::param(
            "tool_choice",
            format!("tool_choice: {v} is not built; only \"none\" is"),
        ));
    }
    let Some(Value::Array(list)) = p.take("messages") else {
        return Err(bad_messages("a list of messages is wanted"));
    };
    if list.is_empty() {
        return Err(bad_messages("at least one message is wanted"));
    }
    let messages = list.into_iter().enumerate().map(|(i, m)| Message::parse(i, m));
    let messages = messages.collect::<Result<Vec<_>, _>>()?;
    let roles: Vec<&str> = messages.iter().map(|m| m.role.as_str()).collect();
    let prompt = &state.prompt;
    let ids = match (prompt.form, roles.as_slice()) {
        (PromptFormat::Chat, _) if !prompt.tokenizer.has_template() => {
            return Err(bad_messages(
                "the model has no chat template (ft serve --chat-template FILE); /v1/completions continues texts",
            ));
        }
        (PromptFormat::Chat, _) => prompt.conversation(messages.into_iter().map(|m| m.value).collect())?,
        (PromptFormat::Text, _) => {
            return Err(bad_messages("the model was trained on plain text, which /v1/completions continues"));
        }
        (_, ["user"]) => prompt.single(None, &messages[0].content)?,
        (_, ["system", "user"]) => prompt.single(Some(&messages[0].content), &messages[1].content)?,
        _ => {
            return Err(bad_messages(
                "the model was trained on single prompts: one user message, after a system message or none",
            ));
        }
    };
    if ids.is_empty() {
        return Err(bad_messages("the chat template makes no tokens of them"));
    }
    Ok(ids)
}
