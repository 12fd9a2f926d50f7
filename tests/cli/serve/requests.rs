//! Requests to `ft serve` over plain HTTP.

use super::chunks;
use crate::server::{Server, answer};
use crate::world::{World, repository};
use serde_json::{Value, json};
use std::io::Read;

fn question() -> Value {
    json!({"messages": [{"role": "user", "content": "What colour is the sky?"}], "temperature": 0})
}

#[test]
fn answers_are_those_of_ft_chat_whole_and_streamed() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    let said = w.ok(&["chat", &s.model, "--prompt", "What colour is the sky?"]).out;
    let (status, answer) = s.post("/v1/chat/completions", question());
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let text = choice["message"]["content"].as_str().expect("a text");
    assert_eq!(text.trim_end(), said.trim_end());
    assert_eq!((&choice["finish_reason"], &choice["message"]["role"]), (&json!("stop"), &json!("assistant")));
    let usage = &answer["usage"];
    let count = |key: &str| usage[key].as_u64().expect("a count");
    assert!(count("prompt_tokens") > 5 && count("completion_tokens") > 1);
    assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));

    let mut streamed = question();
    streamed["model"] = json!(s.model);
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let (status, body) = s.ask("POST", "/v1/chat/completions", "", streamed.to_string().as_bytes());
    assert_eq!(status, 200, "{body}");
    let parts = chunks(&body);
    let pieces: String = parts.iter().filter_map(|p| p["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(pieces, text);
    assert!(parts.len() > 3, "in pieces");
    assert_eq!(parts[parts.len() - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(parts[parts.len() - 1]["usage"], *usage);

    // Token limit, and a stop text.
    let mut short = question();
    short["max_tokens"] = json!(2);
    let (_, answer) = s.post("/v1/chat/completions", short);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    let word = text.split(' ').nth(1).expect("two words");
    let mut stopped = question();
    stopped["stop"] = json!([word]);
    let (_, answer) = s.post("/v1/chat/completions", stopped);
    assert_eq!(answer["choices"][0]["message"]["content"], text.split(word).next().expect("a part"));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");

    // A text completion, sampled twice with one seed.
    let drawn = || {
        let body =
            json!({"prompt": "The sky", "max_tokens": 12, "temperature": 1.5, "top_p": 0.9, "seed": 7});
        let (status, answer) = s.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().expect("a text").to_string()
    };
    assert_eq!(drawn(), drawn());
    let (status, body) = s.ask("GET", "/v1/models", "", b"");
    assert!(status == 200 && body.contains(&s.model), "{body}");
    assert_eq!(s.interrupt(), Some(130));
}

#[test]
fn errors_have_openais_shape() {
    let w = World::new();
    let s = Server::start(&w, &["--api-key", "secret", "--host", "localhost"]);
    let key = "Authorization: Bearer secret\r\n";
    let asked = |body: &[u8]| {
        let (status, text) = s.ask("POST", "/v1/chat/completions", key, body);
        let v: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        (status, v["error"].clone())
    };
    let with = |name: &str, value: Value| {
        let mut body = question();
        body["model"] = json!(s.model);
        body[name] = value;
        asked(body.to_string().as_bytes())
    };
    for bad in ["", "{", "[1]", "{\"model\": 1}", "{}"] {
        let (status, e) = asked(bad.as_bytes());
        assert!(status == 400 && e["type"] == "invalid_request_error", "{bad}: {status} {e}");
    }
    for (name, value) in [
        ("n", json!(2)),
        ("temperature", json!(-1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_k", json!(-2)),
        ("repetition_penalty", json!(0)),
        ("max_tokens", json!(0)),
        ("stop", json!([1])),
        ("tools", json!([{"type": "function", "function": {"name": "f"}}])),
        ("tool_choice", json!("required")),
        ("response_format", json!({"type": "json_object"})),
        ("logprobs", json!(1)),
        ("top_logprobs", json!(2)),
        ("echo", json!(true)),
        ("frequency_penalty", json!(0.5)),
        ("logit_bias", json!({"5": 100})),
        ("stream_options", json!({"include_usage": true})),
        ("reasoning_effort", json!("low")),
        ("chat_template_kwargs", json!({"messages": []})),
        (
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ),
        ("messages", json!([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}])),
        (
            "messages",
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]),
        ),
        ("messages", json!([])),
        ("messages", json!([{"role": "king", "content": "x"}])),
        ("temprature", json!(1)),
    ] {
        let (status, e) = with(name, value.clone());
        assert!(status == 400 && e["param"] == name, "{name} {value}: {status} {e}");
    }
    let (status, e) = with("model", json!("gpt-4"));
    assert!(status == 404 && e["code"] == "model_not_found", "{e}");
    let long = "sky ".repeat(2000);
    let (status, e) = with("messages", json!([{"role": "user", "content": long}]));
    assert!(status == 400 && e["code"] == "context_length_exceeded", "{e}");
    assert_eq!(asked(&vec![b' '; 5 << 20]).0, 413);
    // By its head, before the body comes.
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\n{key}Content-Type: application/json\r\n\
         Content-Length: 3000000\r\n\r\n",
        s.address
    );
    assert_eq!(answer(s.send(head.as_bytes())).0, 413);
    for wrong in ["", "Authorization: Bearer secreT\r\n", "Authorization: secret\r\n"] {
        let (status, text) = s.ask("GET", "/v1/models", wrong, b"");
        assert!(status == 401 && text.contains("invalid_api_key") && !text.contains("secret"), "{text}");
    }
    assert_eq!(s.ask("GET", "/v1/models", key, b"").0, 200);
    assert_eq!(s.ask("GET", "/v2/models", key, b"").0, 404);
    assert_eq!(s.ask("GET", "/v1/completions", key, b"").0, 405);

    // Address in use.
    let port = s.address.rsplit(':').next().expect("a port").to_string();
    let r = w.ft(&["serve", &s.model, "--port", &port]);
    assert!(r.code == 2 && r.err.contains(&port) && r.err.contains("another port"), "{}", r.err);
}

/// A client that disconnects does not block the queue.
#[test]
fn a_client_that_disconnects_does_not_block_the_queue() {
    let w = World::new();
    let s = Server::start(&w, &["--max-tokens", "400"]);
    let mut body = json!({"model": s.model, "prompt": "a", "temperature": 2, "seed": 1, "stream": true, "max_tokens": 400});
    let mut gone = s.open("POST", "/v1/completions", "", body.to_string().as_bytes());
    gone.read_exact(&mut [0; 200]).expect("it has begun");
    drop(gone);
    body["stream"] = json!(false);
    body["max_tokens"] = json!(1);
    let (status, answer) = s.post("/v1/completions", body);
    assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(1)));
    assert_eq!(s.interrupt(), Some(130));
}

/// A failing answer returns an error to the client. The server continues as long as the device works.
#[test]
fn weights_that_have_diverged_fail_answers_and_not_the_server() {
    let w = World::new();
    let from = repository().join("data/model");
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
        let mut bytes = std::fs::read(from.join(file)).expect("a file");
        if file.ends_with("safetensors") {
            // Last norm weights at the largest bf16 number.
            let some = bytes.len() - 256;
            bytes[some..].fill(0x7f);
        }
        w.write(&format!("nan/{file}"), bytes);
    }
    let s = Server::of(&w, "nan", &[]);
    for _ in 0..2 {
        let (status, e) = s.post("/v1/completions", json!({"prompt": "The sky", "max_tokens": 2}));
        assert_eq!((status, &e["error"]["type"]), (500, &json!("server_error")), "{e}");
        assert!(e["error"]["message"].as_str().is_some_and(|m| m.contains("finite")), "{e}");
    }
    assert_eq!(s.interrupt(), Some(130));
}
