//! Logits of models larger than memory: computed on the CPU in f32, for the smallest rounding error, with
//! one layer in memory at a time.

use candle_core::{DType, Device, Tensor};
use ft_base::memory;
use ft_base::rng::{Purpose, Stream};
use ft_engine::adapters::{Adapter, Selection};
use ft_engine::load::Base;
use ft_engine::model::modules::modules;
use ft_engine::params::build::Build;
use ft_engine::quant;
use rayon::prelude::*;
use std::collections::HashMap;

/// Tolerance for the relative L2 distance of logits after sums in another order, in most models.
pub const BAR: f64 = 1e-5;
/// Allowed distance, as a multiple of the distance by a perturbation: one may move the logits less than another.
const PERTURBATIONS: f64 = 10.0;
/// Perturbations tried before a distance counts as unexplained.
const TRIES: u64 = 8;

/// Computes logits `[t, v]` of a few tokens in f32, for a base alone or with an adapter.
pub fn logits(
    base: &Base,
    selection: &Selection,
    adapter: Option<&Adapter>,
    ids: &[u32],
) -> ft_base::Result<Tensor> {
    Build { adapter, ..Build::new(base, selection) }.logits(ids)
}

/// Tolerance for logits `apart` by the order of sums alone: `bar`, or, in models with amplified rounding errors,
/// 10 times the distance by such errors. `moved` computes the distance by perturbations of a seed, and is called only
/// if `bar` is exceeded.
pub fn tolerance(
    apart: f64,
    mut bar: f64,
    moved: &dyn Fn(u64) -> ft_base::Result<f64>,
) -> ft_base::Result<f64> {
    for seed in 0..TRIES {
        if apart <= bar || !apart.is_finite() {
            break;
        }
        let moved = moved(seed)?;
        if moved.is_finite() {
            bar = bar.max(PERTURBATIONS * moved);
        }
    }
    Ok(bar)
}

/// Values in f32, perturbed as by rounding, by one or two units in the last place. `number` tells tensors of a seed
/// apart.
pub fn perturbed(values: &Tensor, seed: u64, number: u64) -> candle_core::Result<Tensor> {
    let stream = Stream::new(seed, Purpose::Rounding, 0, number);
    let mut all = values.flatten_all()?.to_vec1::<f32>()?;
    all.par_chunks_mut(32).enumerate().for_each(|(i, chunk)| {
        let word = stream.word(i as u64);
        for (bit, x) in chunk.iter_mut().enumerate() {
            let up = (word >> bit) & 1 == 1;
            *x *= if up { 1.0 + f32::EPSILON } else { 1.0 - f32::EPSILON };
        }
    });
    Tensor::from_vec(all, values.shape(), &Device::Cpu)
}

/// Peak memory of [`logits`] in bytes: the largest layer or table, and the whole adapter.
pub fn bytes(base: &Base, selection: &Selection) -> u64 {
    let mut units: HashMap<String, u64> = HashMap::new();
    for m in modules(&base.config) {
        let n = m.weight_values() as u64;
        let dense = !base.is_4bit() || !quant::applies_to(&m);
        // 4-bit weights: half a byte of code per value, and up to 4 bytes of scale per quantization block
        // of 64.
        let value = base.frozen_dtype(&m, DType::F32, &Device::Cpu).size_in_bytes() as u64;
        let bytes = if dense { value * n } else { n.div_ceil(2) + n.div_ceil(16) };
        let unit = m.layer.map_or_else(|| m.name.clone(), |l| l.to_string());
        *units.entry(unit).or_default() += bytes + 4 * m.bias().unwrap_or(0) as u64;
    }
    let adapter: u64 = selection.trained().iter().map(|t| 4 * t.elements() as u64).sum();
    adapter + units.into_values().max().unwrap_or(0)
}

/// Refuses a comparison if host memory is too small, before any allocation. `what` names the operation in
/// the message.
///
/// # Errors
/// [`ft_plan::Error::DoesNotFit`].
pub fn fits(base: &Base, selection: &Selection, what: &str) -> ft_base::Result<()> {
    within(bytes(base, selection), memory::available_bytes(), what)
}

fn within(needed: u64, free: Option<u64>, what: &str) -> ft_base::Result<()> {
    let Some(free) = free.filter(|free| needed > *free) else { return Ok(()) };
    let (needed, free) = (ft_plan::report::bytes(needed), ft_plan::report::bytes(free));
    let why = format!(
        "{what} takes {needed} of host memory, and {free} are free: it is done on the CPU in f32, a layer at a time\n  \
         hint: end other programs, or do it on a machine that has more"
    );
    Err(ft_plan::Error::DoesNotFit(why).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ft_base::ExitCode;
    use ft_engine::model::Config;

    #[test]
    fn a_distance_of_ten_perturbations_is_explained() -> anyhow::Result<()> {
        let far = [1e-9, f64::INFINITY, 3e-5];
        for (apart, tries, explained) in
            [(1e-5, 0, true), (2e-4, 3, true), (3.1e-4, TRIES, false), (f64::INFINITY, 0, false)]
        {
            let tried = std::cell::Cell::new(0);
            let bar = tolerance(apart, BAR, &|seed| {
                tried.set(tried.get() + 1);
                Ok(far[seed as usize % far.len()])
            })?;
            assert_eq!((tried.get(), apart <= bar), (tries, explained), "{apart}: {bar}");
        }
        Ok(())
    }

    #[test]
    fn each_value_is_perturbed_and_zero_stays() -> anyhow::Result<()> {
        let values: Vec<f32> = (0..100).map(|i| 0.1 * i as f32).collect();
        let of = |seed| -> anyhow::Result<Vec<f32>> {
            let t = Tensor::from_slice(&values, (4, 25), &Device::Cpu)?;
            Ok(perturbed(&t, seed, 3)?.flatten_all()?.to_vec1()?)
        };
        let got = of(0)?;
        let ulps = |(a, b): (&f32, &f32)| a.to_bits().abs_diff(b.to_bits());
        assert!(got[0] == 0.0 && got.iter().zip(&values).skip(1).all(|pair| (1..=2).contains(&ulps(pair))));
        assert!(got == of(0)? && got != of(1)?);
        Ok(())
    }

    #[test]
    fn too_little_memory_is_refused_before_it_is_taken() {
        assert!(within(5, Some(5), "a merge").is_ok() && within(5, None, "a merge").is_ok());
        let e = within(3 << 30, Some(1 << 30), "a merge").expect_err("too little");
        assert_eq!(e.exit_code(), ExitCode::DoesNotFit);
        let said = e.to_string();
        assert!(said.starts_with("a merge takes 3.00 GiB of host memory, and 1.00 GiB are free"), "{said}");
        assert!(said.contains("\n  hint: "), "{said}");
    }

    /// Mixtral 8x7B needs memory for one layer, not for 187 GB.
    #[test]
    fn a_comparison_takes_a_layer_and_not_the_model() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let raw = serde_json::json!({
            "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "vocab_size": 32000, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768,
            "sliding_window": null, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        std::fs::write(dir.path().join("config.json"), raw.to_string())?;
        let config = Config::load(dir.path(), &serde_json::Map::new())?;
        ft_engine::files::write_file(&dir.path().join("model.safetensors"), &[], &[])?;
        let base = Base::open(config, dir.path())?;
        let frozen = Selection::frozen(&base.config);
        let linears = 8 * 3 * 4096 * 14336 + 2 * 4096 * 4096 + 2 * 4096 * 1024u64;
        let dense = 4 * (linears + 8 * 4096 + 2 * 4096);
        assert_eq!(bytes(&base, &frozen), dense);
        let four_bit = bytes(&base.in_nf4(true), &frozen) as f64;
        assert!((0.13..0.15).contains(&(four_bit / dense as f64)), "{four_bit} of {dense}");
        Ok(())
    }
}
