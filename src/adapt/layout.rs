//! Where a checkpoint keeps a module's weight: in a tensor of its own, or, for experts, in a part of one that
//! holds all experts of a layer.
//!
//! transformers 5 can write `mlp.experts.gate_up_proj` [e, 2f, d] (an expert's gate rows, then its up rows),
//! `mlp.experts.down_proj` [e, d, f] and the router as `mlp.gate.weight`, whatever the family called them.

use crate::model::Config;
use crate::model::modules::{Group, Module};
use crate::store::{self, TensorFiles};
use candle_core::{DType, Device, Tensor};

/// The part of a file's tensor that is one weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Name of the tensor in the file.
    pub name: String,
    /// Shape of that tensor.
    pub whole: Vec<usize>,
    /// First element of the part.
    pub start: usize,
    /// Shape of the part.
    pub shape: Vec<usize>,
}

impl Location {
    /// A tensor of its own.
    pub fn own(name: String, shape: Vec<usize>) -> Self {
        Self { name, whole: shape.clone(), start: 0, shape }
    }

    /// Reads the part.
    ///
    /// # Errors
    /// A tensor that is not there or cannot be read.
    pub fn read(&self, files: &TensorFiles, dtype: DType, device: &Device) -> Result<Tensor, store::Error> {
        if self.whole == self.shape {
            files.tensor(&self.name, dtype, device)
        } else {
            files.tensor_part(&self.name, self.start, &self.shape, dtype, device)
        }
    }
}

/// Where a module's weight lies in these files; its own name where they have neither layout.
pub fn weight(config: &Config, files: &TensorFiles, m: &Module) -> Location {
    let own = Location::own(format!("{}.weight", m.name), m.weight_shape());
    if files.info(&own.name).is_some() {
        return own;
    }
    fused(config, files, m).unwrap_or(own)
}

fn fused(config: &Config, files: &TensorFiles, m: &Module) -> Option<Location> {
    let (moe, names) = (config.moe.as_ref()?, config.family.experts.as_ref()?);
    let layer = m.layer?;
    let at = |rest: &str| {
        [names.block, "mlp"]
            .map(|block| format!("model.layers.{layer}.{block}.{rest}"))
            .into_iter()
            .find(|n| files.info(n).is_some())
    };
    let (e, f, d) = (moe.experts, moe.width, config.hidden);
    match (m.group, m.expert) {
        (Group::Router, _) => Some(Location::own(at("gate.weight")?, m.weight_shape())),
        (Group::Experts, Some(expert)) => {
            let which = names.names.iter().position(|n| *n == m.last())?;
            let shape = m.weight_shape();
            Some(match which {
                2 => Location {
                    name: at("experts.down_proj")?,
                    whole: vec![e, d, f],
                    start: expert * d * f,
                    shape,
                },
                _ => Location {
                    name: at("experts.gate_up_proj")?,
                    whole: vec![e, 2 * f, d],
                    start: (expert * 2 + which) * f * d,
                    shape,
                },
            })
        }
        _ => None,
    }
}
