//! What a step asks of an emulated device, whose report has it: launches, waits, copies. A GPU does not say.

use super::device;
use super::world::World;
use serde_json::json;
use std::collections::BTreeMap;

/// Counts by name: launches of kernels and calls of libraries (`launches`), waits of the host, copies to the device.
type Counts = BTreeMap<&'static str, i64>;

/// Of a run of `steps` steps of a model of `layers` layers; none where the device writes no report.
fn counts(layers: usize, steps: usize, recompute: &str, tokens: usize, quantize: &str) -> Option<Counts> {
    let w = World::new();
    w.config(
        "tiny",
        json!({"num_hidden_layers": layers, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2,
               "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096}),
    );
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
            "[model]\nsource = \"tiny\"\nweights = \"random\"\nquantize = \"{quantize}\"\n[lora]\nrank = 16\n[[train]]\n\
             modules = [\"attention\", \"mlp\"]\n[data]\nmax_length = {tokens}\npack = false\nshuffle = false\n\
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
        }
    }
    Some(counts)
}

/// `a - b`, count by count.
fn less(a: &Counts, b: &Counts) -> Counts {
    ["launches", "waits", "copies"]
        .into_iter()
        .map(|k| (k, a.get(k).copied().unwrap_or(0) - b.get(k).copied().unwrap_or(0)))
        .collect()
}

/// Of a layer, forward again and all in all, and of a step without its layers.
fn of_a_layer(tokens: usize, quantize: &str) -> Option<[Counts; 3]> {
    // a step: that of two steps without that of one
    let step = |layers, recompute| {
        let [one, two] = [1, 2].map(|steps| counts(layers, steps, recompute, tokens, quantize));
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
            let Some([forward, both, around]) = of_a_layer(tokens, quantize) else {
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
            let now = (forward["launches"], backward);
            assert_eq!(*first.get_or_insert(now), now, "{quantize}: launches depend on the number of tokens");
        }
    }
}
