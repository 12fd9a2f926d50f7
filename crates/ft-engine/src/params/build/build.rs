//! Builds a model: frozen tensors from a base, trained ones in flat buffers.

use crate::adapters::{Adapter, Selection};
use crate::load::Base;
use crate::params::Allocate;
use crate::ranks::{self, Comm, Threads};
use candle_core::{DType, Device};

/// Builder of a model from a base and a selection. By default, computes in f32 on the CPU and allocates
/// only the compute weights, without training state.
pub struct Build<'a> {
    pub(super) base: &'a Base,
    pub(super) selection: &'a Selection,
    pub(super) adapter: Option<&'a Adapter>,
    pub(super) dtype: DType,
    pub(super) device: &'a Device,
    pub(super) seed: u64,
    pub(super) allocate: Allocate,
    pub(super) comm: Option<&'a dyn Comm>,
    pub(super) alone: Threads,
    pub(super) shown: Option<&'static str>,
    pub(super) fp8: bool,
}

impl<'a> Build<'a> {
    /// Builder for a base and the selection of trained modules.
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
            alone: ranks::alone(),
            shown: None,
            fp8: false,
        }
    }

    /// Loads the values of an adapter, for further training or for inference.
    pub fn adapter(self, adapter: Option<&'a Adapter>) -> Self {
        Self { adapter, ..self }
    }

    /// Computes in `dtype` on `device`.
    pub fn on(self, dtype: DType, device: &'a Device) -> Self {
        Self { dtype, device, ..self }
    }

    /// Seed of LoRA's initial values; 0 by default.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Training state to allocate besides the compute weights.
    pub fn allocate(self, allocate: Allocate) -> Self {
        Self { allocate, ..self }
    }

    /// Ranks building the same model at the same time, matching [`Allocate::split`].
    pub fn among(self, comm: &'a dyn Comm) -> Self {
        Self { comm: Some(comm), ..self }
    }

    /// Whether dense linears multiply their frozen weights in 8-bit floats.
    pub fn in_fp8(self, fp8: bool) -> Self {
        Self { fp8, ..self }
    }

    /// Shows a progress bar of bytes read, with this label.
    pub fn shown(self, what: &'static str) -> Self {
        Self { shown: Some(what), ..self }
    }

    /// Ranks building the model; a single one by default.
    pub(super) fn ranks(&self) -> &dyn Comm {
        self.comm.unwrap_or(&self.alone)
    }
}
