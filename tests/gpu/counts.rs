//! What a step asks of an emulated device, whose report has it: launches, waits, copies, bytes. A GPU does not say.

use super::device;
use super::world::World;
use serde_json::json;
use std::collections::BTreeMap;

/// Counts by name: launches of kernels and calls of libraries (`launches`), waits of the host, copies to the device, bytes of
/// kernels that go over activations by element (`bytes`), bytes that libraries' products write (`written`), and bytes that are copied to where they are multiplied
/// (`copied`).
type Counts = BTreeMap<&'static str, i64>;

/// The model: width, width of the feed-forward block, of queries, of keys, and channels of a head.
const WIDTHS: [usize; 5] = [256, 768, 512, 128, 64];

/// Rank of the adapters.
const RANK: usize = 16;

/// Kernels that do not go over activations by element.
const OTHERS: [&str; 6] = ["attention_", "dequantize_", "rows_", "optimizer_", "loss_", "embed_"];

/// Of a run of `steps` steps of a model of `layers` layers, with so many experts each, or none; none where the device writes
/// no report.
fn counts(
    layers: usize,
    steps: usize,
    recompute: &str,
    (tokens, quantize, experts): (usize, &str, usize),
) -> Option<Counts> {
    let w = World::new();
    let [d, f, q, k, c] = WIDTHS;
    let mut config = json!({"num_hidden_layers": layers, "hidden_size": d, "intermediate_size": f, "num_attention_heads": q / c,
               "num_key_value_heads": k / c, "head_dim": c, "max_position_embeddings": 4096});
    let mixture = json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": experts,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": true,
                         "decoder_sparse_step": 1, "mlp_only_layers": []});
    if let (Some(config), Some(more), true) = (config.as_object_mut(), mixture.as_object(), experts > 0) {
        config.extend(more.clone());
    }
    let modules =
        if experts > 0 { "\"attention\", \"experts\", \"router\"" } else { "\"attention\", \"mlp\"" };
    w.config("tiny", config);
    let rows: String = (0..steps)
        .map(|r| {
            let ids: Vec<usize> = (0..tokens).map(|i| (r * 31 + i * 17) % 60 + 3).collect();
            format!("{}\n", json!({"input_ids": ids}))
        })
        .collect();
    w.write("rows.jsonl", rows);
    w.write(
        "r.toml",
        format!(
            "[model]\nsource = \"tiny\"\nweights = \"random\"\nquantize = \"{quantize}\"\n[lora]\nrank = {RANK}\n[[train]]\n\
             modules = [{modules}]\n[data]\nmax_length = {tokens}\npack = false\nshuffle = false\n\
             mask = \"none\"\n[[data.train]]\nsource = \"rows.jsonl\"\nformat = \"tokens\"\n[run]\nsteps = {steps}\n\
             batch_rows = 1\ndevice = \"cuda\"\noutput = \"out\"\n[memory]\nrecompute = \"{recompute}\"\n"
        ),
    );
    let out = w.command(&["run", "r.toml"]).env("EMU_REPORT", w.path("report")).output().expect("started");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report = std::fs::read_to_string(w.path("report")).ok()?;
    let (mut counts, mut in_table) = (Counts::new(), false);
    for line in report.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if line.starts_with("kernel  ") || line.starts_with("library call") {
            in_table = true;
            continue;
        }
        // what is not of the tables: a name of several words, how many, how many MB
        if let [words @ .., n, _, "MB"] = &fields[..]
            && let Ok(n) = n.parse::<i64>()
            && words.len() > 1
        {
            in_table = false;
            let key = match words.join(" ").as_str() {
                what if what.contains("synchronisations") || what == "blocking copies" => "waits",
                "copies host to device" => "copies",
                "copies device to host" => "copies",
                _ => continue,
            };
            *counts.entry(key).or_default() += n;
        } else if in_table && fields.len() > 4 {
            let n = fields[1].parse::<i64>().unwrap_or(0);
            *counts.entry("launches").or_default() += n;
            let number = |i: usize| fields.get(i).and_then(|f| f.parse::<f64>().ok());
            // of kernels; a library's calls have no more than six columns
            if let (Some(load), Some(store), Some(useful), Some(_)) =
                (number(3), number(4), number(5), number(6))
                && fields.len() >= 9
            {
                // what routes is shorter than a sector here, and a row of a matrix of codes a quarter of what a warp takes;
                // of sizes that published models have, tests/cuda/accesses.txt has them
                let narrow = ["route_", "group_", "dequantize_"].iter().any(|n| fields[0].starts_with(n));
                assert!(narrow || useful >= 90.0 || load + store < 0.01, "uncoalesced: {line}");
                if fields[0].starts_with("copy2d_") {
                    *counts.entry("copied").or_default() += ((load + store) * 1e6) as i64;
                } else if !OTHERS.iter().any(|o| fields[0].starts_with(o)) {
                    *counts.entry("bytes").or_default() += ((load + store) * 1e6) as i64;
                }
            } else if let (6, Some(written)) = (fields.len(), number(3)) {
                *counts.entry("written").or_default() += (written * 1e6) as i64;
            }
        }
    }
    Some(counts)
}

/// `a - b`, count by count.
fn less(a: &Counts, b: &Counts) -> Counts {
    ["launches", "waits", "copies", "bytes", "written", "copied"]
        .into_iter()
        .map(|k| (k, a.get(k).copied().unwrap_or(0) - b.get(k).copied().unwrap_or(0)))
        .collect()
}

/// Of a layer, forward again and all in all, and of a step without its layers.
fn of_a_layer(what: (usize, &str, usize)) -> Option<[Counts; 3]> {
    // a step: that of two steps without that of one
    let step = |layers, recompute| {
        let [one, two] = [1, 2].map(|steps| counts(layers, steps, recompute, what));
        Some(less(&two?, &one?))
    };
    let layer = |recompute| Some(less(&step(2, recompute)?, &step(1, recompute)?));
    let (all, none) = (layer("all")?, layer("none")?);
    let around = less(&step(1, "all")?, &all);
    Some([less(&all, &none), none, around])
}

#[test]
fn a_layer_starts_few_operations_whatever_the_tokens() {
    if !device() {
        return;
    }
    for quantize in ["none", "nf4"] {
        let mut first = None;
        for tokens in [40, 300] {
            let Some([forward, both, around]) = of_a_layer((tokens, quantize, 0)) else {
                eprintln!("not run: the device writes no report");
                return;
            };
            let backward = both["launches"] - forward["launches"];
            eprintln!(
                "{quantize}, {tokens} tokens: {} launches a layer forward, {backward} backward, {} around; a step waits {} times",
                forward["launches"], around["launches"], around["waits"]
            );
            assert!(forward["launches"] <= 40 && backward <= 70, "{quantize}: {forward:?} {both:?}");
            for part in [&forward, &both] {
                assert_eq!((part["waits"], part["copies"]), (0, 0), "{quantize}: inside of a layer");
            }
            assert!(around["waits"] <= 2, "{quantize}: {around:?}");
            traffic(tokens, &forward, &both);
            products(tokens, &forward, &both);
            copies(tokens, quantize == "none", &forward, &both);
            let now = (forward["launches"], backward);
            assert_eq!(*first.get_or_insert(now), now, "{quantize}: launches depend on the number of tokens");
        }
    }
}

/// A layer's passes over activations, in bf16: each value that they need is read once, and what they make is written once,
/// within 15%. The list is of a norm with the residual before it (x, a -> sum, normed), rotated queries and keys, SwiGLU;
/// backward a norm's (x, dn, dy -> dx), the rotation's (q, k, dq, dk -> dq, dk), and SwiGLU's that makes its output again;
/// and of each rotation its two tables, in f32.
fn traffic(tokens: usize, again: &Counts, both: &Counts) {
    let [d, f, q, k, c] = WIDTHS;
    let qk = q + k;
    // forward again ends before the last product, so without the second sum
    let list_again = 6 * d + 2 * qk + 3 * f + 2 * c;
    let list_both = (8 * d + 2 * qk + 3 * f) + (2 * 4 * d + 3 * qk + 6 * f) + 2 * 2 * c;
    for (what, list, measured) in [("again", list_again, again), ("both ways", list_both, both)] {
        let (bytes, least) = (measured["bytes"] as f64, (2 * tokens * list) as f64);
        eprintln!("{what}, {tokens} tokens: {:.3} of the list's {least} bytes", bytes / least);
        assert!(tokens < 100 || bytes <= 1.15 * least, "{what}: {bytes} bytes, the list has {least}");
    }
}

/// What a layer's products write, in bf16: each output and each input's gradient once, with its adapter's part in it; values
/// of low rank; and gradients of A and B in f32. Forward again ends before the last output.
fn products(tokens: usize, again: &Counts, both: &Counts) {
    let [d, f, q, k, _] = WIDTHS;
    let linears = [[d, q], [d, k], [d, k], [q, d], [d, f], [d, f], [f, d]];
    let low = 2 * tokens * RANK * linears.len();
    let outputs: usize = linears.iter().map(|[_, o]| 2 * tokens * o).sum();
    let inputs: usize = linears.iter().map(|[i, _]| 2 * tokens * i).sum();
    let gradients: usize = linears.iter().map(|[i, o]| 4 * RANK * (i + o)).sum();
    let list_again = outputs - 2 * tokens * d + low;
    for (what, list, measured) in
        [("again", list_again, again), ("both ways", outputs + inputs + 2 * low + gradients, both)]
    {
        let share = measured["written"] as f64 / list as f64;
        eprintln!("{what}, {tokens} tokens: products write {share:.3} of the list's {list} bytes");
        assert!((0.97..=1.03).contains(&share), "{what}: {measured:?}, the list has {list}");
    }
}

/// What is copied, in bf16: values of low rank beside the inputs, and with a dense base B beside and A below it.
fn copies(tokens: usize, dense: bool, again: &Counts, both: &Counts) {
    let [d, f, q, k, _] = WIDTHS;
    let (outputs, inputs) = (2 * q + 2 * k + 2 * f, 5 * d + q + f);
    let low = 4 * tokens * RANK;
    let weights = |rows: usize| if dense { 4 * RANK * rows } else { 0 };
    let list_again = 6 * low + weights(outputs - q + d);
    let list_both = 7 * low + weights(outputs - q + 2 * d + inputs);
    for (what, list, measured) in [("again", list_again, again), ("both ways", list_both, both)] {
        let share = measured["copied"] as f64 / list as f64;
        eprintln!("{what}, {tokens} tokens: {share:.3} of the list's {list} bytes are copied");
        assert!(share <= 1.15, "{what}: {measured:?}, the list has {list}");
    }
}

#[test]
fn a_mixture_starts_few_operations_whatever_its_experts() {
    if !device() {
        return;
    }
    for quantize in ["none", "nf4"] {
        let mut first = None;
        for (experts, tokens) in [(4, 24), (12, 60)] {
            let Some([forward, both, around]) = of_a_layer((tokens, quantize, experts)) else {
                eprintln!("not run: the device writes no report");
                return;
            };
            let backward = both["launches"] - forward["launches"];
            eprintln!(
                "{quantize}, {experts} experts: {} launches a layer forward, {backward} backward; a step waits {} times",
                forward["launches"], around["waits"]
            );
            assert!(forward["launches"] <= 40 && backward <= 70, "{quantize}: {forward:?} {both:?}");
            for part in [&forward, &both] {
                assert_eq!((part["waits"], part["copies"]), (0, 0), "{quantize}: inside of a layer");
            }
            let now = (forward["launches"], backward);
            assert_eq!(
                *first.get_or_insert(now),
                now,
                "{quantize}: launches depend on the number of experts"
            );
        }
    }
}
