//! Test helper: a folder to run `ft` in, and test inputs.

use assert_cmd::Command;
use candle_core::{DType, Device, Tensor};
use ft::files::TensorFiles;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

/// Path of the binary.
pub const FT: &str = env!("CARGO_BIN_EXE_ft");

/// Variables of launchers, and keys, by the start of their names: only a test gives them to a command.
const LAUNCHERS: [&str; 18] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_",
    "NNODES",
    "NODE_RANK",
    "GROUP_RANK",
    "NPROC_PER_NODE",
    "PET_",
    "TORCHELASTIC_",
    "JOB_COMPLETION_INDEX",
    "OMPI_COMM_",
    "PMI_",
    "MPI_LOCAL",
    "SLURM_",
    "FT_KEY",
    "FT_API_KEY",
];

/// Root of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Folder of a fixture case.
pub fn reference(case: &str) -> String {
    repository().join("tests/fixtures/reference").join(case).display().to_string()
}

/// A temporary folder with data, and without network access to the hub.
pub struct World(tempfile::TempDir);

/// Outcome of a command.
pub struct Ran {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ran {
    /// The output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {}", self.err))
    }

    /// Loss from the output of `ft eval --json`.
    #[track_caller]
    pub fn loss(&self) -> f64 {
        self.json()["loss"].as_f64().expect("a loss")
    }
}

impl World {
    /// Creates `rows.jsonl` and `eval.jsonl`: token ids below 64, uneven lengths, some tokens without a
    /// target.
    pub fn new() -> Self {
        let w = Self(tempfile::tempdir().expect("a folder"));
        w.write("rows.jsonl", rows(40, 1));
        w.write("eval.jsonl", rows(6, 2));
        w
    }

    /// As [`World::new`], with the model `tiny` and the recipe r.toml of these rules.
    pub fn tiny(rules: &str) -> Self {
        let w = Self::new();
        w.config("tiny", Value::Null);
        w.write("r.toml", recipe(rules));
        w
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(path, text).expect("written");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    #[track_caller]
    pub fn text(&self, name: &str) -> String {
        String::from_utf8(self.read(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    #[track_caller]
    pub fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.read(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    /// Creates a folder with only `config.json`, for random weights.
    pub fn config(&self, name: &str, extra: Value) {
        let base = json!({
            "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128,
            "tie_word_embeddings": false, "initializer_range": 0.1, "torch_dtype": "float32",
        });
        self.write(&format!("{name}/config.json"), merged(base, &extra).to_string());
    }

    /// Copies the files of a folder.
    pub fn copy(&self, from: impl AsRef<Path>, to: &str) {
        for entry in std::fs::read_dir(from).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            self.write(&format!("{to}/{name}"), std::fs::read(path).expect("a file"));
        }
    }

    /// Adds the tokenizer of `tests/fixtures/tiny-tokenizer` to a model's folder.
    pub fn tokenizer(&self, name: &str) {
        for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            let path = repository().join("tests/fixtures/tiny-tokenizer").join(file);
            self.write(&format!("{name}/{file}"), std::fs::read(path).expect("a tokenizer"));
        }
    }

    /// Runs a command in this folder.
    pub fn command(&self, args: &[&str]) -> std::process::Command {
        command(self.0.path(), args)
    }

    pub fn ft(&self, args: &[&str]) -> Ran {
        ran(Command::from_std(self.command(args)).output().expect("started"))
    }

    /// As [`World::ft`], with text on stdin.
    pub fn ft_with(&self, args: &[&str], stdin: &str) -> Ran {
        ran(Command::from_std(self.command(args)).write_stdin(stdin).output().expect("started"))
    }

    /// As [`World::ft`], for commands that must succeed. Returns the output.
    #[track_caller]
    pub fn ok(&self, args: &[&str]) -> Ran {
        let r = self.ft(args);
        assert_eq!(r.code, 0, "{args:?}\n{}{}", r.out, r.err);
        r
    }

    /// Starts a command in the background.
    pub fn start(&self, args: &[&str]) -> Child {
        let mut c = self.command(args);
        c.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started")
    }

    /// Runs r.toml in the folder `half` to step 8, with a checkpoint every 4 steps; removes the last checkpoint and the
    /// adapter, and resumes.
    pub fn resumed_in_half(&self, set: &[&str]) {
        let half = [set, &["run.output=half", "run.save_every=4"]].concat();
        self.ok(&[&["run", "r.toml", "--overwrite"], &half[..]].concat());
        for folder in ["checkpoints/step-00000008", "adapter"] {
            std::fs::remove_dir_all(self.path("half").join(folder)).expect("removed");
        }
        self.ok(&[&["run", "r.toml", "--resume"], &half[..]].concat());
    }

    /// Steps of a run: step, loss, gradient norm and learning rate, as bits.
    pub fn steps(&self, run: &str) -> Vec<(u64, u64, u64, u64)> {
        let bits = |v: &Value| v.as_f64().map_or(0, f64::to_bits);
        self.events(run, "step")
            .iter()
            .map(|e| {
                (e["step"].as_u64().unwrap_or(0), bits(&e["loss"]), bits(&e["grad_norm"]), bits(&e["lr"]))
            })
            .collect()
    }

    /// Events of one kind in the metrics of a run, without an incomplete last line.
    pub fn events(&self, run: &str, kind: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap_or_default();
        let events = text.lines().filter_map(|l| serde_json::from_str(l).ok());
        events.filter(|e: &Value| e["event"] == kind).collect()
    }

    /// Loss of the first step of a run.
    pub fn first_loss(&self, run: &str) -> f64 {
        self.events(run, "step").first().and_then(|e| e["loss"].as_f64()).expect("a first step")
    }

    /// Names of the complete checkpoints of a run.
    pub fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(run).join("checkpoints")).into_iter().flatten().flatten();
        let whole = entries.filter(|e| e.path().join("COMPLETE").is_file());
        let mut names: Vec<String> = whole.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// A command in a folder that also has its caches. A first start on a card measures nothing: each test would.
pub fn command(folder: &Path, args: &[&str]) -> std::process::Command {
    let mut c = std::process::Command::new(FT);
    c.args(args).current_dir(folder).env("NO_COLOR", "1").env("HF_HUB_OFFLINE", "1");
    c.env("HF_HOME", folder.join("hf")).env_remove("HF_TOKEN").env_remove("HF_HUB_CACHE");
    c.env("FT_CACHE", folder.join("cache")).env("FT_PROBE", "0");
    for (name, _) in std::env::vars_os() {
        if LAUNCHERS.iter().any(|start| name.to_string_lossy().starts_with(start)) {
            c.env_remove(name);
        }
    }
    c
}

/// Sets and removes the variables of a command in another one, too.
pub fn same_variables(c: &mut std::process::Command, as_in: &std::process::Command) {
    for (name, value) in as_in.get_envs() {
        match value {
            Some(value) => c.env(name, value),
            None => c.env_remove(name),
        };
    }
}

/// An object with the keys of another, which replace its own.
pub fn merged(mut base: Value, more: &Value) -> Value {
    base.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    base
}

/// Config keys of a mixture of four experts.
pub fn mixture() -> Value {
    json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "norm_topk_prob": true})
}

/// Writes the quickstart's recipe, with absolute paths, as q.toml. Returns the folder of the model.
pub fn quickstart(w: &World) -> String {
    let text = std::fs::read_to_string(repository().join("recipes/quickstart.toml")).expect("a recipe");
    w.write("q.toml", text.replace("\"data/", &format!("\"{}/data/", repository().display())));
    repository().join("data/model").display().to_string()
}

pub fn ran(o: Output) -> Ran {
    let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
    Ran { code: o.status.code().unwrap_or(-1), out: text(&o.stdout), err: text(&o.stderr) }
}

/// Random numbers for tests: a linear congruential generator, for reproducible runs.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Rows of token ids below 64.
pub fn rows(n: usize, seed: u64) -> String {
    let mut d = Dice(seed);
    let mut out = String::new();
    for _ in 0..n {
        let len = 5 + d.below(12);
        let ids: Vec<u64> = (0..len).map(|_| d.below(64)).collect();
        let labels: Vec<i64> = ids
            .iter()
            .enumerate()
            .map(|(i, id)| if i < 2 || d.below(5) == 0 { -100 } else { *id as i64 })
            .collect();
        // At least one token is a target, for any random numbers.
        let labels = [&labels[..labels.len() - 1], &[ids[ids.len() - 1] as i64]].concat();
        out += &format!("{}\n", json!({"input_ids": ids, "labels": labels}));
    }
    out
}

/// A recipe: a tiny model with random weights, rows of tokens, six steps, on the CPU. `rules` are
/// `[[train]]` tables.
pub fn recipe(rules: &str) -> String {
    format!(
        r#"
[model]
source = "tiny"
weights = "random"

{rules}

[data]
train = [{{ source = "rows.jsonl", format = "tokens" }}]
eval = [{{ source = "eval.jsonl", format = "tokens" }}]
max_length = 32

[run]
steps = 6
batch_rows = 4
micro_rows = 2
device = "cpu"

[optimizer]
lr = 1e-2
weight_decay = 0.01
warmup_steps = 2
"#
    )
}

/// A recipe of 8 steps of 4 rows, as PyTorch trained the fixtures: the parts before `[data]`, and its sources.
pub fn as_fixture(start: &str, data: &str) -> String {
    format!(
        "{start}\n[data]\n{data}\nmax_length = 64\nshuffle = false\npack = false\n\
         [run]\nseed = 1\nsteps = 8\nbatch_rows = 4\nmicro_rows = 2\ndevice = \"cpu\"\noutput = \"out\"\n\
         [optimizer]\nlr = 2e-3\nweight_decay = 0.01\ndecay = \"all\"\nwarmup_steps = 2\n"
    )
}

/// All variants of LoRA at once, with dropout.
pub const LORA: &str = r#"
[lora]
rank = 4
dropout = 0.1
[[train]]
modules = ["attention"]
dora = true
[[train]]
modules = ["mlp"]
rslora = true
rank = 3
[[train]]
modules = ["norms"]
method = "full"
"#;

/// Everything in full.
pub const FULL: &str = r#"
[[train]]
modules = ["attention", "mlp", "norms", "embedding", "head"]
method = "full"
"#;

/// All files below a folder, with their contents.
pub fn content(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(d) = open.pop() {
        for e in std::fs::read_dir(&d).unwrap_or_else(|e| panic!("{}: {e}", d.display())) {
            let path = e.expect("an entry").path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.push((path.clone(), std::fs::read(&path).expect("a file")));
            }
        }
    }
    found.sort();
    found
}

/// Rows of a reference case or another fixture, in the order of the batches.
pub fn rows_of(folder: &Path) -> String {
    let files = TensorFiles::open_file(&folder.join("batches.safetensors")).expect("batches");
    let get = |name: String| -> Vec<Vec<i64>> {
        files.tensor(&name, DType::I64, &Device::Cpu).expect("rows").to_vec2().expect("a matrix")
    };
    let mut out = String::new();
    for micro in ["batch0.micro0", "batch0.micro1", "batch1.micro0", "batch1.micro1"] {
        let [ids, labels, mask] =
            ["input_ids", "labels", "attention_mask"].map(|n| get(format!("{micro}.{n}")));
        for ((ids, labels), mask) in ids.iter().zip(&labels).zip(&mask) {
            let n = mask.iter().sum::<i64>() as usize;
            out += &format!("{}\n", json!({"input_ids": ids[..n], "labels": labels[..n]}));
        }
    }
    out
}

/// Relative L2 distance of two tensors.
pub fn apart(a: &Tensor, b: &Tensor) -> f64 {
    let norm = |t: Tensor| -> f64 {
        let t = t.to_dtype(DType::F64).and_then(|t| t.sqr()?.sum_all()?.to_scalar::<f64>());
        t.expect("a number").sqrt()
    };
    norm((a - b).expect("one shape")) / norm(b.clone()).max(f64::MIN_POSITIVE)
}

/// Number of kills of a test: `FT_KILLS`, else 100 in the nightly tier, else `few`.
pub fn kills(few: u64) -> u64 {
    let given = std::env::var("FT_KILLS").ok().and_then(|n| n.parse().ok());
    given.unwrap_or(if nightly() { 100 } else { few })
}

/// Cases of a slow test: the first `n` at each push, all in the nightly tier.
pub fn few(n: usize) -> usize {
    if nightly() { usize::MAX } else { n }
}

/// Layouts for case `at` of a grid of cases and layouts: every second one at each push, so that two cases in a row have
/// all; all in the nightly tier.
pub fn alternate<T>(at: usize, layouts: impl IntoIterator<Item = T>) -> impl Iterator<Item = T> {
    let every = if nightly() { 1 } else { 2 };
    layouts.into_iter().skip(at % every).step_by(every)
}

/// Whether this is the nightly tier (`FT_TIER=nightly`): all cases and sizes of the slow tests, more kills.
pub fn nightly() -> bool {
    std::env::var("FT_TIER").is_ok_and(|tier| tier == "nightly")
}
