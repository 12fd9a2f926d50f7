//! Checks of data sources and of evaluation.

use super::context::Cross;
use crate::check::nearest;
use crate::keys::{Form, Mask, Recipe, Slice, Source};
use std::collections::BTreeMap;

impl Cross<'_, '_> {
    pub(super) fn sources(&mut self, recipe: &Recipe) {
        let data = &recipe.data;
        if data.train.is_empty() && self.given("data.train") && self.all_good(&["data.train", "data.train.0"])
        {
            self.report("data.train", "data.train is empty".into(), "it needs at least one source");
        }
        for (list, sources) in [("train", &data.train), ("eval", &data.eval)] {
            for (i, source) in sources.iter().enumerate() {
                let path = format!("data.{list}.{i}");
                if self.all_good(&[&format!("{path}.format"), &format!("{path}.mask"), "data.mask"]) {
                    self.mask(&path, source, data.mask);
                }
                if self.all_good(&[&format!("{path}.format"), &format!("{path}.fields")]) {
                    self.fields(&path, source);
                }
                if self.all_good(&[&format!("{path}.split")]) {
                    self.slice(&path, source);
                }
            }
        }
        self.evaluation(recipe);
    }

    /// Checks keys of the evaluation.
    fn evaluation(&mut self, recipe: &Recipe) {
        let g = &recipe.generate;
        if let Some(Err(e)) = g.regex.as_deref().map(regex::Regex::new) {
            self.report("generate.regex", e.to_string(), "a regular expression of the crate regex");
        }
        let data = &recipe.data;
        if data.eval_share > 0.0 && !data.eval.is_empty() && self.all_good(&["data.eval", "data.eval_share"])
        {
            let message = "data.eval_share and data.eval are both given".into();
            self.report("data.eval_share", message, "leave one of them out");
        }
    }

    fn mask(&mut self, path: &str, source: &Source, global: Option<Mask>) {
        let (Some(mask), Some(format)) = (source.mask.or(global), source.format) else { return };
        let can = format.masks();
        if can.contains(&mask) {
            return;
        }
        let key = if source.mask.is_some() { format!("{path}.mask") } else { "data.mask".to_string() };
        let format = format.word();
        let words: Vec<String> = can.iter().map(|m| format!("\"{}\"", m.word())).collect();
        let message =
            format!("mask = \"{}\" cannot be done for {path}, whose format is \"{format}\"", mask.word());
        self.report(&key, message, format!("\"{format}\" has mask = {}", words.join(" or ")));
    }

    fn slice(&mut self, path: &str, source: &Source) {
        if let Some(Err(form)) = source.split.as_deref().map(Slice::parse) {
            let split = source.split.as_deref().unwrap_or_default();
            self.report(&format!("{path}.split"), format!("{split:?} is no split"), form);
        }
    }

    fn fields(&mut self, path: &str, source: &Source) {
        let Some(format) = source.format else { return };
        // without a form, the model's template decides
        let is_plain = format.is_template_default() && source.form == Some(Form::Plain);
        let known = format.fields(!is_plain);
        let mut by_name: BTreeMap<&str, &str> = BTreeMap::new();
        for (ours, theirs) in &source.fields {
            let key = format!("{path}.fields.{ours}");
            if !known.contains(&ours.as_str()) {
                let form = if is_plain { " in form \"plain\"" } else { "" };
                let message = format!("format \"{}\"{form} has no field {ours}", format.word());
                let hint = match nearest(ours, known.iter().copied()) {
                    Some(near) => {
                        format!("did you mean {near}? Left stands the format's name, right the file's")
                    }
                    None => format!(
                        "its fields are {}; left stands the format's name, right the file's",
                        known.join(", ")
                    ),
                };
                self.report(&key, message, hint);
            } else if let Some(first) = by_name.insert(theirs, ours) {
                let message = format!("{first} and {ours} are both read from the file's field {theirs:?}");
                self.report(&key, message, "give each its own");
            }
        }
    }
}
