//! Answers of the server of `ft report --live`.

use super::*;
use crate::report::Live;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// Sends a request head to a server; returns the answer.
fn ask(live: &Live, head: &str) -> Result<String> {
    let mut stream = TcpStream::connect(live.address()?)?;
    stream.write_all(head.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// A server of a folder, on a thread that lives as long as the tests.
fn serve(dir: &tempfile::TempDir) -> Result<Arc<Live>> {
    let live = Arc::new(Live::bind(vec![dir.path().to_path_buf()], 0)?);
    let server = live.clone();
    std::thread::spawn(move || server.serve());
    Ok(live)
}

#[test]
fn the_page_follows_the_run() -> Result<()> {
    let dir = folder(&[start(4), step(1, 3.0)])?;
    let live = serve(&dir)?;
    let host = format!("host: {}", live.address()?);
    let get = || ask(&live, &format!("GET / HTTP/1.1\r\n{host}\r\n\r\n"));
    let page = get()?;
    assert!(page.starts_with("HTTP/1.1 200 OK") && page.contains("step 1 of 4 is the last"), "{page}");
    assert!(page.contains("<script src=\"live.js\" defer></script>") && page.contains("no-store"), "{page}");
    let mut metrics = std::fs::OpenOptions::new().append(true).open(dir.path().join("metrics.jsonl"))?;
    writeln!(metrics, "{}", step(2, 2.0))?;
    assert!(get()?.contains("step 2 of 4 is the last"));
    let script = ask(&live, &format!("GET /live.js HTTP/1.1\r\n{host}\r\n\r\n"))?;
    assert!(script.contains("text/javascript") && script.contains("DOMParser"), "{script}");
    // A connection that sends half a head holds nothing up.
    let mut half = TcpStream::connect(live.address()?)?;
    half.write_all(b"GET / HT")?;
    assert!(get()?.starts_with("HTTP/1.1 200"));
    Ok(())
}

#[test]
fn foreign_hosts_and_paths_are_refused() -> Result<()> {
    let dir = folder(&[start(4), step(1, 3.0)])?;
    let live = serve(&dir)?;
    let own = live.address()?;
    for (head, status) in [
        (format!("GET / HTTP/1.1\r\nHost: {own}\r\n"), "200"),
        (format!("HEAD / HTTP/1.1\r\nhost: localhost:{}\r\n", own.port()), "200"),
        ("GET / HTTP/1.1\r\nhost: evil.example\r\n".into(), "403"),
        (format!("GET / HTTP/1.1\r\nhost: evil.example:{}\r\n", own.port()), "403"),
        ("GET / HTTP/1.1\r\n".into(), "403"),
        ("GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n".into(), "403"),
        (format!("POST / HTTP/1.1\r\nhost: {own}\r\n"), "405"),
        (format!("GET /../metrics.jsonl HTTP/1.1\r\nhost: {own}\r\n"), "404"),
        ("\r\n".into(), "403"),
    ] {
        let answer = ask(&live, &format!("{head}\r\n"))?;
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{head:?}: {answer}");
        ensure!(status == "200" || !answer.contains("pirate"), "{answer}");
    }
    Ok(())
}
