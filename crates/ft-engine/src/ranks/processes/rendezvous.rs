//! Rendezvous of the processes: every rank registers with rank 0, which replies with the list of all ranks.
//!
//! Rank 0 listens at the host and port of the launcher; under MPI it chooses a port and sends it by MPI. The
//! connections of the registration then carry the liveness messages. Without MPI, all pairs of ranks connect
//! once more, for values.

use ft_base::terminal;
use ft_recipe::Launch;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Timeout for the first message of a connection.
const HELLO: Duration = Duration::from_secs(5);
/// Delay before a message about missing ranks is printed.
const NOTICE_DELAY: Duration = Duration::from_secs(4);
/// Interval between connection attempts.
const RETRY: Duration = Duration::from_millis(100);
/// Maximum size of a message in bytes.
const MAX_MESSAGE: usize = 16 << 20;

/// Connections by rank; `None` for this process.
pub type Connections = Vec<Option<TcpStream>>;

/// First message of a connection.
#[derive(Serialize, Deserialize)]
enum Hello {
    /// To rank 0: registration.
    Register(Registration),
    /// To a lower rank: a connection for values, with the session key and the sender's rank.
    Peer([u64; 2], usize),
}

/// Identity of a process.
#[derive(Clone, Serialize, Deserialize)]
pub struct Registration {
    version: String,
    rank: usize,
    world: usize,
    member: Member,
}

/// A process as the other ranks know it.
#[derive(Clone, Serialize, Deserialize)]
struct Member {
    /// IP address; `None` for an address of rank 0's host.
    ip: Option<IpAddr>,
    /// Port on which it listens.
    port: u16,
    /// Text for all ranks.
    about: String,
}

/// All ranks of a session.
#[derive(Clone, Serialize, Deserialize)]
pub struct Roster {
    /// Random session key.
    key: [u64; 2],
    members: Vec<Member>,
}

impl Roster {
    /// Text of each rank.
    pub fn about(self) -> Vec<String> {
        self.members.into_iter().map(|m| m.about).collect()
    }
}

/// Reply of rank 0 to a registration.
#[derive(Serialize, Deserialize)]
enum Reply {
    Accepted(Roster),
    Refused(String),
}

impl Registration {
    /// Registration of rank `rank` of `world`, listening on `port`; `about` is a text for all ranks.
    pub fn new(rank: usize, world: usize, port: u16, about: String) -> Self {
        let member = Member { ip: None, port, about };
        Self { version: env!("CARGO_PKG_VERSION").into(), rank, world, member }
    }

    /// Reason for rank 0 with registration `first` to refuse; `taken` tells ranks that have registered.
    fn refused(&self, first: &Self, taken: impl Fn(usize) -> bool) -> Option<String> {
        let Self { version, rank, world, .. } = self;
        if (version, world) != (&first.version, &first.world) {
            return Some(format!(
                "rank {rank} is of ft {version} and one of {world}, rank 0 of ft {} and one of {}",
                first.version, first.world
            ));
        }
        if rank >= world {
            return Some(format!("a process is rank {rank} of {world}: ranks are 0 to {}", world - 1));
        }
        taken(*rank).then(|| format!("two processes are rank {rank} of {world}"))
    }
}

fn send(stream: &mut TcpStream, message: &impl Serialize) -> std::io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let len = u32::try_from(text.len()).map_err(std::io::Error::other)?;
    stream.write_all(&[&len.to_le_bytes()[..], &text].concat())
}

fn receive<T: DeserializeOwned>(stream: &mut TcpStream, timeout: Duration) -> std::io::Result<T> {
    stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1))))?;
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_MESSAGE {
        return Err(std::io::Error::other("not a process of ft"));
    }
    let mut text = vec![0; len];
    stream.read_exact(&mut text)?;
    stream.set_read_timeout(None)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Binds a listener, on `to` alone if all processes run on one machine, else on all interfaces.
///
/// # Errors
/// A port in use.
pub fn listen(to: SocketAddr, port: u16, one_machine: bool) -> Result<TcpListener, String> {
    let ip: IpAddr = match (one_machine, to.is_ipv4()) {
        (true, _) => to.ip(),
        (false, true) => Ipv4Addr::UNSPECIFIED.into(),
        (false, false) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let bound = TcpListener::bind((ip, port)).and_then(|l| l.set_nonblocking(true).map(|()| l));
    bound.map_err(|e| {
        let hint = if port == 0 { "" } else { "\n  hint: another MASTER_PORT, the same for all processes" };
        format!("it cannot listen at port {port}: {e}{hint}")
    })
}

/// Resolves the address of rank 0, and tells whether it is a loopback address; retries until `end`.
///
/// # Errors
/// As [`Launch::address`].
pub fn resolve(host: &str, port: u16, end: Instant) -> Result<(SocketAddr, bool), String> {
    loop {
        match Launch::address(host, port) {
            Err(_) if Instant::now() < end => std::thread::sleep(RETRY),
            resolved => return resolved,
        }
    }
}

/// Connects and sends `hello`; retries until `end`.
fn connect(
    to: impl Fn() -> Result<SocketAddr, String>,
    hello: &Hello,
    end: Instant,
) -> Result<TcpStream, String> {
    let mut notice = Notice::new(end);
    loop {
        let why = match to() {
            Err(why) => why,
            Ok(to) => {
                match TcpStream::connect_timeout(&to, HELLO).and_then(|mut s| send(&mut s, hello).map(|()| s))
                {
                    Ok(stream) => return Ok(stream),
                    Err(e) => format!("it does not reach {to}: {e}"),
                }
            }
        };
        if Instant::now() > end {
            return Err(why);
        }
        notice.look(|| why);
        std::thread::sleep(RETRY);
    }
}

/// Prints one message about missing ranks and the remaining time.
struct Notice {
    end: Instant,
    due: Option<Instant>,
}

impl Notice {
    fn new(end: Instant) -> Self {
        Self { end, due: Some(Instant::now() + NOTICE_DELAY) }
    }

    fn look(&mut self, why: impl FnOnce() -> String) {
        if self.due.take_if(|at| Instant::now() > *at).is_some() {
            let left = self.end.saturating_duration_since(Instant::now()).as_secs();
            // logging is not yet silenced on ranks other than 0
            terminal::to_terminal();
            terminal::tell(&format!("{}; it waits for {left} s more", why()));
        }
    }
}

/// Accepts a connection; `None` after a short pause if there is none.
fn accept(listener: &TcpListener) -> Result<Option<TcpStream>, String> {
    match listener.accept() {
        Ok((stream, _)) => stream.set_nonblocking(false).map(|()| Some(stream)).map_err(|e| e.to_string()),
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            std::thread::sleep(Duration::from_millis(2));
            Ok(None)
        }
        Err(e) => Err(format!("it cannot listen: {e}")),
    }
}

/// Rank 0: waits until all other ranks have registered, and sends the list of all ranks. `at` is the address
/// in messages.
///
/// # Errors
/// Missing or unexpected ranks.
pub fn register_all(
    own: Registration,
    listener: &TcpListener,
    at: SocketAddr,
    end: Instant,
) -> Result<(Connections, Roster), String> {
    let mut streams: Connections = (0..own.world).map(|_| None).collect();
    let mut members = vec![None; own.world];
    members[0] = Some(own.member.clone());
    let mut notice = Notice::new(end);
    loop {
        let missing: BTreeSet<usize> = (0..own.world).filter(|r| members[*r].is_none()).collect();
        if missing.is_empty() {
            break;
        }
        let who = || format!("ranks {missing:?} have not come to {at}");
        if Instant::now() > end {
            return Err(who());
        }
        notice.look(who);
        let Some(mut stream) = accept(listener)? else { continue };
        // not a process of ft: ignore
        let Ok(Hello::Register(other)) = receive::<Hello>(&mut stream, HELLO) else { continue };
        if let Some(why) = other.refused(&own, |r| members[r].is_some()) {
            for stream in streams.iter_mut().flatten().chain([&mut stream]) {
                let _ = send(stream, &Reply::Refused(why.clone()));
            }
            return Err(why);
        }
        let ip = stream.peer_addr().ok().map(|a| a.ip()).filter(|ip| !ip.is_loopback());
        members[other.rank] = Some(Member { ip, ..other.member });
        streams[other.rank] = Some(stream);
    }
    let key = [0; 2].map(|_| RandomState::new().build_hasher().finish());
    let roster = Roster { key, members: members.into_iter().flatten().collect() };
    let reply = Reply::Accepted(roster.clone());
    for stream in streams.iter_mut().flatten() {
        send(stream, &reply).map_err(|e| format!("a process that came is gone: {e}"))?;
    }
    Ok((streams, roster))
}

/// Other ranks: registers with rank 0 at a host and port.
///
/// # Errors
/// Rank 0 is missing, or refuses.
pub fn register(
    own: Registration,
    (host, port): (&str, u16),
    end: Instant,
) -> Result<(Connections, Roster), String> {
    let world = own.world;
    let to = || Launch::address(host, port).map(|(to, _)| to);
    let mut stream = connect(to, &Hello::Register(own), end)?;
    let left = end.saturating_duration_since(Instant::now()) + HELLO;
    let reply =
        receive(&mut stream, left).map_err(|e| format!("the first does not answer at {host}:{port}: {e}"))?;
    match reply {
        Reply::Accepted(roster) if roster.members.len() == world => {
            let mut streams: Connections = (0..world).map(|_| None).collect();
            streams[0] = Some(stream);
            Ok((streams, roster))
        }
        Reply::Accepted(_) => Err("the first has met others".into()),
        Reply::Refused(why) => Err(why),
    }
}

/// Connects this rank to all lower ranks, and accepts the connections of the higher ranks. `host` is rank 0's.
///
/// # Errors
/// Missing ranks.
pub fn connect_pairs(
    roster: &Roster,
    rank: usize,
    host: &str,
    listener: &TcpListener,
    end: Instant,
) -> Result<Connections, String> {
    let mut streams: Connections = roster.members.iter().map(|_| None).collect();
    for (stream, member) in streams.iter_mut().zip(&roster.members).take(rank) {
        let to = || match member.ip {
            Some(ip) => Ok(SocketAddr::from((ip, member.port))),
            None => Launch::address(host, member.port).map(|(to, _)| to),
        };
        *stream = Some(connect(to, &Hello::Peer(roster.key, rank), end)?);
    }
    while streams.iter().skip(rank + 1).any(Option::is_none) {
        if Instant::now() > end + HELLO {
            return Err("others that have met the first do not come".into());
        }
        let Some(mut stream) = accept(listener)? else { continue };
        if let Ok(Hello::Peer(key, peer)) = receive(&mut stream, HELLO)
            && key == roster.key
            && peer > rank
            && let Some(place) = streams.get_mut(peer)
        {
            *place = Some(stream);
        }
    }
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_reason() {
        let first = Registration::new(0, 2, 1, String::new());
        let refused = |rank, world| {
            Registration::new(rank, world, 1, String::new()).refused(&first, |r| r == 0).unwrap_or_default()
        };
        assert_eq!(refused(1, 2), "");
        assert_eq!(refused(0, 2), "two processes are rank 0 of 2");
        assert_eq!(refused(2, 2), "a process is rank 2 of 2: ranks are 0 to 1");
        assert!(refused(1, 3).contains("one of 3"));
    }
}
