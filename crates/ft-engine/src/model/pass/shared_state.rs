//! State handed on between the layers of a pass: per-layer inputs, and keys and values shared by several layers. The
//! backward pass hands the gradients back the same way.

use candle_core::{Result, bail};
use ft_kernels::Tensor;
use ft_kernels::attention::Cache;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// State of a pass between its layers.
#[derive(Debug, Default)]
pub struct SharedState(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// Per-layer inputs `[t, l p]` of all layers from one on.
    inputs: Option<Tensor>,
    /// That layer.
    first: usize,
    /// Their gradient, if it is wanted.
    d_inputs: Option<Tensor>,
    wants_inputs: bool,
    /// Keys and values `[t, g c]` by the producing layer, and their gradients.
    keys: BTreeMap<usize, [Tensor; 2]>,
    d_keys: BTreeMap<usize, [Tensor; 2]>,
    /// Caches by layer, in generation.
    caches: BTreeMap<usize, Cache>,
}

impl SharedState {
    /// State of a pass in a plan, counted elsewhere: per-layer inputs, with whether their gradient is wanted, and keys
    /// and values of a layer, with gradients from later layers.
    pub fn ghost(inputs: Option<(Tensor, bool)>, keys: Option<(usize, [Tensor; 2])>) -> Self {
        let mut state = State::default();
        if let Some((all, wants)) = inputs {
            state.wants_inputs = wants;
            state.d_inputs = wants.then(|| all.clone());
            state.inputs = Some(all);
        }
        if let Some((l, keys)) = keys {
            state.d_keys.insert(l, keys.clone());
            state.keys.insert(l, keys);
        }
        Self(Mutex::new(state))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a pass with the per-layer inputs `[t, l p]` of the layers from `first` on; `wants` is whether their
    /// gradient is wanted.
    pub fn set_inputs(&self, first: usize, inputs: Tensor, wants: bool) {
        let mut state = self.state();
        (state.inputs, state.first, state.wants_inputs) = (Some(inputs), first, wants);
    }

    /// Inputs `[t, n p]` of `layers`.
    ///
    /// # Errors
    /// As [`SharedState::inputs`].
    pub fn inputs_of(&self, layers: Range<usize>, width: usize) -> Result<Tensor> {
        let state = self.state();
        match &state.inputs {
            Some(all) => {
                all.narrow(1, (layers.start - state.first) * width, layers.len() * width)?.contiguous()
            }
            None => bail!("layers {layers:?} have inputs of their own, and the pass has none"),
        }
    }

    /// Inputs `[t, p]` of layer `l`.
    ///
    /// # Errors
    /// A pass without them.
    pub fn inputs(&self, l: usize, width: usize) -> Result<Tensor> {
        self.inputs_of(l..l + 1, width)
    }

    /// Sets the gradient of the inputs of layer `l`, if wanted.
    ///
    /// # Errors
    /// As [`SharedState::inputs`].
    pub fn give_inputs(&self, l: usize, d: &Tensor) -> Result<()> {
        let mut state = self.state();
        if !state.wants_inputs {
            return Ok(());
        }
        if state.d_inputs.is_none() {
            state.d_inputs = state.inputs.as_ref().map(Tensor::zeros_like).transpose()?;
        }
        match &state.d_inputs {
            Some(all) => all.slice_set(d, 1, (l - state.first) * d.dim(1)?),
            None => bail!("layer {l} has a gradient for inputs that the pass lacks"),
        }
    }

    /// Sets the gradient `d` of the inputs of the topmost layers, if wanted.
    ///
    /// # Errors
    /// As [`SharedState::inputs`].
    pub fn give_topmost(&self, d: &Tensor) -> Result<()> {
        let d_inputs = self.d_inputs()?;
        let first = d_inputs.dim(1)? - d.dim(1)?;
        d_inputs.slice_set(d, 1, first)?;
        let mut state = self.state();
        state.d_inputs = Some(d_inputs);
        Ok(())
    }

    /// The gradient of all per-layer inputs; zero where no layer has given one.
    ///
    /// # Errors
    /// As [`SharedState::inputs`].
    pub fn d_inputs(&self) -> Result<Tensor> {
        let state = self.state();
        match (&state.d_inputs, &state.inputs) {
            (Some(d), _) => Ok(d.clone()),
            (None, Some(inputs)) => inputs.zeros_like(),
            (None, None) => bail!("a gradient for inputs that the pass lacks"),
        }
    }

    /// Takes the gradient of all per-layer inputs; `None` if no layer has given one. The inputs go.
    pub fn take_inputs(&self) -> Option<Tensor> {
        let mut state = self.state();
        state.inputs = None;
        state.d_inputs.take()
    }

    /// Hands on the keys and values of layer `l`.
    pub fn lend_keys(&self, l: usize, keys: [Tensor; 2]) {
        self.state().keys.insert(l, keys);
    }

    /// Keys and values of layer `l`.
    ///
    /// # Errors
    /// A layer that has not handed them on.
    pub fn keys(&self, l: usize) -> Result<[Tensor; 2]> {
        match self.state().keys.get(&l) {
            Some(keys) => Ok(keys.clone()),
            None => bail!("attention: the keys of layer {l} are missing"),
        }
    }

    /// Adds gradients of the keys and values of layer `l`.
    ///
    /// # Errors
    /// Shapes that differ.
    pub fn give_keys(&self, l: usize, [dk, dv]: [Tensor; 2]) -> Result<()> {
        let mut state = self.state();
        let sum = match state.d_keys.remove(&l) {
            Some([k, v]) => [(k + dk)?, (v + dv)?],
            None => [dk, dv],
        };
        state.d_keys.insert(l, sum);
        Ok(())
    }

    /// The gradients from later layers for the keys and values of layer `l`; zero without any.
    ///
    /// # Errors
    /// As [`SharedState::keys`].
    pub fn d_keys(&self, l: usize) -> Result<[Tensor; 2]> {
        let given = self.state().d_keys.get(&l).cloned();
        let zeros = || {
            let [k, v] = self.keys(l)?;
            Ok([k.zeros_like()?, v.zeros_like()?])
        };
        given.map_or_else(zeros, Ok)
    }

    /// Takes the gradients from later layers for the keys and values of layer `l`, if any. The keys go.
    pub fn take_keys(&self, l: usize) -> Option<[Tensor; 2]> {
        let mut state = self.state();
        state.keys.remove(&l);
        state.d_keys.remove(&l)
    }

    /// Hands on the cache of layer `l`, with the tokens of this pass.
    pub fn lend_cache(&self, l: usize, cache: &Cache) {
        self.state().caches.insert(l, cache.clone());
    }

    /// Cache of layer `l`.
    ///
    /// # Errors
    /// As [`SharedState::keys`].
    pub fn cache(&self, l: usize) -> Result<Cache> {
        match self.state().caches.get(&l) {
            Some(cache) => Ok(cache.clone()),
            None => bail!("attention: the cache of layer {l} is missing"),
        }
    }
}
