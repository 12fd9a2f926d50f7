use super::*;
use axum::body::{Body, Bytes};
use axum::routing::get;
use futures_util::Stream;
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::mpsc;

const QUICK: Duration = Duration::from_millis(50);

/// Runs a server within limits while `clients` run; then ends it.
fn served(limits: Limits, router: Router, clients: impl FnOnce(SocketAddr) + std::marker::Send + 'static) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let clients = tokio::task::spawn_blocking(move || clients(address));
        serve(listener, router, limits, async { clients.await.expect("no panic") }).await;
    });
}

fn hello() -> Router {
    Router::new().route("/", get(|| async { "hello" }))
}

fn connect(address: SocketAddr) -> std::net::TcpStream {
    std::net::TcpStream::connect(address).expect("connected")
}

/// All that a connection says until the server closes it.
fn all(stream: &mut std::net::TcpStream) -> String {
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn idle_and_slow_connections_are_closed() {
    let limits = Limits { header_time: QUICK, ..Limits::default() };
    served(limits, hello(), |address| {
        for sent in ["", "G", "GET / HTTP/1.1\r\nHost: a\r\nX: "] {
            let mut client = connect(address);
            client.write_all(sent.as_bytes()).expect("sent");
            assert!(!all(&mut client).contains("hello"), "{sent:?}");
        }
        // The limit also applies between connection and request, where a busy machine may pause.
        let is_answered = |_| {
            let mut idle = connect(address);
            idle.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").expect("sent");
            all(&mut idle).ends_with("hello")
        };
        assert!((0..100).any(is_answered));
    });
}

/// Sends a request, and reads its answer.
fn ask(client: &mut std::net::TcpStream, head: &str, answer: &str) {
    client.write_all(format!("GET / HTTP/1.1\r\nHost: a\r\n{head}\r\n").as_bytes()).expect("sent");
    let mut text = String::new();
    while !text.ends_with(answer) {
        let mut part = [0; 256];
        let length = client.read(&mut part).expect("an answer");
        assert!(length > 0, "{text}");
        text += std::str::from_utf8(&part[..length]).expect("text");
    }
}

#[test]
fn further_connections_wait_for_a_slot() {
    let limits = Limits { connections: 2, idle_time: Duration::from_secs(3600), ..Limits::default() };
    let (begun, begins) = mpsc::channel();
    let (go, gone) = tokio::sync::watch::channel(());
    let handler = move || {
        begun.send(()).expect("a test");
        let mut gone = gone.clone();
        async move {
            gone.changed().await.expect("a test");
            "hello"
        }
    };
    served(limits, Router::new().route("/", get(handler)), move |address| {
        let request = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let mut clients = [0; 3].map(|_| {
            let mut client = connect(address);
            client.write_all(request).expect("sent");
            client
        });
        (0..2).for_each(|_| begins.recv().expect("two of them"));
        assert!(begins.try_recv().is_err(), "the third one waits");
        go.send(()).expect("two of them");
        begins.recv().expect("the third one");
        go.send(()).expect("the third one");
        clients.iter_mut().for_each(|client| assert!(all(client).ends_with("hello")));
    });
}

/// Idle connections, and those with half of a request, make room: the oldest first.
#[test]
fn idle_connections_make_room() {
    let hour = Duration::from_secs(3600);
    let none = Duration::ZERO;
    let limits =
        Limits { connections: 3, header_time: hour, idle_time: none, end_time: QUICK, ..Limits::default() };
    served(limits, hello(), |address| {
        let mut first = connect(address);
        ask(&mut first, "", "hello");
        let mut half = connect(address);
        half.write_all(b"GET / HTTP/1.1\r\nX: ").expect("sent");
        let mut third = connect(address);
        ask(&mut third, "", "hello");
        let mut later = [0; 2].map(|_| {
            let mut client = connect(address);
            ask(&mut client, "", "hello");
            client
        });
        assert_eq!((all(&mut first), all(&mut half)), (String::new(), String::new()));
        ask(&mut third, "", "hello");
        later.iter_mut().for_each(|client| ask(client, "", "hello"));
    });
}

/// The answer comes before the body, which is far larger than the buffers of a socket.
#[test]
fn a_refused_client_may_send_its_whole_body_first() {
    let hour = Duration::from_secs(3600);
    let limits = Limits { body_time: hour, bodies_bytes: 64 << 20, ..Limits::default() };
    let refuse = || async { axum::http::StatusCode::PAYLOAD_TOO_LARGE };
    served(limits, Router::new().route("/", axum::routing::post(refuse)), |address| {
        let body = vec![b' '; 32 << 20];
        let mut client = connect(address);
        let head = format!("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {}\r\n\r\n", body.len());
        client.write_all(head.as_bytes()).expect("sent");
        client.write_all(&body).expect("sent");
        let said = all(&mut client);
        assert!(said.starts_with("HTTP/1.1 413 "), "{said}");
    });
}

/// An answer without end; tells when it is dropped.
struct Endless(mpsc::Sender<()>);

impl Stream for Endless {
    type Item = Result<Bytes, std::io::Error>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        std::task::Poll::Ready(Some(Ok(Bytes::from_static(&[b'a'; 4096]))))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn a_client_that_leaves_an_answer_unread_is_dropped() {
    let limits = Limits { unread_time: QUICK, ..Limits::default() };
    let (sender, dropped) = mpsc::channel();
    let endless = move || {
        let body = Body::from_stream(Endless(sender.clone()));
        async { body }
    };
    served(limits, Router::new().route("/", get(endless)), move |address| {
        let mut client = connect(address);
        client.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").expect("sent");
        dropped.recv().expect("it has begun, and ended");
        drop(client);
    });
}
