//! What ranks split, in tests.

use super::world::{World, recipe};
use serde_json::json;

/// Experts and routers in full, beside a 4-bit base; with LoRA on attention, a loss on the routers, and states on the host.
pub const MIXTURE: &str = r#"
quantize = "nf4"
[lora]
rank = 2
[[train]]
modules = ["attention"]
[[train]]
modules = ["experts"]
experts = [0, 1]
method = "full"
[[train]]
modules = ["router"]
method = "full"
[router]
aux_loss = 0.01
z_loss = 0.001
"#;

/// DoRA beside LoRA, which then gets magnitudes at which DoRA changes nothing; and on what units share.
pub const ADAPTERS: &str = r#"
[lora]
rank = 2
[[train]]
modules = ["attention"]
dora = true
[[train]]
modules = ["mlp", "head"]
"#;

/// A world with a recipe of 12 steps of four micro-batches, but for the last, which has two.
pub fn world(rules: &str) -> World {
    let w = World::new();
    let mixture = json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": true});
    w.config("tiny", if rules == MIXTURE { mixture } else { json!({"tie_word_embeddings": true}) });
    let run = "epochs = 1.15\nsave_every = 4\nkeep = 9\nclip = 0.5";
    let text = recipe(rules).replace("steps = 6", run).replace("micro_rows = 2", "micro_rows = 1");
    w.write("r.toml", text.replace("max_length = 32", "max_length = 32\npack = false"));
    w
}

/// The last checkpoint's weights and moments, and the result.
pub fn ends(w: &World, run: &str) -> Vec<Vec<u8>> {
    let newest = w.checkpoints(run).pop().expect("a checkpoint");
    let of = |f: &str| w.read(&format!("{run}/checkpoints/{newest}/{f}"));
    let result = ["adapter/adapter_model.safetensors", "model/model.safetensors"];
    let result = result.into_iter().find(|r| w.path(run).join(r).is_file()).expect("a result");
    vec![of("weights.safetensors"), of("optimizer.safetensors"), w.read(&format!("{run}/{result}"))]
}
