//! `ft serve` as a process, with a plain HTTP client.

use super::world::{World, repository};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Limit of a wait, which only ends a hanging test.
const LATE: Duration = Duration::from_secs(600);

/// A server on the quickstart model, stopped at the end of the test.
pub struct Server {
    pub child: Child,
    pub address: String,
    pub model: String,
}

impl Server {
    pub fn start(w: &World, more: &[&str]) -> Self {
        Self::of(w, &repository().join("data/model").display().to_string(), more)
    }

    /// Starts a server for a model, with output to `said`.
    pub fn of(w: &World, model: &str, more: &[&str]) -> Self {
        Self::with(w, model, more, |_| ())
    }

    /// As [`Server::of`], with changes to the command.
    pub fn with(w: &World, model: &str, more: &[&str], change: impl FnOnce(&mut Command)) -> Self {
        let args = [&["serve", model, "--port", "0"][..], more].concat();
        let said = std::fs::File::create(w.path("said")).expect("a file");
        let mut command = w.command(&args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(said);
        change(&mut command);
        let mut child = command.spawn().expect("started");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        let address = line.trim().trim_start_matches("http://").trim_end_matches("/v1").to_string();
        Self { child, address, model: model.into() }
    }

    /// Sends a request as it is.
    pub fn send(&self, request: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(LATE)).expect("set");
        // A refusing server may close the connection before it has read everything.
        let _ = stream.write_all(request);
        stream
    }

    pub fn open(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let headers = format!("Host: {}\r\nContent-Type: application/json\r\n{headers}", self.address);
        self.send(&request(method, path, &headers, body))
    }

    /// Returns status and body.
    pub fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        answer(self.open(method, path, headers, body))
    }

    pub fn post(&self, path: &str, mut body: Value) -> (u16, Value) {
        body["model"] = json!(self.model);
        let (status, text) = self.ask("POST", path, "", body.to_string().as_bytes());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    pub fn signal(&self, name: &str) {
        let id = self.child.id().to_string();
        Command::new("kill").args([name, &id]).status().expect("sent");
    }

    pub fn interrupt(mut self) -> Option<i32> {
        self.signal("-INT");
        self.child.wait().expect("ended").code()
    }
}

/// A request with a body, on a connection of its own.
pub fn request(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

/// Status and body of an answer.
pub fn answer(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    (head.split(' ').nth(1).expect("a status").parse().expect("a number"), body.to_string())
}

/// Sends a request. Returns status and body.
pub fn ask(address: &str, method: &str, path: &str, body: &Value) -> std::io::Result<(u16, Value)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LATE))?;
    let headers = format!("Host: {address}\r\nContent-Type: application/json\r\n");
    stream.write_all(&request(method, path, &headers, body.to_string().as_bytes()))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
    Ok((status, serde_json::from_str(body).expect("JSON")))
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until a path exists.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LATE;
    while Instant::now() < end {
        match look() {
            Some(found) => return found,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    panic!("there is no {what}");
}
