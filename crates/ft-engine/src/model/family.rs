//! Model families as rows of one table. Adding a family of the usual kind touches this file alone.

/// Where a bias comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// The family has none.
    Never,
    /// The family always has it.
    Always,
    /// This key of config.json says so; none when the key is missing.
    Key(&'static str),
    /// This key of config.json says so; there is one when the key is missing.
    Unless(&'static str),
}

/// How a family chooses which layers attend in a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// No layer.
    Never,
    /// Every layer, where `sliding_window` is not null.
    Always,
    /// Every layer, where `sliding_window` is not null; of so many tokens where the key is missing.
    Unless(usize),
    /// Every layer, with `use_sliding_window`.
    AlwaysIf,
    /// With `use_sliding_window`: layers from `max_window_layers` on, or as `layer_types` says.
    FromLayer,
}

/// How a family names and routes experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Name of the mixture within a layer (`mlp`, `block_sparse_moe`).
    pub block: &'static str,
    /// Gate, up and down projection within an expert.
    pub names: [&'static str; 3],
    /// Key of config.json that counts experts.
    pub count_key: &'static str,
    /// Key of an expert's inner width.
    pub width_key: &'static str,
    /// Whether `decoder_sparse_step` and `mlp_only_layers` say which layers have experts; else all have.
    pub dense_layers: bool,
    /// Whether the chosen gates are always scaled to sum to one; else `norm_topk_prob` decides.
    pub always_normalise: bool,
    /// Default of `num_experts_per_tok`.
    pub default_top_k: usize,
    /// Key of the inner width of an expert that every token goes through, where the family has one.
    pub shared_key: Option<&'static str>,
}

/// One row: what differs between families that share the decoder layer.
#[derive(Debug)]
pub struct Family {
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// Name of the architecture in `architectures`.
    pub architecture: &'static str,
    /// Biases of q, k and v.
    pub qkv_bias: Bias,
    /// Bias of the attention's output.
    pub o_bias: Bias,
    /// Biases of the feed-forward linears.
    pub mlp_bias: Bias,
    /// Whether queries and keys are normalised, head by head.
    pub qk_norm: bool,
    /// Sliding windows.
    pub window: Window,
    /// Head size where config.json gives none; `None` is width over heads.
    pub default_head_dim: Option<usize>,
    /// Default of `rope_theta`.
    pub default_theta: f64,
    /// Default of `rms_norm_eps`.
    pub default_eps: f64,
    /// Experts, in a mixture family.
    pub experts: Option<Experts>,
}

const DENSE: Family = Family {
    model_type: "",
    architecture: "",
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    qk_norm: false,
    window: Window::Never,
    default_head_dim: None,
    default_theta: 10_000.0,
    default_eps: 1e-6,
    experts: None,
};

/// Every family that `ft` knows.
pub const FAMILIES: &[Family] = &[
    Family {
        model_type: "llama",
        architecture: "LlamaForCausalLM",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        mlp_bias: Bias::Key("mlp_bias"),
        ..DENSE
    },
    Family {
        model_type: "qwen2",
        architecture: "Qwen2ForCausalLM",
        qkv_bias: Bias::Always,
        window: Window::FromLayer,
        ..DENSE
    },
    Family {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        qk_norm: true,
        window: Window::FromLayer,
        default_head_dim: Some(128),
        ..DENSE
    },
    Family {
        model_type: "mistral",
        architecture: "MistralForCausalLM",
        window: Window::Unless(4096),
        ..DENSE
    },
    Family {
        model_type: "mixtral",
        architecture: "MixtralForCausalLM",
        window: Window::Always,
        default_theta: 1_000_000.0,
        default_eps: 1e-5,
        experts: Some(Experts {
            block: "block_sparse_moe",
            names: ["w1", "w3", "w2"],
            count_key: "num_local_experts",
            width_key: "intermediate_size",
            dense_layers: false,
            always_normalise: true,
            default_top_k: 2,
            shared_key: None,
        }),
        ..DENSE
    },
    Family {
        model_type: "qwen3_moe",
        architecture: "Qwen3MoeForCausalLM",
        qkv_bias: Bias::Key("attention_bias"),
        o_bias: Bias::Key("attention_bias"),
        qk_norm: true,
        window: Window::AlwaysIf,
        experts: Some(Experts {
            block: "mlp",
            names: ["gate_proj", "up_proj", "down_proj"],
            count_key: "num_experts",
            width_key: "moe_intermediate_size",
            dense_layers: true,
            always_normalise: false,
            default_top_k: 8,
            shared_key: None,
        }),
        ..DENSE
    },
    Family {
        model_type: "qwen2_moe",
        architecture: "Qwen2MoeForCausalLM",
        qkv_bias: Bias::Unless("qkv_bias"),
        window: Window::FromLayer,
        experts: Some(Experts {
            block: "mlp",
            names: ["gate_proj", "up_proj", "down_proj"],
            count_key: "num_experts",
            width_key: "moe_intermediate_size",
            dense_layers: true,
            always_normalise: false,
            default_top_k: 4,
            shared_key: Some("shared_expert_intermediate_size"),
        }),
        ..DENSE
    },
];

/// The family of a `model_type`, if it is known.
pub fn find(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|f| f.model_type == model_type)
}
