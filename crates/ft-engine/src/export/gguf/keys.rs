//! llama.cpp's metadata keys for a model's config.

use super::entries::Keys;
use super::error::{Error, refuse};
use super::names::architecture;
use crate::files::GgufValue;
use crate::model::rope::Scaling;
use crate::model::{Config, LayerAttention};

/// Refuses configs that llama.cpp interprets differently or cannot load.
fn check(config: &Config, arch: &str) -> Result<(), Error> {
    if arch != "llama" && (config.biases.o || config.biases.mlp) {
        let key = if config.biases.o { "attention_bias" } else { "mlp_bias" };
        return refuse(key, format!("llama.cpp's {arch} has no such biases"));
    }
    if arch == "qwen2" && config.heads * config.head_dim != config.hidden {
        let why = format!("{}; llama.cpp's {arch} takes hidden_size over heads", config.head_dim);
        return refuse("head_dim", why);
    }
    match arch {
        "smollm3" => no_rope(config)?,
        "gemma3" => gemma(config)?,
        _ => {}
    }
    if let Some(moe) = &config.moe {
        if !moe.normalise {
            return refuse("norm_topk_prob", format!("false; llama.cpp's {arch} always normalises"));
        }
        if !moe.sparse.iter().all(|s| *s) {
            let why = format!("layers without experts; llama.cpp's {arch} has experts in each");
            return refuse("mlp_only_layers or decoder_sparse_step", why);
        }
    }
    Ok(())
}

/// llama.cpp's smollm3 has no positions in every fourth layer.
fn no_rope(config: &Config) -> Result<(), Error> {
    let fits = |(l, a): (usize, &LayerAttention)| a.rope.is_some() == ((l + 1) % 4 != 0);
    match config.attention.iter().enumerate().all(fits) {
        true => Ok(()),
        false => refuse(
            "no_rope_layers",
            "llama.cpp's smollm3 has no positions in each fourth layer, and no others",
        ),
    }
}

/// llama.cpp's gemma3 has full attention in every sixth layer, a base of 10,000 in the others, and fixed scores.
fn gemma(config: &Config) -> Result<(), Error> {
    let fits = |(l, a): (usize, &LayerAttention)| a.window.is_some() == ((l + 1) % 6 != 0);
    if !config.attention.iter().enumerate().all(fits) {
        return refuse(
            "layer_types",
            "llama.cpp's gemma3 has full attention in each sixth layer, and no others",
        );
    }
    let sliding = config.ropes.get(1);
    if sliding.is_some_and(|r| r.theta != 10_000.0 || r.scaling != Scaling::Default) {
        return refuse(
            "rope_parameters.sliding_attention",
            "llama.cpp's gemma3 has a base of 10000, without scaling",
        );
    }
    // Only the model with 62 layers, of 27 billion parameters, has another divisor.
    let divisor =
        if config.layers == 62 { config.hidden as f64 / config.heads as f64 } else { config.head_dim as f64 };
    if config.attention.iter().any(|a| (a.scale * divisor.sqrt() - 1.0).abs() > 1e-6) {
        return refuse("query_pre_attn_scalar", format!("llama.cpp's gemma3 takes {divisor}"));
    }
    match config.logit_cap {
        None => Ok(()),
        Some(cap) => refuse("final_logit_softcapping", format!("{cap}; llama.cpp's gemma3 has none")),
    }
}

/// Whether llama.cpp has sliding windows for the family.
fn has_windows(config: &Config) -> bool {
    config.family.model_type == "gemma3_text"
}

/// Context length with identical results in llama.cpp, which has no sliding windows for most families.
pub(super) fn context(config: &Config) -> usize {
    let windows = config.attention.iter().filter_map(|a| a.window).filter(|_| !has_windows(config));
    windows.fold(config.max_positions, usize::min)
}

/// Keys of a model's config, and the divisors of the rotary frequencies if stored as a tensor.
///
/// # Errors
/// Anything llama.cpp computes differently.
pub(super) fn of_config(config: &Config) -> Result<(Keys, Option<Vec<f32>>), Error> {
    let arch = architecture(config)?;
    check(config, arch)?;
    let mut keys = Keys::new();
    let mut put = |key: &str, value| keys.push((format!("{arch}.{key}"), value));
    let size = |n: usize| GgufValue::U32(n as u32);
    let number = |x: f64| GgufValue::F32(x as f32);
    put("block_count", size(config.layers));
    put("context_length", size(context(config)));
    put("embedding_length", size(config.hidden));
    put("feed_forward_length", size(config.intermediate));
    put("vocab_size", size(config.vocab));
    put("attention.head_count", size(config.heads));
    put("attention.head_count_kv", size(config.kv_heads));
    put("attention.key_length", size(config.head_dim));
    put("attention.value_length", size(config.head_dim));
    put("attention.layer_norm_rms_epsilon", number(config.eps));
    if let Some(window) = config.attention.iter().find_map(|a| a.window).filter(|_| has_windows(config)) {
        put("attention.sliding_window", size(window));
    }
    let Some(rope) = config.ropes.first() else { return refuse("rope_parameters", "no rotary embedding") };
    put("rope.freq_base", number(rope.theta));
    put("rope.dimension_count", size(config.head_dim));
    if let Some(moe) = &config.moe {
        put("expert_count", size(moe.experts));
        put("expert_used_count", size(moe.top_k));
        if arch == "qwen3moe" {
            put("expert_feed_forward_length", size(moe.width));
        }
    }
    let mut factors = None;
    match rope.scaling {
        Scaling::Default => {}
        Scaling::Linear { factor } => {
            put("rope.scaling.type", "linear".into());
            put("rope.scaling.factor", number(factor));
        }
        Scaling::Proportional { .. } => {
            return refuse(
                "rope_parameters",
                "proportional; llama.cpp's scaling for this family is not built",
            );
        }
        Scaling::Llama3 { .. } if arch != "llama" => {
            return refuse("rope_scaling", format!("llama3; llama.cpp's {arch} has no such scaling"));
        }
        Scaling::Llama3 { .. } => {
            let plain = crate::model::rope::Rope { scaling: Scaling::Default, ..rope.clone() };
            let (plain, scaled) = (plain.frequencies().0, rope.frequencies().0);
            let ratio = |(p, s): (&f32, &f32)| (f64::from(*p) / f64::from(*s)) as f32;
            factors = Some(plain.iter().zip(&scaled).map(ratio).collect());
        }
        Scaling::Yarn { factor, attention, beta_fast, beta_slow, original, truncate } => {
            if !truncate {
                return refuse("rope_scaling.truncate", "false; llama.cpp always truncates");
            }
            put("rope.scaling.type", "yarn".into());
            put("rope.scaling.factor", number(factor));
            put("rope.scaling.original_context_length", size(original as usize));
            put("rope.scaling.yarn_beta_fast", number(beta_fast));
            put("rope.scaling.yarn_beta_slow", number(beta_slow));
            // llama.cpp multiplies by the YaRN paper's factor itself.
            let more = attention / (1.0 + 0.1 * factor.ln());
            if (more - 1.0).abs() > 1e-6 {
                put("rope.scaling.attn_factor", number(more));
            }
        }
    }
    Ok((keys, factors))
}
