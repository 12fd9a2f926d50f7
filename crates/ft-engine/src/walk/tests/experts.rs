//! Losses and gradients of every tensor when ranks split the experts, against one rank.

use super::among::on_ranks;
use super::*;
use crate::model::feed_forward::{FAULT, Fault};
use crate::params::buffers::Split;
use crate::ranks::{self, CollectiveId, Comm, Mesh};
use crate::walk::Hooks;

/// Seed and step of dropout.
const RANDOM: (u64, u64) = (5, 3);
/// What trains by adapters, with dropout.
const GROUPS: &[Group] = &[Group::Attention, Group::Mlp, Group::Experts];

/// Hooks of a rank whose peers split the experts.
struct Among<'a>(&'a dyn Comm);

impl Hooks for Among<'_> {
    fn experts(&self) -> Option<&dyn Comm> {
        Some(self.0)
    }
}

struct Setting<'a> {
    case: &'a Case,
    base: Base,
    selection: Selection,
    recompute: Recomputed,
}

/// Losses, and the gradient of each tensor; `None` for those of other ranks.
type Step = (Vec<f64>, Vec<Option<Vec<f64>>>);

impl<'a> Setting<'a> {
    fn new(case: &'a Case, selection: Selection) -> Self {
        Self { case, base: case.base.clone(), selection, recompute: 0.into() }
    }

    /// Two micro-batches of a step, of different lengths.
    fn micros(&self) -> Result<[Micro; 2]> {
        Ok([Rows::padded(self.case)?.micro, Rows::packed(self.case)?.micro])
    }

    fn batch(&self, which: usize) -> Result<Batch<'static>> {
        let all = self.micros()?;
        let first = if which == 0 { (0, 0) } else { (all[0].ids.len(), all[0].targets.len()) };
        Ok(Batch::new(&self.case.config, (&all[which]).into(), first, Some(RANDOM), CPU)?)
    }

    fn walk<'w>(&self, d: &'w Decoder, p: &Params) -> Walk<'w> {
        let router = RouterLosses { aux: 0.5, z: 0.1 };
        Walk::new(d, p.lowest_unit(), self.recompute).router_losses(router)
    }

    fn grads(p: &Params) -> Result<Vec<Option<Vec<f64>>>> {
        let grad = |i: usize| match p.is_here(i) {
            true => gradient(p, i).map(Some),
            false => Ok(None),
        };
        (0..p.tensors.len()).map(grad).collect()
    }

    fn on_one(&self) -> Result<Step> {
        let (d, p) = build(&self.base, &self.selection, None)?;
        let grads = p.grads();
        let accum = GradAccumulator::new(&grads, p.tensors.len()).over(p.new_sums());
        let mut losses = Vec::new();
        for which in 0..2 {
            losses
                .extend(loss::on_host(self.walk(&d, &p).train(&self.batch(which)?, 1.0, &accum)?)?.concat());
        }
        accum.settle(None)?;
        Ok((losses, Self::grads(&p)?))
    }

    /// As many ranks as `micros` split the experts; each has one of the micro-batches, or is idle.
    fn on_many(&self, micros: &[Option<usize>], fault: Option<Fault>) -> Result<Step> {
        let experts = self.case.config.moe.as_ref().context("experts")?.experts;
        let mesh = Mesh { data: micros.len(), expert: micros.len(), ..Mesh::ONE };
        let rank = |comm: ranks::Threads| -> Result<Step> {
            FAULT.set(fault);
            let split = Split { mesh, rank: comm.rank(), zero: 0, experts, ..Split::default() };
            let allocate = Allocate { train: true, split, ..Allocate::default() };
            let new = Build::new(&self.base, &self.selection);
            let (d, p) = Build { allocate, comm: Some(&comm), ..new }.run()?;
            let grads = p.grads();
            let accum = GradAccumulator::new(&grads, p.tensors.len());
            let hooks = Among(&comm);
            let mut walk = self.walk(&d, &p).hooks(&hooks);
            let losses = match micros[comm.rank()] {
                Some(which) => loss::on_host(walk.train(&self.batch(which)?, 1.0, &accum)?)?.concat(),
                None => {
                    walk.idle_train(RANDOM, &accum)?;
                    Vec::new()
                }
            };
            comm.all_gather_bytes(CollectiveId::all("the end"), &[], true)?;
            let here = |i: &usize| p.is_here(*i);
            assert!(
                (0..p.tensors.len())
                    .filter(here)
                    .all(|i| accum.reached()[i] || p.tensors[i].expert.is_none())
            );
            Ok((losses, Self::grads(&p)?))
        };
        let came = on_ranks(micros.len(), rank).into_iter().collect::<Result<Vec<_>>>()?;
        let mut all: Step = (Vec::new(), vec![None; came[0].1.len()]);
        // In the order of the micro-batches, as on one rank.
        let mut by_micro: Vec<_> = micros.iter().zip(came).collect();
        by_micro.sort_by_key(|(which, _)| **which);
        for (_, (losses, grads)) in by_micro {
            all.0.extend(losses);
            for (to, from) in all.1.iter_mut().zip(grads) {
                match (to, from) {
                    (Some(to), Some(from)) => to.iter_mut().zip(from).for_each(|(t, f)| *t += f),
                    (to, from) => *to = to.take().or(from),
                }
            }
        }
        Ok(all)
    }

    /// The largest relative distance of a tensor's gradient from one rank, and of a loss.
    fn apart(&self, micros: &[Option<usize>], fault: Option<Fault>) -> Result<[f64; 2]> {
        let (want, got) = (self.on_one()?, self.on_many(micros, fault)?);
        assert_eq!(got.0.len(), want.0.len());
        let mut most = 0_f64;
        for (got, want) in got.1.iter().zip(&want.1) {
            let (got, want) = (got.as_ref().context("an owner")?, want.as_ref().context("a gradient")?);
            if want.iter().any(|x| *x != 0.0) {
                most = most.max(distance(got, want));
            }
        }
        Ok([most, distance(&got.0, &want.0)])
    }
}

/// Ranks with a micro-batch each, and idle ranks; a case takes those that divide its experts.
const TURNS: [&[Option<usize>]; 4] = [
    &[Some(0), Some(1)],
    &[Some(1), Some(0)],
    &[Some(0), None, Some(1), None],
    &[Some(0), None, Some(1), None, None],
];

fn mixtures() -> Result<Vec<Case>> {
    let names = ["mixtral", "qwen2-moe", "qwen3-moe"];
    Ok(cases()?.into_iter().filter(|c| names.contains(&c.name().as_str())).collect())
}

#[test]
fn gradients_are_those_of_one_rank() -> Result<()> {
    let all = mixtures()?;
    assert!(all.len() >= 2);
    for case in &all {
        for (selection, base) in [
            (everything(&case.config), case.base.clone()),
            (adapters(&case.config, false, GROUPS), case.base.clone()),
            (adapters(&case.config, true, GROUPS), case.nf4()),
        ] {
            let mut setting = Setting { base, ..Setting::new(case, selection) };
            let experts = case.config.moe.as_ref().map_or(0, |m| m.experts);
            let fits = |(_, turn): &(usize, &&[Option<usize>])| experts.is_multiple_of(turn.len());
            for (i, turn) in TURNS.iter().enumerate().filter(fits) {
                setting.recompute = [0.into(), NORMS, usize::MAX.into(), FEED_FORWARD][i];
                let far = setting.apart(turn, None)?;
                assert!(far[0] <= 5e-6 && far[1] <= 1e-6, "{}, {turn:?}: {far:?} from one rank", case.name());
            }
        }
    }
    Ok(())
}

/// Each fault is noticed by the comparison above.
#[test]
fn every_fault_is_noticed() -> Result<()> {
    let case = case("qwen3-moe")?;
    let full = Setting::new(&case, everything(&case.config));
    let low = Setting::new(&case, adapters(&case.config, false, GROUPS));
    for (setting, fault) in [
        (&full, Fault::Gates),
        (&full, Fault::Inputs),
        (&full, Fault::Mean),
        (&full, Fault::Sources),
        (&low, Fault::Rows),
    ] {
        let [far, _] = setting.apart(TURNS[0], Some(fault))?;
        assert!(far > 1e-4, "{fault:?}: {far:.1e} from one rank");
    }
    Ok(())
}
