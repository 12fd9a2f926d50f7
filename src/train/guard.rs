//! Nothing that is not finite reaches a weight.

use super::Error;
use crate::adapt::Params;
use crate::data::Dataset;

/// Refuses a step whose loss or gradient norm is not finite, naming tensors and rows.
pub fn finite(
    params: &Params,
    step: u64,
    loss: f64,
    grad_norm: f64,
    data: &Dataset,
    rows: &[usize],
) -> crate::Result<()> {
    if loss.is_finite() && grad_norm.is_finite() {
        return Ok(());
    }
    let what = if loss.is_finite() { "the gradient norm" } else { "the loss" };
    let mut bad = Vec::new();
    for (i, t) in params.tensors.iter().enumerate() {
        if let Some(g) = params.grad(i)?
            && !g.to_dtype(candle_core::DType::F32)?.sqr()?.sum_all()?.to_scalar::<f32>()?.is_finite()
        {
            bad.push(t.name.as_str());
        }
    }
    let shown = |n: usize, mut v: Vec<String>| {
        v.truncate(5);
        if n > 5 { format!("{} and {} more", v.join(", "), n - 5) } else { v.join(", ") }
    };
    let tensors = shown(bad.len(), bad.iter().take(5).map(|s| s.to_string()).collect());
    let lines: Vec<String> = rows
        .iter()
        .filter_map(|r| data.rows.get(*r))
        .flatten()
        .filter_map(|e| data.examples.get(*e))
        .map(|e| format!("data.train.{} line {}", e.source, e.line))
        .collect();
    let detail = format!(
        "  gradients that are not finite: {}\n  rows of the batch: {}",
        if tensors.is_empty() { "none".into() } else { tensors },
        shown(lines.len(), lines.iter().take(5).cloned().collect())
    );
    Err(Error::NonFinite { step, what, detail }.into())
}
