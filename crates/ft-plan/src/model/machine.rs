//! Machine of a recipe.

use candle_core::DType;
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_kernels::Machine;
use ft_recipe::{Dtype, Recipe, Weights};
use std::path::Path;

/// Machine of a recipe. The compute dtype defaults to bf16 on CUDA and f32 on the CPU; [`stored`] sets
/// the width of stored weights.
pub fn machine(recipe: &Recipe, cuda: bool) -> Machine {
    let width = dtype(recipe.model.dtype, cuda).size_in_bytes() as u64;
    let threads = recipe.parallel.threads(rayon::current_num_threads());
    Machine { cuda, width, stored: width, threads: threads as u64 }
}

/// Sets the stored weight width from the model's checkpoint; `dir` is its folder, if downloaded.
pub fn stored(machine: Machine, recipe: &Recipe, config: &Config, dir: Option<&Path>) -> Machine {
    match recipe.model.weights {
        Weights::Random => machine,
        Weights::Load => Machine { stored: Base::stored_width(config, dir), ..machine },
    }
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
