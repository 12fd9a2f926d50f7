//! Builds a model: frozen tensors from a base, trained ones in flat buffers.

use super::adapter::Adapter;
use super::loader::Loader;
use super::params::{Allocate, Params};
use super::selection::{Choice, Selection};
use super::{Error, Trained};
use crate::load::{Base, FourBit};
use crate::model::Decoder;
use crate::model::modules::{Kind, Module};
use crate::ranks::{self, Comm, Threads};
use candle_core::{DType, Device};
use ft_kernels::tensor::Real;

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

    /// Ranks building the same model at the same time, matching [`Allocate::shard`].
    pub fn among(self, comm: &'a dyn Comm) -> Self {
        Self { comm: Some(comm), ..self }
    }

    /// Shows a progress bar of bytes read, with this label.
    pub fn shown(self, what: &'static str) -> Self {
        Self { shown: Some(what), ..self }
    }

    /// Loads the model and allocates trained tensors.
    ///
    /// # Errors
    /// Missing, unexpected or misshapen tensors, all named; an adapter that does not match.
    pub fn run(&self) -> ft_base::Result<(Decoder, Params)> {
        let mut loader = Loader::new(self)?;
        let decoder = Decoder::build(&self.base.config, &mut loader)?;
        Ok((decoder, loader.end()?))
    }

    /// Logits `[t, v]` (f32) for a few tokens of one document, with a single layer in memory at a time.
    ///
    /// # Errors
    /// As [`Build::run`].
    pub fn logits(&self, ids: &[u32]) -> ft_base::Result<Real> {
        let mut loader = Loader::new(self)?;
        let logits = Decoder::logits_by_layer(&self.base.config, &mut loader, ids, self.device)?;
        loader.end()?;
        Ok(logits)
    }

    /// Ranks building the model; a single one by default.
    pub(super) fn ranks(&self) -> &dyn Comm {
        self.comm.unwrap_or(&self.alone)
    }
}

/// Origin of a module's 4-bit weight; `None` if unquantized or trained in full.
pub(super) fn four_bit(base: &Base, m: &Module, choice: &Choice) -> Option<FourBit> {
    if matches!(choice, Choice::Full { .. }) { None } else { base.four_bit(m) }
}

/// Refuses selections incompatible with 4-bit weights:
///
/// * full training of a weight stored in 4 bits only, unless the adapter replaces the weight
/// * base-derived LoRA initialization of a weight stored in 4 bits only
/// * trained rows of a 4-bit weight
/// * 4-bit weights of modules other than linears
/// * `model.quantize` with nothing left to quantize
///
/// # Errors
/// [`Error::FourBit`].
pub fn check_full(base: &Base, selection: &Selection, adapter: Option<&Adapter>) -> Result<(), Error> {
    let mut made = false;
    for (m, choice) in &selection.modules {
        let fail = |why: &str| Err(Error::FourBit { module: m.name.clone(), why: why.into() });
        if matches!(choice, Choice::Full { .. })
            && base.only_4bit(m)
            && !adapter.is_some_and(|a| a.replaces(&m.name))
        {
            return fail(
                "its weight is 4-bit and cannot train in full\n  hint: method = \"lora\" for it, or model.source \
                 with its original weights (model.quantize = \"nf4\" keeps all others in 4 bits)",
            );
        }
        let how = four_bit(base, m, choice);
        if let Some(initials) = base.initials().filter(|i| i.has(&m.name) && base.only_4bit(m)) {
            let word = initials.how().word();
            return fail(&format!(
                "its weight is 4-bit already, and lora.init = \"{word}\" is of its original weights\n  hint: \
                 model.source with these, and model.quantize = \"nf4\""
            ));
        }
        if matches!(choice, Choice::Rows { .. }) && how.is_some() {
            return fail(
                "its weight is 4-bit, and rows of it cannot train\n  hint: model.source with its original weights",
            );
        }
        made |= how == Some(FourBit::Quantized);
        if how.is_some() && !matches!(m.kind, Kind::Linear { .. }) {
            return fail("not built yet: a 4-bit weight of anything but a linear");
        }
    }
    if base.quantizes() && !made {
        let why =
            "nothing is left to quantize: every linear of the decoder trains in full\n  hint: leave it out";
        return Err(Error::FourBit { module: "model.quantize = \"nf4\"".into(), why: why.into() });
    }
    Ok(())
}

/// Names of trained tensors without a gradient, for the check of the first step.
pub fn unreached<'a>(tensors: &'a [Trained], reached: &[bool]) -> Vec<&'a str> {
    tensors.iter().zip(reached).filter(|(_, r)| !**r).map(|(t, _)| t.name.as_str()).collect()
}
