//! Launches, synchronizations, copies and bytes of a step, from the report of an emulated device. A real
//! GPU has no such report.

use super::device;
use super::world::{World, few, nightly};
use serde_json::json;
use std::collections::BTreeMap;

/// Counts by name: kernel launches and library calls (`launches`), host synchronizations (`waits`), copies
/// between host and device (`copies`), bytes of elementwise kernels (`bytes`), bytes written by library
/// products (`written`), bytes copied to the operands of products (`copied`), and bytes read and written for
/// the gradients of LoRA's factors (`factors`).
type Counts = BTreeMap<&'static str, i64>;

/// Dimensions of the model: hidden, feed-forward, queries, keys, and head.
const WIDTHS: [usize; 5] = [256, 768, 512, 128, 64];

/// LoRA rank.
const RANK: usize = 16;

/// Kernels that are not elementwise passes over activations.
const OTHERS: [&str; 6] = ["attention_", "dequantize_", "rows_", "optimizer_", "loss_", "embed_"];

/// Counts of a run with the given number of layers, steps and experts (0 for a dense model); `None` if the
/// device writes no report.
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
    // Other tests search the same kernels for races, which changes no count.
    let mut run = w.command(&["run", "r.toml"]);
    let out = run.env("EMU_REPORT", w.path("report")).env_remove("EMU_RACES").output().expect("started");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report = std::fs::read_to_string(w.path("report")).ok()?;
    let (mut counts, mut in_table) = (Counts::new(), false);
    for line in report.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        if line.starts_with("kernel  ") || line.starts_with("library call") {
            in_table = true;
            continue;
        }
        // Lines outside the tables: a name of several words, a count, and MB.
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
            // Kernels; library calls have at most six columns.
            if let (Some(load), Some(store), Some(useful), Some(_)) =
                (number(3), number(4), number(5), number(6))
                && fields.len() >= 9
            {
                // Exceptions at these small sizes: routing tensors are shorter than a sector, and a row of
                // codes is a quarter of a warp. `tests/cuda/accesses.txt` covers published model sizes.
                let narrow = ["route_", "dispatch_", "dequantize_"].iter().any(|n| fields[0].starts_with(n));
                assert!(narrow || useful >= 90.0 || load + store < 0.01, "uncoalesced: {line}");
                if fields[0].starts_with("columns_") {
                    *counts.entry("copied").or_default() += ((load + store) * 1e6) as i64;
                } else if fields[0].starts_with("factors_") {
                    *counts.entry("factors").or_default() += ((load + store) * 1e6) as i64;
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

/// Difference `a - b`, per count.
fn less(a: &Counts, b: &Counts) -> Counts {
    ["launches", "waits", "copies", "bytes", "written", "copied", "factors"]
        .into_iter()
        .map(|k| (k, a.get(k).copied().unwrap_or(0) - b.get(k).copied().unwrap_or(0)))
        .collect()
}

/// Counts of one step: of two steps less one.
fn of_a_step(layers: usize, recompute: &str, what: (usize, &str, usize)) -> Option<Counts> {
    let [one, two] = [1, 2].map(|steps| counts(layers, steps, recompute, what));
    Some(less(&two?, &one?))
}

/// Counts of a layer: forward again, and in total; and of a step without layers. `two` are those of a step of two
/// layers, all recomputed.
fn of_a_layer(two: &Counts, what: (usize, &str, usize)) -> Option<[Counts; 3]> {
    let one = of_a_step(1, "all", what)?;
    let all = less(two, &one);
    let none = less(&of_a_step(2, "none", what)?, &of_a_step(1, "none", what)?);
    Some([less(&all, &none), none, less(&one, &all)])
}

/// Counts of a step of two layers, all recomputed, which starts as many operations in another case as in `what`.
fn of_any_size(what: (usize, &str, usize), other: (usize, &str, usize)) -> Option<Counts> {
    let [two, others] = [what, other].map(|what| of_a_step(2, "all", what));
    let two = two.or_else(|| {
        eprintln!("not run: the device writes no report");
        None
    })?;
    assert_eq!(Some(two["launches"]), others.map(|c| c["launches"]), "launches of {what:?} and {other:?}");
    Some(two)
}

#[test]
fn a_layer_starts_few_operations_whatever_the_tokens() {
    if !device() {
        return;
    }
    for quantize in ["none", "nf4"].into_iter().take(few(1)) {
        let [tokens, other] = [160, if nightly() { 300 } else { 40 }];
        let what = (tokens, quantize, 0);
        let Some(two) = of_any_size(what, (other, quantize, 0)) else { return };
        let Some([forward, both, around]) = of_a_layer(&two, what) else { return };
        let backward = both["launches"] - forward["launches"];
        eprintln!(
            "{quantize}, {tokens} tokens: {} launches a layer forward, {backward} backward, {} around; a step waits {} times",
            forward["launches"], around["launches"], around["waits"]
        );
        // The adapters of one input take one product, in the backward pass those of 4-bit matrices.
        let most = (27, if quantize == "nf4" { 44 } else { 47 });
        assert!(forward["launches"] <= most.0 && backward <= most.1, "{quantize}: {forward:?} {both:?}");
        for part in [&forward, &both] {
            assert_eq!((part["waits"], part["copies"]), (0, 0), "{quantize}: inside of a layer");
        }
        assert!(around["waits"] <= 2, "{quantize}: {around:?}");
        traffic(tokens, &forward, &both);
        products(tokens, &forward, &both);
        copies(tokens, quantize == "none", &forward, &both);
        factors(tokens, &both);
    }
}

/// Memory traffic of elementwise kernels of a layer in bf16: every input is read once and every output
/// written once, within 15%. Forward: norm with residual (x, a -> sum, normed), rotation of queries and
/// keys, SwiGLU. Backward: norm (x, dn, dy -> dx), rotation (q, k, dq, dk -> dq, dk), SwiGLU with
/// recomputed output. Rotations read two f32 tables.
fn traffic(tokens: usize, again: &Counts, both: &Counts) {
    let [d, f, q, k, c] = WIDTHS;
    let qk = q + k;
    // The recomputed forward ends before the last product, without the second sum.
    let list_again = 6 * d + 2 * qk + 3 * f + 2 * c;
    let list_both = (8 * d + 2 * qk + 3 * f) + (2 * 4 * d + 3 * qk + 6 * f) + 2 * 2 * c;
    for (what, list, measured) in [("again", list_again, again), ("both ways", list_both, both)] {
        let (bytes, least) = (measured["bytes"] as f64, (2 * tokens * list) as f64);
        eprintln!("{what}, {tokens} tokens: {:.3} of the list's {least} bytes", bytes / least);
        assert!(bytes <= 1.15 * least, "{what}: {bytes} bytes, the list has {least}");
    }
}

/// Bytes written by the library's products of a layer in bf16: every output and every input gradient once,
/// including the adapter; low-rank activations; gradients of A in f32. The recomputed forward ends before the
/// last output.
fn products(tokens: usize, again: &Counts, both: &Counts) {
    let [d, f, q, k, _] = WIDTHS;
    let linears = [[d, q], [d, k], [d, k], [q, d], [d, f], [d, f], [f, d]];
    let low = 2 * tokens * RANK * linears.len();
    let outputs: usize = linears.iter().map(|[_, o]| 2 * tokens * o).sum();
    let inputs: usize = linears.iter().map(|[i, _]| 2 * tokens * i).sum();
    let gradients: usize = linears.iter().map(|[i, _]| 4 * RANK * i).sum();
    let list_again = outputs - 2 * tokens * d + low;
    for (what, list, measured) in
        [("again", list_again, again), ("both ways", outputs + inputs + low + gradients, both)]
    {
        let share = measured["written"] as f64 / list as f64;
        eprintln!("{what}, {tokens} tokens: products write {share:.3} of the list's {list} bytes");
        assert!((0.97..=1.03).contains(&share), "{what}: {measured:?}, the list has {list}");
    }
}

/// Bytes of the gradients of u and B: each output's gradient is read once, by blocks of 512 columns and 128 tokens;
/// each writes sums in f32, which are read again.
fn factors(tokens: usize, both: &Counts) {
    let [d, f, q, k, _] = WIDTHS;
    let list: usize = [q, k, k, d, f, f, d]
        .iter()
        .map(|o| {
            let (slabs, blocks) = (o.div_ceil(512), tokens.div_ceil(128));
            let sums = 4 * RANK * (slabs * tokens + blocks * o);
            let operands = 2 * RANK * (blocks * o + slabs * tokens);
            2 * tokens * o + operands + 2 * sums + 2 * RANK * tokens + 4 * RANK * o
        })
        .sum();
    let share = both["factors"] as f64 / list as f64;
    eprintln!("{tokens} tokens: gradients of factors move {share:.3} of the list's {list} bytes");
    assert!((0.95..=1.05).contains(&share), "{both:?}, the list has {list}");
}

/// Bytes copied in bf16: low-rank activations next to the inputs; on a dense base, also B next to and A
/// below the weight.
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
    for quantize in ["nf4", "none"].into_iter().take(few(1)) {
        let what = (24, quantize, 4);
        let Some(two) = of_any_size(what, (24, quantize, 8)) else { return };
        let Some([forward, both, around]) = of_a_layer(&two, what) else { return };
        let backward = both["launches"] - forward["launches"];
        eprintln!(
            "{quantize}: {} launches a layer forward, {backward} backward; a step waits {} times",
            forward["launches"], around["waits"]
        );
        assert!(forward["launches"] <= 30 && backward <= 63, "{quantize}: {forward:?} {both:?}");
        for part in [&forward, &both] {
            assert_eq!((part["waits"], part["copies"]), (0, 0), "{quantize}: inside of a layer");
        }
    }
}
