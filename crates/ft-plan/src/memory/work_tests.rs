//! Work of a step against closed formulas.

use super::{GhostModel, ModelStates, Settings, Simulation, StepInputs};
use crate::time::{CostModel, Work};
use crate::workload::Tokens;
use candle_core::DType;
use ft_engine::adapters::Selection;
use ft_engine::model::{Config, Units};
use ft_engine::walk::{Dequantize, Inputs, Recomputed};
use ft_kernels::Machine;
use ft_recipe::{Quantize, Recipe};

const DENSE: &str = r#"{"model_type": "qwen3", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 5,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": false}"#;

/// Work of a micro-batch of `docs` documents of `n` tokens, all supervised, by recompute setting.
fn works<R>(
    config: &str,
    rules: &str,
    (docs, n): (usize, usize),
    (quantize, machine): (Quantize, Machine),
    heads: &[u64],
    look: impl FnOnce(&dyn Fn(Settings) -> Work) -> R,
) -> anyhow::Result<R> {
    let raw: serde_json::Map<_, _> = serde_json::from_str(config)?;
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("config.json"), serde_json::to_string(&raw)?)?;
    let config = Config::load(dir.path(), &serde_json::Map::new())?;
    let text = format!(
        "[model]\nsource = \"m\"\n{rules}\n[[data.train]]\nsource = \"d.jsonl\"\nformat = \"text\"\n"
    );
    let recipe = Recipe::parse(&text, "r.toml", &[])?;
    let selection = Selection::from_rules(&config, &recipe.train)?;
    let dtype = if machine.computes_in_f32() { DType::F32 } else { DType::BF16 };
    let (computes, all) = ((machine, dtype), Units::all(config.layers));
    let shape = GhostModel::new(&config, &selection, (quantize, true), computes, (1, 1), all)?;
    let run = StepInputs {
        shape: &shape,
        states: &ModelStates::default(),
        train: Tokens::of(&vec![n; docs], docs * (n - 1)),
        eval: None,
        answers: None,
        orders: 0,
        skewed: false,
        neftune: 0.0,
        prefers: false,
        in_flight: 1,
        more: false,
        context: [None, None],
        tensor: (1, [Tokens::default(); 2]),
    };
    let parts = Simulation::new(run, heads)?;
    Ok(look(&|levels| parts.work(levels)))
}

fn levels(recompute: Recomputed, dequantize: Dequantize, head: usize) -> Settings {
    Settings { recompute, inputs: Inputs::default(), dequantize, head }
}

const CPU: Machine = Machine { cuda: false, width: 4, stored: 4, threads: 1, card: None, fp8: false };

fn work(
    config: &str,
    rules: &str,
    docs: usize,
    n: usize,
    recompute: impl Into<Recomputed>,
) -> anyhow::Result<Work> {
    let levels = levels(recompute.into(), Dequantize::PerMatmul, 0);
    works(config, rules, (docs, n), (Quantize::None, CPU), &[u64::from(u32::MAX)], |at| at(levels))
}

#[track_caller]
fn near(got: f64, want: f64) {
    assert!((got / want - 1.0).abs() < 1e-12, "{got}, by the formula {want}");
}

/// Parameters of one layer's linears in `DENSE`: q, o; k, v; gate, up, down.
const LINEARS: f64 = (2 * 96 * 192 + 2 * 96 * 64 + 3 * 96 * 160) as f64;
/// Sum of input and output sizes of the linears.
const ENDS: f64 = (2 * (96 + 192) + 2 * (96 + 64) + 3 * (96 + 160)) as f64;
const HEAD: f64 = (96 * 1000) as f64;

/// Parameters of the last product of a layer, never recomputed.
const LAST: f64 = (96 * 160) as f64;

/// Full training: 6 FLOPs per parameter and token (2 forward, 4 backward), 2 more if recomputed, except
/// for the layer's last product. Causal attention: 2 n^2 d per document forward, with 5 products instead
/// of 2 backward.
#[test]
fn a_dense_model_in_full_is_costed() -> anyhow::Result<()> {
    let full = "[[train]]\nmodules = [\"attention\", \"mlp\", \"norms\", \"embedding\", \"head\"]\nmethod = \"full\"\n";
    let (docs, n) = (3.0, 128.0);
    let (tokens, targets) = (docs * n, docs * (n - 1.0));
    let attention = docs * 2.0 * n * n * 192.0;
    for recompute in [0, 2, 5] {
        let w = work(DENSE, full, 3, 128, recompute)?;
        near(w.forward, 5.0 * (2.0 * tokens * LINEARS + attention) + 2.0 * targets * HEAD);
        near(w.backward, 5.0 * (4.0 * tokens * LINEARS + 2.5 * attention) + 4.0 * targets * HEAD);
        let again = recompute as f64 * (2.0 * tokens * (LINEARS - LAST) + attention);
        assert!((w.recompute - again).abs() <= 1e-9 * again, "{} {again}", w.recompute);
    }
    // only gate and up are recomputed; no product at level norms
    let w = work(DENSE, full, 3, 128, Recomputed { all: 0, feed_forward: 2, norms: 3 })?;
    near(w.recompute, 2.0 * 2.0 * tokens * 2.0 * LAST);
    Ok(())
}

/// Frozen weights have no gradient: 4 FLOPs per parameter and token, 6 for LoRA matrices. No backward
/// pass below the lowest trained layer.
#[test]
fn lora_on_the_upper_layers_is_costed() -> anyhow::Result<()> {
    let lora = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\", \"mlp\"]\nlayers = \"-2:\"\n";
    let w = work(DENSE, lora, 1, 64, 1)?;
    let attention = 2.0 * 64.0 * 64.0 * 192.0;
    let layer = 2.0 * 64.0 * LINEARS + attention;
    let adapters = 2.0 * 64.0 * 4.0 * ENDS;
    near(w.forward, 5.0 * layer + 2.0 * adapters + 2.0 * 63.0 * HEAD);
    near(w.backward, 2.0 * (2.0 * 64.0 * LINEARS + 2.0 * adapters + 2.5 * attention) + 2.0 * 63.0 * HEAD);
    // of the last product and its adapter, only the inner values are recomputed
    near(w.recompute, layer + adapters - 2.0 * 64.0 * (LAST + 4.0 * 96.0));
    Ok(())
}

/// A mixture costs only the active experts; a frozen router still propagates its gradient.
#[test]
fn a_mixture_costs_its_active_experts() -> anyhow::Result<()> {
    let moe = DENSE.replace("\"qwen3\"", "\"qwen3_moe\"").replace(
        "\"intermediate_size\"",
        "\"num_experts\": 16, \"num_experts_per_tok\": 3, \"moe_intermediate_size\": 40, \"norm_topk_prob\": true, \"decoder_sparse_step\": 1, \"intermediate_size\"",
    );
    let rule = "[[train]]\nmodules = [\"experts\"]\nmethod = \"full\"\n";
    let w = work(&moe, rule, 1, 64, 0)?;
    let attention = 2.0 * 64.0 * 64.0 * 192.0;
    let frozen = (2 * 96 * 192 + 2 * 96 * 64 + 96 * 16) as f64;
    let active = (3 * 3 * 96 * 40) as f64;
    near(w.forward, 5.0 * (128.0 * (frozen + active) + attention) + 2.0 * 63.0 * HEAD);
    near(w.backward, 5.0 * (128.0 * (frozen + 2.0 * active) + 2.5 * attention) + 2.0 * 63.0 * HEAD);
    Ok(())
}

/// Per-layer dequantization runs once, per-tile twice (once for the last product); each logit chunk reads
/// the head's weights.
#[test]
fn dequantization_and_logit_chunks_are_costed() -> anyhow::Result<()> {
    let lora = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\", \"mlp\"]\n";
    for cuda in [false, true] {
        let (m, heads) = (Machine { cuda, ..CPU }, [128, 64]);
        works(DENSE, lora, (1, 129), (Quantize::Nf4, m), &heads, |work| {
            let b = CostModel::of(m);
            let at = |recompute: usize, dequantize, head| work(levels(recompute.into(), dequantize, head));
            near(at(0, Dequantize::PerMatmul, 0).dequantize, 10.0 * LINEARS * b.dequantize);
            near(at(2, Dequantize::PerMatmul, 0).dequantize, (12.0 * LINEARS - 2.0 * LAST) * b.dequantize);
            let held = 2.0 * 4.0 * LINEARS * b.held;
            near(at(2, Dequantize::PerLayer, 0).dequantize, 10.0 * LINEARS * b.dequantize + held);
            let [whole, half] = [0, 1].map(|head| at(0, Dequantize::PerMatmul, head));
            // forward and backward, plus the launches of a chunk
            let more = half.fixed - whole.fixed - 2.0 * HEAD * 4.0 * b.byte;
            let started = more / b.start;
            assert!((5.0..80.0).contains(&started), "{started}");
            near(whole.flops(), half.flops());
        })?;
    }
    Ok(())
}

/// Attention costs more than its FLOPs, and other operations cost the bytes they move: level norms reads
/// and writes the rows of two norms, queries and keys.
#[test]
fn attention_and_moved_bytes_are_costed() -> anyhow::Result<()> {
    let lora = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\", \"mlp\"]\n";
    let (docs, n) = (3, 128);
    let tokens = (docs * n) as f64;
    let attention = docs as f64 * 2.0 * (n * n) as f64 * 192.0;
    for cuda in [false, true] {
        let m = Machine { cuda, ..CPU };
        works(DENSE, lora, (docs, n), (Quantize::None, m), &[u64::from(u32::MAX)], |work| {
            let b = CostModel::of(m);
            let at = |recompute| work(levels(recompute, Dequantize::PerMatmul, 0));
            let extra = |w: Work, again: f64| {
                let longer = (5.0 + again) * (b.attention[0] - 1.0) + 5.0 * 2.5 * (b.attention[1] - 1.0);
                near(w.attention, attention * longer);
            };
            let none = at(0.into());
            extra(none, 0.0);
            extra(at(2.into()), 2.0);
            let norms = at(Recomputed { norms: 2, ..Recomputed::default() });
            extra(norms, 0.0);
            let rows = 4.0 * tokens * (2.0 * 2.0 * 96.0 + 2.0 * (192.0 + 64.0));
            let moved = (norms.moved - none.moved) / b.moved / 2.0;
            // includes rotary tables, and on the CPU the norms of queries and keys
            assert!(moved >= rows && moved < 2.0 * rows, "{moved} bytes, of rows {rows}");
        })?;
    }
    Ok(())
}

/// Of two layers without attention.
#[test]
fn the_delta_rule_is_costed() -> anyhow::Result<()> {
    let config = r#"{"model_type": "qwen3_5_text", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "linear_attention"], "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4, "vocab_size": 1000, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 512, "hidden_act": "silu", "attn_output_gate": true, "tie_word_embeddings": false}"#;
    let lora = "[lora]\nrank = 4\n[[train]]\nmodules = [\"mlp\"]\n";
    let (docs, n) = (3, 128);
    let forward = 2.0 * 2.0 * (docs * n * 4) as f64 * (3.0 * 16.0 * 24.0 + 32.0 * (2.0 * 16.0 + 1.5 * 24.0));
    for cuda in [false, true] {
        let m = Machine { cuda, ..CPU };
        works(config, lora, (docs, n), (Quantize::None, m), &[u64::from(u32::MAX)], |work| {
            let extra = CostModel::of(m).delta - 1.0;
            let at = |recompute| work(levels(recompute, Dequantize::PerMatmul, 0)).attention;
            near(at(0.into()), 4.5 * forward * extra);
            near(at(2.into()), 5.5 * forward * extra);
        })?;
    }
    Ok(())
}

/// A transfer costs the part not hidden by the visit; a pageable one costs all of it.
#[test]
fn a_transfer_costs_the_part_not_hidden_by_the_visit() {
    let b = CostModel::of(Machine { cuda: true, ..CPU });
    let visit = Work { forward: 1e9, ..Work::default() };
    let [pinned, other] = [true, false].map(|pin| Inputs { on_host: true, pin });
    assert_eq!(b.waiting(1000, pinned, visit), 0.0);
    near(b.waiting(1_000_000, pinned, visit), 1e6 * b.crossing[0] - 1e9);
    near(b.waiting(1000, other, visit), 1e3 * b.crossing[1]);
}
