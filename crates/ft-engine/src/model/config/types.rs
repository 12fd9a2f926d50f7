//! Architecture of a model.

use super::family::{DeltaProjections, Family, QkNorms};
use super::rope::Rope;
use super::rules::{NOISE, is_noise};
use candle_core::DType;
use ft_kernels::attention::Cache;
use ft_kernels::delta::{Heads, State};
use ft_kernels::swiglu::Glu;
use serde_json::{Map, Value, json};
use std::ops::Range;

/// Key of a classifier's loss; null goes by the number of outputs.
pub(super) const PROBLEM: &str = "problem_type";

/// Architecture of a model, as read from `config.json`.
#[derive(Clone, Debug)]
pub struct Config {
    /// Row of the family table.
    pub family: &'static Family,
    /// Prefix of the modules below the head: `model`, or a longer one within a vision checkpoint.
    pub body: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Inner width of dense feed-forward layers.
    pub intermediate: usize,
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Vocabulary size: rows of the embedding.
    pub vocab: usize,
    /// The padding token; as an input, it gives the embedding no gradient, as in PyTorch's `padding_idx`.
    pub pad: Option<u32>,
    /// Epsilon of RMSNorm.
    pub eps: f64,
    /// Names of the outputs of a score head, as of transformers' sequence classifiers; `None` for the vocabulary's
    /// head.
    pub scores: Option<Vec<String>>,
    /// Whether the head shares the embedding's weight.
    pub tied: bool,
    /// Rotary embeddings, referred to by the layers.
    pub ropes: Vec<Rope>,
    /// `max_position_embeddings`.
    pub max_positions: usize,
    /// Attention of each layer.
    pub attention: Vec<LayerAttention>,
    /// Elementwise part of feed-forward layers and experts.
    pub glu: Glu,
    /// Factor on the embeddings.
    pub embedding_scale: f64,
    /// Limit of the logits: `cap tanh(logits / cap)`.
    pub logit_cap: Option<f64>,
    pub biases: Biases,
    /// Linear attention in some layers, if the family has it.
    pub delta: Option<Delta>,
    /// Mixture-of-experts settings; `None` for dense models.
    pub moe: Option<Moe>,
    /// Standard deviation of randomly initialized weights.
    pub initializer_range: f64,
    /// Encoding of the weights in the files.
    pub format: WeightFormat,
    /// Per-layer inputs, if the model has them.
    pub layer_inputs: Option<LayerInputs>,
    /// Whether dense feed-forward layers are twice as wide if keys and values are an earlier layer's.
    pub double_wide: bool,
    /// Keys of the file unknown to `ft` and ignored.
    pub unknown: Vec<String>,
    /// The first key of overrides unknown to `ft` or not read by the family, with the reason and a hint. A check
    /// against the recipe refuses it.
    pub idle_override: Option<(String, String)>,
    /// Known keys of the file without effect, with the reason.
    pub notes: Vec<String>,
    /// The JSON object of the file, with overrides applied; of a vision checkpoint, with the text model's in
    /// `text_config`.
    pub raw: Map<String, Value>,
}

/// Format of a checkpoint's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    Values,
    /// 4-bit weights of bitsandbytes.
    Bitsandbytes,
    /// Experts in MXFP4.
    Mxfp4,
    /// Experts in MXFP4, read as values.
    Mxfp4AsValues,
    /// 8-bit weights: rows and columns of the blocks that share a scale.
    Fp8([usize; 2]),
}

/// Attention settings of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerAttention {
    /// Sliding window, in tokens; `None` is full attention.
    pub window: Option<usize>,
    /// Rotary embedding, an index of [`Config::ropes`]; `None` without positions.
    pub rope: Option<usize>,
    /// Factor on the scores.
    pub scale: f64,
    /// Channels per head.
    pub head_dim: usize,
    pub kv_heads: usize,
    pub keys: KeySource,
}

/// Source of a layer's keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeySource {
    /// Projections of this layer.
    #[default]
    Own,
    /// The projection that makes queries too.
    WithQueries,
    /// The projection of this layer's keys, for both: values are normalized keys without positions.
    Joint,
    /// The keys and values of this earlier layer, as that uses them.
    Of(usize),
}

/// Vectors per token and layer (Gemma 4's per-layer embeddings).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerInputs {
    /// Values for a layer.
    pub width: usize,
    /// Rows of their table.
    pub vocab: usize,
}

impl LayerAttention {
    /// The earlier layer with the keys and values of this one, if any.
    pub fn producer(&self) -> Option<usize> {
        match self.keys {
            KeySource::Of(l) => Some(l),
            KeySource::Own | KeySource::WithQueries | KeySource::Joint => None,
        }
    }
}

/// Which linears have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub struct Biases {
    /// Query, key and value projections.
    pub qkv: bool,
    /// Attention's output projection.
    pub o: bool,
    /// Feed-forward linears.
    pub mlp: bool,
}

/// Linear attention by the gated delta rule.
#[derive(Clone, Debug)]
pub struct Delta {
    pub heads: Heads,
    /// Taps of the convolution.
    pub taps: usize,
    pub projections: DeltaProjections,
    /// For every layer, whether it has linear attention; otherwise it has attention.
    pub is_linear: Vec<bool>,
}

/// Mixture-of-experts settings.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Inner width of an expert.
    pub width: usize,
    /// Whether the top-k gates are normalized to sum to one.
    pub normalise: bool,
    /// For every layer, whether it has experts; otherwise it is dense.
    pub sparse: Vec<bool>,
    /// Inner width of the shared expert; 0 if none.
    pub shared: usize,
    /// Whether adapters hold all experts of a layer in one tensor, by the family or by the adapter to read.
    pub fused: bool,
}

impl Config {
    /// The same model with a score head in place of the vocabulary's, with these names of the outputs; `None` if
    /// transformers has no such class of the family.
    pub fn with_scores(mut self, labels: Vec<String>) -> Option<Self> {
        let class = self.family.classifier?;
        let id2label: Map<String, Value> =
            labels.iter().enumerate().map(|(i, l)| (i.to_string(), json!(l))).collect();
        let label2id: Map<String, Value> =
            labels.iter().enumerate().map(|(i, l)| (l.clone(), json!(i))).collect();
        let of_file = [
            ("architectures", json!([class])),
            ("id2label", Value::Object(id2label)),
            ("label2id", Value::Object(label2id)),
        ];
        self.raw.extend(of_file.map(|(key, value)| (key.to_string(), value)));
        if self.scores.is_none() {
            // A language model's is of no effect.
            self.raw.shift_remove(PROBLEM);
        }
        Some(Self { scores: Some(labels), tied: false, ..self })
    }

    /// The model with random numbers in place of the checkpoint's weights: none in 4 bits.
    pub fn of_random_weights(mut self) -> Self {
        if !matches!(self.format, WeightFormat::Fp8(_)) {
            self.format = WeightFormat::Values;
        }
        self
    }

    /// Number of outputs of the head.
    pub fn outputs(&self) -> usize {
        self.scores.as_ref().map_or(self.vocab, Vec::len)
    }

    /// Whether the checkpoint holds 4-bit weights, of any format.
    pub fn holds_4bit(&self) -> bool {
        self.is_bitsandbytes() || self.is_mxfp4()
    }

    /// Whether the checkpoint holds 4-bit weights of bitsandbytes.
    pub fn is_bitsandbytes(&self) -> bool {
        self.format == WeightFormat::Bitsandbytes
    }

    /// Whether the experts stay in MXFP4.
    pub fn is_mxfp4(&self) -> bool {
        self.format == WeightFormat::Mxfp4
    }

    /// Channels of each rotary embedding.
    pub fn rope_dims(&self) -> Vec<usize> {
        self.ropes.iter().map(|r| r.dim).collect()
    }

    /// Tokens of the longest document with the rotary embedding of shorter ones, if longer ones have another.
    pub fn rope_turn(&self) -> Option<usize> {
        self.ropes.iter().find_map(Rope::turn)
    }

    /// A length for all documents with the rotary embedding of one of `tokens`.
    pub fn rope_length(&self, tokens: usize) -> usize {
        self.ropes.iter().map(|r| r.length_class(tokens)).max().unwrap_or(0)
    }

    /// Longest context covered by the rotary embeddings.
    pub fn reach(&self) -> usize {
        self.ropes.iter().map(|r| r.reach(self.max_positions)).fold(self.max_positions, usize::max)
    }

    /// Key of the text model in the JSON object of a vision checkpoint.
    pub const TEXT: &'static str = "text_config";

    /// Linear attention of layer `l`, if it has it.
    pub fn delta_of(&self, l: usize) -> Option<&Delta> {
        self.delta.as_ref().filter(|d| d.is_linear[l])
    }

    /// Bytes of a key-value cache per token, over these layers, for values of `dtype`.
    pub fn cache_of_a_token(&self, layers: Range<usize>, dtype: DType) -> usize {
        let own = |l: &usize| self.delta_of(*l).is_none() && self.attention[*l].producer().is_none();
        let of = |l: usize| {
            let a = &self.attention[l];
            Cache::bytes_of_a_token(a.kv_heads * a.head_dim, dtype)
        };
        layers.filter(own).map(of).sum()
    }

    /// Bytes of the states of linear attention in these layers, in generation with values of `dtype`.
    pub fn states(&self, layers: Range<usize>, dtype: DType) -> usize {
        let of = |d: &Delta| State::bytes(d.heads, d.taps, dtype.size_in_bytes());
        layers.filter_map(|l| self.delta_of(l)).map(of).sum()
    }

    /// Inner width of the feed-forward part of layer `l`, if dense.
    pub fn intermediate_of(&self, l: usize) -> usize {
        let twice = self.double_wide && self.attention[l].producer().is_some();
        if twice { 2 * self.intermediate } else { self.intermediate }
    }

    /// Whether layer `l` has a single head of keys and values, from its own projection. All tensor-parallel ranks have
    /// this head, for different queries.
    pub fn shares_keys(&self, l: usize) -> bool {
        let a = &self.attention[l];
        a.kv_heads == 1 && a.keys != KeySource::WithQueries && self.family.qk_norm != QkNorms::Whole
    }

    /// Number of heads in layer `l` to divide over tensor-parallel ranks: key heads with their queries, or query heads
    /// if all share one key head.
    pub fn heads_to_cut(&self, l: usize) -> usize {
        match self.delta_of(l) {
            Some(delta) => delta.heads.keys,
            None if self.shares_keys(l) => self.heads,
            None => self.attention[l].kv_heads,
        }
    }

    /// Whether layers have inputs of their own from the embedding, or use the keys of earlier ones.
    pub fn shares_state(&self) -> bool {
        self.layer_inputs.is_some() || self.attention.iter().any(|a| a.producer().is_some())
    }

    /// Whether later layers use the keys and values of layer `l`.
    pub fn lends_keys(&self, l: usize) -> bool {
        self.attention.iter().any(|a| a.producer() == Some(l))
    }

    /// Whether the model is the text part of a vision checkpoint.
    pub fn is_nested(&self) -> bool {
        self.raw.contains_key(Self::TEXT)
    }

    /// Whether the text model of a vision checkpoint has the key of a tied head, and the whole is not tied.
    pub fn is_tied_inside(&self) -> bool {
        let text = self.raw.get(Self::TEXT).and_then(|text| text.get("tie_word_embeddings"));
        !self.tied && text.and_then(Value::as_bool) == Some(true)
    }

    /// Keys of dropout and noise that the class has in training, and ft does not.
    pub fn noise(&self) -> impl Iterator<Item = &'static str> {
        let is_nested = self.is_nested();
        NOISE.into_iter().filter(move |key| self.family.reads(key, is_nested) && is_noise(self.key(key)))
    }

    /// A key of the file: of the text model, or else of the whole.
    pub fn key(&self, key: &str) -> Option<&Value> {
        let text = self.raw.get(Self::TEXT).and_then(|t| t.get(key));
        text.filter(|v| !v.is_null()).or_else(|| self.raw.get(key))
    }

    /// Coefficient of the load-balancing loss of the class in transformers, turned on by `output_router_logits`; `None`
    /// for a class without it.
    pub fn balancing_loss(&self) -> Option<f64> {
        let has_loss = self.moe.is_some() && !self.family.is_beside() && self.scores.is_none();
        has_loss.then(|| self.key("router_aux_loss_coef").and_then(Value::as_f64).unwrap_or(0.001))
    }

    /// Bytes per matrix value in the published checkpoint.
    pub fn stored_width(&self) -> u64 {
        let named = ["dtype", "torch_dtype"].iter().find_map(|k| self.key(k)?.as_str());
        if named == Some("float32") { 4 } else { 2 }
    }
}
