//! Keys and values of other programs, from `foreign.toml`, which describes the entries.

use crate::keys::first_entries;
use crate::syntax::quote;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// A key or value of another program.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Foreign {
    /// Letters of the programs with this key; empty for a value.
    #[serde(default)]
    pub of: String,
    /// Dotted path of the key of a recipe, entries of lists as 0; or the key's value.
    pub to: Option<String>,
    /// The conversion.
    pub how: Option<String>,
    /// Settings with the same effect, as `KEY = VALUE`.
    #[serde(default)]
    pub set: Vec<String>,
    /// Why nothing is lost without the key.
    pub idle: Option<String>,
    /// What there is instead.
    pub none: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    keys: BTreeMap<String, Foreign>,
    idle: Grouped,
    none: Grouped,
    values: BTreeMap<String, BTreeMap<String, Foreign>>,
}

/// Names of keys by reason and by letters of programs.
type Grouped = BTreeMap<String, BTreeMap<String, Vec<String>>>;

/// Reason, letters and name of each key.
fn each(groups: &Grouped) -> impl Iterator<Item = (&String, &String, &String)> {
    let programs = groups.iter().flat_map(|(why, of)| of.iter().map(move |(of, names)| (why, of, names)));
    programs.flat_map(|(why, of, names)| names.iter().map(move |name| (why, of, name)))
}

/// A test reads the file too.
static TABLE: LazyLock<Table> = LazyLock::new(|| read().unwrap_or_default());

/// Parses `foreign.toml`; keys listed in groups become entries of their own.
fn read() -> Result<Table, toml::de::Error> {
    let Table { mut keys, idle, none, values } = toml::from_str(include_str!("foreign.toml"))?;
    let of = |of: &String| Foreign { of: of.clone(), ..Foreign::default() };
    for (why, letters, name) in each(&idle) {
        keys.insert(name.clone(), Foreign { idle: Some(why.clone()), ..of(letters) });
    }
    for (instead, letters, name) in each(&none) {
        keys.insert(name.clone(), Foreign { none: Some(instead.clone()), ..of(letters) });
    }
    Ok(Table { keys, values, ..Table::default() })
}

impl Foreign {
    /// The key called `name` by another program.
    pub fn key(name: &str) -> Option<&'static Foreign> {
        TABLE.keys.get(name)
    }

    /// The value `theirs` of another program, for the key at a dotted path with any list index.
    pub fn value(path: &str, theirs: &str) -> Option<&'static Foreign> {
        let path = first_entries(path).replace("data.eval.0.", "data.train.0.");
        let entry = path.strip_suffix(".0").and_then(|list| TABLE.values.get(list));
        entry.or(TABLE.values.get(&path))?.get(&theirs.to_lowercase())
    }

    /// The hint for the key, found in the table at a dotted path.
    pub(super) fn key_hint(&self, table: &str) -> String {
        if let Some(why) = &self.idle {
            return format!("leave it out: {why}");
        }
        if let Some(instead) = &self.none {
            return format!("there is no such key: {instead}");
        }
        let Some(to) = &self.to else { return format!("write {}", self.settings()) };
        // a rule has the keys of [lora] too
        let of_rule = to.strip_prefix("lora.").filter(|key| table.starts_with("train.") && *key != "init");
        let ours = of_rule.map_or_else(|| in_table(to, ""), |key| in_table(&format!("train.0.{key}"), ""));
        format!("here it is {ours}{}", self.conversion())
    }

    /// The hint for a value.
    pub(super) fn value_hint(&self) -> String {
        let Some(to) = &self.to else {
            return self.none.clone().unwrap_or_default();
        };
        let set = if self.set.is_empty() { String::new() } else { format!(" with {}", self.settings()) };
        format!("here it is {}{set}{}", quote(to), self.conversion())
    }

    fn conversion(&self) -> String {
        self.how.as_ref().map(|how| format!(": {how}")).unwrap_or_default()
    }

    /// The settings in words.
    fn settings(&self) -> String {
        let one = |set: &String| match set.split_once(" = ") {
            Some((key, value)) => in_table(key, &format!(" = {value}")),
            None => set.clone(),
        };
        self.set.iter().map(one).collect::<Vec<_>>().join(" and ")
    }
}

/// A key by its dotted path, or within an entry of a list; `value` stands behind the name.
fn in_table(path: &str, value: &str) -> String {
    match path.split_once(".0.") {
        Some((list, name)) => format!("{name}{value} in [[{list}]]"),
        None => format!("{path}{value}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::{Kind, all_keys, find_key};
    use crate::syntax::parse_value;

    /// Each entry has one meaning, existing keys and valid settings.
    #[test]
    fn entries_name_keys_of_recipes() {
        let table = read().unwrap_or_else(|e| panic!("{e}"));
        let file: Table = toml::from_str(include_str!("foreign.toml")).unwrap_or_else(|e| panic!("{e}"));
        let grouped = each(&file.idle).chain(each(&file.none)).count();
        assert_eq!(table.keys.len(), file.keys.len() + grouped, "a key has two entries");
        let ours: Vec<&String> = all_keys().iter().map(|(path, _)| path).collect();
        for (name, key) in &table.keys {
            assert!(!ours.contains(&name), "{name} is a key of recipes");
            assert!(key.of.chars().all(|c| "ALPSTU".contains(c)), "{name}: {}", key.of);
            let says = [key.to.is_some(), !key.set.is_empty(), key.idle.is_some(), key.none.is_some()];
            assert_eq!(says.iter().filter(|is| **is).count(), 1, "{name}");
            assert!(key.how.is_none() || key.to.is_some(), "{name}");
            assert!(key.to.as_ref().is_none_or(|to| ours.contains(&to)), "{name}: {:?}", key.to);
        }
        let values = table.values.values().flat_map(|of| of.values());
        for set in table.keys.values().chain(values).flat_map(|f| &f.set) {
            let (key, value) = set.split_once(" = ").unwrap_or_else(|| panic!("{set}"));
            assert!(find_key(key).is_some() && parse_value(value).is_some(), "{set}");
        }
        for (path, values) in &table.values {
            for (theirs, value) in values {
                let words: Vec<&str> = match find_key(path).map(|key| key.kind) {
                    Some(Kind::Word(words)) => words.iter().map(|(w, _)| *w).collect(),
                    Some(Kind::Recompute | Kind::Modules | Kind::Text) => Vec::new(),
                    other => panic!("{path}: {other:?}"),
                };
                assert!(!words.contains(&theirs.as_str()), "{path} has {theirs}");
                assert!(
                    value.to.is_some() != value.none.is_some() && value.idle.is_none(),
                    "{path} {theirs}"
                );
                let to = value.to.as_deref().filter(|_| !words.is_empty());
                assert!(to.is_none_or(|to| words.contains(&to)), "{path}: {to:?}");
            }
        }
    }

    #[test]
    fn hints_say_the_table_and_the_conversion() {
        let hint = |name: &str, table: &str| match Foreign::key(name) {
            Some(key) => key.key_hint(table),
            None => panic!("{name}"),
        };
        assert_eq!(hint("lora_r", ""), "here it is lora.rank");
        assert_eq!(hint("lora_r", "train.3"), "here it is rank in [[train]]");
        assert_eq!(hint("path", ""), "here it is source in [[data.train]]");
        assert_eq!(hint("load_in_4bit", ""), "write model.quantize = \"nf4\"");
        assert_eq!(hint("lora_target_linear", ""), "write modules = [\"attention\", \"mlp\"] in [[train]]");
        assert_eq!(
            hint("evals_per_epoch", "run"),
            "here it is run.eval_every: evals_per_epoch = 4 is \"epoch/4\""
        );
        let value = |path, theirs| Foreign::value(path, theirs).map(Foreign::value_hint);
        assert_eq!(
            value("data.eval.3.format", "ShareGPT").as_deref(),
            Some("here it is \"messages\": it reads ShareGPT's conversations too")
        );
        assert!(value("train.2.modules.0", "all-linear").is_some());
        assert_eq!(value("run.device", "cuda"), None);
    }
}
