//! Published memory figures.

use super::*;

#[track_caller]
fn near(got: u64, want_gb: f64) {
    let got = got as f64 / 1e9;
    assert!((got / want_gb - 1.0).abs() <= 0.02, "{got} GB, published is {want_gb}");
}

/// "full, 70 B, 16 bytes a parameter, ZeRO-3": 70 GB a GPU on 16, 35 on 32.
#[test]
fn published_70b_in_full_over_ranks() -> anyhow::Result<()> {
    for (ranks, gb) in [(16, 70.0), (32, 35.0)] {
        let data = format!("parallel.data={ranks}");
        let set = [data.as_str(), "parallel.zero=3", "run.batch_rows=32"];
        let p = plan("meta-llama/Meta-Llama-3-70B", &full(), &set, true)?;
        near(p.theory.total, gb * 70.55 / 70.0);
        near(p.theory.total, gb);
        assert_eq!(p.ranks, ranks);
        assert_eq!(p.theory.frozen, 0);
    }
    // ranks that split the tokens of a row split the states too
    let set = ["parallel.data=4", "parallel.context=4", "parallel.zero=3", "run.batch_rows=32"];
    near(plan("meta-llama/Meta-Llama-3-70B", &full(), &set, true)?.theory.total, 70.55);
    Ok(())
}

/// "Llama-3-70B, full, 16 x 80 GB: does not fit without offload".
#[test]
fn published_70b_does_not_fit_sixteen_cards() -> anyhow::Result<()> {
    let set = ["parallel.data=16", "parallel.zero=3", "memory.budget=80GB", "data.max_length=4096"];
    let p = plan("meta-llama/Meta-Llama-3-70B", &full(), &set, true)?;
    assert!(!p.fits() && !p.hints.is_empty(), "{} of 80 GB", p.total());
    assert!(p.hints.iter().any(|h| h.text.contains("offload")), "{:?}", p.hints);
    Ok(())
}

/// "Qwen2-72B: weights 144; optimizer 864, on the host when offloaded".
#[test]
fn published_72b_offloaded() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen2-72B", &full(), &["memory.offload=[\"optimizer\"]"], true)?;
    near(p.theory.weights, 144.0);
    near(p.theory.master + p.theory.moments, 864.0);
    let on_host = p.space.host.iter().find(|(k, _)| *k == "offloaded_optimizer").map_or(0, |(_, b)| *b);
    near(on_host, 864.0);
    assert_eq!((p.peak.bytes.get(Component::Moments), p.peak.bytes.get(Component::Master)), (0, 0));
    Ok(())
}

/// One expert 1.76e8 parameters = 352 MB; a layer's eight 2.82 GB; 32 layers 90 GB.
#[test]
fn published_mixtral_experts() -> anyhow::Result<()> {
    for (layers, experts, count, gb) in [
        ("[0]", "[0]", 1.76e8, 0.352),
        ("[0]", "\"all\"", 8.0 * 1.76e8, 2.82),
        ("\"all\"", "\"all\"", 256.0 * 1.76e8, 90.0),
    ] {
        let more = format!("method = \"full\"\nlayers = {layers}\nexperts = {experts}");
        let p = plan(MIXTRAL, &rule("[\"experts\"]", &more), &[], true)?;
        near(p.theory.weights, gb);
        assert!((p.parameters.1 as f64 / count - 1.0).abs() < 0.01, "{}", p.parameters.1);
    }
    Ok(())
}

/// Routers: 4096 x 8 = 32,768 a layer, about a million in all.
#[test]
fn published_mixtral_routers() -> anyhow::Result<()> {
    let one = plan(MIXTRAL, &rule("[\"router\"]", "method = \"full\"\nlayers = [3]"), &[], true)?;
    assert_eq!(one.parameters.1, 32_768);
    let all = plan(MIXTRAL, &rule("[\"router\"]", "method = \"full\""), &[], true)?;
    assert_eq!(all.parameters.1, 1_048_576);
    Ok(())
}

/// 6 layers x 2 experts in full: weights 4.23, gradients 4.23, moments 16.9, master 8.46: 33.8 GB.
#[test]
fn published_mixtral_some_experts_in_full() -> anyhow::Result<()> {
    let more = "method = \"full\"\nlayers = \"-6:\"\nexperts = [0, 1]";
    let t = plan(MIXTRAL, &rule("[\"experts\"]", more), &[], true)?.theory;
    for (got, want) in
        [(t.weights, 4.23), (t.gradients, 4.23), (t.moments, 16.9), (t.master, 8.46), (t.total, 33.8)]
    {
        near(got, want);
    }
    near(t.frozen, 2.0 * (46.70 - 2.114));
    Ok(())
}

/// The same on a 4-bit base with optimizer states on the host: the shipped recipe fits one 48 GB card.
#[test]
fn published_mixtral_some_experts_in_full_fit_one_card() -> anyhow::Result<()> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .join("recipes/mixtral-8x7b-6layers-2experts.toml");
    let at = |set: &[&str]| -> anyhow::Result<Plan> {
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        Ok(of_recipe(&Recipe::load_for_plan(&path, &set)?, true)?.0)
    };
    let p = at(&[])?;
    assert!(p.budget == Some(44 << 30) && p.fits(), "{}", p.headline());
    let (bytes, count) = (&p.peak.bytes, p.parameters.1);
    near(p.theory.total, 33.8);
    // 46.4 B parameters in decoder linears, 2.114 B of them trained; embedding, head and norms are not
    // quantized
    near(p.theory.frozen, (46.44 - 2.114) * 4.127 / 8.0 + 2.0 * 0.262);
    let frozen: u64 = bytes.iter().take_while(|(c, _)| *c != Component::Trained).map(|(_, b)| b).sum();
    near(frozen, p.theory.frozen as f64 / 1e9);
    let get = |c| bytes.get(c);
    assert_eq!((get(Component::Trained), get(Component::Gradients)), (2 * count, 4 * count));
    assert_eq!((get(Component::Master), get(Component::Moments)), (0, 0));
    let on_host = p.space.host.iter().find(|(k, _)| *k == "offloaded_optimizer").map_or(0, |(_, b)| *b);
    assert_eq!(on_host, 12 * count);
    for without in ["memory.offload=[]", "model.quantize=none"] {
        assert!(!at(&[without])?.fits(), "{without}");
    }
    // without quantization or offload the plan hints at them
    assert!(at(&["memory.offload=[]"])?.hints.iter().any(|h| h.text.contains("memory.offload")));
    assert!(at(&["model.quantize=none"])?.hints.iter().any(|h| h.text.contains("model.quantize")));
    Ok(())
}

/// LoRA rank 16 on every expert: 884,736 an expert, 226.5 M in all; 0.45 + 0.45 + 2.72 = 3.6 GB.
#[test]
fn published_mixtral_expert_lora() -> anyhow::Result<()> {
    let p = plan(MIXTRAL, &rule("[\"experts\"]", "rank = 16"), &[], true)?;
    assert_eq!(p.parameters.1, 884_736 * 256);
    near(p.theory.weights, 0.453);
    near(p.theory.gradients, 0.453);
    near(p.theory.master + p.theory.moments, 2.72);
    near(p.theory.total, 3.624);
    Ok(())
}

/// 2 B parameters, plain Adam: weights 4, gradients 4, moments 8 + 8 (the second 8 is the master here and
/// the f32 moments are 16 in all; a model of 1.72 B stands in).
#[test]
fn published_bytes_a_parameter() -> anyhow::Result<()> {
    let p = plan("Qwen/Qwen3-1.7B", &full(), &[], true)?;
    let (t, n) = (p.theory, p.parameters.1);
    assert_eq!((t.weights, t.gradients, t.master, t.moments), (2 * n, 2 * n, 4 * n, 8 * n));
    assert_eq!(p.parameters.0, n);
    Ok(())
}

/// NF4 with double quantization: 4.127 bits a parameter.
#[test]
fn published_nf4_bits() -> anyhow::Result<()> {
    let bits = 8.0 * memory::nf4(4096 * 12288) as f64 / (4096.0 * 12288.0);
    assert!((bits - 4.127).abs() < 0.001 && (memory::NF4_BITS - 4.127).abs() < 0.001, "{bits}");
    // Qwen3-8B: 6.95 B parameters in decoder linears; the rest is not quantized
    let p = plan("Qwen/Qwen3-8B", &rule(LORA, ""), &["model.quantize=nf4"], true)?;
    near(p.theory.frozen, 6.946 * 4.127 / 8.0 + 2.0 * 1.245);
    Ok(())
}

/// "Qwen3-8B, QLoRA: fits one 48 GB card".
#[test]
fn published_8b_qlora_fits() -> anyhow::Result<()> {
    let set = ["model.quantize=nf4", "memory.budget=44GiB", "data.max_length=4096"];
    let p = plan("Qwen/Qwen3-8B", &rule(LORA, ""), &set, true)?;
    assert!(p.fits(), "{}", p.headline());
    assert!(p.total() > 8 << 30);
    Ok(())
}
