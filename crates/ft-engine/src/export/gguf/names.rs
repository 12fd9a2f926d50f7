//! llama.cpp's tensor names for a model's modules.

use super::error::{Error, refuse};
use crate::model::Config;
use crate::model::modules::{FeedForwardTree, Kind, MixerTree, MlpTree, Module, Tree};

/// A tensor of llama.cpp: one module, or the same linear of all experts in a layer, stacked.
pub(super) struct Placed {
    /// Name, without `.weight`.
    pub name: String,
    /// Source modules; several are stacked.
    pub modules: Vec<Module>,
    /// Number of heads, if rotary channels are reordered.
    pub heads: Option<usize>,
    /// Whether the weight is always f32: norms and routers.
    pub in_f32: bool,
    /// Added to the values: llama.cpp multiplies by a norm's weight as it is.
    pub plus: f64,
}

/// llama.cpp's architecture name of a family.
///
/// # Errors
/// An unsupported family.
pub(super) fn architecture(config: &Config) -> Result<&'static str, Error> {
    match config.family.model_type {
        // llama.cpp's llama graph includes experts.
        "llama" | "mixtral" => Ok("llama"),
        "qwen2" => Ok("qwen2"),
        "qwen3" => Ok("qwen3"),
        "qwen3_moe" => Ok("qwen3moe"),
        "smollm3" => Ok("smollm3"),
        "olmo2" => Ok("olmo2"),
        "gemma3_text" => Ok("gemma3"),
        other => refuse(format!("model_type {other}"), "not built yet: its export to GGUF"),
    }
}

/// Whether llama.cpp's rotary embedding pairs neighboring channels; checkpoints pair the two halves of a
/// head.
fn pairs_neighbours(architecture: &str) -> bool {
    matches!(architecture, "llama" | "smollm3")
}

/// All tensors of a model. A tied head is omitted.
///
/// # Errors
/// As [`architecture`].
pub(super) fn place(config: &Config) -> Result<Vec<Placed>, Error> {
    let reorder = pairs_neighbours(architecture(config)?);
    let mut out = Vec::new();
    let mut put = |name: String, modules: Vec<Module>, heads: Option<usize>, in_f32: bool| {
        let norms = modules.iter().all(|m| matches!(m.kind, Kind::Norm { .. }));
        let plus = if norms && config.family.plus_one { 1.0 } else { 0.0 };
        out.push(Placed { name, modules, heads: heads.filter(|_| reorder), in_f32, plus });
    };
    let tree = Tree::of(config);
    put("token_embd".into(), vec![tree.embedding], None, false);
    for (l, layer) in tree.layers.into_iter().enumerate() {
        let name = |last: &str| format!("blk.{l}.{last}");
        put(name("attn_norm"), layer.attn_norm.into_iter().collect(), None, true);
        let MixerTree::Attention { q, k, v, o, qk_norm, .. } = layer.mixer else {
            return refuse(format!("layer {l}"), "not built yet: the export of linear attention to GGUF");
        };
        put(name("attn_q"), vec![q], Some(config.heads), false);
        put(name("attn_k"), k.into_iter().collect(), Some(config.kv_heads), false);
        put(name("attn_v"), v.into_iter().collect(), None, false);
        put(name("attn_output"), vec![o], None, false);
        if let Some((q, k)) = qk_norm {
            put(name("attn_q_norm"), vec![q], None, true);
            put(name("attn_k_norm"), k.into_iter().collect(), None, true);
        }
        put(name("post_attention_norm"), layer.attn_post.into_iter().collect(), None, true);
        put(name("post_ffw_norm"), layer.mlp_post.into_iter().collect(), None, true);
        put(name("ffn_norm"), layer.mlp_norm.into_iter().collect(), None, true);
        match layer.mlp {
            FeedForwardTree::Dense(MlpTree { gate, up, down }) => {
                put(name("ffn_gate"), vec![gate], None, false);
                put(name("ffn_up"), up.into_iter().collect(), None, false);
                put(name("ffn_down"), vec![down], None, false);
            }
            FeedForwardTree::Mixture { router, experts, .. } => {
                put(name("ffn_gate_inp"), vec![router], None, true);
                let mut parts = [Vec::new(), Vec::new(), Vec::new()];
                for MlpTree { gate, up, down } in experts {
                    let own = [Some(gate), up, Some(down)];
                    parts.iter_mut().zip(own).for_each(|(all, m)| all.extend(m));
                }
                for (part, all) in ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"].iter().zip(parts) {
                    put(name(part), all, None, false);
                }
            }
        }
    }
    put("output_norm".into(), vec![tree.norm], None, true);
    if !config.tied {
        put("output".into(), vec![tree.head], None, false);
    }
    Ok(out)
}

/// Reorders query or key rows for llama.cpp's rotary embedding: interleaves the two halves of every head.
pub(super) fn reorder(
    t: &candle_core::Tensor,
    heads: Option<usize>,
) -> candle_core::Result<candle_core::Tensor> {
    let Some(heads) = heads else { return Ok(t.clone()) };
    let shape = t.dims().to_vec();
    let half = shape[0] / heads / 2;
    let row = t.elem_count() / shape[0].max(1);
    t.reshape((heads, 2, half, row))?.transpose(1, 2)?.contiguous()?.reshape(shape)
}
