//! Writes recipes: the resolved recipe of a run folder, and the keys compared on resume.

use crate::keys::{Formatted, Keys, Recipe, Unset, find_key};
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
    "data.drop_share", // refuses data, and changes none
    "generate.",
    "run.eval_every",
    "run.save_every",
    "run.eval_at_start",
    "run.keep",
    "run.keep_best",
    "run.best",
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
    /// Keys without a value become comments on the default behavior.
    pub fn to_toml(&self) -> String {
        let head = "# The resolved recipe: every key, with the defaults filled in.\n";
        self.toml_of(head, |_, _| true)
    }

    /// The keys with values at these dotted paths as TOML, in documentation order.
    pub fn to_toml_of(&self, paths: &[String]) -> String {
        let wanted = |path: &str, has_value| has_value && paths.iter().any(|p| p == path);
        self.toml_of("", wanted).trim_start().to_string()
    }

    /// Dotted paths of the keys set by the recipe file or the command line, in documentation order.
    pub fn given(&self) -> Vec<String> {
        self.keys().into_iter().map(|(path, _)| path).filter(|path| self.places.contains_key(path)).collect()
    }

    /// The resolved recipe's keys with values, by dotted path, as TOML.
    pub fn keys(&self) -> Vec<(String, String)> {
        let key = |prefix: &str, (key, value): (&str, Option<String>)| Some((join(prefix, key), value?));
        let blocks = self.blocks().into_iter();
        blocks.flat_map(|b| b.keys.into_iter().filter_map(move |k| key(&b.prefix, k))).collect()
    }

    fn toml_of(&self, head: &str, wanted: impl Fn(&str, bool) -> bool) -> String {
        let mut out = head.to_string();
        for Block { header, prefix, mut keys } in self.blocks() {
            keys.retain(|(key, value)| wanted(&join(&prefix, key), value.is_some()));
            if !header.is_empty() && !keys.is_empty() {
                let _ = write!(out, "\n{header}\n");
            }
            let width = keys.iter().map(|(k, _)| k.len()).max().unwrap_or(0);
            for (key, value) in &keys {
                let _ = match value {
                    Some(value) => writeln!(out, "{key:<width$} = {value}"),
                    None => writeln!(out, "# {key}: {}", without(&join(&prefix, key))),
                };
            }
        }
        out
    }

    /// The keys with influence on the computed results, by dotted path, with values as TOML.
    ///
    /// Two runs with equal maps, data, model and tokenizer compute the same. A resume compares the maps. A key without
    /// a value maps to `(default)`: both maps have the same scalar keys.
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

    /// All tables in documentation order, keys without effect left out.
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
                _ if self.is_idle(&path) || self.is_replaced(&path) => {}
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

    /// Whether another key is given in place of the one at `path`.
    fn is_replaced(&self, path: &str) -> bool {
        match path {
            "run.epochs" => self.run.steps.is_some(),
            "run.steps" => self.run.steps.is_none(),
            "optimizer.warmup_steps" => self.optimizer.warmup_ratio.is_some(),
            "optimizer.warmup_ratio" => self.optimizer.warmup_ratio.is_none(),
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
