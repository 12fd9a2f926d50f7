//! Ranks as threads of one process; tensors are shared, not copied.
//!
//! Each rank runs on a dedicated thread, never on the compute pool, so a rank blocked in a collective does
//! not stall computation.

use super::callbacks::{Callback, call_all};
use super::comm::{At, Comm, Error};
use super::sum;
use ft_base::Result;
use ft_base::error::ExitCode;
use ft_kernels::Tensor;
use ft_kernels::cpu::{in_place, view};
use ft_kernels::crossing::Arrival;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Placeholder before the first collective.
const START: At = At { what: "none yet", unit: None };

/// Contribution of a rank to a collective.
enum Contribution {
    Bytes(Vec<u8>),
    Tensor(Option<Tensor>),
}

struct State {
    /// Contributions to the current collective, by rank.
    contributions: Vec<Option<Contribution>>,
    /// Current or last collective, by rank.
    at: Vec<At>,
    /// Number of completed collectives.
    over: u64,
    /// Contributions to the last completed collective, until every rank has read them.
    last: Option<Arc<Vec<Contribution>>>,
    taken: usize,
    failed: Option<Error>,
    /// Callbacks for an abort of the group.
    when_lost: Vec<Callback>,
}

struct Group {
    world: usize,
    timeout: Duration,
    host: String,
    state: Mutex<State>,
    wake: Condvar,
}

/// A rank running as a thread.
pub struct Threads {
    group: Arc<Group>,
    rank: usize,
    received: AtomicU64,
}

/// Creates a group of `world` ranks, one per thread. A collective fails after `timeout`.
pub fn group(world: usize, timeout: Duration) -> Vec<Threads> {
    let group = Arc::new(Group::new(world, timeout));
    (0..world).map(|rank| Threads::new(&group, rank)).collect()
}

/// A group of one.
pub fn alone() -> Threads {
    Threads::new(&Arc::new(Group::new(1, Duration::MAX)), 0)
}

impl Group {
    fn new(world: usize, timeout: Duration) -> Self {
        let state = State {
            contributions: (0..world).map(|_| None).collect(),
            at: vec![START; world],
            over: 0,
            last: None,
            taken: 0,
            failed: None,
            when_lost: Vec::new(),
        };
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Self { world, timeout, host, state: Mutex::new(state), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while holding this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, rank: usize, at: At, why: String, code: ExitCode) -> Error {
        Error { rank, world: self.world, host: self.host.clone(), at, why, code, hangs: false }
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
        Self { group: Arc::clone(group), rank, received: AtomicU64::new(0) }
    }

    /// Contributes `mine`, waits for all ranks and returns all contributions.
    fn exchange(
        &self,
        at: At,
        mine: Contribution,
        timeout: Option<Duration>,
    ) -> Result<Arc<Vec<Contribution>>, Error> {
        let g = &*self.group;
        let mut s = g.lock();
        if let Some(e) = &s.failed {
            return Err(e.clone());
        }
        s.at[self.rank] = at;
        s.contributions[self.rank] = Some(mine);
        let round = s.over;
        if s.contributions.iter().all(Option::is_some) {
            if let Some(other) = s.at.iter().position(|a| *a != at) {
                let why =
                    format!("it is in another collective than rank {}, in {at}: a bug in ft", self.rank);
                let e = g.error(other, s.at[other], why, ExitCode::Internal);
                return Err(g.fail(&mut s, e));
            }
            let all: Vec<Contribution> = s.contributions.iter_mut().filter_map(Option::take).collect();
            s.last = Some(Arc::new(all));
            s.taken = 0;
            s.over += 1;
            g.wake.notify_all();
        }
        let end = timeout.and_then(|t| Instant::now().checked_add(t));
        while s.over == round {
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
        let Some(all) = s.last.clone() else {
            let e =
                g.error(self.rank, at, "a collective gave nothing: a bug in ft".into(), ExitCode::Internal);
            return Err(g.fail(&mut s, e));
        };
        s.taken += 1;
        if s.taken == g.world {
            s.last = None;
        }
        Ok(all)
    }

    /// Aborts the group; blames the first rank not yet in the collective.
    fn hung(&self, s: &mut State, at: At) -> Error {
        let g = &*self.group;
        let late = s.contributions.iter().position(Option::is_none).unwrap_or(self.rank);
        let why = format!(
            "it has not come to {at} within {} s\n  hint: parallel.timeout gives it longer",
            g.timeout.as_secs_f64()
        );
        let e = Error { hangs: true, ..g.error(late, s.at[late], why, ExitCode::LostRank) };
        g.fail(s, e)
    }

    /// Contributes a tensor and runs `f` on the contributions of all ranks. On return every peer has
    /// released `mine`.
    fn with_tensors(
        &self,
        at: At,
        mine: Option<Tensor>,
        f: impl FnOnce(&[Contribution]) -> Result<()>,
    ) -> Result<()> {
        let timeout = Some(self.group.timeout);
        let all = self.exchange(at, Contribution::Tensor(mine.clone()), timeout)?;
        f(&all)?;
        drop(all);
        self.exchange(at, Contribution::Bytes(Vec::new()), timeout)?;
        Ok(())
    }

    fn count(&self, bytes: usize) {
        self.received.fetch_add(bytes as u64, Relaxed);
    }
}

/// The contributed tensors with their ranks.
fn tensors(all: &[Contribution]) -> impl Iterator<Item = (usize, &Tensor)> {
    all.iter().enumerate().filter_map(|(r, g)| match g {
        Contribution::Tensor(Some(t)) => Some((r, t)),
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

    fn all_gather_bytes(&self, at: At, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        let timeout = timed.then_some(self.group.timeout);
        let all = self.exchange(at, Contribution::Bytes(mine.to_vec()), timeout)?;
        let bytes = |c: &Contribution| if let Contribution::Bytes(b) = c { b.clone() } else { Vec::new() };
        Ok(all.iter().map(bytes).collect())
    }

    fn reduce_scatter(
        &self,
        at: At,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<Arrival> {
        self.with_tensors(at, part, |all| {
            if range.is_empty() {
                return Ok(());
            }
            let size = size_of::<f32>() * range.len();
            self.count(size * (self.group.world - 1));
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
        Ok(Arrival::over())
    }

    fn all_gather(&self, at: At, mine: Tensor, ranges: &[Range<usize>], to: &Tensor) -> Result<Arrival> {
        self.with_tensors(at, Some(mine), |all| {
            for (rank, part) in tensors(all) {
                let Some(range) = ranges.get(rank).filter(|r| !r.is_empty()) else { continue };
                to.slice_set(part, 0, range.start)?;
                if rank != self.rank {
                    self.count(part.dtype().size_in_bytes() * range.len());
                }
            }
            Ok(())
        })?;
        Ok(Arrival::over())
    }

    fn received(&self) -> u64 {
        self.received.load(Relaxed)
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
    const SUM: At = At { what: "a test", unit: Some(3) };

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
                Some(c.all_gather_bytes(At::all("the next"), &[], true).expect_err("one is missing"))
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
        let errors = each(3, Duration::from_millis(50), |c| {
            c.all_gather_bytes(SUM, &[], true).expect("all are there");
            let e = (c.rank() != 1).then(|| c.reduce_scatter(At::all("the next"), None, 0..0, &none()).err());
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

    #[test]
    fn ranks_in_different_collectives_do_not_go_on() {
        let errors = each(2, LONG, |c| c.all_gather_bytes(At::unit("a test", c.rank()), &[], true).err());
        assert!(errors.iter().all(|e| e.as_ref().is_some_and(|e| e.exit_code() == ExitCode::Internal)));
    }
}
