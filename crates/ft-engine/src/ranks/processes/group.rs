//! The collectives of a process.

use super::monitor::Monitor;
use super::transport::{Round, Transport};
use crate::ranks::callbacks::Callback;
use crate::ranks::comm::{At, Comm, Error};
use crate::ranks::sum;
use ft_base::Result;
use ft_base::error::ExitCode;
use ft_kernels::cpu::{in_place, view};
use ft_kernels::crossing::Arrival;
use ft_kernels::{Tensor, bytes};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Upper bound on values (4 bytes) that a rank sends to all peers, and receives, at once.
pub const ROUND: usize = 512 * 1024;
/// Bytes of a message in the first round of a collective; the rest goes in a second one.
const INLINE: usize = 240;

/// A rank running as a process.
pub struct Processes {
    pub(super) monitor: Arc<Monitor>,
    /// `None` after this rank has left.
    transport: Mutex<Option<Transport>>,
    /// Number of collectives so far.
    number: AtomicU64,
    received: AtomicU64,
}

impl Processes {
    pub(super) fn new(monitor: Arc<Monitor>, transport: Transport) -> Self {
        let transport = Mutex::new(Some(transport));
        Self { monitor, transport, number: AtomicU64::new(0), received: AtomicU64::new(0) }
    }

    fn transport(&self) -> MutexGuard<'_, Option<Transport>> {
        self.transport.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn round(&self, round: Round, timed: bool) -> Result<Round, Error> {
        match &*self.transport() {
            Some(transport) => transport.exchange(round),
            None => {
                let why = "it is in a collective after it has left: a bug in ft".into();
                return Err(self.monitor.error(self.monitor.rank, why, ExitCode::Internal));
            }
        }
        self.monitor.wait(timed)
    }

    /// Enters a collective with a message; returns the messages by rank once all have arrived.
    pub(super) fn exchange(&self, at: At, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>, Error> {
        let (rank, world) = (self.monitor.rank, self.monitor.world);
        self.monitor.enter(self.number.fetch_add(1, Relaxed) + 1, at)?;
        let mut hasher = DefaultHasher::new();
        at.to_string().hash(&mut hasher);
        let key = hasher.finish();
        let (inline, rest) = mine.split_at(mine.len().min(INLINE));
        let mut first = [key, mine.len() as u64].map(u64::to_ne_bytes).concat();
        let header = first.len();
        first.extend(inline);
        first.resize(header + INLINE, 0);
        let back = self.round(Round::all_to_all(rank, world, first, |_| header + INLINE), timed)?;
        let mut all = vec![mine.to_vec(); world];
        let mut lens = vec![mine.len(); world];
        for (other, bytes) in back.into.iter().enumerate().filter(|(r, _)| *r != rank) {
            let (words, inline) = bytes.split_at(header);
            let mut words = words.as_chunks().0.iter().map(|b| u64::from_ne_bytes(*b));
            if words.next() != Some(key) {
                let why = format!("it is in another collective than rank {rank}, in {at}: a bug in ft");
                let e = self.monitor.error(other, why, ExitCode::Internal);
                self.monitor.fail(e.clone(), false);
                return Err(e);
            }
            lens[other] = words.next().unwrap_or_default() as usize;
            all[other] = inline[..lens[other].min(INLINE)].to_vec();
        }
        if lens.iter().any(|n| *n > INLINE) {
            let round = Round::all_to_all(rank, world, rest.to_vec(), |r| lens[r].saturating_sub(INLINE));
            let back = self.round(round, timed)?;
            all.iter_mut().zip(&back.into).for_each(|(message, bytes)| message.extend(bytes));
        }
        Ok(all)
    }

    /// Values per rank in one round.
    fn piece(&self) -> usize {
        (ROUND / self.monitor.world).max(1024)
    }

    /// Leaves the group after all work is done and finalizes MPI. Every rank must call it.
    pub fn leave(self) {
        self.monitor.leave();
        let transport = self.transport().take();
        transport.into_iter().for_each(Transport::end);
    }

    /// After an error: waits until rank 0 has reported it. Returns whether this rank must report it,
    /// because rank 0 is the lost one.
    pub fn must_report(&self) -> bool {
        self.monitor.linger()
    }

    fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Relaxed);
    }
}

impl Comm for Processes {
    fn rank(&self) -> usize {
        self.monitor.rank
    }

    fn world(&self) -> usize {
        self.monitor.world
    }

    fn all_gather_bytes(&self, at: At, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        Ok(self.exchange(at, mine, timed)?)
    }

    fn reduce_scatter(
        &self,
        at: At,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<Arrival> {
        let (rank, world, piece) = (self.monitor.rank, self.monitor.world, self.piece());
        let (contributes, ranges): (Vec<bool>, Vec<Range<usize>>) =
            (self as &dyn Comm).all_gather_object(at, &(part.is_some(), range.clone()))?.into_iter().unzip();
        self.count(size_of::<f32>() * range.len() * (world - 1));
        let most = ranges.iter().map(Range::len).max().unwrap_or(0);
        let mut round = Round::new(world);
        for first in (0..most).step_by(piece) {
            let cut = |r: &Range<usize>| (r.start + first).min(r.end)..(r.start + first + piece).min(r.end);
            let here = cut(&ranges[rank]);
            for (other, contributes) in contributes.iter().enumerate().filter(|(r, _)| *r != rank) {
                if let Some(part) = &part {
                    bytes::put(part, cut(&ranges[other]), &mut round.out[other])?;
                }
                let comes = if *contributes { here.len() } else { 0 };
                round.into[other].resize(size_of::<f32>() * comes, 0);
            }
            round = self.round(round, true)?;
            if !here.is_empty() {
                let own = part.as_ref().map(|p| p.narrow(0, here.start, here.len())).transpose()?;
                let own = own.as_ref().map(view::<f32>).transpose()?;
                in_place::<f32>("a sum over ranks", to, |to| {
                    let to = &mut to[first..first + here.len()];
                    for (other, came) in round.into.iter().enumerate() {
                        match &own {
                            Some(own) if other == rank => sum::add(to, own),
                            _ => sum::add_bytes(to, came),
                        }
                    }
                    Ok(())
                })?;
            }
            round.clear();
        }
        Ok(Arrival::over())
    }

    fn all_gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> Result<Arrival> {
        let (rank, world) = (self.monitor.rank, self.monitor.world);
        self.exchange(at, &[], true)?;
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
            round = self.round(round, true)?;
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
            self.monitor.fail(self.monitor.error(self.monitor.rank, e.to_string(), e.exit_code()), false);
        }
    }

    fn lost(&self) -> Option<Error> {
        self.monitor.failed()
    }

    fn when_lost(&self, f: Callback) {
        self.monitor.when_failed(f);
    }
}

/// Dropping a rank without [`Processes::leave`] aborts the group.
impl Drop for Processes {
    fn drop(&mut self) {
        let transport = self.transport().take();
        if let Some(transport) = transport {
            let why = if std::thread::panicking() { "it panicked" } else { "it has ended" };
            self.monitor.fail(self.monitor.error(self.monitor.rank, why.into(), ExitCode::LostRank), false);
            // Finalizing MPI would block until all ranks do the same.
            std::mem::forget(transport);
        }
    }
}
