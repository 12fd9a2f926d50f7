//! `ft serve` from outside, by plain HTTP.

use super::world::{World, repository};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

/// A server on the quickstart's model; it ends with the test.
struct Server {
    child: Child,
    address: String,
    model: String,
}

impl Server {
    fn start(w: &World, more: &[&str]) -> Self {
        let model = repository().join("data/model").display().to_string();
        let args = [&["serve", &model, "--port", "0"][..], more].concat();
        let mut child =
            w.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("started");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        let address = line.trim().trim_start_matches("http://").trim_end_matches("/v1").to_string();
        Self { child, address, model }
    }

    fn open(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        // a server that refuses may close before it has read all
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        stream
    }

    /// Status and body.
    fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        let mut text = String::new();
        self.open(method, path, headers, body).read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).expect("a status").parse().expect("a number"), body.to_string())
    }

    fn post(&self, path: &str, mut body: Value) -> (u16, Value) {
        body["model"] = json!(self.model);
        let (status, text) = self.ask("POST", path, "", body.to_string().as_bytes());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    fn interrupt(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        std::process::Command::new("kill").args(["-INT", &id]).status().expect("sent");
        self.child.wait().expect("ended").code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn question() -> Value {
    json!({"messages": [{"role": "user", "content": "What colour is the sky?"}], "temperature": 0})
}

/// The contents of the chunks of a stream, whose last says that it is done.
fn chunks(body: &str) -> Vec<Value> {
    // chunked transfer: only the lines of events matter
    let data: Vec<&str> = body.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    let (last, parts) = data.split_last().expect("events");
    assert_eq!(*last, "[DONE]");
    parts.iter().map(|d| serde_json::from_str(d).expect("JSON")).collect()
}

#[test]
fn it_answers_as_chat_does_whole_and_streamed() {
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

    // a limit, and a text that ends it
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

    // a text that is continued, drawn twice from one seed
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
    assert_eq!(s.interrupt(), Some(0));
}

#[test]
fn what_is_wrong_has_openais_shape() {
    let w = World::new();
    let s = Server::start(&w, &["--api-key", "secret"]);
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
        ("max_tokens", json!(0)),
        ("stop", json!([1])),
        ("tools", json!([{}])),
        ("logprobs", json!(true)),
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
    for wrong in ["", "Authorization: Bearer secreT\r\n", "Authorization: secret\r\n"] {
        let (status, text) = s.ask("GET", "/v1/models", wrong, b"");
        assert!(status == 401 && text.contains("invalid_api_key") && !text.contains("secret"), "{text}");
    }
    assert_eq!(s.ask("GET", "/v1/models", key, b"").0, 200);
    assert_eq!(s.ask("GET", "/v2/models", key, b"").0, 404);
    assert_eq!(s.ask("GET", "/v1/completions", key, b"").0, 405);

    // an address that is taken
    let port = s.address.rsplit(':').next().expect("a port").to_string();
    let r = w.ft(&["serve", &s.model, "--port", &port]);
    assert!(r.code == 2 && r.err.contains(&port) && r.err.contains("another port"), "{}", r.err);
}

/// The next in the queue does not wait for one that nobody reads.
#[test]
fn who_goes_away_is_not_answered_any_more() {
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
    assert_eq!(s.interrupt(), Some(0));
}
