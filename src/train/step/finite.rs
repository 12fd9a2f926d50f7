//! Checks for non-finite values.

use super::context::{StepInput, StepOutput, TrainContext};
use crate::train::Error;
use ft_engine::params::buffers::{LocalShard, common};
use ft_engine::params::{FlatParam, Params};
use ft_engine::ranks::{CollectiveId, Comm};
use ft_kernels::optimizer;
use std::collections::BTreeSet;
use std::ops::Range;

/// Refuses a step with a non-finite loss or gradient norm, and names tensors and data lines. `factor` is the clipping
/// factor of the gradients.
///
/// # Errors
/// [`Error::NonFinite`]; lost rank.
pub fn check_gradients(
    cx: &TrainContext<'_>,
    input: &StepInput<'_>,
    output: &StepOutput,
    factor: f64,
) -> ft_base::Result<()> {
    let (params, grad_norm, step) = (&cx.model.params, output.grad_norm, input.step + 1);
    let loss = output.loss + output.router_losses.0 + output.router_losses.1;
    // AdamW squares the gradients.
    let square = ((grad_norm * factor) as f32).powi(2);
    if loss.is_finite() && square.is_finite() {
        return Ok(());
    }
    let what = match (loss.is_finite(), grad_norm.is_finite()) {
        (true, true) => "the square of the gradient norm",
        (true, false) => "the gradient norm",
        (false, _) => "the loss",
    };
    let all_finite =
        |u: &FlatParam, r: &Range<usize>| u.grads.as_ref().map_or(Ok(true), |g| held_finite(g, r));
    let bad = not_finite(params, cx.comm, "gradients that are not finite", &all_finite)?;
    let tensors = first_five(&bad);
    let lines: Vec<String> = input
        .rows
        .iter()
        .flat_map(|r| input.data.rows.get(*r).unwrap_or_default())
        .filter_map(|i| input.data.samples.get(i as usize).ok()?)
        .map(|e| format!("data.train.{} line {}", e.source, e.line))
        .collect();
    let detail = format!(
        "  gradients that are not finite: {}\n  rows of the batch: {}",
        if tensors.is_empty() { "none" } else { &tensors },
        first_five(&lines)
    );
    let hint = if step == 1 {
        "nothing was trained yet: look at the model's weights, at the adapter in lora.init if there \
            is one, and at these rows with `ft data`"
    } else {
        "a lower optimizer.lr, run.clip, or a look at these rows with `ft data`"
    };
    let updated = if params.in_backward {
        "weights were updated in the backward pass, and are not saved"
    } else {
        "no weight was updated"
    };
    Err(Error::NonFinite { step, updated, what, detail, hint }.into())
}

/// Returns true if the local part of a range is finite.
fn held_finite(held: &LocalShard, range: &Range<usize>) -> candle_core::Result<bool> {
    let here = common(&held.at, range);
    if here.is_empty() { Ok(true) } else { optimizer::finite(&held.of(here)?) }
}

/// Collects the tensors for which `finite` returns false on any rank.
fn not_finite<'p>(
    params: &'p Params,
    comm: &dyn Comm,
    what: &'static str,
    finite: &dyn Fn(&FlatParam, &Range<usize>) -> candle_core::Result<bool>,
) -> ft_base::Result<Vec<&'p str>> {
    let mut mine = Vec::new();
    for (i, slot) in params.slots.iter().enumerate().filter(|(i, _)| params.is_here(*i)) {
        if !finite(params.flat(slot)?, &slot.range())? {
            mine.push(i as u64);
        }
    }
    let all: BTreeSet<u64> =
        comm.all_gather_object(CollectiveId::all(what), &mine)?.into_iter().flatten().collect();
    Ok(all.iter().filter_map(|i| params.tensors.get(*i as usize)).map(|t| t.name.as_str()).collect())
}

/// Refuses non-finite weights and moments, and names the tensors. Called before a checkpoint is saved.
///
/// # Errors
/// [`Error::Weights`]; lost rank.
pub fn check_weights(params: &Params, comm: &dyn Comm, step: u64) -> ft_base::Result<()> {
    let states = |u: &FlatParam, r: &Range<usize>| {
        let mut moments = u.moments.as_ref().map_or(Ok(true), |m| m.finite(r))?;
        for p in u.projected.iter().filter(|p| r.contains(&params.slots[p.index].offset)) {
            let (rows, cols) = p.low;
            moments &= p.moments.finite(&(0..rows * cols))?;
        }
        let kept = moments && held_finite(&u.master, r)?;
        // Weights without master weights.
        let rest = [0..u.kept.start, u.kept.end..u.len].into_iter().map(|rest| common(&rest, r));
        rest.filter(|rest| !rest.is_empty())
            .try_fold(kept, |all, r| Ok(all && held_finite(&u.compute.held, &r)?))
    };
    let mut whole = true;
    for u in params.flats.iter().flatten() {
        whole &= states(u, &(0..u.len))?;
    }
    let all = comm.all_gather_object(CollectiveId::all("whether weights are finite"), &whole)?;
    if all.into_iter().all(|whole| whole) {
        return Ok(());
    }
    let bad = not_finite(params, comm, "weights that are not finite", &states)?;
    Err(Error::Weights { step, tensors: first_five(&bad) }.into())
}

/// Lists up to five names, and the number of further ones.
fn first_five<T: AsRef<str>>(all: &[T]) -> String {
    let shown = all.iter().take(5).map(AsRef::as_ref).collect::<Vec<&str>>().join(", ");
    if all.len() > 5 { format!("{shown} and {} more", all.len() - 5) } else { shown }
}
