//! Model folders: config, weights, and the files of the tokenizer.

use super::{Entry, write_sharded};
use candle_core::{DType, Tensor};
use ft_base::store;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Maximum size of a weight file in bytes, as in transformers.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// Files of a model folder in addition to config, weights and tokenizer, copied if present.
pub const MODEL_FILES: &[&str] = &[
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "ft.json",
    "generation_config.json",
];

/// Files of a tokenizer, copied if present, to adapters too.
pub const TOKENIZER_FILES: &[&str] = &[
    "added_tokens.json",
    ft_data::TOOL_USE,
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
];

/// File name of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";

/// PyTorch's name of BF16 or F16; of other dtypes that of F32.
pub fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

/// Writes a model folder. `get` returns tensors one at a time. `dtype` is the dtype named in the config;
/// every entry has its own.
pub fn write_folder(
    source: &Path,
    out: &Path,
    mut config: Map<String, Value>,
    dtype: DType,
    entries: &[Entry],
    get: &mut dyn FnMut(&str) -> ft_base::Result<Tensor>,
) -> ft_base::Result<()> {
    let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    config.insert(key.into(), json!(torch_name(dtype)));
    if !entries.iter().any(|(name, ..)| name.contains(".quant_state.")) {
        // The base was quantized; the written model is not.
        config.remove("quantization_config");
    }
    store::write_json(&out.join("config.json"), &config)?;
    for file in MODEL_FILES.iter().chain(TOKENIZER_FILES) {
        store::copy_inside(source, file, out)?;
    }
    write_sharded(out, "model", entries, SHARD_BYTES, get)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// transformers loads a vision checkpoint with its processors alone.
    #[test]
    fn processors_of_a_vision_checkpoint_go_along() {
        let (from, to) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
        let names = ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"];
        names.iter().for_each(|name| std::fs::write(from.path().join(name), "{}").expect("written"));
        let entries = [("w".to_string(), DType::F32, vec![1])];
        write_folder(from.path(), to.path(), Map::new(), DType::F32, &entries, &mut |_| {
            Ok(Tensor::zeros(1, DType::F32, &candle_core::Device::Cpu)?)
        })
        .expect("written");
        assert!(names.iter().all(|name| to.path().join(name).is_file()));
    }
}
