//! The good files that cases start from: models of a few thousand weights, adapters, data files and a
//! run, created by `ft` itself, and the fixtures.

use super::worker;
use candle_core::{DType, Device};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

/// Contents by path, relative to a case's folder.
pub type Files = BTreeMap<String, Content>;

/// The contents of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    Bytes(Arc<[u8]>),
    /// A symbolic link with this target.
    Link(&'static str),
    Folder,
    Pipe,
}

impl Content {
    pub fn bytes(data: impl Into<Vec<u8>>) -> Self {
        Self::Bytes(data.into().into())
    }
}

/// Root of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The good files.
pub struct Base {
    files: Files,
    /// The adapter after an uninterrupted continuation of the run in `runs/r`.
    pub result: Arc<[u8]>,
}

impl Base {
    /// The instance shared by this process.
    pub fn get() -> &'static Base {
        static BASE: OnceLock<Base> = OnceLock::new();
        BASE.get_or_init(Base::make)
    }

    /// All files.
    pub fn all(&self) -> &Files {
        &self.files
    }

    /// Files with one of these path prefixes.
    pub fn take(&self, prefixes: &[&str]) -> Files {
        let wanted = |path: &String| prefixes.iter().any(|p| path.starts_with(p));
        self.files.iter().filter(|(path, _)| wanted(path)).map(|(p, c)| (p.clone(), c.clone())).collect()
    }

    /// Contents of a file.
    pub fn file(&self, path: &str) -> &[u8] {
        match self.files.get(path) {
            Some(Content::Bytes(bytes)) => bytes,
            _ => panic!("{path} is no file of the base"),
        }
    }

    fn make() -> Base {
        let temporary = tempfile::tempdir().expect("a folder");
        let dir = temporary.path();
        let ft = |args: &str| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ft"));
            worker::environment(command.current_dir(dir).args(args.split(' ')), &dir.join("home"));
            let o = command.output().expect("ft");
            assert!(o.status.success(), "ft {args}: {}", String::from_utf8_lossy(&o.stderr));
        };
        let write = |name: &str, data: &[u8]| write(dir, name, &Content::bytes(data));
        for (name, text) in TEXTS {
            write(name, text.as_bytes());
        }
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            let path = repository().join("tests/fixtures/tiny-tokenizer").join(name);
            write(&format!("m0/{name}"), &std::fs::read(path).expect("a fixture"));
        }
        for (model, recipe) in [("m", "r.toml"), ("x", "x.toml")] {
            let text = std::fs::read_to_string(dir.join(recipe)).expect("a recipe");
            let in_full = text.replace("rank = 2\n", "").replace("dropout = 0.1\n", "");
            write("full.toml", in_full.as_bytes());
            let inner = if model == "x" { "'experts','router'" } else { "'mlp'" };
            ft(&format!(
                "run full.toml run.steps=1 model.weights=random train.0.method=full model.source={model}0 run.output=o{model} \
                 train.0.modules=['attention','norms','embedding','head',{inner}]"
            ));
            std::fs::rename(dir.join(format!("o{model}/model")), dir.join(model)).expect("a model");
        }
        ft("quantize m --out q");
        ft("run r.toml");
        ft("run x.toml run.output=ox2");
        for (from, to) in [("runs/r/adapter", "a"), ("ox2/adapter", "b")] {
            std::fs::rename(dir.join(from), dir.join(to)).expect("an adapter");
        }
        for gone in ["m0", "x0", "om", "ox", "ox2", "home", "runs/r/checkpoints/step-00000003"] {
            std::fs::remove_dir_all(dir.join(gone)).expect(gone);
        }
        std::fs::remove_file(dir.join("full.toml")).expect("full.toml");
        shards(&dir.join("m"), &dir.join("s"));
        let mut files = Files::new();
        read(dir, "", &mut files);
        let Some(Content::Bytes(result)) = files.get("a/adapter_model.safetensors").cloned() else {
            panic!("no adapter");
        };
        Base { files, result }
    }
}

/// Copies the model in `from` as three shards with an index.
fn shards(from: &Path, to: &Path) {
    std::fs::create_dir(to).expect("a folder");
    std::fs::copy(from.join("config.json"), to.join("config.json")).expect("a config");
    let tensors = ft::files::TensorFiles::open_model(from).expect("tensors");
    let of = |name: &str| (name.to_string(), DType::F32, tensors.info(name).expect("a tensor").shape.clone());
    let entries: Vec<_> = tensors.names().map(of).collect();
    let get = |name: &str| Ok(tensors.tensor(name, DType::F32, &Device::Cpu)?);
    ft::files::write_sharded(to, "model", &entries, tensors.total_bytes() / 3 + 1, get).expect("shards");
}

fn read(dir: &Path, prefix: &str, files: &mut Files) {
    for e in std::fs::read_dir(dir.join(prefix)).expect("a folder") {
        let e = e.expect("an entry");
        let name = e.file_name().into_string().expect("a name");
        let path = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        match e.file_type().expect("its kind").is_dir() {
            true => read(dir, &path, files),
            false => drop(files.insert(path, Content::bytes(std::fs::read(e.path()).expect("a file")))),
        }
    }
}

/// Creates a file, link or other entry below `dir`.
pub fn write(dir: &Path, name: &str, content: &Content) {
    let path = dir.join(name);
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    match content {
        Content::Bytes(bytes) => std::fs::write(&path, bytes).expect("written"),
        Content::Link(to) => std::os::unix::fs::symlink(to, &path).expect("linked"),
        Content::Folder => std::fs::create_dir_all(&path).expect("a folder"),
        Content::Pipe => {
            let made = Command::new("mkfifo").arg(&path).status().expect("mkfifo");
            assert!(made.success(), "mkfifo {}", path.display());
        }
    }
}

/// Contents of fixture files in a folder of the repository, by file name suffix, sorted.
pub fn seeds(folder: &str, end: &str) -> Vec<Vec<u8>> {
    named_seeds(folder, end).into_iter().map(|(_, bytes)| bytes).collect()
}

/// Like [`seeds`], with file names.
pub fn named_seeds(folder: &str, end: &str) -> Vec<(String, Vec<u8>)> {
    let mut paths = Vec::new();
    let mut open = vec![repository().join(folder)];
    while let Some(d) = open.pop() {
        for e in std::fs::read_dir(&d).unwrap_or_else(|e| panic!("{}: {e}", d.display())) {
            let path = e.expect("an entry").path();
            match path.is_dir() {
                true => open.push(path),
                false if path.to_string_lossy().ends_with(end) => paths.push(path),
                false => {}
            }
        }
    }
    paths.sort();
    assert!(!paths.is_empty(), "no {end} in {folder}");
    let name = |p: &PathBuf| p.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    paths.iter().map(|p| (name(p), std::fs::read(p).expect("a fixture"))).collect()
}

const TEXTS: &[(&str, &str)] = &[
    (
        "m0/config.json",
        r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 288,
"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": true,
"initializer_range": 0.1, "torch_dtype": "float32", "hidden_act": "silu", "eos_token_id": 284}"#,
    ),
    (
        "x0/config.json",
        r#"{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 16, "intermediate_size": 8,
"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64,
"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
"max_position_embeddings": 128, "tie_word_embeddings": false, "initializer_range": 0.1, "torch_dtype": "float32"}"#,
    ),
    (
        "r.toml",
        r#"[model]
source = "m"
[[train]]
modules = ["attention", "mlp"]
rank = 2
dropout = 0.1
[data]
train = [{ source = "chat.jsonl", format = "messages" }]
eval = [{ source = "chat.jsonl", format = "messages" }]
max_length = 64
[run]
steps = 3
batch_rows = 2
save_every = 1
keep = 9
device = "cpu"
[log]
samples = ["Hello"]
"#,
    ),
    (
        "x.toml",
        r#"[model]
source = "x"
[[train]]
modules = ["attention", "experts", "router"]
rank = 2
[data]
train = [{ source = "rows.jsonl", format = "tokens" }]
eval = [{ source = "rows.jsonl", format = "tokens" }]
max_length = 32
[run]
steps = 2
batch_rows = 2
device = "cpu"
[router]
aux_loss = 0.01
"#,
    ),
    (
        "chat.jsonl",
        r#"{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello world"}]}
{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "the world?"}, {"role": "assistant", "content": "é🦀\nin the world"}]}
{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}
"#,
    ),
    (
        "rows.jsonl",
        "{\"input_ids\": [1, 2, 3, 4, 5, 6]}\n{\"input_ids\": [7, 8, 9, 10], \"labels\": [-100, 8, 9, 10]}\n",
    ),
    ("text.jsonl", "{\"text\": \"Hello the world\"}\n{\"text\": \"é🦀 in <|im_end|> there\"}\n"),
];
