//! Checked values, by table.

use super::interval::Interval;
use super::sets::{IndexSet, LayerSet, Recompute, Token};
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
    Interval(Interval),
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
}
