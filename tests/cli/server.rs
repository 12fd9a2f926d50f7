//! `ft serve` as a process, with a plain HTTP client.

use super::world::{World, repository};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

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
        let args = [&["serve", model, "--port", "0"][..], more].concat();
        let said = std::fs::File::create(w.path("said")).expect("a file");
        let mut child = w
            .command(&args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(said)
            .spawn()
            .expect("started");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("a line");
        let address = line.trim().trim_start_matches("http://").trim_end_matches("/v1").to_string();
        Self { child, address, model: model.into() }
    }

    pub fn open(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("set");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        // A refusing server may close the connection before it has read everything.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        stream
    }

    /// Returns status and body.
    pub fn ask(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        let mut text = String::new();
        self.open(method, path, headers, body).read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        (head.split(' ').nth(1).expect("a status").parse().expect("a number"), body.to_string())
    }

    pub fn post(&self, path: &str, mut body: Value) -> (u16, Value) {
        body["model"] = json!(self.model);
        let (status, text) = self.ask("POST", path, "", body.to_string().as_bytes());
        (status, serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}")))
    }

    pub fn interrupt(mut self) -> Option<i32> {
        let id = self.child.id().to_string();
        std::process::Command::new("kill").args(["-INT", &id]).status().expect("sent");
        self.child.wait().expect("ended").code()
    }
}

/// Sends a request. Returns status and body.
pub fn ask(address: &str, method: &str, path: &str, body: &Value) -> std::io::Result<(u16, Value)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let body = body.to_string();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes())?;
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
    for _ in 0..6000 {
        match look() {
            Some(found) => return found,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
    panic!("there is no {what}");
}
