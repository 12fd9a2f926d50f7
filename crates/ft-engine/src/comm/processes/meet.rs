//! Rendezvous of the processes: at a host and port from the launcher, or over MPI,
//! with the address sent by rank 0.

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
const SAYS: Duration = Duration::from_secs(5);
/// Delay before a message about missing ranks is printed.
const QUIET: Duration = Duration::from_secs(4);
/// Interval between connection attempts.
const AGAIN: Duration = Duration::from_millis(100);
/// Maximum size of a message in bytes.
const MOST: usize = 16 << 20;

/// Connections by rank; `None` for this process.
pub type Lines = Vec<Option<TcpStream>>;

/// First message of a connecting peer.
#[derive(Serialize, Deserialize)]
enum Hello {
    /// To rank 0: a connection for liveness messages.
    Line(Card),
    /// To rank 0: a connection for values.
    Wire(Card),
    /// To other ranks: a connection for values, with the session key and the sender's rank.
    Peer([u64; 2], usize),
}

/// Identity of a connecting process.
#[derive(Clone, Serialize, Deserialize)]
struct Card {
    version: String,
    rank: usize,
    world: usize,
    /// Port on which it listens.
    port: u16,
    /// Text passed on to all ranks.
    told: String,
}

/// Reply of rank 0.
#[derive(Serialize, Deserialize)]
enum Answer {
    /// Session key; for each rank the IP address (`None` if it is rank 0's host), the port and the text to
    /// pass on.
    Met([u64; 2], Vec<(Option<IpAddr>, u16, String)>),
    Refused(String),
}

/// Result of a rendezvous.
pub struct Met {
    /// Liveness connections between rank 0 and every other rank.
    pub lines: Lines,
    /// Connections for values, between all pairs.
    pub wires: Lines,
    /// Text of each rank.
    pub told: Vec<String>,
}

fn put(line: &mut TcpStream, what: &impl Serialize) -> std::io::Result<()> {
    let text = serde_json::to_vec(what)?;
    let len = u32::try_from(text.len()).map_err(std::io::Error::other)?;
    line.write_all(&[&len.to_le_bytes()[..], &text].concat())
}

fn take<T: DeserializeOwned>(line: &mut TcpStream, patience: Duration) -> std::io::Result<T> {
    line.set_read_timeout(Some(patience.max(Duration::from_millis(1))))?;
    let mut len = [0; 4];
    line.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MOST {
        return Err(std::io::Error::other("not a process of ft"));
    }
    let mut text = vec![0; len];
    line.read_exact(&mut text)?;
    line.set_read_timeout(None)?;
    Ok(serde_json::from_slice(&text)?)
}

/// A random session key.
pub fn key() -> [u64; 2] {
    [0; 2].map(|_| RandomState::new().build_hasher().finish())
}

/// Binds a listener, on `to` alone if all processes run on one machine, else on all interfaces.
fn listen(to: SocketAddr, port: u16, one_machine: bool) -> Result<TcpListener, String> {
    let ip: IpAddr = match (one_machine, to.is_ipv4()) {
        (true, _) => to.ip(),
        (false, true) => Ipv4Addr::UNSPECIFIED.into(),
        (false, false) => Ipv6Addr::UNSPECIFIED.into(),
    };
    TcpListener::bind((ip, port)).map_err(|e| {
        let hint = if port == 0 { "" } else { "\n  hint: another MASTER_PORT, the same for all processes" };
        format!("it cannot listen at port {port}: {e}{hint}")
    })
}

/// Connects and sends `hello`; retries until `end`.
fn come(
    to: impl Fn() -> Result<SocketAddr, String>,
    hello: &Hello,
    end: Instant,
) -> Result<TcpStream, String> {
    let mut waits = Waits::new(end);
    loop {
        let why = match to() {
            Err(why) => why,
            Ok(to) => {
                match TcpStream::connect_timeout(&to, SAYS).and_then(|mut l| put(&mut l, hello).map(|()| l)) {
                    Ok(line) => return Ok(line),
                    Err(e) => format!("it does not reach {to}: {e}"),
                }
            }
        };
        if Instant::now() > end {
            return Err(why);
        }
        waits.look(|| why);
        std::thread::sleep(AGAIN);
    }
}

/// Prints one message about missing ranks and the remaining time.
struct Waits {
    end: Instant,
    tells: Option<Instant>,
}

impl Waits {
    fn new(end: Instant) -> Self {
        Self { end, tells: Some(Instant::now() + QUIET) }
    }

    fn look(&mut self, why: impl FnOnce() -> String) {
        if self.tells.take_if(|at| Instant::now() > *at).is_some() {
            let left = self.end.saturating_duration_since(Instant::now()).as_secs();
            // logging is not yet silenced on ranks other than 0
            terminal::to_terminal();
            terminal::tell(&format!("{}; it waits for {left} s more", why()));
        }
    }
}

/// Accepts a connection; `None` after a short pause if there is none.
fn next(listener: &TcpListener) -> Result<Option<TcpStream>, String> {
    match listener.accept() {
        Ok((line, _)) => line.set_nonblocking(false).map(|()| Some(line)).map_err(|e| e.to_string()),
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            std::thread::sleep(Duration::from_millis(2));
            Ok(None)
        }
        Err(e) => Err(format!("it cannot listen: {e}")),
    }
}

/// Rendezvous at a host and port, where rank 0 listens. `told` is a text of this rank for all others.
///
/// # Errors
/// Missing or unexpected ranks.
pub fn at(
    launch: &Launch,
    (host, port): (&str, u16),
    told: String,
    patience: Duration,
) -> Result<Met, String> {
    let end = Instant::now() + patience;
    let card = |port| Card {
        version: env!("CARGO_PKG_VERSION").into(),
        rank: launch.rank,
        world: launch.world,
        port,
        told: told.clone(),
    };
    match launch.rank {
        0 => first(&card(port), Launch::address(host, port)?, end),
        _ => other(&card, (host, port), end),
    }
}

/// Rank 0: waits for all other ranks.
fn first(card: &Card, (to, one_machine): (SocketAddr, bool), end: Instant) -> Result<Met, String> {
    let listener = listen(to, card.port, one_machine)?;
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let none = || (0..card.world).map(|_| None).collect::<Lines>();
    let (mut lines, mut wires) = (none(), none());
    let mut cards: Vec<Option<(Option<IpAddr>, Card)>> = vec![None; card.world];
    cards[0] = Some((None, card.clone()));
    let missing = |lines: &Lines, wires: &Lines| -> BTreeSet<usize> {
        (1..card.world).filter(|r| lines[*r].is_none() || wires[*r].is_none()).collect()
    };
    let mut waits = Waits::new(end);
    while !missing(&lines, &wires).is_empty() {
        let who = || format!("ranks {:?} have not come to {to}", missing(&lines, &wires));
        if Instant::now() > end {
            return Err(who());
        }
        waits.look(who);
        let Some(mut line) = next(&listener)? else { continue };
        // not a process of ft: ignore
        let (place, who) = match take::<Hello>(&mut line, SAYS) {
            Ok(Hello::Line(who)) => (&mut lines, who),
            Ok(Hello::Wire(who)) => (&mut wires, who),
            _ => continue,
        };
        let wrong = if (&who.version, who.world) != (&card.version, card.world) {
            let Card { version, world, rank, .. } = &who;
            Some(format!(
                "rank {rank} is of ft {version} and one of {world}, rank 0 of ft {} and one of {}",
                card.version, card.world
            ))
        } else {
            let again = place.get(who.rank).is_none_or(Option::is_some) || who.rank == 0;
            again.then(|| format!("two processes are rank {} of {}", who.rank, card.world))
        };
        if let Some(why) = wrong {
            for line in wires.iter_mut().flatten().chain([&mut line]) {
                let _ = put(line, &Answer::Refused(why.clone()));
            }
            return Err(why);
        }
        let from = line.peer_addr().ok().map(|a| a.ip()).filter(|ip| !ip.is_loopback());
        place[who.rank] = Some(line);
        let rank = who.rank;
        cards[rank] = Some((from, who));
    }
    let all: Vec<_> = cards.into_iter().flatten().map(|(ip, c)| (ip, c.port, c.told)).collect();
    let told = all.iter().map(|(.., told)| told.clone()).collect();
    let answer = Answer::Met(key(), all);
    for line in wires.iter_mut().flatten() {
        put(line, &answer).map_err(|e| format!("a process that came is gone: {e}"))?;
    }
    Ok(Met { lines, wires, told })
}

/// Other ranks: connect to rank 0, then to all lower ranks, and accept the higher ranks.
fn other(card: &dyn Fn(u16) -> Card, (host, port): (&str, u16), end: Instant) -> Result<Met, String> {
    let master = || Launch::address(host, port).map(|(to, _)| to);
    let (to, one_machine) = {
        // retry while the host name does not resolve
        loop {
            match Launch::address(host, port) {
                Ok(found) => break found,
                Err(why) if Instant::now() > end => return Err(why),
                Err(_) => std::thread::sleep(AGAIN),
            }
        }
    };
    let listener = listen(to, 0, one_machine)?;
    let here = listener.local_addr().map_err(|e| e.to_string())?.port();
    let Card { rank, world, .. } = card(here);
    let none = || (0..world).map(|_| None).collect::<Lines>();
    let (mut lines, mut wires) = (none(), none());
    lines[0] = Some(come(master, &Hello::Line(card(here)), end)?);
    let mut wire = come(master, &Hello::Wire(card(here)), end)?;
    let left = end.saturating_duration_since(Instant::now()) + SAYS;
    let answer = take(&mut wire, left).map_err(|e| format!("the first does not answer at {to}: {e}"))?;
    wires[0] = Some(wire);
    let (key, all) = match answer {
        Answer::Met(key, all) if all.len() == world => (key, all),
        Answer::Met(..) => return Err("the first has met others".into()),
        Answer::Refused(why) => return Err(why),
    };
    for (peer, (ip, port, _)) in all.iter().enumerate().take(rank).skip(1) {
        let to = || match ip {
            Some(ip) => Ok(SocketAddr::from((*ip, *port))),
            None => Launch::address(host, *port).map(|(to, _)| to),
        };
        wires[peer] = Some(come(to, &Hello::Peer(key, rank), end)?);
    }
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    while wires.iter().skip(rank + 1).any(Option::is_none) {
        if Instant::now() > end + SAYS {
            return Err("others that have met the first do not come".into());
        }
        let Some(mut line) = next(&listener)? else { continue };
        if let Ok(Hello::Peer(said, peer)) = take(&mut line, SAYS)
            && said == key
            && peer > rank
            && let Some(place) = wires.get_mut(peer)
        {
            *place = Some(line);
        }
    }
    Ok(Met { lines, wires, told: all.into_iter().map(|(.., told)| told).collect() })
}

/// All-gathers words.
#[cfg(feature = "mpi")]
type Share<'a> = dyn Fn(&[u64]) -> Result<Vec<Vec<u64>>, super::Error> + 'a;

/// Rendezvous over MPI: rank 0 announces a port through `share`; the other ranks connect to it.
///
/// # Errors
/// Missing ranks.
#[cfg(feature = "mpi")]
pub fn by_mpi(
    (rank, hosts): (usize, &[String]),
    patience: Duration,
    share: &Share<'_>,
) -> Result<Result<Lines, String>, super::Error> {
    let mut lines: Lines = hosts.iter().map(|_| None).collect();
    let end = Instant::now() + patience;
    if rank == 0 {
        let one_machine = hosts.iter().all(|h| *h == hosts[0]);
        let ip = if one_machine { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
        let listener = match listen((ip, 0).into(), 0, one_machine) {
            Ok(listener) => listener,
            Err(why) => return Ok(Err(why)),
        };
        let port = listener.local_addr().map_or(0, |a| a.port());
        let key = key();
        share(&[u64::from(port), key[0], key[1]])?;
        return Ok(accept(&listener, key, &mut lines, end).map(|()| lines));
    }
    let all = share(&[])?;
    let [port, a, b] = all[0][..] else { return Ok(Err("the first says nothing".into())) };
    let name = if hosts[rank] == hosts[0] { "127.0.0.1" } else { &hosts[0] };
    let to = || Launch::address(name, port as u16).map(|(to, _)| to);
    Ok(come(to, &Hello::Peer([a, b], rank), end).map(|line| {
        lines[0] = Some(line);
        lines
    }))
}

/// Accepts the connections of all other ranks.
#[cfg(feature = "mpi")]
fn accept(listener: &TcpListener, key: [u64; 2], lines: &mut Lines, end: Instant) -> Result<(), String> {
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    while lines.iter().skip(1).any(Option::is_none) {
        if Instant::now() > end {
            return Err("some do not come to it".into());
        }
        let Some(mut line) = next(listener)? else { continue };
        if let Ok(Hello::Peer(said, rank)) = take(&mut line, SAYS)
            && said == key
            && let Some(place) = lines.get_mut(rank)
        {
            *place = Some(line);
        }
    }
    Ok(())
}
