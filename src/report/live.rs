//! `ft report --live`: the page of a run that goes on, over HTTP on this machine.
//!
//! A request gets the page as the run folder is then; the page asks again by a script. Only a browser of this
//! machine is answered: the socket is on loopback, and a request with another host's name is refused, so that
//! a page from elsewhere cannot read along.

use super::error::Error;
use super::render::page;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Most connections at a time.
const CONNECTIONS: usize = 16;
/// Largest head of a request in bytes.
const HEAD: usize = 8 << 10;
/// Time for a head to arrive, and for an answer to leave; that of tests is never reached.
const LIMIT: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 10 });
/// The script of the page.
const SCRIPT: &str = include_str!("templates/live.js");
/// What a browser may load and do for the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; \
    frame-ancestors 'none'";

/// Lengths and times of the metrics files.
type Stamp = Vec<Option<(u64, SystemTime)>>;

/// A server of the page of some runs.
pub struct Live {
    runs: Vec<PathBuf>,
    listener: TcpListener,
    /// The names of this server, for the header Host.
    hosts: [String; 2],
    /// The newest page, and the state of the files it shows.
    newest: Mutex<(Stamp, String)>,
    connections: AtomicUsize,
}

impl Live {
    /// Listens on a port of this machine; 0 takes a free one.
    ///
    /// # Errors
    /// A port in use.
    pub fn bind(runs: Vec<PathBuf>, port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port))?;
        let port = listener.local_addr()?.port();
        let hosts = ["127.0.0.1", "localhost"].map(|name| format!("{name}:{port}"));
        Ok(Self { runs, listener, hosts, newest: Mutex::default(), connections: AtomicUsize::new(0) })
    }

    /// Address of the page.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The page of the runs.
    ///
    /// # Errors
    /// As [`page`].
    pub fn page(&self) -> Result<String, Error> {
        let stamp = |run: &PathBuf| {
            let file = std::fs::metadata(run.join("metrics.jsonl")).ok()?;
            Some((file.len(), file.modified().ok()?))
        };
        let now: Stamp = self.runs.iter().map(stamp).collect();
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.0 != now || newest.1.is_empty() {
            *newest = (now, page(&self.runs, true)?);
        }
        Ok(newest.1.clone())
    }

    /// Answers requests until the process ends.
    ///
    /// # Errors
    /// The socket fails.
    pub fn serve(&self) -> io::Result<()> {
        std::thread::scope(|scope| {
            loop {
                let stream = match self.listener.accept() {
                    Ok((stream, _)) => stream,
                    // A client that is gone already.
                    Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {
                        continue;
                    }
                    Err(e) => return Err(e),
                };
                if self.connections.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                    self.connections.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let answer = || {
                    let _ = self.answer(stream);
                    self.connections.fetch_sub(1, Ordering::Relaxed);
                };
                if std::thread::Builder::new().spawn_scoped(scope, answer).is_err() {
                    self.connections.fetch_sub(1, Ordering::Relaxed);
                }
            }
        })
    }

    /// Reads a request and answers it.
    fn answer(&self, mut stream: TcpStream) -> io::Result<()> {
        let head = head(&mut stream)?;
        let (status, kind, body) = self.reply(&head);
        stream.set_write_timeout(Some(LIMIT))?;
        let length = body.len();
        let rest = "cache-control: no-store\r\nx-content-type-options: nosniff\r\nconnection: close";
        write!(
            stream,
            "HTTP/1.1 {status}\r\ncontent-type: {kind}; charset=utf-8\r\ncontent-length: {length}\r\n\
             content-security-policy: {POLICY}\r\n{rest}\r\n\r\n"
        )?;
        if !head.starts_with("HEAD ") {
            stream.write_all(body.as_bytes())?;
        }
        Ok(())
    }

    /// Status, type and body of the answer to a request with this head.
    fn reply(&self, head: &str) -> (&'static str, &'static str, String) {
        const TEXT: &str = "text/plain";
        let mut lines = head.lines();
        let mut first = lines.next().unwrap_or_default().split(' ');
        let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
        let mut headers = lines.filter_map(|line| line.split_once(':'));
        let host = headers.find(|(name, _)| name.eq_ignore_ascii_case("host")).map(|(_, value)| value.trim());
        if !host.is_some_and(|host| self.hosts.iter().any(|own| own.eq_ignore_ascii_case(host))) {
            return ("403 Forbidden", TEXT, "this page is for browsers of its own machine\n".into());
        }
        if !["GET", "HEAD"].contains(&method) {
            return ("405 Method Not Allowed", TEXT, "this page is only read\n".into());
        }
        match path {
            "/" => match self.page() {
                Ok(page) => ("200 OK", "text/html", page),
                Err(e) => ("500 Internal Server Error", TEXT, format!("{e}\n")),
            },
            "/live.js" => ("200 OK", "text/javascript", SCRIPT.into()),
            _ => ("404 Not Found", TEXT, "there is nothing at this address\n".into()),
        }
    }
}

/// Reads the head of a request, within bounds of time and size.
fn head(stream: &mut TcpStream) -> io::Result<String> {
    let end = Instant::now() + LIMIT;
    let (mut bytes, mut part) = (Vec::new(), [0; 1024]);
    while !bytes.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || bytes.len() > HEAD {
            return Err(ErrorKind::InvalidData.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            n => bytes.extend_from_slice(&part[..n]),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
