//! Plans of a recipe and a known model.

use super::plan::{Pipelined, Plan};
use crate::host::HostPlan;
use crate::inference::Server;
use crate::memory::{Allocation, Settings, Theory, rounded};
use crate::search::{Inputs, Prepared, SearchResult, choose};
use crate::workload::ReferencePass;
use ft_engine::walk::Execution;

impl Plan {
    /// Plans a recipe; [`Plan::advise`] adds hints.
    ///
    /// # Errors
    /// Inconsistent sizes of the model or of a rank's shard.
    pub fn new(i: &Inputs<'_>) -> ft_base::Result<Self> {
        let server = Server::of(i.recipe, i.config, i.selection, i.machine.stored)?;
        let of_stage = |stage: usize| -> ft_base::Result<Self> {
            let prepared = Prepared::new(i, stage)?;
            let decision = choose(&prepared)?;
            Ok(Self::of(i, &prepared, decision, server.clone())?)
        };
        let mut worst = of_stage(0)?;
        let mut slowest = worst.work;
        for stage in 1..i.recipe.parallel.pipeline {
            let plan = of_stage(stage)?;
            if plan.work.total() > slowest.total() {
                slowest = plan.work;
            }
            if plan.needs() > worst.needs() {
                worst = plan;
            }
        }
        worst.work = slowest;
        Ok(worst)
    }

    /// Order of stages by their needs; all stages run by the settings of the greatest.
    fn needs(&self) -> (std::cmp::Reverse<usize>, usize, usize, u64) {
        let (e, r) = (&self.execution, self.execution.recompute);
        (std::cmp::Reverse(e.micro_rows), r.products(), r.layers(), self.total())
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
            local: p.in_process(),
            wire: prepared.wire(micro_batches) + keys,
            exchanged: keys,
            exposed: prepared.exposed() + keys,
            machine: i.machine,
            parameters: prepared.states.parameters,
            budget: i.budget,
            space: HostPlan::new(r, i.selection, i.machine, &d.workload, host),
            pipeline: Pipelined::of(i, prepared, micro_batches, d.execution.micro_rows),
            server,
            mixture: i.config.moe.is_some(),
            layers: i.config.layers,
            walked: prepared.walked(),
            execution: d.execution,
            reasons: d.reasons,
            peak: d.peak,
            reference: ReferencePass::of(r, &d.workload, d.work, d.execution.micro_rows),
            workload: d.workload,
            micro_batches,
            keeps_gradients: !r.optimizer.in_backward,
            no_master: no_master(i),
            work: d.work,
            learning_rates: i.selection.learning_rates(&r.optimizer),
            theory: Theory::new(i.selection, r.model.quantize, &r.optimizer, p),
            hints: Vec::new(),
        })
    }
}

/// Lists the engine's allocations under the given execution settings.
///
/// # Errors
/// As [`Plan::new`].
pub fn allocations(i: &Inputs<'_>, c: &Execution) -> ft_base::Result<Vec<Allocation>> {
    let prepared = Prepared::new(i, 0)?;
    let levels = Settings { recompute: c.recompute, inputs: c.inputs, dequantize: c.dequantize, head: 0 };
    Ok(prepared.simulate(prepared.workload(c.micro_rows), &[c.head_rows as u64])?.listed(levels))
}

/// Why fully trained weights have no f32 master weights; `None` if they have.
fn no_master(i: &Inputs<'_>) -> Option<&'static str> {
    let rounded = rounded(i.recipe, i.selection, i.machine, &i.selection.parts());
    rounded.contains(&true).then_some(match i.recipe.optimizer.master {
        ft_recipe::Master::Auto => "optimizer.master = \"auto\" with 8-bit moments",
        _ => "as optimizer.master says",
    })
}
