//! llama.cpp's metadata keys for a model's config and its sampling settings.

use super::checks::{check, interval};
use super::entries::Keys;
use super::names::architecture;
use super::{Error, refuse};
use crate::files::GgufValue;
use crate::model::rope::{Rope, Scaling};
use crate::model::{Config, LayerAttention};
use ft_base::store;
use ft_base::terminal::warn;
use serde_json::{Map, Value};
use std::path::Path;

/// Whether llama.cpp has sliding windows for the family.
fn has_windows(config: &Config) -> bool {
    ["gemma3_text", "gemma4_text", "gpt_oss", "olmo3"].contains(&config.family.model_type)
}

/// Longest context with the same results in llama.cpp, which has no sliding windows for most families.
pub(super) fn context(config: &Config) -> usize {
    let windows = config.attention.iter().filter_map(|a| a.window).filter(|_| !has_windows(config));
    windows.fold(config.max_positions, usize::min)
}

fn size(n: usize) -> GgufValue {
    GgufValue::U32(n as u32)
}

fn number(x: f64) -> GgufValue {
    GgufValue::F32(x as f32)
}

/// Divisors of the rotary frequencies, by the name of their tensor.
pub(super) type Divisors = Vec<(&'static str, Vec<f32>)>;

/// Keys of a model's config, and the divisors of the rotary frequencies if stored as tensors.
///
/// # Errors
/// Anything llama.cpp computes differently.
pub(super) fn of_config(config: &Config) -> Result<(Keys, Divisors), Error> {
    let arch = architecture(config)?;
    check(config, arch)?;
    let mut keys = Keys::new();
    let mut put = |key: &str, value| keys.push((format!("{arch}.{key}"), value));
    put("block_count", size(config.layers));
    put("context_length", size(context(config)));
    put("embedding_length", size(config.hidden));
    if !config.double_wide {
        put("feed_forward_length", size(config.intermediate));
    }
    put("vocab_size", size(config.vocab));
    put("attention.head_count", size(config.heads));
    if arch != "gemma4" {
        put("attention.head_count_kv", size(config.kv_heads));
        put("attention.key_length", size(config.head_dim));
        put("attention.value_length", size(config.head_dim));
    }
    put("attention.layer_norm_rms_epsilon", number(config.eps));
    if let Some(window) = config.attention.iter().find_map(|a| a.window).filter(|_| has_windows(config)) {
        put("attention.sliding_window", size(window));
    }
    let Some(rope) = config.ropes.first() else { return refuse("rope_parameters", "no rotary embedding") };
    put("rope.freq_base", number(rope.theta));
    put("rope.dimension_count", size(rope.dim));
    if let Some(moe) = &config.moe {
        put("expert_count", size(moe.experts));
        put("expert_used_count", size(moe.top_k));
        if arch != "llama" {
            put("expert_feed_forward_length", size(moe.width));
        }
        if moe.shared > 0 {
            put("expert_shared_feed_forward_length", size(moe.shared));
        }
    }
    of_linear_attention(config, &mut put);
    if arch == "gemma4" {
        of_layers(config, &mut put);
    }
    let factors = of_scaling(rope, arch, &mut put)?;
    Ok((keys, factors))
}

/// Tensor of divisors for all contexts.
const ROPE: &str = "rope_freqs.weight";

/// Keys of the scaling of the rotary embedding; returns the divisors of the frequencies, if it is stored as these.
fn of_scaling(rope: &Rope, arch: &str, put: &mut impl FnMut(&str, GgufValue)) -> Result<Divisors, Error> {
    match &rope.scaling {
        Scaling::Default => {}
        Scaling::Linear { factor } => {
            put("rope.scaling.type", "linear".into());
            put("rope.scaling.factor", number(*factor));
        }
        Scaling::Dynamic { .. } => {
            return refuse("rope_scaling", "dynamic; llama.cpp has no such scaling");
        }
        Scaling::Long { .. } if arch != "phi3" => {
            return refuse("rope_scaling", format!("longrope; not built yet: its export to GGUF as {arch}"));
        }
        Scaling::Long { short, long, attention, original } => {
            warn(&format!(
                "training used longrope's long factors only for texts above {original} tokens; llama.cpp uses them for \
                 every text when its context exceeds {original}. Pass --ctx-size {original} for shorter texts."
            ));
            put("rope.scaling.original_context_length", size(*original));
            put("rope.scaling.attn_factor", number(*attention));
            return Ok(vec![
                ("rope_factors_long.weight", long.clone()),
                ("rope_factors_short.weight", short.clone()),
            ]);
        }
        Scaling::Proportional { .. } => return Ok(vec![(ROPE, divisors(rope))]),
        Scaling::Llama3 { .. } if arch != "llama" => {
            return refuse("rope_scaling", format!("llama3; llama.cpp's {arch} has no such scaling"));
        }
        Scaling::Llama3 { .. } => return Ok(vec![(ROPE, divisors(rope))]),
        &Scaling::Yarn { factor, attention, beta_fast, beta_slow, original, truncate } => {
            if !truncate && arch != "gpt-oss" {
                return refuse("rope_scaling.truncate", "false; llama.cpp always truncates");
            }
            if !truncate {
                warn(
                    "rope_scaling.truncate is false, and llama.cpp rounds the range of YaRN's blend to whole channels, \
                     as for the released gpt-oss: its probabilities differ a little",
                );
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
    Ok(Vec::new())
}

/// Divisors of the frequencies; of unrotated channels, beyond any context.
fn divisors(rope: &Rope) -> Vec<f32> {
    let plain = Rope { scaling: Scaling::Default, ..rope.clone() };
    let (plain, scaled) = (plain.frequencies().0, rope.frequencies().0);
    let ratio = |(p, s): (&f32, &f32)| if *s == 0.0 { 1e30 } else { (f64::from(*p) / f64::from(*s)) as f32 };
    plain.iter().zip(&scaled).map(ratio).collect()
}

/// Keys of linear attention.
fn of_linear_attention(config: &Config, put: &mut impl FnMut(&str, GgufValue)) {
    let Some(delta) = &config.delta else { return };
    put("ssm.conv_kernel", size(delta.taps));
    put("ssm.state_size", size(delta.heads.key_dim));
    put("ssm.group_count", size(delta.heads.keys));
    put("ssm.time_step_rank", size(delta.heads.values));
    put("ssm.inner_size", size(delta.heads.value_width()));
    if let Some(n) = interval(delta) {
        put("full_attention_interval", size(n));
    }
    if config.family.model_type != "qwen3_next" {
        // Text has the same position in all sections.
        let sections = config.key("rope_parameters").and_then(|r| r.get("mrope_section"));
        let own = sections.and_then(|s| serde_json::from_value::<Vec<i32>>(s.clone()).ok());
        let mut sections = own.unwrap_or_else(|| vec![11, 11, 10]);
        sections.resize(4, 0);
        put("rope.dimension_sections", GgufValue::I32s(sections));
    }
}

/// Keys of layers that differ as Gemma 4's do.
fn of_layers(config: &Config, put: &mut impl FnMut(&str, GgufValue)) {
    let list =
        |of: &dyn Fn(usize) -> usize| GgufValue::I32s((0..config.layers).map(|l| of(l) as i32).collect());
    let sliding = |a: &LayerAttention| a.window.is_some();
    let width =
        |is: bool| config.attention.iter().find(|a| sliding(a) == is).map_or(config.head_dim, |a| a.head_dim);
    for half in ["key_length", "value_length"] {
        put(&format!("attention.{half}"), size(width(false)));
        put(&format!("attention.{half}_swa"), size(width(true)));
    }
    put("attention.head_count_kv", list(&|l| config.attention[l].kv_heads));
    if config.double_wide {
        put("feed_forward_length", list(&|l| config.intermediate_of(l)));
    }
    put("attention.sliding_window_pattern", GgufValue::Bools(config.attention.iter().map(sliding).collect()));
    let shared = config.attention.iter().filter(|a| a.producer().is_some()).count();
    put("attention.shared_kv_layers", size(shared));
    put("embedding_length_per_layer_input", size(config.layer_inputs.map_or(0, |i| i.width)));
    if let Some(rope) = config.ropes.get(1) {
        put("rope.freq_base_swa", number(rope.theta));
        put("rope.dimension_count_swa", size(rope.dim));
    }
    if let Some(cap) = config.logit_cap {
        put("final_logit_softcapping", number(cap));
    }
}

/// A JSON file of a model folder; empty if absent.
///
/// # Errors
/// A file that is no JSON object.
pub(super) fn object(dir: &Path, name: &str) -> ft_base::Result<Map<String, Value>> {
    let Some(bytes) = store::read_if_there(dir, name, store::LARGEST)? else { return Ok(Map::new()) };
    serde_json::from_slice(&bytes)
        .map_err(|e| Error { place: dir.join(name).display().to_string(), why: e.to_string() }.into())
}

/// Keys of the settings in `generation_config.json`, whatever its `do_sample`: as llama.cpp's conversion writes them.
pub(super) fn of_sampling(file: &Map<String, Value>) -> Keys {
    let float = |key: &str| file.get(key).and_then(Value::as_f64).map(number);
    let top_k = file.get("top_k").and_then(Value::as_i64).and_then(|k| i32::try_from(k).ok());
    let all = [
        ("top_k", top_k.map(GgufValue::I32)),
        ("top_p", float("top_p")),
        ("min_p", float("min_p")),
        ("temp", float("temperature")),
    ];
    all.into_iter().filter_map(|(key, value)| Some((format!("general.sampling.{key}"), value?))).collect()
}
