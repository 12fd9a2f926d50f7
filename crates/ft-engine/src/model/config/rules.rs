//! Lists of known config keys, and the keys with rules of their own: unsupported features, 4-bit weights, experts.

use super::defaults::EXPERT_COUNTS;
use super::error::Result;
use super::family::{Family, GateFunction, QkNorms};
use super::keys::Keys;
use super::layers::by_layer;
use super::limits::{EXPERTS, INNER, LAYERS, POSITIONS};
use super::rope::{LAYER_TYPES, ROPE_PARAMETERS, ROPE_SCALING};
use super::types::{Config, Moe, WeightFormat};
use ft_base::store::json::short;
use ft_kernels::swiglu::{Activation, Glu};
use serde_json::{Map, Value};
use std::collections::HashSet;

/// Keys of files, tokens, generation or training, without effect on the forward pass.
const HARMLESS: &[&str] = &[
    "cache_implementation",
    "experts_per_token",
    "initial_context_length",
    "_model_name_or_path",
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
    "mamba_ssm_dtype",
    "max_window_layers",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "num_labels",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "original_max_position_embeddings",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "unk_token_id",
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

/// Ends of the keys of a vision checkpoint that describe other parts than the text model, and itself.
const VISION: [&str; 5] = ["_config", "_token_id", "_token_index", "tokens_per_image", "language_model_only"];

/// Keys read by the parser.
const READ: &[&str] = &[
    "_sliding_window_pattern",
    "attention_bias",
    "decoder_sparse_step",
    "full_attention_interval",
    "head_dim",
    "hidden_act",
    "hidden_activation",
    "hidden_size",
    "intermediate_size",
    "is_causal",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "max_position_embeddings",
    "mlp_bias",
    "mlp_only_layers",
    "moe_intermediate_size",
    "no_rope_layer_interval",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "partial_rotary_factor",
    "problem_type",
    "qkv_bias",
    "quantization_config",
    "rms_norm_eps",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "sliding_window_pattern",
    "swiglu_alpha",
    "swiglu_limit",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
];

/// Key of the limit of the logits.
pub(super) const CAP: &str = "final_logit_softcapping";

/// Keys with an effect only in the families reading them.
pub(super) const OF_SOME: [&str; 3] = [CAP, "no_rope_layers", "query_pre_attn_scalar"];

/// Key of the dropout of attention's probabilities, read by every class.
pub(super) const DROPOUT: &str = "attention_dropout";

/// Keys of dropout and noise in training.
pub(super) const NOISE: [&str; 6] =
    [DROPOUT, "embd_pdrop", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "router_jitter_noise"];

/// Names of activations of gates.
const ACTIVATIONS: &[(&str, Activation)] =
    &[("silu", Activation::Silu), ("swish", Activation::Silu), ("gelu_pytorch_tanh", Activation::GeluTanh)];

/// Keys with an effect on the numbers, with neutral values (NaN: none).
const UNSUPPORTED: &[(&str, f64)] = &[
    ("attention_multiplier", f64::NAN),
    ("attn_logit_softcapping", f64::NAN),
    ("clip_qkv", f64::NAN),
    ("embedding_multiplier", 1.0),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("q_lora_rank", f64::NAN),
    ("kv_lora_rank", f64::NAN),
    ("residual_multiplier", 1.0),
    ("n_shared_experts", 0.0),
    ("shared_expert_intermediate_size", 0.0),
    ("attn_output_gate", 0.0),
    ("use_bidirectional_attention", 0.0),
    ("use_mrope", 0.0),
    ("use_qk_norm", f64::NAN),
    ("num_kv_shared_layers", 0.0),
    ("hidden_size_per_layer_input", 0.0),
    ("attention_k_eq_v", 0.0),
    ("enable_moe_block", 0.0),
    ("use_double_wide_mlp", 0.0),
    ("per_layer_config", f64::NAN),
    ("mrope_section", f64::NAN),
];

/// Quantization method of gpt-oss's releases.
const MXFP4: &str = "mxfp4";

/// Keys of `quantization_config`. `llm_int8_*` keys are accepted too: they concern 8-bit weights or model
/// loading.
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

/// Key of `quantization_config` with further modules in 8 bits.
const CONVERTED: &str = "modules_to_convert";

/// Keys of `quantization_config` of 8-bit checkpoints. How activations are quantized, and modules that are not
/// quantized, show in the tensors or concern inference.
const FP8: &[&str] = &[
    "activation_scheme",
    "dequantize",
    "expert_dtype",
    "fmt",
    "ignored_layers",
    CONVERTED,
    "modules_to_not_convert",
    "quant_method",
    "scale_fmt",
    "weight_block_size",
];

/// Keys of `rope_scaling` and `rope_parameters`.
pub(super) const ROPE: &[&str] = &[
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mrope_interleaved",
    "mrope_section",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
];

/// Whether the value of one of [`NOISE`] is in effect.
pub(super) fn is_noise(value: Option<&Value>) -> bool {
    value.and_then(Value::as_f64).is_some_and(|rate| rate != 0.0)
}

/// The first key of overrides in none of the lists above, or not read by this family: with the reason and a hint.
pub(super) fn idle_override(overrides: &Map<String, Value>, family: &Family) -> Option<(String, String)> {
    if overrides.contains_key(Config::TEXT) {
        let why = "no effect\n  hint: keys of the text model stand in model.override itself";
        return Some((Config::TEXT.into(), why.into()));
    }
    let mut unknown = Keys::new("", overrides).unknown().into_iter().map(|key| {
        let (lists, name) = match key.rsplit_once('.') {
            Some((_, name)) => (vec![ROPE], name),
            None => (vec![HARMLESS, READ, by_layer::READ, &OF_SOME, &NOISE], key.as_str()),
        };
        let near = ft_recipe::nearest(name, lists.into_iter().flatten().copied());
        let hint = near.map_or("leave it out".into(), |near| format!("did you mean {near}?"));
        let why = format!("ft does not know this key of config.json\n  hint: {hint}");
        (key, why)
    });
    let mut unread = overrides.keys().filter(|key| !family.has_use_for(key)).map(|key| {
        let why = format!("models of {} do not read it\n  hint: leave it out", family.model_type);
        (key.clone(), why)
    });
    unknown.next().or_else(|| unread.next())
}

/// Whether a top-level key is in one of the lists above.
fn knows(key: &str) -> bool {
    HARMLESS.contains(&key)
        || READ.contains(&key)
        || by_layer::READ.contains(&key)
        || OF_SOME.contains(&key)
        || NOISE.contains(&key)
        || UNSUPPORTED.iter().any(|(k, _)| *k == key)
}

impl Keys<'_> {
    /// Keys in none of the lists; of the whole file, with those of the text model.
    pub(super) fn unknown(&self) -> Vec<String> {
        if let Ok(Some(text)) = self.table(Config::TEXT) {
            let of_whole = |k: &&String| !knows(k) && !VISION.iter().any(|end| k.ends_with(end));
            let own = text.unknown().into_iter().map(|k| format!("{}.{k}", Config::TEXT));
            return self.raw.keys().filter(of_whole).cloned().chain(own).collect();
        }
        let mut out: Vec<String> = self.raw.keys().filter(|k| !knows(k)).cloned().collect();
        for table in [ROPE_SCALING, ROPE_PARAMETERS] {
            let Some(Value::Object(t)) = self.get(table) else { continue };
            let unknown = |t: &Map<String, Value>, path: &str| -> Vec<String> {
                let keys =
                    t.keys().filter(|k| !ROPE.contains(&k.as_str()) && !LAYER_TYPES.contains(&k.as_str()));
                keys.map(|k| format!("{path}.{k}")).collect()
            };
            out.extend(unknown(t, table));
            for (name, own) in LAYER_TYPES.iter().filter_map(|n| Some((n, t.get(*n)?.as_object()?))) {
                out.extend(unknown(own, &format!("{table}.{name}")));
            }
        }
        out
    }

    /// Checks token ids: integers or lists of integers. Notes on EOS ids outside the vocabulary; in `overrides` they
    /// are errors.
    pub(super) fn token_ids(&self, vocab: usize, overrides: &Map<String, Value>) -> Result<Vec<String>> {
        const EOS: &str = "eos_token_id";
        let mut notes = Vec::new();
        for key in ["bos_token_id", "pad_token_id", EOS] {
            let Some(v) = self.get(key) else { continue };
            let ids = match v {
                Value::Array(list) => list.iter().collect(),
                v => vec![v],
            };
            let numbers: Option<Vec<i64>> = ids.into_iter().map(Value::as_i64).collect();
            let wanted =
                || self.bad(key, format!("{}; a token's number, or a list of such, is wanted", short(v)));
            // Old configs write -1 for "none".
            for id in numbers.ok_or_else(wanted)?.into_iter().filter(|id| key == EOS && *id >= vocab as i64) {
                let text = format!("{id} is not in the vocabulary of {vocab}: it never ends an answer");
                notes.push(self.note(key, text, overrides.contains_key(key))?);
            }
        }
        Ok(notes)
    }

    /// The padding token, if in the vocabulary; negative ids count from the end, as in PyTorch.
    pub(super) fn pad(&self, vocab: usize) -> Option<u32> {
        let id = self.get("pad_token_id")?.as_i64()?;
        let id = if id < 0 { id + vocab as i64 } else { id };
        u32::try_from(id).ok().filter(|id| (*id as usize) < vocab)
    }

    pub(super) fn refuse_unsupported(&self, family: &Family) -> Result<()> {
        self.refuse_by_layer(family)?;
        const CAUSAL: &str = "is_causal";
        if self.flag(CAUSAL)? == Some(false) {
            return Err(self.bad(CAUSAL, "false; causal attention is built"));
        }
        const GATE: &str = "attn_output_gate";
        if family.gated && self.flag(GATE)? == Some(false) {
            return Err(self.bad(GATE, format!("false; {} is built with the gate", family.model_type)));
        }
        let shared = family.experts.and_then(|x| x.shared_key);
        // No class of a family with q/k norms reads this key.
        let unread = (family.qk_norm != QkNorms::Never).then_some("use_qk_norm");
        let computed = |key: &str| {
            [shared, unread].contains(&Some(key))
                || (family.gated && key == GATE)
                || family.reads.contains(&key)
        };
        for (key, neutral) in UNSUPPORTED.iter().filter(|(k, _)| !computed(k)) {
            let changes = |v: &&Value| v.as_f64() != Some(*neutral) && v.as_bool() != Some(false);
            if let Some(v) = self.get(key).filter(changes) {
                return Err(self.bad(key, format!("{}; it changes the numbers and is not built", short(v))));
            }
        }
        Ok(())
    }

    /// Reads `quantization_config`.
    pub(super) fn weight_format(&self, family: &Family) -> Result<WeightFormat> {
        const METHOD: &str = "quant_method";
        let Some(q) = self.table("quantization_config")? else { return Ok(WeightFormat::Values) };
        match q.string(METHOD)? {
            Some("bitsandbytes") => q.four_bit(),
            Some(MXFP4) if family.experts.and_then(|x| x.joint).is_some_and(|j| j.transposed) => {
                // Modules to leave as they are: the tensors say which are in MXFP4.
                q.only(|key| [METHOD, "modules_to_not_convert", "dequantize"].contains(&key))?;
                let as_values = q.flag("dequantize")? == Some(true);
                Ok(if as_values { WeightFormat::Mxfp4AsValues } else { WeightFormat::Mxfp4 })
            }
            Some(MXFP4) => Err(q.bad(METHOD, format!("{MXFP4}; not built yet for {}", family.model_type))),
            Some("fp8") => q.fp8(),
            other => {
                let other = other.unwrap_or("none");
                Err(q.bad(METHOD, format!("not built yet: {other}; bitsandbytes' 4-bit and fp8 are")))
            }
        }
    }

    /// Refuses unknown keys of a table, unless null.
    pub(super) fn only(&self, known: impl Fn(&str) -> bool) -> Result<()> {
        match self.raw.keys().find(|k| self.get(k).is_some() && !known(k)) {
            Some(key) => Err(self.bad(key, "ft does not know this key, and it may change the numbers")),
            None => Ok(()),
        }
    }

    /// `quantization_config` of bitsandbytes. The 4-bit type, block sizes and double quantization are read from each
    /// tensor's own state; the compute dtype comes from the recipe.
    fn four_bit(&self) -> Result<WeightFormat> {
        self.only(|key| key.starts_with("llm_int8_") || QUANTIZATION.contains(&key))?;
        for key in ["load_in_8bit", "_load_in_8bit"] {
            if self.flag(key)? == Some(true) {
                return Err(self.bad(key, "not built yet: 8-bit checkpoints"));
            }
        }
        if self.flag("load_in_4bit")?.or(self.flag("_load_in_4bit")?) != Some(true) {
            return Err(self.bad("load_in_4bit", "true is wanted"));
        }
        match self.string("bnb_4bit_quant_type")?.unwrap_or("fp4") {
            "nf4" | "fp4" => Ok(WeightFormat::Bitsandbytes),
            other => Err(self.bad("bnb_4bit_quant_type", format!("{other}; nf4 and fp4 are built"))),
        }
    }

    /// `quantization_config` of an 8-bit checkpoint.
    fn fp8(&self) -> Result<WeightFormat> {
        self.only(|key| FP8.contains(&key))?;
        for (key, built) in [("fmt", "e4m3"), ("expert_dtype", "fp8")] {
            if let Some(other) = self.string(key)?.filter(|value| *value != built) {
                return Err(self.bad(key, format!("{other}; {built} is built")));
            }
        }
        if self.typed(CONVERTED, "a list", Value::as_array)?.is_some_and(|list| !list.is_empty()) {
            return Err(self.bad(CONVERTED, "not built yet: further modules in 8 bits"));
        }
        let block =
            self.get("weight_block_size").and_then(|b| serde_json::from_value::<[usize; 2]>(b.clone()).ok());
        match block.filter(|b| b.iter().all(|n| (1..=POSITIONS).contains(n))) {
            Some(block) => Ok(WeightFormat::Fp8(block)),
            None => Err(self.bad(
                "weight_block_size",
                "rows and columns of a block are wanted: other scales are not built",
            )),
        }
    }

    /// Activation of the gates. Convolutions, per-layer inputs and clamped gates have that of the family alone.
    fn activation(&self, family: &Family) -> Result<Activation> {
        let (key, own) = match family.gate {
            GateFunction::GeluTanh => ("hidden_activation", Activation::GeluTanh),
            GateFunction::Silu | GateFunction::Clamped => ("hidden_act", Activation::Silu),
        };
        let Some(name) = self.string(key)? else { return Ok(own) };
        let is_fixed = family.delta.is_some() || family.by_layer || family.gate == GateFunction::Clamped;
        let built = || ACTIVATIONS.iter().filter(move |(_, of)| !is_fixed || *of == own);
        built().find(|(known, _)| *known == name).map(|(_, of)| *of).ok_or_else(|| {
            let names: Vec<&str> = built().map(|(known, _)| *known).collect();
            self.bad(key, format!("{name}; {} is built with {}", family.model_type, names.join(", ")))
        })
    }

    /// Elementwise part of feed-forward layers and experts.
    pub(super) fn glu(&self, family: &Family) -> Result<Glu> {
        let named = self.activation(family)?;
        let activation = match family.gate {
            GateFunction::Silu | GateFunction::GeluTanh => named,
            GateFunction::Clamped => Activation::Clamped {
                alpha: self.number("swiglu_alpha", 1e-6..=1e6)?.unwrap_or(1.702),
                limit: self.number("swiglu_limit", 1e-6..=1e9)?.unwrap_or(7.0),
            },
        };
        let joint = family.experts.and_then(|x| x.joint).map(|j| j.order).unwrap_or_default();
        Ok(Glu { activation, joint })
    }

    pub(super) fn moe(&self, family: &Family, layers: usize) -> Result<Option<Moe>> {
        let Some(x) = &family.experts else { return Ok(None) };
        if let Some(beside) = &x.beside
            && self.flag(beside.switch)? != Some(true)
        {
            return Ok(None);
        }
        let [a, b] = EXPERT_COUNTS;
        // 0 if a class makes all layers dense then.
        let count = |name| if x.dense_layers { self.count(name, EXPERTS) } else { self.some(name, EXPERTS) };
        let [own, a, b] = [x.count_key, a, b].map(count);
        let Some(experts) = own?.or(a?).or(b?) else { return Err(self.bad(x.count_key, "missing")) };
        if experts == 0 {
            return Ok(None);
        }
        let top_k = self.size(x.top_k_key, EXPERTS)?;
        if top_k > experts {
            return Err(self.bad(x.top_k_key, format!("{top_k} of {experts} experts")));
        }
        let step = self.some("decoder_sparse_step", LAYERS)?.filter(|_| x.dense_layers).unwrap_or(1);
        let list = |v: &Value| serde_json::from_value::<HashSet<usize>>(v.clone()).ok();
        let dense = match x.dense_layers {
            true => self.typed("mlp_only_layers", "a list of layers", list)?.unwrap_or_default(),
            false => HashSet::new(),
        };
        let sparse = (0..layers).map(|l| !dense.contains(&l) && (l + 1) % step == 0).collect();
        Ok(Some(Moe {
            experts,
            top_k,
            width: self.size(x.width_key, INNER)?,
            normalise: x.always_normalise || self.flag("norm_topk_prob")? == Some(true),
            sparse,
            shared: x.shared_key.map_or(Ok(0), |key| self.size(key, INNER))?,
            fused: x.fused,
        }))
    }
}
