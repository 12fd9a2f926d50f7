//! Task "distill", and `ft logits`: PyTorch's losses in any split of a step, rows of a teacher, refusals.

use super::preference::{compare, fixture, with_adapter};
use crate::world::{LORA, World, apart, reference, rows_of};
use candle_core::{DType, Device, Tensor};
use ft::files::TensorFiles;
use serde_json::{Value, json};
use std::path::Path;

/// The recipe that `make_preference.py` trained: a PEFT adapter.
fn recipe() -> String {
    let rows = format!("train = [{{ source = \"{}/distill.jsonl\", format = \"tokens\" }}]", fixture());
    with_adapter("distill", "[distill]\ntemperature = 2.0\nalpha = 0.7", &rows)
}

/// Rows of the fixture, as objects.
fn fixture_rows() -> Vec<Value> {
    let text = std::fs::read_to_string(format!("{}/distill.jsonl", fixture())).expect("read");
    text.lines().map(|line| serde_json::from_str(line).expect("a row")).collect()
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

/// Rows of a file that `ft logits` wrote.
fn read(path: &Path) -> Vec<Value> {
    let file = std::fs::File::open(path).expect("a file");
    let text = std::io::read_to_string(zstd::Decoder::new(file).expect("zstd")).expect("text");
    text.lines().map(|line| serde_json::from_str(line).expect("a row")).collect()
}

#[test]
fn losses_are_those_of_pytorch_in_any_split_of_a_step() {
    let w = World::new();
    w.write("r.toml", recipe());
    for set in [
        &[][..],
        &["run.micro_rows=1"],
        &["run.micro_rows=4", "data.cache=false"],
        &["run.micro_rows=1", "parallel.data=2"],
        &["run.micro_rows=2", "parallel.data=2", "parallel.zero=3"],
    ] {
        w.ok(&[&["run", "r.toml", "--overwrite"], set].concat());
        compare(&w, "out", "distill");
    }
}

/// With evaluation on held-out rows, NF4 base, packed and shuffled rows.
#[test]
fn a_resumed_run_has_the_same_bits() {
    let w = World::new();
    let eval = format!("data.eval=[{{source='{}/distill.jsonl', format='tokens'}}]", fixture());
    for more in [
        &["data.shuffle=true"][..],
        &["model.quantize=nf4", "data.pack=true", "run.batch_rows=1", "run.micro_rows=1"],
    ] {
        w.write("r.toml", recipe());
        let set = [&[eval.as_str(), "run.eval_every=4", "run.keep_best=true"], more].concat();
        w.ok(&[&["run", "r.toml", "--overwrite", "run.save_every=4"], &set[..]].concat());
        w.resumed_in_half(&set);
        assert_eq!(w.steps("half"), w.steps("out"), "{more:?}");
        let evals = w.events("half", "eval");
        let last = &evals[evals.len() - 1];
        let number = |key: &str| last[key].as_f64().unwrap_or_else(|| panic!("no {key} in {last}"));
        let sum = 0.7 * number("kd") + 0.3 * number("ce");
        assert!(
            (number("loss") - sum).abs() < 1e-9 && number("loss") < evals[0]["loss"].as_f64().unwrap_or(0.0)
        );
        let json = w.ok(&["eval", "half", "--json", more[0]]).json();
        let samples = fixture_rows().len();
        assert_eq!(json["samples"], samples, "packed or not");
        let text = w.ok(&["eval", "half", more[0]]).out;
        assert!(text.contains(&format!(" in {samples} samples\n")), "{text}");
        assert!(
            (json["kd"].as_f64().expect("kd") - number("kd")).abs() < 1e-5 * number("kd"),
            "{json} {last}"
        );
    }
}

/// A row cut to `data.max_length` has the loss of the shorter row; places of a teacher with fewer values stay empty, and
/// weights apply to both losses.
#[test]
fn cut_and_sparse_rows_have_the_loss_of_their_tokens() {
    let w = World::new();
    let (mut cut, mut sparse) = (fixture_rows(), fixture_rows());
    let shorter = |row: &mut Value, key: &str, n: usize| row[key].as_array_mut().expect("a list").truncate(n);
    for row in &mut cut {
        for key in ["input_ids", "labels", "teacher_ids", "teacher_logits"] {
            shorter(row, key, 12);
        }
    }
    // half of the rows have four values at a token, and none where nothing is predicted
    for row in sparse.iter_mut().step_by(2) {
        let labels: Vec<i64> = serde_json::from_value(row["labels"].clone()).expect("labels");
        for key in ["teacher_ids", "teacher_logits"] {
            for (i, list) in row[key].as_array_mut().expect("lists").iter_mut().enumerate() {
                let kept = if labels.get(i + 1).is_none_or(|l| *l == -100) { 0 } else { 4 };
                list.as_array_mut().expect("a list").truncate(kept);
            }
        }
    }
    let full = recipe();
    let first = |rows: &[Value], set: &[&str]| {
        w.write("rows.jsonl", lines(rows));
        w.write("r.toml", full.replace(&format!("{}/distill.jsonl", fixture()), "rows.jsonl"));
        w.ok(&[&["run", "r.toml", "--overwrite", "run.steps=1"], set].concat());
        let step = w.events("out", "step").remove(0);
        ["loss", "kd", "ce", "grad_norm"].map(|key| step[key].as_f64().expect("a number").to_bits())
    };
    assert_eq!(first(&fixture_rows(), &["data.max_length=12"]), first(&cut, &[]));
    // rows of one width in a micro-batch of their own
    let both = first(&sparse, &["run.micro_rows=2"]).map(f64::from_bits);
    let alone = first(&sparse, &["run.micro_rows=1"]).map(f64::from_bits);
    both.iter().zip(alone).for_each(|(a, b)| assert!((a - b).abs() < 1e-6 * b, "{both:?} {alone:?}"));
    // a weight of 0 leaves a row out
    let mut weighted = fixture_rows();
    weighted.truncate(4);
    weighted[3]["weight"] = json!(0.0);
    let three = first(&weighted[..3], &["run.batch_rows=3", "run.micro_rows=3"]).map(f64::from_bits);
    let four = first(&weighted, &["run.micro_rows=4"]).map(f64::from_bits);
    three.iter().zip(four).for_each(|(a, b)| assert!((a - b).abs() < 1e-6 * b, "{three:?} {four:?}"));
}

/// Log-probabilities of a teacher are the logarithms of the softmax of transformers' logits, the largest first; the
/// student that is its own teacher has no divergence.
#[test]
fn logits_of_a_teacher_are_those_of_transformers() {
    let w = World::new();
    let case = reference("qwen3-dense");
    w.write("rows.jsonl", rows_of(Path::new(&case)));
    w.write(
        "r.toml",
        format!(
            "[model]\nsource = \"{case}/model\"\ndtype = \"f32\"\n{LORA}\n[data]\nmax_length = 64\n\
             train = [{{ source = \"rows.jsonl\", format = \"tokens\", weight = 2.0 }}]\n\
             [run]\nsteps = 2\nbatch_rows = 2\ndevice = \"cpu\"\noutput = \"out\"\n"
        ),
    );
    let teacher = format!("{case}/model");
    let r = w.ok(&["logits", &teacher, "r.toml", "--out", "all", "--top-k", "512"]);
    assert!(r.out.contains(
        "train = [\n  { source = \"all/train-0.jsonl.zst\", format = \"tokens\", weight = 2.0 },\n]"
    ));
    let expected = TensorFiles::open_file(&Path::new(&case).join("expected.safetensors")).expect("expected");
    let logits = expected.tensor("logits", DType::F32, &Device::Cpu).expect("logits");
    let vocab = logits.dims()[2];
    let mut compared = 0;
    for (r, row) in read(&w.path("all/train-0.jsonl.zst")).iter().take(logits.dims()[0]).enumerate() {
        for (t, (ids, values)) in row["teacher_ids"]
            .as_array()
            .expect("lists")
            .iter()
            .zip(row["teacher_logits"].as_array().expect("lists"))
            .enumerate()
        {
            let ids: Vec<usize> = serde_json::from_value(ids.clone()).expect("ids");
            let values: Vec<f32> = serde_json::from_value(values.clone()).expect("values");
            if ids.is_empty() {
                continue;
            }
            assert_eq!(ids.len(), vocab.min(512));
            assert!(values.windows(2).all(|pair| pair[0] >= pair[1]));
            let theirs =
                logits.get(r).and_then(|x| x.get(t)).expect("a row").to_vec1::<f32>().expect("values");
            let sum: f64 = theirs.iter().map(|x| f64::from(*x).exp()).sum();
            let theirs: Vec<f32> = ids.iter().map(|id| (f64::from(theirs[*id]) - sum.ln()) as f32).collect();
            let tensor = |v: &[f32]| Tensor::new(v, &Device::Cpu).expect("a tensor");
            assert!(apart(&tensor(&values), &tensor(&theirs)) < 1e-5);
            compared += 1;
        }
    }
    assert!(compared > 10);
    // its own teacher: the divergence is 0 up to rounding
    let own = "data.train=[{source='all/train-0.jsonl.zst', format='tokens'}]";
    w.ok(&["run", "r.toml", own, "task=distill", "distill.alpha=1.0", "run.steps=1", "run.batch_rows=2"]);
    let step = w.events("out", "step").remove(0);
    assert!(step["kd"].as_f64().is_some_and(|kd| kd.abs() < 1e-4), "{step}");
    // in 4 bits, other values; a folder with files is refused
    w.ok(&["logits", &teacher, "r.toml", "--out", "nf4", "--top-k", "4", "--quantize", "nf4"]);
    let (full, packed) = (read(&w.path("all/train-0.jsonl.zst")), read(&w.path("nf4/train-0.jsonl.zst")));
    assert!(
        full[0]["input_ids"] == packed[0]["input_ids"]
            && full[0]["teacher_logits"] != packed[0]["teacher_logits"]
    );
    let r = w.ft(&["logits", &teacher, "r.toml", "--out", "nf4"]);
    assert!(r.code != 0 && r.err.contains("nf4"), "{}", r.err);
    let r = w.ft(&["logits", &teacher, "r.toml", "--out", "none", "--top-k", "0"]);
    assert!(r.code == 2 && r.err.contains("--top-k 0: 1 to 512"), "{}", r.err);
    // a teacher whose activations overflow
    let files = TensorFiles::open_model(Path::new(&teacher)).expect("a model");
    let scaled = |name: &str| {
        let t = files.tensor(name, DType::F32, &Device::Cpu).expect("a tensor");
        let t = if name == "model.layers.1.mlp.up_proj.weight" { (t * 1e30).expect("huge") } else { t };
        (name.to_string(), t)
    };
    let tensors: Vec<(String, Tensor)> = files.names().map(scaled).collect();
    w.write("broken/config.json", std::fs::read(format!("{teacher}/config.json")).expect("a config"));
    ft::files::write_file(&w.path("broken/model.safetensors"), &tensors, &[]).expect("written");
    let r = w.ft(&["logits", "broken", "r.toml", "--out", "none"]);
    let said = ["broken, data.train.0 line 1", "not finite"];
    assert!(r.code == 6 && said.iter().all(|s| r.err.contains(s)), "{} {}", r.code, r.err);
    // tasks with losses of whole documents
    let scores = ["task=classify", "classify.num_labels=2", "data.train=[{source='rows.jsonl'}]"];
    for set in [&scores[..], &["task=reward", "data.train=[{source='rows.jsonl'}]"]] {
        let r = w.ft(&[&["logits", &teacher, "r.toml", "--out", "none"], set].concat());
        assert!(r.code == 2 && r.err.contains("losses are of whole documents"), "{}", r.err);
    }
    assert!(!w.path("none").exists());
}

/// Rows belong to a tokenizer and a chat template.
#[test]
fn rows_of_another_tokenizer_or_template_are_refused() {
    let w = World::new();
    for name in ["m", "other", "templated"] {
        w.tokenizer(name);
        w.config(name, json!({"vocab_size": 285}));
    }
    let mut tokenizer = w.json("other/tokenizer.json");
    let tokens = tokenizer["added_tokens"].as_array_mut().expect("tokens");
    let id = tokens.len() - 1;
    tokens[id]["content"] = json!("<|another|>");
    w.write("other/tokenizer.json", tokenizer.to_string());
    w.write("t.jinja", "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}");
    let said = |i: usize| json!({"messages": [{"role": "user", "content": format!("{i}?")}, {"role": "assistant", "content": "Yes."}]});
    w.write("chat.jsonl", lines(&(0..8).map(said).collect::<Vec<_>>()));
    w.write(
        "r.toml",
        "[model]\nsource = \"m\"\nweights = \"random\"\n[[train]]\nmodules = [\"attention\"]\nmethod = \"full\"\n[data]\n\
         train = [{ source = \"chat.jsonl\", format = \"messages\" }]\neval_share = 0.25\nmax_length = 64\n\
         [run]\nsteps = 1\nbatch_rows = 2\ndevice = \"cpu\"\noutput = \"out\"\n",
    );
    // a teacher of random weights: the result of a run
    w.ok(&["run", "r.toml", "data.pack=false", "run.output=teacher"]);
    let adapted = ["logits", "teacher/adapter", "r.toml", "--out", "l", "--top-k", "5"];
    let r = w.ft(&adapted);
    assert!(r.code != 0, "a base without weights has no values: {}", r.err);
    let full = "train.0.modules=['attention', 'mlp', 'norms', 'embedding', 'head']";
    w.ok(&["run", "r.toml", "data.pack=false", "run.output=teacher", full, "--overwrite"]);
    let r = w.ok(&["logits", "teacher", "r.toml", "--out", "l", "--top-k", "5"]);
    assert!(
        r.out.contains("train = [") && r.out.contains("eval = [") && r.err.contains("8 rows with 5 values"),
        "{}{}",
        r.out,
        r.err
    );
    let taught = "data.train=[{source='l/train-0.jsonl.zst', format='tokens'}]";
    let set = [
        "data.eval=[{source='l/eval-0.jsonl.zst', format='tokens'}]",
        "data.eval_share=0.0",
        "data.pack=false",
    ];
    w.ok(&[&["run", "r.toml", "--overwrite", "task=distill", taught], &set[..]].concat());
    assert_eq!(w.events("out", "eval").len(), 1);
    let plain = "data.train=[{source='chat.jsonl', format='messages'}]";
    for (task, train, more, code, words) in [
        ("task=distill", taught, &[][..], 0, ""),
        ("task=distill", taught, &["model.source=other"], 2, "ids of another tokenizer than other's"),
        (
            "task=distill",
            taught,
            &["data.chat_template=t.jinja"],
            2,
            "another chat template than the model's",
        ),
        ("task=sft", taught, &[], 0, "rows have values of a teacher, which task = \"sft\" does not read"),
        ("task=distill", plain, &[], 2, "does not read format = \"messages\""),
    ] {
        let r = w.ft(&[&["check", "r.toml", task, train], &set[..], more].concat());
        assert!(r.code == code && r.err.contains(words), "{more:?} {}: {}", r.code, r.err);
    }
    // rows without values get some, also by a recipe of the task
    w.write("ids.jsonl", "{\"input_ids\": [1, 2, 3], \"labels\": [1, 2, 3]}\n");
    let ids = ["task=distill", "data.train=[{source='ids.jsonl', format='tokens'}]"];
    w.ok(&[&["logits", "teacher", "r.toml", "--out", "l3", "--top-k", "5"], &ids[..], &set[..]].concat());
    // the teacher's tokenizer is that of the recipe's model
    let r = w.ft(&["logits", "teacher", "r.toml", "--out", "l2", "model.source=other"]);
    assert!(r.code == 2 && r.err.contains("another tokenizer than other's: \"<|another|>\" is"), "{}", r.err);
    let shown = w.ok(&[&["data", "r.toml", "task=distill", taught], &set[..]].concat()).out;
    assert!(shown.contains("teacher      {\"model\":\"teacher\""), "{shown}");
}

#[test]
fn bad_rows_and_settings_are_refused_by_name() {
    let w = World::new();
    let row = || fixture_rows().remove(0);
    let broken = |change: &dyn Fn(&mut Value)| {
        let mut row = row();
        change(&mut row);
        row
    };
    let cases: [(Value, &str); 9] = [
        (
            broken(&|r| {
                r["teacher_ids"].as_array_mut().expect("a list").pop();
            }),
            "teacher_ids has",
        ),
        (broken(&|r| r["teacher_ids"] = Value::Null), "teacher_logits without teacher_ids"),
        (broken(&|r| r["teacher_logits"] = json!([])), "teacher_ids without teacher_logits"),
        (broken(&|r| r["teacher_ids"][0][1] = r["teacher_ids"][0][0].clone()), "teacher_ids[0]: token"),
        (
            broken(&|r| r["teacher_ids"][3][2] = json!(1_000_000)),
            "teacher_ids[3]: token id 1000000 is not in",
        ),
        (broken(&|r| r["teacher_ids"][3][2] = json!(-1)), "teacher_ids[3][2]: -1 is not a token id"),
        (broken(&|r| r["teacher_logits"][2][1] = json!("x")), "teacher_logits[2][1]: x is no number"),
        (
            broken(&|r| r["teacher_logits"][2] = json!([1.0])),
            "teacher_logits[2] has 1 numbers and teacher_ids",
        ),
        (broken(&|r| r["teacher"] = json!("me")), "teacher: expected an object, found a string"),
    ];
    w.write("r.toml", recipe().replace(&format!("{}/distill.jsonl", fixture()), "rows.jsonl"));
    for (bad, words) in cases {
        w.write("rows.jsonl", lines(&[row(), bad]));
        let r = w.ft(&["check", "r.toml"]);
        assert!(r.code == 3 && r.err.contains("rows.jsonl:2") && r.err.contains(words), "{words}: {}", r.err);
    }
    // rows without values, among others
    let mut rows = fixture_rows();
    rows[2].as_object_mut().expect("an object").retain(|key, _| !key.starts_with("teacher"));
    w.write("rows.jsonl", lines(&rows));
    for verb in ["check", "data", "run"] {
        let r = w.ft(&[verb, "r.toml"]);
        let words = "rows.jsonl:3: no values of a teacher (teacher_ids)";
        assert!(r.code == 3 && r.err.contains(words) && r.err.contains("hint: ft logits"), "{}", r.err);
    }
    let r = w.ok(&["data", "r.toml", "data.on_bad_row=skip"]);
    assert!(r.err.contains("of 8 rows 1 is left out"), "{}", r.err);
    assert!(r.out.contains("left out     1\n"), "{}", r.out);
    for (set, words) in [
        ("task=sft", "distill.temperature does nothing with this task"),
        ("distill.temperature=0", "distill.temperature"),
        ("distill.alpha=1.5", "distill.alpha"),
    ] {
        let r = w.ft(&["check", "r.toml", set]);
        assert!(r.code == 2 && r.err.contains(words), "{set}: {}", r.err);
    }
}
