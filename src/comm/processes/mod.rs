//! Ranks as processes, which `mpirun` or `srun` started: values go by MPI, and who lives is watched beside it.
//!
//! A collective is a round of messages of every rank to every other, in pieces, so that what is on its way has a bound.
//! Sums are taken here, in rank order: they have the bits that ranks have which are threads.

mod watch;
mod wire;

use super::{At, Comm, Error, ROUND};
use crate::error::ExitCode;
use crate::kernel::cpu::{in_place, view};
use crate::kernel::{Tensor, bytes};
use rayon::prelude::*;
use std::hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use watch::Watch;
use wire::{Round, Wire};

/// Values that one task adds.
const CHUNK: usize = 16 * 1024;
/// Words that each rank says in the first round of a collective, after which collective it is.
const WORDS: usize = 7;
/// How long processes may take to find one another.
const MEET: Duration = Duration::from_secs(60);
const START: At = At { what: "the start", unit: None };

/// A rank that is a process.
pub struct Processes {
    watch: Arc<Watch>,
    /// Gone when this rank has left.
    wire: Mutex<Option<Wire>>,
    /// Collectives so far.
    number: AtomicU64,
    received: AtomicU64,
}

/// What processes of one machine share of it.
#[derive(Clone, Copy, Debug)]
pub struct Neighbours {
    /// How many processes there are on this machine.
    pub here: usize,
    /// How many of them have this process's processors.
    pub on_processors: usize,
}

/// Joins the processes that were started together, of which a collective may take `timeout`.
///
/// # Errors
/// A process that has started MPI already; others that cannot be reached.
pub fn join(timeout: Duration) -> Result<(Processes, Neighbours), Error> {
    let watch = Arc::new(OnceLock::<Arc<Watch>>::new());
    let known = Arc::clone(&watch);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let done = move |round| {
        if let Some(watch) = known.get() {
            watch.done(round);
        }
    };
    let started = Wire::start(done);
    let (wire, rank, world) = started.map_err(|why| Error {
        rank: 0,
        world: 1,
        host: host.clone(),
        at: START,
        why,
        code: ExitCode::Usage,
        hangs: false,
    })?;
    let watch = Arc::clone(watch.get_or_init(|| Arc::new(Watch::new((rank, world), timeout))));
    let all = Processes {
        watch,
        wire: Mutex::new(Some(wire)),
        number: AtomicU64::new(0),
        received: AtomicU64::new(0),
    };
    let neighbours = all.meet(&host)?;
    Ok((all, neighbours))
}

/// A text as words, and back.
pub fn words(text: &str) -> Vec<u64> {
    text.bytes().map(u64::from).collect()
}

/// The text that words were made of.
pub fn text(words: &[u64]) -> String {
    String::from_utf8_lossy(&words.iter().map(|w| *w as u8).collect::<Vec<_>>()).into_owned()
}

/// The processors that this process may run on, as the system spells them.
fn processors() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed:"));
    mask.map_or(String::new(), |m| m.trim().into())
}

impl Processes {
    /// Learns where the others are, and draws lines to them.
    fn meet(&self, host: &str) -> Result<Neighbours, Error> {
        let (rank, world) = (self.watch.rank, self.watch.world);
        let fail = |why: String| self.watch.error(rank, why, ExitCode::LostRank);
        let told = self.share_words(START, &words(&format!("{host}\n{}", processors())), true)?;
        let told: Vec<String> = told.iter().map(|w| text(w)).collect();
        let of = |t: &String| t.split_once('\n').map_or(t.clone(), |(host, _)| host.to_string());
        let hosts: Vec<String> = told.iter().map(of).collect();
        let one_machine = hosts.iter().all(|h| *h == hosts[0]);
        let first = hosts[0].clone();
        self.watch.know_hosts(hosts);
        if world > 1 {
            // who comes must know a number that only these processes do
            let mut lines: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
            if rank == 0 {
                let ip = if one_machine { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
                let listener =
                    TcpListener::bind((ip, 0)).map_err(|e| fail(format!("it cannot listen: {e}")))?;
                let port = listener.local_addr().map_err(|e| fail(e.to_string()))?.port();
                let key = [0; 2].map(|_| RandomState::new().build_hasher().finish());
                self.share_words(START, &[u64::from(port), key[0], key[1]], true)?;
                accept(&listener, key, &mut lines).map_err(fail)?;
            } else {
                let all = self.share_words(START, &[], true)?;
                let [port, a, b] = all[0][..] else { return Err(fail("the first says nothing".into())) };
                let name = if host == first { "127.0.0.1" } else { &first };
                lines[0] = Some(connect(name, port as u16, [a, b], rank).map_err(fail)?);
            }
            // all have lines before anybody is missed
            self.share_words(START, &[], true)?;
            self.watch.begin(lines).map_err(|e| fail(e.to_string()))?;
        }
        let mine = told[rank].clone();
        let here = told.iter().filter(|t| of(t) == host).count();
        Ok(Neighbours { here, on_processors: told.iter().filter(|t| **t == mine).count() })
    }

    fn round(&self, round: Round, patient: bool) -> Result<Round, Error> {
        match &*self.wire.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(wire) => wire.go(round),
            None => {
                let why = "it is in a collective after it has left: a bug in ft".into();
                return Err(self.watch.error(self.watch.rank, why, ExitCode::Internal));
            }
        }
        self.watch.wait(patient)
    }

    /// Comes to a collective with a few words: what each rank says, once all have come.
    fn come(&self, at: At, mine: &[u64], patient: bool) -> Result<Vec<[u64; WORDS]>, Error> {
        let (rank, world) = (self.watch.rank, self.watch.world);
        self.watch.come(self.number.fetch_add(1, Relaxed) + 1, at)?;
        let mut hasher = DefaultHasher::new();
        at.to_string().hash(&mut hasher);
        let mut said = [0u64; WORDS];
        said.iter_mut().zip(mine).for_each(|(to, w)| *to = *w);
        let key = hasher.finish();
        let bytes: Vec<u8> = std::iter::once(key).chain(said).flat_map(u64::to_ne_bytes).collect();
        let into = (0..world).map(|r| vec![0; if r == rank { 0 } else { bytes.len() }]).collect();
        let back = self.round(Round { all: bytes, into, ..Round::default() }, patient)?;
        let mut all = vec![said; world];
        for (other, bytes) in back.into.iter().enumerate().filter(|(r, _)| *r != rank) {
            let mut words =
                bytes.chunks_exact(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap_or_default()));
            if words.next() != Some(key) {
                let why = format!("it is in another collective than rank {rank}, in {at}: a bug in ft");
                let e = self.watch.error(other, why, ExitCode::Internal);
                self.watch.fail(e.clone(), false);
                return Err(e);
            }
            all[other].iter_mut().zip(words).for_each(|(to, w)| *to = w);
        }
        Ok(all)
    }

    fn share_words(&self, at: At, mine: &[u64], patient: bool) -> Result<Vec<Vec<u64>>, Error> {
        let (rank, world) = (self.watch.rank, self.watch.world);
        const FEW: usize = WORDS - 1;
        let first: Vec<u64> =
            std::iter::once(mine.len() as u64).chain(mine.iter().copied().take(FEW)).collect();
        let said = self.come(at, &first, patient)?;
        let more = |r: usize| (said[r][0] as usize).saturating_sub(FEW);
        let mut all: Vec<Vec<u64>> =
            said.iter().map(|s| s[1..].iter().copied().take(s[0] as usize).collect()).collect();
        if (0..world).any(|r| more(r) > 0) {
            let bytes = mine.iter().skip(FEW).flat_map(|w| w.to_ne_bytes()).collect();
            let into = (0..world).map(|r| vec![0; if r == rank { 0 } else { 8 * more(r) }]).collect();
            let back = self.round(Round { all: bytes, into, ..Round::default() }, patient)?;
            for (words, bytes) in all.iter_mut().zip(&back.into) {
                words.extend(
                    bytes.chunks_exact(8).map(|b| u64::from_ne_bytes(b.try_into().unwrap_or_default())),
                );
            }
            all[rank] = mine.to_vec();
        }
        Ok(all)
    }

    /// Values of each rank in one round.
    fn piece(&self) -> usize {
        (ROUND / self.watch.world).max(1024)
    }

    /// Leaves, with everything done, and ends MPI: all ranks do.
    pub fn leave(self) {
        self.watch.leave();
        let wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner).take();
        wire.into_iter().for_each(Wire::end);
    }

    /// After an error: waits until the first rank has told what it was, and gives whether this one is to, for the first
    /// is lost.
    pub fn tells(&self) -> bool {
        self.watch.linger()
    }

    fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Relaxed);
    }
}

/// Takes the lines of all other ranks.
fn accept(listener: &TcpListener, key: [u64; 2], lines: &mut [Option<TcpStream>]) -> Result<(), String> {
    let end = Instant::now() + MEET;
    let other = |e: std::io::Error| format!("it cannot listen: {e}");
    listener.set_nonblocking(true).map_err(other)?;
    while lines.iter().skip(1).any(Option::is_none) {
        match listener.accept() {
            Ok((mut line, _)) => {
                let mut said = [0; 24];
                line.set_nonblocking(false)
                    .and_then(|()| line.set_read_timeout(Some(MEET)))
                    .map_err(other)?;
                if line.read_exact(&mut said).is_err() {
                    continue;
                }
                let word =
                    |i: usize| u64::from_ne_bytes(said[8 * i..8 * i + 8].try_into().unwrap_or_default());
                line.set_read_timeout(None).map_err(other)?;
                if [word(0), word(1)] == key
                    && let Some(place) = lines.get_mut(word(2) as usize)
                {
                    *place = Some(line);
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(e) => return Err(other(e)),
        }
    }
    Ok(())
}

/// Draws a line to the first rank.
fn connect(name: &str, port: u16, key: [u64; 2], rank: usize) -> Result<TcpStream, String> {
    let hello: Vec<u8> = [key[0], key[1], rank as u64].into_iter().flat_map(u64::to_ne_bytes).collect();
    let end = Instant::now() + MEET;
    loop {
        let line = TcpStream::connect((name, port)).and_then(|mut l| l.write_all(&hello).map(|()| l));
        match line {
            Ok(line) => return Ok(line),
            Err(_) if Instant::now() < end => std::thread::sleep(Duration::from_millis(100)),
            Err(e) => return Err(format!("it does not reach the first rank at {name}:{port}: {e}")),
        }
    }
}

impl Comm for Processes {
    fn rank(&self) -> usize {
        self.watch.rank
    }

    fn world(&self) -> usize {
        self.watch.world
    }

    fn share(&self, at: At, mine: &[u64]) -> crate::Result<Vec<Vec<u64>>> {
        Ok(self.share_words(at, mine, false)?)
    }

    fn wait(&self, at: At, mine: &[u64]) -> crate::Result<Vec<Vec<u64>>> {
        Ok(self.share_words(at, mine, true)?)
    }

    fn add(&self, at: At, part: Option<Tensor>, range: Range<usize>, to: &Tensor) -> crate::Result<()> {
        let (rank, world, piece) = (self.watch.rank, self.watch.world, self.piece());
        let mine = [u64::from(part.is_some()), range.start as u64, range.end as u64];
        let said = self.come(at, &mine, false)?;
        let ranges: Vec<Range<usize>> = said.iter().map(|s| s[1] as usize..s[2] as usize).collect();
        self.count(size_of::<f32>() * range.len() * (world - 1));
        let most = ranges.iter().map(Range::len).max().unwrap_or(0);
        let mut round = Round::new(world);
        for first in (0..most).step_by(piece) {
            let cut = |r: &Range<usize>| (r.start + first).min(r.end)..(r.start + first + piece).min(r.end);
            let here = cut(&ranges[rank]);
            for (other, said) in said.iter().enumerate().filter(|(r, _)| *r != rank) {
                if let Some(part) = &part {
                    bytes::put(part, cut(&ranges[other]), &mut round.out[other])?;
                }
                let comes = if said[0] != 0 { here.len() } else { 0 };
                round.into[other].resize(size_of::<f32>() * comes, 0);
            }
            round = self.round(round, false)?;
            if !here.is_empty() {
                let own = part.as_ref().map(|p| p.narrow(0, here.start, here.len())).transpose()?;
                let own = own.as_ref().map(view::<f32>).transpose()?;
                in_place::<f32>("a sum over ranks", to, |to| {
                    let to = &mut to[first..first + here.len()];
                    for (other, came) in round.into.iter().enumerate() {
                        match (other == rank, &own) {
                            (true, Some(own)) => {
                                let both = to.par_chunks_mut(CHUNK).zip(own.par_chunks(CHUNK));
                                both.for_each(|(to, x)| to.iter_mut().zip(x).for_each(|(to, x)| *to += x));
                            }
                            _ => {
                                let both =
                                    to.par_chunks_mut(CHUNK).zip(came.par_chunks(CHUNK * size_of::<f32>()));
                                both.for_each(|(to, x)| {
                                    let x = x.chunks_exact(size_of::<f32>());
                                    let x = x.map(|b| f32::from_ne_bytes(b.try_into().unwrap_or_default()));
                                    to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
                                });
                            }
                        }
                    }
                    Ok(())
                })?;
            }
            round.clear();
        }
        Ok(())
    }

    fn gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> crate::Result<()> {
        let (rank, world) = (self.watch.rank, self.watch.world);
        self.come(at, &[], false)?;
        let (size, most) = (to.dtype().size_in_bytes(), ranges.iter().map(Range::len).max().unwrap_or(0));
        let own = ranges.get(rank).cloned().unwrap_or(0..0);
        if !own.is_empty() {
            to.slice_set(&mine, 0, own.start)?;
        }
        // as many bytes a round as a sum has
        let piece = (self.piece() * size_of::<f32>() / size).max(1);
        let mut round = Round::new(world);
        for first in (0..most).step_by(piece) {
            let cut = |len: usize| first.min(len)..(first + piece).min(len);
            bytes::put(&mine, cut(own.len()), &mut round.all)?;
            for (other, range) in ranges.iter().enumerate().filter(|(r, _)| *r != rank) {
                round.into[other].resize(size * cut(range.len()).len(), 0);
            }
            round = self.round(round, false)?;
            for (range, came) in ranges.iter().zip(&round.into).filter(|(_, c)| !c.is_empty()) {
                bytes::set(to, range.start + first, came)?;
                self.count(came.len());
            }
            round.clear();
        }
        Ok(())
    }

    fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    fn fail(&self, e: &crate::Error) {
        // one that was released by another's failure has nothing to add
        if e.of::<Error>().is_none() {
            self.watch.fail(self.watch.error(self.watch.rank, e.to_string(), e.exit_code()), false);
        }
    }
}

/// A rank that goes without leaving is lost to the others.
impl Drop for Processes {
    fn drop(&mut self) {
        let wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(wire) = wire {
            let why = if std::thread::panicking() { "it panicked" } else { "it has ended" };
            self.watch.fail(self.watch.error(self.watch.rank, why.into(), ExitCode::LostRank), false);
            // MPI ends when all ranks end it: this process just goes
            std::mem::forget(wire);
        }
    }
}
