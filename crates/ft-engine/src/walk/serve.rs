//! Passes of a rank without rows: it takes part in the collectives of every visit, and computes its experts on the
//! rows of other ranks.

use super::pass::Pass;
use super::visit::{Outline, Visits};
use super::walker::Walk;
use crate::model::batch::{Context, HostBatch};
use crate::model::feed_forward::{Mixture, RowSpec, Served};
use crate::model::layer::Level;
use crate::model::sink::Sink;
use crate::model::{Batch, Decoder};
use candle_core::Result;
use ft_kernels::dispatch::Travel;
use std::sync::Arc;

/// State of a served layer between forward and backward.
pub(super) enum Away {
    Served(Served),
    /// To be made again.
    Dropped(Arc<Travel>),
}

/// The mixture of a layer, if ranks split its experts.
fn split(decoder: &Decoder, unit: usize) -> Option<&Mixture> {
    decoder.layers.get(unit.checked_sub(1)?)?.mlp.mixture().filter(|m| m.is_split())
}

impl Walk<'_> {
    /// A forward pass without rows.
    ///
    /// # Errors
    /// A lost rank; device errors.
    pub fn serve_forward(&mut self) -> ft_base::Result<()> {
        let visits = Outline::of(self.decoder).forward();
        let outcome = Visits::begin(visits, self.hooks)
            .and_then(|mut visits| self.serve_visits(&mut visits, &mut Vec::new(), None));
        outcome.map_err(|e| self.cause(e))
    }

    /// A training pass without rows; gradients of the own experts go to the sink. `dropout` are seed and step.
    ///
    /// # Errors
    /// As [`Walk::serve_forward`].
    pub fn serve_train(&mut self, dropout: (u64, u64), sink: &Sink<'_>) -> ft_base::Result<()> {
        let mut pass = Pass::begin(self.decoder, self.lowest, self.hooks)?;
        self.serve(&mut pass, dropout, sink)
    }

    /// As [`Walk::serve_train`], the visits of a pass up to the backward pass, then those of the backward pass; on a
    /// stage with the head all at once.
    ///
    /// # Errors
    /// As [`Walk::serve_forward`].
    pub fn serve(
        &mut self,
        pass: &mut Pass<'_>,
        dropout: (u64, u64),
        sink: &Sink<'_>,
    ) -> ft_base::Result<()> {
        let outcome = self.serve_visits(&mut pass.visits, &mut pass.served, Some((dropout, sink)));
        outcome.map_err(|e| self.cause(e))
    }

    /// Makes visits, and computes the own experts on the rows of other ranks. `states` are those of the layers.
    fn serve_visits(
        &mut self,
        visits: &mut Visits<'_>,
        states: &mut Vec<Option<Away>>,
        train: Option<((u64, u64), &Sink<'_>)>,
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
            let Some(visit) = visits.arrive()? else { break };
            self.at(visit.phase, visit.unit);
            if let (Some(context), Some(mixture)) = (&context, split(decoder, visit.unit)) {
                let l = visit.unit - 1;
                let sink = train.map(|(_, sink)| sink).filter(|_| visit.is_backward());
                states[l] =
                    self.serve_layer(mixture, states[l].take(), (l, context, like), (train.is_some(), sink))?;
            }
            visits.leave()?;
        }
        Ok(())
    }

    /// A visit to a mixture: forward, which leaves a state if the pass trains, or with a sink backward.
    fn serve_layer(
        &self,
        mixture: &Mixture,
        state: Option<Away>,
        (l, context, like): (usize, &Context<'_>, RowSpec<'_>),
        (trains, sink): (bool, Option<&Sink<'_>>),
    ) -> Result<Option<Away>> {
        let level = self.kept_level(l);
        let Some(sink) = sink else {
            let served = mixture.serve(context, None, like)?;
            return Ok(level.filter(|_| trains).map(|level| keep(served, level)));
        };
        if let Some(state) = state {
            let served = again(mixture, state, (context, like), level)?;
            mixture.serve_backward(served, context, sink, like)?;
        }
        Ok(None)
    }
}

/// As [`crate::model::layer::Saved::keep`].
fn keep(mut served: Served, level: Level) -> Away {
    if level >= Level::FeedForward {
        return Away::Dropped(served.travel());
    }
    if level >= Level::Norms {
        served.drop_inputs();
    }
    Away::Served(served)
}

/// As [`crate::model::layer::Layer::recompute`].
fn again(
    mixture: &Mixture,
    state: Away,
    (ctx, like): (&Context<'_>, RowSpec<'_>),
    level: Option<Level>,
) -> Result<Served> {
    match state {
        Away::Dropped(travel) => mixture.serve(ctx, Some(travel), like),
        Away::Served(mut served) => {
            if level >= Some(Level::Norms) {
                mixture.serve_restore(&mut served, ctx, like)?;
            }
            Ok(served)
        }
    }
}
