//! Passes of a rank without rows: it takes part in the collectives of every visit, and computes its experts on the
//! rows of other ranks.

use super::visit::{self, Outline, Visits};
use super::walker::Walk;
use crate::model::batch::{Context, HostBatch};
use crate::model::feed_forward::{Like, Mixture, Served};
use crate::model::layer::Level;
use crate::model::sink::Sink;
use crate::model::{Batch, Decoder};
use candle_core::Result;
use ft_kernels::dispatch::Travel;
use std::sync::Arc;

/// State of a layer between forward and backward.
enum State {
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
        self.serve(None, None)
    }

    /// A training pass without rows; gradients of the own experts go to the sink. `dropout` are seed and step.
    ///
    /// # Errors
    /// As [`Walk::serve_forward`].
    pub fn serve_train(&mut self, dropout: (u64, u64), sink: &Sink<'_>) -> ft_base::Result<()> {
        self.serve(Some(dropout), Some(sink))
    }

    fn serve(&mut self, dropout: Option<(u64, u64)>, sink: Option<&Sink<'_>>) -> ft_base::Result<()> {
        let outcome = self.serve_all(dropout, sink);
        outcome.map_err(|e| self.cause(e))
    }

    fn serve_all(&mut self, dropout: Option<(u64, u64)>, sink: Option<&Sink<'_>>) -> ft_base::Result<()> {
        let decoder = self.decoder;
        let outline = Outline::of(decoder);
        let visits = if sink.is_some() { outline.training(self.lowest) } else { outline.forward() };
        if self.hooks.experts().is_none() {
            return visit::pass(visits, self.hooks, &mut |_| Ok(()));
        }
        let table = &decoder.embedding.table;
        // One token that no layer computes: its context has the key of dropout.
        let host = HostBatch { ids: &[0], positions: &[0], docs: &[1], targets: &[], weights: &[] };
        let batch = Batch::new(&decoder.config, host, (0, 0), dropout, table.real()?.device())?;
        let context = batch.context.among(self.hooks.experts());
        let like = Like(decoder.config.hidden, decoder.embedding.dtype, table.device());
        let mut pass = Visits::begin(visits, self.hooks)?;
        let mut states: Vec<Option<State>> = decoder.layers.iter().map(|_| None).collect();
        while let Some(visit) = pass.arrive()? {
            self.at(visit.phase, visit.unit);
            match (split(decoder, visit.unit), sink.filter(|_| visit.is_backward())) {
                (Some(mixture), None) => {
                    let l = visit.unit - 1;
                    let served = mixture.serve(&context, None, like)?;
                    states[l] =
                        self.kept_level(l).filter(|_| sink.is_some()).map(|level| keep(served, level));
                }
                (Some(mixture), Some(sink)) => {
                    let l = visit.unit - 1;
                    let state =
                        states[l].take().map(|s| again(mixture, s, (&context, like), self.kept_level(l)));
                    if let Some(served) = state.transpose()? {
                        mixture.serve_backward(served, &context, sink, like)?;
                    }
                }
                (None, _) => {}
            }
            pass.leave()?;
        }
        Ok(())
    }
}

/// As [`crate::model::layer::Saved::keep`].
fn keep(mut served: Served, level: Level) -> State {
    if level >= Level::FeedForward {
        return State::Dropped(served.travel());
    }
    if level >= Level::Norms {
        served.drop_inputs();
    }
    State::Served(served)
}

/// As [`crate::model::layer::Layer::recompute`].
fn again(
    mixture: &Mixture,
    state: State,
    (ctx, like): (&Context<'_>, Like<'_>),
    level: Option<Level>,
) -> Result<Served> {
    match state {
        State::Dropped(travel) => mixture.serve(ctx, Some(travel), like),
        State::Served(mut served) => {
            if level >= Some(Level::Norms) {
                mixture.serve_restore(&mut served, ctx, like)?;
            }
            Ok(served)
        }
    }
}
