//! Meetings of ranks beside strangers and over a line that damages bytes.
//!
//! A case is a rendezvous of two or three ranks, as threads. Strangers connect to rank 0 and send mutations of a
//! recorded start, in any order, whole or in part. In some cases rank 1 reaches rank 0 by way of a line that
//! damages its first connection. A case fails if ranks do not meet beside strangers, if an error has other words
//! than those of a broken connection, or if the ranks take longer than a connection may. Nothing may stay: neither
//! threads nor descriptors.

use super::dice::Dice;
use ft::ranks::Comm;
use ft::ranks::processes::{self, Neighbors, Processes};
use ft::recipe::{Launch, Rendezvous};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a case: more than the patience of one rank.
const LONGEST: Duration = Duration::from_secs(30);
/// Limit for one read or write of a stranger.
const READ: Duration = Duration::from_secs(5);
/// Bytes from rank 0 before those of unknown number.
const FROM_FIRST: usize = 300;
/// Bytes of a caller before the length of its first message.
const ANSWER: usize = 64;
/// Bytes of a caller besides its first message.
const AROUND: usize = 100;

type Met = Result<(Processes, Neighbors), ft::ranks::Error>;

/// Runs `cases` cases from `first`; returns the findings.
pub fn run(first: u64, cases: u64) -> Vec<String> {
    ft_base::terminal::hush();
    let recorded = record();
    let before = held();
    let mut wrong = Vec::new();
    for seed in first..first + cases {
        let start = Instant::now();
        if let Err(why) = case(&recorded, &mut Dice::new("rendezvous", seed), seed) {
            wrong.push(format!("{seed}: {why}"));
        }
        if start.elapsed() > LONGEST {
            wrong.push(format!("{seed}: took {:?}", start.elapsed()));
        }
    }
    // Threads that watch the last ranks end soon.
    let end = Instant::now() + LONGEST;
    while held() > before && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    if held() > before {
        wrong.push(format!("threads and descriptors: {before:?} before, {:?} after", held()));
    }
    wrong
}

/// Threads and descriptors of this process.
fn held() -> (usize, usize) {
    let count = |what| std::fs::read_dir(what).map_or(0, Iterator::count);
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// Host `last` of this process: a loopback address that no other process uses.
fn host(last: u8) -> String {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    // Even and odd hosts differ in the second number, as the last two have the process id.
    format!("127.{}.{b}.{c}", 128 + (a % 32) * 2 + last)
}

fn address(last: u8, port: u16) -> SocketAddr {
    format!("{}:{port}", host(last)).parse().expect("an address")
}

/// Port of a case: ranks of several processes would share a key at the same one.
fn port(seed: u64) -> u16 {
    10_000 + (std::process::id() % 200) as u16 * 100 + (seed % 100) as u16
}

/// Joins as a rank, by way of host `last`.
fn join(rank: usize, world: usize, last: u8, port: u16) -> Met {
    let launch = Launch { rank, world, local: None, rendezvous: Rendezvous::At(host(last), port) };
    processes::join(Some(&launch), Duration::from_secs(60))
}

/// First bytes that rank 1 sent to rank 0 in a rendezvous that succeeded: all of the start, and none after it.
fn record() -> Vec<u8> {
    let (port, sent) = (port(0), Mutex::new(Vec::new()));
    let line = Line::open(port);
    let met = thread::scope(|s| {
        let first = s.spawn(|| join(0, 2, 0, port));
        drop(reach(address(0, port)));
        let carried = s.spawn(|| line.carry(port, None, &sent));
        let second = s.spawn(|| join(1, 2, 1, port));
        let met = [first, second].map(|rank| rank.join().expect("no panic"));
        line.close();
        let judged = judge(met.into(), None);
        carried.join().expect("no panic");
        judged
    });
    met.expect("ranks meet");
    let mut sent = sent.into_inner().expect("no panic");
    let length = sent[ANSWER..].first_chunk().map_or(0, |n| u32::from_le_bytes(*n) as usize);
    sent.truncate(AROUND + length);
    sent
}

/// Connects once rank 0 listens.
fn reach(at: SocketAddr) -> TcpStream {
    let end = Instant::now() + LONGEST;
    loop {
        match TcpStream::connect(at) {
            Ok(stream) => return stream,
            Err(e) => assert!(Instant::now() < end, "{at}: {e}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Damage to one direction of a connection.
#[derive(Clone, Copy, Debug)]
struct Damage {
    /// Whether bytes to rank 0 are damaged, or those from it.
    to_first: bool,
    /// First damaged byte.
    at: usize,
    /// 0: other bits; 1: the end of the connection; 2: a byte too many.
    kind: usize,
}

/// A line by which rank 1 reaches rank 0.
struct Line {
    listener: TcpListener,
    closed: AtomicBool,
}

impl Line {
    fn open(port: u16) -> Self {
        let listener = TcpListener::bind(address(1, port)).expect("an address of this process alone");
        Self { listener, closed: AtomicBool::new(false) }
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
        // Wakes the listener.
        let _ = self.listener.local_addr().map(TcpStream::connect);
    }

    /// Carries connections until closed, the first with damage. `sent` takes the bytes of the first to rank 0.
    fn carry(&self, port: u16, mut damage: Option<Damage>, sent: &Mutex<Vec<u8>>) {
        thread::scope(|s| {
            let mut sent = Some(sent);
            while let Ok((rank, _)) = self.listener.accept()
                && !self.closed.load(Relaxed)
            {
                let Ok(first) = TcpStream::connect(address(0, port)) else { continue };
                let (damage, sent) = (damage.take(), sent.take());
                for to_first in [true, false] {
                    let damage = damage.filter(|d| d.to_first == to_first);
                    let [rank, first] = [&rank, &first].map(|end| end.try_clone().expect("a copy"));
                    let sent = sent.filter(|_| to_first);
                    s.spawn(move || {
                        if to_first {
                            pass(rank, first, damage, sent)
                        } else {
                            pass(first, rank, damage, sent)
                        }
                    });
                }
            }
        });
    }
}

/// Passes bytes on until an end is closed, and closes the other.
fn pass(mut from: TcpStream, mut to: TcpStream, damage: Option<Damage>, sent: Option<&Mutex<Vec<u8>>>) {
    let (mut part, mut at) = ([0; 4096], 0);
    while let Ok(n @ 1..) = from.read(&mut part) {
        let mut bytes = part[..n].to_vec();
        if let Some(sent) = sent {
            sent.lock().expect("no panic").extend(&bytes);
        }
        let hit = damage.filter(|d| (at..at + n).contains(&d.at)).map(|d| (d.at - at, d.kind));
        match hit {
            Some((hit, 0)) => bytes[hit] ^= 0x41,
            Some((hit, 1)) => bytes.truncate(hit),
            Some((hit, _)) => bytes.insert(hit, 7),
            None => {}
        }
        at += n;
        if to.write_all(&bytes).is_err() || hit.is_some_and(|(_, kind)| kind == 1) {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}

/// What a stranger sends, part by part, and whether it leaves the connection open.
#[derive(Debug)]
struct Stranger {
    parts: Vec<Vec<u8>>,
    stays: bool,
    /// Reads the challenge first, and sends it back.
    echoes: bool,
}

impl Stranger {
    fn new(d: &mut Dice, recorded: &[u8]) -> Self {
        let mut bytes = match d.below(6) {
            0 => Vec::new(),
            1 => b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
            2 => (0..d.below(300)).map(|_| d.next() as u8).collect(),
            3 => d.pick(&[u64::MAX, 1_000_000_000_000_000_000, 0]).to_le_bytes().repeat(1 + d.below(20)),
            _ => recorded.to_vec(),
        };
        for _ in 0..d.below(4) {
            let range = d.range(bytes.len(), 40);
            match d.below(4) {
                0 => drop(bytes.drain(range)),
                1 => bytes.splice(range.start..range.start, bytes[range.clone()].to_vec()).for_each(drop),
                2 => bytes[range].iter_mut().for_each(|b| *b ^= d.next() as u8),
                _ => bytes.truncate(range.start),
            }
        }
        let size = 1 + d.below(200);
        let mut parts: Vec<Vec<u8>> = bytes.chunks(size).map(<[u8]>::to_vec).collect();
        if d.once_in(8) {
            parts.reverse();
        }
        Self { parts, stays: d.once_in(2), echoes: d.once_in(4) }
    }

    /// Connects, if rank 0 still listens, and sends. Returns the connection if it stays open.
    fn visit(self, at: SocketAddr) -> Option<TcpStream> {
        let mut stream = TcpStream::connect(at).ok()?;
        stream.set_read_timeout(Some(READ)).and_then(|()| stream.set_write_timeout(Some(READ))).expect("set");
        if self.echoes {
            let mut challenge = [0; 40];
            let _ = stream.read_exact(&mut challenge).and_then(|()| stream.write_all(&challenge[8..]));
        }
        for part in &self.parts {
            if stream.write_all(part).is_err() {
                break;
            }
            thread::yield_now();
        }
        self.stays.then_some(stream)
    }
}

fn case(recorded: &[u8], d: &mut Dice, seed: u64) -> Result<(), String> {
    let damage = d.once_in(3).then(|| {
        let to_first = d.once_in(2);
        let at = d.below(if to_first { recorded.len() } else { FROM_FIRST });
        Damage { to_first, at, kind: d.below(3) }
    });
    let world = if damage.is_some() { 2 } else { 2 + d.below(2) };
    let port = port(seed);
    let strangers: Vec<Stranger> = (0..d.below(6)).map(|_| Stranger::new(d, recorded)).collect();
    let (early, sent) = (d.below(strangers.len() + 1), Mutex::new(Vec::new()));
    thread::scope(|s| {
        let first = s.spawn(move || join(0, world, 0, port));
        let mut strangers = strangers.into_iter();
        let mut visit = |n: usize| -> Vec<_> {
            strangers.by_ref().take(n).map(|one| s.spawn(move || one.visit(address(0, port)))).collect()
        };
        // Once rank 0 listens, ranks need not try again.
        drop(reach(address(0, port)));
        let mut visits = visit(early);
        let line = Line::open(port);
        thread::scope(|s| {
            let carried = s.spawn(|| line.carry(port, damage, &sent));
            let last = |rank| u8::from(rank == 1 && damage.is_some());
            let others: Vec<_> =
                (1..world).map(|rank| s.spawn(move || join(rank, world, last(rank), port))).collect();
            visits.extend(visit(usize::MAX));
            let open: Vec<Option<TcpStream>> =
                visits.into_iter().map(|v| v.join().expect("no panic")).collect();
            let mut met: Vec<Met> = others.into_iter().map(|rank| rank.join().expect("no panic")).collect();
            // A message that was damaged on its way to rank 0 is one of a stranger: rank 0 waits for rank 1.
            if met[0].is_err() && damage.is_some_and(|d| d.to_first) {
                met[0] = join(1, world, 0, port);
            }
            met.insert(0, first.join().expect("no panic"));
            drop(open);
            let judged = judge(met, damage);
            line.close();
            carried.join().expect("no panic");
            judged
        })
    })
}

/// Ranks that met exchange their numbers and leave. Damage to bytes from rank 0 may end the rendezvous, for both.
fn judge(met: Vec<Met>, damage: Option<Damage>) -> Result<(), String> {
    let (all, said): (Vec<_>, Vec<_>) = met.into_iter().partition(Result::is_ok);
    let said: Vec<String> = said.into_iter().filter_map(Result::err).map(|e| e.to_string()).collect();
    let known = |e: &String| e.contains("during the start") || e.contains("a process that came is gone");
    if !said.is_empty() {
        let fair = damage.is_some_and(|d| !d.to_first) && said.iter().all(known) && all.is_empty();
        return if fair { Ok(()) } else { Err(format!("{damage:?}: {said:?}")) };
    }
    let right = thread::scope(|s| {
        let exchange = |(rank, _): (Processes, Neighbors)| {
            let one: &dyn Comm = &rank;
            let numbers = one.all_gather_object(ft::ranks::CollectiveId::all("a case"), &one.rank());
            let right = numbers.is_ok_and(|numbers| numbers.into_iter().eq(0..rank.world()));
            rank.leave();
            right
        };
        let ends: Vec<_> = all.into_iter().flatten().map(|rank| s.spawn(move || exchange(rank))).collect();
        ends.into_iter().all(|end| end.join().unwrap_or(false))
    });
    if right { Ok(()) } else { Err("ranks that have met do not exchange their numbers".into()) }
}
