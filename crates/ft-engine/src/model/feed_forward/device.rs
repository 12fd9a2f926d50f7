//! Passes of a mixture with grouped experts and routing on the device.

use super::grouped::{self, GroupedExperts};
use super::mlp::Mlp;
use super::types::{Mixture, OTHER, Routing, Saved, SavedExperts};
use crate::model::linear::Linear;
use crate::model::pass::batch::Context;
use crate::model::pass::grad_accumulator::GradAccumulator;
use candle_core::{DType, Result};
use ft_kernels::Tensor;
use ft_kernels::dispatch::{Groups, Sorted};
use ft_kernels::resizable::moves;
use ft_kernels::route::cuda::Routed;
use ft_kernels::route::{self, Balance};
use ft_kernels::tensor::On;
use std::sync::{Arc, PoisonError};

impl Mixture {
    /// Whether the experts are computed together.
    pub(super) fn is_grouped(&self, on: On<'_>, dtype: DType) -> bool {
        // The kernel draws by place in the micro-batch; rows of other ranks have none.
        let draws = self.owned.is_some_and(|o| o.drops);
        !on.is_cpu() && !draws && self.top_k <= route::cuda::MOST && grouped::supports(&self.experts, dtype)
    }

    /// Whether grouped products read the experts' 4-bit codes directly, even if the rest of the layer is
    /// dequantized.
    pub fn reads_codes(&self, on: On<'_>, dtype: DType) -> bool {
        self.is_grouped(on, dtype) && self.experts.iter().flat_map(Mlp::linears).any(Linear::is_packed)
    }

    pub(super) fn grouped_experts(&self, dtype: DType) -> Result<Arc<GroupedExperts>> {
        let mut grouped = self.grouped.lock().unwrap_or_else(PoisonError::into_inner);
        // Gathered or offloaded weights return at other addresses.
        let moves = moves();
        match &*grouped {
            Some((at, grouped)) if *at == moves => Ok(Arc::clone(grouped)),
            _ => {
                let new = Arc::new(GroupedExperts::new(&self.experts, &self.copies, dtype)?);
                *grouped = Some((moves, Arc::clone(&new)));
                Ok(new)
            }
        }
    }

    /// Routing on the device, of rows in `dtype`.
    pub(super) fn route_on_device(
        &self,
        logits: &Tensor,
        dtype: DType,
        replay: Option<Arc<Groups>>,
    ) -> Result<Routing> {
        let chosen = replay.as_ref().and_then(|g| g.sorted()).map(|s| &s.chosen);
        let Routed { chosen, probs, lse, gates } =
            route::cuda::forward(logits, self.top_k, chosen, self.normalise)?;
        let groups = match replay {
            Some(g) => g,
            None => Arc::new(Groups::on_device(Sorted::new(&chosen, logits.dim(1)?, dtype)?)),
        };
        let gates = self.factored(gates, || Ok(chosen))?;
        Ok((groups, probs, lse, gates))
    }

    pub(super) fn backward_grouped(
        &self,
        s: Saved,
        dy: &Tensor,
        ctx: &Context,
        accum: &GradAccumulator<'_>,
        balance: Option<&Balance>,
    ) -> Result<(Tensor, Tensor)> {
        let routed = s.routed().map(|r| r.1);
        let (Some(routed), Some(sorted)) = (routed, s.groups.sorted()) else { candle_core::bail!("{OTHER}") };
        let gates = &s.gates.factored;
        let (dgates, dx) = match s.experts {
            SavedExperts::Grouped(mut saved) => match saved.out.take() {
                // Outputs are replaced by their gradients in place.
                Some(out) => {
                    let dgates = sorted.scale(&out, gates, dy)?;
                    (dgates, self.grouped_backward(*saved, (out, None), ctx, sorted, accum)?.0)
                }
                None => {
                    let of = (sorted.gather(dy)?, Some(gates));
                    let (dx, dgates) = self.grouped_backward(*saved, of, ctx, sorted, accum)?;
                    let Some(dgates) = dgates else { candle_core::bail!("{OTHER}") };
                    (dgates, dx)
                }
            },
            SavedExperts::Dispatched(mut dispatched) => {
                let Some(out) = dispatched.out.take() else { candle_core::bail!("{OTHER}") };
                let dgates = sorted.scale(&out, gates, dy)?;
                (dgates, self.backward_dispatched(*dispatched, out, ctx, accum)?)
            }
            SavedExperts::PerExpert(..) => candle_core::bail!("{OTHER}"),
        };
        let shared = match (&self.shared, s.shared) {
            (Some(shared), Some(saved)) => Some(shared.backward(saved, dy, ctx, accum)?),
            _ => None,
        };
        let dx = sorted.combine(&dx, None, shared.as_ref())?;
        let extra = balance.and_then(|b| b.on_device.as_ref());
        let z = balance.map_or(0.0, |b| b.z);
        let dgates = self.factors_back(&s.gates, dgates, || Ok(routed.chosen.clone()), accum)?;
        let dlogits = route::cuda::backward(&routed, &dgates, extra, z, self.normalise)?;
        Ok((dx, self.router.backward(&s.router, &dlogits, ctx, accum, None)?))
    }

    /// Backward pass of all experts: [`GroupedExperts::backward`].
    pub(super) fn grouped_backward(
        &self,
        saved: grouped::Saved,
        of: (Tensor, Option<&Tensor>),
        ctx: &Context,
        sorted: &Sorted,
        accum: &GradAccumulator<'_>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        self.experts.iter().flat_map(Mlp::linears).flat_map(Linear::slots).for_each(|slot| accum.touch(slot));
        self.grouped_experts(of.0.dtype())?.backward(saved, of, ctx, sorted, accum)
    }
}
