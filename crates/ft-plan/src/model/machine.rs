//! Machine of a recipe.

use crate::host::of_driver;
use crate::time::probe;
use candle_core::{DType, Device};
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_kernels::Machine;
use ft_recipe::{Dtype, Products, Quantize, Recipe, Weights};
use std::path::Path;

/// Device to plan for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Target {
    /// CUDA instead of CPU.
    pub cuda: bool,
    /// Model of the card, as named by [`crate::card`] or the driver, if known.
    pub card: Option<&'static str>,
}

impl Target {
    /// An open device, named by the table of cards, else by the driver.
    pub fn of(device: &Device) -> Self {
        let name = ft_kernels::cuda::name(device);
        let card = name.map(|name| of_driver(&name).unwrap_or_else(|| probe::named(&name)));
        Self { cuda: device.is_cuda(), card }
    }
}

impl From<bool> for Target {
    /// CUDA or the CPU, of unknown model.
    fn from(cuda: bool) -> Self {
        Self { cuda, card: None }
    }
}

/// Machine of a recipe. The compute dtype defaults to bf16 on CUDA and f32 on the CPU; [`stored`] sets
/// the width of stored weights.
pub fn machine(recipe: &Recipe, target: impl Into<Target>) -> Machine {
    let Target { cuda, card } = target.into();
    let width = dtype(recipe.model.dtype, cuda).size_in_bytes() as u64;
    let threads = recipe.parallel.threads(rayon::current_num_threads());
    let fp8 = cuda && recipe.memory.products == Products::Fp8;
    Machine { cuda, width, stored: width, threads: threads as u64, card, fp8 }
}

/// Sets the stored weight width from the model's checkpoint; `dir` is its folder, if downloaded.
pub fn stored(machine: Machine, recipe: &Recipe, config: &Config, dir: Option<&Path>) -> Machine {
    match recipe.model.weights {
        Weights::Random => machine,
        Weights::Load => Machine { stored: Base::stored_width(config, dir), ..machine },
    }
}

/// Quantization of the decoder linears: NF4 for a checkpoint of bitsandbytes, else `asked`, the recipe's.
pub fn quantization(config: &Config, asked: Quantize) -> Quantize {
    if config.is_bitsandbytes() { Quantize::Nf4 } else { asked }
}

/// Compute dtype: the one named, else f32 on the CPU and bf16 on CUDA.
pub fn dtype(named: Option<Dtype>, cuda: bool) -> DType {
    match named {
        Some(Dtype::Bf16) => DType::BF16,
        Some(Dtype::F16) => DType::F16,
        Some(Dtype::F32) => DType::F32,
        None if cuda => DType::BF16,
        None => DType::F32,
    }
}
