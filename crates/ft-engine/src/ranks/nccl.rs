//! Collectives for tensors on CUDA devices: tensors go through NCCL, objects through the host group.
//!
//! Ranks synchronize over the host before each NCCL call. NCCL therefore never sees a mismatched call, and
//! a rank failing on the host leaves no peer blocked on a device. NCCL operations waiting for a dead process are
//! aborted together with the group. Sums exchange the parts by NCCL and add them in rank order in a CUDA kernel, so
//! results have the same bits at every ZeRO stage.

use super::callbacks::Callback;
use super::comm::{Among, CollectiveId, Comm, Error, PeerTensor, Received, ReduceScatterHeader};
use candle_core::Device;
use ft_base::Result;
use ft_base::error::{ExitCode, Failure};
use ft_kernels::Tensor;
use ft_kernels::crossing::{self, PendingTransfer};
use ft_kernels::cuda::nccl::{self, Handle, Link};
use ft_kernels::sum::Parts;
use ft_kernels::tensor::Real;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between checks of pending NCCL operations.
const CHECK: Duration = Duration::from_millis(100);
/// Time to wait for the host group to name a lost rank before reporting an NCCL error.
const NAMING: Duration = Duration::from_secs(1);
const RENDEZVOUS: CollectiveId = CollectiveId::all("the rendezvous of NCCL");
const END: CollectiveId = CollectiveId::all("the end of NCCL");

/// An error of NCCL.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NcclError(String);

impl Failure for NcclError {
    fn exit_code(&self) -> ExitCode {
        ExitCode::LostRank
    }
}

/// A rank with a CUDA device.
struct Nccl<'a> {
    host: &'a dyn Comm,
    link: Link,
}

/// Implements [`super::on_device`] for CUDA.
pub fn with<R>(
    host: &dyn Comm,
    device: &Device,
    timeout: Duration,
    f: impl FnOnce(&dyn Comm) -> Result<R>,
) -> Result<R> {
    let outcome = meet(host, device, timeout).and_then(|link| {
        let (handle, over) = (link.handle(), Arc::new(AtomicBool::new(false)));
        let aborting = Arc::clone(&handle);
        host.when_lost(Box::new(move || aborting.abort()));
        let looks = look(handle, Arc::clone(&over), timeout)?;
        let all = Nccl { host, link };
        let outcome = f(&all).and_then(|out| all.end().map(|()| out));
        over.store(true, Relaxed);
        if outcome.is_ok() {
            // The process may end next, and with it the driver.
            looks.thread().unpark();
            let _ = looks.join();
        }
        outcome.map_err(|e| all.explain(e))
    });
    // Device errors after an abort are a consequence; report the cause.
    outcome.map_err(|e| host.cause(e))
}

/// Creates the NCCL communicator together with all ranks.
fn meet(host: &dyn Comm, device: &Device, timeout: Duration) -> Result<Link> {
    let id = if host.rank() == 0 { nccl::id()?.to_vec() } else { Vec::new() };
    let all = host.all_gather_bytes(RENDEZVOUS, &id, true)?;
    let Some(id) = all.first().and_then(|id| id.as_slice().try_into().ok()) else {
        return Err(NcclError("the first rank has not said where NCCL meets: a bug in ft".into()).into());
    };
    let place = (host.rank(), host.world());
    let link = Link::join(device, id, place, timeout, &|| host.lost().is_some());
    let link = link.map_err(|e| NcclError(e.to_string()))?;
    // No rank starts before all have joined.
    host.all_gather_bytes(RENDEZVOUS, &[], true)?;
    Ok(link)
}

/// Starts a thread to check pending NCCL operations; the rank's own thread may block on them.
fn look(handle: Arc<Handle>, over: Arc<AtomicBool>, timeout: Duration) -> Result<JoinHandle<()>> {
    let look = move || {
        while !over.load(Relaxed) && !handle.is_aborted() {
            std::thread::park_timeout(CHECK);
            handle.look(timeout);
        }
    };
    let started = std::thread::Builder::new().name("NCCL".into()).stack_size(512 << 10).spawn(look);
    started.map_err(|e| NcclError(format!("a thread cannot start: {e}")).into())
}

impl Nccl<'_> {
    /// Waits until all ranks have received all data.
    fn end(&self) -> Result<()> {
        self.link.synchronize()?;
        self.host.barrier(END)
    }

    /// Returns an NCCL failure as an error of this rank, unless the host group knows the cause.
    fn check(&self) -> Result<()> {
        let Some(why) = self.link.handle().trouble() else { return Ok(()) };
        let end = Instant::now() + NAMING;
        while self.host.lost().is_none() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let e = NcclError(why).into();
        self.host.fail(&e);
        Err(self.host.lost().map_or(e, Into::into))
    }

    /// Replaces an error by the NCCL failure behind it, if any.
    fn explain(&self, e: ft_base::Error) -> ft_base::Error {
        if e.of::<Error>().is_some() { e } else { self.check().err().unwrap_or(e) }
    }

    /// Members other than this rank, with their index.
    fn others(&self, members: &[usize]) -> Vec<(usize, usize)> {
        members.iter().copied().enumerate().filter(|(_, r)| *r != self.rank()).collect()
    }

    /// Maps the error of a started NCCL operation.
    fn begun<T>(&self, outcome: candle_core::Result<T>) -> Result<T> {
        outcome.map_err(|e| self.explain(NcclError(e.to_string()).into()))
    }
}

impl Comm for Nccl<'_> {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn world(&self) -> usize {
        self.host.world()
    }

    fn all_gather_bytes_among(&self, at: Among, mine: &[u8], timed: bool) -> Result<Vec<Vec<u8>>> {
        self.check()?;
        self.host.all_gather_bytes_among(at, mine, timed)
    }

    fn reduce_scatter_among(
        &self,
        (members, at): Among,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        if to.real()?.device().is_cpu() {
            return self.host.reduce_scatter_among((members, at), part, range, to);
        }
        let others = self.others(members);
        let own = ReduceScatterHeader { gives: part.is_some(), range: range.clone() };
        let said = own.all_gather(self, (members, at))?;
        self.received().count(at, size_of::<f32>() * range.len() * others.len());
        let (n, mut out, mut into) = (range.len(), Vec::new(), Vec::new());
        if let Some(part) = &part {
            for (member, r) in others.iter().filter(|(m, _)| !said[*m].range.is_empty()) {
                let theirs = &said[*member].range;
                out.push((*r, part.narrow(0, theirs.start, theirs.len())?.real()?.clone()));
            }
        }
        let givers: Vec<usize> =
            others.iter().filter(|(m, _)| n > 0 && said[*m].gives).map(|(_, r)| *r).collect();
        let came = match givers.len() {
            0 => None,
            k => Some((Tensor::Real(nccl::room(to.real()?.device(), k * n)?), k)),
        };
        for (k, r) in givers.iter().enumerate() {
            if let Some((came, _)) = &came {
                into.push((*r, came.narrow(0, k * n, n)?.real()?.clone()));
            }
        }
        let own = match &part {
            Some(part) if n > 0 => {
                let before = givers.iter().filter(|r| **r < self.rank()).count();
                Some((part.narrow(0, range.start, n)?, before))
            }
            _ => None,
        };
        let parts = Parts { own, others: came };
        if out.is_empty() && into.is_empty() {
            parts.add_to(to)?;
            return Ok(PendingTransfer::over());
        }
        let flight = self.begun(self.link.exchange(&at.to_string(), &pieces(&out), &pieces(&into), None))?;
        Ok(PendingTransfer::of(flight, part.into_iter().collect(), None, Some((parts, to.clone()))))
    }

    fn all_gather_among(
        &self,
        (members, at): Among,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> Result<PendingTransfer> {
        let all = to.real()?;
        if all.device().is_cpu() {
            return self.host.all_gather_among((members, at), mine, ranges, to);
        }
        self.all_gather_bytes_among((members, at), &[], true)?;
        let (others, size) = (self.others(members), all.dtype().size_in_bytes());
        let part = |member: usize| -> candle_core::Result<Option<Real>> {
            let range = ranges.get(member).filter(|range| !range.is_empty());
            range.map(|range| all.narrow(0, range.start, range.len())).transpose()
        };
        // Copy this rank's part into place first, also from host memory.
        let me = members.iter().position(|r| *r == self.rank());
        let own = me.map(part).transpose()?.flatten();
        let crossed = own.as_ref().map(|own| crossing::send(mine.real()?, own)).transpose()?;
        let after = crossed.as_ref().and_then(PendingTransfer::event);
        let comes = others.iter().filter_map(|(m, _)| ranges.get(*m)).map(Range::len);
        self.received().count(at, size * comes.sum::<usize>());
        let n = ranges.first().map_or(0, Range::len);
        let even = n > 0 && ranges.iter().enumerate().all(|(r, range)| *range == (n * r..n * (r + 1)));
        let what = at.to_string();
        let flight = match (&own, even && ranges.len() == self.world()) {
            (Some(own), true) => self.link.all_gather(&what, own, all, after),
            _ => {
                let (mut out, mut into) = (Vec::new(), Vec::new());
                for (member, r) in others {
                    out.extend(own.clone().map(|own| (r, own)));
                    into.extend(part(member)?.map(|part| (r, part)));
                }
                if out.is_empty() && into.is_empty() {
                    return Ok(PendingTransfer::over());
                }
                self.link.exchange(&what, &pieces(&out), &pieces(&into), after)
            }
        };
        let flight = self.begun(flight)?;
        Ok(PendingTransfer::of(flight, vec![mine, to.clone()], crossed, None))
    }

    fn exchange_among(&self, at: Among, out: &[PeerTensor], into: &[PeerTensor]) -> Result<PendingTransfer> {
        let (members, at) = at;
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (all, real) in [(out, &mut from), (into, &mut to)] {
            for (r, t) in all.iter().filter(|(_, t)| t.elem_count() > 0) {
                real.push((*r, t.real()?.clone()));
            }
        }
        self.all_gather_bytes_among((members, at), &[], true)?;
        if from.is_empty() && to.is_empty() {
            return Ok(PendingTransfer::over());
        }
        let comes = to.iter().map(|(_, t)| t.dtype().size_in_bytes() * t.elem_count());
        self.received().count(at, comes.sum());
        let flight = self.begun(self.link.exchange(&at.to_string(), &pieces(&from), &pieces(&to), None))?;
        let retained = out.iter().chain(into).map(|(_, t)| t.clone()).collect();
        Ok(PendingTransfer::of(flight, retained, None, None))
    }

    fn received(&self) -> &Received {
        self.host.received()
    }

    fn fail(&self, e: &ft_base::Error) {
        self.host.fail(e);
    }

    fn lost(&self) -> Option<Error> {
        self.host.lost()
    }

    fn when_lost(&self, f: Callback) {
        self.host.when_lost(f);
    }
}

fn pieces(all: &[(usize, Real)]) -> Vec<(usize, &Real)> {
    all.iter().map(|(r, t)| (*r, t)).collect()
}
