//! Checks for non-finite values and for diverged runs.

use super::gather::Alone;
use super::step::{Setup, probe};
use super::{Error, Stepped};
use candle_core::DType;
use ft_data::{Dataset, Micro};
use ft_engine::comm::{At, Comm};
use ft_engine::params::Params;
use ft_engine::params::Unit;
use ft_engine::params::buffers::{Held, common};
use ft_kernels::{optimizer, to_host};
use std::collections::BTreeSet;
use std::ops::Range;

/// Refuses a step if its loss or gradient norm is not finite, and names tensors and data lines. `factor` is
/// the clipping factor of the gradients.
pub fn finite(
    (params, comm): (&Params, &dyn Comm),
    step: u64,
    loss: f64,
    (grad_norm, factor): (f64, f64),
    data: &Dataset,
    rows: &[usize],
) -> ft_base::Result<()> {
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
    let all_finite = |u: &Unit, r: &Range<usize>| u.grads.as_ref().map_or(Ok(true), |g| held_finite(g, r));
    let bad = bad(params, comm, "gradients that are not finite", &all_finite)?;
    let shown = |n: usize, mut v: Vec<String>| {
        v.truncate(5);
        if n > 5 { format!("{} and {} more", v.join(", "), n - 5) } else { v.join(", ") }
    };
    let tensors = shown(bad.len(), bad.iter().take(5).map(|s| s.to_string()).collect());
    let lines: Vec<String> = rows
        .iter()
        .flat_map(|r| data.rows.get(*r).unwrap_or_default())
        .filter_map(|i| data.samples.get(i as usize).ok()?)
        .map(|e| format!("data.train.{} line {}", e.source, e.line))
        .collect();
    let detail = format!(
        "  gradients that are not finite: {}\n  rows of the batch: {}",
        if tensors.is_empty() { "none".into() } else { tensors },
        shown(lines.len(), lines.iter().take(5).cloned().collect())
    );
    let hint = match step {
        1 => {
            "nothing was trained yet: look at the model's weights, at the adapter in lora.init if there is one, and at these rows with `ft data`"
        }
        _ => "a lower optimizer.lr, run.clip, or a look at these rows with `ft data`",
    };
    let updated = match params.in_backward {
        true => "weights were updated in the backward pass, and are not saved",
        false => "no weight was updated",
    };
    Err(Error::NonFinite { step, updated, what, detail, hint }.into())
}

/// Returns true if the local part of a range is finite.
fn held_finite(held: &Held, range: &Range<usize>) -> candle_core::Result<bool> {
    let here = common(&held.at, range);
    if here.is_empty() { Ok(true) } else { optimizer::finite(&held.of(here)?) }
}

/// Collects the tensors for which `finite` returns false on any rank.
fn bad<'p>(
    params: &'p Params,
    comm: &dyn Comm,
    what: &'static str,
    finite: &dyn Fn(&Unit, &Range<usize>) -> candle_core::Result<bool>,
) -> ft_base::Result<Vec<&'p str>> {
    let mut mine = Vec::new();
    for (i, slot) in params.slots.iter().enumerate() {
        if !finite(params.unit(slot)?, &slot.range())? {
            mine.push(i as u64);
        }
    }
    let all: BTreeSet<u64> = comm.share(At::all(what), &mine)?.into_iter().flatten().collect();
    Ok(all.iter().filter_map(|i| params.tensors.get(*i as usize)).map(|t| t.name.as_str()).collect())
}

/// Refuses non-finite weights and moments, and names the tensors. Called before a checkpoint is saved.
///
/// # Errors
/// [`Error::Weights`]; lost rank.
pub fn weights(params: &Params, comm: &dyn Comm, step: u64) -> ft_base::Result<()> {
    let states = |u: &Unit, r: &Range<usize>| {
        let mut moments = u.moments.as_ref().map_or(Ok(true), |m| m.finite(r))?;
        for p in u.projected.iter().filter(|p| r.contains(&params.slots[p.index].offset)) {
            let (rows, cols) = p.low();
            moments &= p.moments.finite(&(0..rows * cols))?;
        }
        let kept = moments && held_finite(&u.master, r)?;
        // Weights without master weights.
        let rest = [0..u.kept.start, u.kept.end..u.len].into_iter().map(|rest| common(&rest, r));
        rest.filter(|rest| !rest.is_empty())
            .try_fold(kept, |all, r| Ok(all && held_finite(&u.compute.held, &r)?))
    };
    let mut whole = true;
    for u in params.units.iter().flatten() {
        whole &= states(u, &(0..u.len))?;
    }
    let all = comm.share(At::all("whether weights are finite"), &[u64::from(whole)])?;
    if all.iter().flatten().all(|w| *w != 0) {
        return Ok(());
    }
    let bad = bad(params, comm, "weights that are not finite", &states)?;
    let more = bad.len().saturating_sub(5);
    let mut tensors = bad.iter().take(5).copied().collect::<Vec<_>>().join(", ");
    if more > 0 {
        tensors += &format!(" and {more} more");
    }
    Err(Error::Weights { step, tensors }.into())
}

/// Number of steps without a gradient between checks of the logits.
const STILL: u64 = 3;

/// Detects a diverged model, for which all logits of a token are equal.
///
/// A zero gradient alone is not conclusive: experts may receive no token, and a router with top-1 experts
/// may get no gradient. So the logits decide, and they are computed only after steps without a gradient.
#[derive(Debug, Default)]
pub struct Still(u64);

impl Still {
    /// Records step number `step`; `last` marks the final step of the run.
    ///
    /// # Errors
    /// [`Error::Diverged`].
    pub fn look(
        &mut self,
        s: &Stepped,
        setup: &Setup<'_>,
        row: impl FnOnce() -> ft_base::Result<Micro>,
        step: u64,
        last: bool,
    ) -> ft_base::Result<()> {
        self.0 = if s.grad_norm == 0.0 && s.targets > 0 { self.0 + 1 } else { 0 };
        if self.0 == 0 || !(last || self.0.is_multiple_of(STILL)) {
            return Ok(());
        }
        let row = row()?;
        if row.ids.is_empty() {
            return Ok(());
        }
        let alone = Alone::new(setup.decoder, setup.params, setup.comm);
        let logits_tv = probe(setup.decoder, &alone, &row, setup.device)?.to_dtype(DType::F32)?;
        let logits_tv = to_host(&logits_tv)?.to_vec2::<f32>()?;
        let same = |row: &Vec<f32>| row.iter().all(|x| Some(x) == row.first());
        match logits_tv.iter().all(same) {
            true => Err(Error::Diverged { step, steps: self.0, loss: s.loss }.into()),
            false => Ok(()),
        }
    }
}
