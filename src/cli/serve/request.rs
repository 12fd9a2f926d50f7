//! Request validation: unknown or unsupported parameters are rejected by name, never ignored.

use super::Served;
use crate::cli::chat;
use axum::http::StatusCode;
use candle_transformers::generation::LogitsProcessor;
use ft_data::PromptFormat;
use serde_json::{Map, Value, json};

/// An error in OpenAI's format.
#[derive(Debug)]
pub(super) struct Refused {
    pub status: StatusCode,
    pub message: String,
    /// The offending parameter.
    pub param: Option<String>,
    pub code: Option<&'static str>,
}

impl Refused {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    fn param(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Body of the response.
    pub fn body(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl From<ft_base::Error> for Refused {
    fn from(e: ft_base::Error) -> Self {
        Self::new(StatusCode::BAD_REQUEST, e.to_string())
    }
}

/// API endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Text,
}

/// A validated request.
pub(super) struct Question {
    pub prompt: Vec<u32>,
    pub max_tokens: usize,
    pub stop: Vec<String>,
    pub sampler: LogitsProcessor,
    pub stream: bool,
    /// Whether to end a stream with token counts.
    pub usage: bool,
}

/// Accepted parameters without effect.
const HARMLESS: [&str; 7] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
];

/// Parameters of a request, taken out one by one.
struct Parameters {
    map: Map<String, Value>,
}

impl Parameters {
    fn parse(body: &[u8]) -> Result<Self, Refused> {
        let bad = |why: String| {
            Refused::new(
                StatusCode::BAD_REQUEST,
                format!("We could not parse the JSON body of your request: {why}"),
            )
        };
        match serde_json::from_slice(body) {
            Ok(Value::Object(mut map)) => {
                map.retain(|_, v| !v.is_null());
                Ok(Self { map })
            }
            Ok(_) => Err(bad("it is not an object".into())),
            Err(e) => Err(bad(e.to_string())),
        }
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key)
    }

    fn number(&mut self, key: &str) -> Result<Option<f64>, Refused> {
        let Some(value) = self.take(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| Refused::param(key, format!("{key}: a number is wanted")))
    }

    fn count(&mut self, key: &str) -> Result<Option<usize>, Refused> {
        let Some(value) = self.take(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0) {
            Some(n) => Ok(Some(n)),
            None => Err(Refused::param(key, format!("{key}: a whole number above 0 is wanted"))),
        }
    }

    fn flag(&mut self, key: &str) -> Result<bool, Refused> {
        let Some(value) = self.take(key) else { return Ok(false) };
        value.as_bool().ok_or_else(|| Refused::param(key, format!("{key}: true or false is wanted")))
    }

    /// Accepts a parameter only with a neutral value.
    fn only(&mut self, key: &str, neutral: &[Value]) -> Result<(), Refused> {
        match self.take(key) {
            Some(v) if !neutral.contains(&v) => {
                Err(Refused::param(key, format!("{key}: {v} is not built; only {} is", neutral[0])))
            }
            _ => Ok(()),
        }
    }
}

/// Parses and validates a request body.
///
/// # Errors
/// Client errors: status 400, or 404 for an unknown model.
pub(super) fn question(served: &Served, kind: Kind, body: &[u8]) -> Result<Question, Refused> {
    let mut p = Parameters::parse(body)?;
    match p.take("model") {
        Some(Value::String(name)) if name == served.name => {}
        Some(Value::String(name)) => {
            let message = format!("The model `{name}` does not exist; {:?} is served", served.name);
            return Err(Refused {
                param: Some("model".into()),
                code: Some("model_not_found"),
                ..Refused::new(StatusCode::NOT_FOUND, message)
            });
        }
        Some(_) => return Err(Refused::param("model", "model: a name is wanted")),
        None => return Err(Refused::param("model", "you must provide a model parameter")),
    }
    for key in HARMLESS {
        p.take(key);
    }
    p.only("n", &[json!(1)])?;
    p.only("frequency_penalty", &[json!(0), json!(0.0)])?;
    p.only("presence_penalty", &[json!(0), json!(0.0)])?;
    p.only("logit_bias", &[json!({})])?;
    let prompt = match kind {
        Kind::Chat => {
            p.only("logprobs", &[json!(false)])?;
            p.only("top_logprobs", &[json!(0)])?;
            p.only("tools", &[json!([])])?;
            p.only("tool_choice", &[json!("none"), json!("auto")])?;
            p.only("response_format", &[json!({"type": "text"})])?;
            p.only("modalities", &[json!(["text"])])?;
            conversation(served, p.take("messages"))?
        }
        Kind::Text => {
            p.only("best_of", &[json!(1)])?;
            p.only("echo", &[json!(false)])?;
            p.only("suffix", &[json!("")])?;
            p.only("logprobs", &[json!(0)])?;
            text(served, p.take("prompt"))?
        }
    };
    let left = served.max_positions.saturating_sub(prompt.len());
    if left == 0 {
        let message = format!(
            "This model's maximum context length is {} tokens, and your prompt has {}",
            served.max_positions,
            prompt.len()
        );
        let param = Some(if kind == Kind::Chat { "messages" } else { "prompt" }.to_string());
        return Err(Refused {
            param,
            code: Some("context_length_exceeded"),
            ..Refused::new(StatusCode::BAD_REQUEST, message)
        });
    }
    let (newer, older) = (p.count("max_completion_tokens")?, p.count("max_tokens")?);
    let max_tokens = newer.or(older).unwrap_or(served.max_tokens).min(served.max_tokens).min(left);
    let (temperature, top_p) = (p.number("temperature")?, p.number("top_p")?);
    if temperature.is_some_and(|t| !(0.0..=2.0).contains(&t)) {
        return Err(Refused::param("temperature", "temperature: a number from 0 to 2 is wanted"));
    }
    if top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
        return Err(Refused::param("top_p", "top_p: a number above 0 and at most 1 is wanted"));
    }
    let seed = match p.take("seed") {
        Some(Value::Number(n)) if n.is_i64() || n.is_u64() => {
            n.as_u64().unwrap_or_else(|| n.as_i64().unwrap_or(0) as u64)
        }
        Some(_) => return Err(Refused::param("seed", "seed: a whole number is wanted")),
        None => super::http::random(),
    };
    let sampler = chat::sampler((temperature, top_p, None, seed), &served.dir)?;
    let stop = stops(p.take("stop"))?;
    let stream = p.flag("stream")?;
    let usage = match p.take("stream_options") {
        None => false,
        Some(Value::Object(_)) if !stream => {
            return Err(Refused::param("stream_options", "stream_options: belongs to stream = true"));
        }
        Some(Value::Object(o)) => {
            match o.keys().find(|k| !["include_usage", "include_obfuscation"].contains(&k.as_str())) {
                Some(k) => {
                    return Err(Refused::param("stream_options", format!("stream_options.{k} is not known")));
                }
                None => o.get("include_usage").and_then(Value::as_bool).unwrap_or(false),
            }
        }
        Some(_) => return Err(Refused::param("stream_options", "stream_options: an object is wanted")),
    };
    if let Some(key) = p.map.keys().next() {
        return Err(Refused::param(key, format!("Unrecognized request argument supplied: {key}")));
    }
    Ok(Question { prompt, max_tokens, stop, sampler, stream, usage })
}

/// Up to four stop strings.
fn stops(value: Option<Value>) -> Result<Vec<String>, Refused> {
    let bad =
        || Refused::param("stop", "stop: a text, or a list of up to four that are not empty, is wanted");
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(s)) => vec![Value::String(s)],
        Some(Value::Array(list)) if list.len() <= 4 => list,
        Some(_) => return Err(bad()),
    };
    let text = |v: Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_string).ok_or_else(bad);
    list.into_iter().map(text).collect()
}

/// Tokens of a text to continue.
fn text(served: &Served, prompt: Option<Value>) -> Result<Vec<u32>, Refused> {
    let bad = || Refused::param("prompt", "prompt: one text, or one list of token ids, is wanted");
    let one = match prompt {
        Some(Value::Array(mut list)) if list.len() == 1 && !list[0].is_number() => list.remove(0),
        Some(v) => v,
        None => return Err(bad()),
    };
    let ids = match one {
        Value::String(s) => PromptFormat::Text
            .prompt(&served.tokenizer, None, &s, &served.variables)
            .map_err(|e| Refused::from(ft_base::Error::from(e)))?,
        Value::Array(list) => {
            let id =
                |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| served.has(*id));
            list.iter().map(|v| id(v).ok_or_else(bad)).collect::<Result<_, _>>()?
        }
        _ => return Err(bad()),
    };
    if ids.is_empty() {
        return Err(Refused::param("prompt", "prompt: it is empty, and there is nothing to go on from"));
    }
    Ok(ids)
}

impl Served {
    fn has(&self, id: u32) -> bool {
        (id as usize) < self.vocab
    }
}

/// Tokens of a conversation, in the training's prompt form.
fn conversation(served: &Served, messages: Option<Value>) -> Result<Vec<u32>, Refused> {
    let bad = |why: &str| Refused::param("messages", format!("messages: {why}"));
    let Some(Value::Array(list)) = messages else { return Err(bad("a list of messages is wanted")) };
    if list.is_empty() {
        return Err(bad("at least one message is wanted"));
    }
    let mut plain = Vec::new();
    for (i, message) in list.into_iter().enumerate() {
        let Value::Object(mut m) = message else { return Err(bad(&format!("{i}: an object is wanted"))) };
        m.retain(|_, v| !v.is_null());
        let role = match m.get("role").and_then(Value::as_str) {
            // newer name of the system role
            Some("developer") => "system",
            Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
            _ => return Err(bad(&format!("{i}: role is not system, user, assistant or tool"))),
        };
        let content = match m.get("content") {
            Some(Value::String(s)) => s.clone(),
            Some(Value::Array(parts)) => parts
                .iter()
                .map(|part| match (part["type"].as_str(), part["text"].as_str()) {
                    (Some("text"), Some(text)) => Ok(text),
                    _ => Err(bad(&format!("{i}: content has a part that is no text"))),
                })
                .collect::<Result<String, _>>()?,
            None if m.contains_key("tool_calls") => String::new(),
            _ => return Err(bad(&format!("{i}: content: a text is wanted"))),
        };
        let role = role.to_string();
        m.insert("role".into(), json!(role));
        m.insert("content".into(), json!(content));
        plain.push((role, content, Value::Object(m)));
    }
    let of_data = |e: ft_data::Error| Refused::from(ft_base::Error::from(e));
    let ids = match (served.form, &plain[..]) {
        (PromptFormat::Chat, _) => {
            if !served.tokenizer.has_template() {
                return Err(bad(
                    "the model has no chat template (ft serve --chat-template FILE); /v1/completions continues texts",
                ));
            }
            let messages = Value::Array(plain.iter().map(|m| m.2.clone()).collect());
            let text = served.tokenizer.render(&messages, None, true, &served.variables).map_err(of_data)?;
            served.tokenizer.encode(&text).map_err(of_data)?
        }
        (PromptFormat::Text, _) => {
            return Err(bad("the model was trained on plain text, which /v1/completions continues"));
        }
        (form, [(user, prompt, _)]) if user == "user" => {
            form.prompt(&served.tokenizer, None, prompt, &served.variables).map_err(of_data)?
        }
        (form, [(system, before, _), (user, prompt, _)]) if system == "system" && user == "user" => form
            .prompt(&served.tokenizer, Some(before.as_str()), prompt, &served.variables)
            .map_err(of_data)?,
        _ => {
            return Err(bad(
                "the model was trained on single prompts: one user message, after a system message or none",
            ));
        }
    };
    if ids.is_empty() {
        return Err(bad("the chat template makes no tokens of them"));
    }
    Ok(ids)
}
