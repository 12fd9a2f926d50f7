//! Configs that llama.cpp interprets differently or cannot load.

use super::{Error, refuse};
use crate::model::family::GateFunction;
use crate::model::rope::Scaling;
use crate::model::{Config, Delta, KeySource, LayerAttention};
use ft_kernels::swiglu::Activation;

/// Refuses them by key.
pub(super) fn check(config: &Config, arch: &str) -> Result<(), Error> {
    if !["llama", "gpt-oss"].contains(&arch) && (config.biases.o || config.biases.mlp) {
        let key = if config.biases.o { "attention_bias" } else { "mlp_bias" };
        return refuse(key, format!("llama.cpp's {arch} has no such biases"));
    }
    let square = ["qwen2", "qwen2moe", "phi3", "chatglm", "olmo2"];
    if square.contains(&arch) && config.heads * config.head_dim != config.hidden {
        let why = format!("{}; llama.cpp's {arch} takes hidden_size over heads", config.head_dim);
        return refuse("head_dim", why);
    }
    match arch {
        "smollm3" => no_rope(config)?,
        "gemma3" => gemma3(config)?,
        "gemma4" => gemma4(config)?,
        "gpt-oss" => gpt_oss(config)?,
        "olmo2" if config.family.model_type == "olmo3" => olmo3(config)?,
        _ => {}
    }
    if let Some(delta) = &config.delta {
        linear_attention(config, delta, arch)?;
    }
    match (config.family.gate, config.glu.activation) {
        (GateFunction::Silu, Activation::Silu)
        | (GateFunction::GeluTanh, Activation::GeluTanh)
        | (GateFunction::Clamped, _) => {}
        (_, other) => {
            let why = format!("{other:?}; llama.cpp's {arch} has another function");
            return refuse("hidden_act or hidden_activation", why);
        }
    }
    if config.moe.is_none() && config.family.experts.is_some_and(|x| x.dense_layers) {
        return refuse("num_experts", format!("0; llama.cpp's {arch} has experts in each layer"));
    }
    if let Some(moe) = &config.moe {
        let always = arch != "qwen2moe";
        if moe.normalise != always {
            let how = if always { "always" } else { "never" };
            let why = format!("{}; llama.cpp's {arch} {how} normalizes", moe.normalise);
            return refuse("norm_topk_prob", why);
        }
        if !moe.sparse.iter().all(|s| *s) {
            let why = format!("layers without experts; llama.cpp's {arch} has experts in each");
            return refuse("mlp_only_layers or decoder_sparse_step", why);
        }
    }
    Ok(())
}

/// Refuses by key a model without a tensor required by llama.cpp, or with another number of rows. Not for adapters: the
/// base's file, made by another program, may have the tensor.
pub(super) fn stored(config: &Config, arch: &str) -> Result<(), Error> {
    if config.tied && ["olmo2", "qwen2moe", "gpt-oss"].contains(&arch) {
        return refuse("tie_word_embeddings", format!("true; llama.cpp's {arch} has a head of its own"));
    }
    if arch == "gpt-oss" && !config.biases.qkv {
        return refuse("attention_bias", "false; llama.cpp's gpt-oss has biases");
    }
    match config.layer_inputs {
        Some(inputs) if inputs.vocab != config.vocab => {
            let why =
                format!("{}; llama.cpp's {arch} has one for each of {} tokens", inputs.vocab, config.vocab);
            refuse("vocab_size_per_layer_input", why)
        }
        _ => Ok(()),
    }
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
fn gemma3(config: &Config) -> Result<(), Error> {
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

/// llama.cpp's olmo2 has full attention in each fourth layer of a model with windows, and one base without scaling in
/// the others.
fn olmo3(config: &Config) -> Result<(), Error> {
    let fits = |(l, a): (usize, &LayerAttention)| a.window.is_some() == ((l + 1) % 4 != 0);
    if !config.attention.iter().enumerate().all(fits) {
        return refuse("layer_types", "llama.cpp has full attention in each fourth layer, and no others");
    }
    let [full, sliding, ..] = &config.ropes[..] else { return Ok(()) };
    if sliding.theta != full.theta || sliding.scaling != Scaling::Default {
        let why = format!("llama.cpp has a base of {} there, without scaling", full.theta);
        return refuse("rope_parameters.sliding_attention", why);
    }
    Ok(())
}

/// llama.cpp's gpt-oss has windows in every second layer, from the first on, and limits of its own.
fn gpt_oss(config: &Config) -> Result<(), Error> {
    let fits = |(l, a): (usize, &LayerAttention)| a.window.is_some() == (l % 2 == 0);
    if !config.attention.iter().enumerate().all(fits) {
        return refuse(
            "layer_types",
            "llama.cpp's gpt-oss has windows in the first of two layers, and no others",
        );
    }
    if config.glu.activation != (Activation::Clamped { alpha: 1.702, limit: 7.0 }) {
        return refuse("swiglu_limit", "llama.cpp's gpt-oss takes 7, with swiglu_alpha 1.702");
    }
    Ok(())
}

/// llama.cpp has one size of keys and values, attention in each n-th layer, and one epsilon.
fn linear_attention(config: &Config, delta: &Delta, arch: &str) -> Result<(), Error> {
    let heads = delta.heads;
    if heads.key_dim != heads.value_dim {
        let why = format!("{}; llama.cpp's {arch} takes linear_key_head_dim", heads.value_dim);
        return refuse("linear_value_head_dim", why);
    }
    if interval(delta).is_none() {
        return refuse(
            "layer_types",
            format!("llama.cpp's {arch} has full attention in each n-th layer, and no others"),
        );
    }
    if config.eps > 1e-5 {
        let why =
            format!("{}; llama.cpp's {arch} takes it for the lengths of queries and keys too", config.eps);
        return refuse("rms_norm_eps", why);
    }
    Ok(())
}

/// Layers from one with full attention to the next.
pub(super) fn interval(delta: &Delta) -> Option<usize> {
    let n = delta.is_linear.iter().position(|linear| !linear)? + 1;
    let fits = |(l, linear): (usize, &bool)| *linear == ((l + 1) % n != 0);
    delta.is_linear.iter().enumerate().all(fits).then_some(n)
}

/// llama.cpp's gemma4 has sizes by type of layer, and takes the last keys and values of each type.
fn gemma4(config: &Config) -> Result<(), Error> {
    let own = config.attention.iter().filter(|a| a.producer().is_none()).count();
    for a in &config.attention {
        let first = config.attention.iter().find(|b| b.window.is_some() == a.window.is_some());
        if first.is_some_and(|b| (b.head_dim, b.kv_heads) != (a.head_dim, a.kv_heads)) {
            return refuse("per_layer_config", "llama.cpp's gemma4 has one size for each type of layer");
        }
        if let KeySource::Of(l) = a.keys
            && l + if a.window.is_some() { 2 } else { 1 } != own
        {
            let why =
                "llama.cpp's gemma4 takes them from the last two layers that make them, one of each type";
            return refuse("num_kv_shared_layers", why);
        }
    }
    if config.attention.iter().all(|a| a.window.is_none()) {
        return refuse("layer_types", "llama.cpp's gemma4 has windows in some layers");
    }
    Ok(())
}
