//! Layouts as text and JSON.

use super::predict::Candidate;
use super::search::Layouts;
use crate::error::Error;
use crate::units::{bytes, seconds};
use serde_json::{Value, json};
use std::fmt::Write;

impl Candidate {
    /// The settings that differ from those of one rank, in command-line form.
    pub fn words(&self) -> String {
        let keys = self.layout.keys().into_iter().map(|(key, n)| format!("parallel.{key}={n}"));
        let all: Vec<String> = keys.chain(self.beside.iter().cloned()).collect();
        if all.is_empty() { "one rank".into() } else { all.join(" ") }
    }

    /// All settings in command-line form, those of other layouts set back.
    pub fn settings(&self) -> Vec<String> {
        self.layout.settings().into_iter().chain(self.beside.iter().cloned()).collect()
    }

    /// Lines of a recipe.
    fn lines(&self) -> String {
        let mut s = String::from("[parallel]\n");
        for (key, n) in self.layout.keys() {
            let _ = writeln!(s, "{key} = {n}");
        }
        for set in &self.beside {
            if let Some((table, (key, value))) =
                set.split_once('.').and_then(|(t, r)| Some((t, r.split_once('=')?)))
            {
                let _ = writeln!(s, "[{table}]\n{key} = {value:?}");
            }
        }
        s
    }
}

impl Layouts {
    /// Output of `ft plan --devices`.
    pub fn text(&self) -> String {
        let mut s = String::new();
        let n = self.devices.count;
        let device = if self.machine.cuda { "CUDA card" } else { "CPU rank" };
        let plural = if n == 1 { "" } else { "s" };
        let of = self.budget.map_or(String::new(), |b| format!(" of {}", bytes(b)));
        let _ = writeln!(s, "{} of {} layouts fit {n} {device}{plural}{of}", self.fitting, self.planned);
        let _ = writeln!(s, "{}\n", self.of);
        if !self.best.is_empty() {
            let width = self.best.iter().map(|c| c.words().len()).max().unwrap_or(0).max("layout".len());
            let head = format!(
                "  {:<width$} {:>11} {:>11} {:>9}  limited by",
                "layout", "memory", "wire a step", "a step"
            );
            let _ = writeln!(s, "{head}");
            for c in &self.best {
                let (memory, wire, time) =
                    (bytes(c.memory), bytes(c.wire_bytes_a_step), seconds(c.step_seconds));
                let limit = c.limit.words();
                let _ = writeln!(s, "  {:<width$} {memory:>11} {wire:>11} {time:>9}  {limit}", c.words());
            }
            let _ = writeln!(s, "\nmemory is that of the rank with the most, in {}", self.best[0].how);
        }
        let _ = writeln!(
            s,
            "rates       {}; arithmetic: {:.1} TFLOP a second ({})",
            self.devices.words(),
            self.arithmetic.rate / 1e12,
            self.arithmetic.source
        );
        for (count, why) in &self.refused {
            let _ = writeln!(s, "not planned {count}: {why}");
        }
        if let Some(best) = self.best.first() {
            let _ = write!(s, "\n{}", best.lines());
        }
        s
    }

    /// Output of `ft plan --devices --json`.
    pub fn json(&self) -> Value {
        let layouts: Vec<Value> = self
            .best
            .iter()
            .map(|c| {
                let mut one = json!(c);
                one["set"] = json!(c.words());
                one["recipe"] = json!(c.lines());
                one["limited_by"] = json!(c.limit.words());
                one
            })
            .collect();
        json!({
            "devices": self.devices.count,
            "device_kind": if self.machine.cuda { "cuda" } else { "cpu" },
            "budget": self.budget,
            "link": self.devices.link,
            "arithmetic": self.arithmetic,
            "planned": self.planned,
            "fitting": self.fitting,
            "refused": self.refused.iter().map(|(n, why)| json!({"layouts": n, "reason": why})).collect::<Vec<_>>(),
            "least_memory": self.least.map(|(layout, memory)| json!({"layout": layout, "memory": memory})),
            "layouts": layouts,
        })
    }

    /// The error of a search in which nothing fits; `None` if something does.
    pub fn refusal(&self) -> Option<Error> {
        if !self.best.is_empty() {
            return None;
        }
        let n = self.devices.count;
        let why = match (self.least, self.budget) {
            (Some((layout, memory)), Some(budget)) => format!(
                "no layout of {n} devices fits: {} takes the least, {} on each, and {} is available\n  hint: more \
                    devices, or the keys that ft plan lists for this layout",
                layout.settings().join(" "),
                bytes(memory),
                bytes(budget)
            ),
            _ => {
                let why = self.refused.first().map_or("", |(_, why)| why);
                format!(
                    "no layout of {n} devices suits the recipe: {why}\n  hint: run.batch_rows or --devices"
                )
            }
        };
        Some(Error::DoesNotFit(why))
    }
}
