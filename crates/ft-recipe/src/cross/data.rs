//! Checks of data sources and of evaluation.

use super::context::Cross;
use crate::check::nearest;
use crate::keys::{Data, Format, Mask, Recipe, Source};
use crate::syntax::Value;
use std::collections::BTreeMap;

/// Field names of a format that `fields` can rename.
fn fields_of(format: Format) -> &'static [&'static str] {
    match format {
        Format::Messages => &["messages", "tools", "system"],
        Format::Alpaca => &["instruction", "input", "output", "system", "history"],
        Format::Completion => &["prompt", "completion"],
        Format::Text => &["text"],
        Format::Tokens => &["input_ids", "labels"],
    }
}

impl Cross<'_, '_> {
    pub(super) fn sources(&mut self, recipe: &Recipe) {
        let data = &recipe.data;
        if data.train.is_empty() && self.given("data.train") && self.all_good(&["data.train", "data.train.0"])
        {
            self.report("data.train", "data.train is empty".into(), "it needs at least one source");
        }
        let mut global_used = false;
        for (list, sources) in [("train", &data.train), ("eval", &data.eval)] {
            for (i, source) in sources.iter().enumerate() {
                let path = format!("data.{list}.{i}");
                if self.all_good(&[&format!("{path}.format"), &format!("{path}.mask"), "data.mask"]) {
                    global_used |= source.mask.is_none();
                    self.mask(&path, source, data.mask);
                }
                if self.all_good(&[&format!("{path}.format"), &format!("{path}.fields")]) {
                    self.fields(&path, source);
                }
            }
        }
        self.shared_keys(data, global_used);
        self.evaluation(recipe);
    }

    /// Keys of `[data]` that no source uses. `mask_used`: some source has no mask of its own.
    fn shared_keys(&mut self, data: &Data, mask_used: bool) {
        let mut sources = data.train.iter().chain(&data.eval).peekable();
        if self.checker.bad.iter().any(|p| p.starts_with("data")) || sources.peek().is_none() {
            return;
        }
        if data.mask.is_some() && !mask_used {
            self.without_effect("data.mask", ": every source has a mask of its own", "leave it out");
        }
        if sources.all(|s| matches!(s.format, Some(Format::Text | Format::Tokens))) {
            for key in ["data.chat_template", "data.template"] {
                let value = self.root.find(key).map(|n| &n.value);
                if value.is_some_and(|v| !matches!(v, Value::Table(t) if t.0.is_empty())) {
                    let hint = "leave it out, or set format = \"messages\"";
                    self.without_effect(key, ": no source holds conversations", hint);
                }
            }
        }
    }

    /// Checks evaluation during a run, by loss and by generation.
    fn evaluation(&mut self, recipe: &Recipe) {
        const DATA: [&str; 3] = ["data.eval", "data.eval.0", "data.eval_share"];
        let (run, g) = (&recipe.run, &recipe.generate);
        if !recipe.data.evaluates() && self.all_good(&DATA) {
            let why = ": there is nothing to evaluate on";
            for (key, section, on) in [
                ("run.eval_every", "eval_every", run.eval_every > 0),
                ("generate.samples", "generate", g.samples > 0),
            ] {
                if on {
                    let hint = format!("add [[data.eval]], or data.eval_share = 0.1, or leave {section} out");
                    self.without_effect(key, why, &hint);
                }
            }
        }
        let during = recipe.data.evaluates() && run.eval_every > 0;
        for (key, on) in [("run.keep_best", run.keep_best), ("run.patience", run.patience > 0)] {
            if on
                && !during
                && self.all_good(&["run.eval_every", "run.keep_best", "run.patience"])
                && self.all_good(&DATA)
            {
                let hint = "set run.eval_every, with [[data.eval]] or data.eval_share";
                self.without_effect(key, ": the run does not evaluate on its way", hint);
            }
        }
        for (key, on) in
            [("generate.temperature", g.temperature > 0.0), ("generate.regex", g.regex.is_some())]
        {
            if on && g.samples == 0 && self.all_good(&["generate.samples"]) {
                self.without_effect(
                    key,
                    ": generate.samples is 0",
                    "generate.samples = 100, or leave it out",
                );
            }
        }
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

    fn fields(&mut self, path: &str, source: &Source) {
        let Some(format) = source.format else { return };
        let known = fields_of(format);
        let mut by_name: BTreeMap<&str, &str> = BTreeMap::new();
        for (ours, theirs) in &source.fields {
            let key = format!("{path}.fields.{ours}");
            if !known.contains(&ours.as_str()) {
                let message = format!("format \"{}\" has no field {ours}", format.word());
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
