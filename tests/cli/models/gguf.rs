//! `ft export --to gguf`, verified with candle's reader.

use crate::world::{World, merged, mixture, recipe, reference, repository};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Tensor};
use ft::files::TensorFiles;
use serde_json::json;
use std::fs::File;
use std::path::{Path, PathBuf};

/// An open GGUF file.
struct Gguf {
    file: File,
    content: Content,
}

impl Gguf {
    fn open(w: &World, name: &str) -> Self {
        let mut file = File::open(w.path(name)).expect("a file");
        let content = Content::read(&mut file).expect("GGUF");
        Self { file, content }
    }

    fn key(&self, key: &str) -> &Value {
        self.content.metadata.get(key).unwrap_or_else(|| panic!("no key {key}"))
    }

    fn number(&self, key: &str) -> u32 {
        self.key(key).to_u32().expect("a number")
    }

    fn text(&self, key: &str) -> &str {
        self.key(key).to_string().expect("a text")
    }

    fn list(&self, key: &str) -> &Vec<Value> {
        self.key(key).to_vec().expect("a list")
    }

    /// Values in f32, with the shape.
    fn tensor(&mut self, name: &str) -> Tensor {
        let t =
            self.content.tensor(&mut self.file, name, &Device::Cpu).unwrap_or_else(|e| panic!("{name}: {e}"));
        t.dequantize(&Device::Cpu).expect("values")
    }
}

fn bits(t: &Tensor) -> Vec<u32> {
    let values = t.to_dtype(DType::F32).and_then(|t| t.flatten_all()).and_then(|t| t.to_vec1::<f32>());
    values.expect("values").iter().map(|x| x.to_bits()).collect()
}

#[track_caller]
fn same(a: &Tensor, b: &Tensor, what: &str) {
    assert_eq!(a.dims(), b.dims(), "{what}");
    assert!(bits(a) == bits(b), "{what}: other values");
}

/// Reorders the rows of every head as in llama.cpp: rows of the first and second half alternate.
fn neighbors(t: &Tensor, heads: usize) -> Tensor {
    let half = t.dims()[0] / heads / 2;
    let rows: Vec<u32> = (0..heads)
        .flat_map(|h| (0..half).flat_map(move |i| [2 * h * half + i, (2 * h + 1) * half + i]))
        .map(|r| r as u32)
        .collect();
    t.index_select(&Tensor::new(rows, &Device::Cpu).expect("rows"), 0).expect("rows that are there")
}

fn tensors(path: impl AsRef<Path>) -> TensorFiles {
    TensorFiles::open_file(path.as_ref()).expect("tensors")
}

/// Trains a reference model by some rules. Returns the tensors of the adapter in `a/adapter`.
fn train(w: &World, case: &str, rules: &str) -> TensorFiles {
    let base = reference(&format!("{case}/model"));
    let text =
        recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", &format!("source = {base:?}"));
    w.write("r.toml", text);
    w.ok(&["run", "r.toml", "run.output=a"]);
    tensors(w.path("a/adapter/adapter_model.safetensors"))
}

fn get(files: &TensorFiles, name: &str) -> Tensor {
    files.tensor(name, DType::F32, &Device::Cpu).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn a_llama_model_has_llama_cpps_names_and_order() {
    let w = World::new();
    w.ok(&["export", &reference("llama3-rope/model"), "--to", "gguf", "--out", "g", "--dtype", "f32"]);
    let r = w.ft(&["chat", "g/model.gguf"]);
    assert!(r.code == 2 && r.err.contains("ft writes GGUF and does not read it"), "{} {}", r.code, r.err);
    let mut g = Gguf::open(&w, "g/model.gguf");
    assert_eq!(g.text("general.architecture"), "llama");
    assert_eq!((g.number("llama.block_count"), g.number("general.file_type")), (2, 0));
    assert_eq!((g.number("llama.attention.head_count"), g.number("llama.attention.head_count_kv")), (4, 2));
    let files = tensors(reference("llama3-rope/model/model.safetensors"));
    let l = "model.layers.1";
    same(&g.tensor("token_embd.weight"), &get(&files, "model.embed_tokens.weight"), "embedding");
    same(&g.tensor("output.weight"), &get(&files, "lm_head.weight"), "head");
    let q = get(&files, &format!("{l}.self_attn.q_proj.weight"));
    same(&g.tensor("blk.1.attn_q.weight"), &neighbors(&q, 4), "queries");
    let k = get(&files, &format!("{l}.self_attn.k_proj.weight"));
    same(&g.tensor("blk.1.attn_k.weight"), &neighbors(&k, 2), "keys");
    for (theirs, ours) in [
        ("attn_v", "self_attn.v_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ] {
        let got = g.tensor(&format!("blk.1.{theirs}.weight"));
        same(&got, &get(&files, &format!("{l}.{ours}.weight")), theirs);
    }
    // Frequency factors of Llama 3: short wavelengths are kept, long ones are divided by 8.
    let factors: Vec<f32> = g.tensor("rope_freqs.weight").to_vec1().expect("factors");
    assert!((factors[0] - 1.0).abs() < 1e-6 && (factors[3] - 8.0).abs() < 1e-5, "{factors:?}");
    assert_eq!(g.content.tensor_infos.len(), 2 + 2 * 9 + 1 + 1);
}

#[test]
fn dtypes_biases_and_tied_heads_are_exported() {
    let w = World::new();
    let model = reference("qwen2-bias/model");
    let files = tensors(reference("qwen2-bias/model/model.safetensors"));
    for (word, dtype, kind) in [("f16", DType::F16, 1), ("bf16", DType::BF16, 32)] {
        w.ok(&["export", &model, "--to", "gguf", "--out", word, "--dtype", word]);
        let mut g = Gguf::open(&w, &format!("{word}/model.gguf"));
        assert_eq!((g.text("general.architecture"), g.number("general.file_type")), ("qwen2", kind));
        let q = get(&files, "model.layers.0.self_attn.q_proj.weight").to_dtype(dtype).expect("rounded");
        same(&g.tensor("blk.0.attn_q.weight"), &q, "queries, in the order of the checkpoint");
        // Norms and biases stay in f32.
        let bias = get(&files, "model.layers.0.self_attn.q_proj.bias");
        same(&g.tensor("blk.0.attn_q.bias"), &bias, "bias");
        assert_eq!(format!("{:?}", g.content.tensor_infos["blk.0.attn_norm.weight"].ggml_dtype), "F32");
    }
    w.ok(&["export", &reference("qwen3-dense/model"), "--to", "gguf", "--out", "tied"]);
    let mut g = Gguf::open(&w, "tied/model.gguf");
    assert!(!g.content.tensor_infos.contains_key("output.weight"), "a tied head is the embedding");
    g.tensor("blk.0.attn_q_norm.weight");
}

/// Such values are finite in the file, which is neither damaged nor diverged.
#[test]
fn values_beyond_f16_are_refused_as_such() {
    let w = World::new();
    let from = reference("qwen2-bias/model");
    let files = tensors(format!("{from}/model.safetensors"));
    let name = "model.layers.0.self_attn.q_proj.weight";
    let changed = |n: &str| {
        let t = get(&files, n);
        (n.to_string(), if n == name { t.affine(0.0, 1e5).expect("values") } else { t })
    };
    let all: Vec<_> = files.names().map(changed).collect();
    w.write("m/config.json", std::fs::read(format!("{from}/config.json")).expect("read"));
    ft::files::write_file(&w.path("m/model.safetensors"), &all, &[]).expect("written");
    let export = |dtype: &str| w.ft(&["export", "m", "--to", "gguf", "--out", dtype, "--dtype", dtype]);
    let (r, said) = (export("f16"), format!("{name}: has values beyond f16's range"));
    assert!(r.code == 4 && r.err.contains(&said), "{}", r.err);
    assert_eq!(export("bf16").code, 0);
}

#[test]
fn experts_are_stacked() {
    let w = World::new();
    let experts = json!({
        "model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [],
    });
    w.config("m", experts);
    let groups = ["attention", "experts", "router", "norms", "embedding", "head"];
    let rules = format!("[[train]]\nmodules = {groups:?}\nmethod = \"full\"\n");
    w.write("r.toml", recipe(&rules).replace("\"tiny\"", "\"m\""));
    w.ok(&["run", "r.toml", "run.output=a"]);
    w.ok(&["export", "a", "--to", "gguf", "--out", "g", "--dtype", "f32"]);
    let mut g = Gguf::open(&w, "g/model.gguf");
    let files = tensors(w.path("a/model/model.safetensors"));
    assert_eq!((g.number("qwen3moe.expert_count"), g.number("qwen3moe.expert_used_count")), (5, 2));
    assert_eq!(g.number("qwen3moe.expert_feed_forward_length"), 12);
    for (theirs, ours) in [("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")] {
        let of = |e| get(&files, &format!("model.layers.1.mlp.experts.{e}.{ours}.weight"));
        let all: Vec<Tensor> = (0..5).map(of).collect();
        let got = g.tensor(&format!("blk.1.ffn_{theirs}_exps.weight"));
        same(&got, &Tensor::stack(&all, 0).expect("stacked"), theirs);
    }
    same(&g.tensor("blk.0.ffn_gate_inp.weight"), &get(&files, "model.layers.0.mlp.gate.weight"), "router");
}

#[test]
fn the_tokenizer_and_its_template_are_exported() {
    let w = World::new();
    let model = repository().join("data/model").display().to_string();
    w.ok(&["export", &model, "--to", "gguf", "--out", "g"]);
    let g = Gguf::open(&w, "g/model.gguf");
    assert_eq!((g.text("tokenizer.ggml.model"), g.text("tokenizer.ggml.pre")), ("gpt2", "gpt-2"));
    let file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(repository().join("data/model/tokenizer.json")).expect("read"))
            .expect("JSON");
    let tokens = g.list("tokenizer.ggml.tokens");
    assert_eq!(tokens.len(), 1024);
    for (text, id) in file["model"]["vocab"].as_object().expect("tokens") {
        let id = id.as_u64().expect("an id") as usize;
        assert_eq!(tokens[id].to_string().expect("a text"), text);
    }
    let types = g.list("tokenizer.ggml.token_type");
    let control: Vec<usize> = (0..1024).filter(|i| types[*i].to_i32().ok() == Some(3)).collect();
    let special = file["added_tokens"].as_array().expect("tokens");
    assert_eq!(control, special.iter().map(|t| t["id"].as_u64().expect("id") as usize).collect::<Vec<_>>());
    assert_eq!(g.list("tokenizer.ggml.merges").len(), 765);
    assert_eq!(
        (g.number("tokenizer.ggml.eos_token_id"), g.number("tokenizer.ggml.padding_token_id")),
        (2, 0)
    );
    assert!(g.text("tokenizer.chat_template").contains("<|im_start|>"));
    assert!(!g.key("tokenizer.ggml.add_bos_token").to_bool().expect("a flag"));
    let absent = |key: &str| !g.content.metadata.contains_key(key);
    assert!(absent("tokenizer.chat_templates") && absent("general.sampling.temp"));

    // An unknown pre-tokenizer.
    let split = file.to_string().replace(r#""use_regex":true"#, r#""use_regex":false"#);
    for name in ["config.json", "model.safetensors", "tokenizer_config.json"] {
        w.write(
            &format!("m/{name}"),
            std::fs::read(repository().join("data/model").join(name)).expect("read"),
        );
    }
    w.write("m/tokenizer.json", split);
    let r = w.ft(&["export", "m", "--to", "gguf", "--out", "n"]);
    assert!(r.code == 4 && r.err.contains("pre_tokenizer") && r.err.contains("--pre"), "{}", r.err);
    assert!(!w.path("n").exists());
    w.write("m/chat_template.jinja", "{{ messages }}");
    w.write("m/additional_chat_templates/tool_use.jinja", "{{ tools }}");
    w.write(
        "m/generation_config.json",
        "{\"top_k\": 20, \"top_p\": 0.5, \"temperature\": 0.75, \"min_p\": null}",
    );
    w.ok(&["export", "m", "--to", "gguf", "--out", "n", "--pre", "default"]);
    let g = Gguf::open(&w, "n/model.gguf");
    assert_eq!(g.text("tokenizer.ggml.pre"), "default");
    assert_eq!(g.text("tokenizer.chat_template"), "{{ messages }}");
    assert_eq!(g.text("tokenizer.chat_template.tool_use"), "{{ tools }}");
    let named: Vec<_> =
        g.list("tokenizer.chat_templates").iter().map(|t| t.to_string().expect("a text")).collect();
    assert_eq!(named, ["tool_use"]);
    let number = |key: &str| g.key(&format!("general.sampling.{key}")).to_f32().expect("a number");
    assert_eq!((number("top_p"), number("temp")), (0.5, 0.75));
    assert_eq!(g.key("general.sampling.top_k").to_i32().expect("a whole number"), 20);
    assert!(!g.content.metadata.contains_key("general.sampling.min_p"));
}

#[test]
fn an_adapter_is_llama_cpps_lora() {
    let w = World::new();
    let rules = "[[train]]\nmodules = [\"attention\"]\nrank = 3\nalpha = 8\n\
                 [[train]]\nmodules = [\"down_proj\"]\nrank = 2\nalpha = 4\n";
    let files = train(&w, "llama3-rope", rules);
    w.ok(&["export", "a", "--to", "gguf", "--out", "g"]);
    let mut g = Gguf::open(&w, "g/adapter.gguf");
    assert_eq!((g.text("general.type"), g.text("adapter.type")), ("adapter", "lora"));
    assert_eq!(g.key("adapter.lora.alpha").to_f32().expect("alpha"), 8.0, "that of the most modules");
    let own = |name: &str| get(&files, &format!("base_model.model.model.layers.0.{name}.weight"));
    same(&g.tensor("blk.0.attn_q.weight.lora_a"), &own("self_attn.q_proj.lora_A"), "A");
    same(&g.tensor("blk.0.attn_q.weight.lora_b"), &neighbors(&own("self_attn.q_proj.lora_B"), 4), "B");
    same(
        &g.tensor("blk.0.attn_k.weight.lora_b"),
        &neighbors(&own("self_attn.k_proj.lora_B"), 2),
        "B of keys",
    );
    same(&g.tensor("blk.0.attn_v.weight.lora_b"), &own("self_attn.v_proj.lora_B"), "B of values");
    // llama.cpp scales by 8 / 2, training by 4 / 2.
    let halved = own("mlp.down_proj.lora_B").affine(0.5, 0.0).expect("halved");
    assert!(bits(&halved).iter().any(|b| *b != 0), "it has learned something");
    same(&g.tensor("blk.0.ffn_down.weight.lora_b"), &halved, "B of another alpha");
    assert_eq!(g.content.tensor_infos.len(), files.len());

    // A checkpoint works as input, too.
    let step = w.checkpoints("a").pop().expect("a checkpoint");
    w.ok(&["export", &format!("a/checkpoints/{step}"), "--to", "gguf", "--out", "c"]);
    assert!(w.read("c/adapter.gguf") == w.read("g/adapter.gguf"), "the last checkpoint is the result");
}

#[test]
fn experts_of_an_adapter_are_stacked_with_zeros_for_the_others() {
    let w = World::new();
    let rule = |e: usize, rank: usize, alpha: usize| {
        format!("[[train]]\nmodules = [\"experts\"]\nexperts = [{e}]\nrank = {rank}\nalpha = {alpha}\n")
    };
    let files = train(&w, "mixtral", &[rule(0, 2, 8), rule(2, 3, 6)].concat());
    w.ok(&["export", "a/adapter", "--to", "gguf", "--out", "g"]);
    let mut g = Gguf::open(&w, "g/adapter.gguf");
    let alpha = f64::from(g.key("adapter.lora.alpha").to_f32().expect("alpha"));
    let product = |a: &Tensor, b: &Tensor, scale: f64| {
        b.matmul(a).and_then(|t| t.affine(scale, 0.0)).expect("a product")
    };
    let most =
        |t: Tensor| t.abs().and_then(|t| t.max_all()).and_then(|t| t.to_scalar::<f32>()).expect("a number");
    for layer in 0..2 {
        for (theirs, ours) in [("gate", "w1"), ("up", "w3"), ("down", "w2")] {
            let name = format!("blk.{layer}.ffn_{theirs}_exps.weight.lora");
            let (a, b) = (g.tensor(&format!("{name}_a")), g.tensor(&format!("{name}_b")));
            assert_eq!(
                (a.dims()[0], a.dims()[1], b.dims()[2]),
                (4, 3, 3),
                "all experts, of the largest rank"
            );
            for e in 0..4 {
                let got = product(&a.get(e).expect("A"), &b.get(e).expect("B"), alpha / 3.0);
                let key =
                    format!("base_model.model.model.layers.{layer}.block_sparse_moe.experts.{e}.{ours}");
                let want = match e {
                    0 | 2 => {
                        let (a, b) = (format!("{key}.lora_A.weight"), format!("{key}.lora_B.weight"));
                        product(
                            &get(&files, &a),
                            &get(&files, &b),
                            if e == 0 { 8.0 / 2.0 } else { 6.0 / 3.0 },
                        )
                    }
                    _ => got.zeros_like().expect("zeros"),
                };
                if e == 0 {
                    assert!(most(want.clone()) > 1e-4, "{key}: it has learned something");
                }
                assert!(most((&got - &want).expect("a difference")) <= 1e-6 * most(want), "{key}");
            }
        }
    }
    assert_eq!(g.content.tensor_infos.len(), 2 * 3 * 2);
}

#[test]
fn models_that_llama_cpp_computes_differently_are_refused() {
    let w = World::new();
    let refused = |adapter: &str, base: &str, why: &str| {
        let base = reference(base);
        let r = w.ft(&["export", &reference(adapter), "--to", "gguf", "--out", "g", "--base", &base]);
        assert!(r.code == 4 && r.err.contains(why) && r.err.contains("ft merge"), "{}", r.err);
        assert!(!w.path("g").exists());
    };
    refused("mixtral-fused/dora_adapter_final", "mixtral-fused/model", "has DoRA");
    refused("qwen2-bias/save_adapter_final", "qwen2-bias/model", "trained in full");
    refused("qwen3-dense/head_adapter_final", "qwen3-dense/model", "head and embedding are one tensor");
    for (case, why) in [
        ("qwen2-moe", "mlp_only_layers"),
        ("qwen3-moe", "mlp_only_layers"),
        ("qwen3-one-kv", "attention_bias"),
    ] {
        let r = w.ft(&["export", &reference(&format!("{case}/model")), "--to", "gguf", "--out", "g"]);
        assert!(r.code == 4 && r.err.contains(why), "{case}: {}", r.err);
    }
    w.copy(reference("qwen3-dense/model"), "m");
    let plain = w.json("m/config.json");
    for (key, value, code, why) in [
        ("hidden_act", json!("gelu_pytorch_tanh"), 4, "hidden_act"),
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0}), 4, "dynamic; llama.cpp has"),
        // Of effect in training alone.
        ("attention_dropout", json!(0.1), 0, ""),
    ] {
        let mut config = plain.clone();
        config[key] = value;
        w.write("m/config.json", config.to_string());
        let r = w.ft(&["export", "m", "--to", "gguf", "--out", "dropout"]);
        assert!(r.code == code && r.err.contains(why), "{key}: {} {}", r.code, r.err);
    }
    let r = w.ft(&["export", "x", "--to", "vllm", "--out", "g", "--pre", "gpt-2"]);
    assert!(r.code == 2 && r.err.contains("--pre"), "{}", r.err);
    // The context ends at the attention window, because llama.cpp does not support windows here.
    for (case, arch, window) in [("qwen2-sliding", "qwen2", 5), ("mistral", "llama", 6)] {
        let r = w.ok(&["export", &reference(&format!("{case}/model")), "--to", "gguf", "--out", case]);
        assert!(r.err.contains("sliding windows"), "{}", r.err);
        let g = Gguf::open(&w, &format!("{case}/model.gguf"));
        let context = g.number(&format!("{arch}.context_length"));
        assert_eq!((g.text("general.architecture"), context), (arch, window));
    }
}

/// Writes LoRA of zeros on a linear `[out, inp]`.
fn lora(w: &World, name: &str, module: &str, [out, inp]: [usize; 2]) {
    let half = |half: &str, shape: [usize; 2]| {
        let zeros = Tensor::zeros(&shape[..], DType::F32, &Device::Cpu).expect("zeros");
        (format!("base_model.model.{module}.lora_{half}.weight"), zeros)
    };
    let config = json!({"peft_type": "LORA", "r": 2, "target_modules": [module]});
    w.write(&format!("{name}/adapter_config.json"), config.to_string());
    let path = w.path(&format!("{name}/adapter_model.safetensors"));
    ft::files::write_file(&path, &[half("A", [2, inp]), half("B", [out, 2])], &[]).expect("written");
}

/// By the model's key each. A tensor absent from the model, but possible in another program's file, is no reason.
#[test]
fn adapters_of_bases_that_llama_cpp_computes_differently_are_refused() {
    let w = World::new();
    lora(&w, "head", "lm_head", [64, 32]);
    lora(&w, "values", "model.layers.1.self_attn.v_proj", [16, 32]);
    let (slides, full, linear) = ("sliding_attention", "full_attention", "linear_attention");
    let table = |theta: f64| json!({"rope_theta": theta, "rope_type": "default"});
    let ropes = |sliding: f64| json!({full: table(1e6), slides: table(sliding)});
    let of = |family: &str, more: serde_json::Value| merged(json!({ "model_type": family }), &more);
    let (qwen3, smollm3) = (json!({}), of("smollm3", json!({"num_hidden_layers": 4})));
    let qwen3_moe = mixture();
    let of_qwen2_moe = json!({"shared_expert_intermediate_size": 20, "norm_topk_prob": false});
    let qwen2_moe = merged(mixture(), &of("qwen2_moe", of_qwen2_moe));
    let of_gemma3 = json!({"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 8,
        "layer_types": [slides, slides, slides, slides, slides, full], "rope_parameters": ropes(1e4)});
    let gemma3 = of("gemma3_text", of_gemma3);
    let of_gemma4 = json!({"num_hidden_layers": 4, "layer_types": [slides, slides, slides, full],
        "sliding_window": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0, "rope_parameters": ropes(1e4)});
    let gemma4 = of("gemma4_text", of_gemma4);
    let of_olmo3 = json!({"num_hidden_layers": 4, "layer_types": [slides, slides, slides, full],
        "sliding_window": 8, "rope_parameters": ropes(1e6)});
    let olmo3 = of("olmo3", of_olmo3);
    let of_gpt_oss = json!({"num_hidden_layers": 2, "layer_types": [slides, full], "sliding_window": 8,
        "num_local_experts": 4, "num_experts_per_tok": 2});
    let gpt_oss = of("gpt_oss", of_gpt_oss);
    let of_qwen35 = json!({"num_hidden_layers": 4, "layer_types": [linear, full, linear, full],
        "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_num_value_heads": 4, "linear_value_head_dim": 8, "partial_rotary_factor": 0.5});
    let qwen35 = of("qwen3_5_text", of_qwen35);
    let scaled = |kind: &str, more: serde_json::Value| {
        let common = json!({"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64});
        json!({"rope_scaling": merged(common, &more)})
    };
    let ones = json!({"long_factor": [1.0, 1.0, 1.0, 1.0], "short_factor": [1.0, 1.0, 1.0, 1.0]});
    let bands = json!({"low_freq_factor": 1.0, "high_freq_factor": 4.0});
    let export = |adapter: &str, base: &serde_json::Value, out: &str| {
        w.config("m", base.clone());
        w.ft(&["export", adapter, "--to", "gguf", "--base", "m", "--out", out])
    };
    for (family, change, said) in [
        (&qwen3, json!({"attention_bias": true}), "attention_bias: "),
        (&smollm3, json!({"mlp_bias": true}), "mlp_bias: "),
        (&qwen3, json!({"model_type": "qwen2", "head_dim": 16}), "head_dim: 16"),
        (&qwen3, json!({"hidden_act": "gelu_pytorch_tanh"}), "hidden_act or "),
        (&smollm3, json!({"no_rope_layers": [1, 1, 0, 1]}), "no_rope_layers: "),
        (&gemma3, json!({"layer_types": [slides, full, slides, full, slides, full]}), "layer_types: "),
        (&gemma3, json!({"rope_parameters": ropes(2e4)}), "rope_parameters.sliding_attention: "),
        (&gemma3, json!({"query_pre_attn_scalar": 24}), "query_pre_attn_scalar: "),
        (&gemma3, json!({"final_logit_softcapping": 30.0}), "final_logit_softcapping: "),
        (&gemma4, json!({"per_layer_config": {"1": {"num_key_value_heads": 1}}}), "per_layer_config: "),
        (
            &gemma4,
            json!({"layer_types": [full, slides, slides, full], "num_kv_shared_layers": 1}),
            "num_kv_shared_layers: ",
        ),
        (&gemma4, json!({"layer_types": [full, full, full, full]}), "layer_types: "),
        (&olmo3, json!({"layer_types": [slides, full, slides, full]}), "layer_types: "),
        (&olmo3, json!({"rope_parameters": ropes(2e4)}), "rope_parameters.sliding_attention: "),
        (&gpt_oss, json!({"layer_types": [full, slides]}), "layer_types: "),
        (&gpt_oss, json!({"swiglu_limit": 1.5}), "swiglu_limit: "),
        (&qwen35, json!({"linear_value_head_dim": 12}), "linear_value_head_dim: 12"),
        (&qwen35, json!({"layer_types": [linear, full, full, linear]}), "layer_types: "),
        (&qwen35, json!({"rms_norm_eps": 1e-2}), "rms_norm_eps: "),
        (&qwen3_moe, json!({"num_experts": 0}), "num_experts: 0"),
        (&qwen3_moe, json!({"norm_topk_prob": false}), "norm_topk_prob: false"),
        (&qwen2_moe, json!({"norm_topk_prob": true}), "norm_topk_prob: true"),
        (&qwen3_moe, json!({"mlp_only_layers": [0]}), "mlp_only_layers or "),
        (&qwen2_moe, json!({"decoder_sparse_step": 2}), "or decoder_sparse_step: "),
        (&qwen3, scaled("dynamic", json!({})), "rope_scaling: dynamic"),
        (&qwen3, scaled("longrope", ones), "rope_scaling: longrope"),
        (&qwen3, scaled("llama3", bands), "rope_scaling: llama3"),
        (&qwen3, scaled("yarn", json!({"truncate": false})), "rope_scaling.truncate: false"),
    ] {
        let r = export("head", &merged(family.clone(), &change), "n");
        assert!(r.code == 4 && r.err.contains(said), "{family} {change}: {} {}", r.code, r.err);
        assert!(!w.path("n").exists());
    }
    let tied = json!({"tie_word_embeddings": true});
    let table = json!({"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 80});
    let none = json!({});
    for (i, (family, change)) in [
        (&qwen3, &none),
        (&smollm3, &none),
        (&gemma3, &none),
        (&olmo3, &none),
        (&qwen35, &none),
        (&qwen3_moe, &none),
        (&qwen2_moe, &tied),
        (&of("olmo2", none.clone()), &tied),
        (&gpt_oss, &tied),
        (&gpt_oss, &json!({"attention_bias": false})),
        (&gemma4, &table),
    ]
    .into_iter()
    .enumerate()
    {
        let r = export("values", &merged(family.clone(), change), &format!("g{i}"));
        assert_eq!(r.code, 0, "{family} {change}: {}", r.err);
    }
    // ft writes no such file.
    let files = tensors(fixture("olmo2").join("model.safetensors"));
    let kept = files.names().filter(|name| *name != "lm_head.weight");
    let kept: Vec<_> = kept.map(|name| (name.to_string(), get(&files, name))).collect();
    w.copy(fixture("olmo2"), "olmo2");
    ft::files::write_file(&w.path("olmo2/model.safetensors"), &kept, &[]).expect("written");
    w.write("olmo2/config.json", merged(w.json("olmo2/config.json"), &tied).to_string());
    let r = w.ft(&["export", "olmo2", "--to", "gguf", "--out", "n"]);
    assert!(r.code == 4 && r.err.contains("tie_word_embeddings: true"), "{} {}", r.code, r.err);
}

/// The fixture of a later family.
fn fixture(family: &str) -> PathBuf {
    repository().join("tests/fixtures/families").join(family).join("model")
}

/// A weight of the second layer has the values of the file, under llama.cpp's name.
fn same_weight(g: &mut Gguf, theirs: &str, files: &TensorFiles, ours: &str) {
    let want = get(files, &format!("model.layers.1.{ours}.weight"));
    same(&g.tensor(&format!("blk.1.{theirs}.weight")), &want, ours);
}

/// Gate and up of experts together or apart, value heads in turns of the key heads, values that llama.cpp has otherwise.
#[test]
fn mixtures_and_linear_attention_have_llama_cpps_order() {
    let w = World::new();
    let export = |family: &str| {
        let model = fixture(family).display().to_string();
        w.ok(&["export", &model, "--to", "gguf", "--out", family, "--dtype", "f32"]);
        let files = tensors(fixture(family).join("model.safetensors"));
        (Gguf::open(&w, &format!("{family}/model.gguf")), files)
    };
    let (mut g, files) = export("gemma4-moe");
    assert_eq!((g.text("general.architecture"), g.number("gemma4.expert_used_count")), ("gemma4", 2));
    for (theirs, ours) in [
        ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
        ("ffn_down_exps.weight", "experts.down_proj"),
        ("ffn_down_exps.scale", "router.per_expert_scale"),
        ("ffn_gate_inp.scale", "router.scale"),
        ("ffn_gate_inp.weight", "router.proj.weight"),
        ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
        ("layer_output_scale.weight", "layer_scalar"),
    ] {
        same(&g.tensor(&format!("blk.1.{theirs}")), &get(&files, &format!("model.layers.1.{ours}")), ours);
    }
    let divisors: Vec<f32> = g.tensor("rope_freqs.weight").to_vec1().expect("divisors");
    assert_eq!(divisors, [1.0, 1.0, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30], "a quarter of 16 channels rotates");

    let (mut g, files) = export("qwen35-moe");
    assert_eq!(
        (g.text("general.architecture"), g.number("qwen35moe.full_attention_interval")),
        ("qwen35moe", 3)
    );
    let own = |name: &str| get(&files, &format!("model.language_model.layers.0.linear_attn.{name}"));
    // Two key heads with two value heads each: 0, 2, 1, 3.
    let order = Tensor::new(&[0u32, 2, 1, 3], &Device::Cpu).expect("rows");
    let decays = own("A_log").exp().and_then(|x| x.neg()).and_then(|x| x.index_select(&order, 0));
    same(&g.tensor("blk.0.ssm_a"), &decays.expect("decays"), "decays");
    let biases = own("dt_bias").index_select(&order, 0).expect("biases");
    same(&g.tensor("blk.0.ssm_dt.bias"), &biases, "biases of decays");
    let rates = own("in_proj_b.weight").index_select(&order, 0).expect("rates");
    same(&g.tensor("blk.0.ssm_beta.weight"), &rates, "rates");
    let norm = own("norm.weight");
    same(&g.tensor("blk.0.ssm_norm.weight"), &norm, "the norm as it is");
}

/// Norms behind the blocks, over the whole width; and what llama.cpp has otherwise is refused by its key.
#[test]
fn later_families_have_llama_cpps_names_or_are_refused() {
    let w = World::new();
    let export = |family: &str| {
        let model = fixture(family).display().to_string();
        w.ft(&["export", &model, "--to", "gguf", "--out", family, "--dtype", "f32"])
    };
    let r = export("olmo2");
    assert_eq!(r.code, 0, "{}", r.err);
    let mut g = Gguf::open(&w, "olmo2/model.gguf");
    assert_eq!(g.text("general.architecture"), "olmo2");
    let files = tensors(fixture("olmo2").join("model.safetensors"));
    for (theirs, ours) in [
        ("attn_q", "self_attn.q_proj"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("ffn_down", "mlp.down_proj"),
    ] {
        same_weight(&mut g, theirs, &files, ours);
    }
    for (family, key) in [
        ("smollm3", "no_rope_layers"),
        ("gemma3", "layer_types"),
        ("gpt-oss", "swiglu_limit"),
        ("qwen3-next", "mlp_only_layers"),
        ("qwen35-dense", "linear_value_head_dim"),
        ("olmo3", "layer_types"),
        ("ministral", "layer_types"),
    ] {
        let r = export(family);
        assert!(r.code != 0 && r.err.contains(key), "{family}: {}", r.err);
    }
}

/// Phi-3 and GLM-4 have joint linears, whose rows llama.cpp reads in the same order.
#[test]
fn joint_linears_stay_joint() {
    let w = World::new();
    let export = |family: &str| {
        let model = fixture(family).display().to_string();
        let r = w.ok(&["export", &model, "--to", "gguf", "--out", family, "--dtype", "f32"]);
        let files = tensors(fixture(family).join("model.safetensors"));
        (Gguf::open(&w, &format!("{family}/model.gguf")), files, r.err)
    };
    let (mut g, files, said) = export("phi3");
    assert_eq!((g.text("general.architecture"), g.number("phi3.rope.dimension_count")), ("phi3", 6));
    assert!(g.number("phi3.context_length") == 8 && said.contains("sliding windows"), "{said}");
    for (theirs, ours) in [
        ("attn_qkv", "self_attn.qkv_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_up", "mlp.gate_up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("ffn_norm", "post_attention_layernorm"),
    ] {
        same_weight(&mut g, theirs, &files, ours);
    }
    let (mut g, _, said) = export("phi3-long");
    assert!(said.contains("long factors") && said.contains("--ctx-size 8"), "{said}");
    assert_eq!(g.number("phi3.rope.scaling.original_context_length"), 8);
    let attention = f64::from(g.key("phi3.rope.scaling.attn_factor").to_f32().expect("a factor"));
    assert!((attention - (1.0 + 8f64.ln() / 8f64.ln()).sqrt()).abs() < 1e-6, "{attention}");
    for (name, want) in [("long", [1.1, 4.5, 17.0]), ("short", [1.0, 1.3, 1.9])] {
        let factors: Vec<f32> = g.tensor(&format!("rope_factors_{name}.weight")).to_vec1().expect("factors");
        assert_eq!(factors, want, "{name}");
    }
    let (mut g, files, _) = export("glm4");
    assert_eq!((g.text("general.architecture"), g.number("glm4.rope.dimension_count")), ("glm4", 8));
    for (theirs, ours) in [
        ("attn_q.weight", "self_attn.q_proj.weight"),
        ("attn_k.bias", "self_attn.k_proj.bias"),
        ("ffn_up.weight", "mlp.gate_up_proj.weight"),
        ("post_attention_norm.weight", "post_self_attn_layernorm.weight"),
        ("ffn_norm.weight", "post_attention_layernorm.weight"),
        ("post_ffw_norm.weight", "post_mlp_layernorm.weight"),
    ] {
        same(&g.tensor(&format!("blk.1.{theirs}")), &get(&files, &format!("model.layers.1.{ours}")), ours);
    }
}

/// An adapter of joint linears is of llama.cpp's joint tensors.
#[test]
fn an_adapter_of_joint_linears_has_joint_tensors() {
    let w = World::new();
    let base = repository().join("tests/fixtures/families/phi3/model").display().to_string();
    let rules = "[[train]]\nmodules = [\"attention\", \"mlp\"]\nrank = 2\nalpha = 4\n";
    w.write(
        "r.toml",
        recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", &format!("source = {base:?}")),
    );
    w.ok(&["run", "r.toml", "run.output=a"]);
    let files = tensors(w.path("a/adapter/adapter_model.safetensors"));
    w.ok(&["export", "a", "--to", "gguf", "--out", "g"]);
    let mut g = Gguf::open(&w, "g/adapter.gguf");
    assert_eq!(g.text("general.architecture"), "phi3");
    for (theirs, ours) in [("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")] {
        for (half, own) in [("a", "A"), ("b", "B")] {
            let want = get(&files, &format!("base_model.model.model.layers.1.{ours}.lora_{own}.weight"));
            same(&g.tensor(&format!("blk.1.{theirs}.weight.lora_{half}")), &want, ours);
        }
    }
    assert_eq!(g.content.tensor_infos.len(), files.len());
}

#[test]
fn a_shared_expert_is_exported() {
    let w = World::new();
    let experts = json!({
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20, "decoder_sparse_step": 1, "mlp_only_layers": [],
    });
    w.config("m", experts);
    let groups = ["attention", "experts", "router", "norms", "embedding", "head", "mlp"];
    let rules = format!("[[train]]\nmodules = {groups:?}\nmethod = \"full\"\n");
    w.write("r.toml", recipe(&rules).replace("\"tiny\"", "\"m\""));
    w.ok(&["run", "r.toml", "run.output=a"]);
    w.ok(&["export", "a", "--to", "gguf", "--out", "g", "--dtype", "f32"]);
    let mut g = Gguf::open(&w, "g/model.gguf");
    assert_eq!(g.text("general.architecture"), "qwen2moe");
    assert_eq!(
        (
            g.number("qwen2moe.expert_feed_forward_length"),
            g.number("qwen2moe.expert_shared_feed_forward_length")
        ),
        (12, 20)
    );
    let files = tensors(w.path("a/model/model.safetensors"));
    let own = |name: &str| get(&files, &format!("model.layers.1.mlp.{name}.weight"));
    same(&g.tensor("blk.1.ffn_up_shexp.weight"), &own("shared_expert.up_proj"), "shared");
    let gate = own("shared_expert_gate").squeeze(0).expect("one row");
    same(&g.tensor("blk.1.ffn_gate_inp_shexp.weight"), &gate, "its gate");

    // LoRA on the gate, which is a vector in the file, takes a merge.
    let lora =
        ["model.source=a/model", "model.weights=load", "train=[{modules=['shared_expert_gate'],rank=2}]"];
    w.ok(&[&["run", "r.toml", "run.output=l"][..], &lora].concat());
    let r = w.ft(&["export", "l", "--to", "gguf", "--out", "n"]);
    let said = "mlp.shared_expert_gate: has LoRA, and llama.cpp holds it as a vector\n";
    assert!(
        r.code == 4 && r.err.contains(said) && r.err.contains("hint: ft merge, then ft export"),
        "{}",
        r.err
    );
    w.ok(&["merge", "l", "--out", "m2"]);
    w.ok(&["export", "m2", "--to", "gguf", "--out", "g2"]);

    // llama.cpp never normalizes the gates of this family.
    let mut config = w.json("a/model/config.json");
    config["norm_topk_prob"] = json!(true);
    w.write("a/model/config.json", config.to_string());
    let r = w.ft(&["export", "a/model", "--to", "gguf", "--out", "n"]);
    assert!(r.code == 4 && r.err.contains("norm_topk_prob") && r.err.contains("never"), "{}", r.err);
}

/// Windows in three of four layers, and YaRN in the others.
#[test]
fn olmo_3_is_exported_with_its_windows() {
    let w = World::new();
    let base = json!({"rope_theta": 10000.0, "rope_type": "default"});
    let yarn = json!({
        "rope_theta": 10000.0, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
    });
    let kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"];
    let config = json!({
        "model_type": "olmo3", "num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 8,
        "rope_parameters": {"full_attention": yarn, "sliding_attention": base},
    });
    w.config("m", config);
    let groups = ["attention", "mlp", "norms", "embedding", "head"];
    let rules = format!("[[train]]\nmodules = {groups:?}\nmethod = \"full\"\n");
    w.write("r.toml", recipe(&rules).replace("\"tiny\"", "\"m\""));
    w.ok(&["run", "r.toml", "run.output=a"]);
    let r = w.ok(&["export", "a", "--to", "gguf", "--out", "g", "--dtype", "f32"]);
    assert!(!r.err.contains("sliding windows"), "{}", r.err);
    let g = Gguf::open(&w, "g/model.gguf");
    assert_eq!((g.text("general.architecture"), g.text("olmo2.rope.scaling.type")), ("olmo2", "yarn"));
    assert_eq!((g.number("olmo2.attention.sliding_window"), g.number("olmo2.context_length")), (8, 128));
}

/// A tokenizer of SentencePiece's BPE, with a normalizer and a pre-tokenizer, in the quickstart's model.
fn sentencepiece(w: &World, folder: &str, normalizer: serde_json::Value, pre: serde_json::Value) {
    for name in ["config.json", "model.safetensors"] {
        let bytes = std::fs::read(repository().join("data/model").join(name)).expect("read");
        w.write(&format!("{folder}/{name}"), bytes);
    }
    let mut vocab: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    vocab.extend((0..=255u8).map(|b| format!("<0x{b:02X}>")));
    vocab.extend(["\u{2581}", "a", "b", "ab", "\u{2581}ab"].map(String::from));
    let ids: serde_json::Map<String, serde_json::Value> =
        vocab.into_iter().enumerate().map(|(i, t)| (t, json!(i))).collect();
    let special = |id: usize, text: &str| {
        json!({"id": id, "content": text, "special": true, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false})
    };
    let file = json!({
        "version": "1.0", "normalizer": normalizer, "pre_tokenizer": pre,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "model": {
            "type": "BPE", "vocab": ids, "merges": [["a", "b"], ["\u{2581}", "ab"]], "byte_fallback": true,
            "unk_token": "<unk>", "fuse_unk": true,
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "post_processor": {
            "type": "TemplateProcessing", "pair": [],
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    });
    w.write(&format!("{folder}/tokenizer.json"), file.to_string());
}

#[test]
fn a_tokenizer_with_marks_is_llama_cpps_sentencepiece() {
    let w = World::new();
    let prepend = json!({"type": "Prepend", "prepend": "\u{2581}"});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let both = json!({"type": "Sequence", "normalizers": [prepend, replace]});
    let space = |scheme: &str| {
        let own = json!({"type": "Metaspace", "replacement": "\u{2581}", "split": false});
        let mut own = own.as_object().cloned().unwrap_or_default();
        own.insert("prepend_scheme".into(), json!(scheme));
        serde_json::Value::Object(own)
    };
    let null = serde_json::Value::Null;
    for (folder, normalizer, pre, template, prefix, warning) in [
        ("prepend", both.clone(), null.clone(), false, true, ""),
        ("never", null.clone(), space("never"), true, false, ""),
        ("always", null.clone(), space("always"), false, true, "a token more"),
        ("first", null.clone(), space("first"), false, true, "one too many"),
        ("chats", null.clone(), space("first"), true, false, "lacks the mark"),
    ] {
        sentencepiece(&w, folder, normalizer, pre);
        let template = if template { json!({"chat_template": "{{ messages }}"}) } else { json!({}) };
        w.write(&format!("{folder}/tokenizer_config.json"), template.to_string());
        let out = format!("{folder}-gguf");
        let r = w.ok(&["export", folder, "--to", "gguf", "--out", &out]);
        assert!(r.err.contains("puts a mark") != warning.is_empty() && r.err.contains(warning), "{}", r.err);
        let g = Gguf::open(&w, &format!("{out}/model.gguf"));
        assert_eq!(g.text("tokenizer.ggml.model"), "llama");
        assert_eq!(g.key("tokenizer.ggml.add_space_prefix").to_bool().ok(), Some(prefix), "{folder}");
        assert!(g.key("tokenizer.ggml.add_bos_token").to_bool().expect("a flag"));
        let scores = g.list("tokenizer.ggml.scores");
        let score = |id: usize| scores[id].to_f32().expect("a score");
        assert_eq!((score(262), score(263), score(259)), (-0.0, -1.0, -2.0), "by the order of merges");
        let kinds = g.list("tokenizer.ggml.token_type");
        let kind = |id: usize| kinds[id].to_i32().expect("a type");
        assert_eq!([0, 1, 3, 258, 262, 264].map(kind), [2, 3, 6, 6, 1, 5]);
    }
    sentencepiece(&w, "other", json!({"type": "NFKC"}), space("first"));
    let r = w.ft(&["export", "other", "--to", "gguf", "--out", "n"]);
    assert!(r.code == 4 && r.err.contains("tokenizer.json") && r.err.contains("normalizer"), "{}", r.err);
}
