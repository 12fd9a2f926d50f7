//! Invariances on the device; and training methods without a reference case, compared with the CPU.

use super::report::randn;
use super::split::{self, MIXTURE};
use super::world::{FULL, LORA, World, few, recipe};
use super::{apart, device};
use candle_core::{DType, Device};
use ft::files::TensorFiles;
use ft::kernel::Tensor;
use ft::kernel::dispatch::Sorted;
use ft::kernel::grouped::{self, Adapter, Entry, Gradient, Side, Table};
use serde_json::json;

fn world_of(config: &serde_json::Value, rules: &str) -> World {
    let w = World::new();
    w.config("tiny", config.clone());
    w.write("r.toml", recipe(rules));
    w
}

#[test]
fn recomputing_and_offloading_change_no_byte() {
    if !device() {
        return;
    }
    // Offloaded base matrices have no room for the adapter in the same buffer, so base and adapter are two
    // products, with different rounding.
    let adapter = "adapter/adapter_model.safetensors";
    for (w, result, host) in [
        (World::tiny(LORA), adapter, "memory.offload=['activations']"),
        (World::tiny(FULL), "model/model.safetensors", "memory.offload=['params', 'activations']"),
        (split::world(MIXTURE), adapter, "memory.offload=['activations']"),
    ] {
        for dtype in ["model.dtype=bf16", "model.dtype=f32"].into_iter().take(few(1)) {
            let mut first = None;
            let sets = [
                &["memory.recompute=all", host][..],
                &["memory.recompute=none"],
                &["memory.recompute=feed_forward", host],
                &["memory.recompute=all"],
                &["memory.recompute=feed_forward"],
                &["memory.recompute=norms"],
                &["memory.recompute=norms", host],
                &["memory.recompute=none", host],
            ];
            for set in sets.into_iter().take(few(3)) {
                let args = [
                    "run",
                    "r.toml",
                    "run.device=cuda",
                    "run.steps=2",
                    "run.output=run",
                    "--overwrite",
                    dtype,
                ];
                w.ok(&[&args, set].concat());
                let end = (w.read(&format!("run/{result}")), w.steps("run"));
                assert!(
                    *first.get_or_insert_with(|| end.clone()) == end,
                    "{dtype}, {set:?}: {result} differs"
                );
            }
        }
    }
}

/// Losses and gradient norms on both devices, for six steps unless set otherwise.
fn close(rules: &str, set: &[&str], bar: f64) {
    close_of(&json!({}), rules, set, bar);
}

fn close_of(config: &serde_json::Value, rules: &str, set: &[&str], bar: f64) {
    close_in(&world_of(config, rules), set, bar);
}

fn close_in(w: &World, set: &[&str], bar: f64) {
    for device in ["cuda", "cpu"] {
        let (device, output) = (format!("run.device={device}"), format!("run.output={device}"));
        w.ok(&[&["run", "r.toml", &device, &output], set].concat());
    }
    let (a, b) = (w.events("cuda", "step"), w.events("cpu", "step"));
    assert!(!a.is_empty() && a.len() == b.len());
    for (a, b) in a.iter().zip(&b) {
        for key in ["loss", "grad_norm"] {
            let (x, y) = (a[key].as_f64().expect("a number"), b[key].as_f64().expect("a number"));
            assert!(apart(x, y) <= bar, "{set:?}: {key} {x} on the device, {y} on the CPU");
        }
    }
}

#[test]
fn every_kind_of_adapter_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    let cases = [
        &["lora.dora=true"][..],
        &["model.quantize=nf4"],
        &["lora.init=pissa", "data.neftune=5"],
        &[],
        &["memory.offload=['params', 'activations']"],
        &["lora.init=pissa", "model.quantize=nf4"],
        &["model.quantize=nf4", "memory.dequantize=per_layer"],
    ];
    for set in cases.into_iter().take(few(3)) {
        close(LORA, &[&["model.dtype=f32"], set].concat(), 1e-4);
    }
    // The device rounds a linear layer with adapter once, the CPU twice. After six steps at this rate, both
    // differ from f32 by about 5%.
    for set in
        [&["model.dtype=bf16", "model.quantize=nf4"][..], &["model.dtype=bf16"]].into_iter().take(few(1))
    {
        close(LORA, &[set, &["run.steps=2"]].concat(), 2.5e-2);
        close(LORA, set, 0.1);
    }
}

/// Queries, keys and values, and gate and up, whose adapters are computed together.
#[test]
fn adapters_of_one_input_are_close_to_the_cpu() {
    if !device() {
        return;
    }
    let rules = "[lora]\nrank = 8\n[[train]]\nmodules = [\"attention\", \"mlp\"]\n";
    let cases = [
        &["model.quantize=nf4", "memory.dequantize=per_layer", "memory.recompute=all"][..],
        &["model.quantize=nf4", "memory.dequantize=per_matmul", "memory.recompute=none"],
        &["memory.recompute=norms"],
        &["model.quantize=nf4", "memory.offload=['params', 'activations']"],
        &[
            "optimizer.in_backward=true",
            "run.clip=0",
            "run.micro_rows=2",
            "run.batch_rows=2",
            "model.quantize=nf4",
        ],
    ];
    for set in cases.into_iter().take(few(2)) {
        close_of(&json!({"hidden_size": 64}), rules, &[&["model.dtype=f32"], set].concat(), 1e-4);
    }
}

/// f16 with loss scaling agrees with the CPU, including repeated steps after an overflow.
#[test]
fn half_precision_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    for rules in [LORA, FULL].into_iter().take(few(1)) {
        close_of(&json!({"head_dim": 64}), rules, &["model.dtype=f16"], 1e-2);
    }
    let w = World::tiny(FULL);
    for device in ["cuda", "cpu"] {
        let (device, output) = (format!("run.device={device}"), format!("run.output={device}"));
        w.ok(&["run", "r.toml", &device, &output, "model.dtype=f16", "memory.scale=16777216"]);
    }
    let scales = |run: &str| -> Vec<f64> {
        w.events(run, "step").iter().map(|e| e["loss_scale"].as_f64().expect("a scale")).collect()
    };
    assert_eq!(scales("cuda").len(), 6);
    assert!(scales("cuda")[0] < 16_777_216.0, "nothing overflowed: {:?}", scales("cuda"));
    for (a, b) in w.events("cuda", "step").iter().zip(&w.events("cpu", "step")) {
        let [x, y] = [a, b].map(|e| e["loss"].as_f64().expect("a loss"));
        assert!(apart(x, y) <= 1e-2, "{x} on the device, {y} on the CPU");
    }
}

#[test]
fn training_in_full_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    let (f32s, half) = ("model.dtype=f32", "model.dtype=bf16");
    let galore = ["optimizer.name=galore", "optimizer.galore_rank=4"];
    let ends = "[[train]]\nmodules = [\"embedding\", \"head\", \"attention\"]\n";
    let cases = [
        (FULL, &[half][..], 3e-2),
        (FULL, &[f32s, galore[0], galore[1], "memory.offload=['params', 'activations']"], 1e-4),
        // The compute weights are the only copy, and on the host.
        (FULL, &[half, "optimizer.master=none", galore[0], galore[1], "memory.offload=['params']"], 3e-2),
        (ends, &[f32s], 1e-4),
        (FULL, &[f32s], 1e-4),
        (FULL, &[f32s, "memory.offload=['optimizer']"], 1e-4),
        (FULL, &[f32s, galore[0], galore[1]], 1e-4),
    ];
    for (rules, set, bar) in cases.into_iter().take(few(4)) {
        close(rules, set, bar);
    }
}

/// 8-bit moments, offloaded or not, and updates in the backward pass agree with the CPU.
#[test]
fn moments_in_8_bits_train_as_on_the_cpu() {
    if !device() {
        return;
    }
    // Smaller tensors have f32 moments.
    let wide = json!({"vocab_size": 160, "intermediate_size": 144});
    let set =
        ["model.dtype=f32", "optimizer.name=adamw8bit", "run.clip=0", "run.micro_rows=2", "run.batch_rows=2"];
    let cases = [
        &["memory.offload=['optimizer']", "optimizer.in_backward=true"][..],
        &[],
        &["optimizer.in_backward=true"],
        &["memory.offload=['optimizer']"],
    ];
    for more in cases.into_iter().take(few(2)) {
        close_of(&wide, FULL, &[&set, more].concat(), 1e-4);
    }
}

/// Fraction of trained weights that differ in bf16 between two runs.
fn differing(w: &World, runs: [&str; 2]) -> f64 {
    let [a, b] = runs.map(|run| {
        let newest = w.checkpoints(run).pop().expect("a checkpoint");
        let path = w.path(&format!("{run}/checkpoints/{newest}/weights.safetensors"));
        TensorFiles::open_file(&path).expect("tensors")
    });
    let bits = |files: &TensorFiles, name: &str| -> Vec<half::bf16> {
        let t = files.tensor(name, DType::BF16, &Device::Cpu).expect("a tensor");
        t.flatten_all().and_then(|t| t.to_vec1()).expect("values")
    };
    let (mut all, mut other) = (0, 0);
    for name in b.names() {
        let (a, b) = (bits(&a, name), bits(&b, name));
        all += b.len();
        other += a.iter().zip(&b).filter(|(a, b)| a != b).count();
    }
    other as f64 / all as f64
}

/// Without master weights, stochastic rounding uses the same random numbers as the CPU, even with sharding.
/// The fraction of differing weights is therefore no larger than with master weights, given equally
/// different gradients.
#[test]
fn weights_without_masters_are_rounded_as_on_the_cpu() {
    if !device() {
        return;
    }
    // Smaller tensors have f32 moments.
    let w = world_of(&json!({"vocab_size": 160, "intermediate_size": 144}), FULL);
    let (eight, within) = ("optimizer.name=adamw8bit", "optimizer.in_backward=true");
    let (two, one) = ("parallel.data=2", "run.micro_rows=1");
    let stages: &[&[&str]] = &[&["parallel.zero=0"], &["parallel.zero=3"]];
    let stages = if super::ranks::devices(2) { stages } else { &[] };
    let cases = [
        (&[eight, within, two, one][..], stages),
        (&["optimizer.name=adamw"], &[&[][..]]),
        (&[eight], &[&[]]),
        (&[eight, within], &[&[]]),
        (&[eight, within, "memory.offload=['optimizer']"], &[&[]]),
    ];
    for (set, on) in cases.into_iter().take(few(2)) {
        let own = ["run", "r.toml", "--overwrite", "model.dtype=bf16", "run.steps=2", "run.clip=0"];
        let rows = ["run.batch_rows=2", "optimizer.lr=1e-3"];
        let run = |device: &str, master: &str, more: &[&str]| {
            let name = format!("{device}-{master}");
            let here = [("device", device), ("output", &name)].map(|(key, to)| format!("run.{key}={to}"));
            let master = format!("optimizer.master={master}");
            w.ok(&[&own, &rows[..], &[&here[0], &here[1], &master], set, more].concat());
        };
        run("cpu", "none", &[]);
        run("cpu", "f32", &[]);
        let chance = differing(&w, ["cpu-f32", "cpu-none"]);
        let mut first = None;
        for more in on {
            run("cuda", "none", more);
            run("cuda", "f32", more);
            let [other, usual] =
                ["none", "f32"].map(|m| differing(&w, [&format!("cuda-{m}"), &format!("cpu-{m}")]));
            eprintln!(
                "{set:?} {more:?}: {other:.4} differ, {usual:.4} with masters, {chance:.4} if rounded otherwise"
            );
            assert!(
                other <= 1.2 * usual && 2.0 * other < chance,
                "{set:?} {more:?}: {other} {usual} {chance}"
            );
            let end = w.read("cuda-none/model/model.safetensors");
            assert!(*first.get_or_insert_with(|| end.clone()) == end, "{set:?} {more:?}: other bits");
        }
    }
}

/// A mixture of experts: routers, experts by LoRA with different ranks, with dropout, with DoRA (one expert
/// at a time), and in full.
#[test]
fn mixtures_are_close_to_the_cpu() {
    if !device() {
        return;
    }
    const RANKS: &str = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\", \"router\"]\n[[train]]\nmodules = [\"experts\"]\n\
                         experts = [0, 2]\nrank = 12\n[[train]]\nmodules = [\"experts\"]\nexperts = [1]\nrank = 3\n";
    const WHOLE: &str = "[[train]]\nmodules = [\"experts\", \"router\"]\nmethod = \"full\"\n";
    let mixture = super::verbs::mixture();
    let losses = ["router.aux_loss=0.05", "router.z_loss=0.01"];
    let (f32s, bf16) = ("model.dtype=f32", "model.dtype=bf16");
    // With bf16, rounding sends some tokens to other experts, and steps diverge from there.
    let cases = [
        (RANKS, &[f32s, "lora.dropout=0.2"][..], 1e-4),
        (RANKS, &[bf16, "model.quantize=nf4"], 0.1),
        (WHOLE, &[f32s, losses[0], losses[1]], 1e-4),
        (RANKS, &[f32s], 1e-4),
        (RANKS, &[f32s, "lora.dora=true"], 1e-4),
        (RANKS, &[f32s, "model.quantize=nf4"], 1e-4),
        (RANKS, &[bf16, "lora.dropout=0.2"], 0.1),
        (WHOLE, &[bf16, losses[0], losses[1]], 0.1),
    ];
    for (rules, set, bar) in cases.into_iter().take(few(3)) {
        close_of(&mixture, rules, set, bar);
    }
}

/// A router that a checkpoint has in 4 bits computes in f32, beside experts in bf16.
#[test]
fn a_router_in_4_bits_is_close_to_the_cpu() {
    if !device() {
        return;
    }
    // the gate of an expert has the shape of the router
    let mut config = super::verbs::mixture();
    (config["num_experts"], config["moe_intermediate_size"]) = (json!(8), json!(8));
    let all = ["attention", "experts", "router", "norms", "embedding", "head"];
    let w = world_of(&config, &format!("[[train]]\nmodules = {all:?}\nmethod = \"full\"\n"));
    w.ok(&["run", "r.toml", "run.device=cpu", "run.steps=1", "run.output=full"]);
    w.ok(&["quantize", "full/model", "--out", "q"]);
    let path = w.path("q/model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).expect("4-bit weights");
    let of_router = |(name, part): (&String, &candle_core::Tensor)| {
        let (block, rest) = name.split_once(".experts.0.gate_proj.weight")?;
        Some((format!("{block}.gate.weight{rest}"), part.clone()))
    };
    let routers: Vec<_> = tensors.iter().filter_map(of_router).collect();
    assert!(routers.len() > 6, "{routers:?}");
    tensors.extend(routers);
    candle_core::safetensors::save(&tensors, &path).expect("saved");
    let rules = "[lora]\nrank = 4\n[[train]]\nmodules = [\"attention\", \"experts\"]\n";
    w.write("r.toml", recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", "source = \"q\""));
    close_in(&w, &["model.dtype=bf16", "run.steps=2"], 0.1);
}

/// Gate and up of Qwen3.5's experts have one A, to whose gradient both add.
#[test]
fn gate_and_up_of_one_a_are_close_to_the_cpu() {
    if !device() {
        return;
    }
    let config = json!({
        "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 5,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
        "layer_types": ["full_attention", "full_attention", "full_attention"], "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    });
    let rules = "[lora]\nrank = 4\n[[train]]\nmodules = [\"experts\"]\n";
    for (dtype, bar) in [("model.dtype=bf16", 0.1), ("model.dtype=f32", 1e-4)].into_iter().take(few(1)) {
        close_of(&config, rules, &[dtype], bar);
    }
}

/// Two tables add to the gradients of one A as one table after the other, bit for bit.
#[test]
fn gradients_of_one_a_are_added_in_order() -> anyhow::Result<()> {
    if !device() {
        return Ok(());
    }
    const EXPERTS: usize = 8;
    const TOKENS: usize = 512;
    const RANK: usize = 8;
    let (dtype, device, (o, i)) =
        (DType::BF16, ft::kernel::cuda::open(0).map_err(anyhow::Error::msg)?, (32, 512));
    let chosen = (0..TOKENS).flat_map(|t| [t, t + 1].map(|e| (e % EXPERTS) as u32)).collect();
    let s = Sorted::new(&Tensor::from_vec(chosen, (TOKENS, 2), &device)?, EXPERTS, dtype)?;
    let r = |seed, shape: [usize; 2]| randn(seed, &shape, dtype, &device);
    let (w, a, b) = (r(1, [o, i])?, r(2, [RANK, i])?, r(3, [o, RANK])?);
    let (of_a, of_b) = (EXPERTS * RANK * i, EXPERTS * o * RANK);
    // The gradients of all A, then those of B of the first table and of the second one.
    let table = |first: usize| {
        let entry = |e: usize| {
            let gradients = Some((e * RANK * i, first + e * o * RANK));
            let adapter = Adapter { a: &a, b: &b, scale: 1.0, gradients, dropout: (0.0, 0) };
            Entry { weight: Side::Values(&w), gradient: None, adapter: Some(adapter), alike: 1 }
        };
        Table::new(&(0..EXPERTS).map(entry).collect::<Vec<_>>(), dtype)
    };
    let (gate, up) = (table(of_a)?, table(of_a + of_b)?);
    let (x, du) = (r(4, [s.rows(), i])?, [r(5, [s.rows(), RANK])?, r(6, [s.rows(), RANK])?]);
    let grads = || Tensor::zeros(of_a + 2 * of_b, DType::F32, &device);
    let (both, apart) = (grads()?, grads()?);
    grouped::gradients([(&gate, &du[0], &x), (&up, &du[1], &x)], Gradient::A, &s, &both)?;
    grouped::gradients([(&gate, &du[0], &x)], Gradient::A, &s, &apart)?;
    grouped::gradients([(&up, &du[1], &x)], Gradient::A, &s, &apart)?;
    let [both, apart] = [both.real()?.to_vec1::<f32>()?, apart.real()?.to_vec1()?];
    assert!(both[..of_a].iter().all(|x| *x != 0.0));
    let other = both.iter().zip(&apart).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    assert_eq!(other, 0, "values of {} with other bits", both.len());
    Ok(())
}

/// Unsupported combinations are refused: products over all experts read the codes directly.
#[test]
fn experts_are_not_dequantized_by_the_layer() {
    if !device() {
        return;
    }
    let rules = "[[train]]\nmodules = [\"attention\"]\n";
    let w = world_of(&super::verbs::mixture(), rules);
    let set = ["model.quantize=nf4", "memory.dequantize=per_layer"];
    for verb in ["run", "plan"] {
        let r = w.ft(&[&[verb, "r.toml", "run.device=cuda"], &set[..]].concat());
        assert!(r.code == 2 && r.err.contains("memory.dequantize = \"per_layer\" is not built"), "{}", r.err);
    }
    w.ok(&[&["run", "r.toml", "run.device=cpu"], &set[..]].concat());
    // Experts computed one by one are dequantized with the layer.
    let dora = "[lora]\ndora = true\n[[train]]\nmodules = [\"experts\"]\n";
    close_of(&super::verbs::mixture(), dora, &[&["model.dtype=f32"], &set[..]].concat(), 1e-4);
}
