//! Passes of a rank without rows: it takes part in the collectives of every visit, and computes its experts on the
//! rows of other ranks.

use super::pass::Pass;
use super::visit::{Outline, Visits};
use super::walker::Walk;
use crate::model::batch::{Context, HostBatch};
use crate::model::feed_forward::{DispatchedSaved, Mixture, RowSpec};
use crate::model::grad_accumulator::GradAccumulator;
use crate::model::layer::Level;
use crate::model::{Batch, Decoder};
use candle_core::Result;
use ft_kernels::dispatch::RowExchange;
use std::sync::Arc;

/// State of a layer on a rank without rows between forward and backward.
pub(super) enum IdleState {
    Saved(DispatchedSaved),
    /// To be made again.
    Dropped(Arc<RowExchange>),
}

/// The mixture of a layer, if split over ranks.
fn split(decoder: &Decoder, unit: usize) -> Option<&Mixture> {
    decoder.layers.get(unit.checked_sub(1)?)?.mlp.mixture().filter(|m| m.is_split())
}

impl Walk<'_> {
    /// A forward pass without rows.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn idle_forward(&mut self) -> ft_base::Result<()> {
        let visits = Outline::of(self.decoder).forward();
        let outcome = Visits::begin(visits, self.hooks)
            .and_then(|mut visits| self.idle_visits(&mut visits, &mut Vec::new(), None));
        outcome.map_err(|e| self.cause(e))
    }

    /// A training pass without rows; gradients of the own experts go to the accumulator. `dropout` are seed and step.
    ///
    /// # Errors
    /// As [`Walk::idle_forward`].
    pub fn idle_train(&mut self, dropout: (u64, u64), accum: &GradAccumulator<'_>) -> ft_base::Result<()> {
        let mut pass = Pass::begin(self.decoder, self.lowest, self.hooks)?;
        self.idle_pass(&mut pass, dropout, accum)
    }

    /// As [`Walk::idle_train`], the visits of a pass up to the backward pass, then those of the backward pass; on a
    /// stage with the head all at once.
    ///
    /// # Errors
    /// As [`Walk::idle_forward`].
    pub fn idle_pass(
        &mut self,
        pass: &mut Pass<'_>,
        dropout: (u64, u64),
        accum: &GradAccumulator<'_>,
    ) -> ft_base::Result<()> {
        let outcome = self.idle_visits(&mut pass.visits, &mut pass.idle, Some((dropout, accum)));
        outcome.map_err(|e| self.cause(e))
    }

    /// Makes visits, and computes the own experts on the rows of other ranks. `states` are those of the layers.
    fn idle_visits(
        &mut self,
        visits: &mut Visits<'_>,
        states: &mut Vec<Option<IdleState>>,
        train: Option<((u64, u64), &GradAccumulator<'_>)>,
    ) -> ft_base::Result<()> {
        let (decoder, until, dropout) = (self.decoder, visits.until(), train.map(|(dropout, _)| dropout));
        let table = &decoder.embedding.table;
        // One token that no layer computes: its context has the key of dropout.
        let host = HostBatch { ids: &[0], positions: &[0], docs: &[1], targets: &[], weights: &[] };
        let batch = match self.hooks.experts() {
            Some(_) => Some(Batch::new(&decoder.config, host, (0, 0), dropout, table.real()?.device())?),
            None => None,
        };
        let hooks = self.hooks;
        let context = batch.as_ref().map(|batch| batch.context.for_pass(&Arc::default(), hooks.experts()));
        let like = RowSpec(decoder.config.hidden, decoder.embedding.dtype, table.device());
        states.resize_with(decoder.layers.len(), || None);
        while visits.made() < until {
            let Some(visit) = visits.start_visit()? else { break };
            self.at(visit.phase, visit.unit);
            if let (Some(context), Some(mixture)) = (&context, split(decoder, visit.unit)) {
                let l = visit.unit - 1;
                let accum = train.map(|(_, accum)| accum).filter(|_| visit.is_backward());
                states[l] =
                    self.idle_layer(mixture, states[l].take(), (l, context, like), (train.is_some(), accum))?;
            }
            visits.end_visit()?;
        }
        Ok(())
    }

    /// A visit to a mixture: forward, which leaves a state if the pass trains, or with an accumulator backward.
    fn idle_layer(
        &self,
        mixture: &Mixture,
        state: Option<IdleState>,
        (l, context, like): (usize, &Context<'_>, RowSpec<'_>),
        (trains, accum): (bool, Option<&GradAccumulator<'_>>),
    ) -> Result<Option<IdleState>> {
        let level = self.kept_level(l);
        let Some(accum) = accum else {
            let saved = mixture.idle_forward(context, None, like)?;
            return Ok(level.filter(|_| trains).map(|level| keep(saved, level)));
        };
        if let Some(state) = state {
            let saved = again(mixture, state, (context, like), level)?;
            mixture.backward_rows(saved, None, context, accum, like)?;
        }
        Ok(None)
    }
}

/// As [`crate::model::layer::Saved::keep`].
fn keep(mut saved: DispatchedSaved, level: Level) -> IdleState {
    if level >= Level::FeedForward {
        return IdleState::Dropped(saved.exchange());
    }
    if level >= Level::Norms {
        saved.drop_inputs();
    }
    IdleState::Saved(saved)
}

/// As [`crate::model::layer::Layer::recompute`].
fn again(
    mixture: &Mixture,
    state: IdleState,
    (ctx, like): (&Context<'_>, RowSpec<'_>),
    level: Option<Level>,
) -> Result<DispatchedSaved> {
    match state {
        IdleState::Dropped(exchange) => mixture.idle_forward(ctx, Some(exchange), like),
        IdleState::Saved(mut saved) => {
            if level >= Some(Level::Norms) {
                mixture.restore_rows(&mut saved, None, ctx, like)?;
            }
            Ok(saved)
        }
    }
}
