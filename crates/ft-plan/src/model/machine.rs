//! Machine of a recipe.

use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_kernels::Machine;
use ft_recipe::{Dtype, Recipe, Weights};
use std::path::Path;

/// Machine of a recipe. The compute dtype defaults to bf16 on CUDA and f32 on the CPU; [`stored`] sets
/// the width of stored weights.
pub fn machine(recipe: &Recipe, cuda: bool) -> Machine {
    let width = match recipe.model.dtype {
        Some(Dtype::F32) => 4,
        Some(Dtype::Bf16 | Dtype::F16) => 2,
        None if cuda => 2,
        None => 4,
    };
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
