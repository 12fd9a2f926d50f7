//! Ranks as processes started by a launcher. Values go through MPI or TCP; a separate TCP connection
//! monitors liveness.
//!
//! A collective exchanges messages between all pairs of ranks, in rounds of bounded size. Sums are taken on
//! the receiver in rank order and match the bits of the thread backend.

mod meet;
#[cfg(feature = "mpi")]
mod mpi;
mod tcp;
mod watch;
mod wire;

use super::{At, Comm, Error, ROUND};
use ft_base::error::ExitCode;
use ft_kernels::cpu::{in_place, view};
use ft_kernels::crossing::Arrival;
use ft_kernels::{Tensor, bytes};
use ft_recipe::{Launch, Meeting};
use rayon::prelude::*;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
#[cfg(feature = "mpi")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use watch::Watch;
use wire::{Round, Wire};

/// Values summed per task.
const CHUNK: usize = 16 * 1024;
/// Words per rank in the first round of a collective, after the hash of the collective's name.
const WORDS: usize = 7;
/// Minimum timeout for process startup.
const MEET: Duration = Duration::from_secs(60);
const START: At = At { what: "the start", unit: None };

/// A rank running as a process.
pub struct Processes {
    watch: Arc<Watch>,
    /// `None` after this rank has left.
    wire: Mutex<Option<Wire>>,
    /// Number of collectives so far.
    number: AtomicU64,
    received: AtomicU64,
}

/// Processes on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Neighbours {
    /// Processes on this machine.
    pub here: usize,
    /// Processes with the same CPU affinity mask as this one.
    pub on_processors: usize,
}

/// Joins the process group of the launcher. A collective fails after `timeout`.
///
/// # Errors
/// MPI was initialized before; unreachable peers; a launcher without an address to meet at.
pub fn join(launch: Option<&Launch>, timeout: Duration) -> Result<(Processes, Neighbours), Error> {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mine = format!("{host}\n{}", processors());
    let (rank, world) = launch.map_or((0, 1), |l| (l.rank, l.world));
    let fail =
        |why: String, code| Error { rank, world, host: host.clone(), at: START, why, code, hangs: false };
    match launch.map(|l| (l, &l.meeting)) {
        Some((launch, Meeting::At(at, port))) => {
            let met = meet::at(launch, (at, *port), mine, timeout.max(MEET));
            let met = met.map_err(|why| fail(why, ExitCode::LostRank))?;
            let watch = Arc::new(Watch::new((rank, world), timeout));
            let known = Arc::clone(&watch);
            let begun = tcp::Wire::start(met.wires, move |round| known.done(round));
            let wire = begun.map_err(|e| fail(e.to_string(), ExitCode::LostRank))?;
            let all = Processes::new(watch, Wire::Tcp(wire));
            let neighbours = all.know(&met.told);
            // Every rank has a monitoring connection before any rank can be reported as lost.
            all.share_words(START, &[], true)?;
            all.watch.begin(met.lines).map_err(|e| fail(e.to_string(), ExitCode::LostRank))?;
            Ok((all, neighbours))
        }
        Some((_, Meeting::Nowhere(why))) => {
            let why =
                format!("{world} processes were started, and they do not find one another\n  hint: {why}");
            Err(fail(why, ExitCode::Usage))
        }
        #[cfg(feature = "mpi")]
        _ => by_mpi(&mine, timeout, &|why| fail(why, ExitCode::Usage)),
        #[cfg(not(feature = "mpi"))]
        _ => Err(fail(
            "this ft was built without MPI (cargo build --release --features mpi)".into(),
            ExitCode::Usage,
        )),
    }
}

/// Implements [`join`] over MPI.
#[cfg(feature = "mpi")]
fn by_mpi(
    mine: &str,
    timeout: Duration,
    fail: &dyn Fn(String) -> Error,
) -> Result<(Processes, Neighbours), Error> {
    let watch = Arc::new(OnceLock::<Arc<Watch>>::new());
    let known = Arc::clone(&watch);
    let done = move |round| {
        if let Some(watch) = known.get() {
            watch.done(round);
        }
    };
    let (wire, rank, world) = mpi::Wire::start(done).map_err(fail)?;
    let watch = Arc::clone(watch.get_or_init(|| Arc::new(Watch::new((rank, world), timeout))));
    let all = Processes::new(watch, Wire::Mpi(wire));
    let told = all.share_words(START, &words(mine), true)?;
    let neighbours = all.know(&told.iter().map(|w| text(w)).collect::<Vec<_>>());
    if world > 1 {
        let fail = |why: String| all.watch.error(rank, why, ExitCode::LostRank);
        let share = |words: &[u64]| all.share_words(START, words, true);
        let lines = meet::by_mpi((rank, all.watch.hosts()), MEET, &share)?.map_err(fail)?;
        // Every rank has a monitoring connection before any rank can be reported as lost.
        all.share_words(START, &[], true)?;
        all.watch.begin(lines).map_err(|e| fail(e.to_string()))?;
    }
    Ok((all, neighbours))
}

/// Encodes a text as one word per byte.
pub fn words(text: &str) -> Vec<u64> {
    text.bytes().map(u64::from).collect()
}

/// Decodes the result of [`words`].
pub fn text(words: &[u64]) -> String {
    String::from_utf8_lossy(&words.iter().map(|w| *w as u8).collect::<Vec<_>>()).into_owned()
}

/// CPU affinity mask of this process, as `/proc` prints it.
fn processors() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed:"));
    mask.map_or(String::new(), |m| m.trim().into())
}

impl Processes {
    fn new(watch: Arc<Watch>, wire: Wire) -> Self {
        Self { watch, wire: Mutex::new(Some(wire)), number: AtomicU64::new(0), received: AtomicU64::new(0) }
    }

    /// Records the host of every rank and counts the processes on this machine.
    fn know(&self, told: &[String]) -> Neighbours {
        let of = |t: &String| t.split_once('\n').map_or(t.clone(), |(host, _)| host.to_string());
        let (mine, here) = (&told[self.watch.rank], of(&told[self.watch.rank]));
        let neighbours = Neighbours {
            here: told.iter().filter(|t| of(t) == here).count(),
            on_processors: told.iter().filter(|t| *t == mine).count(),
        };
        self.watch.know_hosts(told.iter().map(of).collect());
        neighbours
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

    /// Enters a collective with a few words; returns the words by rank once all have arrived.
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

    /// Values per rank in one round.
    fn piece(&self) -> usize {
        (ROUND / self.watch.world).max(1024)
    }

    /// Leaves the group after all work is done and finalizes MPI. Every rank must call it.
    pub fn leave(self) {
        self.watch.leave();
        let wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner).take();
        wire.into_iter().for_each(Wire::end);
    }

    /// After an error: waits until rank 0 has reported it. Returns whether this rank must report it,
    /// because rank 0 is the lost one.
    pub fn tells(&self) -> bool {
        self.watch.linger()
    }

    fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Relaxed);
    }
}

impl Comm for Processes {
    fn rank(&self) -> usize {
        self.watch.rank
    }

    fn world(&self) -> usize {
        self.watch.world
    }

    fn share(&self, at: At, mine: &[u64]) -> ft_base::Result<Vec<Vec<u64>>> {
        Ok(self.share_words(at, mine, false)?)
    }

    fn wait(&self, at: At, mine: &[u64]) -> ft_base::Result<Vec<Vec<u64>>> {
        Ok(self.share_words(at, mine, true)?)
    }

    fn add(
        &self,
        at: At,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> ft_base::Result<Arrival> {
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
        Ok(Arrival::over())
    }

    fn gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> ft_base::Result<Arrival> {
        let (rank, world) = (self.watch.rank, self.watch.world);
        self.come(at, &[], false)?;
        let (size, most) = (to.dtype().size_in_bytes(), ranges.iter().map(Range::len).max().unwrap_or(0));
        let own = ranges.get(rank).cloned().unwrap_or(0..0);
        if !own.is_empty() {
            to.slice_set(&mine, 0, own.start)?;
        }
        // the same number of bytes per round as a sum
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
        Ok(Arrival::over())
    }

    fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    fn fail(&self, e: &ft_base::Error) {
        // An abort caused by another rank is already recorded.
        if e.of::<Error>().is_none() {
            self.watch.fail(self.watch.error(self.watch.rank, e.to_string(), e.exit_code()), false);
        }
    }

    fn lost(&self) -> Option<Error> {
        self.watch.failed()
    }

    fn when_lost(&self, f: Box<dyn Fn() + Send + Sync>) {
        self.watch.when_failed(f);
    }
}

/// Dropping a rank without [`Processes::leave`] aborts the group.
impl Drop for Processes {
    fn drop(&mut self) {
        let wire = self.wire.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(wire) = wire {
            let why = if std::thread::panicking() { "it panicked" } else { "it has ended" };
            self.watch.fail(self.watch.error(self.watch.rank, why.into(), ExitCode::LostRank), false);
            // Finalizing MPI would block until all ranks do the same.
            std::mem::forget(wire);
        }
    }
}
