//! Plans of a recipe and a known model.

use super::plan::{Pipelined, Plan};
use crate::error::Error;
use crate::host::HostPlan;
use crate::inference::Server;
use crate::memory::{Allocation, Theory, rounded};
use crate::model::quantization;
use crate::resolve::products;
use crate::search::{Inputs, Prepared, SearchResult, choose, choose_with_rows};
use crate::time::actions::{Actions, StageActions};
use crate::workload::ReferencePass;
use ft_engine::model::units::partition;
use ft_engine::ranks::Mesh;
use ft_engine::walk::Execution;
use std::sync::Arc;

impl Plan {
    /// Plans a recipe; [`Plan::advise`] adds hints.
    ///
    /// # Errors
    /// Inconsistent sizes of the model or of a rank's shard.
    pub fn new(i: &Inputs<'_>) -> ft_base::Result<Self> {
        Self::of_stages(i, &stages(i)?.0)
    }

    /// As [`Plan::new`], and the lists of actions of a step if it fits the device.
    ///
    /// # Errors
    /// As [`Plan::new`].
    pub fn with_actions(i: &Inputs<'_>) -> ft_base::Result<(Self, Option<Actions>)> {
        let (kinds, which) = stages(i)?;
        let plan = Self::of_stages(i, &kinds)?;
        let actions = plan.fits_device().then(|| plan.actions(i, &kinds, which)).transpose()?;
        Ok((plan, actions))
    }

    fn of_stages(i: &Inputs<'_>, kinds: &[Prepared<'_>]) -> ft_base::Result<Self> {
        let server = Server::of(i.recipe, i.config, i.selection, i.machine.stored)?;
        let mut decisions = kinds.iter().map(choose).collect::<candle_core::Result<Vec<_>>>()?;
        // All stages run micro-batches of equally many rows, limited by the stage with the least room.
        let rows = decisions.iter().map(|d| d.execution.micro_rows).min().unwrap_or(1);
        for (prepared, decision) in kinds.iter().zip(&mut decisions) {
            if decision.execution.micro_rows > rows {
                *decision = choose_with_rows(prepared, rows)?;
            }
        }
        let mut plans = Vec::new();
        // of stages alike, the lowest has the most micro-batches between their passes
        for (prepared, decision) in kinds.iter().zip(decisions) {
            plans.push(Self::of(i, prepared, decision, server.clone())?);
        }
        let slowest = plans.iter().map(|p| p.work).max_by(|a, b| a.total().total_cmp(&b.total()));
        let needs = |a: &Self, b: &Self| a.needs().cmp(&b.needs());
        let worst = plans.into_iter().rev().max_by(needs).zip(slowest);
        let (worst, work) = worst.ok_or_else(|| Error::Ignored("there are no stages".into()))?;
        Ok(Self { work, ..worst })
    }

    /// The lists of actions of a step with the chosen execution; `which` is the kind by stage.
    fn actions(&self, i: &Inputs<'_>, kinds: &[Prepared<'_>], which: Vec<usize>) -> ft_base::Result<Actions> {
        let own = |p: &Prepared<'_>| p.actions(&self.workload, &self.execution).map(Arc::new);
        let kinds: Vec<Arc<StageActions>> = kinds.iter().map(own).collect::<candle_core::Result<_>>()?;
        let stages: Vec<_> = which.into_iter().map(|kind| Arc::clone(&kinds[kind])).collect();
        let router = &i.recipe.router;
        let couples = router.aux_loss != 0.0 || router.z_loss != 0.0;
        let lowest = if couples { Some(0) } else { stages.iter().position(|s| !s.down.is_empty()) };
        Ok(Actions {
            mesh: Mesh::of(&i.recipe.parallel),
            micros: usize::try_from(self.micro_batches).unwrap_or(usize::MAX),
            // the head's backward pass is on the way up
            lowest: lowest.unwrap_or(stages.len() - 1),
            stages,
        })
    }

    /// Order of stages by their needs; all stages run by the settings of the greatest.
    fn needs(&self) -> (usize, usize, u64) {
        let r = self.execution.recompute;
        (r.products(), r.layers(), self.total())
    }

    fn of(
        i: &Inputs<'_>,
        prepared: &Prepared<'_>,
        d: SearchResult,
        server: Option<Server>,
    ) -> candle_core::Result<Self> {
        let r = i.recipe;
        let p = &r.parallel;
        let mut host = prepared.states.host.clone();
        let activations = prepared.host_activations(&d.workload, d.execution.recompute, d.execution.inputs);
        if activations > 0 {
            host.push(("offloaded_activations", activations));
        }
        if let Some(server) = &server {
            // ranks of a machine share one server
            host.push(("server", server.on_host.div_ceil(p.in_process())));
        }
        let micro_batches = prepared.micro_batches(d.execution.micro_rows);
        let keys = micro_batches * prepared.keys(&d.workload, &d.execution)?;
        Ok(Self {
            ranks: p.ranks(),
            data_ranks: p.data as u64,
            local: p.in_process(),
            wire: prepared.wire(micro_batches) + keys,
            exchanged: keys,
            machine: i.machine,
            parameters: prepared.states.parameters,
            budget: i.budget,
            space: HostPlan::new(r, i.selection, i.machine, &d.workload, host),
            pipeline: Pipelined::of(i, prepared, micro_batches, d.execution.micro_rows),
            server,
            fp8: i.machine.fp8.then(|| products(i.recipe, i.selection, i.machine)),
            mixture: i.config.moe.is_some(),
            layers: i.config.layers,
            walked: prepared.shape.walked(),
            execution: d.execution,
            reasons: d.reasons,
            peak: d.peak,
            reference: ReferencePass::of(r, &d.workload, d.work, d.execution.micro_rows),
            workload: d.workload,
            micro_batches,
            keeps_gradients: !r.optimizer.in_backward,
            no_master: no_master(i),
            mean: d.mean,
            work: d.work,
            update: prepared.update(),
            learning_rates: i.selection.learning_rates(&r.optimizer),
            theory: Theory::new(i.selection, quantization(i.config, r.model.quantize), &r.optimizer, p),
            hints: Vec::new(),
        })
    }
}

/// Distinct kinds of pipeline stages, and every stage's index among them.
fn stages<'a>(i: &'a Inputs<'a>) -> ft_base::Result<(Vec<Prepared<'a>>, Vec<usize>)> {
    let p = &i.recipe.parallel;
    let (mut kinds, mut which) = (vec![Prepared::new(i, 0)?], vec![0]);
    let all = partition(i.config, p.pipeline, &p.stages).unwrap_or_default();
    for (stage, units) in all.into_iter().enumerate().skip(1) {
        let known = kinds.iter().position(|k| k.is_like(units));
        which.push(known.unwrap_or(kinds.len()));
        if known.is_none() {
            kinds.push(Prepared::new(i, stage)?);
        }
    }
    Ok((kinds, which))
}

/// Lists the engine's allocations under the given execution settings.
///
/// # Errors
/// As [`Plan::new`].
pub fn allocations(i: &Inputs<'_>, c: &Execution) -> ft_base::Result<Vec<Allocation>> {
    let prepared = Prepared::new(i, 0)?;
    let (run, settings) = prepared.chosen(&prepared.workload(c.micro_rows), c)?;
    Ok(run.listed(settings))
}

/// Why fully trained weights have no f32 master weights; `None` if they have.
fn no_master(i: &Inputs<'_>) -> Option<&'static str> {
    let rounded = rounded(i.recipe, i.selection, i.machine, &i.selection.parts());
    rounded.contains(&true).then_some(match i.recipe.optimizer.master {
        ft_recipe::Master::Auto => "optimizer.master = \"auto\" with 8-bit moments",
        _ => "as optimizer.master says",
    })
}
