//! Fuzzing `ft serve` over TCP: mutated requests, clients that leave, clients that stay.
//!
//! A case fails if the server ends, panics, leaves a connection without an end, blames itself (status 500), or
//! refuses in another form than OpenAI's. After all cases the server answers, has no connection open, has taken
//! less than 1 GiB, and ends on a signal while clients hold unfinished requests.

use super::dice::Dice;
use super::{Findings, mutate, number};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Time without an answer after which a server counts as stalled.
const STALLED: Duration = Duration::from_secs(120);
/// Memory limit of the server in KiB.
const MEMORY: u64 = 1 << 20;
/// Connections held open at a time.
const HELD: usize = 40;

struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Self {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/data/model");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ft"));
        command.args(["serve", model, "--name", "m", "--port", "0", "--max-tokens", "4", "--device", "cpu"]);
        command.env_remove("FT_API_KEY").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("started");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        let address = line.trim().trim_start_matches("http://").trim_end_matches("/v1").to_string();
        Self { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(STALLED)).expect("set");
        stream.set_write_timeout(Some(STALLED)).expect("set");
        stream
    }

    /// A request to the end of its answer.
    fn ask(&self, request: &[u8]) -> std::io::Result<Vec<u8>> {
        let mut stream = self.connect();
        // the server may refuse before it has read all
        let _ = stream.write_all(request);
        end_of(&mut stream)
    }

    fn status(&self, key: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = text.lines().find_map(|l| l.strip_prefix(key)).expect(key);
        line.split_whitespace().next().and_then(|n| n.parse().ok()).expect("a number")
    }

    fn files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("it runs").count()
    }
}

/// All that the server sends; a reset connection is an end too.
fn end_of(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    match stream.read_to_end(&mut text) {
        Err(e) if e.kind() != std::io::ErrorKind::ConnectionReset => Err(e),
        _ => Ok(text),
    }
}

/// Method, path and body of good requests.
fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let post = |path, body: Value| ("POST", path, body.to_string().into_bytes());
    let (chat, text) = ("/v1/chat/completions", "/v1/completions");
    let messages =
        json!([{"role": "system", "content": "s"}, {"role": "user", "content": "What colour is the sky?"}]);
    vec![
        post(text, json!({"model": "m", "prompt": "The sky", "max_tokens": 2, "temperature": 0})),
        post(
            text,
            json!({"model": "m", "prompt": ["a", [5, 6]], "echo": true, "logprobs": 2, "max_tokens": 0}),
        ),
        post(
            text,
            json!({"model": "m", "prompt": [1, 2, 3], "stream": true, "stream_options": {"include_usage": true}, "stop": ["x"], "top_p": 0.9, "top_k": 4, "seed": 7, "repetition_penalty": 1.1}),
        ),
        post(chat, json!({"model": "m", "messages": messages, "max_tokens": 2})),
        post(
            chat,
            json!({"model": "m", "messages": messages, "logprobs": true, "top_logprobs": 3, "stream": true, "n": 1}),
        ),
        post(
            chat,
            json!({"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"a": 1}, "tools": [], "temperature": 0.5}),
        ),
        ("GET", "/v1/models", Vec::new()),
        ("GET", "/v1/models/m", Vec::new()),
        ("GET", "/health", Vec::new()),
    ]
}

/// A request, and whether its framing is intact.
fn request(d: &mut Dice, address: &str) -> (Vec<u8>, bool) {
    let seeds = seeds();
    let (method, path, body) = d.pick(&seeds).clone();
    let other = d.pick(&seeds).2.clone();
    let mut path = path.as_bytes().to_vec();
    let body = if body.is_empty() || d.once_in(8) { body } else { mutate::json_text(d, &body, &other) };
    let mut intact = true;
    if d.once_in(12) {
        // the HTTP library answers what is no path by itself
        intact = false;
        mutate::bytes(d, &mut path, b"/v1/models/%ff?a=%00&b");
    }
    let length = body.len();
    let mut head = [method.as_bytes(), b" ", &path].concat();
    head.extend(format!(" HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n").bytes());
    let mut all = [head, body].concat();
    if d.once_in(3) {
        let other = b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\nContent-Length: 18446744073709551616\r\nUpgrade: h2c\r\n\r\nffffffff\r\nPRI * HTTP/2.0";
        mutate::bytes(d, &mut all, other);
        return (all, false);
    }
    (all, intact)
}

/// Judges an answer; an empty one is the end of a connection without a request.
fn fault(answer: &[u8], intact: bool) -> Option<String> {
    let text = String::from_utf8_lossy(answer);
    let line = text.lines().next().unwrap_or_default();
    let status = line.strip_prefix("HTTP/1.1 ").or_else(|| line.strip_prefix("HTTP/1.0 "));
    let Some(status) = status.and_then(|s| s.get(..3)?.parse::<u16>().ok()) else {
        return (intact || !answer.is_empty()).then(|| format!("no answer: {line:?}"));
    };
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body).unwrap_or_default();
    match status {
        500.. => Some(format!("{line}: {body}")),
        400.. if intact || !body.is_empty() => {
            let error = serde_json::from_str::<Value>(body).ok().map(|v| v["error"]["message"].is_string());
            // a mutated request may hold a second one, with an answer of its own
            (error != Some(true) && intact).then(|| format!("{line}: no error in OpenAI's form: {body}"))
        }
        _ => None,
    }
}

#[test]
fn serve() {
    let (first, cases) = (number("FT_FUZZ_SEED").unwrap_or(0), number("FT_FUZZ_CASES").unwrap_or(100));
    let mut server = Server::start();
    let good = format!("GET /health HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", server.address);
    let alive = |server: &Server| {
        let answer = server.ask(good.as_bytes()).expect("an answer");
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    };
    alive(&server);
    let files = server.files();
    let mut found = Findings::default();
    let mut held = Vec::new();
    for seed in first..first + cases {
        let d = &mut Dice::new("serve", seed);
        let (request, intact) = request(d, &server.address);
        let wrong = match d.below(8) {
            // a client that leaves
            0 => {
                let mut stream = server.connect();
                let _ = stream.write_all(&request[..d.below(request.len() + 1)]);
                None
            }
            // a client that stays, with a request or a part of one, and reads nothing
            1 => {
                let mut stream = server.connect();
                let _ = stream.write_all(&request[..d.below(request.len() + 1)]);
                held.push(stream);
                if held.len() > HELD {
                    held.remove(0);
                }
                None
            }
            _ => {
                let mut stream = server.connect();
                let _ = stream.write_all(&request);
                if !intact {
                    // what is missing will not come
                    let _ = stream.shutdown(Shutdown::Write);
                }
                match end_of(&mut stream) {
                    Ok(answer) => fault(&answer, intact),
                    Err(e) => Some(format!("the connection stalls: {e}")),
                }
            }
        };
        if let Some(status) = server.child.try_wait().expect("its status") {
            panic!("case {seed}: the server ended: {status}");
        }
        if let Some(wrong) = wrong {
            found.add(&wrong, || {
                format!("FT_FUZZ_CASES=1 FT_FUZZ_SEED={seed} cargo test --release --test fuzz serve")
            });
        }
    }
    assert!(found.kinds.is_empty(), "{cases} cases from {first}:\n{}", found.text());
    drop(held);
    // each answer is a turn of the server, in which it can drop what has ended
    let open = (0..100_000).map(|_| alive(&server)).find(|()| server.files() <= files);
    assert!(open.is_some(), "{} files are open, {files} at the start", server.files());
    let memory = server.status("VmHWM:");
    assert!(memory < MEMORY, "{} MiB", memory >> 10);
    let clients: Vec<TcpStream> = [&good.as_bytes()[..9], &[], good.as_bytes()]
        .map(|part| {
            let mut stream = server.connect();
            stream.write_all(part).expect("sent");
            stream
        })
        .into();
    alive(&server);
    Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().expect("sent");
    assert_eq!(server.child.wait().expect("ended").code(), Some(143));
    println!("serve, {cases} cases from {first}: at most {} MiB", memory >> 10);
    drop(clients);
}
