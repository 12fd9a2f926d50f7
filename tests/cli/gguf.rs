//! `ft export --to gguf`, read back by candle's reader.

use super::world::{World, reference, repository};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{DType, Device, Tensor};
use ft::store::TensorFiles;
use std::fs::File;

/// A GGUF file that is open.
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

    /// As f32, with its shape.
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

/// The rows of each head in llama.cpp's order: a row of the first half, then that of the second.
fn neighbours(t: &Tensor, heads: usize) -> Tensor {
    let half = t.dims()[0] / heads / 2;
    let rows: Vec<u32> = (0..heads)
        .flat_map(|h| (0..half).flat_map(move |i| [2 * h * half + i, (2 * h + 1) * half + i]))
        .map(|r| r as u32)
        .collect();
    t.index_select(&Tensor::new(rows, &Device::Cpu).expect("rows"), 0).expect("rows that are there")
}

fn tensors(case: &str, file: &str) -> TensorFiles {
    TensorFiles::open_file(&std::path::Path::new(&reference(case)).join(file)).expect("tensors")
}

fn get(files: &TensorFiles, name: &str) -> Tensor {
    files.tensor(name, DType::F32, &Device::Cpu).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn a_llama_model_has_llama_cpps_names_and_order() {
    let w = World::new();
    w.ok(&["export", &reference("llama3-rope/model"), "--to", "gguf", "--out", "g", "--dtype", "f32"]);
    let mut g = Gguf::open(&w, "g/model.gguf");
    assert_eq!(g.text("general.architecture"), "llama");
    assert_eq!((g.number("llama.block_count"), g.number("general.file_type")), (2, 0));
    assert_eq!((g.number("llama.attention.head_count"), g.number("llama.attention.head_count_kv")), (4, 2));
    let files = tensors("llama3-rope", "model/model.safetensors");
    let l = "model.layers.1";
    same(&g.tensor("token_embd.weight"), &get(&files, "model.embed_tokens.weight"), "embedding");
    same(&g.tensor("output.weight"), &get(&files, "lm_head.weight"), "head");
    let q = get(&files, &format!("{l}.self_attn.q_proj.weight"));
    same(&g.tensor("blk.1.attn_q.weight"), &neighbours(&q, 4), "queries");
    let k = get(&files, &format!("{l}.self_attn.k_proj.weight"));
    same(&g.tensor("blk.1.attn_k.weight"), &neighbours(&k, 2), "keys");
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
    // Llama 3's factors: short wavelengths are kept, long ones divided by 8
    let factors: Vec<f32> = g.tensor("rope_freqs.weight").to_vec1().expect("factors");
    assert!((factors[0] - 1.0).abs() < 1e-6 && (factors[3] - 8.0).abs() < 1e-5, "{factors:?}");
    assert_eq!(g.content.tensor_infos.len(), 2 + 2 * 9 + 1 + 1);
}

#[test]
fn dtypes_biases_and_tied_heads() {
    let w = World::new();
    let model = reference("qwen2-bias/model");
    let files = tensors("qwen2-bias", "model/model.safetensors");
    for (word, dtype, kind) in [("f16", DType::F16, 1), ("bf16", DType::BF16, 32)] {
        w.ok(&["export", &model, "--to", "gguf", "--out", word, "--dtype", word]);
        let mut g = Gguf::open(&w, &format!("{word}/model.gguf"));
        assert_eq!((g.text("general.architecture"), g.number("general.file_type")), ("qwen2", kind));
        let q = get(&files, "model.layers.0.self_attn.q_proj.weight").to_dtype(dtype).expect("rounded");
        same(&g.tensor("blk.0.attn_q.weight"), &q, "queries, in the order of the checkpoint");
        // norms and biases stay f32
        let bias = get(&files, "model.layers.0.self_attn.q_proj.bias");
        same(&g.tensor("blk.0.attn_q.bias"), &bias, "bias");
        assert_eq!(format!("{:?}", g.content.tensor_infos["blk.0.attn_norm.weight"].ggml_dtype), "F32");
    }
    w.ok(&["export", &reference("qwen3-dense/model"), "--to", "gguf", "--out", "tied"]);
    let mut g = Gguf::open(&w, "tied/model.gguf");
    assert!(!g.content.tensor_infos.contains_key("output.weight"), "a tied head is the embedding");
    g.tensor("blk.0.attn_q_norm.weight");
}

#[test]
fn experts_are_stacked() {
    let w = World::new();
    w.ok(&["export", &reference("qwen3-moe/model"), "--to", "gguf", "--out", "g", "--dtype", "f32"]);
    let mut g = Gguf::open(&w, "g/model.gguf");
    let files = tensors("qwen3-moe", "model/model.safetensors");
    let e = g.number("qwen3moe.expert_count") as usize;
    let up: Vec<Tensor> =
        (0..e).map(|e| get(&files, &format!("model.layers.0.mlp.experts.{e}.up_proj.weight"))).collect();
    same(&g.tensor("blk.0.ffn_up_exps.weight"), &Tensor::stack(&up, 0).expect("stacked"), "experts");
    same(&g.tensor("blk.0.ffn_gate_inp.weight"), &get(&files, "model.layers.0.mlp.gate.weight"), "router");
}

#[test]
fn the_tokenizer_and_its_template_go_along() {
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

    // a way to split texts that has no name
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
    w.ok(&["export", "m", "--to", "gguf", "--out", "n", "--pre", "default"]);
    assert_eq!(Gguf::open(&w, "n/model.gguf").text("tokenizer.ggml.pre"), "default");
}

#[test]
fn an_adapter_is_llama_cpps_lora() {
    let w = World::new();
    let (adapter, base) = (reference("llama3-rope/adapter_final"), reference("llama3-rope/model"));
    w.ok(&["export", &adapter, "--to", "gguf", "--out", "g", "--base", &base]);
    let mut g = Gguf::open(&w, "g/adapter.gguf");
    assert_eq!((g.text("general.type"), g.text("adapter.type")), ("adapter", "lora"));
    assert_eq!(g.key("adapter.lora.alpha").to_f32().expect("alpha"), 8.0);
    let files = tensors("llama3-rope", "adapter_final/adapter_model.safetensors");
    let own = |name: &str| get(&files, &format!("base_model.model.model.layers.0.self_attn.{name}.weight"));
    same(&g.tensor("blk.0.attn_q.weight.lora_a"), &own("q_proj.lora_A"), "A");
    same(&g.tensor("blk.0.attn_q.weight.lora_b"), &neighbours(&own("q_proj.lora_B"), 4), "B");
    same(&g.tensor("blk.0.attn_v.weight.lora_b"), &own("v_proj.lora_B"), "B of values");
    assert_eq!(g.content.tensor_infos.len(), files.len());
}

#[test]
fn experts_of_an_adapter_are_stacked_with_zeros_for_the_others() {
    let w = World::new();
    let (adapter, base) = (reference("mixtral/select_adapter_final"), reference("mixtral/model"));
    w.ok(&["export", &adapter, "--to", "gguf", "--out", "g", "--base", &base]);
    let mut g = Gguf::open(&w, "g/adapter.gguf");
    let alpha = f64::from(g.key("adapter.lora.alpha").to_f32().expect("alpha"));
    let files = tensors("mixtral", "select_adapter_final/adapter_model.safetensors");
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(format!("{adapter}/adapter_config.json")).expect("read"))
            .expect("JSON");
    let stacked: Vec<String> =
        g.content.tensor_infos.keys().filter(|n| n.ends_with("_exps.weight.lora_a")).cloned().collect();
    assert!(!stacked.is_empty(), "the case has LoRA on experts");
    let (mut held, mut zeros) = (0, 0);
    for name in stacked {
        let (a, b) = (g.tensor(&name), g.tensor(&name.replace("lora_a", "lora_b")));
        let mut words = name.split('.');
        let layer = words.nth(1).expect("a layer");
        let linear = match words.next() {
            Some("ffn_gate_exps") => "w1",
            Some("ffn_up_exps") => "w3",
            _ => "w2",
        };
        let rank = a.dims()[1];
        for e in 0..a.dims()[0] {
            let (a, b) = (a.get(e).expect("A"), b.get(e).expect("B"));
            let got = b.matmul(&a).expect("a product").affine(alpha / rank as f64, 0.0).expect("scaled");
            let key = format!("base_model.model.model.layers.{layer}.block_sparse_moe.experts.{e}.{linear}");
            let part = |p: &str| files.tensor(&format!("{key}.{p}.weight"), DType::F32, &Device::Cpu).ok();
            let apart = |x: Tensor| {
                x.abs().and_then(|x| x.max_all()).and_then(|x| x.to_scalar::<f32>()).expect("a number")
            };
            match (part("lora_A"), part("lora_B")) {
                (Some(a), Some(b)) => {
                    let of = |table: &str, default: &str| {
                        let name = key.trim_start_matches("base_model.model.");
                        let found = config[table].as_object().and_then(|t| {
                            t.iter().find(|(k, _)| {
                                name.ends_with(k.trim_start_matches('^').replace('\\', "").as_str())
                            })
                        });
                        found.map_or(config[default].as_f64(), |(_, v)| v.as_f64()).expect("a number")
                    };
                    let scale = of("alpha_pattern", "lora_alpha") / of("rank_pattern", "r");
                    let want = b.matmul(&a).expect("a product").affine(scale, 0.0).expect("scaled");
                    assert!(apart((got - want).expect("a difference")) < 1e-6, "{key}");
                    held += 1;
                }
                _ => {
                    assert_eq!(apart(got), 0.0, "{key}");
                    zeros += 1;
                }
            }
        }
    }
    assert!(held > 0 && zeros > 0, "{held} {zeros}");
}

#[test]
fn what_llama_cpp_computes_otherwise_is_refused() {
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
    let r = w.ft(&["export", &reference("qwen2-moe/model"), "--to", "gguf", "--out", "g"]);
    assert!(r.code == 4 && r.err.contains("qwen2_moe: not built yet"), "{}", r.err);
    let r = w.ft(&["export", "x", "--to", "vllm", "--out", "g", "--pre", "gpt-2"]);
    assert!(r.code == 2 && r.err.contains("--pre"), "{}", r.err);
    // windows that llama.cpp does not have end the context
    let r = w.ok(&["export", &reference("qwen2-sliding/model"), "--to", "gguf", "--out", "s"]);
    assert!(r.err.contains("sliding windows"), "{}", r.err);
}
