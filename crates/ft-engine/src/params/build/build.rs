//! Builds a model: frozen tensors from a base, trained ones in flat buffers.

use crate::adapters::{Adapter, Selection};
use crate::load::Base;
use crate::params::Allocate;
use crate::ranks::Comm;
use candle_core::{DType, Device};

/// A model to build from a base and a selection: `Build { dtype, device, ..Build::new(base, selection) }`.
pub struct Build<'a> {
    /// Weights to load.
    pub base: &'a Base,
    /// Trained modules.
    pub selection: &'a Selection,
    /// Adapter to load, for further training or for inference.
    pub adapter: Option<&'a Adapter>,
    /// Compute dtype.
    pub dtype: DType,
    /// Device of the computation.
    pub device: &'a Device,
    /// Seed of LoRA's initial values.
    pub seed: u64,
    /// Training state to allocate besides the compute weights.
    pub allocate: Allocate,
    /// Ranks building the same model at the same time, matching [`Allocate::split`]; `None` for this one alone.
    pub comm: Option<&'a dyn Comm>,
    /// Label of a progress bar of bytes read; `None` for no bar.
    pub shown: Option<&'static str>,
    /// Whether dense linears multiply their frozen weights in 8-bit floats.
    pub fp8: bool,
}

impl<'a> Build<'a> {
    /// A build in f32 on the CPU, of the compute weights alone, without training state.
    pub fn new(base: &'a Base, selection: &'a Selection) -> Self {
        Self {
            base,
            selection,
            adapter: None,
            dtype: DType::F32,
            device: &Device::Cpu,
            seed: 0,
            allocate: Allocate::default(),
            comm: None,
            shown: None,
            fp8: false,
        }
    }
}
