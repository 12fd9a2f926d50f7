//! Layouts as text and JSON.

use super::predict::Candidate;
use super::search::Layouts;
use crate::error::Error;
use crate::units::{bytes, seconds};
use ft_base::terminal::plural;
use serde_json::{Value, json};
use std::fmt::Write;

impl Candidate {
    /// The settings other than one rank's, in command-line form.
    pub fn words(&self) -> String {
        let keys = self.layout.keys().into_iter().map(|(key, n)| format!("parallel.{key}={n}"));
        let all: Vec<String> = keys.chain(self.beside.iter().cloned()).collect();
        if all.is_empty() { "one rank".into() } else { all.join(" ") }
    }

    /// All settings in command-line form, defaults included.
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
        let device = if self.machine.cuda { "CUDA card" } else { "CPU rank" };
        let of = self.budget.map_or(String::new(), |b| format!(" of {}", bytes(b)));
        let words = if self.best().is_empty() { "" } else { ", the fastest that" };
        let _ = writeln!(
            s,
            "{} of {} layouts{words} fit {}{of}",
            self.best().len(),
            self.allowed,
            plural(self.devices.count, device)
        );
        let _ = writeln!(s, "{}\n", self.of);
        if let Some(best) = self.best().first() {
            s += &self.table();
            let _ = writeln!(s, "\nmemory is that of the rank with the most, in {}", best.how);
        }
        let _ = writeln!(
            s,
            "rates       {}; arithmetic: {:.1} TFLOP a second ({})",
            self.devices.words(),
            self.arithmetic.rate / 1e12,
            self.arithmetic.source
        );
        for (count, why) in &self.others {
            let _ = writeln!(s, "others      {count}: {why}");
        }
        if let Some(best) = self.best().first() {
            let _ = write!(s, "\n{}", best.lines());
        }
        s
    }

    /// The best layouts, one a line. Columns of bytes from other machines and of waiting stages appear only if used.
    fn table(&self) -> String {
        let width = self.best().iter().map(|c| c.words().len()).max().unwrap_or(0).max("layout".len());
        let (several, waits) = (self.devices.on_several(), self.best().iter().any(|c| c.bubble >= 0.005));
        let line = |[layout, memory, wire, between, wait, time, limit]: [&str; 7]| {
            let between = if several { format!(" {between:>13}") } else { String::new() };
            let wait = if waits { format!(" {wait:>5}") } else { String::new() };
            format!("  {layout:<width$} {memory:>11} {wire:>11}{between}{wait} {time:>9}  {limit}\n")
        };
        let mut s =
            line(["layout", "memory", "wire a step", "from machines", "waits", "a step", "limited by"]);
        for c in self.best() {
            let (memory, wire) = (bytes(c.memory), bytes(c.wire_bytes_a_step));
            let (between, time) = (bytes(c.wire_bytes_between), seconds(c.step_seconds));
            let wait = format!("{:.0}%", 100.0 * c.bubble);
            s += &line([&c.words(), &memory, &wire, &between, &wait, &time, c.limit.words()]);
        }
        s
    }

    /// Output of `ft plan --devices --json`.
    pub fn json(&self) -> Value {
        let layouts: Vec<Value> = self
            .fitting
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
            "link": self.devices.network.within,
            "between": self.devices.on_several().then_some(&self.devices.network),
            "arithmetic": self.arithmetic,
            "allowed": self.allowed,
            "others": self.others.iter().map(|(n, why)| json!({"layouts": n, "reason": why})).collect::<Vec<_>>(),
            "least_memory": self.least.map(|(layout, memory)| json!({"layout": layout, "memory": memory})),
            "layouts": layouts,
        })
    }

    /// The fastest layout.
    ///
    /// # Errors
    /// Nothing fits, or the recipe allows none.
    pub fn first(&self) -> Result<&Candidate, Error> {
        self.best().first().ok_or_else(|| self.refusal())
    }

    fn refusal(&self) -> Error {
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
                let why = self.others.iter().max_by_key(|(layouts, _)| *layouts).map_or("", |(_, why)| why);
                return Error::Ignored(format!(
                    "no layout of {n} devices suits the recipe: {why}\n  hint: run.batch_rows, or another number of \
                        devices"
                ));
            }
        };
        Error::DoesNotFit(why)
    }
}
