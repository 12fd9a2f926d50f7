//! Request validation: unknown or unsupported parameters are rejected by name, never ignored.

use super::error::{ApiError, shown};
use super::parameters::Parameters;
use super::prompt;
use super::response::Endpoint;
use crate::cli::serve::generate::{Generation, Prompt};
use crate::cli::serve::state::ServerState;
use crate::infer::ContextLimit;
use crate::infer::sampling::{SamplingOptions, penalty};
use ft_base::store::json::short;
use serde_json::{Value, json};

/// Most alternatives per token.
const ALTERNATIVES: u64 = 20;
/// Most stop strings.
const STOPS: usize = 32;
/// Token limit of a reply without one in the request or for the server.
const REPLY: usize = 1024;
/// Log-probabilities of the generated tokens of a request without streaming: one JSON value in memory, about 1 KiB per
/// log-probability.
const SCORES: usize = 1 << 16;
/// Log-probabilities of the tokens of echoed prompts, streamed or not: 65536 tokens with 7 alternatives. They take a
/// quarter of a KiB each with many alternatives, three quarters without any.
const ECHOED: usize = 1 << 19;
/// Parameters that limit the tokens of a reply, newest first.
const LIMITS: [&str; 2] = ["max_completion_tokens", "max_tokens"];

/// A validated request.
pub struct Request {
    pub generation: Generation,
    pub stream: bool,
    /// Whether to end a stream with token counts.
    pub include_usage: bool,
}

/// Accepted parameters without effect.
const WITHOUT_EFFECT: [&str; 9] = [
    "user",
    "store",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "parallel_tool_calls",
];

/// Parses and validates a request body.
///
/// A token limit above the server's, or above the rest of the context, is lowered; the answer then ends
/// with finish reason `length`. Log-probabilities of an answer without streaming are limited to `SCORES`, of echoed
/// prompts to `ECHOED`.
///
/// # Errors
/// Client errors: status 400, or 404 for an unknown model. Whether a named step is loaded, the answer tells.
pub fn parse(state: &ServerState, endpoint: Endpoint, body: &[u8]) -> Result<Request, ApiError> {
    let mut p = Parameters::parse(body)?;
    let step = step(state, p.take("model"))?;
    for key in WITHOUT_EFFECT {
        p.take(key);
    }
    reject_unsupported(endpoint, &mut p)?;
    let (prompts, logprobs, echo) = match endpoint {
        Endpoint::Chat => (prompt::conversation(state, &mut p)?, chat_logprobs(&mut p)?, false),
        Endpoint::Text => {
            let logprobs = p.read("logprobs", "a whole number from 0 to 20", alternatives)?;
            let echo = p.read("echo", "true or false", Value::as_bool)?.unwrap_or(false);
            (prompt::texts(state, &mut p)?, logprobs, echo)
        }
    };
    let stream = p.read("stream", "true or false", Value::as_bool)?.unwrap_or(false);
    let (asked, limit) = max_tokens(state, &mut p, endpoint, echo, &prompts)?;
    if echo && let Some(alternatives) = logprobs {
        check_echo(alternatives, prompts.iter().map(|p| p.ids.len()).sum())?;
    }
    let scored = logprobs.filter(|_| !stream).map_or(usize::MAX, |n| scored_tokens(n, prompts.len()));
    let max_tokens = limit_scored(asked, limit, scored)?;
    let (sampling, repetition_penalty, seed) = sampling(state, &mut p)?;
    let stop = stop_strings(p.take("stop"))?;
    let include_usage = include_usage(p.take("stream_options"), stream)?;
    p.finish()?;
    let continues = endpoint == Endpoint::Text;
    let generation = Generation {
        prompts,
        max_tokens,
        context: state.context.tokens,
        stop,
        sampling,
        seed,
        repetition_penalty,
        logprobs,
        echo,
        continues,
        step,
    };
    Ok(Request { generation, stream, include_usage })
}

/// Checks the name of the model; the step in it, if any.
fn step(state: &ServerState, name: Option<Value>) -> Result<Option<u64>, ApiError> {
    match name {
        Some(Value::String(name)) if name == state.name => Ok(None),
        Some(Value::String(name)) => {
            let unknown = || ApiError::no_model(&name, &state.name, state.step());
            state.step_in(&name).map(Some).ok_or_else(unknown)
        }
        Some(_) => Err(ApiError::param("model", "model: a name is wanted")),
        None => Err(ApiError::param("model", "you must provide a model parameter")),
    }
}

/// Rejects unsupported parameters of the API.
fn reject_unsupported(endpoint: Endpoint, p: &mut Parameters) -> Result<(), ApiError> {
    p.reject_unless_neutral(&[
        ("n", json!(1)),
        ("frequency_penalty", json!(0)),
        ("presence_penalty", json!(0)),
        ("logit_bias", json!({})),
    ])?;
    if endpoint == Endpoint::Text {
        return p.reject_unless_neutral(&[("best_of", json!(1)), ("suffix", json!(""))]);
    }
    p.reject_unless_neutral(&[
        ("tools", json!([])),
        ("response_format", json!({"type": "text"})),
        ("modalities", json!(["text"])),
    ])?;
    let choice = p.take("tool_choice");
    match choice.filter(|v| !["none", "auto"].iter().any(|neutral| v == neutral)) {
        Some(v) => {
            let message = format!("tool_choice: {} is not built; only \"none\" is", short(&v));
            Err(ApiError::param("tool_choice", message))
        }
        None => Ok(()),
    }
}

fn alternatives(v: &Value) -> Option<usize> {
    v.as_u64().filter(|n| *n <= ALTERNATIVES).map(|n| n as usize)
}

/// `logprobs` and `top_logprobs` of a conversation.
fn chat_logprobs(p: &mut Parameters) -> Result<Option<usize>, ApiError> {
    let wanted = p.read("logprobs", "true or false", Value::as_bool)?.unwrap_or(false);
    let top = p.read("top_logprobs", "a whole number from 0 to 20", alternatives)?;
    match top {
        Some(1..) if !wanted => {
            Err(ApiError::param("top_logprobs", "top_logprobs: belongs to logprobs = true"))
        }
        _ => Ok(wanted.then(|| top.unwrap_or(0))),
    }
}

/// A limit in a request, and its parameter.
type Asked = (&'static str, usize);

/// Token limits of the replies to prompts, of the request and the one that holds; 0 only beside an echo. After each
/// prompt, the rest of the context is a further one.
fn max_tokens(
    state: &ServerState,
    p: &mut Parameters,
    endpoint: Endpoint,
    echo: bool,
    prompts: &[Prompt],
) -> Result<(Option<Asked>, usize), ApiError> {
    let least = u64::from(!echo);
    let count = |v: &Value| v.as_u64().filter(|n| *n >= least).and_then(|n| usize::try_from(n).ok());
    let wanted = if echo { "a whole number" } else { "a whole number above 0" };
    let [newer, older] = LIMITS.map(|key| p.read(key, wanted, count));
    let (newer, older) = (newer?, older?);
    if let (Some(newer), Some(older)) = (newer, older)
        && newer != older
    {
        let message = format!("max_tokens = {older} contradicts max_completion_tokens = {newer}");
        return Err(ApiError::param("max_tokens", message));
    }
    let asked = newer.map(|n| (LIMITS[0], n)).or(older.map(|n| (LIMITS[1], n)));
    let tokens_asked = asked.map(|(_, n)| n);
    let ContextLimit { model, tokens } = state.context;
    let lengths = || prompts.iter().map(|prompt| prompt.ids.len());
    let (shortest, longest) = (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0));
    if longest > tokens || (longest == tokens && tokens_asked != Some(0)) {
        let why = match state.context.is_of_memory() {
            true => format!(" in the memory of this server (the model is made for {model})"),
            false => String::new(),
        };
        let message = format!(
            "This model's maximum context length is {tokens} tokens{why}, and your prompt has {longest}"
        );
        let param = if endpoint == Endpoint::Chat { "messages" } else { "prompt" };
        return Err(ApiError::param(param, message).with_code("context_length_exceeded"));
    }
    Ok((asked, reply_limit(tokens_asked, state.max_tokens).min(tokens - shortest)))
}

/// Token limit of a reply, from those of the request and of the server.
fn reply_limit(asked: Option<usize>, server: Option<usize>) -> usize {
    match (asked, server) {
        (Some(asked), Some(server)) => asked.min(server),
        (asked, server) => asked.or(server).unwrap_or(REPLY),
    }
}

/// Most tokens of each reply with this number of alternatives per token, within [`SCORES`].
fn scored_tokens(alternatives: usize, prompts: usize) -> usize {
    SCORES / (alternatives + 1) / prompts.max(1)
}

/// Refuses prompts of more tokens than are echoed with this number of alternatives per token, within [`ECHOED`].
fn check_echo(alternatives: usize, tokens: usize) -> Result<(), ApiError> {
    let most = ECHOED / (alternatives + 1);
    if tokens <= most {
        return Ok(());
    }
    let message = format!(
        "logprobs: with echo = true and {alternatives} alternatives, prompts have at most {most} tokens together; \
         these have {tokens}"
    );
    Err(ApiError::param("logprobs", message))
}

/// Lowers a token limit to that of scored replies, or refuses it if the request asked for it.
fn limit_scored(asked: Option<Asked>, limit: usize, scored: usize) -> Result<usize, ApiError> {
    match asked {
        Some((key, _)) if limit > scored => {
            let message = format!(
                "{key}: with log-probabilities, and without stream = true, each reply has at most {scored} tokens"
            );
            Err(ApiError::param(key, message))
        }
        _ => Ok(limit.min(scored)),
    }
}

/// How to sample, the repetition penalty, and the seed, if one is given.
fn sampling(
    state: &ServerState,
    p: &mut Parameters,
) -> Result<(candle_transformers::generation::Sampling, f32, Option<u64>), ApiError> {
    let number = |range: fn(f64) -> bool| move |v: &Value| v.as_f64().filter(|n| range(*n));
    let in_range = number(|t| (0.0..=2.0).contains(&t));
    let temperature = p.read("temperature", "a number from 0 to 2", in_range)?;
    let in_range = number(|p| p > 0.0 && p <= 1.0);
    let top_p = p.read("top_p", "a number above 0 and at most 1", in_range)?;
    let count = |v: &Value| v.as_i64().filter(|k| *k >= -1).map(|k| k.max(0) as usize);
    let top_k = p.read("top_k", "a whole number, or 0 or -1 for all", count)?;
    let repetition_penalty = p.read("repetition_penalty", "a number above 0", penalty)?;
    let whole = |v: &Value| v.as_u64().or_else(|| v.as_i64().map(|n| n as u64));
    let seed = p.read("seed", "a whole number", whole)?;
    let options = SamplingOptions { temperature, top_p, top_k, repetition_penalty, seed: 0 };
    let (sampling, penalty) = options.sampling(&state.generation)?;
    Ok((sampling, penalty, seed))
}

/// Up to [`STOPS`] stop strings.
fn stop_strings(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let message = format!("stop: a text, or a list of up to {STOPS} that are not empty, is wanted");
    let fail = || ApiError::param("stop", message.as_str());
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(s)) => vec![Value::String(s)],
        Some(Value::Array(list)) if list.len() <= STOPS => list,
        Some(_) => return Err(fail()),
    };
    let text = |v: Value| v.as_str().filter(|s| !s.is_empty()).map(str::to_string).ok_or_else(fail);
    list.into_iter().map(text).collect()
}

/// `stream_options.include_usage`.
fn include_usage(options: Option<Value>, stream: bool) -> Result<bool, ApiError> {
    let fail = |message: &str| ApiError::param("stream_options", format!("stream_options{message}"));
    let mut o = match options {
        None => return Ok(false),
        Some(Value::Object(_)) if !stream => return Err(fail(": belongs to stream = true")),
        Some(Value::Object(o)) => o,
        Some(_) => return Err(fail(": an object is wanted")),
    };
    let usage = o.remove("include_usage");
    // padding against observers of the network, without effect on the answer
    o.remove("include_obfuscation");
    match (o.keys().next(), usage) {
        (Some(key), _) => Err(fail(&format!(".{} is not known", shown(key)))),
        (None, None | Some(Value::Null)) => Ok(false),
        (None, Some(Value::Bool(usage))) => Ok(usage),
        (None, Some(_)) => Err(fail(".include_usage: true or false is wanted")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_limit_given_to_the_server_lowers_that_of_a_request() {
        assert_eq!([None, Some(4096)].map(|asked| reply_limit(asked, None)), [REPLY, 4096]);
        assert_eq!([None, Some(9), Some(4096)].map(|asked| reply_limit(asked, Some(400))), [400, 9, 400]);
    }

    #[test]
    fn log_probabilities_limit_the_tokens_of_whole_replies() {
        let scored = [(0, 1), (20, 1), (20, 256)].map(|(n, prompts)| scored_tokens(n, prompts));
        assert_eq!(scored, [65536, 3120, 12]);
        let limit = |asked: Option<usize>, limit| {
            limit_scored(asked.map(|n| (LIMITS[1], n)), limit, 3120).map_err(|e| e.param)
        };
        assert_eq!(limit(None, 100_000), Ok(3120));
        assert_eq!((limit(None, 8), limit(Some(3120), 3120)), (Ok(8), Ok(3120)));
        // lowered before by the server or the context
        assert_eq!(limit(Some(100_000), 512), Ok(512));
        assert_eq!(limit(Some(3121), 3121), Err(Some("max_tokens".into())));
    }

    /// Harnesses score texts as echoed prompts, with up to 5 alternatives.
    #[test]
    fn echoes_of_65536_tokens_are_scored() {
        assert!([0, 5, 7].iter().all(|n| check_echo(*n, 65536).is_ok()));
        assert!(check_echo(8, 65536).is_err_and(|e| e.param.as_deref() == Some("logprobs")));
    }

    #[test]
    fn stop_strings_are_up_to_32() {
        let stops = |n: usize| stop_strings(Some(json!(vec!["a"; n])));
        assert_eq!(stops(STOPS).map(|stops| stops.len()).ok(), Some(32));
        assert!(stops(STOPS + 1).is_err_and(|e| e.param.as_deref() == Some("stop")));
    }
}
