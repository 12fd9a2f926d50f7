//! The fuzzed inputs: good files, mutations, commands, and allowed exit codes.

use super::dice::Dice;
use super::judge::{self, After};
use super::mutate::{self, bytes, json_lines, json_text};
use super::template::template;
use super::tokenizer::with_components;
use super::world::{Base, Content, Files, named_seeds, seeds};
use ft::recipe::{Kind, all_keys};
use serde_json::{Value, json};
use std::sync::LazyLock;

/// One case: files, and commands to run on them.
#[derive(Debug)]
pub struct Case {
    pub files: Files,
    pub commands: Vec<Command>,
    /// Check after all commands, in addition to the exit codes.
    pub after: After,
}

/// A command line with the allowed exit codes.
#[derive(Clone, Debug)]
pub struct Command {
    pub args: Vec<String>,
    pub codes: Vec<u8>,
    /// Shell commands (`ulimit`) run by `sh` before the binary.
    pub limits: Option<String>,
}

/// An input: name, and generator of cases.
pub struct Input {
    pub name: &'static str,
    pub make: fn(&'static Base, &mut Dice) -> Case,
}

/// All inputs.
pub const INPUTS: &[Input] = &[
    Input { name: "recipe", make: recipe },
    Input { name: "config", make: config },
    Input { name: "tokenizer", make: tokenizer },
    Input { name: "template", make: with_template },
    Input { name: "safetensors", make: safetensors },
    Input { name: "index", make: index },
    Input { name: "adapter", make: adapter },
    Input { name: "rows", make: rows },
    Input { name: "tables", make: tables },
    Input { name: "checkpoint", make: checkpoint },
    Input { name: "metrics", make: metrics },
    Input { name: "limits", make: limits },
];

/// Exit codes of a command that reads a recipe, config, tokenizer and rows.
const READS: &[u8] = &[0, 2, 3, 4];
/// Exit codes of `ft plan`.
const PLANS: &[u8] = &[0, 2, 3, 4, 8];
/// Exit codes of a command that reads the files of a model or adapter and computes with them.
const COMPUTES: &[u8] = &[0, 4, 6];

pub fn command(line: &str, codes: &[u8]) -> Command {
    Command { args: line.split(' ').map(String::from).collect(), codes: codes.to_vec(), limits: None }
}

fn case(files: Files, commands: Vec<Command>) -> Case {
    Case { files, commands, after: judge::nothing }
}

/// Adds a file, but occasionally a folder, pipe, device or link instead.
fn put(d: &mut Dice, files: &mut Files, path: &str, data: Vec<u8>) {
    let content = match d.below(150) {
        0 => Content::Folder,
        1 => Content::Pipe,
        2 => Content::Link(d.pick::<&str>(&[
            "/dev/zero",
            "/dev/null",
            "/dev/full",
            "gone",
            "/",
            "/proc/self/mem",
        ])),
        3 => Content::bytes([]),
        _ => Content::bytes(data),
    };
    files.insert(path.into(), content);
}

fn pick(d: &mut Dice, seeds: &'static [Vec<u8>]) -> &'static [u8] {
    &seeds[d.below(seeds.len())]
}

fn recipe(base: &'static Base, d: &mut Dice) -> Case {
    static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        [seeds("recipes", ".toml"), seeds("tests/fixtures/broken-recipes", ".toml")].concat()
    });
    let other = pick(d, &SEEDS);
    let own = d.once_in(2);
    let seed = if own { base.file(["r.toml", "x.toml"][d.below(2)]) } else { pick(d, &SEEDS) };
    let mut text = seed.to_vec();
    match d.below(8) {
        0 | 1 => bytes(d, &mut text, other),
        2..5 => mutate::lines(d, &mut text, other),
        5 => {
            let (path, key) = d.pick(all_keys());
            let value = value(d, key.kind);
            text.extend(format!("\n[{}]\n{} = {value}\n", mutate::odd_text(d), path).bytes());
        }
        _ => {}
    }
    let mut files = base.take(&["m/", "x/", "a/", "chat", "rows", "text"]);
    put(d, &mut files, "f.toml", text);
    let set: Vec<String> = (0..d.below(4))
        .map(|_| {
            let (path, key) = d.pick(all_keys()).clone();
            let path = if d.once_in(10) { format!("{path}.{}", mutate::odd_text(d)) } else { path };
            format!("{path}={}", value(d, key.kind))
        })
        .collect();
    let all = [
        ("check f.toml", READS),
        ("plan f.toml", PLANS),
        ("plan f.toml --json", PLANS),
        ("data f.toml", READS),
    ];
    let mut commands = Vec::new();
    for (line, codes) in &all[..if own { 4 } else { 3 }] {
        if d.once_in(2) || commands.is_empty() {
            let mut c = command(line, codes);
            c.args.extend(set.clone());
            // A NUL byte cannot be passed as an argument.
            c.args.iter_mut().for_each(|a| a.retain(|c| c != '\0'));
            commands.push(c);
        }
    }
    case(files, commands)
}

/// A value for a key, sometimes one of the accepted words.
fn value(d: &mut Dice, kind: Kind) -> String {
    match kind {
        Kind::Word(words) | Kind::Words(words) if d.once_in(2) => d.pick(words).0.to_string(),
        _ => mutate::toml_value(d, 1),
    }
}

fn config(base: &'static Base, d: &mut Dice) -> Case {
    static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let of = |end| seeds("tests/fixtures/reference", end);
        [
            of("model/config.json"),
            of("transformers5.json"),
            seeds("crates/ft-plan/src/model/configs", ".json"),
            seeds("data/model", "/config.json"),
        ]
        .concat()
    });
    let other = pick(d, &SEEDS);
    if d.once_in(3) {
        let mut files = base.take(&["m/", "q/", "chat", "r.toml"]);
        let model = *d.pick(&["m", "q"]);
        let path = format!("{model}/config.json");
        let text = json_text(d, base.file(&path), other);
        put(d, &mut files, &path, text);
        let line = format!("eval r.toml model.source={model}");
        return case(files, vec![command(&line, &[0, 2, 3, 4, 6, 8])]);
    }
    let mut files = base.take(&["rows", "x.toml"]);
    let seed = pick(d, &SEEDS);
    let text = json_text(d, seed, other);
    put(d, &mut files, "c/config.json", text);
    let set = "x.toml model.source=c model.weights=random train.0.modules=['attention'] router.aux_loss=0";
    let both = [command(&format!("check {set}"), READS), command(&format!("plan {set}"), PLANS)];
    case(files, both.to_vec())
}

fn tokenizer(base: &'static Base, d: &mut Dice) -> Case {
    static LARGER: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| seeds("data/model", "tokenizer.json"));
    let mut files = base.take(&["m/", "chat", "text", "r.toml"]);
    match d.below(6) {
        0 => {
            let path = *d.pick(&[
                "m/tokenizer_config.json",
                "m/generation_config.json",
                "m/special_tokens_map.json",
            ]);
            let seed = base.file(if path.contains("special") { "m/tokenizer_config.json" } else { path });
            let text = json_text(d, seed, base.file("m/config.json"));
            put(d, &mut files, path, text);
        }
        1 => {
            let large = d.once_in(8);
            let seed = if large { &LARGER[0] } else { base.file("m/tokenizer.json") };
            let text = json_text(d, seed, base.file("m/tokenizer_config.json"));
            put(d, &mut files, "m/tokenizer.json", text);
        }
        _ => {
            let text = with_components(d, base.file("m/tokenizer.json"));
            put(d, &mut files, "m/tokenizer.json", text);
        }
    }
    let text = "data r.toml data.train.0.source=text.jsonl data.train.0.format=text data.eval=[]";
    let line = if d.once_in(2) { "data r.toml" } else { text };
    case(files, vec![command(line, READS)])
}

fn with_template(base: &'static Base, d: &mut Dice) -> Case {
    static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| seeds("tests/fixtures/chat", ".jinja"));
    let mut files = base.take(&["m/", "chat", "r.toml"]);
    let text = match d.below(5) {
        0 => {
            let mut text = pick(d, &SEEDS).to_vec();
            let other = pick(d, &SEEDS);
            bytes(d, &mut text, other);
            text
        }
        1 => {
            let mut text = pick(d, &SEEDS).to_vec();
            let at = d.below(text.len());
            text.splice(at..at, template(d).bytes());
            text
        }
        _ => template(d).into_bytes(),
    };
    put(d, &mut files, "t.jinja", text);
    let verb = *d.pick(&["check", "data"]);
    case(files, vec![command(&format!("{verb} r.toml data.chat_template=t.jinja"), READS)])
}

/// Mutates a safetensors file: JSON header, header length, values, or arbitrary bytes.
fn tensors(d: &mut Dice, seed: &[u8]) -> Vec<u8> {
    let mut data = seed.to_vec();
    let n = u64::from_le_bytes(seed[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&seed[8..8 + n]).expect("a header");
    match d.below(12) {
        0..6 => {
            let mut text = match d.once_in(2) {
                true => mutate::json(
                    d,
                    &header,
                    &json!({"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}),
                ),
                false => entry(d, header).to_string().into_bytes(),
            };
            if d.once_in(2) {
                text.resize(text.len().next_multiple_of(8), b' ');
            }
            let length = if d.once_in(10) { n } else { text.len() };
            data.splice(..8 + n, (length as u64).to_le_bytes().into_iter().chain(text));
        }
        6 => {
            let odd = [
                0,
                1,
                2,
                n as u64 - 1,
                n as u64 + 1,
                100_000_000,
                100_000_001,
                1 << 32,
                u64::MAX - 7,
                u64::MAX,
            ];
            data.splice(..8, d.pick(&odd).to_le_bytes());
        }
        7..9 => {
            // NaN and infinite values, and other extreme bit patterns.
            for _ in 0..1 + d.below(5) {
                let at = 8 + n + d.below((data.len() - n - 8).max(1)) / 4 * 4;
                let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e30, -1e30, 1e-45, -0.0];
                let value = d.pick(&odd).to_le_bytes();
                data[at..].iter_mut().zip(value).for_each(|(b, v)| *b = v);
            }
        }
        9 => data.truncate(d.below(seed.len())),
        10 => data.extend_from_within(..d.below(seed.len())),
        _ => bytes(d, &mut data, seed),
    }
    data
}

/// Changes dtype, shape, offsets or name of one tensor.
fn entry(d: &mut Dice, mut header: Value) -> Value {
    const SIZES: &[u64] = &[0, 1, 2, 3, 8, 1 << 16, 1 << 31, 1 << 32, 1 << 53, 1 << 62, u64::MAX];
    let all = header.as_object_mut().expect("an object");
    let names: Vec<String> = all.keys().filter(|k| *k != "__metadata__").cloned().collect();
    let (one, two) = (d.pick(&names).clone(), d.pick(&names).clone());
    let dtypes = [
        "F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "U64", "F4",
        "C64", "",
    ];
    match d.below(9) {
        0 => all[&one]["dtype"] = json!(d.pick(&dtypes)),
        1 => {
            let shape: Vec<u64> = (0..d.below(5)).map(|_| *d.pick(SIZES)).collect();
            all[&one]["shape"] = json!(shape);
        }
        2 => {
            let axis = d.below(2);
            if let Some(n) = all[&one]["shape"].get_mut(axis) {
                *n = json!(d.pick(SIZES));
            }
        }
        3 => {
            let (axis, n) = (d.below(2), d.pick(SIZES));
            all[&one]["data_offsets"][axis] = json!(n);
        }
        4 => all[&one]["data_offsets"] = all[&two]["data_offsets"].clone(),
        5 => {
            let (a, b) = (all[&one].clone(), all[&two].clone());
            (all[&one], all[&two]) = (b, a);
        }
        6 => drop(all.remove(&one)),
        7 => {
            let value = all[&one].clone();
            all.insert(mutate::odd_text(d), value);
        }
        _ => {
            if let Some(shape) = all[&one]["shape"].as_array_mut() {
                if d.once_in(2) { shape.reverse() } else { shape.insert(0, json!(1)) }
            }
        }
    }
    header
}

fn safetensors(base: &'static Base, d: &mut Dice) -> Case {
    let (model, recipe) = *d.pick(&[("m", "r.toml"), ("q", "r.toml"), ("x", "x.toml")]);
    let mut files = base.take(&[&format!("{model}/"), "chat", "rows", recipe]);
    let path = format!("{model}/model.safetensors");
    let data = tensors(d, base.file(&path));
    put(d, &mut files, &path, data);
    let line = format!("{recipe} model.source={model}");
    match d.below(3) {
        0 if model == "m" => Case {
            files,
            commands: vec![command("quantize m --out o", COMPUTES)],
            after: judge::whole_or_absent,
        },
        1 => case(files, vec![command(&format!("check {line}"), &[0, 4])]),
        _ => case(files, vec![command(&format!("eval {line}"), COMPUTES)]),
    }
}

fn index(base: &'static Base, d: &mut Dice) -> Case {
    const INDEX: &str = "s/model.safetensors.index.json";
    let mut files = base.take(&["s/", "rows", "x.toml", "m/model.safetensors"]);
    let seed = base.file(INDEX);
    let mut parsed: Value = serde_json::from_slice(seed).expect("an index");
    let text = match d.below(3) {
        0 => {
            let map = parsed["weight_map"].as_object_mut().expect("a map");
            let names = [
                "../m/model.safetensors",
                "/dev/zero",
                "/etc/passwd",
                "model-00001-of-00003.safetensors",
                "config.json",
                "",
                ".",
                "..",
                "./model-00001-of-00003.safetensors",
                "x/../model-00001-of-00003.safetensors",
                "link.safetensors",
                "pipe",
                "a\0b",
                "\x1b[31m.safetensors",
                "model-00001-of-00003.bin",
                "MODEL-00001-OF-00003.SAFETENSORS",
                "model.safetensors.index.json",
            ];
            for _ in 0..1 + d.below(3) {
                let key = map.keys().nth(d.below(map.len())).expect("a tensor").clone();
                map.insert(key, json!(d.pick(&names)));
            }
            parsed.to_string().into_bytes()
        }
        _ => json_text(d, seed, base.file("m/config.json")),
    };
    put(d, &mut files, INDEX, text);
    files.insert("s/pipe".into(), Content::Pipe);
    files.insert("s/link.safetensors".into(), Content::Link("../m/model.safetensors"));
    let shard = format!("s/model-0000{}-of-00003.safetensors", 1 + d.below(3));
    match d.below(4) {
        0 => drop(files.remove(&shard)),
        1 => {
            let data = tensors(d, base.file(&shard));
            put(d, &mut files, &shard, data);
        }
        _ => {}
    }
    let verb = *d.pick(&["check", "eval"]);
    let line = format!("{verb} x.toml model.source=s train.0.modules=['attention'] router.aux_loss=0");
    case(files, vec![command(&line, COMPUTES)])
}

fn adapter(base: &'static Base, d: &mut Dice) -> Case {
    const CODES: &[u8] = &[0, 2, 4, 6];
    let (a, m, recipe) = *d.pick(&[("a", "m", "r.toml"), ("b", "x", "x.toml")]);
    let mut files = base.take(&[&format!("{a}/"), &format!("{m}/"), "chat", "rows", recipe]);
    static PEFT: LazyLock<Vec<Vec<u8>>> =
        LazyLock::new(|| seeds("tests/fixtures/reference", "adapter_config.json"));
    if d.below(5) > 1 {
        let path = format!("{a}/adapter_config.json");
        let other = pick(d, &PEFT);
        let text = json_text(d, base.file(&path), other);
        put(d, &mut files, &path, text);
    } else {
        let path = format!("{a}/adapter_model.safetensors");
        let data = tensors(d, base.file(&path));
        put(d, &mut files, &path, data);
    }
    let written = |line: String| Case {
        files: Files::new(),
        commands: vec![command(&line, CODES)],
        after: judge::whole_or_absent,
    };
    let made = match d.below(5) {
        0 => written(format!("merge {a} --base {m} --out o")),
        1 => written(format!("export {a} --base {m} --to {} --out o", d.pick(&["peft-fused", "vllm"]))),
        2 => case(Files::new(), vec![command(&format!("check {recipe} lora.init={a} train=[]"), CODES)]),
        3 => {
            let set = "train=[] run.steps=1 run.output=o data.eval=[]";
            case(Files::new(), vec![command(&format!("run {recipe} lora.init={a} {set}"), CODES)])
        }
        _ => case(Files::new(), vec![command(&format!("eval {recipe} --adapter {a}"), CODES)]),
    };
    Case { files, ..made }
}

fn rows(base: &'static Base, d: &mut Dice) -> Case {
    static SEEDS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let lines = seeds("tests/fixtures/broken-data", ".jsonl");
        let first =
            |text: &Vec<u8>| text.split_inclusive(|b| *b == b'\n').take(6).collect::<Vec<_>>().concat();
        let more = seeds("data/quickstart", ".jsonl");
        [lines, seeds("tests/fixtures/broken-data", ".json"), more.iter().map(first).collect()].concat()
    });
    const GOOD: &[(&str, &str)] = &[
        (
            "messages",
            r#"{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}], "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
        ),
        (
            "messages",
            r#"{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}"#,
        ),
        ("alpaca", r#"{"instruction": "Add", "input": "1 1", "output": "2"}"#),
        ("completion", r#"{"prompt": "a", "completion": "b"}"#),
        ("text", r#"{"text": "Hello world"}"#),
        ("tokens", r#"{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}"#),
    ];
    let mut files = base.take(&["m/", "r.toml"]);
    let (format, good) = *d.pick(GOOD);
    let format = if d.once_in(20) { d.pick(GOOD).0 } else { format };
    let seed = match d.once_in(3) {
        true => pick(d, &SEEDS).to_vec(),
        false => format!("{good}\n{good}\n").into_bytes(),
    };
    let other = pick(d, &SEEDS);
    let data = json_lines(d, &seed, other);
    let name = *d.pick(&["rows.jsonl", "rows.jsonl", "rows.json"]);
    put(d, &mut files, name, data);
    let mut line = format!("data r.toml data.train=[{{source='{name}',format='{format}'}}] data.eval=[]");
    for set in [
        "data.on_bad_row=skip",
        "data.pack=false",
        "data.over_length=drop",
        "data.max_length=4",
        "data.over_length=error",
    ] {
        if d.once_in(5) && !(set.contains("over") && line.contains("over")) {
            line = format!("{line} {set}");
        }
    }
    case(files, vec![command(&line, READS)])
}

/// Data files in formats other than JSON, as written by other programs.
fn tables(base: &'static Base, d: &mut Dice) -> Case {
    static SEEDS: LazyLock<Vec<(String, Vec<u8>)>> = LazyLock::new(|| {
        let of = |end: &str| named_seeds("tests/fixtures/tables", end);
        let mut all = [".csv", ".tsv", ".txt", ".gz", ".zst"].map(of).concat();
        // Parquet is the most complex format, so it is chosen more often.
        (0..3).for_each(|_| all.extend(of(".parquet")));
        // The data files of saved folders have no format in their names.
        (0..2).for_each(|_| {
            all.extend(of(".arrow").into_iter().filter(|(name, _)| !name.starts_with("data-")))
        });
        all
    });
    let mut files = base.take(&["m/", "r.toml"]);
    let (name, seed) = d.pick(&SEEDS);
    let (mut data, other) = (seed.clone(), &d.pick(&SEEDS).1);
    bytes(d, &mut data, other);
    let format = name.split('.').next().unwrap_or_default();
    put(d, &mut files, name, data);
    let skip = if d.once_in(3) { " data.on_bad_row=skip" } else { "" };
    let line = format!("data r.toml data.train=[{{source='{name}',format='{format}'}}] data.eval=[]{skip}");
    case(files, vec![command(&line, READS)])
}

fn checkpoint(base: &'static Base, d: &mut Dice) -> Case {
    let mut files = base.take(&["m/", "chat", "r.toml", "runs/r/"]);
    let mut steps = vec![1 + d.below(2)];
    if d.once_in(4) {
        steps = vec![1, 2];
    }
    let line = "run r.toml --resume";
    if d.once_in(3) {
        // Damages a checkpoint, but keeps the marker consistent.
        let step = *d.pick(&["1", "2"]);
        let dir = format!("runs/r/checkpoints/step-0000000{step}");
        let name = *d.pick(&["state.json", "weights.safetensors", "optimizer.safetensors"]);
        let old = base.file(&format!("{dir}/{name}"));
        let new = if name == "state.json" {
            json_text(d, old, base.file("m/config.json"))
        } else {
            tensors(d, old)
        };
        let manifest = format!("{dir}/manifest.json");
        let mut parsed: Value = serde_json::from_slice(base.file(&manifest)).expect("a manifest");
        for f in parsed["files"].as_array_mut().expect("files").iter_mut().filter(|f| f["name"] == name) {
            f["bytes"] = json!(new.len());
            f["blake3"] = json!(blake3::hash(&new).to_hex().to_string());
        }
        files.insert(format!("{dir}/{name}"), Content::bytes(new));
        let text = format!("{parsed:#}\n").into_bytes();
        files.insert(
            format!("{dir}/COMPLETE"),
            Content::bytes(format!("ft checkpoint 1\n{}\n", blake3::hash(&text).to_hex())),
        );
        files.insert(manifest, Content::bytes(text));
        return case(files, vec![command(line, &[0, 2, 4, 5, 6])]);
    }
    for step in steps {
        let dir = format!("runs/r/checkpoints/step-0000000{step}");
        let names: Vec<String> = files.keys().filter(|p| p.starts_with(&dir)).cloned().collect();
        for _ in 0..1 + d.below(2) {
            let name = d.pick(&names).clone();
            let old = base.file(&name).to_vec();
            let other = base.file(d.pick(&names).as_str()).to_vec();
            let new = match (d.below(4), name.ends_with("json"), name.ends_with("safetensors")) {
                (0, ..) => {
                    files.remove(&name);
                    continue;
                }
                (1, ..) => other,
                (_, true, _) => json_text(d, &old, &other),
                (_, _, true) => tensors(d, &old),
                _ => {
                    let mut new = old;
                    bytes(d, &mut new, &other);
                    new
                }
            };
            put(d, &mut files, &name, new);
        }
    }
    Case { files, commands: vec![command(line, &[0, 5])], after: judge::same_result }
}

fn metrics(base: &'static Base, d: &mut Dice) -> Case {
    const METRICS: &str = "runs/r/metrics.jsonl";
    let mut files = base.take(&["m/", "chat", "r.toml", "runs/r/"]);
    let whole = base.file(METRICS);
    let mut data = json_lines(d, whole, base.file("m/config.json"));
    if d.once_in(4) {
        data = json_lines(d, &data, whole);
    }
    put(d, &mut files, METRICS, data);
    if d.once_in(4) {
        return Case {
            files,
            commands: vec![command("run r.toml --resume", &[0, 5])],
            after: judge::same_result,
        };
    }
    Case { files, commands: vec![command("report runs/r", &[0, 5])], after: judge::no_script }
}

/// KiB of address space required by the system's loader to start the program: the binary and its libraries.
pub fn least_memory() -> usize {
    let binary = std::fs::metadata(env!("CARGO_BIN_EXE_ft")).map_or(0, |m| m.len());
    usize::try_from(binary >> 10).unwrap_or(0) + 50_000
}

/// KiB of stack, and number of descriptors, required likewise.
pub const LEAST_STACK: usize = 64;
pub const LEAST_FILES: usize = 4;

/// Good files under low limits on memory, stack, file size or descriptors.
fn limits(base: &'static Base, d: &mut Dice) -> Case {
    let lines = [
        "check r.toml",
        "plan r.toml",
        "data r.toml",
        "eval r.toml",
        "run r.toml run.output=o run.steps=1",
        "run r.toml --resume",
        "merge a --base m --out o",
        "quantize m --out o",
        "report runs/r",
        "eval r.toml --adapter a",
        "export b --base x --to peft-fused --out o",
        "eval r.toml model.source=q",
    ];
    let limit = match d.below(4) {
        // Below these, the system's loader cannot start the program; see
        // `limits_that_the_program_starts_under`.
        0 => format!("ulimit -v {}", least_memory() + d.below(1_000_000)),
        1 => format!("ulimit -n {}", LEAST_FILES + d.below(30)),
        2 => format!("ulimit -f {}", d.below(200)),
        _ => format!("ulimit -s {}", LEAST_STACK << d.below(8)),
    };
    let mut c = command(d.pick::<&str>(&lines), &[0, 2, 3, 4, 5, 8]);
    c.limits = Some(limit);
    case(base.all().clone(), vec![c])
}
