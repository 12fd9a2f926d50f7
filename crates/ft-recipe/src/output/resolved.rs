//! Writes recipes: the resolved recipe of a run folder, and the keys compared on resume.

use crate::keys::{Formatted, Keys, Method, Recipe, Unset, find_key};
use crate::syntax::join;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A table of the resolved recipe.
pub(crate) struct Block {
    /// TOML header; empty for top-level keys.
    header: String,
    /// Dotted path of the table.
    prefix: String,
    /// Keys with values as TOML; `None` for keys without a value.
    keys: Vec<(&'static str, Option<String>)>,
}

#[cfg(test)]
impl Block {
    /// Dotted paths of the keys.
    pub fn paths(&self) -> Vec<String> {
        self.keys.iter().map(|(k, _)| join(&self.prefix, k)).collect()
    }
}

/// Keys, or tables (ending in a dot), without influence on the computed results.
const NOT_MATHEMATICS: &[&str] = &[
    "name",
    "model.cache",
    "lora.", // resolved into the rules; lora.init is added below
    "data.eval",
    "data.cache",
    "generate.",
    "run.eval_every",
    "run.save_every",
    "run.eval_at_start",
    "run.keep",
    "run.keep_best",
    "run.patience",
    "run.output",
    "run.device",
    "memory.",
    "optimizer.in_backward",
    "optimizer.master", // the checkpoint identity has the resolved value
    "parallel.",        // affects only the order of summation
    "serve.",
    "log.",
];

impl Recipe {
    /// The resolved recipe as TOML, with all defaults filled in. Parses to an equal recipe.
    ///
    /// Keys without a value become comments that describe the default behavior.
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
                    None => writeln!(out, "# {key}: {}", without(&join(&block.prefix, key))),
                };
            }
        }
        out
    }

    /// The keys with influence on the computed results, by dotted path, with values as TOML.
    ///
    /// Two runs with equal maps, data, model and tokenizer compute the same. A resume compares the maps.
    /// A key without a value maps to `(default)`, so that both maps have the same scalar keys.
    pub fn math_keys(&self) -> BTreeMap<String, String> {
        let mut map = BTreeMap::new();
        for block in self.blocks() {
            for (key, value) in block.keys {
                let path = join(&block.prefix, key);
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

    /// All tables in documentation order, without keys that have no effect.
    pub(crate) fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        self.add(&mut blocks, String::new(), "", self.write());
        blocks
    }

    fn add(&self, blocks: &mut Vec<Block>, header: String, prefix: &str, keys: Keys) {
        let at = blocks.len();
        blocks.push(Block { header, prefix: prefix.to_string(), keys: Vec::new() });
        for (key, written) in keys {
            let path = join(prefix, key);
            match written {
                _ if self.is_idle(prefix, key) => {}
                Formatted::Nothing => blocks[at].keys.push((key, None)),
                Formatted::Value(value) => blocks[at].keys.push((key, Some(value))),
                Formatted::Table(keys) => self.add(blocks, format!("[{path}]"), &path, keys),
                Formatted::Tables(list) => {
                    for (i, keys) in list.into_iter().enumerate() {
                        self.add(blocks, format!("[[{path}]]"), &format!("{path}.{i}"), keys);
                    }
                }
            }
        }
    }

    /// Whether a key has no effect next to the present keys, and would be rejected when the file is
    /// parsed again.
    fn is_idle(&self, prefix: &str, key: &str) -> bool {
        let lora = ["rank", "alpha", "dropout", "rslora", "dora"].contains(&key);
        let rule = prefix.strip_prefix("train.").and_then(|i| self.train.get(i.parse::<usize>().ok()?));
        match (prefix, key, rule) {
            ("lora", _, _) => lora && !self.uses_lora_defaults(),
            (_, "lr_scale", Some(rule)) => rule.is(Method::Freeze),
            (_, "method" | "layers", Some(rule)) => rule.is_of_tokens(),
            (_, "tokens", Some(rule)) => !rule.is_of_tokens(),
            (_, _, Some(rule)) => lora && !rule.is(Method::Lora),
            ("run", "epochs", _) => self.run.steps.is_some(),
            ("run", "steps", _) => self.run.steps.is_none(),
            ("optimizer", "lr_scale_b", _) => !self.uses_lora_defaults(),
            ("optimizer", "galore_rank" | "galore_gap" | "galore_scale", _) => {
                !self.optimizer.name.projects()
            }
            ("optimizer", "warmup_steps", _) => self.optimizer.warmup_ratio.is_some(),
            ("optimizer", "warmup_ratio", _) => self.optimizer.warmup_ratio.is_none(),
            _ => false,
        }
    }
}

/// The default behavior without the key at a dotted path; empty if the key has a default value.
fn without(path: &str) -> &'static str {
    match find_key(path).map(|key| key.default) {
        Some(Unset::Absent(text)) => text,
        _ => "",
    }
}
