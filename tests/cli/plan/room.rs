//! Limits of memory and disk: refusals before anything is written, cached lengths for plans, and
//! out-of-memory errors.

use crate::world::{LORA, Ran, World, recipe, rows};
use serde_json::{Value, json};

fn plan(w: &World, set: &[&str]) -> Value {
    let mut args = vec!["plan", "r.toml", "--json"];
    args.extend(set);
    w.ft(&args).json()
}

/// A run with checkpoints larger than the disk is refused by key, and nothing is written.
#[test]
fn a_run_that_no_disk_holds_is_refused_before_it_writes() {
    let w = World::tiny(LORA);
    let set = ["run.save_every=1", "run.steps=1000000000", "run.keep=1000000000"];
    let r = w.ft(&[&["run", "r.toml"][..], &set].concat());
    assert_eq!(r.code, 8, "{}", r.err);
    for said in ["disk of runs/r", "checkpoints", "to change: run.keep, run.output"] {
        assert!(r.err.contains(said), "{said:?} is not in {}", r.err);
    }
    assert!(!w.path("runs").exists());
    let p = plan(&w, &set);
    assert_eq!(p["fits"], false);
    assert_eq!(p["filesystems"][0]["fits"], false);

    let few = ["run.save_every=1", "run.steps=100000", "run.keep=100000", "memory.disk_budget=1GiB"];
    let r = w.ft(&[&["run", "r.toml"][..], &few].concat());
    assert_eq!(r.code, 8, "{}", r.err);
    let hint = r.err.lines().find_map(|l| l.strip_prefix("hint: run.keep 100000 -> ")).expect("a hint");
    let keep: usize = hint.split(':').next().and_then(|k| k.parse().ok()).expect("a number");
    let others = [few[0], few[1], few[3]];
    let with =
        |keep: usize| plan(&w, &[&others[..], &[&format!("run.keep={keep}")]].concat())["fits"] == true;
    assert!(with(keep) && !with(keep + 1), "{hint}");

    // A budget equal to the planned total passes, and one byte less is refused. Tokens are cached by now.
    w.ok(&["check", "r.toml"]);
    let p = plan(&w, &["memory.disk_budget=1TiB"]);
    let all = p["disk"]["total"].as_u64().expect("a sum");
    let least = format!("memory.disk_budget={all}B");
    w.ok(&["run", "r.toml", &least]);
    let less = format!("memory.disk_budget={}B", all - 1);
    assert_eq!(w.ft(&["run", "r.toml", "run.output=runs/other", &less]).code, 8);
    assert!(!w.path("runs/other").exists());
    // Leftovers of an earlier run count as free space, but do not suffice. They survive the refusal.
    assert_eq!(w.ft(&["run", "r.toml", "--overwrite", "memory.disk_budget=1B"]).code, 8);
    let tight = w.ok(&["check", "r.toml", "memory.budget=1KiB"]).err;
    assert!(tight.contains("warning: memory.budget: this run needs "), "{tight}");
    let below_a_file = w.ft(&["check", "r.toml", "run.output=r.toml/runs"]);
    assert!(
        below_a_file.code == 2 && below_a_file.err.contains("hint: another run.output"),
        "{}",
        below_a_file.err
    );
    assert!(w.path("runs/r/adapter").is_dir());
    let host = w.ft(&["run", "r.toml", "--overwrite", "memory.host_budget=1MiB", "memory.budget=1GiB"]);
    assert_eq!(host.code, 8);
    assert!(host.err.contains("host memory"), "{}", host.err);
}

/// The planned disk usage of a run folder agrees with the maximum to 2%.
#[test]
fn planned_disk_usage_agrees_with_the_files() {
    let w = World::tiny(LORA);
    w.config("tiny", json!({"hidden_size": 512, "intermediate_size": 1024}));
    let set = ["lora.rank=64", "train.1.rank=64", "run.steps=4", "run.save_every=1", "run.keep=2"];
    let p = plan(&w, &[&set[..], &["memory.budget=1GiB"]].concat());
    w.ok(&[&["run", "r.toml"][..], &set].concat());
    let size = |dir: &str| -> u64 {
        crate::world::content(&w.path(dir)).iter().map(|(_, bytes)| bytes.len() as u64).sum()
    };
    let near = |planned: &Value, found: u64| {
        let planned = planned.as_u64().expect("bytes") as f64;
        let apart = planned / found as f64 - 1.0;
        // A mix of DoRA and LoRA writes unplanned magnitudes.
        assert!((-0.005..0.02).contains(&apart), "planned {planned}, found {found}: {apart:+.3}");
    };
    // Two checkpoints are kept; while the third and fourth were written, there were three.
    near(&json!(p["disk"]["checkpoints"].as_u64().expect("bytes") / 3 * 2), size("runs/r/checkpoints"));
    near(&p["disk"]["result"], size("runs/r/adapter"));
}

/// `ft data` caches lengths for `ft plan`; changed data invalidates them.
#[test]
fn plans_use_the_lengths_of_data_read_before() {
    let w = World::tiny(LORA);
    let set = ["run.epochs=2", "data.pack=false"];
    w.write("r.toml", recipe(LORA).replace("steps = 6\n", ""));
    let text = |w: &World| w.ok(&[&["plan", "r.toml"][..], &set].concat()).out;
    let before = plan(&w, &set);
    assert_eq!((&before["epoch"], &before["steps"]), (&Value::Null, &Value::Null));
    assert!(text(&w).contains(", if rows are full"), "{}", text(&w));
    w.ok(&[&["data", "r.toml"][..], &set].concat());
    w.ok(&[&["data", "r.toml", "--eval"][..], &set].concat());
    let after = plan(&w, &set);
    assert_eq!(after["steps"], 20);
    assert_eq!(after["epoch"]["rows"], 40);
    assert!(after["micro_batch"]["tokens"].as_u64() < before["micro_batch"]["tokens"].as_u64());
    assert!(text(&w).contains("40 samples in 40 rows"), "{}", text(&w));
    // 20 steps of two micro-batches are two epochs; the mean micro-batch is rounded up to a token
    let [tokens, epoch] = [&after["tokens_per_step"], &after["epoch"]["tokens"]].map(Value::as_u64);
    let (tokens, epoch) = (20 * tokens.expect("tokens"), 2 * epoch.expect("tokens"));
    assert!((epoch..=epoch + 20 * 2).contains(&tokens), "{tokens} {epoch}");
    // The run makes the same plan.
    w.ok(&[&["run", "r.toml"][..], &set].concat());
    let start = &w.events("runs/r", "start")[0];
    assert_eq!(start["plan"]["peak_device_bytes"], after["device"]["total"]);
    assert_eq!(start["steps"], after["steps"]);

    w.write("rows.jsonl", rows(41, 1));
    assert_eq!(plan(&w, &set)["epoch"], Value::Null);
    w.ok(&[&["check", "r.toml"][..], &set].concat());
    assert_eq!(plan(&w, &set)["epoch"]["rows"], 41);
    // Another vocabulary invalidates the lengths, because the run must check token ids again.
    w.config("tiny", json!({"vocab_size": 80}));
    assert_eq!(plan(&w, &set)["epoch"], Value::Null);
}

/// Weights of sources repeat samples or leave some out: an epoch does not have the samples read.
#[test]
fn plans_tell_samples_read_from_those_of_an_epoch() {
    let w = World::tiny(LORA);
    let set = ["data.pack=false", "data.train.0.weight=0.5"];
    w.ok(&[&["data", "r.toml"][..], &set].concat());
    let text = w.ok(&[&["plan", "r.toml", "--verbose"][..], &set].concat()).out;
    for said in ["; 40 samples read, 20 rows an epoch", "data        40 samples read, 20 rows, "] {
        assert!(text.contains(said), "{said:?} is not in {text}");
    }
}

/// A plan that does not fit prints the remedies with the plan, and a single error line.
#[test]
fn hints_are_printed_once() {
    let w = World::tiny(LORA);
    let r = w.ft(&["plan", "r.toml", "memory.budget=300KiB"]);
    assert_eq!(r.code, 8);
    assert!(r.out.starts_with("does not fit: ") && r.out.contains("hint: "), "{}", r.out);
    assert!(!r.err.contains("hint") && r.err.lines().count() == 1, "{}", r.err);
    let r = w.ft(&["run", "r.toml", "memory.budget=300KiB"]);
    assert_eq!((r.code, r.out.as_str()), (8, ""));
    assert!(r.err.contains("hint: "), "{}", r.err);
}

/// Runs a command with a limit on address space, in MiB.
fn limited(w: &World, mib: u64, args: &[&str]) -> Ran {
    let ft = w.command(args);
    let mut c = std::process::Command::new("sh");
    c.arg("-c").arg(format!("ulimit -v {}; exec \"$0\" \"$@\"", mib << 10));
    c.arg(ft.get_program()).args(ft.get_args()).current_dir(w.path(".")).env("RAYON_NUM_THREADS", "2");
    crate::world::same_variables(&mut c, &ft);
    crate::world::ran(c.output().expect("started"))
}

/// A model of 0.8 billion zeros in sparse files, with the quickstart tokenizer.
fn large(w: &World) {
    let (d, f, vocab, layers) = (1024, 1 << 15, 1024, 8);
    w.config(
        "large",
        json!({"hidden_size": d, "intermediate_size": f, "num_hidden_layers": layers,
               "vocab_size": vocab, "num_attention_heads": 8, "head_dim": 64, "tie_word_embeddings": true}),
    );
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        let from = crate::world::repository().join("data/model").join(file);
        std::fs::copy(&from, w.path("large").join(file)).expect("the quickstart's tokenizer");
    }
    let mut tensors = serde_json::Map::new();
    let mut end = 0;
    let mut add = |name: &str, shape: &[usize]| {
        let from = end;
        end += 2 * shape.iter().product::<usize>();
        tensors.insert(name.into(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [from, end]}));
    };
    add("model.embed_tokens.weight", &[vocab, d]);
    add("model.norm.weight", &[d]);
    let layer: [(&str, &[usize]); 11] = [
        ("self_attn.q_proj", &[512, d]),
        ("self_attn.k_proj", &[128, d]),
        ("self_attn.v_proj", &[128, d]),
        ("self_attn.o_proj", &[d, 512]),
        ("self_attn.q_norm", &[64]),
        ("self_attn.k_norm", &[64]),
        ("mlp.gate_proj", &[f, d]),
        ("mlp.up_proj", &[f, d]),
        ("mlp.down_proj", &[d, f]),
        ("input_layernorm", &[d]),
        ("post_attention_layernorm", &[d]),
    ];
    for l in 0..layers {
        layer.iter().for_each(|(name, shape)| add(&format!("model.layers.{l}.{name}.weight"), shape));
    }
    let header = Value::Object(tensors).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    w.write("large/model.safetensors", &bytes);
    let file =
        std::fs::OpenOptions::new().write(true).open(w.path("large/model.safetensors")).expect("a file");
    file.set_len((bytes.len() + end) as u64).expect("a longer file");
}

/// A chat with a model that does not fit is refused before weights are read, with the memory needed and a
/// hint.
#[test]
fn a_chat_that_does_not_fit_is_refused_before_it_loads() {
    let w = World::new();
    large(&w);
    let ask = ["chat", "large", "--device", "cpu", "--raw", "--prompt", "x", "--max-tokens", "1"];
    let r = limited(&w, 2048, &ask);
    assert_eq!(r.code, 8, "{}", r.err);
    for said in [
        "this model needs 1.",
        " to read 1,000 tokens (",
        " GiB of weights, ",
        " of cache for 1,000 tokens), and ",
        " is available",
        "hint: --quantize nf4: fits, saves ",
    ] {
        assert!(r.err.contains(said), "{said:?} is not in {}", r.err);
    }
    assert!(!r.err.contains("loading"), "{}", r.err);
}

/// The system refuses memory during a run with a valid plan: exit code 8, and the purpose of the
/// allocation.
#[test]
fn a_failed_allocation_is_named_with_its_purpose() {
    let w = World::tiny(LORA);
    let rows: String = (0..4).map(|_| format!("{}\n", json!({"input_ids": vec![7; 512]}))).collect();
    w.write("rows.jsonl", rows);
    w.config(
        "tiny",
        json!({"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 64,
               "num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 4096}),
    );
    let set = [
        "data.max_length=512",
        "memory.recompute=none",
        "run.micro_rows=4",
        "run.eval_every=1000",
        "memory.budget=64GiB",
        "run.steps=1",
    ];
    // 8 layers with 2 x 64 MiB of gate and up activations each. The address limit leaves room for the
    // weights, but not for the activations too.
    let r = limited(&w, 1200, &[&["run", "r.toml", "--overwrite"][..], &set].concat());
    assert_eq!(r.code, 8, "{}", r.err);
    for said in [
        "error: out of memory: ",
        " were wanted for ",
        " of layer ",
        " are free",
        "the plan had said ",
        "hint: ",
    ] {
        assert!(r.err.contains(said), "{said:?} is not in {}", r.err);
    }
}
