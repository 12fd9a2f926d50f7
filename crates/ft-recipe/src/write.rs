//! The recipe as text again: the resolved recipe of a run folder, and the keys that a resume compares.

use super::keys::Recipe;
use super::table::{Keys, Written};
use super::tree::join;
use super::types::Method;
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
        self.keys.iter().map(|(k, _)| join(&self.prefix, k)).collect()
    }
}

/// Keys (or whole tables, ending in a dot) that do not change what a run computes.
const NOT_MATHEMATICS: &[&str] = &[
    "name",
    "model.cache",
    "lora.", // rules hold it, resolved; lora.init is kept by name below
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
    "optimizer.master", // the identity has what it comes to
    "parallel.",        // ranks split what is computed; only the order of sums is another
    "serve.",
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

    /// Every table with every key that says something, in the order of the documentation.
    pub(super) fn blocks(&self) -> Vec<Block> {
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
                Written::Nothing => blocks[at].keys.push((key, None)),
                Written::Value(value) => blocks[at].keys.push((key, Some(value))),
                Written::Table(keys) => self.add(blocks, format!("[{path}]"), &path, keys),
                Written::Tables(list) => {
                    for (i, keys) in list.into_iter().enumerate() {
                        self.add(blocks, format!("[[{path}]]"), &format!("{path}.{i}"), keys);
                    }
                }
            }
        }
    }

    /// Whether a key means nothing beside the others, so that it would be refused when it is read again.
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
