//! Tokens of a row over ranks (`parallel.context`): results agree with one rank, and do not depend on sharding,
//! transport or data ranks.

use crate::split::{self, ADAPTERS, MIXTURE, apart, launch, told, with};
use crate::world::{Dice, FULL, LORA, World, alternate, merged, mixture, nightly, repository};
use serde_json::{Value, json};

/// Rows of token ids below 64, of these lengths; some tokens without a target.
fn rows(lengths: &[usize], seed: u64) -> String {
    let mut d = Dice(seed);
    let row = |n: &usize| {
        let ids: Vec<u64> = (0..*n).map(|_| d.below(64)).collect();
        let labels: Vec<i64> = ids.iter().map(|id| if d.below(4) == 0 { -100 } else { *id as i64 }).collect();
        format!("{}\n", json!({"input_ids": ids, "labels": labels}))
    };
    lengths.iter().map(row).collect()
}

/// A world with long rows: below and above the cuts at multiples of 128 tokens.
fn world(rules: &str, config: &Value) -> World {
    let w = split::world(rules);
    w.write("rows.jsonl", rows(&[300, 77, 500, 128, 5, 260, 390, 140], 1));
    w.write("eval.jsonl", rows(&[333, 9, 256], 2));
    w.config("tiny", merged(json!({"max_position_embeddings": 512}), config));
    w
}

fn layout(data: usize, context: usize, zero: u8) -> [String; 3] {
    split::layout("context", data, context, zero)
}

/// As [`split::bits`], of long rows, and of three steps unless the settings have others.
#[track_caller]
fn bits(w: &World, run: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let steps: &[&str] = if set.iter().any(|s| s.starts_with("run.steps")) { &[] } else { &["run.steps=3"] };
    split::bits(w, run, &[&["data.max_length=512"], steps, set].concat())
}

#[track_caller]
fn near(a: &[f64], b: &[f64], bar: f64, what: &str) {
    assert!(!a.is_empty() && a.len() == b.len(), "{what}: {a:?}, {b:?}");
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= bar * b.abs(), "{what}: {a} and {b}");
    }
}

/// Losses, norms and results against one rank; the same bits at every stage and number of data ranks. Rows and tokens
/// are counted once.
#[test]
fn tokens_over_ranks_train_as_on_one() {
    let window = json!({"use_sliding_window": true, "sliding_window": 100, "max_window_layers": 1});
    let packed: &[&str] = &["data.pack=true", "memory.recompute=all", "run.clip=0.05"];
    let cases: [(&str, Value, &[&str]); 5] = [
        (FULL, json!({"tie_word_embeddings": true}), &["memory.recompute=none", "run.micro_rows=2"]),
        (LORA, window, &["data.neftune=5", "memory.recompute=norms", "memory.offload=['optimizer']"]),
        (MIXTURE, mixture(), &["memory.recompute=feed_forward"]),
        (ADAPTERS, json!({}), &["model.quantize=nf4"]),
        (FULL, json!({}), packed),
    ];
    for (at, (rules, config, set)) in cases.into_iter().enumerate() {
        let w = world(rules, &config);
        let run = |data: usize, context: usize, zero: u8| {
            let name = format!("run-{data}-{context}-{zero}");
            (bits(&w, &name, &with(&layout(data, context, zero), set)), name)
        };
        let (one, first) = run(1, 1, 0);
        let layouts =
            [(1, 2, 1), (1, 2, 3), (2, 2, 0), (2, 2, 2), (2, 2, 3), (1, 3, 0), (2, 3, 3), (1, 4, 2)];
        let mut same: Option<(usize, Vec<Vec<u8>>)> = None;
        for (data, context, zero) in alternate(at, layouts) {
            let (got, name) = run(data, context, zero);
            let what = format!("{set:?}: {name}");
            if let Some((_, bits)) = same.as_ref().filter(|(other, _)| *other == context) {
                assert!(got == *bits, "{what}: other bits");
            } else {
                same = Some((context, got.clone()));
            }
            let far = apart(&got[0], &one[0]);
            assert!(far <= 1e-5, "{what}: {far:.1e} from one rank");
            for (event, key, bar) in
                [("step", "loss", 1e-6), ("step", "grad_norm", 1e-5), ("eval", "loss", 1e-6)]
            {
                let of = |run: &str| told(&w, run, event, key);
                near(&of(&name), &of(&first), bar, &format!("{what}: {event} {key}"));
            }
            for key in ["tokens", "target_tokens"] {
                assert_eq!(told(&w, &name, "step", key), told(&w, &first, "step", key), "{what}");
            }
            if rules == MIXTURE {
                let aux = |run: &str| told(&w, run, "step", "aux_loss");
                near(&aux(&name), &aux(&first), 1e-6, &what);
            }
            let mesh = w.events(&name, "start")[0]["mesh"].clone();
            let data = if data > 1 { format!("data {data} x ") } else { String::new() };
            assert_eq!(mesh, format!("{data}context {context}"));
        }
    }
}

/// A checkpoint of any layout goes on in any other, with the bits of a run that did not stop.
#[test]
fn a_run_goes_on_in_another_layout() {
    let w = world(LORA, &json!({}));
    let run = |name: &str, layout: &[String; 3], more: &[&str]| {
        bits(&w, name, &with(layout, &[&["run.save_every=1"], more].concat()))
    };
    for (name, from, to) in [
        ("a", (1, 1, 0), (1, 2, 3)),
        ("b", (1, 2, 3), (2, 1, 0)),
        ("c", (1, 3, 1), (2, 2, 2)),
        ("d", (2, 2, 0), (1, 1, 0)),
    ] {
        let (from, to) = (layout(from.0, from.1, from.2), layout(to.0, to.1, to.2));
        run(name, &from, &["run.steps=1", "optimizer.schedule=constant"]);
        let others =
            ["--resume", "--accept-change", "run.steps", "run.steps=3", "optimizer.schedule=constant"];
        let went_on = run(name, &to, &others);
        // The same steps after the same checkpoint, once more.
        split::keep_first(&w, name);
        assert!(run(name, &to, &others) == went_on, "{from:?} to {to:?}");
        let whole = run(&format!("whole-{name}"), &to, &["optimizer.schedule=constant"]);
        let far = apart(&went_on[0], &whole[0]);
        assert!(far <= 1e-5, "{from:?} to {to:?}: {far:.1e}");
    }
}

/// A layer whose state runs from token to token is refused by name, before a run and in a plan.
#[test]
fn linear_attention_is_refused() {
    let w = split::world(LORA);
    let model = repository().join("tests/fixtures/families/qwen35-dense/model");
    let model = format!("model.source={}", model.display());
    for verb in ["plan", "check", "run"] {
        let ran = w.ft(&[verb, "r.toml", &model, "parallel.context=2"]);
        let said = format!("{}{}", ran.out, ran.err);
        assert_eq!(ran.code, 2, "{verb}: {said}");
        assert!(said.contains("parallel.context = 2: not built for linear attention"), "{verb}: {said}");
    }
}

/// Processes compute the bits of threads.
#[test]
fn processes_have_the_bits_of_threads() {
    for (rules, config) in [(FULL, json!({})), (MIXTURE, mixture())] {
        let w = world(rules, &config);
        let own = layout(2, 2, 3);
        let set = with(&own, &["data.max_length=512", "run.steps=3"]);
        assert!(split::processes(&w, 4, "processes", &set) == split::bits(&w, "threads", &set));
        let keys = |run: &str| told(&w, run, "step", "wire_bytes_exchanged");
        assert_eq!(keys("processes"), keys("threads"));
    }
}

/// The death of one process ends all, with exit code 7 and an error that names it.
#[test]
fn a_process_that_dies_ends_all() {
    let w = world(FULL, &json!({}));
    for lost in [3, 0] {
        let name = format!("lost-{lost}");
        let output = format!("run.output={name}");
        let set = ["parallel.data=2", "parallel.context=2", "run.save_every=1", "run.epochs=4000"];
        let processes = launch(
            &w,
            &[0, 1, 2, 3],
            4,
            &[&["run", "r.toml", &output, "data.max_length=512"], &set[..]].concat(),
        );
        let ended = split::killed(&w, &name, processes, lost);
        for (rank, r) in ended.iter().enumerate().filter(|(rank, _)| *rank != lost) {
            assert_eq!(r.code, 7, "rank {rank}: {}", r.err);
            let log = if rank == 0 { Vec::new() } else { w.read(&format!("{name}/rank-{rank}.log")) };
            let log = String::from_utf8_lossy(&log).into_owned() + &r.err;
            for words in [&*format!("rank {lost} of 4 on "), "its process is gone", "its last collective: "] {
                assert!(log.contains(words), "rank {rank}: {words:?} is not in {log}");
            }
        }
    }
}

/// Preferences, rewards and classes: documents of one pair may be on several ranks.
#[test]
fn losses_of_pairs_over_ranks_are_those_of_one_rank() {
    let pair = |n: usize, seed: u64| {
        let ids = |n: usize, d: &mut Dice| (0..n).map(|_| d.below(64)).collect::<Vec<u64>>();
        let mut d = Dice(seed);
        let (prompt, chosen, rejected) = (ids(n, &mut d), ids(2 * n, &mut d), ids(n + 40, &mut d));
        format!("{}\n", json!({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}))
    };
    let pairs: String =
        [(80, 1), (20, 2), (110, 3), (60, 4)].iter().map(|(n, seed)| pair(*n, *seed)).collect();
    for task in ["orpo", "dpo", "reward"] {
        let w = world(LORA, &json!({}));
        w.write("rows.jsonl", &pairs);
        w.write("eval.jsonl", &pairs);
        let task = format!("task={task}");
        let kind = ["data.train.0.format=preference", "data.eval.0.format=preference", "run.batch_rows=4"];
        let run = |name: &str, more: &[&str]| bits(&w, name, &[&[&*task][..], &kind, more].concat());
        let one = run("one", &[]);
        for (name, context) in [("two", "parallel.context=2"), ("three", "parallel.context=3")] {
            let got = run(name, &[context, "parallel.zero=2"]);
            let far = apart(&got[0], &one[0]);
            assert!(far <= 1e-5, "{task}, {context}: {far:.1e} from one rank");
            near(&told(&w, name, "step", "loss"), &told(&w, "one", "step", "loss"), 1e-5, &task);
            near(&told(&w, name, "step", "accuracy"), &told(&w, "one", "step", "accuracy"), 0.0, &task);
        }
    }
}

/// Four ranks train a row for which one rank has not enough memory.
#[test]
fn four_ranks_train_what_does_not_fit_on_one() {
    let w =
        world(FULL, &json!({"max_position_embeddings": 4096, "hidden_size": 64, "intermediate_size": 256}));
    w.write("rows.jsonl", rows(&[4000, 4000], 3));
    let set = [
        "data.max_length=4096",
        "run.batch_rows=2",
        "data.eval=[]",
        "run.eval_at_start=false",
        "run.steps=1",
    ];
    let run = |name: &str, more: &[&str]| {
        let output = format!("run.output={name}");
        w.ft(&[&["run", "r.toml", &output][..], &set, more].concat())
    };
    let one = run("one", &["memory.budget=24MiB"]);
    assert_eq!(one.code, 8, "{}", one.err);
    let four = run("four", &["memory.budget=24MiB", "parallel.context=4", "parallel.zero=3"]);
    assert_eq!(four.code, 0, "{}", four.err);
    let free = run("free", &[]);
    assert_eq!(free.code, 0, "{}", free.err);
    near(&told(&w, "four", "step", "loss"), &told(&w, "free", "step", "loss"), 1e-5, "loss");
}

/// Random layouts, lengths and settings against one rank. `FT_TIER=nightly` draws more.
#[test]
fn random_layouts_train_as_one_rank() {
    let mut d = Dice(27);
    for round in 0..if nightly() { 60 } else { 6 } {
        let (rules, config) = match d.below(4) {
            0 => (FULL, json!({"tie_word_embeddings": true})),
            1 => (
                LORA,
                json!({"use_sliding_window": true, "sliding_window": 30 + d.below(300), "max_window_layers": 0}),
            ),
            2 => (MIXTURE, mixture()),
            _ => (ADAPTERS, json!({"num_key_value_heads": 1})),
        };
        let w = world(rules, &config);
        let lengths: Vec<usize> = (0..8).map(|_| 1 + d.below(511) as usize).collect();
        w.write("rows.jsonl", rows(&lengths, round));
        let recompute = ["none", "norms", "feed_forward", "all"][d.below(4) as usize];
        let set = [format!("memory.recompute={recompute}"), format!("data.pack={}", d.below(2) == 0)];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let one = bits(&w, "one", &set);
        let layout = layout([1, 2, 4][d.below(3) as usize], 2 + d.below(3) as usize, d.below(4) as u8);
        let got = bits(&w, "many", &with(&layout, &set));
        let far = apart(&got[0], &one[0]);
        assert!(far <= 2e-5, "{lengths:?}, {set:?}, {layout:?}: {far:.1e} from one rank");
        near(
            &told(&w, "many", "step", "loss"),
            &told(&w, "one", "step", "loss"),
            1e-6,
            &format!("{layout:?}"),
        );
    }
}
