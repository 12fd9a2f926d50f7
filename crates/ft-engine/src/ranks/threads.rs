//! Ranks as threads of one process; tensors are shared, not copied.
//!
//! Each rank runs on a dedicated thread, never on the compute pool, so a rank blocked in a collective does
//! not stall computation. Each ordered pair of ranks has a mailbox; a collective waits for its members only.

use super::callbacks::{Callback, call_all};
use super::comm::{Among, CollectiveId, Comm, Error, PeerTensor, Received};
use super::mesh::Mesh;
use super::sum;
use ft_base::Result;
use ft_base::error::ExitCode;
use ft_kernels::Tensor;
use ft_kernels::cpu::{in_place, view};
use ft_kernels::crossing::PendingTransfer;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Placeholder before the first collective.
const START: CollectiveId = CollectiveId::all("none yet");

/// A message from one rank to another.
#[derive(Clone)]
enum Message {
    Bytes(Vec<u8>),
    Tensor(Option<Tensor>),
}

struct State {
    /// Messages given and not yet taken, by ordered pair of ranks: from, then to.
    boxes: Vec<VecDeque<(CollectiveId, Message)>>,
    /// Current or last collective, by rank.
    at: Vec<CollectiveId>,
    /// Ranks that a rank waits for.
    waits: Vec<Vec<usize>>,
    failed: Option<Error>,
    /// Callbacks for an abort of the group.
    when_lost: Vec<Callback>,
}

struct Group {
    world: usize,
    /// Number of pipeline stages.
    stages: usize,
    timeout: Duration,
    host: String,
    state: Mutex<State>,
    wake: Condvar,
}

/// A rank running as a thread.
pub struct Threads {
    group: Arc<Group>,
    rank: usize,
    received: Received,
}

/// Creates a group of `world` ranks, one per thread. A collective fails after `timeout`.
pub fn group(world: usize, timeout: Duration) -> Vec<Threads> {
    group_of(&Mesh { data: world, ..Mesh::ONE }, timeout)
}

/// As [`group`], of the ranks of a mesh.
pub fn group_of(mesh: &Mesh, timeout: Duration) -> Vec<Threads> {
    let group = Arc::new(Group::new(mesh, timeout));
    (0..mesh.ranks()).map(|rank| Threads::new(&group, rank)).collect()
}

/// A group of one.
pub fn alone() -> Threads {
    Threads::new(&Arc::new(Group::new(&Mesh::ONE, Duration::MAX)), 0)
}

impl Group {
    fn new(mesh: &Mesh, timeout: Duration) -> Self {
        let world = mesh.ranks();
        let state = State {
            boxes: (0..world * world).map(|_| VecDeque::new()).collect(),
            at: vec![START; world],
            waits: vec![Vec::new(); world],
            failed: None,
            when_lost: Vec::new(),
        };
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { world, stages: mesh.pipeline, timeout, host, state: Mutex::new(state), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while holding this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, rank: usize, at: CollectiveId, why: String, code: ExitCode) -> Error {
        Error::new((rank, self.world), self.host.clone(), at, why, code).with_stage_of(self.stages)
    }

    /// Aborts the group; returns the first error recorded.
    fn fail(&self, s: &mut State, e: Error) -> Error {
        let e = s.failed.get_or_insert(e).clone();
        self.wake.notify_all();
        call_all(std::mem::take(&mut s.when_lost));
        e
    }
}

impl Threads {
    fn new(group: &Arc<Group>, rank: usize) -> Self {
        Self { group: Arc::clone(group), rank, received: Received::default() }
    }

    /// Puts something into the box of each peer. Never waits.
    fn give(&self, at: CollectiveId, all: impl IntoIterator<Item = (usize, Message)>) -> Result<(), Error> {
        let g = &*self.group;
        let mut s = g.lock();
        if let Some(e) = &s.failed {
            return Err(e.clone());
        }
        s.at[self.rank] = at;
        for (to, given) in all {
            s.boxes[self.rank * g.world + to].push_back((at, given));
        }
        g.wake.notify_all();
        Ok(())
    }

    /// Waits for something from each of `from`, in this order.
    fn take(
        &self,
        at: CollectiveId,
        from: &[usize],
        timeout: Option<Duration>,
    ) -> Result<Vec<Message>, Error> {
        let g = &*self.group;
        let end = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut s = g.lock();
        s.waits[self.rank] = from.to_vec();
        loop {
            let missing = s.missing(self.rank, g.world);
            // If all have given, their messages are taken, even after a failure since.
            if missing.is_none() {
                break;
            }
            if let Some(e) = &s.failed {
                return Err(e.clone());
            }
            s = match end {
                None => g.wake.wait(s).unwrap_or_else(PoisonError::into_inner),
                Some(end) => {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(self.hung(&mut s, at));
                    }
                    g.wake.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        s.waits[self.rank].clear();
        let mut all = Vec::with_capacity(from.len());
        for other in from {
            let Some((theirs, given)) = s.boxes[other * g.world + self.rank].pop_front() else { continue };
            if theirs != at {
                let why =
                    format!("it is in another collective than rank {}, in {at}: a bug in ft", self.rank);
                let e = g.error(*other, theirs, why, ExitCode::Internal);
                return Err(g.fail(&mut s, e));
            }
            all.push(given);
        }
        Ok(all)
    }

    /// Aborts the group; blames the first rank not yet in the collective, or the last of a chain of ranks waiting for
    /// one another.
    fn hung(&self, s: &mut State, at: CollectiveId) -> Error {
        let g = &*self.group;
        let (mut late, mut at) = (s.missing(self.rank, g.world).unwrap_or(self.rank), at);
        for _ in 0..g.world {
            if let Some(next) = s.missing(late, g.world) {
                (late, at) = (next, s.at[late]);
            }
        }
        let why = format!(
            "it has not come to {at} within {} s\n  hint: parallel.timeout gives it longer",
            g.timeout.as_secs_f64()
        );
        let e = Error { hangs: true, ..g.error(late, s.at[late], why, ExitCode::LostRank) };
        g.fail(s, e)
    }

    /// Gives `mine` to the other members and waits for theirs; returns all by member.
    fn meet(&self, at: Among, mine: Message, timeout: Option<Duration>) -> Result<Vec<Message>, Error> {
        let (members, at) = at;
        let others: Vec<usize> = members.iter().copied().filter(|r| *r != self.rank).collect();
        self.give(at, others.iter().map(|r| (*r, mine.clone())))?;
        let mut all = self.take(at, &others, timeout)?;
        let me = members.iter().position(|r| *r == self.rank).unwrap_or(all.len());
        all.insert(me.min(all.len()), mine);
        Ok(all)
    }

    /// Contributes a tensor and runs `f` on the tensors of all members. On return every member has
    /// released `mine`.
    fn with_tensors(
        &self,
        at: Among,
        mine: Option<Tensor>,
        f: impl FnOnce(&[Message]) -> Result<()>,
    ) -> Result<()> {
        let timeout = Some(self.group.timeout);
        let all = self.meet(at, Message::Tensor(mine.clone()), timeout)?;
        f(&all)?;
        drop(all);
        self.meet(at, Message::Bytes(Vec::new()), timeout)?;
        // Freed by the allocating thread: memory is counted by rank.
        drop(mine);
        Ok(())
    }
}

impl State {
    /// The first rank awaited by `rank` without a message for it.
    fn missing(&self, rank: usize, world: usize) -> Option<usize> {
        self.waits[rank].iter().copied().find(|other| self.boxes[other * world + rank].is_empty())
    }
}

/// The contributed tensors with their members.
fn tensors(all: &[Message]) -> impl Iterator<Item = (usize, &Tensor)> {
    all.iter().enumerate().filter_map(|(r, g)| match g {
        Message::Tensor(Some(t)) => Some((r, t)),
        _ => None,
    })
}

impl Comm for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.group.world
    }

    fn all_gather_bytes_among(&self, at: Among, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        let timeout = timed.then_some(self.group.timeout);
        let all = self.meet(at, Message::Bytes(mine.to_vec()), timeout)?;
        let bytes = |c: Message| if let Message::Bytes(b) = c { b } else { Vec::new() };
        Ok(all.into_iter().map(bytes).collect())
    }

    fn reduce_scatter_among(
        &self,
        (members, at): Among,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        self.with_tensors((members, at), part, |all| {
            if range.is_empty() {
                return Ok(());
            }
            let size = size_of::<f32>() * range.len();
            self.received.count(at, size * (members.len() - 1));
            for (_, part) in tensors(all) {
                let part = part.narrow(0, range.start, range.len())?;
                let x = view::<f32>(&part)?;
                in_place::<f32>("a sum over ranks", to, |to| {
                    sum::add(to, &x);
                    Ok(())
                })?;
            }
            Ok(())
        })?;
        Ok(PendingTransfer::over())
    }

    fn all_gather_among(
        &self,
        (members, at): Among,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        self.with_tensors((members, at), Some(mine), |all| {
            for (member, part) in tensors(all) {
                let Some(range) = ranges.get(member).filter(|r| !r.is_empty()) else { continue };
                to.slice_set(part, 0, range.start)?;
                if members[member] != self.rank {
                    self.received.count(at, part.dtype().size_in_bytes() * range.len());
                }
            }
            Ok(())
        })?;
        Ok(PendingTransfer::over())
    }

    fn exchange_among(&self, at: Among, out: &[PeerTensor], into: &[PeerTensor]) -> Result<PendingTransfer> {
        let (_, at) = at;
        let timeout = Some(self.group.timeout);
        self.give(at, out.iter().map(|(to, t)| (*to, Message::Tensor(Some(t.clone())))))?;
        for (from, to) in into {
            let given = self.take(at, &[*from], timeout)?;
            for (_, t) in tensors(&given) {
                to.slice_set(t, 0, 0)?;
                self.received.count(at, t.dtype().size_in_bytes() * t.elem_count());
            }
        }
        // No rank goes on before its tensors have been copied.
        let peers = |all: &[PeerTensor]| all.iter().map(|(peer, _)| *peer).collect::<BTreeSet<usize>>();
        self.give(at, peers(into).into_iter().map(|from| (from, Message::Bytes(Vec::new()))))?;
        self.take(at, &peers(out).into_iter().collect::<Vec<_>>(), timeout)?;
        Ok(PendingTransfer::over())
    }

    fn received(&self) -> &Received {
        &self.received
    }

    fn fail(&self, e: &ft_base::Error) {
        // An abort caused by another rank is already recorded.
        if e.of::<Error>().is_none() {
            let mut s = self.group.lock();
            let at = s.at[self.rank];
            let e = self.group.error(self.rank, at, e.to_string(), e.exit_code());
            self.group.fail(&mut s, e);
        }
    }

    fn lost(&self) -> Option<Error> {
        self.group.lock().failed.clone()
    }

    fn when_lost(&self, f: Callback) {
        let mut s = self.group.lock();
        s.when_lost.push(f);
        if s.failed.is_some() {
            call_all(std::mem::take(&mut s.when_lost));
        }
    }
}

/// Dropping a rank aborts the group for ranks still in a collective.
impl Drop for Threads {
    fn drop(&mut self) {
        let why = if std::thread::panicking() { "it panicked" } else { "it has ended" };
        let mut s = self.group.lock();
        let e = self.group.error(self.rank, s.at[self.rank], why.into(), ExitCode::LostRank);
        self.group.fail(&mut s, e);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::{Axis, Group, Mesh};
    use candle_core::{DType, Device};
    use ft_kernels::check::{randn, values};

    /// Runs `f` on each rank of a group and returns the results.
    fn each<T: Send>(world: usize, timeout: Duration, f: impl Fn(Threads) -> T + Sync) -> Vec<T> {
        let f = &f;
        std::thread::scope(|s| {
            let started: Vec<_> = group(world, timeout).into_iter().map(|c| s.spawn(move || f(c))).collect();
            started.into_iter().filter_map(|t| t.join().ok()).collect()
        })
    }

    const LONG: Duration = Duration::from_secs(100);
    const SUM: CollectiveId = CollectiveId::unit("a test", 3);

    #[test]
    fn sums_are_in_rank_order_and_parts_come_where_they_belong() -> Result<()> {
        for world in [1, 2, 3, 5] {
            let n = 1003;
            let part = |r: usize| randn(r as u64, n, DType::F32);
            // rank 1 contributes no part
            let mut want = values(&part(7)?).iter().map(|x| *x as f32).collect::<Vec<f32>>();
            for r in (0..world).filter(|r| *r != 1) {
                want.iter_mut().zip(values(&part(r)?)).for_each(|(w, x)| *w += x as f32);
            }
            let ranges: Vec<_> = (0..world).map(|r| n * r / world..n * (r + 1) / world).collect();
            let got = each(world, LONG, |c| -> Result<Vec<f64>> {
                let (r, mine) = (c.rank(), ranges[c.rank()].clone());
                let to = part(7)?.narrow(0, mine.start, mine.len())?.real()?.force_contiguous()?.into();
                c.reduce_scatter(SUM, (r != 1).then(|| part(r)).transpose()?, mine, &to)?;
                let all = Tensor::zeros(n, DType::F32, &Device::Cpu)?;
                c.all_gather(SUM, to, &ranges, &all)?;
                let pairs = (&c as &dyn Comm).all_gather_object(SUM, &(r, "x".repeat(r)))?;
                assert_eq!(pairs, (0..world).map(|r| (r, "x".repeat(r))).collect::<Vec<_>>());
                Ok(values(&all))
            });
            assert_eq!(got.len(), world);
            for g in got {
                assert!(g? == want.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), "{world}");
            }
        }
        Ok(())
    }

    #[derive(Debug, thiserror::Error)]
    #[error("no room")]
    struct NoRoom;

    impl ft_base::error::Failure for NoRoom {
        fn exit_code(&self) -> ExitCode {
            ExitCode::DoesNotFit
        }
    }

    /// Failure, exit and panic of a rank release the other ranks, with an error
    /// naming the lost rank and collective.
    #[test]
    fn a_rank_that_is_lost_releases_the_others() {
        type Goes = fn(&Threads);
        let lost: [(&str, ExitCode, Goes); 3] = [
            ("no room", ExitCode::DoesNotFit, |c| c.fail(&NoRoom.into())),
            ("it has ended", ExitCode::LostRank, |_| ()),
            ("it panicked", ExitCode::LostRank, |_| std::panic::resume_unwind(Box::new(()))),
        ];
        for (why, code, goes) in lost {
            let errors = each(3, LONG, |c| {
                c.all_gather_bytes(SUM, &[], true).expect("all are there");
                if c.rank() == 2 {
                    goes(&c);
                    return None;
                }
                Some(
                    c.all_gather_bytes(CollectiveId::all("the next"), &[], true).expect_err("one is missing"),
                )
            });
            let errors: Vec<_> = errors.into_iter().flatten().collect();
            assert_eq!(errors.len(), 2, "{why}");
            for e in errors {
                let e = e.of::<Error>().expect("of a rank");
                assert_eq!((e.rank, e.code, e.at), (2, code, SUM), "{e}");
                assert!(!e.host.is_empty() && e.to_string().contains(why), "{e}");
            }
        }
    }

    #[test]
    fn a_rank_that_hangs_is_not_waited_for() {
        let late = std::sync::Barrier::new(3);
        // Ranks that wait must start to wait within this time of one another.
        let errors = each(3, Duration::from_secs(5), |c| {
            c.all_gather_bytes(SUM, &[], false).expect("all are there");
            let e = (c.rank() != 1)
                .then(|| c.reduce_scatter(CollectiveId::all("the next"), None, 0..0, &none()).err());
            late.wait();
            e.flatten()
        });
        let errors: Vec<_> = errors.into_iter().flatten().collect();
        assert_eq!(errors.len(), 2);
        for e in errors {
            let e = e.of::<Error>().expect("of a rank");
            assert_eq!((e.rank, e.code, e.at, e.hangs), (1, ExitCode::LostRank, SUM, true), "{e}");
            assert!(e.to_string().contains("parallel.timeout"), "{e}");
        }
    }

    fn none() -> Tensor {
        Tensor::zeros(0, DType::F32, &Device::Cpu).expect("a tensor")
    }

    /// Two groups of ranks take steps independently under load. Rank 3 alone ends only after the end of the other
    /// group.
    #[test]
    fn two_groups_never_wait_for_one_another() {
        let mesh = Mesh { data: 2, context: 2, ..Mesh::ONE };
        let over = std::sync::Barrier::new(2);
        let sums = each(4, LONG, |c| {
            let own = Group::new(&c, &mesh, Axis::Context);
            if c.rank() == 3 {
                over.wait();
            }
            let mut sum = 0;
            for turn in 0..1000_usize {
                let all = own.all_gather_bytes(SUM, &[(c.rank() + turn) as u8], true).expect("all are there");
                sum += all.iter().map(|b| usize::from(b[0])).sum::<usize>();
            }
            if c.rank() == 0 {
                over.wait();
            }
            c.all_gather_bytes(SUM, &[], true).expect("all are there");
            sum
        });
        assert_eq!((sums[0], sums[2]), (sums[1], sums[3]));
    }

    /// Every rank sends each of two peers a tensor of its own length; tensors of several ranks come in order.
    #[test]
    fn exchanged_tensors_arrive_at_their_ranks_in_order() -> Result<()> {
        let sent = |from: usize, to: usize| randn((7 * from + to) as u64, 5 + from + 2 * to, DType::F32);
        let got = each(3, LONG, |c| -> Result<bool> {
            let (me, mut whole) = (c.rank(), true);
            for _ in 0..3 {
                let others = || (0..3).filter(|r| *r != me && (me, *r) != (1, 2) && (*r, me) != (1, 2));
                let out = others().map(|r| Ok((r, sent(me, r)?))).collect::<Result<Vec<_>>>()?;
                let place = |r: usize| Tensor::zeros(sent(r, me)?.elem_count(), DType::F32, &Device::Cpu);
                let into = others().map(|r| Ok((r, place(r)?))).collect::<Result<Vec<_>>>()?;
                c.exchange(CollectiveId::all("pieces"), &out, &into)?.wait()?;
                for (r, t) in &into {
                    whole &= values(t) == values(&sent(*r, me)?);
                }
                let bytes: usize = into.iter().map(|(_, t)| 4 * t.elem_count()).sum();
                whole &= (c.received().along(Axis::World) as usize).is_multiple_of(bytes);
            }
            c.all_gather_bytes(SUM, &[], true)?;
            Ok(whole)
        });
        assert!(got.into_iter().collect::<Result<Vec<_>>>()?.into_iter().all(|whole| whole));
        Ok(())
    }

    /// The rank that all wait for is named, not one that waits itself.
    #[test]
    fn the_rank_that_all_wait_for_is_named() {
        let all = group(3, LONG);
        let mut s = all[0].group.lock();
        (s.waits[0], s.waits[1], s.at[1]) = (vec![1], vec![2], CollectiveId::all("the next"));
        let e = all[0].hung(&mut s, SUM);
        assert_eq!(
            (e.rank, e.hangs, e.why.contains("it has not come to the next within")),
            (2, true, true),
            "{e}"
        );
    }

    #[test]
    fn ranks_in_different_collectives_do_not_go_on() {
        let errors =
            each(2, LONG, |c| c.all_gather_bytes(CollectiveId::unit("a test", c.rank()), &[], true).err());
        assert!(errors.iter().all(|e| e.as_ref().is_some_and(|e| e.exit_code() == ExitCode::Internal)));
    }
}
