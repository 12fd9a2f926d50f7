//! `config.json` of transformers 4 and 5, read into one shape.
//!
//! A key that changes the numbers and is not supported is refused by name. A key that `ft` has never heard
//! of is reported, so that nothing is ignored in silence.

use super::family::{Bias, Family, Window, find};
use super::rope::Rope;
use super::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// What the engine needs to know of a model.
#[derive(Clone, Debug)]
pub struct Config {
    /// Row of the family table.
    pub family: &'static Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of dense feed-forward layers.
    pub intermediate: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// RMSNorm's epsilon.
    pub eps: f64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Rotary embedding.
    pub rope: Rope,
    /// Longest sequence the config names.
    pub max_positions: usize,
    /// Sliding window of each layer.
    pub windows: Vec<Option<usize>>,
    /// Biases of q, k, v; of o; of the feed-forward linears.
    pub biases: Biases,
    /// Experts, in a mixture model.
    pub moe: Option<Moe>,
    /// Whether the checkpoint holds 4-bit weights, as bitsandbytes stores them.
    pub four_bit: bool,
    /// Keys that `ft` does not know and leaves alone.
    pub unknown: Vec<String>,
    /// The file as it was read, with overrides applied.
    pub raw: Map<String, Value>,
}

/// Which linears have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The attention's output.
    pub o: bool,
    /// Feed-forward linears.
    pub mlp: bool,
}

/// What a mixture model says about its experts.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Experts a layer.
    pub experts: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// Whether the chosen gates are scaled to sum to one.
    pub normalise: bool,
    /// Whether each layer has experts (else it is dense).
    pub sparse: Vec<bool>,
    /// Inner width of the expert that every token goes through; 0 where there is none.
    pub shared: usize,
}

/// Keys that describe files, tokens, generation or training and do not change the forward pass.
const HARMLESS: &[&str] = &[
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "max_window_layers",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "attn_implementation",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "finetuning_task",
    "prefix",
    "pruned_heads",
    "tie_encoder_decoder",
    "tf_legacy_loss",
    "use_bfloat16",
];

/// Keys that the parser reads.
const READ: &[&str] = &[
    "attention_bias",
    "decoder_sparse_step",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "qkv_bias",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
];

/// Keys that change the numbers, and the one value at which they don't.
const UNSUPPORTED: &[(&str, f64)] = &[
    ("attention_dropout", 0.0),
    ("attention_multiplier", f64::NAN),
    ("attn_logit_softcapping", f64::NAN),
    ("clip_qkv", f64::NAN),
    ("embedding_multiplier", 1.0),
    ("embd_pdrop", 0.0),
    ("final_logit_softcapping", f64::NAN),
    ("hidden_dropout", 0.0),
    ("hidden_dropout_prob", 0.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("no_rope_layers", f64::NAN),
    ("partial_rotary_factor", 1.0),
    ("q_lora_rank", f64::NAN),
    ("kv_lora_rank", f64::NAN),
    ("query_pre_attn_scalar", f64::NAN),
    ("resid_pdrop", 0.0),
    ("residual_multiplier", 1.0),
    ("router_jitter_noise", 0.0),
    ("n_shared_experts", 0.0),
    ("shared_expert_intermediate_size", 0.0),
    ("attn_output_gate", 0.0),
    ("use_mrope", 0.0),
    ("use_qk_norm", f64::NAN),
    ("mrope_section", f64::NAN),
];

/// Keys of `quantization_config`, but for those that begin with `llm_int8_` and concern 8-bit weights or where
/// a model is loaded.
const QUANTIZATION: &[&str] = &[
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "load_in_4bit",
    "load_in_8bit",
    "quant_method",
];

impl Config {
    /// Reads `config.json` of a model folder; `overrides` replaces its keys.
    ///
    /// # Errors
    /// A missing or malformed file, an unknown architecture, a key that is missing, out of range or not
    /// supported: each named.
    pub fn load(dir: &Path, overrides: &Map<String, Value>) -> Result<Self> {
        let path = dir.join("config.json");
        let file = path.display().to_string();
        let bytes = std::fs::read(&path).map_err(|e| Error::Read { file: file.clone(), source: e })?;
        let text = std::str::from_utf8(&bytes).map_err(|e| Error::Syntax {
            file: file.clone(),
            why: format!("not UTF-8 at byte {}", e.valid_up_to()),
        })?;
        let value: Value = serde_json::from_str(text)
            .map_err(|e| Error::Syntax { file: file.clone(), why: e.to_string() })?;
        let Value::Object(mut raw) = value else {
            return Err(Error::Syntax { file, why: "not a JSON object".into() });
        };
        raw.extend(overrides.iter().map(|(k, v)| (k.clone(), v.clone())));
        Self::parse(&file, raw)
    }

    /// The config of a JSON object; `file` names it in errors.
    pub fn parse(file: &str, raw: Map<String, Value>) -> Result<Self> {
        let keys = Keys { file, raw: &raw };
        let model_type = keys.string("model_type")?.unwrap_or_default();
        let Some(family) = find(model_type) else {
            return Err(Error::Architecture {
                file: file.into(),
                found: if model_type.is_empty() { "no model_type".into() } else { model_type.into() },
                known: super::family::FAMILIES.iter().map(|f| f.model_type).collect::<Vec<_>>().join(", "),
            });
        };
        if let Some(a) = raw.get("architectures").and_then(|a| a.get(0)).and_then(Value::as_str)
            && a != family.architecture
        {
            return Err(
                keys.bad("architectures", format!("{a}; {model_type} is built as {}", family.architecture))
            );
        }
        keys.refuse_unsupported(family)?;
        let hidden = keys.size("hidden_size")?;
        let layers = keys.size("num_hidden_layers")?;
        let heads = keys.size("num_attention_heads")?;
        let kv_heads = keys.count("num_key_value_heads")?.unwrap_or(heads);
        if kv_heads == 0 || heads % kv_heads != 0 {
            return Err(keys
                .bad("num_key_value_heads", format!("{kv_heads}; {heads} heads must be a multiple of it")));
        }
        let head_dim = match keys.count("head_dim")?.or(family.default_head_dim) {
            Some(d) => d,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                return Err(keys
                    .bad("hidden_size", format!("{hidden}, no multiple of {heads} heads, and no head_dim")));
            }
        };
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(keys.bad("head_dim", format!("{head_dim}; rotary embedding needs an even number")));
        }
        let max_positions = keys.count("max_position_embeddings")?.unwrap_or(2048);
        let bias = |b: Bias| -> Result<bool> {
            match b {
                Bias::Never => Ok(false),
                Bias::Always => Ok(true),
                Bias::Key(k) => Ok(keys.flag(k)?.unwrap_or(false)),
                Bias::Unless(k) => Ok(keys.flag(k)?.unwrap_or(true)),
            }
        };
        let biases =
            Biases { qkv: bias(family.qkv_bias)?, o: bias(family.o_bias)?, mlp: bias(family.mlp_bias)? };
        let moe = keys.moe(family, layers)?;
        let intermediate = match &moe {
            Some(m) if m.sparse.iter().all(|s| *s) => keys.count("intermediate_size")?.unwrap_or(m.width),
            _ => keys.size("intermediate_size")?,
        };
        Ok(Self {
            family,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: keys.size("vocab_size")?,
            eps: keys.number("rms_norm_eps")?.unwrap_or(family.default_eps),
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            rope: Rope::parse(&keys, family.default_theta, max_positions)?,
            max_positions,
            windows: keys.windows(family, layers)?,
            biases,
            moe,
            four_bit: keys.four_bit()?,
            unknown: raw
                .keys()
                .filter(|k| {
                    let k = k.as_str();
                    !HARMLESS.contains(&k) && !READ.contains(&k) && !UNSUPPORTED.iter().any(|(u, _)| *u == k)
                })
                .cloned()
                .collect(),
            raw,
        })
    }
}

/// Typed access to the keys of a config, with errors that name file and key. Null counts as absent.
pub struct Keys<'a> {
    file: &'a str,
    raw: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// Keys of an object in `file`.
    pub fn new(file: &'a str, raw: &'a Map<String, Value>) -> Self {
        Self { file, raw }
    }

    /// A table below this one.
    pub fn table(&self, key: &str) -> Result<Option<Keys<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(m)) => Ok(Some(Keys { file: self.file, raw: m })),
            Some(v) => Err(self.bad(key, format!("{v}; an object is wanted"))),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    /// The error for a key with a value that cannot be used.
    pub fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Key { file: self.file.into(), key: key.into(), why: why.into() }
    }

    /// A number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_f64().filter(|x| x.is_finite()) {
                Some(x) => Ok(Some(x)),
                None => Err(self.bad(key, format!("{v}; a number is wanted"))),
            },
        }
    }

    /// A whole number that is not negative.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => match v.as_u64().filter(|x| *x <= u64::from(u32::MAX)) {
                Some(x) => Ok(Some(x as usize)),
                None => Err(self.bad(key, format!("{v}; a whole number is wanted"))),
            },
        }
    }

    /// A required whole number above zero.
    pub fn size(&self, key: &str) -> Result<usize> {
        match self.count(key)? {
            Some(0) => Err(self.bad(key, "0")),
            Some(n) => Ok(n),
            None => Err(self.bad(key, "missing")),
        }
    }

    /// true or false.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(self.bad(key, format!("{v}; true or false is wanted"))),
        }
    }

    /// A text.
    pub fn string(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => Err(self.bad(key, format!("{v}; a text is wanted"))),
        }
    }

    fn refuse_unsupported(&self, family: &Family) -> Result<()> {
        let act = self.string("hidden_act")?.unwrap_or("silu");
        if !matches!(act, "silu" | "swish") {
            return Err(self.bad("hidden_act", format!("{act}; only silu is built")));
        }
        let shared = family.experts.and_then(|x| x.shared_key);
        for (key, neutral) in UNSUPPORTED.iter().filter(|(k, _)| Some(*k) != shared) {
            match self.get(key) {
                None => {}
                Some(v) if v.as_f64() == Some(*neutral) => {}
                Some(Value::Bool(false)) => {}
                Some(v) => {
                    return Err(self.bad(key, format!("{v}; it changes the numbers and is not built")));
                }
            }
        }
        Ok(())
    }

    /// What `quantization_config` says: bitsandbytes' 4-bit types, or nothing.
    ///
    /// Type, blocks and double quantization are read of each tensor, which is what decides them; the dtype of
    /// the arithmetic is the recipe's.
    fn four_bit(&self) -> Result<bool> {
        let Some(q) = self.table("quantization_config")? else { return Ok(false) };
        let at = |key: &str, why: String| self.bad(&format!("quantization_config.{key}"), why);
        match q.string("quant_method")? {
            Some("bitsandbytes") => {}
            other => {
                let other = other.unwrap_or("none");
                return Err(at("quant_method", format!("not built yet: {other}; bitsandbytes' 4-bit is")));
            }
        }
        for key in q.raw.keys().filter(|k| !k.starts_with("llm_int8_")) {
            if !QUANTIZATION.contains(&key.as_str()) {
                return Err(at(key, "ft does not know this key, and it may change the numbers".into()));
            }
        }
        for key in ["load_in_8bit", "_load_in_8bit"] {
            if q.flag(key)? == Some(true) {
                return Err(at(key, "not built yet: 8-bit checkpoints".into()));
            }
        }
        if q.flag("load_in_4bit")?.or(q.flag("_load_in_4bit")?) != Some(true) {
            return Err(at("load_in_4bit", "true is wanted".into()));
        }
        match q.string("bnb_4bit_quant_type")?.unwrap_or("fp4") {
            "nf4" | "fp4" => Ok(true),
            other => Err(at("bnb_4bit_quant_type", format!("{other}; nf4 and fp4 are built"))),
        }
    }

    fn windows(&self, family: &Family, layers: usize) -> Result<Vec<Option<usize>>> {
        let size = self.count("sliding_window")?;
        if size == Some(0) {
            return Err(self.bad("sliding_window", "0"));
        }
        let Some(types) = self.get("layer_types") else {
            return Ok(match family.window {
                Window::Never => vec![None; layers],
                Window::Always => vec![size; layers],
                Window::AlwaysIf => {
                    vec![
                        size.filter(|_| self.flag("use_sliding_window").ok().flatten() == Some(true));
                        layers
                    ]
                }
                Window::FromLayer => {
                    let size = size.filter(|_| self.flag("use_sliding_window").ok().flatten() == Some(true));
                    let from = self.count("max_window_layers")?.unwrap_or(28);
                    (0..layers).map(|l| size.filter(|_| l >= from)).collect()
                }
            });
        };
        let list = types.as_array().filter(|l| l.len() == layers).ok_or_else(|| {
            self.bad("layer_types", format!("a list of {layers} entries is wanted, one a layer"))
        })?;
        let size = match family.window {
            Window::FromLayer | Window::AlwaysIf if self.flag("use_sliding_window")? != Some(true) => None,
            _ => size,
        };
        list.iter()
            .map(|t| match t.as_str() {
                Some("full_attention") => Ok(None),
                Some("sliding_attention") if family.window == Window::Never => {
                    Err(self.bad("layer_types", format!("sliding_attention; {} has none", family.model_type)))
                }
                Some("sliding_attention") => {
                    match size {
                        Some(n) => Ok(Some(n)),
                        None => Err(self
                            .bad("layer_types", "sliding_attention without a sliding_window that is in use")),
                    }
                }
                _ => {
                    Err(self
                        .bad("layer_types", format!("{t}; full_attention and sliding_attention are built")))
                }
            })
            .collect()
    }

    fn moe(&self, family: &Family, layers: usize) -> Result<Option<Moe>> {
        let Some(x) = &family.experts else { return Ok(None) };
        // transformers from 5.19 on has one name for all families
        let experts = match (self.count(x.count_key)?, self.count("num_local_experts")?) {
            (None, Some(_)) => self.size("num_local_experts")?,
            _ => self.size(x.count_key)?,
        };
        let top_k = self.count("num_experts_per_tok")?.unwrap_or(x.default_top_k);
        if top_k == 0 || top_k > experts {
            return Err(self.bad("num_experts_per_tok", format!("{top_k} of {experts} experts")));
        }
        let step = self.count("decoder_sparse_step")?.filter(|_| x.dense_layers).unwrap_or(1);
        if step == 0 {
            return Err(self.bad("decoder_sparse_step", "0; every how many layers have experts is wanted"));
        }
        let dense: Vec<usize> = match self.get("mlp_only_layers").filter(|_| x.dense_layers) {
            None => Vec::new(),
            Some(v) => serde_json::from_value(v.clone())
                .map_err(|_| self.bad("mlp_only_layers", format!("{v}; a list of layers is wanted")))?,
        };
        let sparse = (0..layers).map(|l| !dense.contains(&l) && (l + 1) % step == 0).collect();
        Ok(Some(Moe {
            experts,
            top_k,
            width: self.size(x.width_key)?,
            normalise: x.always_normalise || self.flag("norm_topk_prob")?.unwrap_or(false),
            sparse,
            shared: x.shared_key.map_or(Ok(0), |key| self.size(key))?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(extra: Value) -> Result<Config> {
        let mut raw = json!({
            "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        });
        if let (Some(map), Value::Object(more)) = (raw.as_object_mut(), extra) {
            map.extend(more);
            return Config::parse("config.json", map.clone());
        }
        unreachable!("objects")
    }

    #[test]
    fn bitsandbytes_4_bit_configs_are_read_and_no_others() -> Result<()> {
        let q = |extra: Value| {
            let mut q = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_skip_modules": ["lm_head"], "llm_int8_threshold": 6.0});
            if let (Some(map), Value::Object(more)) = (q.as_object_mut(), extra) {
                map.extend(more);
            }
            parse(json!({"quantization_config": q}))
        };
        assert!(q(json!({}))?.four_bit && q(json!({"bnb_4bit_quant_type": "fp4"}))?.four_bit);
        assert!(!parse(json!({}))?.four_bit && !parse(json!({"quantization_config": null}))?.four_bit);
        for (key, value) in [
            ("quant_method", json!("awq")),
            ("quant_method", json!(null)),
            ("load_in_4bit", json!(false)),
            ("load_in_8bit", json!(true)),
            ("_load_in_8bit", json!(true)),
            ("bnb_4bit_quant_type", json!("int4")),
            ("bnb_4bit_quant_type", json!(4)),
            ("bnb_4bit_hadamard", json!(true)),
        ] {
            let e = q(json!({ key: value })).map(|_| ()).map_err(|e| e.to_string());
            assert!(e.as_ref().is_err_and(|e| e.contains(key)), "{key} = {value}: {e:?}");
        }
        Ok(())
    }

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        for (key, value) in [
            ("model_type", json!("gpt2")),
            ("model_type", json!(null)),
            ("architectures", json!(["Qwen2ForSequenceClassification"])),
            ("hidden_act", json!("gelu")),
            ("hidden_size", json!("64")),
            ("hidden_size", json!(-1)),
            ("num_hidden_layers", json!(0)),
            ("num_key_value_heads", json!(3)),
            ("num_attention_heads", json!(6)),
            ("head_dim", json!(7)),
            ("vocab_size", json!(null)),
            ("rms_norm_eps", json!("small")),
            ("tie_word_embeddings", json!(1)),
            ("rope_theta", json!(0)),
            ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})),
            ("rope_scaling", json!({"rope_type": "longrope"})),
            ("rope_scaling", json!({"rope_type": "yarn"})),
            ("rope_scaling", json!({"type": "linear", "factor": 0})),
            ("rope_scaling", json!([])),
            ("rope_parameters", json!({"full_attention": {"rope_type": "default"}})),
            ("partial_rotary_factor", json!(0.5)),
            ("attention_dropout", json!(0.1)),
            ("final_logit_softcapping", json!(30.0)),
            ("layer_types", json!(["full_attention"])),
            ("layer_types", json!(["full_attention", "linear_attention", "full_attention"])),
            ("quantization_config", json!({"quant_method": "gptq"})),
        ] {
            let e = parse(json!({ key: value })).map(|_| ()).map_err(|e| e.to_string());
            let hit = |e: &String| {
                e.contains("config.json")
                    && (e.contains(key) || key.starts_with("rope") || e.contains("hidden_size"))
            };
            assert!(e.as_ref().is_err_and(hit), "{key} = {value}: {e:?}");
        }
    }

    #[test]
    fn windows_slide_where_the_config_turns_them_on() -> Result<()> {
        let w = |extra| parse(extra).map(|c| c.windows);
        assert_eq!(w(json!({"sliding_window": 8}))?, [None; 3]);
        assert_eq!(
            w(json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1}))?,
            [None, Some(8), Some(8)]
        );
        let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
        assert_eq!(
            w(json!({"sliding_window": 8, "use_sliding_window": true, "layer_types": types}))?,
            [Some(8), None, Some(8)]
        );
        Ok(())
    }

    #[test]
    fn unknown_keys_are_reported() -> Result<()> {
        assert_eq!(parse(json!({"new_trick": 1, "torch_dtype": "bfloat16"}))?.unknown, ["new_trick"]);
        Ok(())
    }
}
