//! Writes a checkpoint quantized to NF4.

use super::check::check_tensors;
use super::layout;
use crate::files::Entry;
use crate::model::modules::{Kind, Module, modules};
use crate::model::{Config, TOWERS, current_name};
use crate::quant::{self, Error};
use candle_core::{DType, Device, Tensor};
use ft_base::store::AtomicFolder;
use ft_base::terminal::bytes_bar;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

/// File in a `model.cache` folder to identify the source of the copy.
pub const CACHE_MARKER: &str = "ft-cache.json";

/// Result of a quantization.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Number of quantized linear layers.
    pub linears: usize,
    /// Number of values in quantized layers.
    pub values: u64,
    /// Bits per value, for codes and scales, without tables.
    pub bits: f64,
    /// Size of all weights written, in bytes.
    pub bytes: u64,
}

/// Quantizes the model in `source` to NF4 and writes it to `out`, a missing or empty folder. Linear layers
/// of the decoder are quantized in blocks of 64, with 8-bit scales if `double`; other tensors are copied.
///
/// Reads the model twice, once for scales and once for codes. Memory holds all scales and one tensor.
///
/// # Errors
/// Model in 4 bits already; misshaped or non-finite tensors; full disk. On error, `out` is not created.
pub fn quantize(config: &Config, source: &Path, out: &Path, double: bool) -> ft_base::Result<Report> {
    let new = AtomicFolder::begin_named(out)?;
    new.refuse_occupied("another --out, or remove it")?;
    let report = quantize_into(config, source, &new.path(), double)?;
    new.commit()?;
    Ok(report)
}

/// Names of the tensors of a module in a checkpoint.
fn names(m: &Module) -> impl Iterator<Item = String> {
    std::iter::once(m.weight_name()).chain(m.bias().map(|_| m.bias_name()))
}

/// Quantizes a checkpoint into an existing folder.
pub fn quantize_into(config: &Config, source: &Path, out: &Path, double: bool) -> ft_base::Result<Report> {
    if config.holds_4bit() {
        return Err(Error::Already { dir: source.display().to_string() }.into());
    }
    let files = layout::open(config, source)?;
    check_tensors(config, &files)?;
    let mut report = Report { linears: 0, values: 0, bits: 0.0, bytes: 0 };
    let (mut entries, mut ready, mut code_and_scale_bytes) = (Vec::new(), HashMap::new(), 0u64);
    let bar = bytes_bar("scales", files.total_bytes());
    for m in modules(config) {
        for name in names(&m).filter(|n| files.info(n).is_some()) {
            let info = files.get(&name)?;
            if !quant::applies_to(&m) || name.ends_with(".bias") {
                let dtype = quant::dtype_of(&files, &name)?;
                entries.push((name, dtype, info.shape.clone()));
                continue;
            }
            let e = quant::scales(&files, &name)?;
            bar.inc(info.bytes());
            report.linears += 1;
            report.values += info.elements() as u64;
            for part in quant::entries(&name, e.dims, e.source, &e.scales, double)? {
                let table = part.name.ends_with("_map") || part.name.contains(".quant_state.");
                let bytes = part.shape.iter().product::<usize>() * part.dtype.size_in_bytes();
                code_and_scale_bytes += if table { 0 } else { bytes as u64 };
                entries.push((part.name.clone(), part.dtype, part.shape));
                ready.extend(part.value.map(|v| (part.name, v)));
            }
        }
    }
    bar.finish_and_clear();
    report.bits = 8.0 * code_and_scale_bytes as f64 / report.values.max(1) as f64;
    let size = |(_, d, s): &Entry| (s.iter().product::<usize>() * d.size_in_bytes()) as u64;
    report.bytes = entries.iter().map(size).sum();

    let mut raw = config.raw.clone();
    raw.insert("quantization_config".into(), quantization_config(config, double));
    let dtype = quant::dtype_of(&files, &format!("{}.weight", config.embedding_name()))?;
    let codes: HashMap<String, Vec<usize>> =
        entries.iter().filter(|(_, d, _)| *d == DType::U8).map(|(n, _, s)| (n.clone(), s.clone())).collect();
    let bar = bytes_bar("quantizing", files.total_bytes());
    layout::write((config, Some(&files)), (source, out), raw, dtype, entries, &mut |name| {
        if let Some(value) = ready.remove(name) {
            return Ok(value);
        }
        bar.inc(files.get(name)?.bytes());
        match codes.get(name) {
            Some(shape) => {
                let packed = quant::from_files(&files, name)?.packed;
                Ok(Tensor::from_vec(packed, shape.as_slice(), &Device::Cpu)?)
            }
            None => Ok(files.tensor(name, quant::dtype_of(&files, name)?, &Device::Cpu)?),
        }
    })?;
    bar.finish_and_clear();
    Ok(report)
}

/// The `quantization_config` read by transformers and bitsandbytes.
fn quantization_config(config: &Config, double: bool) -> Value {
    // Linears to skip. By default, transformers skips only the head.
    let is_skipped = |m: &Module| matches!(m.kind, Kind::Linear { .. }) && !quant::applies_to(m);
    let linears = modules(config).into_iter().filter(is_skipped);
    let mut skip: Vec<String> = linears.map(|m| current_name(&m.name).unwrap_or(m.name)).collect();
    if config.is_nested() {
        // transformers 5 compares the start of a module's name.
        skip.extend(TOWERS.into_iter().flat_map(|tower| [tower.to_string(), format!("model.{tower}")]));
    }
    json!({
        "_load_in_4bit": true,
        "_load_in_8bit": false,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double,
        "llm_int8_enable_fp32_cpu_offload": false,
        "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": skip,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": true,
        "load_in_8bit": false,
        "quant_method": "bitsandbytes",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// transformers makes any other linear one of 4 bits, and finds no such weights for it.
    #[test]
    fn linears_left_in_full_are_modules_to_skip() -> anyhow::Result<()> {
        let skipped = |raw: Value, body: Option<&'static str>| -> anyhow::Result<Vec<String>> {
            let mut c = Config::parse("config.json", serde_json::from_value(raw)?)?;
            c.body = body.unwrap_or(c.body);
            let written = quantization_config(&c, true);
            Ok(serde_json::from_value(written["llm_int8_skip_modules"].clone())?)
        };
        let text = |raw: Value| skipped(raw, None);
        assert_eq!(text(json!({"model_type": "qwen3"}))?, ["lm_head"]);
        let mixture = text(json!({"model_type": "qwen3_moe", "num_hidden_layers": 2}))?;
        assert_eq!(mixture, ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]);
        let gemma4 = text(json!({"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}))?;
        assert_eq!(gemma4, ["model.per_layer_model_projection", "lm_head"]);
        let raw = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}});
        for body in ["model.language_model", "language_model.model"] {
            let vision = skipped(raw.clone(), Some(body))?;
            assert_eq!((vision[0].as_str(), vision.len()), ("lm_head", 1 + 2 * TOWERS.len()), "{body}");
            for tower in ["vision_tower", "model.vision_tower", "model.multi_modal_projector"] {
                assert!(vision.iter().any(|m| m == tower), "{vision:?}");
            }
        }
        Ok(())
    }
}
