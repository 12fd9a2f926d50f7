//! Tensors across a stage boundary, besides hidden states.

use super::shared_state::SharedState;
use crate::model::Config;
use candle_core::{DType, Device, Result, bail};
use ft_kernels::Tensor;

/// State passed upward at a layer boundary: per-layer inputs of the layers above, keys and values of those below. In
/// the backward pass, its gradients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageBoundary {
    /// Values of a token in the inputs of a layer, and the layers above.
    inputs: Option<(usize, std::ops::Range<usize>)>,
    /// Whether the gradient of the inputs is wanted: the embedding trains.
    wants: bool,
    /// Layers below with keys and values used above, with heads and channels.
    keys: Vec<(usize, [usize; 2])>,
}

/// Number of tokens of a rank, and of all tensor-parallel ranks: the rank has the keys of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    pub own: usize,
    pub attended: usize,
}

impl StageBoundary {
    /// The boundary below layer `layer`, with heads cut over `tensor` ranks; `wants` is whether the embedding trains.
    pub fn below(config: &Config, layer: usize, tensor: usize, wants: bool) -> Self {
        let heads = |l: usize| match config.shares_keys(l) {
            true => 1,
            false => config.attention[l].kv_heads / tensor.max(1),
        };
        let above = layer..config.layers;
        let producers = config.attention.get(above.clone()).into_iter().flatten();
        let mut lent: Vec<usize> = producers.filter_map(|a| a.producer()).filter(|l| *l < layer).collect();
        lent.sort_unstable();
        lent.dedup();
        let keys = lent.into_iter().map(|l| (l, [heads(l), config.attention[l].head_dim])).collect();
        Self { inputs: config.layer_inputs.map(|i| (i.width, above)), wants, keys }
    }

    /// Number of values sent up for `rows`; with `back`, of gradients sent down.
    pub fn values(&self, rows: Rows, back: bool) -> usize {
        self.shapes(rows, back).iter().map(|shape| shape.iter().product::<usize>()).sum()
    }

    /// Shapes of the tensors sent up; with `back`, of the gradients sent down.
    fn shapes(&self, rows: Rows, back: bool) -> Vec<Vec<usize>> {
        let inputs = self.inputs.iter().filter(|_| self.wants || !back);
        let inputs = inputs.map(|(width, layers)| vec![rows.own, width * layers.len()]);
        let keys = self
            .keys
            .iter()
            .flat_map(|(_, [g, c])| [vec![rows.attended, *g, *c], vec![rows.attended, *g, *c]]);
        inputs.chain(keys).collect()
    }

    /// Zeros to receive the tensors from below or above.
    pub fn zeros(&self, rows: Rows, back: bool, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
        self.shapes(rows, back).into_iter().map(|shape| Tensor::zeros(shape, dtype, device)).collect()
    }

    /// Takes the state for layers above from a pass.
    pub fn forward_tensors(&self, shared_state: &SharedState) -> Result<Vec<Tensor>> {
        let inputs = self.inputs.iter().map(|(width, layers)| shared_state.inputs_of(layers.clone(), *width));
        let mut out = inputs.collect::<Result<Vec<_>>>()?;
        for (l, _) in &self.keys {
            out.extend(shared_state.keys(*l)?);
        }
        Ok(out)
    }

    /// Starts a pass above with the tensors from below.
    pub fn set_forward_tensors(&self, shared_state: &SharedState, received: Vec<Tensor>) -> Result<()> {
        let mut received = received.into_iter();
        if let Some((_, layers)) = &self.inputs {
            shared_state.set_inputs(layers.start, next(&mut received)?, self.wants);
        }
        self.keys.iter().try_for_each(|(l, _)| {
            shared_state.lend_keys(*l, [next(&mut received)?, next(&mut received)?]);
            Ok(())
        })
    }

    /// Takes the gradients for layers below from a pass above.
    pub fn backward_tensors(&self, shared_state: &SharedState) -> Result<Vec<Tensor>> {
        let mut out = Vec::new();
        if self.inputs.is_some() && self.wants {
            out.push(shared_state.d_inputs()?);
        }
        for (l, _) in &self.keys {
            out.extend(shared_state.d_keys(*l)?);
        }
        Ok(out)
    }

    /// Gives a pass below the gradients from above.
    pub fn set_backward_tensors(&self, shared_state: &SharedState, received: Vec<Tensor>) -> Result<()> {
        let mut received = received.into_iter();
        if self.inputs.is_some() && self.wants {
            shared_state.give_topmost(&next(&mut received)?)?;
        }
        self.keys
            .iter()
            .try_for_each(|(l, _)| shared_state.give_keys(*l, [next(&mut received)?, next(&mut received)?]))
    }
}

fn next(received: &mut impl Iterator<Item = Tensor>) -> Result<Tensor> {
    match received.next() {
        Some(t) => Ok(t),
        None => bail!("a stage has passed on too few tensors: a bug in ft"),
    }
}
