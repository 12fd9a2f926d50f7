//! The micro-batches of a step on one stage, by its schedule.

use crate::train::distill;
use crate::train::step::accumulate::Passes;
use crate::train::step::context::TrainContext;
use crate::train::step::sums::Collected;
use crate::train::step::turn::{Ranks, host};
use ft_data::Micro;
use ft_engine::model::Batch;
use ft_engine::ranks::schedule::{Action, Passed, schedule};
use ft_engine::walk::{Crossing, Hooks, Pass, RouterLosses, Stage, Times, Total, Walk};
use ft_kernels::Tensor;
use std::collections::BTreeMap;

/// A micro-batch on its way through a stage.
#[derive(Default)]
struct Flight<'a> {
    /// The batch, after its forward pass.
    batch: Option<Batch<'a>>,
    /// State between forward and backward.
    pass: Option<Pass<'a>>,
    /// Hidden states from the stage below, then those for the stage above.
    x: Option<Tensor>,
    /// The gradient from above, then that for the stage below.
    dy: Option<Tensor>,
    /// Routing of the stages below and of this one; on its way down, of all stages.
    total: Total,
}

/// A step on one stage.
struct StageStep<'a, 'b, 's> {
    cx: &'b TrainContext<'a>,
    passes: &'b Passes<'b, 's>,
    router: RouterLosses,
    ranks: Ranks<'a>,
    stage: &'b Stage<'b>,
    /// Tokens and targets before each micro-batch of the step.
    first: Vec<(usize, usize)>,
    /// Whether gradients cross the boundary above and the one below.
    trains: [bool; 2],
    flights: BTreeMap<usize, Flight<'b>>,
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
        let mut sum = (0, 0);
        let before = |(_, size): &(&[usize], ft_data::Size)| {
            let at = sum;
            sum = (at.0 + size.tokens, at.1 + size.targets);
            at
        };
        let first = batches.all.iter().map(before).collect();
        let (units, lowest) = (self.model.decoder.units, self.model.params.lowest_unit());
        let trains = [units.end, units.first].map(|above| lowest.is_some_and(|l| l < above));
        // The load-balancing loss needs the decisions of all stages in each.
        let lowest_stage = match trains {
            [_, below] if below || router.any() => 0,
            [true, _] => ranks.stage(),
            [false, _] => ranks.stage() + 1,
        };
        let turns = batches.all.len().div_ceil(ranks.at_once());
        let list = schedule(ranks.stages(), ranks.stage(), turns, lowest_stage);
        let mut step =
            StageStep { cx: self, passes, router, ranks, stage, first, trains, flights: BTreeMap::new() };
        for action in list {
            let done = match action {
                Action::Up(i) => step.up(i, got, times),
                Action::Down(i) => step.down(i, got, times),
                Action::Above(passed) => step.exchange(true, passed, got),
                Action::Below(passed) => step.exchange(false, passed, got),
            };
            done.map_err(|e| ranks.cause(e))?;
        }
        Ok(())
    }
}

impl<'b> StageStep<'_, 'b, '_> {
    /// Index of this rank's micro-batch in a turn; `None` on a rank without rows.
    fn own(&self, turn: usize) -> Option<usize> {
        let i = turn * self.ranks.at_once() + self.ranks.own();
        (i < self.passes.batches.all.len()).then_some(i)
    }

    fn walk<'w>(&'w self, times: &'w mut Times) -> Walk<'w> {
        Walk::chosen(&self.cx.model.decoder, self.cx.model.params.lowest_unit(), &self.cx.execution)
            .router_losses(self.router)
            .neftune(self.cx.job.recipe.data.neftune)
            .hooks(self.passes.reduce)
            .timed(times)
    }

    /// The flight of a turn. Its pass begins on the way up.
    fn take(&mut self, turn: usize) -> Flight<'b> {
        self.flights.remove(&turn).unwrap_or_default()
    }

    fn begin(&self) -> ft_base::Result<Pass<'b>> {
        let (model, reduce) = (self.cx.model, self.passes.reduce);
        Pass::begin(&model.decoder, model.params.lowest_unit(), reduce)
    }

    /// Forward pass of a turn's micro-batch, with the head on the last stage.
    fn up(&mut self, turn: usize, got: &mut Collected, times: &mut Times) -> ft_base::Result<()> {
        let (cx, Passes { input, batches, sink, .. }) = (self.cx, *self.passes);
        let mut flight = self.take(turn);
        let mut pass = self.begin()?;
        if let Some(i) = self.own(turn) {
            let m = Micro::collate(input.data, batches.all[i].0)?;
            let random = Some((cx.job.recipe.run.seed, input.step));
            let config = &cx.model.decoder.config;
            let batch = Batch::new(config, host(&m), self.first[i], random, cx.device())?;
            let batch = distill::taught(batch, &m, cx.distillation(), cx.device())?;
            let mut walk = self.walk(times);
            let y = walk.up(&mut pass, &batch, flight.x.take())?;
            if cx.model.decoder.units.has_head() {
                let scale = batches.scale(None) * cx.loss_factor();
                let out = walk.head(&mut pass, &batch, y, (scale, sink))?;
                flight.dy = out.dx;
                got.losses.keep(out.losses, &m.weights)?;
                got.divergences.keep(out.divergences, &m.weights)?;
            } else {
                flight.x = Some(y);
            }
            drop(walk);
            if self.router.any() {
                flight.total = pass.routing.add_to(std::mem::take(&mut flight.total))?;
            }
            flight.batch = Some(batch);
        } else {
            pass.skip()?;
        }
        flight.pass = Some(pass);
        self.flights.insert(turn, flight);
        Ok(())
    }

    /// Backward pass of a turn's micro-batch.
    fn down(&mut self, turn: usize, got: &mut Collected, times: &mut Times) -> ft_base::Result<()> {
        let mut flight = self.take(turn);
        let Some(mut pass) = flight.pass.take() else { return Ok(()) };
        match flight.batch.take() {
            Some(batch) => {
                if self.router.any() {
                    pass.routing.set_total(flight.total.clone());
                }
                if let Some(dy) = flight.dy.take() {
                    let below = self.walk(times).down(&mut pass, &batch, &dy, self.passes.sink)?;
                    flight.dy = below.filter(|_| self.trains[1]);
                }
                got.routings.push(pass.routing);
            }
            None => pass.skip()?,
        }
        self.passes.reduce.end()?;
        self.flights.insert(turn, flight);
        Ok(())
    }

    /// Exchanges hidden states and gradients of two micro-batches with the stage above or below.
    fn exchange(&mut self, above: bool, passed: Passed, got: &mut Collected) -> ft_base::Result<()> {
        let own = |turn: Option<usize>| turn.filter(|turn| self.own(*turn).is_some());
        let (up, down) = (own(passed.up), own(passed.down));
        let (leaves, comes) = if above { (up, down) } else { (down, up) };
        let trains = self.trains[usize::from(!above)];
        let mut out = None;
        let mut words = Vec::new();
        if let Some(flight) = leaves.and_then(|turn| self.flights.get_mut(&turn)) {
            out = if above { flight.x.take() } else { flight.dy.take().filter(|_| trains) };
            words = flight.total.words();
        }
        let tokens = |turn: usize| self.own(turn).map(|i| self.passes.batches.all[i].1.tokens);
        let into = comes.filter(|_| !above || trains).and_then(tokens);
        let came = self.stage.exchange(above, Crossing { out: out.as_ref(), into })?;
        let total = match self.router.any() && (leaves, comes) != (None, None) {
            true => Some(Total::of(&self.stage.words(above, &words)?)),
            false => None,
        };
        if let Some(turn) = comes {
            let flight = self.flights.entry(turn).or_default();
            if let Some(total) = total {
                flight.total = total;
            }
            if above {
                flight.dy = came;
            } else {
                flight.x = came;
            }
        }
        // A stage without a backward pass is done when the stage above has the hidden states, and every stage when its
        // gradients have left.
        let last =
            if self.goes_down() { passed.down.filter(|_| !above) } else { passed.up.filter(|_| above) };
        if let Some(mut flight) = last.and_then(|turn| self.flights.remove(&turn)) {
            got.routings.extend(flight.pass.take().filter(|_| flight.batch.is_some()).map(|p| p.routing));
        }
        Ok(())
    }

    /// Whether micro-batches go down through this stage.
    fn goes_down(&self) -> bool {
        self.router.any() || self.trains[0]
    }
}
