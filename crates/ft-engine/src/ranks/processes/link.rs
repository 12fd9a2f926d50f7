//! A connection authenticated on both ends by a common key. Messages are JSON, with a length and a keyed hash.
//!
//! ```text
//! listener: MAGIC, 32 random bytes
//! caller:   32 random bytes, proof of the key over both
//! listener: proof of the key over both
//! then      u32 length, hash of (direction, number of the message, message), message
//! ```

use super::key::{Key, random};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// First bytes of a listener.
const MAGIC: [u8; 8] = *b"ft-meet1";
/// Bytes of the caller's answer.
pub const ANSWER: usize = 64;
/// Bytes before each message.
pub const HEADER: usize = 36;
/// Longest message in bytes.
const LONGEST: usize = 16 << 20;
/// Longest first message of a caller in bytes.
const LONGEST_HELLO: usize = 64 << 10;

/// Purposes of a keyed hash.
mod purpose {
    pub const CALLER: u8 = 1;
    pub const LISTENER: u8 = 2;
    pub const SESSION: u8 = 3;
    pub const FROM_CALLER: u8 = 4;
    pub const FROM_LISTENER: u8 = 5;
}

/// An authenticated connection.
pub struct Link {
    stream: TcpStream,
    session: Session,
}

/// Keys and counters of a connection's messages.
struct Session {
    key: Key,
    /// Direction and number of the next message, of this end and of the other.
    own: (u8, u64),
    other: (u8, u64),
}

impl Session {
    fn new(key: &Key, nonces: &[&[u8]], caller: bool) -> Self {
        let (a, b) = ((purpose::FROM_CALLER, 0), (purpose::FROM_LISTENER, 0));
        let (own, other) = if caller { (a, b) } else { (b, a) };
        Self { key: key.derive(purpose::SESSION, nonces), own, other }
    }

    fn hash(&self, (direction, number): (u8, u64), text: &[u8]) -> blake3::Hash {
        self.key.prove(direction, &[&number.to_le_bytes(), text])
    }

    fn open<T: DeserializeOwned>(&mut self, hash: [u8; 32], text: &[u8]) -> Result<T> {
        if self.hash(self.other, text) != hash {
            return Err(wrong("a message was changed on its way"));
        }
        self.other.1 += 1;
        Ok(serde_json::from_slice(text)?)
    }
}

fn wrong(why: &str) -> Error {
    Error::new(ErrorKind::InvalidData, why)
}

/// Length of the message after a header, if allowed.
fn length(header: &[u8; HEADER], longest: usize) -> Result<usize> {
    let n = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
    if n > longest { Err(wrong("a message is too long")) } else { Ok(n) }
}

/// Reads the whole buffer before `end`, however slowly the bytes arrive.
fn read_until(mut stream: &TcpStream, mut into: &mut [u8], end: Instant) -> Result<()> {
    while !into.is_empty() {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => into = &mut into[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(ErrorKind::TimedOut.into()),
            Err(e) => return Err(e),
        }
        if Instant::now() > end && !into.is_empty() {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

impl Link {
    /// Calls a listener. `key` is asked for once the listener has spoken, and returned.
    ///
    /// # Errors
    /// A listener that is not of ft, or has another key, in words.
    pub fn call(
        stream: TcpStream,
        key: impl FnOnce() -> std::result::Result<Key, String>,
        end: Instant,
    ) -> std::result::Result<(Self, Key), String> {
        let mut first = [0; MAGIC.len() + 32];
        let heard = read_until(&stream, &mut first, end);
        let (magic, theirs) = first.split_at(MAGIC.len());
        if heard.is_err() || magic != MAGIC {
            return Err("another program listens there".into());
        }
        let (key, own) = (key()?, random()?);
        let nonces = [theirs, &own];
        let proof = key.prove(purpose::CALLER, &nonces);
        let mut answer = [0; 32];
        let said = (&stream).write_all(&[&own[..], proof.as_bytes()].concat());
        said.and_then(|()| read_until(&stream, &mut answer, end))
            .and_then(|()| match key.prove(purpose::LISTENER, &nonces) == answer {
                true => Ok(()),
                false => Err(wrong("no proof")),
            })
            .map_err(|_| "who listens there has another key".to_string())?;
        let session = Session::new(&key, &nonces, true);
        Ok((Self { stream, session }, key))
    }

    /// Sends a message. Every write to the stream is limited to the time left until `end`.
    pub fn send(&mut self, message: &impl Serialize, end: Instant) -> Result<()> {
        let text = serde_json::to_vec(message)?;
        let len = u32::try_from(text.len()).map_err(Error::other)?;
        let hash = self.session.hash(self.session.own, &text);
        self.session.own.1 += 1;
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        self.stream.set_write_timeout(Some(left))?;
        self.stream.write_all(&[&len.to_le_bytes()[..], hash.as_bytes(), &text].concat())
    }

    /// Waits for a message until `end`.
    ///
    /// # Errors
    /// I/O errors; a message that is not of the other end.
    pub fn receive<T: DeserializeOwned>(&mut self, end: Instant) -> Result<T> {
        let mut header = [0; HEADER];
        read_until(&self.stream, &mut header, end)?;
        let mut text = vec![0; length(&header, LONGEST)?];
        read_until(&self.stream, &mut text, end)?;
        self.session.open(hash_of(&header), &text)
    }

    /// The connection, for other uses.
    pub fn into_stream(self) -> Result<TcpStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    /// The connection.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

fn hash_of(header: &[u8; HEADER]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(&header[4..]);
    hash
}

/// Whether the other end of a connection is closed. It must not have sent anything.
pub fn is_closed(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let back = stream.set_nonblocking(false);
    match peeked {
        Ok(n) => n == 0,
        Err(e) => back.is_err() || !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

/// A caller with an incomplete first message. Never blocks.
pub struct Caller {
    stream: TcpStream,
    nonce: [u8; 32],
    bytes: Vec<u8>,
    session: Option<Session>,
}

impl Caller {
    /// Challenges a new connection.
    pub fn challenge(stream: TcpStream) -> Result<Self> {
        stream.set_nonblocking(true)?;
        let nonce = random().map_err(Error::other)?;
        // The buffer of a new connection has room.
        (&stream).write_all(&[&MAGIC[..], &nonce].concat())?;
        Ok(Self { stream, nonce, bytes: Vec::new(), session: None })
    }

    /// Reads what has arrived. Returns whether the first message is whole.
    ///
    /// # Errors
    /// A caller without the key, with a message too long, or gone.
    pub fn advance(&mut self, key: &Key) -> Result<bool> {
        loop {
            let wanted = self.wanted()?;
            if self.bytes.len() == wanted {
                if self.session.is_some() {
                    return Ok(true);
                }
                self.session = Some(self.check(key)?);
                self.bytes.clear();
                continue;
            }
            let mut part = [0; 4096];
            let most = part.len().min(wanted - self.bytes.len());
            match self.stream.read(&mut part[..most]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => self.bytes.extend(&part[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Bytes up to the end of the current part.
    fn wanted(&self) -> Result<usize> {
        match (&self.session, self.bytes.first_chunk()) {
            (None, _) => Ok(ANSWER),
            (Some(_), None) => Ok(HEADER),
            (Some(_), Some(header)) => Ok(HEADER + length(header, LONGEST_HELLO)?),
        }
    }

    fn check(&mut self, key: &Key) -> Result<Session> {
        let (theirs, proof) = self.bytes.split_at(32);
        let nonces = [&self.nonce[..], theirs];
        let proof: [u8; 32] = proof.try_into().map_err(Error::other)?;
        if key.prove(purpose::CALLER, &nonces) != proof {
            return Err(wrong("another key"));
        }
        self.stream.write_all(key.prove(purpose::LISTENER, &nonces).as_bytes())?;
        Ok(Session::new(key, &nonces, false))
    }

    /// The connection and its first message.
    ///
    /// # Errors
    /// A message that is not of the caller, or of another kind.
    pub fn finish<T: DeserializeOwned>(self) -> Result<(Link, T)> {
        let mut session = self.session.ok_or_else(|| wrong("no key"))?;
        let (header, text) = self.bytes.split_first_chunk().ok_or_else(|| wrong("no message"))?;
        let message = session.open(hash_of(header), text)?;
        self.stream.set_nonblocking(false)?;
        Ok((Link { stream: self.stream, session }, message))
    }
}
