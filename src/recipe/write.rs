//! The recipe as text again: the resolved recipe of a run folder, and the keys that a resume compares.

use super::tree::{quote, quote_key};
use super::types::*;
use super::values::written_bytes;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A table of the resolved recipe.
pub(super) struct Block {
    /// The TOML header; empty for the recipe's own keys.
    header: String,
    /// The dotted path of the table.
    prefix: String,
    /// Keys with their values as TOML, `None` where a key has none.
    keys: Vec<(&'static str, Option<String>)>,
}

#[cfg(test)]
impl Block {
    /// The dotted paths of its keys, entries of lists as the first one.
    pub fn paths(&self) -> Vec<String> {
        self.keys.iter().map(|(k, _)| super::tree::join(&self.prefix, k)).collect()
    }
}

/// Keys (or whole tables, ending in a dot) that do not change what a run computes.
const NOT_MATHEMATICS: &[&str] = &[
    "name",
    "model.cache",
    "lora.", // rules hold it, resolved; lora.init is kept by name below
    "data.eval",
    "run.eval_every",
    "run.save_every",
    "run.eval_at_start",
    "run.keep",
    "run.output",
    "run.device",
    "memory.",
    "parallel.comm",
    "parallel.timeout",
    "log.",
];

impl Recipe {
    /// The resolved recipe as TOML: every default filled in, and it reads back as an equal recipe.
    ///
    /// Keys that have no value stand as comments that say what happens instead.
    pub fn to_toml(&self) -> String {
        let mut out = String::from("# The resolved recipe: every key, with the defaults filled in.\n");
        for block in self.blocks() {
            if !block.header.is_empty() {
                let _ = write!(out, "\n{}\n", block.header);
            }
            let width = block.keys.iter().map(|(k, _)| k.len()).max().unwrap_or(0);
            for (key, value) in &block.keys {
                let _ = match value {
                    Some(value) => writeln!(out, "{key:<width$} = {value}"),
                    None => writeln!(out, "# {key}: {}", super::schema::instead(&block.prefix, key)),
                };
            }
        }
        out
    }

    /// The keys that change the mathematics of a run, by dotted path, with their values as TOML.
    ///
    /// Two runs with equal maps (and equal data, model and tokenizer) compute the same; a resume compares
    /// them. A key that has no value is there as `(default)`, so that both sides have the same scalar keys.
    pub fn math_keys(&self) -> BTreeMap<String, String> {
        let mut map = BTreeMap::new();
        for block in self.blocks() {
            for (key, value) in block.keys {
                let path = super::tree::join(&block.prefix, key);
                let out = |p: &&str| {
                    path.starts_with(*p)
                        && (p.ends_with('.')
                            || path[p.len()..].is_empty()
                            || path[p.len()..].starts_with('.'))
                };
                if path == "lora.init" || !NOT_MATHEMATICS.iter().any(out) {
                    map.insert(path, value.unwrap_or_else(|| "(default)".into()));
                }
            }
        }
        map
    }

    /// Every table with every key, in the order of the documentation.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let mut blocks = vec![
            block(
                "",
                vec![
                    ("version", Some(self.version.to_string())),
                    ("name", text(&self.name)),
                    ("task", text(self.task.word())),
                ],
            ),
            block("model", self.model.keys()),
            // Without a rule that uses them, the defaults of rules would be refused when read again.
            block("lora", {
                let mut keys = if self.uses_lora_defaults() { self.lora.spec.keys() } else { Vec::new() };
                keys.push(("init", text(self.lora.init.as_deref().unwrap_or("default"))));
                keys
            }),
        ];
        blocks.extend(self.train.iter().enumerate().map(|(i, r)| item("train", i, r.keys())));
        blocks.push(block(
            "router",
            vec![("aux_loss", number(self.router.aux_loss)), ("z_loss", number(self.router.z_loss))],
        ));
        blocks.push(block("data", self.data.keys()));
        blocks.extend(self.data.train.iter().enumerate().map(|(i, s)| item("data.train", i, s.keys())));
        blocks.extend(self.data.eval.iter().enumerate().map(|(i, s)| item("data.eval", i, s.keys())));
        blocks.push(block("run", self.run.keys()));
        blocks.push(block("optimizer", self.optimizer.keys()));
        blocks.push(block("memory", self.memory.keys()));
        blocks.push(block("parallel", self.parallel.keys()));
        blocks.push(block(
            "log",
            vec![
                ("tensorboard", Some(self.log.tensorboard.to_string())),
                ("sample", self.log.sample.as_deref().and_then(text)),
            ],
        ));
        blocks
    }
}

type Keys = Vec<(&'static str, Option<String>)>;

fn block(name: &str, keys: Keys) -> Block {
    let header = if name.is_empty() { String::new() } else { format!("[{name}]") };
    Block { header, prefix: name.to_string(), keys }
}

fn item(list: &str, i: usize, keys: Keys) -> Block {
    Block { header: format!("[[{list}]]"), prefix: format!("{list}.{i}"), keys }
}

fn text(s: &str) -> Option<String> {
    Some(quote(s))
}

/// Rust's shortest form that reads back as the same number, which is TOML too.
fn number(x: f64) -> Option<String> {
    Some(format!("{x:?}"))
}

fn count(n: usize) -> Option<String> {
    Some(n.to_string())
}

fn flag(b: bool) -> Option<String> {
    Some(b.to_string())
}

fn json(value: &serde_json::Value) -> String {
    match value {
        // TOML has no null; nothing that was read from TOML holds one.
        serde_json::Value::Null => "\"\"".into(),
        serde_json::Value::Bool(b) => b.to_string(),
        serde_json::Value::Number(n) if n.is_f64() => format!("{:?}", n.as_f64().unwrap_or_default()),
        serde_json::Value::Number(n) => n.to_string(),
        serde_json::Value::String(s) => quote(s),
        serde_json::Value::Array(a) => format!("[{}]", a.iter().map(json).collect::<Vec<_>>().join(", ")),
        serde_json::Value::Object(m) => object(m),
    }
}

fn object(map: &serde_json::Map<String, serde_json::Value>) -> String {
    inline(map.iter().map(|(k, v)| (k.as_str(), json(v))))
}

fn inline<'k>(pairs: impl Iterator<Item = (&'k str, String)>) -> String {
    let pairs: Vec<String> = pairs.map(|(k, v)| format!("{} = {v}", quote_key(k))).collect();
    if pairs.is_empty() { "{}".into() } else { format!("{{ {} }}", pairs.join(", ")) }
}

impl Model {
    fn keys(&self) -> Keys {
        vec![
            ("source", text(&self.source)),
            ("revision", text(&self.revision)),
            ("dtype", self.dtype.and_then(|d| text(d.word()))),
            ("quantize", text(self.quantize.word())),
            ("cache", self.cache.as_ref().and_then(|p| text(&p.to_string_lossy()))),
            ("weights", text(self.weights.word())),
            ("override", Some(object(&self.overrides))),
        ]
    }
}

impl LoraSpec {
    fn keys(&self) -> Keys {
        vec![
            ("rank", count(self.rank)),
            ("alpha", number(self.alpha)),
            ("dropout", number(self.dropout)),
            ("rslora", flag(self.rslora)),
            ("dora", flag(self.dora)),
        ]
    }
}

impl Rule {
    /// Only what the method uses: a rank of a rule that trains in full would be refused when read again.
    fn keys(&self) -> Keys {
        let modules: Vec<String> = self.modules.iter().map(|m| quote(m)).collect();
        let layers = match &self.layers {
            None => quote("all"),
            Some(LayerSet::Last(n)) => quote(&format!("-{n}:")),
            Some(LayerSet::Indices(set)) => indices(set),
        };
        let mut keys = vec![
            ("modules", Some(format!("[{}]", modules.join(", ")))),
            ("layers", Some(layers)),
            ("experts", self.experts.as_ref().map(indices)),
            ("method", text(self.method.word())),
        ];
        if self.method == Method::Lora {
            keys.extend(self.spec.keys());
        }
        if self.method != Method::Freeze {
            keys.push(("lr_scale", number(self.lr_scale)));
        }
        keys
    }
}

fn indices(set: &IndexSet) -> String {
    match set {
        IndexSet::Range(0, None) => quote("0-"),
        IndexSet::Range(a, None) => quote(&format!("{a}-")),
        IndexSet::Range(a, Some(b)) => quote(&format!("{a}-{b}")),
        IndexSet::List(list) => format!("{list:?}"),
    }
}

impl Data {
    fn keys(&self) -> Keys {
        let mut keys = Vec::new();
        if self.train.is_empty() {
            keys.push(("train", Some("[]".into())));
        }
        if self.eval.is_empty() {
            keys.push(("eval", Some("[]".into())));
        }
        keys.extend([
            ("max_length", count(self.max_length)),
            ("over_length", text(self.over_length.word())),
            ("on_bad_row", text(self.on_bad_row.word())),
            ("pack", flag(self.pack)),
            ("shuffle", flag(self.shuffle)),
            ("mask", self.mask.and_then(|m| text(m.word()))),
            ("chat_template", self.chat_template.as_ref().and_then(|p| text(&p.to_string_lossy()))),
            ("template", Some(object(&self.template))),
        ]);
        keys
    }
}

impl Source {
    fn keys(&self) -> Keys {
        vec![
            ("source", text(&self.source)),
            ("format", text(self.format.word())),
            ("weight", number(self.weight)),
            ("split", self.split.as_deref().and_then(text)),
            ("config", self.config.as_deref().and_then(text)),
            ("fields", Some(inline(self.fields.iter().map(|(k, v)| (k.as_str(), quote(v)))))),
            ("mask", self.mask.and_then(|m| text(m.word()))),
        ]
    }
}

impl Run {
    fn keys(&self) -> Keys {
        let length = match self.length {
            Length::Steps(n) => ("steps", count(n)),
            Length::Epochs(x) => ("epochs", number(x)),
        };
        vec![
            ("seed", Some(self.seed.to_string())),
            length,
            ("batch_rows", count(self.batch_rows)),
            ("micro_rows", if self.micro_auto { text("auto") } else { count(self.micro_rows) }),
            ("clip", number(self.clip)),
            ("eval_every", count(self.eval_every)),
            ("save_every", count(self.save_every)),
            ("eval_at_start", flag(self.eval_at_start)),
            ("keep", count(self.keep)),
            ("output", text(&self.output.to_string_lossy())),
            ("device", text(self.device.word())),
        ]
    }
}

impl Optimizer {
    fn keys(&self) -> Keys {
        let warmup = match self.warmup {
            Warmup::Steps(n) => ("warmup_steps", count(n)),
            Warmup::Ratio(x) => ("warmup_ratio", number(x)),
        };
        vec![
            ("name", text(self.name.word())),
            ("lr", self.lr.and_then(number)),
            ("betas", Some(format!("[{:?}, {:?}]", self.betas[0], self.betas[1]))),
            ("eps", number(self.eps)),
            ("weight_decay", number(self.weight_decay)),
            ("decay", text(self.decay.word())),
            ("schedule", text(self.schedule.word())),
            warmup,
            ("min_lr", number(self.min_lr)),
            ("in_backward", flag(self.in_backward)),
        ]
    }
}

impl Memory {
    fn keys(&self) -> Keys {
        let recompute = match self.recompute {
            Recompute::Auto => quote("auto"),
            Recompute::All => quote("all"),
            Recompute::None => quote("none"),
            Recompute::Layers(n) => n.to_string(),
        };
        let offload: Vec<String> = self.offload.iter().map(|o| quote(o.word())).collect();
        vec![
            ("budget", self.budget.map(written_bytes)),
            ("host_budget", self.host_budget.map(written_bytes)),
            ("disk_budget", self.disk_budget.map(written_bytes)),
            ("recompute", Some(recompute)),
            ("decoded", text(self.decoded.word())),
            ("offload", Some(format!("[{}]", offload.join(", ")))),
            ("pin", flag(self.pin)),
        ]
    }
}

impl Parallel {
    fn keys(&self) -> Keys {
        vec![
            ("data", count(self.data)),
            ("zero", Some(self.zero.to_string())),
            ("tensor", count(self.tensor)),
            ("pipeline", count(self.pipeline)),
            ("expert", count(self.expert)),
            ("context", count(self.context)),
            ("comm", text(self.comm.word())),
            ("timeout", Some(self.timeout.to_string())),
        ]
    }
}
