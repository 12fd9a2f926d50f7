//! llama.cpp's tensor names for a model's modules.

use super::changes::{Change, alternate, in_turns, neighbors, parts};
use super::{Error, refuse};
use crate::model::Config;
use crate::model::modules::{
    FeedForwardTree, Kind, LayerTree, MixerTree, MlpTree, Module, Tree, norm_offset,
};

/// A tensor of llama.cpp: one module, or the same linear of all experts in a layer, stacked.
pub(super) struct MappedTensor {
    /// Name, without the last part.
    pub name: String,
    /// Last part of the name: `weight`, another one, or none.
    pub last: &'static str,
    /// Source modules; several are stacked.
    pub modules: Vec<Module>,
    /// Whether the weight is always f32: norms, routers, vectors.
    pub in_f32: bool,
    /// Differences, in order.
    pub changes: Vec<Change>,
}

impl MappedTensor {
    /// Name in the file, of weight or bias.
    pub fn full_name(&self, bias: bool) -> String {
        match if bias { "bias" } else { self.last } {
            "" => self.name.clone(),
            last => format!("{}.{last}", self.name),
        }
    }

    /// Shape of a tensor of a module, with the changes.
    pub fn shape(&self, own: Vec<usize>) -> Vec<usize> {
        self.changes.iter().fold(own, |shape, change| change.shape(shape))
    }

    /// A tensor of a module, with the changes.
    pub fn changed(&self, t: &candle_core::Tensor) -> candle_core::Result<candle_core::Tensor> {
        self.changes.iter().try_fold(t.clone(), |t, change| change.apply(&t))
    }
}

/// llama.cpp's architecture name of a family.
///
/// # Errors
/// An unsupported family.
pub(super) fn architecture(config: &Config) -> Result<&'static str, Error> {
    match config.family.model_type {
        // llama.cpp's llama graph includes experts.
        "llama" | "mistral" | "mixtral" => Ok("llama"),
        "qwen2" => Ok("qwen2"),
        "qwen3" => Ok("qwen3"),
        "qwen2_moe" => Ok("qwen2moe"),
        "qwen3_moe" => Ok("qwen3moe"),
        "qwen3_next" => Ok("qwen3next"),
        "qwen3_5_text" => Ok("qwen35"),
        "qwen3_5_moe_text" => Ok("qwen35moe"),
        "smollm3" => Ok("smollm3"),
        "olmo2" | "olmo3" => Ok("olmo2"),
        "phi3" => Ok("phi3"),
        "glm" => Ok("chatglm"),
        "glm4" => Ok("glm4"),
        "gemma3_text" => Ok("gemma3"),
        "gemma4_text" => Ok("gemma4"),
        "gpt_oss" => Ok("gpt-oss"),
        "ministral" if config.attention.iter().all(|a| a.window.is_none()) => Ok("llama"),
        "ministral" => refuse("layer_types", "windows in some layers; llama.cpp's llama has none"),
        other => refuse(format!("model_type {other}"), "not built yet: its export to GGUF"),
    }
}

/// Whether llama.cpp's rotary embedding pairs neighboring channels; checkpoints pair the two halves of a
/// head.
fn pairs_neighbors(architecture: &str) -> bool {
    matches!(architecture, "llama" | "smollm3")
}

/// Maps modules to llama.cpp's tensors, in order.
struct TensorNameMap<'a> {
    config: &'a Config,
    arch: &'static str,
    out: Vec<MappedTensor>,
}

/// All tensors of a model. A tied head is omitted.
///
/// # Errors
/// As [`architecture`].
pub(super) fn map_tensors(config: &Config) -> Result<Vec<MappedTensor>, Error> {
    let mut map = TensorNameMap { config, arch: architecture(config)?, out: Vec::new() };
    let tree = Tree::of(config);
    map.one("token_embd", tree.embedding, Vec::new());
    if let Some([table, projection, norm]) = tree.per_layer {
        map.one("per_layer_token_embd", table, Vec::new());
        map.one("per_layer_model_proj", projection, Vec::new());
        map.one("per_layer_proj_norm", norm, Vec::new());
    }
    tree.layers.into_iter().enumerate().for_each(|(l, layer)| map.layer(l, layer));
    map.one("output_norm", tree.norm, Vec::new());
    if !config.tied {
        map.one("output", tree.head, Vec::new());
    }
    Ok(map.out)
}

impl TensorNameMap<'_> {
    fn put(&mut self, (name, last): (String, &'static str), modules: Vec<Module>, changes: Vec<Change>) {
        let vector = |m: &Module| !matches!(m.kind, Kind::Linear { .. } | Kind::Embedding { .. });
        let in_f32 = modules.iter().all(vector) || name.contains("ffn_gate_inp");
        self.out.push(MappedTensor { name, last, modules, in_f32, changes });
    }

    fn one(&mut self, name: &str, module: Module, changes: Vec<Change>) {
        let plus = match module.kind {
            Kind::Norm { .. } => norm_offset(self.config, &module),
            _ => 0.0,
        };
        let plus = (plus != 0.0).then_some(Change::Plus(plus));
        self.put((name.into(), "weight"), vec![module], changes.into_iter().chain(plus).collect());
    }

    fn optional(&mut self, name: &str, module: Option<Module>, changes: Vec<Change>) {
        if let Some(module) = module {
            self.one(name, module, changes);
        }
    }

    fn layer(&mut self, l: usize, t: LayerTree) {
        let name = |last: &str| format!("blk.{l}.{last}");
        // The norm of the feed-forward part has the name of the norm of attention's output elsewhere.
        let of_mlp = match self.arch {
            "gpt-oss" | "qwen3next" | "qwen35" | "qwen35moe" => "post_attention_norm",
            _ => "ffn_norm",
        };
        self.optional(&name("attn_norm"), t.attn_norm, Vec::new());
        self.mixer(l, t.mixer);
        self.optional(&name("post_attention_norm"), t.attn_post, Vec::new());
        self.optional(&name("post_ffw_norm"), t.mlp_post, Vec::new());
        self.optional(&name(of_mlp), t.mlp_norm, Vec::new());
        self.feed_forward(l, t.mlp);
        if let Some([gate, projection, norm]) = t.per_layer {
            self.one(&name("inp_gate"), gate, Vec::new());
            self.one(&name("proj"), projection, Vec::new());
            self.one(&name("post_norm"), norm, Vec::new());
        }
        self.optional(&name("layer_output_scale"), t.scalar, Vec::new());
    }

    fn mixer(&mut self, l: usize, t: MixerTree) {
        let name = |last: &str| format!("blk.{l}.{last}");
        let (q, k, v, o, qk_norm, sinks) = match t {
            MixerTree::Attention { q, k, v, o, qk_norm, sinks } => (q, k, v, o, qk_norm, sinks),
            delta => return self.delta(l, delta),
        };
        let rotary = |rows: usize, heads: usize| match pairs_neighbors(self.arch) {
            true => vec![neighbors(rows, heads)],
            false => Vec::new(),
        };
        let of_q = rotary(q.rows(), self.config.heads);
        let of_k = k.as_ref().map_or(Vec::new(), |k| rotary(k.rows(), self.config.attention[l].kv_heads));
        let joint = self.config.family.joint_qkv;
        self.one(&name(if joint { "attn_qkv" } else { "attn_q" }), q, of_q);
        self.optional(&name("attn_k"), k, of_k);
        self.optional(&name("attn_v"), v, Vec::new());
        self.one(&name("attn_output"), o, Vec::new());
        if let Some((q, k)) = qk_norm {
            self.one(&name("attn_q_norm"), q, Vec::new());
            self.optional(&name("attn_k_norm"), k, Vec::new());
        }
        self.optional(&name("attn_sinks"), sinks, Vec::new());
    }

    /// Linear attention. Qwen3.5's value heads are in turns of the key heads.
    fn delta(&mut self, l: usize, t: MixerTree) {
        let MixerTree::Delta { projections, conv, a_log, bias, norm, out } = t else { return };
        let Some(heads) = self.config.delta.as_ref().map(|d| d.heads) else { return };
        let name = |last: &str| format!("blk.{l}.{last}");
        let (per, turns) = (heads.values / heads.keys, self.arch != "qwen3next");
        let in_order = |from: usize, dim: usize| match turns {
            true => in_turns(from, (heads.keys, per, dim)),
            false => (0..from + heads.values * dim).map(|r| r as u32).collect(),
        };
        let rows = |from, dim| vec![Change::Rows(in_order(from, dim))];
        let (keys, dim) = (2 * heads.keys * heads.key_dim, heads.value_dim);
        match <[Module; 4]>::try_from(projections) {
            Ok([qkv, z, b, a]) => {
                self.one(&name("attn_qkv"), qkv, rows(keys, dim));
                self.one(&name("attn_gate"), z, rows(0, dim));
                self.one(&name("ssm_beta"), b, rows(0, 1));
                self.one(&name("ssm_alpha"), a, rows(0, 1));
            }
            Err(projections) => {
                let sizes = [heads.key_dim, heads.key_dim, per * dim, per * dim];
                let mut all = projections.into_iter();
                if let Some(qkvz) = all.next() {
                    self.one(&name("attn_qkv"), qkvz.clone(), vec![parts(heads.keys, &sizes, 0..3)]);
                    self.one(&name("attn_gate"), qkvz, vec![parts(heads.keys, &sizes, 3..4)]);
                }
                self.optional(&name("ssm_ba"), all.next(), Vec::new());
            }
        }
        let taps = [vec![Change::Squeezed], rows(keys, dim)].concat();
        self.one(&name("ssm_conv1d"), conv, taps);
        self.put((name("ssm_a"), ""), vec![a_log], [rows(0, 1), vec![Change::Decay]].concat());
        self.put((name("ssm_dt"), "bias"), vec![bias], rows(0, 1));
        self.one(&name("ssm_norm"), norm, Vec::new());
        self.one(&name("ssm_out"), out, vec![Change::Columns(in_order(0, dim))]);
    }

    fn feed_forward(&mut self, l: usize, t: FeedForwardTree) {
        let name = |last: &str| format!("blk.{l}.{last}");
        match t {
            FeedForwardTree::Dense(mlp) => self.mlp(l, mlp, ""),
            FeedForwardTree::Mixture { router, experts, shared } => {
                self.one(&name("ffn_gate_inp"), router, Vec::new());
                self.experts(l, experts);
                if let Some((mlp, gate)) = shared {
                    self.mlp(l, mlp, "_shexp");
                    self.one(&name("ffn_gate_inp_shexp"), gate, vec![Change::Squeezed]);
                }
            }
            FeedForwardTree::Beside { dense_norms: [before, after], dense, router, norms, experts } => {
                self.one(&name("ffn_norm"), before, Vec::new());
                self.mlp(l, dense, "");
                self.one(&name("post_ffw_norm_1"), after, Vec::new());
                let [scale, router, factors] = router;
                self.put((name("ffn_gate_inp"), "scale"), vec![scale], Vec::new());
                self.one(&name("ffn_gate_inp"), router, Vec::new());
                // llama.cpp multiplies the outputs of the experts.
                self.put((name("ffn_down_exps"), "scale"), vec![factors], Vec::new());
                let [before, after] = norms;
                self.one(&name("pre_ffw_norm_2"), before, Vec::new());
                self.one(&name("post_ffw_norm_2"), after, Vec::new());
                self.experts(l, experts);
            }
        }
    }

    /// Gate and up as one matrix are called as up alone.
    fn mlp(&mut self, l: usize, MlpTree { gate, up, down }: MlpTree, end: &str) {
        let name = |part: &str| format!("blk.{l}.ffn_{part}{end}");
        self.one(&name(if up.is_some() { "gate" } else { "up" }), gate, Vec::new());
        self.optional(&name("up"), up, Vec::new());
        self.one(&name("down"), down, Vec::new());
    }

    fn experts(&mut self, l: usize, experts: Vec<MlpTree>) {
        let mut parts = [Vec::new(), Vec::new(), Vec::new()];
        for MlpTree { gate, up, down } in experts {
            let own = [Some(gate), up, Some(down)];
            parts.iter_mut().zip(own).for_each(|(all, m)| all.extend(m));
        }
        let [gate, up, down] = parts;
        let name = |part: &str| (format!("blk.{l}.ffn_{part}_exps"), "weight");
        let rows = gate.first().map_or(0, Module::rows);
        match self.arch {
            // Rows of gate and up alternate.
            "gpt-oss" => {
                self.put(name("gate"), gate.clone(), vec![alternate(rows, 0)]);
                self.put(name("up"), gate, vec![alternate(rows, 1)]);
            }
            "gemma4" => self.put(name("gate_up"), gate, Vec::new()),
            _ => {
                self.put(name("gate"), gate, Vec::new());
                self.put(name("up"), up, Vec::new());
            }
        }
        self.put(name("down"), down, Vec::new());
    }
}
