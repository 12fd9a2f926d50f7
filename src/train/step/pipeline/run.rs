//! The micro-batches of a step on one stage, by schedule.

use crate::train::preference::Tally;
use crate::train::step::accumulate::{Passes, weigh};
use crate::train::step::context::TrainContext;
use crate::train::step::sums::Collected;
use crate::train::step::turn::{LocalMicroBatch, Ranks, RowGroups};
use ft_data::Micro;
use ft_engine::model::Batch;
use ft_engine::model::stage_boundary::Rows;
use ft_engine::ranks::schedule::{Action, ExchangeMicros, schedule};
use ft_engine::walk::{Hooks, Pass, RouterLosses, Stage, StageExchange, Times, Total, Walk};
use ft_kernels::Tensor;
use std::collections::BTreeMap;

/// A micro-batch on its way through a stage.
#[derive(Default)]
struct InFlight<'a> {
    /// Own part, up to the forward pass.
    micro: Option<LocalMicroBatch<'a>>,
    /// Input, from the forward pass on.
    batch: Option<Batch<'a>>,
    /// Numbers of tokens, after the backward pass.
    tokens: Option<Rows>,
    /// State between forward and backward.
    pass: Option<Pass<'a>>,
    /// Hidden states and other inputs of layers, from the stage below, then for the stage above.
    x: Option<Vec<Tensor>>,
    /// Gradients from above, then those for the stage below.
    dy: Option<Vec<Tensor>>,
    /// Routing of the stages below and of this one; on the way down, of all stages and ranks with tokens.
    total: Total,
}

impl InFlight<'_> {
    /// Numbers of tokens on this rank, if any.
    fn tokens(&self) -> Option<Rows> {
        let before = self.micro.as_ref().map(LocalMicroBatch::rows).filter(|rows| rows.own > 0);
        before.or(self.tokens).or(self.batch.as_ref().map(Batch::rows))
    }
}

/// A step on one stage.
struct StageStep<'a, 'b, 's> {
    cx: &'b TrainContext<'a>,
    passes: &'b Passes<'b, 's>,
    router: RouterLosses,
    ranks: Ranks<'a>,
    stage: &'b Stage<'b>,
    /// Ranks of the stage with tokens of the same rows, if several.
    tokens: Option<&'b RowGroups<'b>>,
    /// Whether gradients cross the boundary above and the one below.
    trains: [bool; 2],
    in_flight: BTreeMap<usize, InFlight<'b>>,
}

impl TrainContext<'_> {
    /// Runs the micro-batches of this rank's stage.
    pub(in crate::train::step) fn run_stages(
        &self,
        passes: &Passes<'_, '_>,
        router: RouterLosses,
        got: &mut Collected,
        times: &mut Times,
    ) -> ft_base::Result<()> {
        let (ranks, batches) = (self.ranks(), passes.batches);
        let Some(stage) = passes.reduce.stage() else { return Ok(()) };
        let tokens = ranks.row_groups();
        let (units, lowest) = (self.model.decoder.units, self.model.params.lowest_unit());
        let trains = [units.end, units.first].map(|above| lowest.is_some_and(|l| l < above));
        // The load-balancing loss needs the decisions of all stages in each.
        let lowest_stage = match trains {
            [_, below] if below || router.any() => 0,
            [true, _] => ranks.stage(),
            [false, _] => ranks.stage() + 1,
        };
        let turns = batches.all.len().div_ceil(ranks.data_parallel_size());
        let list = schedule(ranks.stages(), ranks.stage(), turns, lowest_stage);
        let (tokens, in_flight) = (tokens.as_ref(), BTreeMap::new());
        let mut step = StageStep { cx: self, passes, router, ranks, stage, tokens, trains, in_flight };
        for action in list {
            let done = match action {
                Action::Forward(i) => step.forward(i, got, times),
                Action::Backward(i) => step.backward(i, got, times),
                Action::Above(passed) => step.exchange(true, passed, got),
                Action::Below(passed) => step.exchange(false, passed, got),
            };
            done.map_err(|e| self.comm.cause(e))?;
        }
        Ok(())
    }
}

impl<'b> StageStep<'_, 'b, '_> {
    /// Index of this rank's micro-batch in a turn; `None` on a rank without rows.
    fn own(&self, turn: usize) -> Option<usize> {
        let i = turn * self.ranks.data_parallel_size() + self.ranks.data_parallel_rank();
        (i < self.passes.batches.all.len()).then_some(i)
    }

    /// The flight of a turn, with this rank's part of its micro-batch before the forward pass; `None` on a rank without
    /// tokens.
    fn flight(&mut self, turn: usize) -> ft_base::Result<Option<&mut InFlight<'b>>> {
        if let (false, Some(i)) = (self.in_flight.contains_key(&turn), self.own(turn)) {
            let whole = Micro::collate(self.passes.input.data, self.passes.batches.all[i].0)?;
            let micro = Some(LocalMicroBatch::new(whole, self.tokens));
            self.in_flight.insert(turn, InFlight { micro, ..InFlight::default() });
        }
        Ok(self.in_flight.get_mut(&turn).filter(|flight| flight.tokens().is_some()))
    }

    fn walk<'w>(&'w self, times: &'w mut Times) -> Walk<'w> {
        Walk::chosen(&self.cx.model.decoder, self.cx.model.params.lowest_unit(), &self.cx.execution)
            .router_losses(self.router)
            .neftune(self.cx.job.recipe.data.neftune)
            .hooks(self.passes.reduce)
            .timed(times)
    }

    /// Seed and step of random numbers.
    fn random(&self) -> (u64, u64) {
        (self.cx.job.recipe.run.seed, self.passes.input.step)
    }

    /// Forward pass of a turn's micro-batch, with the head on the last stage.
    fn forward(&mut self, turn: usize, got: &mut Collected, times: &mut Times) -> ft_base::Result<()> {
        let (cx, Passes { batches, accum, reduce, objective, .. }) = (self.cx, *self.passes);
        self.flight(turn)?;
        let mut flight = self.in_flight.remove(&turn).unwrap_or_default();
        let mut pass = Pass::begin(&cx.model.decoder, cx.model.params.lowest_unit(), reduce)?;
        if let (Some(micro), Some(i)) = (flight.micro.take().filter(|m| !m.is_empty()), self.own(turn)) {
            let (config, random) = (&cx.model.decoder.config, (batches.all[i].1, Some(self.random())));
            let batch = micro.batch(config, random, cx.distillation(), cx.device())?;
            let mut came = flight.x.take().unwrap_or_default().into_iter();
            let below = came.next();
            if below.is_some() {
                self.stage.boundary(false).set_forward_tensors(pass.shared_state(), came.collect())?;
            }
            let y = self.walk(times).forward_layers(&mut pass, &batch, below)?;
            if cx.model.decoder.units.has_head() {
                let mut unsaid = Tally::default();
                let tally = if self.ranks.reports_loss() { &mut got.tally } else { &mut unsaid };
                let (of, device) = (&micro, cx.device());
                let mut weigh =
                    objective.map(|o| move |losses: &[Tensor]| weigh(o, of, losses, tally, device));
                let mut walk = self.walk(times).objective(weigh.as_mut().map(|w| w as _));
                let scale = batches.scale(objective) * cx.loss_factor();
                let out = walk.head(&mut pass, &batch, y, (scale, accum))?;
                flight.dy = out.dx.map(|dx| vec![dx]);
                if objective.is_none() {
                    let weights = &micro.micro().weights;
                    got.losses.keep(out.losses, weights)?;
                    got.divergences.keep(out.divergences, weights)?;
                }
            } else {
                let mut out = vec![y];
                out.extend(self.stage.boundary(true).forward_tensors(pass.shared_state())?);
                flight.x = Some(out);
            }
            if self.router.any() {
                let total = pass.routing.add_to(std::mem::take(&mut flight.total))?;
                let all =
                    batch.context.micro_batch_group.as_deref().filter(|_| cx.model.decoder.units.has_head());
                flight.total = total.over(all)?;
            }
            flight.batch = Some(batch);
        } else {
            self.walk(times).idle_pass(&mut pass, self.random(), accum)?;
        }
        flight.pass = Some(pass);
        self.in_flight.insert(turn, flight);
        Ok(())
    }

    /// Backward pass of a turn's micro-batch.
    fn backward(&mut self, turn: usize, got: &mut Collected, times: &mut Times) -> ft_base::Result<()> {
        let mut flight = self.in_flight.remove(&turn).unwrap_or_default();
        let Some(mut pass) = flight.pass.take() else { return Ok(()) };
        match flight.batch.take() {
            Some(batch) => {
                if self.router.any() {
                    pass.routing.set_total(flight.total.clone());
                }
                let mut came = flight.dy.take().unwrap_or_default().into_iter();
                if let Some(dy) = came.next() {
                    if !self.cx.model.decoder.units.has_head() {
                        self.stage
                            .boundary(true)
                            .set_backward_tensors(pass.shared_state(), came.collect())?;
                    }
                    let below =
                        self.walk(times).backward_layers(&mut pass, &batch, &dy, self.passes.accum)?;
                    flight.dy = below
                        .filter(|_| self.trains[1])
                        .map(|dy| self.backward_with(dy, &pass))
                        .transpose()?;
                }
                flight.tokens = Some(batch.rows());
                got.routings.push(pass.routing);
            }
            None => self.walk(times).idle_pass(&mut pass, self.random(), self.passes.accum)?,
        }
        self.passes.reduce.end()?;
        self.in_flight.insert(turn, flight);
        Ok(())
    }

    /// Gradients of the hidden states and of the other tensors from the stage below.
    fn backward_with(&self, dy: Tensor, pass: &Pass<'_>) -> ft_base::Result<Vec<Tensor>> {
        let mut out = vec![dy];
        out.extend(self.stage.boundary(false).backward_tensors(pass.shared_state())?);
        Ok(out)
    }

    /// Exchanges hidden states and gradients of two micro-batches with the stage above or below.
    fn exchange(&mut self, above: bool, passed: ExchangeMicros, got: &mut Collected) -> ft_base::Result<()> {
        let (mut leaves, mut comes) = if above { (passed.up, passed.down) } else { (passed.down, passed.up) };
        let trains = self.trains[usize::from(!above)];
        let (mut out, mut words, mut into) = (None, Vec::new(), None);
        if let Some(turn) = leaves {
            match self.flight(turn)? {
                Some(flight) => {
                    out = if above { flight.x.take() } else { flight.dy.take().filter(|_| trains) };
                    words = flight.total.words();
                }
                None => leaves = None,
            }
        }
        if let Some(turn) = comes {
            match self.flight(turn)? {
                Some(flight) => into = flight.tokens().filter(|_| !above || trains),
                None => comes = None,
            }
        }
        let came = self.stage.exchange(above, StageExchange { out, into })?;
        let total = match self.router.any() && (leaves, comes) != (None, None) {
            true => Some(Total::of(&self.stage.words(above, &words)?)),
            false => None,
        };
        if let Some(turn) = comes {
            let flight = self.in_flight.entry(turn).or_default();
            if let Some(total) = total {
                flight.total = total;
            }
            if above {
                flight.dy = came;
            } else {
                flight.x = came;
            }
        }
        // Without a pass down, a micro-batch is done once the stage above has the hidden states, otherwise once the
        // gradients have left.
        let goes_down = self.router.any() || self.trains[0];
        let last = if goes_down { passed.down.filter(|_| !above) } else { passed.up.filter(|_| above) };
        if let Some(mut flight) = last.and_then(|turn| self.in_flight.remove(&turn)) {
            got.routings.extend(flight.pass.take().filter(|_| flight.batch.is_some()).map(|p| p.routing));
        }
        Ok(())
    }
}
