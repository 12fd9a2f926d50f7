//! Prompts of a request: conversations, texts, token ids.

use super::error::{ApiError, shown};
use super::parameters::Parameters;
use crate::cli::serve::generate::Prompt;
use crate::cli::serve::state::ServerState;
use crate::infer::Prompter;
use ft_data::{PromptFormat, Tokenizer, open_calls};
use serde_json::{Map, Value, json};

/// Prompts of a request.
const PROMPTS: usize = 256;
/// Tokens of all prompts of a request, unless the model takes more.
const TOKENS: usize = 1 << 16;

/// Texts to continue: one text, one list of token ids, or a list of them.
pub fn texts(state: &ServerState, p: &mut Parameters) -> Result<Vec<Prompt>, ApiError> {
    let fail = |why: String| ApiError::param("prompt", format!("prompt: {why}"));
    let list = match p.take("prompt") {
        Some(Value::Array(list)) if !list.first().is_some_and(Value::is_number) => list,
        Some(one) => vec![one],
        None => return Err(fail("a text, a list of token ids, or a list of these is wanted".into())),
    };
    if list.is_empty() || list.len() > PROMPTS {
        return Err(fail(format!("there are {} prompts; 1 to {PROMPTS} are wanted", list.len())));
    }
    let prompts = list.into_iter().map(|v| text(state, v)).collect::<Result<Vec<_>, _>>()?;
    let (total, most) =
        (prompts.iter().map(|p| p.ids.len()).sum::<usize>(), TOKENS.max(state.context.tokens));
    if total > most && prompts.len() > 1 {
        return Err(fail(format!("they have {total} tokens together; at most {most} are answered at once")));
    }
    Ok(prompts)
}

fn text(state: &ServerState, value: Value) -> Result<Prompt, ApiError> {
    let fail = |why: &str| ApiError::param("prompt", format!("prompt: {why}"));
    let prompt = match value {
        Value::String(text) => {
            let ids =
                PromptFormat::Text.prompt(&state.prompt.tokenizer, None, &text, &state.prompt.variables)?;
            Prompt { ids, text: Some(text) }
        }
        Value::Array(list) => {
            let in_vocabulary = |id: &u32| (*id as usize) < state.vocab;
            let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).filter(in_vocabulary);
            let ids: Option<Vec<u32>> = list.iter().map(id).collect();
            Prompt { ids: ids.ok_or_else(|| fail("not a list of token ids of the model"))?, text: None }
        }
        _ => return Err(fail("a text or a list of token ids is wanted")),
    };
    if prompt.ids.is_empty() {
        return Err(fail("it is empty, and there is nothing to go on from"));
    }
    Ok(prompt)
}

/// An invalid list of messages.
fn bad_messages(why: &str) -> ApiError {
    ApiError::param("messages", format!("messages: {why}"))
}

/// Checks message `i`; its content is then one text.
fn message(i: usize, message: Value) -> Result<Value, ApiError> {
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
        Some(Value::Array(parts)) => {
            parts.iter().map(|part| part_text(part).map_err(&fail)).collect::<Result<_, _>>()?
        }
        None if m.contains_key("tool_calls") => String::new(),
        _ => return Err(fail("content: a text is wanted")),
    };
    if let Some(calls) = m.get_mut("tool_calls") {
        open_calls(calls, &role).map_err(|why| fail(why.trim_start_matches('.')))?;
    }
    m.insert("role".into(), json!(role));
    m.insert("content".into(), json!(content));
    Ok(Value::Object(m))
}

/// Text of a part of a message.
fn part_text(part: &Value) -> Result<&str, &'static str> {
    match part["type"].as_str() {
        Some("text") => part["text"].as_str().ok_or("content has a part without its text"),
        Some("image_url" | "input_image" | "image") => Err("content has an image; only text is read"),
        Some("input_audio" | "audio_url") => Err("content has a sound; only text is read"),
        Some("video_url") => Err("content has a video; only text is read"),
        _ => Err("content has a part that is no text"),
    }
}

/// A conversation, in the training's prompt form.
pub fn conversation(state: &ServerState, p: &mut Parameters) -> Result<Vec<Prompt>, ApiError> {
    let Some(Value::Array(list)) = p.take("messages") else {
        return Err(bad_messages("a list of messages is wanted"));
    };
    if list.is_empty() {
        return Err(bad_messages("at least one message is wanted"));
    }
    let messages = list.into_iter().enumerate().map(|(i, m)| message(i, m));
    let messages = messages.collect::<Result<Vec<_>, _>>()?;
    let prompt = &state.prompt;
    let variables = template_variables(p, prompt)?;
    let text = |i: usize, key: &str| messages[i][key].as_str().unwrap_or_default();
    let roles: Vec<&str> = (0..messages.len()).map(|i| text(i, "role")).collect();
    let ids = match (prompt.form, roles.as_slice()) {
        (PromptFormat::Chat, _) if !prompt.tokenizer.has_template() => {
            return Err(bad_messages(
                "the model has no chat template (ft serve --chat-template FILE); /v1/completions continues texts",
            ));
        }
        (PromptFormat::Chat, _) => prompt.conversation(messages, variables)?,
        (PromptFormat::Text, _) => {
            return Err(bad_messages("the model was trained on plain text, which /v1/completions continues"));
        }
        (_, ["user"]) => prompt.single(None, text(0, "content"))?,
        (_, ["system", "user"]) => prompt.single(Some(text(0, "content")), text(1, "content"))?,
        _ => {
            return Err(bad_messages(
                "the model was trained on single prompts: one user message, after a system message or none",
            ));
        }
    };
    if ids.is_empty() {
        return Err(bad_messages("the chat template makes no tokens of them"));
    }
    Ok(vec![Prompt { ids, text: None }])
}

/// Variables of the chat template: `chat_template_kwargs`, and `reasoning_effort` where the template reads it.
fn template_variables(p: &mut Parameters, prompt: &Prompter) -> Result<Map<String, Value>, ApiError> {
    const KEY: &str = "chat_template_kwargs";
    const EFFORT: &str = "reasoning_effort";
    let fail = |why: String| Err(ApiError::param(KEY, format!("{KEY}: {why}")));
    let mut variables = match p.take(KEY) {
        None => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(_) => return fail("an object is wanted".into()),
    };
    if let Some(key) = variables.keys().find(|k| Tokenizer::sets(k)) {
        return fail(format!("{key} is not a variable of one's own"));
    }
    check_read(KEY, &variables, prompt)?;
    if let Some(effort) = p.read(EFFORT, "a word", |v| v.is_string().then(|| v.clone()))? {
        let effort = Map::from_iter([(EFFORT.to_string(), effort)]);
        check_read(EFFORT, &effort, prompt)?;
        if variables.get(EFFORT).is_some_and(|other| *other != effort[EFFORT]) {
            return Err(ApiError::param(EFFORT, format!("{EFFORT} contradicts {KEY}.{EFFORT}")));
        }
        variables.extend(effort);
    }
    Ok(variables)
}

/// Refuses variables of the parameter `key` not read by the chat template.
fn check_read(key: &str, variables: &Map<String, Value>, prompt: &Prompter) -> Result<(), ApiError> {
    let fail = |why: String| Err(ApiError::param(key, format!("{key}: {why}")));
    if prompt.form != PromptFormat::Chat && !variables.is_empty() {
        return fail("the model was not trained with a chat template".into());
    }
    match prompt.tokenizer.unread(variables) {
        Some((name, known)) if known.is_empty() => {
            fail(format!("the template reads no {:?}, nor any other", shown(name)))
        }
        Some((name, known)) => {
            fail(format!("the template reads no {:?}; it reads {}", shown(name), known.join(", ")))
        }
        None => Ok(()),
    }
}
