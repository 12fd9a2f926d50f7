//! All built-in recipes pass `ft check` with nothing but the config of the model in the cache.

use crate::world::World;
use serde_json::{Value, json};

/// Published configs of the models in built-in recipes (keys for shapes and rotary embeddings).
fn config(id: &str) -> Value {
    let rope = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192});
    let qwen3 = |sizes: [u64; 4], tied: bool| {
        let more = json!({"head_dim": 128, "vocab_size": 151_936, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": tied, "max_position_embeddings": 40_960});
        dense("qwen3", sizes, 8, more)
    };
    let llama = |sizes| {
        let more = json!({"vocab_size": 128_256, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "rope_scaling": rope,
            "tie_word_embeddings": false, "max_position_embeddings": 131_072});
        dense("llama", sizes, 8, more)
    };
    match id {
        "Qwen/Qwen3-0.6B" => qwen3([1024, 3072, 28, 16], true),
        "Qwen/Qwen3-8B" => qwen3([4096, 12_288, 36, 32], false),
        "Qwen/Qwen3-14B" => qwen3([5120, 17_408, 40, 40], false),
        "Qwen/Qwen2.5-7B-Instruct" => {
            let more = json!({"vocab_size": 152_064, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
                "tie_word_embeddings": false, "max_position_embeddings": 32_768, "sliding_window": 131_072,
                "use_sliding_window": false});
            dense("qwen2", [3584, 18_944, 28, 28], 4, more)
        }
        "meta-llama/Llama-3.1-8B-Instruct" => llama([4096, 14_336, 32, 32]),
        "meta-llama/Llama-3.3-70B-Instruct" => llama([8192, 28_672, 80, 64]),
        "mistralai/Mixtral-8x7B-Instruct-v0.1" => {
            let more = json!({"vocab_size": 32_000, "rope_theta": 1e6, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": false, "max_position_embeddings": 32_768, "num_local_experts": 8,
                "num_experts_per_tok": 2, "sliding_window": null});
            dense("mixtral", [4096, 14_336, 32, 32], 8, more)
        }
        other => match ft::plan::source::builtin(other) {
            Some((_, text)) => serde_json::from_str(text).expect("a built-in config"),
            None => panic!("a shipped recipe names {other}: put its config here"),
        },
    }
}

/// Hidden size, intermediate size, layers, heads; key-value heads.
fn dense(family: &str, [hidden, inner, layers, heads]: [u64; 4], kv: u64, more: Value) -> Value {
    let mut raw = json!({"model_type": family, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv});
    raw.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    raw
}

#[test]
fn shipped_recipes_pass_without_the_weights() {
    let w = World::new();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    // rows of the user, in the form that the user has them: the recipe reads nothing else
    let row = |i: usize| json!({"question": format!("{i}?"), "answer": "Yes."}).to_string() + "\n";
    w.write("your.jsonl", (0..40).map(row).collect::<String>());
    let mut on_the_hub = 0;
    for shipped in ft::recipe::SHIPPED {
        if shipped.name.contains("quickstart") {
            continue; // local; covered by other tests
        }
        let recipe = ft::recipe::Recipe::parse(shipped.text, "r.toml", &[]).expect("a good recipe");
        let id = &recipe.model.source;
        let folder = format!("hf/hub/models--{}", id.replace('/', "--"));
        w.write(&format!("{folder}/refs/main"), commit);
        w.write(&format!("{folder}/snapshots/{commit}/config.json"), config(id).to_string());
        w.write("r.toml", shipped.text);
        let r = w.ft(&["check", "r.toml", "data.train.0.source=your.jsonl"]);
        assert_eq!(r.code, 0, "{}: {}", shipped.name, r.err);
        for said in ["not checked  the weights", "not checked  tokenizer", &format!("model        {id}")] {
            assert!(r.out.contains(said), "{}: {}", shipped.name, r.out);
        }
        assert!(recipe.data.eval_share > 0.0 && recipe.data.eval.is_empty(), "{}", shipped.name);
        let full = shipped.name.ends_with("full");
        assert_eq!(r.out.contains("(100.00 %)"), full, "{}: {}", shipped.name, r.out);
        on_the_hub += 1;
    }
    assert!(on_the_hub >= 8);
}

#[test]
fn a_recipe_whose_rows_a_command_makes_says_which() {
    let w = World::new();
    for (name, command) in [
        ("pretrain-quickstart", "quickstart_data -- pretrain runs/pretrain-data"),
        ("quickstart-distill", "ft logits runs/quickstart "),
    ] {
        let r = w.ft(&["check", name]);
        assert!(r.code == 3 && r.err.contains(command) && !r.err.contains("start   ft run"), "{}", r.err);
    }
}

/// Without a config, rules are not checked, but data files are.
#[test]
fn ft_check_without_a_config_checks_the_data_files() {
    let w = World::new();
    w.write("r.toml", ft::recipe::Shipped::find("qwen3-8b-lora").expect("a recipe").text);
    let set = ["model.source=me/unknown", "data.train.0.source=gone.jsonl", "data.train.0.format=messages"];
    let r = w.ft(&[&["check", "r.toml"], &set[..]].concat());
    assert_eq!(r.code, 4, "{}", r.err);
    for said in ["config.json of me/unknown", "not checked: what trains", "gone.jsonl is not there"] {
        assert!(r.err.contains(said), "{said:?} is not in {}", r.err);
    }
}
