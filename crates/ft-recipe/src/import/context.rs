//! State of an import, and the fates of keys.

use super::draft::{Draft, fitting};
use super::read::{Entries, Entry, is_off, number, text, truth};
use super::table::Tables;
use crate::check::Foreign;
use crate::keys::{Kind, Method, Task, find_key};
use crate::syntax::quote;
use serde_json::Value;
use std::collections::BTreeMap;

/// The fate of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// Taken as it is.
    Taken,
    /// Taken in another form.
    Converted,
    /// Without effect here.
    NoEffect,
    /// Not supported.
    NotSupported,
    /// A key unknown to the toolkit.
    Unknown,
    /// Not in the file: the toolkit's default, if different from ft's.
    Default,
}

/// Questions of an import about things outside the file.
pub trait Around {
    /// Text of a file named by the configuration.
    fn read(&self, _path: &str) -> Option<String> {
        None
    }
    /// The groups of modules of a model, if its config is at hand.
    fn groups(&self, _model: &str) -> Option<Vec<String>> {
        None
    }
    /// The coefficient of a model's load-balancing loss in transformers, or 0, if its config is at hand.
    fn router_loss(&self, _model: &str) -> Option<f64> {
        None
    }
}

/// The outcome of a key.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome(pub Fate, pub String);

pub(super) fn converted(text: impl Into<String>) -> Outcome {
    Outcome(Fate::Converted, text.into())
}

pub(super) fn needless(why: impl Into<String>) -> Outcome {
    Outcome(Fate::NoEffect, why.into())
}

pub(super) fn refused(advice: impl Into<String>) -> Outcome {
    Outcome(Fate::NotSupported, advice.into())
}

/// State of an import.
pub(super) struct Context<'a> {
    pub tool: &'static str,
    pub tables: &'a Tables,
    pub entries: &'a Entries,
    pub around: &'a dyn Around,
    /// LoRA, or every weight in full.
    pub method: Method,
    pub draft: Draft,
    /// Targets of LoRA, as `train.modules` has them, and their origin.
    pub modules: Option<(Vec<String>, String)>,
    /// Modules trained in full, and their origin.
    pub in_full: Vec<(String, String)>,
    /// `train.layers` as TOML, and its origin.
    pub layers: Option<(String, String)>,
    /// Outcomes of the keys of data sets, by path.
    pub of_data: BTreeMap<String, Outcome>,
    /// Defaults that no entry has: the toolkit's key, and the line about it.
    pub told: Vec<(String, String)>,
    /// The task.
    pub task: Task,
    /// A task without support, in words.
    pub other_task: Option<String>,
}

impl Context<'_> {
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    /// Whether a key has the toolkit's default.
    pub fn is_default(&self, key: &str) -> bool {
        self.entries.list.iter().any(|e| e.path == key && e.line == 0)
    }

    /// The first number among these keys.
    pub fn number(&self, keys: &[&str]) -> Option<f64> {
        keys.iter().find_map(|k| self.get(k).and_then(number))
    }

    pub fn is(&self, key: &str) -> bool {
        self.get(key).and_then(truth) == Some(true)
    }

    /// Text of a key, in lower case; empty if it is absent.
    pub fn word(&self, key: &str) -> String {
        self.get(key).and_then(text).unwrap_or_default().to_lowercase()
    }

    /// Sets a key of the recipe, as TOML. Several keys of a file may add to `memory.offload`.
    pub fn set(&mut self, path: &str, value: impl Into<String>, entry: &Entry) -> String {
        let given: String = value.into();
        let value = if path == "memory.offload" { self.draft.joined(path, &given) } else { given };
        let shown = format!("{path} = {value}");
        self.draft.set(path, value, &entry.path, entry.line == 0);
        shown
    }

    /// Sets a key by a default without an entry.
    pub fn set_default(&mut self, path: &str, value: String, key: &str) {
        self.told.push((key.into(), format!("{path} = {value}")));
        self.draft.set(path, value, key, true);
    }

    /// Takes a value as it is.
    pub fn take(&mut self, path: &str, entry: &Entry) -> Outcome {
        if entry.value.is_null() {
            return needless("not set");
        }
        if self.method == Method::Full
            && (path.starts_with("lora.") && path != "lora.init" || path == "optimizer.lr_scale_b")
        {
            return needless("every weight trains: there is no LoRA");
        }
        match fitting(path, &entry.value) {
            Ok(value) => Outcome(Fate::Taken, self.set(path, value, entry)),
            Err(_) if is_off(&entry.value) => needless("off"),
            Err(why) => refused(why),
        }
    }

    /// Takes a word, by the table of hints if the key lacks it.
    pub fn take_word(&mut self, path: &str, entry: &Entry) -> Outcome {
        let Some(written) = text(&entry.value) else { return needless("not set") };
        let theirs = written.rsplit('.').next().unwrap_or_default().to_lowercase();
        let Some(Kind::Word(words)) = find_key(path).map(|k| k.kind) else { return self.take(path, entry) };
        if words.iter().any(|(w, _)| *w == theirs) {
            let set = self.set(path, quote(&theirs), entry);
            return Outcome(if theirs == written { Fate::Taken } else { Fate::Converted }, set);
        }
        match Foreign::value(path, &theirs) {
            Some(Foreign { to: Some(ours), set, how, .. }) => {
                let mut shown = vec![self.set(path, quote(ours), entry)];
                shown.extend(self.settings(set, entry));
                let how = how.as_ref().map(|h| format!(": {h}")).unwrap_or_default();
                converted(shown.join(", ") + &how)
            }
            Some(Foreign { none: Some(instead), .. }) => refused(instead),
            _ => {
                let known: Vec<&str> = words.iter().map(|(w, _)| *w).collect();
                refused(format!("{path} takes {}; its default stands", known.join(", ")))
            }
        }
    }

    /// Sets `path` if the entry is true; else it is off.
    pub fn switch(&mut self, path: &str, value: impl Into<String>, entry: &Entry) -> Outcome {
        match truth(&entry.value) {
            Some(true) => converted(self.set(path, value, entry)),
            _ => needless("off"),
        }
    }

    /// Sets `KEY = VALUE`s of the table of hints.
    pub fn settings(&mut self, settings: &[String], entry: &Entry) -> Vec<String> {
        let settings = settings.iter().filter_map(|s| s.split_once(" = "));
        settings.map(|(key, value)| self.set(key, value, entry)).collect()
    }
}

/// A conversion.
pub(super) type Convert = fn(&mut Context<'_>, &Entry) -> Outcome;

/// Defines `by_name`: conversions by their names in the tables of keys, functions first, other expressions next.
macro_rules! conversions {
    ($($function:ident),+; $($name:literal => $convert:expr),*) => {
        pub(super) fn by_name(name: &str) -> Option<Convert> {
            const ALL: &[(&str, Convert)] =
                &[$((stringify!($function), $function),)+ $(($name, $convert)),*];
            ALL.iter().find(|(known, _)| *known == name).map(|(_, convert)| *convert)
        }
    };
}
pub(super) use conversions;
