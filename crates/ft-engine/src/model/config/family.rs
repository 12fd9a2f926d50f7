//! Table of model families. Adding a family with the common decoder layer touches this file alone, and the defaults of
//! its class in `defaults/classes.json`.

use super::layers::by_layer;
use super::rules::{CAP, DROPOUT};
use ft_kernels::swiglu::Joint;

/// Key of the rotated share of a head's channels.
pub(super) const PARTIAL: &str = "partial_rotary_factor";
/// Key of the base in sliding layers, at the top level.
pub(super) const LOCAL: &str = "rope_local_base_freq";
/// Key of the distance between layers with full attention.
pub(super) const PATTERN: &str = "sliding_window_pattern";

/// How a family decides on a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    Never,
    Always,
    /// This config key decides; no bias if missing.
    Key(&'static str),
    /// This config key decides; bias if missing.
    Unless(&'static str),
}

/// How a family assigns sliding windows to layers, if `sliding_window` is not null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    Never,
    /// All layers, whatever `layer_types` lists.
    Always,
    /// With `use_sliding_window`: all layers, whatever `layer_types` lists.
    AlwaysIf,
    /// As listed in `layer_types`, else all layers.
    Listed,
    /// With `use_sliding_window`: as listed in `layer_types`, else layers from `max_window_layers` on.
    FromLayer,
    /// With `use_sliding_window`: as listed in `layer_types`, else layers 0, 2 and so on below `max_window_layers`.
    EvenBelow,
    /// With `use_sliding_window`: as listed in `layer_types`, else the layers without positions.
    WithoutPositions,
    /// As listed in `layer_types`, else all layers but every n-th; n is `sliding_window_pattern` if the family reads
    /// it.
    Pattern(usize),
}

impl Window {
    /// Whether windows need `use_sliding_window`.
    pub(super) fn has_switch(self) -> bool {
        match self {
            Window::AlwaysIf | Window::FromLayer | Window::EvenBelow | Window::WithoutPositions => true,
            Window::Never | Window::Always | Window::Listed | Window::Pattern(_) => false,
        }
    }
}

/// Names of the norms of a layer; `None` for absent ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormNames {
    /// Of attention's input.
    pub attn: Option<&'static str>,
    /// Of attention's output, before it is added to the residual stream.
    pub attn_post: Option<&'static str>,
    /// Of the feed-forward part's input.
    pub mlp: Option<&'static str>,
    /// Of the feed-forward part's output.
    pub mlp_post: Option<&'static str>,
}

/// Norms of inputs alone.
const PRE: NormNames = NormNames {
    attn: Some("input_layernorm"),
    attn_post: None,
    mlp: Some("post_attention_layernorm"),
    mlp_post: None,
};

/// Norms of outputs alone.
const POST: NormNames = NormNames {
    attn: None,
    attn_post: Some("post_attention_layernorm"),
    mlp: None,
    mlp_post: Some("post_feedforward_layernorm"),
};

/// Norms of inputs and outputs, as Gemma names them.
const SANDWICH: NormNames = NormNames {
    attn: Some("input_layernorm"),
    attn_post: Some("post_attention_layernorm"),
    mlp: Some("pre_feedforward_layernorm"),
    mlp_post: Some("post_feedforward_layernorm"),
};

/// RMSNorm of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorms {
    Never,
    /// Of each head.
    Heads,
    /// Of all heads together.
    Whole,
}

/// The function of the gate in a feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// SiLU, or the function named by `hidden_act`.
    Silu,
    /// GELU by tanh, or the function named by `hidden_activation`.
    GeluTanh,
    /// Clamped SwiGLU of gpt-oss (`swiglu_limit`, `swiglu_alpha`).
    Clamped,
}

/// Gate and up projection of an expert as one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JointExperts {
    /// Order of its rows.
    pub order: Joint,
    /// Whether checkpoints hold the transposes, `[e, in, out]`.
    pub transposed: bool,
}

/// Linears of the inputs of linear attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaProjections {
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a`.
    Split,
    /// `in_proj_qkvz` and `in_proj_ba`, interleaved by key head.
    Interleaved,
}

/// Expert names and routing of a mixture family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Name of the mixture within a layer (`mlp`, `block_sparse_moe`); empty if its parts are the layer's.
    pub block: &'static str,
    /// Names of gate, up and down projection within an expert. If gate and up are joint, the first is of both.
    pub names: [&'static str; 3],
    /// Gate and up as one matrix, fused over all experts in checkpoints and adapters.
    pub joint: Option<JointExperts>,
    /// Whether the experts' linears and the router have biases.
    pub bias: bool,
    /// Name of the router.
    pub router: &'static str,
    /// Config key of the number of experts.
    pub count_key: &'static str,
    /// Config key of the inner width of an expert.
    pub width_key: &'static str,
    /// Whether `decoder_sparse_step` and `mlp_only_layers` make some layers dense; otherwise all layers
    /// have experts.
    pub dense_layers: bool,
    /// Whether the top-k gates always sum to one; otherwise `norm_topk_prob` decides.
    pub always_normalise: bool,
    /// Whether new adapters are of all experts of a layer at once, as PEFT's `target_parameters` makes them, with one A
    /// for gate and up; otherwise of each linear.
    pub fused: bool,
    /// Config key of the experts of a token.
    pub top_k_key: &'static str,
    /// Config key of the inner width of the shared expert, in families with one.
    pub shared_key: Option<&'static str>,
    /// A dense feed-forward part beside the experts, with separate norms, as in Gemma 4.
    pub beside: Option<Beside>,
}

/// Names of a family with experts beside a dense feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beside {
    /// Boolean config key: whether a model has experts.
    pub switch: &'static str,
    /// Norms of input and output of the dense part.
    pub dense: [&'static str; 2],
    /// Weight of the norm of the router's input.
    pub router_scale: &'static str,
    /// Factors on the gates, one an expert.
    pub factors: &'static str,
    /// Norms of input and output of the experts.
    pub experts: [&'static str; 2],
}

impl Experts {
    /// Name of a part of the mixture within a layer.
    pub fn within(&self, name: &str) -> String {
        if self.block.is_empty() { name.into() } else { format!("{}.{name}", self.block) }
    }

    /// As [`Experts::within`], by the names of transformers 5, where every mixture is called `mlp`.
    pub fn within_current(&self, name: &str) -> String {
        if self.block.is_empty() { name.into() } else { format!("mlp.{name}") }
    }
}

/// One row of the table: how a family differs from the common decoder layer.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Class name in `architectures`.
    pub architecture: &'static str,
    /// Class name of transformers' sequence classifier, if any.
    pub classifier: Option<&'static str>,
    /// `model_type` and class name of checkpoints with a vision tower and this model as `text_config`.
    pub nested: Option<(&'static str, &'static str)>,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    pub norms: NormNames,
    pub qk_norm: QkNorms,
    /// Whether attention has sinks.
    pub sinks: bool,
    pub gate: GateFunction,
    /// Whether embeddings are multiplied by the square root of the width.
    pub scales_embedding: bool,
    /// Config key of the square of the divisor of attention's scores; channels per head without it.
    pub score_key: Option<&'static str>,
    /// Whether sliding layers have a rotary embedding of their own.
    pub two_ropes: bool,
    /// Whether layers differ as Gemma 4's do: per-layer inputs, keys and values of earlier layers, head sizes by
    /// type of layer, factors on the outputs. Values are normalized, and scores are not scaled.
    pub by_layer: bool,
    /// Whether one linear makes queries, keys and values.
    pub joint_qkv: bool,
    /// Whether one linear makes gate and up of dense feed-forward layers.
    pub joint_mlp: bool,
    /// Whether the rotary embedding pairs neighboring channels; otherwise a channel of each half.
    pub rotates_neighbors: bool,
    /// Default interval between layers without rotary embedding; `no_rope_layers` (0 for such a layer) overrides it.
    pub no_rope_interval: Option<usize>,
    /// Default of `tie_word_embeddings`, in the classes of the text model and of a vision checkpoint.
    pub default_tied: bool,
    /// Keys read by this family; other families refuse them, or note that they have no effect.
    pub reads: &'static [&'static str],
    /// Whether norms multiply by `1 + w`, with w the stored weight.
    pub plus_one: bool,
    /// Whether the query projection also makes a sigmoid gate per channel on the output of attention.
    pub gated: bool,
    /// Rotated share of a head's channels, if config.json has no `partial_rotary_factor`.
    pub default_rotary: f64,
    /// Linear attention in some layers, with these projections.
    pub delta: Option<DeltaProjections>,
    pub window: Window,
    /// Experts, in a mixture family.
    pub experts: Option<Experts>,
}

const DENSE: Family = Family {
    model_type: "",
    architecture: "",
    classifier: None,
    nested: None,
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    norms: PRE,
    qk_norm: QkNorms::Never,
    sinks: false,
    gate: GateFunction::Silu,
    scales_embedding: false,
    score_key: None,
    two_ropes: false,
    by_layer: false,
    joint_qkv: false,
    joint_mlp: false,
    rotates_neighbors: false,
    no_rope_interval: None,
    default_tied: false,
    reads: &[],
    plus_one: false,
    gated: false,
    default_rotary: 1.0,
    delta: None,
    window: Window::Never,
    experts: None,
};

/// All supported families.
pub const FAMILIES: &[Family] = &[
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        classifier: Some("LlamaForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Key("mlp_bias"),
        ..DENSE
    },
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        classifier: Some("Qwen2ForSequenceClassification"),
        qkv_bias: Bias::Always,
        window: Window::FromLayer,
        ..DENSE
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        classifier: Some("Qwen3ForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        qk_norm: QkNorms::Heads,
        window: Window::FromLayer,
        ..DENSE
    },
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        classifier: Some("MistralForSequenceClassification"),
        window: Window::Always,
        ..DENSE
    },
    Family {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        classifier: Some("MixtralForSequenceClassification"),
        window: Window::Always,
        experts: Some(Experts {
            block: "block_sparse_moe",
            names: ["w1", "w3", "w2"],
            count_key: "num_local_experts",
            width_key: "intermediate_size",
            ..EXPERTS
        }),
        reads: &["router_jitter_noise"],
        ..DENSE
    },
    Family {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        classifier: Some("Qwen3MoeForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        qk_norm: QkNorms::Heads,
        window: Window::AlwaysIf,
        experts: Some(Experts { shared_key: None, ..QWEN_EXPERTS }),
        ..DENSE
    },
    Family {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        classifier: Some("Qwen2MoeForSequenceClassification"),
        qkv_bias: Bias::Unless("qkv_bias"),
        window: Window::EvenBelow,
        experts: Some(QWEN_EXPERTS),
        ..DENSE
    },
    Family {
        model_type: "ministral",
        architecture: "MinistralForCausalLM",
        classifier: Some("MinistralForSequenceClassification"),
        window: Window::Listed,
        ..DENSE
    },
    Family {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        classifier: Some("SmolLM3ForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Key("mlp_bias"),
        window: Window::WithoutPositions,
        no_rope_interval: Some(4),
        default_tied: true,
        reads: &["no_rope_layers"],
        ..DENSE
    },
    Family {
        model_type: "olmo2",
        architecture: "Olmo2ForCausalLM",
        classifier: Some("Olmo2ForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        norms: POST,
        qk_norm: QkNorms::Whole,
        ..DENSE
    },
    Family {
        model_type: "olmo3",
        architecture: "Olmo3ForCausalLM",
        classifier: Some("Olmo3ForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        norms: POST,
        qk_norm: QkNorms::Whole,
        window: Window::Pattern(4),
        two_ropes: true,
        ..DENSE
    },
    Family {
        model_type: "glm",
        architecture: "GlmForCausalLM",
        classifier: Some("GlmForSequenceClassification"),
        ..GLM
    },
    Family {
        model_type: "glm4",
        architecture: "Glm4ForCausalLM",
        classifier: Some("Glm4ForSequenceClassification"),
        norms: NormNames {
            attn: Some("input_layernorm"),
            attn_post: Some("post_self_attn_layernorm"),
            mlp: Some("post_attention_layernorm"),
            mlp_post: Some("post_mlp_layernorm"),
        },
        ..GLM
    },
    Family {
        model_type: "phi3",
        architecture: "Phi3ForCausalLM",
        classifier: Some("Phi3ForSequenceClassification"),
        joint_qkv: true,
        joint_mlp: true,
        window: Window::Always,
        reads: &[PARTIAL, "resid_pdrop"],
        ..DENSE
    },
    Family {
        model_type: "gpt_oss",
        architecture: "GptOssForCausalLM",
        classifier: Some("GptOssForSequenceClassification"),
        qkv_bias: Bias::Unless("attention_bias"),
        o_bias: Bias::Unless("attention_bias"),
        sinks: true,
        gate: GateFunction::Clamped,
        window: Window::Pattern(2),
        experts: Some(Experts {
            block: "mlp",
            names: ["gate_up_proj", "", "down_proj"],
            joint: Some(JointExperts { order: Joint::Interleaved, transposed: true }),
            bias: true,
            router: "router",
            count_key: "num_local_experts",
            width_key: "intermediate_size",
            fused: true,
            ..EXPERTS
        }),
        ..DENSE
    },
    Family {
        model_type: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        classifier: Some("Gemma3TextForSequenceClassification"),
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        nested: Some(("gemma3", "Gemma3ForConditionalGeneration")),
        norms: SANDWICH,
        qk_norm: QkNorms::Heads,
        plus_one: true,
        gate: GateFunction::GeluTanh,
        scales_embedding: true,
        score_key: Some("query_pre_attn_scalar"),
        window: Window::Pattern(6),
        two_ropes: true,
        default_tied: true,
        reads: &["query_pre_attn_scalar", "final_logit_softcapping", LOCAL, PATTERN],
        ..DENSE
    },
    Family {
        model_type: "gemma4_text",
        architecture: "Gemma4ForCausalLM",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        nested: Some(("gemma4", "Gemma4ForConditionalGeneration")),
        norms: SANDWICH,
        qk_norm: QkNorms::Heads,
        gate: GateFunction::GeluTanh,
        scales_embedding: true,
        window: Window::Pattern(6),
        two_ropes: true,
        by_layer: true,
        default_tied: true,
        reads: by_layer::READ,
        experts: Some(Experts {
            block: "",
            names: ["gate_up_proj", "", "down_proj"],
            joint: Some(JointExperts { order: Joint::Halves, transposed: false }),
            router: "router.proj",
            fused: true,
            top_k_key: "top_k_experts",
            beside: Some(Beside {
                switch: "enable_moe_block",
                dense: ["pre_feedforward_layernorm", "post_feedforward_layernorm_1"],
                router_scale: "router.scale",
                factors: "router.per_expert_scale",
                experts: ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"],
            }),
            ..EXPERTS
        }),
        ..DENSE
    },
    Family {
        model_type: "qwen3_5_text",
        architecture: "Qwen3_5ForCausalLM",
        classifier: Some("Qwen3_5TextForSequenceClassification"),
        nested: Some(("qwen3_5", "Qwen3_5ForConditionalGeneration")),
        ..GATED_DELTA
    },
    Family {
        model_type: "qwen3_5_moe_text",
        architecture: "Qwen3_5MoeForCausalLM",
        nested: Some(("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")),
        experts: Some(Experts { fused: true, shared_key: QWEN_EXPERTS.shared_key, ..EXPERTS }),
        ..GATED_DELTA
    },
    Family {
        model_type: "qwen3_next",
        architecture: "Qwen3NextForCausalLM",
        classifier: Some("Qwen3NextForSequenceClassification"),
        delta: Some(DeltaProjections::Interleaved),
        experts: Some(QWEN_EXPERTS),
        ..GATED_DELTA
    },
];

/// Half of the channels rotate, by pairs of neighbors; gate and up in one.
const GLM: Family = Family {
    qkv_bias: Bias::Unless("attention_bias"),
    joint_mlp: true,
    rotates_neighbors: true,
    default_rotary: 0.5,
    ..DENSE
};

/// Linear attention in most layers, gated attention in the others.
const GATED_DELTA: Family = Family {
    qkv_bias: Bias::Key("attention_bias"),
    o_bias: Bias::Key("attention_bias"),
    qk_norm: QkNorms::Heads,
    plus_one: true,
    gated: true,
    default_rotary: 0.25,
    delta: Some(DeltaProjections::Split),
    ..DENSE
};

/// Experts of all layers, with gates summing to one.
const EXPERTS: Experts = Experts {
    block: "mlp",
    names: ["gate_proj", "up_proj", "down_proj"],
    joint: None,
    bias: false,
    router: "gate",
    count_key: "num_experts",
    width_key: "moe_intermediate_size",
    dense_layers: false,
    always_normalise: true,
    fused: false,
    top_k_key: "num_experts_per_tok",
    shared_key: None,
    beside: None,
};

/// Qwen's experts, with a shared one.
const QWEN_EXPERTS: Experts = Experts {
    dense_layers: true,
    always_normalise: false,
    shared_key: Some("shared_expert_intermediate_size"),
    ..EXPERTS
};

/// Looks up a family by `model_type`.
pub fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.model_type == model_type)
}

/// Looks up a family by the `model_type` of a vision checkpoint; also returns the class name.
pub fn find_nested(model_type: &str) -> Option<(&'static Family, &'static str)> {
    let named = |f: &'static Family| f.nested.filter(|(t, _)| *t == model_type).map(|(_, class)| (f, class));
    FAMILIES.iter().find_map(named)
}

impl Family {
    /// Whether layers with experts have a dense feed-forward part beside them.
    pub fn is_beside(&self) -> bool {
        self.experts.is_some_and(|x| x.beside.is_some())
    }

    /// Whether the class reads a key, `nested` if of a vision checkpoint: that of Gemma 3 does not cap the logits.
    pub(super) fn reads(&self, key: &str, nested: bool) -> bool {
        (key == DROPOUT || self.reads.contains(&key)) && !(key == CAP && nested && !self.by_layer)
    }

    /// Whether a key read only by some families has an effect in this one; true for other keys.
    pub(super) fn has_use_for(&self, key: &str) -> bool {
        let of_experts = |reads: fn(&Experts, &str) -> bool| self.experts.is_some_and(|x| reads(&x, key));
        match key {
            "attention_bias" | "mlp_bias" | "qkv_bias" => {
                let is = |b: Bias| matches!(b, Bias::Key(k) | Bias::Unless(k) if k == key);
                [self.qkv_bias, self.o_bias, self.mlp_bias].into_iter().any(is)
            }
            "decoder_sparse_step" | "mlp_only_layers" => of_experts(|x, _| x.dense_layers),
            "norm_topk_prob" => of_experts(|x, _| !x.always_normalise),
            "num_experts" | "num_local_experts" => self.experts.is_some(),
            "num_experts_per_tok" | "top_k_experts" => of_experts(|x, key| x.top_k_key == key),
            "moe_intermediate_size" => of_experts(|x, key| x.width_key == key),
            "no_rope_layer_interval" => self.no_rope_interval.is_some(),
            "sliding_window" => self.window != Window::Never,
            "use_sliding_window" => self.window.has_switch(),
            "max_window_layers" => matches!(self.window, Window::FromLayer | Window::EvenBelow),
            "swiglu_alpha" | "swiglu_limit" => self.gate == GateFunction::Clamped,
            "hidden_act" => self.gate != GateFunction::GeluTanh,
            "hidden_activation" => self.gate == GateFunction::GeluTanh,
            "global_head_dim" | "num_global_key_value_heads" | "vocab_size_per_layer_input" => self.by_layer,
            "full_attention_interval" => self.delta.is_some(),
            key => self.delta.is_some() || !key.starts_with("linear_"),
        }
    }

    /// Every `model_type` of the family.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.model_type].into_iter().chain(self.nested.map(|(name, _)| name))
    }
}
