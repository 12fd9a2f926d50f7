//! `ft serve` ends on a signal, whatever its clients do.

use crate::runs::stops::hangups_are_ignored;
use crate::server::Server;
use crate::world::{World, quickstart};
use serde_json::json;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

/// Clients that occupy a server in all ways. They are held until it has ended.
fn clients(s: &Server) -> Vec<TcpStream> {
    let host = format!("Host: {}\r\nContent-Type: application/json\r\n", s.address);
    let many = json!({"model": s.model, "prompt": vec!["a"; 200], "temperature": 2, "max_tokens": 400, "stream": true});
    let many = many.to_string();
    // A generation that would take long, and its unread stream.
    let mut unread = s.open("POST", "/v1/completions", "", many.as_bytes());
    unread.read_exact(&mut [0; 200]).expect("it has begun");
    let silent = s.send(b"");
    let half_a_request = s.send(b"POST /v1/completions HTTP/1.1\r\nHos");
    let half_a_body =
        s.send(format!("POST /v1/completions HTTP/1.1\r\n{host}Content-Length: 100\r\n\r\n{{").as_bytes());
    let waiting = s.open("POST", "/v1/completions", "", many.as_bytes());
    let mut idle = s.send(format!("GET /health HTTP/1.1\r\n{host}\r\n").as_bytes());
    // Connections are accepted in order, so all others are open when this one is answered.
    idle.read_exact(&mut [0; 12]).expect("an answer");
    vec![unread, silent, half_a_request, half_a_body, waiting, idle]
}

#[test]
fn a_signal_ends_the_server_whatever_clients_do() {
    let w = World::new();
    // An address of this test alone: another program could take a port of 127.0.0.1 before this test does.
    let host = Ipv4Addr::from(0x7f80_0000 + std::process::id()).to_string();
    for (signals, code) in
        [(&["-TERM"][..], 143), (&["-INT"], 130), (&["-INT", "-INT"], 130), (&["-HUP"], 129)]
    {
        // ignored below nohup
        if signals == ["-HUP"] && hangups_are_ignored() {
            continue;
        }
        let mut s = Server::start(&w, &["--host", &host, "--max-tokens", "400"]);
        let clients = clients(&s);
        signals.iter().for_each(|name| s.signal(name));
        assert_eq!(s.child.wait().expect("ended").code(), Some(code), "{signals:?}");
        TcpListener::bind(&s.address).expect("the port is free");
        drop(clients);
    }
}

/// Whom a signal leaves without an answer learns it.
#[test]
fn an_answer_that_a_signal_cuts_off_says_so() {
    let w = World::new();
    let mut s = Server::start(&w, &["--max-tokens", "400"]);
    let body = |stream: bool| {
        json!({"model": s.model, "prompt": vec!["a"; 200], "temperature": 2, "max_tokens": 400, "stream": stream}).to_string()
    };
    let mut streamed = s.open("POST", "/v1/completions", "", body(true).as_bytes());
    streamed.read_exact(&mut [0; 200]).expect("it has begun");
    let mut waiting = s.open("POST", "/v1/completions", "Expect: 100-continue\r\n", body(false).as_bytes());
    // The server has read the head of the request, and asks for its body.
    let mut asks = [0; 25];
    waiting.read_exact(&mut asks).expect("it has begun");
    assert_eq!(&asks, b"HTTP/1.1 100 Continue\r\n\r\n");
    s.signal("-TERM");
    let (mut stream, mut whole) = (String::new(), String::new());
    streamed.read_to_string(&mut stream).expect("the rest");
    waiting.read_to_string(&mut whole).expect("an answer");
    assert!(stream.contains("the server is ending") && !stream.contains("[DONE]"), "{stream}");
    assert!(whole.starts_with("HTTP/1.1 503 ") && whole.contains("the server is ending"), "{whole}");
    assert_eq!(s.child.wait().expect("ended").code(), Some(143));
}

/// A checkpoint is served from a converted copy, which is removed once it is loaded: the server may end without
/// destructors.
#[test]
fn the_server_leaves_no_temporary_files() {
    let w = World::new();
    quickstart(&w);
    w.ok(&["run", "q.toml", "run.output=o", "run.steps=1", "run.batch_rows=2", "run.micro_rows=2"]);
    let folder = w.path("temporary");
    std::fs::create_dir(&folder).expect("a folder");
    let entries = || std::fs::read_dir(&folder).expect("a folder").count();
    let mut s = Server::with(&w, "o/checkpoints/step-00000001", &[], |c| {
        c.env("TMPDIR", &folder);
    });
    assert_eq!(entries(), 0);
    let clients = clients(&s);
    s.signal("-TERM");
    assert_eq!(s.child.wait().expect("ended").code(), Some(143));
    assert_eq!(entries(), 0);
    drop(clients);
}

/// Bodies that never end occupy bounded memory: a further one is refused.
#[test]
fn bodies_in_flight_are_bounded() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    let size = (2 << 20) - 1;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        s.address,
        size + 1
    );
    let part = [head.as_bytes(), &vec![b' '; size]].concat();
    let (sender, first) = std::sync::mpsc::channel();
    for _ in 0..9 {
        let (mut stream, sender) = (s.send(&part), sender.clone());
        std::thread::spawn(move || {
            let mut text = vec![0; 2048];
            let n = stream.read(&mut text).unwrap_or(0);
            let _ = sender.send((String::from_utf8_lossy(&text[..n]).into_owned(), stream));
        });
    }
    let (text, _stream) = first.recv().expect("an answer");
    assert!(text.starts_with("HTTP/1.1 429 ") && text.contains("retry-after: 1"), "{text}");
    assert_eq!(s.ask("GET", "/v1/models", "", b"").0, 200);
    assert_eq!(s.interrupt(), Some(130));
}
