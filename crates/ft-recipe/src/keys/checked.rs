//! Checked values, by table.

use super::sets::{IndexSet, LayerSet, Recompute, Token};
use crate::syntax::{Diagnostic, SourceText, Span};
use ft_base::error::Place;
use std::collections::BTreeMap;

/// A value of the right kind for the key.
#[derive(Clone, Debug)]
pub(crate) enum Checked {
    Int(u64),
    Number(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Json(serde_json::Map<String, serde_json::Value>),
    Strings(BTreeMap<String, String>),
    Layers(Option<LayerSet>),
    Experts(IndexSet),
    Counts(Vec<usize>),
    Pair([f64; 2]),
    Recompute(Recompute),
    Tokens(Vec<Token>),
    /// `"auto"`, for a numeric key.
    Auto,
    Table(Section),
    Tables(Vec<Section>),
}

/// A table of checked values. Keys with neither a valid value nor a default are missing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Section {
    pub values: BTreeMap<&'static str, Checked>,
    /// Position of the table; `None` if absent from the recipe.
    pub at: Option<Span>,
}

impl Section {
    /// The table under `key`.
    pub fn table(&self, key: &str) -> Option<&Section> {
        match self.values.get(key) {
            Some(Checked::Table(s)) => Some(s),
            _ => None,
        }
    }

    /// The list of tables under `key`; empty if absent.
    pub fn tables(&self, key: &str) -> &[Section] {
        match self.values.get(key) {
            Some(Checked::Tables(s)) => s,
            _ => &[],
        }
    }

    /// Position of the table in `texts`; the file without a line if absent.
    pub fn place(&self, texts: &[SourceText]) -> Place {
        match &self.at {
            Some(at) => Diagnostic::new(texts, at, "").place,
            None => {
                Place { file: texts.first().map_or(String::new(), |t| t.name.clone()), line: 0, column: 0 }
            }
        }
    }
}
