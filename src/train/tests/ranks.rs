//! Lost ranks, and the order of operations of a rank.

use super::events;
use super::out_of_memory::{recipe, train};
use crate::train::ranks::broken::{BREAKS, Breaks};
use crate::train::step::Gather;
use crate::train::{Job, ranks};
use anyhow::{Context as _, Result};
use ft_base::error::ExitCode;
use ft_data::Micro;
use ft_engine::model::grad_accumulator::GradAccumulator;
use ft_engine::model::{Batch, Decoder};
use ft_engine::params::Params;
use ft_engine::ranks::{Among, Comm, PeerTensor, Received, Threads};
use ft_engine::walk::{Hooks, Outline, Visit, Walk};
use ft_hub::Want;
use ft_kernels::Tensor;
use ft_kernels::crossing::PendingTransfer;
use ft_kernels::resizable::held;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

fn no_memory() -> ft_base::Result<()> {
    Err(candle_core::Error::Msg("out of memory".into()).into())
}

fn panics() -> ft_base::Result<()> {
    std::panic::resume_unwind(Box::new("of a test"))
}

fn hangs() -> ft_base::Result<()> {
    loop {
        std::thread::park();
    }
}

/// For any kind of failure, the run ends with an error that names the lost rank and the last collective,
/// and earlier checkpoints are whole.
#[test]
fn a_lost_rank_ends_the_run() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cases: [(&str, Breaks, ExitCode, &str, &[&str]); 3] = [
        ("fails", no_memory, ExitCode::DoesNotFit, "out of memory", &["parallel.zero=3"]),
        ("panics", panics, ExitCode::LostRank, "it panicked", &["parallel.zero=2"]),
        ("hangs", hangs, ExitCode::LostRank, "within 10 s", &["parallel.zero=3", "parallel.timeout=10"]),
    ];
    for (name, breaks, code, says, set) in cases {
        let out = dir.path().join(name);
        BREAKS.lock().ok().context("the list")?.push((out.clone(), 2, 3, breaks));
        let common = ["parallel.data=4", "run.save_every=2", "run.batch_rows=4", "run.micro_rows=1"];
        let set = [&common[..], set].concat();
        let (_, done) = train(dir.path(), name, &set);
        let e = done.err().context("it ran")?;
        assert_eq!(e.exit_code(), code, "{name}: {e}");
        let lost = e.of::<ft_engine::ranks::Error>().with_context(|| format!("{name}: {e}"))?;
        let text = lost.to_string();
        assert_eq!((lost.rank, lost.world), (2, 4), "{text}");
        assert!(!lost.host.is_empty() && text.contains("last collective") && text.contains(says), "{text}");
        assert_eq!((events(&out, "step")?.len(), events(&out, "stopped")?.len()), (3, 1), "{name}");
        assert!(out.join("checkpoints/step-00000002/COMPLETE").is_file() && !out.join("adapter").exists());
    }
    Ok(())
}

/// Operation of a rank.
enum Did {
    /// Begins a visit, followed by another.
    Visit(Visit, Option<Visit>),
    /// Gathers a unit.
    Gather(usize),
}

/// Records the operations of a rank.
struct Traced<'a, T>(&'a T, &'a Mutex<Vec<Did>>);

impl<T> Traced<'_, T> {
    fn note(&self, did: Did) {
        self.1.lock().expect("one thread writes").push(did);
    }
}

impl Comm for Traced<'_, Threads> {
    fn rank(&self) -> usize {
        self.0.rank()
    }
    fn world(&self) -> usize {
        self.0.world()
    }
    fn all_gather_bytes_among(&self, at: Among, mine: &[u8], timed: bool) -> ft_base::Result<Vec<Vec<u8>>> {
        self.0.all_gather_bytes_among(at, mine, timed)
    }
    fn reduce_scatter_among(
        &self,
        at: Among,
        part: Option<Tensor>,
        range: Range<usize>,
        to: &Tensor,
    ) -> ft_base::Result<PendingTransfer> {
        self.0.reduce_scatter_among(at, part, range, to)
    }
    fn all_gather_among(
        &self,
        at: Among,
        mine: Tensor,
        ranges: &[Range<usize>],
        to: &Tensor,
    ) -> ft_base::Result<PendingTransfer> {
        self.note(Did::Gather(at.1.unit.expect("of a unit")));
        self.0.all_gather_among(at, mine, ranges, to)
    }
    fn exchange_among(
        &self,
        at: Among,
        out: &[PeerTensor],
        into: &[PeerTensor],
    ) -> ft_base::Result<PendingTransfer> {
        self.0.exchange_among(at, out, into)
    }
    fn received(&self) -> &Received {
        self.0.received()
    }
    fn fail(&self, e: &ft_base::Error) {
        self.0.fail(e);
    }
    fn lost(&self) -> Option<ft_engine::ranks::Error> {
        self.0.lost()
    }
    fn when_lost(&self, f: Box<dyn Fn() + Send + Sync>) {
        self.0.when_lost(f);
    }
}

impl Hooks for Traced<'_, Gather<'_>> {
    fn pre_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.0.pre_visit(visit, next)?;
        self.note(Did::Visit(visit, next));
        Ok(())
    }
    fn post_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.0.post_visit(visit, next)
    }
}

/// Trains on a micro-batch, then evaluates it.
fn visits(job: &Job, decoder: &Decoder, params: &Params, around: &dyn Hooks) -> ft_base::Result<()> {
    let m = Micro::collate(&job.train_data()?, &[0])?;
    let batch = Batch::new(&decoder.config, (&m).into(), (0, 0), None, &job.device)?;
    let lens = params.lens();
    let accum = GradAccumulator::live((&lens, &params.slots), &job.device);
    Walk::new(decoder, params.lowest_unit(), 1).hooks(around).train(&batch, 1.0, &accum)?;
    Walk::new(decoder, None, 0).hooks(around).eval(&batch)?;
    Ok(())
}

/// Trains on a micro-batch, then evaluates it. Returns the operations of the rank.
fn traced(job: &Job, comm: &Threads) -> ft_base::Result<(Outline, Vec<Did>)> {
    let (decoder, params) = ranks::load(job, &job.base()?, comm)?;
    let did = Mutex::default();
    let comm = Traced(comm, &did);
    let gather = Gather::new(&decoder, &params, &comm);
    let around = Traced(&gather, &did);
    visits(job, &decoder, &params, &around)?;
    drop(gather);
    Ok((Outline::of(&decoder), did.into_inner().unwrap_or_default()))
}

/// With sharded weights, the units of a visit are gathered before the previous visit begins.
#[test]
fn a_gather_never_begins_later_than_the_visit_before_its_own() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for rule in ["train.0.method=lora", "train.0.dora=true"] {
        let set = ["parallel.data=2", "parallel.zero=3", "run.batch_rows=4", "run.micro_rows=1", rule];
        let job = Job::open(recipe(dir.path(), &set)?, Want::Weights, false)?;
        let group = ft_engine::ranks::group(2, Duration::from_secs(60));
        let did = std::thread::scope(|s| {
            let ranks: Vec<_> = group
                .into_iter()
                .map(|c| {
                    s.spawn({
                        let job = &job;
                        move || traced(job, &c)
                    })
                })
                .collect();
            ranks.into_iter().map(|r| r.join().expect("no panic")).collect::<ft_base::Result<Vec<_>>>()
        })?;
        for (outline, did) in did {
            let (mut here, mut visits, mut gathers) = (BTreeSet::new(), 0, 0);
            for did in did {
                match did {
                    Did::Gather(unit) => {
                        gathers += 1;
                        here.insert(unit);
                    }
                    Did::Visit(visit, next) => {
                        visits += 1;
                        let needed = outline.needs([visit].into_iter().chain(next));
                        assert!(needed.is_subset(&here), "{rule}: {visit:?}, {next:?}: {here:?} are here");
                        // Units not needed next are released.
                        here = outline.needs(next);
                    }
                }
            }
            // Forward, backward, and forward again.
            assert!(visits > 3 * outline.layers && gathers >= visits - 2, "{visits} {gathers}");
        }
    }
    Ok(())
}

/// Checks the set of units on the device.
struct Checked<'a> {
    gather: Gather<'a>,
    outline: Outline,
    params: &'a Params,
    visits: Cell<usize>,
}

impl Checked<'_> {
    /// Checks that exactly these units are on the device.
    fn check(&self, needed: &BTreeSet<usize>) -> ft_base::Result<()> {
        for (unit, frozen) in self.params.frozen.iter().enumerate() {
            let own = self.params.of_unit(unit).flat_map(|(_, f)| std::iter::once(&f.compute).chain(&f.wide));
            for b in frozen.iter().chain(own) {
                assert!(b.is_apart());
                assert_eq!(held(&b.whole)? > 0, needed.contains(&unit), "unit {unit} of {needed:?}");
            }
        }
        Ok(())
    }
}

impl Hooks for Checked<'_> {
    fn pre_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.pre_visit(visit, next)?;
        self.visits.set(self.visits.get() + 1);
        self.check(&self.outline.needs([visit].into_iter().chain(next)))
    }
    fn post_visit(&self, visit: Visit, next: Option<Visit>) -> ft_base::Result<()> {
        self.gather.post_visit(visit, next)?;
        self.check(&self.outline.needs(next))
    }
}

/// Offloaded weights are on the device during their visit and the previous visit only.
#[test]
fn offloaded_weights_are_on_the_device_for_two_visits() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for rule in ["train.0.method=lora", "train.0.dora=true", "model.dtype=bf16", "model.quantize=nf4"] {
        let set = ["memory.offload=['params']", "run.batch_rows=4", "run.micro_rows=1", rule];
        let job = Job::open(recipe(dir.path(), &set)?, Want::Weights, false)?;
        let comm = ft_engine::ranks::alone();
        let (decoder, params) = ranks::load(&job, &job.base()?, &comm)?;
        let (outline, gather) = (Outline::of(&decoder), Gather::new(&decoder, &params, &comm));
        let around = Checked { gather, outline, params: &params, visits: Cell::new(0) };
        around.check(&BTreeSet::new())?;
        visits(&job, &decoder, &params, &around)?;
        around.check(&BTreeSet::new())?;
        assert!(around.visits.get() > 3 * outline.layers, "{rule}");
    }
    Ok(())
}
