//! Building a model: frozen tensors from a base, trained ones in their flat buffers.

use super::adapter::Adapter;
use super::loader::Loader;
use super::params::{Allocate, Params};
use super::selection::{Choice, Selection};
use super::{Error, Trained};
use crate::base::{Base, FourBit};
use crate::comm::{self, Comm, Threads};
use ft_kernels::tensor::Real;
use crate::model::Decoder;
use crate::model::modules::{Kind, Module};
use candle_core::{DType, Device};

/// What a build needs: a base and what trains on it; by default it computes in f32 on the CPU, and allocates nothing
/// beside the values that the layers compute with.
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
    /// Of a base with what a selection of its modules adds.
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
            alone: comm::alone(),
            shown: None,
        }
    }

    /// With the values of an adapter, to go on from or to use.
    pub fn adapter(self, adapter: Option<&'a Adapter>) -> Self {
        Self { adapter, ..self }
    }

    /// To compute in `dtype` on `device`.
    pub fn on(self, dtype: DType, device: &'a Device) -> Self {
        Self { dtype, device, ..self }
    }

    /// With LoRA's initial values of a seed (0 by default).
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// With what is allocated beside the values that the layers compute with.
    pub fn allocate(self, allocate: Allocate) -> Self {
        Self { allocate, ..self }
    }

    /// With the ranks that build the same model at the same time, which [`Allocate::shard`] is of.
    pub fn among(self, comm: &'a dyn Comm) -> Self {
        Self { comm: Some(comm), ..self }
    }

    /// With a bar of the bytes that are read, under this word.
    pub fn shown(self, what: &'static str) -> Self {
        Self { shown: Some(what), ..self }
    }

    /// Loads the model and allocates what trains.
    ///
    /// # Errors
    /// Tensors that are missing, unexpected or of another shape, all named; an adapter that does not fit.
    pub fn run(&self) -> ft_base::Result<(Decoder, Params)> {
        let mut loader = Loader::new(self)?;
        let decoder = Decoder::build(&self.base.config, &mut loader)?;
        Ok((decoder, loader.end()?))
    }

    /// Logits of a few tokens of one document, [t, v] in f32, with one layer in memory at a time.
    ///
    /// # Errors
    /// As [`Build::run`].
    pub fn logits(&self, ids: &[u32]) -> ft_base::Result<Real> {
        let mut loader = Loader::new(self)?;
        let logits = Decoder::logits_by_layer(&self.base.config, &mut loader, ids, self.device)?;
        loader.end()?;
        Ok(logits)
    }

    /// The ranks that build the model.
    pub(super) fn ranks(&self) -> &dyn Comm {
        self.comm.unwrap_or(&self.alone)
    }
}

/// How a module's weight becomes 4-bit, if it does: not where it trains in full.
pub(super) fn four_bit(base: &Base, m: &Module, choice: &Choice) -> Option<FourBit> {
    if matches!(choice, Choice::Full { .. }) { None } else { base.four_bit(m) }
}

/// Refuses to train in full what the base has in 4 bits only (an adapter may hold its values), a 4-bit weight that is no
/// linear's, and to quantize where nothing is left to be.
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
        made |= how == Some(FourBit::Made);
        if how.is_some() && !matches!(m.kind, Kind::Linear { .. }) {
            return fail("not built yet: a 4-bit weight of anything but a linear");
        }
    }
    if base.makes_nf4() && !made {
        let why =
            "nothing is left to quantize: every linear of the decoder trains in full\n  hint: leave it out";
        return Err(Error::FourBit { module: "model.quantize = \"nf4\"".into(), why: why.into() });
    }
    Ok(())
}

/// The trained tensors that a reached-set leaves out, and the other way round, for the first step's check.
pub fn unreached<'a>(tensors: &'a [Trained], reached: &[bool]) -> Vec<&'a str> {
    tensors.iter().zip(reached).filter(|(_, r)| !**r).map(|(t, _)| t.name.as_str()).collect()
}
