//! Rendezvous of the processes: every rank registers with rank 0, and rank 0 replies with the list of all ranks.
//!
//! Rank 0 listens at the host and port of the launcher; under MPI it chooses a port and sends it by MPI. The
//! connections of the registration then carry the liveness messages. Without MPI, all pairs of ranks connect
//! once more, for values. All connections begin with a proof of the key ([`super::link`]), and the rendezvous has
//! one deadline.

use super::key::{Key, Source};
use super::link::{Link, is_closed};
use super::listener::Listener;
use ft_base::terminal;
use ft_recipe::Launch;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time limit for one connection attempt, and for the first bytes of rank 0.
const REACH: Duration = Duration::from_secs(5);
/// Time limit for attempts after a wrong answer: another program, or another key.
const PATIENCE: Duration = Duration::from_secs(10);
/// Delay before a message about missing ranks is printed.
const NOTICE_DELAY: Duration = Duration::from_secs(4);
/// Interval between connection attempts.
const RETRY: Duration = Duration::from_millis(100);
/// Additional time for the reply of rank 0, whose deadline may be later.
const REPLY: Duration = Duration::from_secs(5);

/// Connections by rank; `None` for this process.
pub type Connections = Vec<Option<TcpStream>>;

/// First message of a connection.
#[derive(Serialize, Deserialize)]
enum Hello {
    /// To rank 0: registration.
    Register(Registration),
    /// To a lower rank: a connection for values, with the rendezvous's number and the sender's rank.
    Peer([u8; 32], usize),
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

/// All ranks of a rendezvous.
#[derive(Clone, Serialize, Deserialize)]
pub struct Roster {
    /// Random number of the rendezvous.
    number: [u8; 32],
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

/// Resolves the address of rank 0, and tells whether it is a loopback address; retries until `end`.
pub fn resolve(host: &str, port: u16, end: Instant) -> Result<(SocketAddr, bool), String> {
    loop {
        match Launch::address(host, port) {
            Err(_) if Instant::now() < end => std::thread::sleep(RETRY),
            resolved => return resolved,
        }
    }
}

/// Connects and sends `hello`. Retries until `end`, or until `lost` gives a reason to stop; another program or
/// another key at the address ends it sooner. A listener has `quick` to speak.
fn call(
    to: impl Fn() -> Result<SocketAddr, String>,
    key: &Source,
    hello: &Hello,
    (end, quick): (Instant, Duration),
    lost: &dyn Fn() -> Option<String>,
) -> Result<(Link, Key), String> {
    let mut notice = Notice::new(end);
    let mut wrong = None;
    loop {
        let why = match to().and_then(|to| reach(to).map(|stream| (stream, to))) {
            Err(why) => why,
            Ok((stream, to)) => {
                let speaks = (Instant::now() + quick).min(end);
                let met = Link::call(stream, || key.get(), speaks).and_then(|(mut link, key)| {
                    link.send(hello, end).map(|()| (link, key)).map_err(|e| e.to_string())
                });
                match met {
                    Ok(met) => return Ok(met),
                    Err(why) => {
                        let why = format!("it does not meet rank 0 of this run at {to}: {why}");
                        if Instant::now() > *wrong.get_or_insert_with(|| Instant::now() + PATIENCE) {
                            let hint = "another MASTER_PORT, and the same FT_KEY for all processes";
                            return Err(format!("{why}\n  hint: {hint}"));
                        }
                        why
                    }
                }
            }
        };
        if let Some(why) = lost() {
            return Err(why);
        }
        if Instant::now() > end {
            return Err(why);
        }
        notice.look(|| why);
        std::thread::sleep(RETRY);
    }
}

fn reach(to: SocketAddr) -> Result<TcpStream, String> {
    TcpStream::connect_timeout(&to, REACH).map_err(|e| format!("it does not reach {to}: {e}"))
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

/// Rank 0: waits until all other ranks have registered, and sends the list of all ranks. `at` is the address
/// in messages.
///
/// # Errors
/// Missing or unexpected ranks. Registered ranks are told.
pub fn register_all(
    own: Registration,
    listener: &mut Listener,
    at: SocketAddr,
    end: Instant,
) -> Result<(Connections, Roster), String> {
    let mut links: Vec<Option<Link>> = (0..own.world).map(|_| None).collect();
    let registered = gather(&own, listener, &mut links, at, end);
    let reply = match &registered {
        Ok(roster) => Reply::Accepted(roster.clone()),
        Err(why) => Reply::Refused(why.clone()),
    };
    let sent: Vec<_> = links.iter_mut().flatten().map(|link| link.send(&reply, end + REPLY)).collect();
    let roster = registered?;
    let gone = |e: std::io::Error| format!("a process that came is gone: {e}");
    sent.into_iter().collect::<Result<(), _>>().map_err(gone)?;
    let streams = links.into_iter().map(|link| link.map(Link::into_stream).transpose()).collect();
    Ok((std::io::Result::<Connections>::map_err(streams, gone)?, roster))
}

fn gather(
    own: &Registration,
    listener: &mut Listener,
    links: &mut [Option<Link>],
    at: SocketAddr,
    end: Instant,
) -> Result<Roster, String> {
    let mut members = vec![None; own.world];
    members[0] = Some(own.member.clone());
    let mut notice = Notice::new(end);
    loop {
        let missing: BTreeSet<usize> = (0..own.world).filter(|r| members[*r].is_none()).collect();
        if missing.is_empty() {
            let number = super::key::random()?;
            return Ok(Roster { number, members: members.into_iter().flatten().collect() });
        }
        let who = || format!("ranks {missing:?} have not come to {at}");
        if Instant::now() > end {
            return Err(who());
        }
        notice.look(who);
        let streams = links.iter().map(|link| link.as_ref().map(Link::stream));
        if let Some(why) = lost(streams) {
            return Err(why);
        }
        let Some((mut link, ip, Hello::Register(other))) = listener.next()? else { continue };
        if let Some(why) = other.refused(own, |r| members[r].is_some()) {
            let _ = link.send(&Reply::Refused(why.clone()), end + REPLY);
            return Err(why);
        }
        let ip = Some(ip).filter(|ip| !ip.is_loopback());
        members[other.rank] = Some(Member { ip, ..other.member });
        links[other.rank] = Some(link);
    }
}

/// The first rank with a closed connection, in words.
fn lost<'a>(mut streams: impl Iterator<Item = Option<&'a TcpStream>>) -> Option<String> {
    let rank = streams.position(|s| s.is_some_and(is_closed))?;
    Some(format!("rank {rank} has ended during the start"))
}

/// Other ranks: registers with rank 0 at a host and port. Returns the key too.
///
/// # Errors
/// Rank 0 is missing, or refuses.
pub fn register(
    own: Registration,
    key: &Source,
    (host, port): (&str, u16),
    end: Instant,
) -> Result<(Connections, Roster, Key), String> {
    let world = own.world;
    let to = || Launch::address(host, port).map(|(to, _)| to);
    let (mut link, key) = call(to, key, &Hello::Register(own), (end, REACH), &|| None)?;
    let reply = link.receive(end + REPLY);
    match reply.map_err(|e| format!("rank 0 at {host}:{port} has ended during the start: {e}"))? {
        Reply::Accepted(roster) if roster.members.len() == world => {
            let mut streams: Connections = (0..world).map(|_| None).collect();
            streams[0] = Some(link.into_stream().map_err(|e| e.to_string())?);
            Ok((streams, roster, key))
        }
        Reply::Accepted(_) => Err("the first has met others".into()),
        Reply::Refused(why) => Err(why),
    }
}

/// Connects this rank to all lower ranks, and accepts the connections of the higher ranks. `host` is rank 0's;
/// `monitors` are the connections of the registration.
///
/// # Errors
/// Missing ranks.
pub fn connect_pairs(
    (roster, monitors): (&Roster, &Connections),
    rank: usize,
    (host, key): (&str, &Source),
    listener: &mut Listener,
    end: Instant,
) -> Result<Connections, String> {
    let lost = || lost(monitors.iter().map(Option::as_ref));
    let mut streams: Connections = roster.members.iter().map(|_| None).collect();
    for (stream, member) in streams.iter_mut().zip(&roster.members).take(rank) {
        let to = || match member.ip {
            Some(ip) => Ok(SocketAddr::from((ip, member.port))),
            None => Launch::address(host, member.port).map(|(to, _)| to),
        };
        let left = end.saturating_duration_since(Instant::now());
        let (link, _) = call(to, key, &Hello::Peer(roster.number, rank), (end, left), &lost)?;
        *stream = Some(link.into_stream().map_err(|e| e.to_string())?);
    }
    while streams.iter().skip(rank + 1).any(Option::is_none) {
        if Instant::now() > end {
            return Err("others that have met the first do not come".into());
        }
        if let Some(why) = lost() {
            return Err(why);
        }
        if let Some((link, _, Hello::Peer(number, peer))) = listener.next()?
            && number == roster.number
            && peer > rank
            && let Some(place) = streams.get_mut(peer)
        {
            *place = Some(link.into_stream().map_err(|e| e.to_string())?);
        }
    }
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use super::super::listener;
    use super::*;
    use std::io::{Read, Write};

    /// A listener on a free port of loopback, its key and address.
    fn opened(world: usize) -> (Listener, Key, SocketAddr) {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let key = Key::random().expect("a key");
        let listener = Listener::new(listener::listen(any, 0, true).expect("a port"), key, world);
        let at = SocketAddr::from(([127, 0, 0, 1], listener.port().expect("a port")));
        (listener, key, at)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(100)
    }

    fn own(rank: usize, world: usize) -> Registration {
        Registration::new(rank, world, 7, format!("host {rank}"))
    }

    /// A rank that registers, and leaves the connection to the caller.
    fn registered(at: SocketAddr, key: Key, rank: usize, world: usize) -> Link {
        let hello = Hello::Register(own(rank, world));
        call(|| Ok(at), &Source::Given(key), &hello, (soon(), REACH), &|| None).expect("met").0
    }

    #[test]
    fn a_rank_that_ends_during_the_start_ends_it_at_once() {
        let (mut listener, key, at) = opened(4);
        let all = std::thread::spawn(move || register_all(own(0, 4), &mut listener, at, soon()).err());
        let mut waits = registered(at, key, 1, 4);
        drop(registered(at, key, 2, 4));
        let told: Reply = waits.receive(soon()).expect("a reply");
        let why = "rank 2 has ended during the start";
        assert!(matches!(told, Reply::Refused(said) if said == why));
        assert_eq!(all.join().expect("no panic").as_deref(), Some(why));
    }

    #[test]
    fn a_message_that_is_not_taken_ends_by_its_time() {
        let (mut listener, key, at) = opened(2);
        let other = std::thread::spawn(move || registered(at, key, 1, 2));
        let (mut link, ..) = loop {
            if let Some(met) = listener.next::<Hello>().expect("a listener") {
                break met;
            }
        };
        let _reads_nothing = other.join().expect("no panic");
        // More than the buffers of a connection hold.
        let e = link.send(&"x".repeat(64 << 20), Instant::now()).expect_err("sent");
        assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
    }

    #[test]
    fn two_processes_of_one_rank_end_the_start_and_all_are_told() {
        let (mut listener, key, at) = opened(3);
        let all = std::thread::spawn(move || register_all(own(0, 3), &mut listener, at, soon()).err());
        let mut both = [1, 1].map(|rank| registered(at, key, rank, 3));
        for link in &mut both {
            let told: Reply = link.receive(soon()).expect("a reply");
            assert!(matches!(told, Reply::Refused(why) if why == "two processes are rank 1 of 3"));
        }
        assert!(all.join().expect("no panic").is_some_and(|why| why.contains("two processes are rank 1")));
    }

    #[test]
    fn a_start_ends_at_its_deadline_and_names_the_ranks_that_have_not_come() {
        let (mut listener, _, at) = opened(3);
        let why = register_all(own(0, 3), &mut listener, at, Instant::now()).err();
        assert_eq!(why, Some(format!("ranks {{1, 2}} have not come to {at}")));
    }

    /// Callers without the key, more than the listener hears at once, all of them open until the ranks have met.
    #[test]
    fn strangers_neither_end_nor_stall_a_start() {
        let (mut listener, key, at) = opened(2);
        let all = std::thread::spawn(move || {
            let met = register_all(own(0, 2), &mut listener, at, soon()).map(|(_, roster)| roster.about());
            (met, listener)
        });
        let says: [&[u8]; 6] = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            &[0; 63],
            &[0xff; 100],
            // What ft 0.1 sent: a rank without a key.
            b"\x2f\0\0\0{\"Register\":{\"rank\":1000000000000000000,\"world\":2}}",
            &1_000_000_000_000_000_000_u64.to_le_bytes(),
        ];
        let mut strangers = Vec::new();
        for i in 0..120 {
            let mut stranger = TcpStream::connect(at).expect("a connection");
            // A stranger may have been dropped by now.
            let _ = stranger.write_all(says[i % says.len()]);
            strangers.push(stranger);
        }
        let mut link = registered(at, key, 1, 2);
        let reply: Reply = link.receive(soon()).expect("a reply");
        assert!(matches!(reply, Reply::Accepted(roster) if roster.members.len() == 2));
        let (met, listener) = all.join().expect("no panic");
        assert_eq!(met, Ok(vec!["host 0".to_string(), "host 1".into()]));
        drop(listener);
        for mut stranger in strangers {
            let mut heard = Vec::new();
            let _ = stranger.read_to_end(&mut heard);
            assert!(heard.len() <= 40, "a stranger heard {} bytes", heard.len());
        }
    }

    #[test]
    fn another_program_or_another_key_is_named() {
        let (silent, (mut listener, _, at)) =
            (std::net::TcpListener::bind("127.0.0.1:0").expect("a port"), opened(2));
        let asks = |at: SocketAddr, end: Instant| {
            let stream = TcpStream::connect(at).expect("a connection");
            Link::call(stream, Key::random, end).err().unwrap_or_default()
        };
        let at_once = asks(silent.local_addr().expect("an address"), Instant::now());
        assert_eq!(at_once, "another program listens there");
        let caller = std::thread::spawn(move || asks(at, soon()));
        while !caller.is_finished() {
            assert!(listener.next::<Hello>().expect("it listens").is_none());
        }
        assert_eq!(caller.join().expect("no panic"), "who listens there has another key");
    }

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
