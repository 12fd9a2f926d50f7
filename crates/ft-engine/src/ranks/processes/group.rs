//! The collectives of a process.

use super::monitor::Monitor;
use super::transport::{Round, Transport};
use crate::ranks::callbacks::Callback;
use crate::ranks::comm::{Among, Comm, Error, PeerTensor, Received, ReduceScatterHeader, words_of};
use crate::ranks::sum;
use ft_base::Result;
use ft_base::error::ExitCode;
use ft_kernels::cpu::{in_place, view};
use ft_kernels::crossing::PendingTransfer;
use ft_kernels::{Tensor, bytes};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Upper bound on values (4 bytes) sent by a rank to all peers, and received, at once.
pub const ROUND: usize = 512 * 1024;
/// Bytes of a message in the first round of a collective.
const INLINE: usize = 240;
/// Bytes of a message in each later round. MPI counts them in 31 bits.
const PIECE: usize = 4 * ROUND;

/// A rank running as a process.
pub struct Processes {
    pub(super) monitor: Arc<Monitor>,
    /// `None` after this rank has left.
    transport: Mutex<Option<Transport>>,
    received: Received,
}

impl Processes {
    pub(super) fn new(monitor: Arc<Monitor>, transport: Transport) -> Self {
        let transport = Mutex::new(Some(transport));
        Self { monitor, transport, received: Received::default() }
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

    /// Enters a collective of members with a message; returns the messages by member once all have arrived.
    pub(super) fn exchange(&self, at: Among, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>, Error> {
        let (members, at) = at;
        let (rank, world) = (self.monitor.rank, self.monitor.world);
        self.monitor.enter(members, at)?;
        let mut hasher = DefaultHasher::new();
        at.to_string().hash(&mut hasher);
        let key = hasher.finish();
        let (inline, rest) = mine.split_at(mine.len().min(INLINE));
        let mut first = [key, mine.len() as u64].map(u64::to_ne_bytes).concat();
        let header = first.len();
        first.extend(inline);
        first.resize(header + INLINE, 0);
        let others = self.others(members);
        let back = self.round(Round::all_to_all(world, others.clone(), first, |_| header + INLINE), timed)?;
        let mut all = vec![mine.to_vec(); world];
        let mut lens = vec![0; world];
        for other in &others {
            let (words, inline) = back.into[*other].split_at(header);
            let mut words = words_of(words);
            if words.next() != Some(key) {
                let why = format!("it is in another collective than rank {rank}, in {at}: a bug in ft");
                let e = self.monitor.error(*other, why, ExitCode::Internal);
                self.monitor.fail(e.clone(), false);
                return Err(e);
            }
            lens[*other] = words.next().unwrap_or_default() as usize;
            all[*other] = inline[..lens[*other].min(INLINE)].to_vec();
        }
        let longest = lens.iter().copied().fold(mine.len(), usize::max).saturating_sub(INLINE);
        for first in (0..longest).step_by(PIECE) {
            let piece = |len: usize| len.saturating_sub(INLINE + first).min(PIECE);
            let own = rest.iter().skip(first).take(PIECE).copied().collect();
            let round = Round::all_to_all(world, others.clone(), own, |r| piece(lens[r]));
            let back = self.round(round, timed)?;
            all.iter_mut().zip(&back.into).for_each(|(message, bytes)| message.extend(bytes));
        }
        Ok(members.iter().map(|r| std::mem::take(&mut all[*r])).collect())
    }

    /// Members other than this rank.
    fn others(&self, members: &[usize]) -> Vec<usize> {
        members.iter().copied().filter(|r| *r != self.monitor.rank).collect()
    }

    /// Values of each of `members` in one round.
    fn piece(&self, members: &[usize]) -> usize {
        (ROUND / members.len().max(1)).max(1024)
    }

    /// Leaves the group after all work is done and finalizes MPI. Every rank must call it.
    pub fn leave(self) {
        self.monitor.leave();
        let transport = self.transport().take();
        transport.into_iter().for_each(Transport::end);
    }

    /// Sets the number of pipeline stages. Errors then name the stage of a lost rank.
    pub fn know_stages(&self, stages: usize) {
        self.monitor.know_stages(stages);
    }

    /// After an error: waits until rank 0 has reported it. Returns whether this rank must report it,
    /// because rank 0 is the lost one.
    pub fn must_report(&self) -> bool {
        self.monitor.linger()
    }
}

impl Comm for Processes {
    fn rank(&self) -> usize {
        self.monitor.rank
    }

    fn world(&self) -> usize {
        self.monitor.world
    }

    fn all_gather_bytes_among(&self, at: Among, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        Ok(self.exchange(at, mine, timed)?)
    }

    fn reduce_scatter_among(
        &self,
        (members, at): Among,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        let (rank, world, piece) = (self.monitor.rank, self.monitor.world, self.piece(members));
        let own = ReduceScatterHeader { gives: part.is_some(), range: range.clone() };
        let said = own.all_gather(self, (members, at))?;
        self.received.count(at, size_of::<f32>() * range.len() * (members.len() - 1));
        let most = said.iter().map(|s| s.range.len()).max().unwrap_or(0);
        let mut round = Round::new(world, self.others(members));
        for first in (0..most).step_by(piece) {
            let cut = |r: &Range<usize>| (r.start + first).min(r.end)..(r.start + first + piece).min(r.end);
            let here = cut(&range);
            for (other, said) in members.iter().zip(&said).filter(|(r, _)| **r != rank) {
                if let Some(part) = &part {
                    bytes::put(part, cut(&said.range), &mut round.out[*other])?;
                }
                let comes = if said.gives { here.len() } else { 0 };
                round.into[*other].resize(size_of::<f32>() * comes, 0);
            }
            round = self.round(round, true)?;
            if !here.is_empty() {
                let own = part.as_ref().map(|p| p.narrow(0, here.start, here.len())).transpose()?;
                let own = own.as_ref().map(view::<f32>).transpose()?;
                in_place::<f32>("a sum over ranks", to, |to| {
                    let to = &mut to[first..first + here.len()];
                    for other in members {
                        match &own {
                            Some(own) if *other == rank => sum::add(to, own),
                            _ => sum::add_bytes(to, &round.into[*other]),
                        }
                    }
                    Ok(())
                })?;
            }
            round.clear();
        }
        Ok(PendingTransfer::over())
    }

    fn all_gather_among(
        &self,
        (members, at): Among,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        let (rank, world) = (self.monitor.rank, self.monitor.world);
        self.exchange((members, at), &[], true)?;
        let (size, most) = (to.dtype().size_in_bytes(), ranges.iter().map(Range::len).max().unwrap_or(0));
        let by_rank = || members.iter().copied().zip(ranges);
        let own = by_rank().find(|(r, _)| *r == rank).map_or(0..0, |(_, range)| range.clone());
        if !own.is_empty() {
            to.slice_set(&mine, 0, own.start)?;
        }
        // the same number of bytes per round as a sum
        let piece = (self.piece(members) * size_of::<f32>() / size).max(1);
        let mut round = Round::new(world, self.others(members));
        for first in (0..most).step_by(piece) {
            let cut = |len: usize| first.min(len)..(first + piece).min(len);
            bytes::put(&mine, cut(own.len()), &mut round.all)?;
            for (other, range) in by_rank().filter(|(r, _)| *r != rank) {
                round.into[other].resize(size * cut(range.len()).len(), 0);
            }
            round = self.round(round, true)?;
            for (other, range) in by_rank().filter(|(r, _)| *r != rank) {
                bytes::set(to, range.start + first, &round.into[other])?;
                self.received.count(at, round.into[other].len());
            }
            round.clear();
        }
        Ok(PendingTransfer::over())
    }

    fn exchange_among(&self, at: Among, out: &[PeerTensor], into: &[PeerTensor]) -> Result<PendingTransfer> {
        self.exchange(at, &[], true)?;
        let (members, at) = at;
        let bytes = size_of::<f32>() * self.piece(members);
        // Values of a piece in one round, the same on both sides.
        let part = |t: &Tensor| (bytes / t.dtype().size_in_bytes()).max(1);
        let rounds = |all: &[PeerTensor], peer: usize| -> usize {
            all.iter().filter(|(r, _)| *r == peer).map(|(_, t)| t.elem_count().div_ceil(part(t))).sum()
        };
        // The part that travels in round `i` between this rank and a peer.
        let at_round = |all: &[PeerTensor], peer: usize, mut i: usize| {
            for (_, t) in all.iter().filter(|(r, _)| *r == peer) {
                let count = t.elem_count().div_ceil(part(t));
                if i < count {
                    return Some((t.clone(), i * part(t)..((i + 1) * part(t)).min(t.elem_count())));
                }
                i -= count;
            }
            None
        };
        let others = self.others(members);
        let most = others.iter().map(|r| rounds(out, *r).max(rounds(into, *r))).max().unwrap_or(0);
        let mut round = Round::new(self.monitor.world, Vec::new());
        for i in 0..most {
            for other in &others {
                if let Some((t, values)) = at_round(out, *other, i) {
                    bytes::put(&t.flatten_all()?, values, &mut round.out[*other])?;
                }
                let comes = at_round(into, *other, i).map_or(0, |(t, v)| t.dtype().size_in_bytes() * v.len());
                round.into[*other].resize(comes, 0);
            }
            round = self.round(round, true)?;
            for other in &others {
                if let Some((t, values)) = at_round(into, *other, i) {
                    bytes::set(&t, values.start, &round.into[*other])?;
                    self.received.count(at, round.into[*other].len());
                }
            }
            round.clear();
        }
        Ok(PendingTransfer::over())
    }

    fn received(&self) -> &Received {
        &self.received
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

#[cfg(test)]
mod tests {
    use super::super::tcp;
    use super::*;
    use crate::ranks::comm::CollectiveId;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// Messages arrive whole, in as many rounds as the longest needs.
    #[test]
    fn messages_of_any_length_arrive() -> anyhow::Result<()> {
        const AT: CollectiveId = CollectiveId::all("messages");
        const LENS: [[usize; 2]; 4] =
            [[0, 3], [INLINE, INLINE + 1], [2 * PIECE + 7, 5], [PIECE + INLINE, 3 * PIECE]];
        let message =
            |rank: usize, len: usize| -> Vec<u8> { (0..len).map(|i| (i % 251 + rank) as u8).collect() };
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let other = TcpStream::connect(listener.local_addr()?)?;
        let lines = [vec![None, Some(listener.accept()?.0)], vec![Some(other), None]];
        let ranks: Vec<_> = lines.into_iter().enumerate().collect();
        std::thread::scope(|scope| {
            let run = |(rank, lines): (usize, Vec<Option<TcpStream>>)| -> anyhow::Result<()> {
                let monitor = Arc::new(Monitor::new((rank, 2), Duration::from_secs(600)));
                let known = Arc::clone(&monitor);
                let transport = tcp::start(lines, move |round| known.done(round), |_, _| ())?;
                let group = Processes::new(monitor, transport);
                for lens in LENS {
                    let all = group.exchange((&[0, 1], AT), &message(rank, lens[rank]), false)?;
                    anyhow::ensure!(all == [0, 1].map(|r| message(r, lens[r])), "{lens:?}");
                }
                Ok(())
            };
            let both: Vec<_> = ranks.into_iter().map(|of| scope.spawn(move || run(of))).collect();
            both.into_iter().try_for_each(|rank| rank.join().expect("no panic"))
        })
    }
}
