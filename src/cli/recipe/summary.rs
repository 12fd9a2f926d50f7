//! Summary of `ft check`.

use candle_core::DType;
use ft_base::terminal::plural;
use ft_data::Stats;
use ft_engine::adapters::{Choice, Selection};
use ft_engine::model::Config;
use ft_engine::model::modules::{Group, parameters};
use ft_engine::params::learning_rates;
use ft_hub::ModelDir;
use ft_plan::report::count;
use ft_recipe::Recipe;
use std::collections::HashMap;

/// Results of the checks; failed or skipped parts are `None`.
#[derive(Default)]
pub(super) struct Found {
    /// Whether on CUDA, and the dtype.
    pub compute: Option<(bool, DType)>,
    pub model: Option<ModelDir>,
    pub config: Option<Config>,
    pub selection: Option<Selection>,
    pub train: Option<Stats>,
    pub eval: Option<Stats>,
    pub steps: Option<usize>,
    pub weights: bool,
}

impl Found {
    /// One line per fact.
    pub fn summary(&self, recipe: &Recipe, unchecked: &[String]) -> String {
        let mut lines: Vec<(&str, String)> = Vec::new();
        if let Some(c) = &self.config {
            let tied = if c.tied { ", tied head" } else { "" };
            let what = format!("{} layers, width {}, {} tokens{tied}", c.layers, c.hidden, c.vocab);
            let source = self.model.as_ref().map_or(&recipe.model.source, |m| &m.source);
            lines.push(("model", format!("{source} ({}: {what})", c.family.model_type)));
            if let Some(s) = &self.selection {
                let (total, trained) = (parameters(c), s.trained().iter().map(|t| t.elements() as u64).sum());
                let share = 100.0 * trained as f64 / total as f64;
                lines.push((
                    "trains",
                    format!("{} of {} parameters ({share:.2} %)", count(trained), count(total)),
                ));
                lines.extend(groups(s).into_iter().map(|line| ("", line)));
                let rates = s.learning_rates(&recipe.optimizer);
                lines.push(("lr", learning_rates::line(&rates)));
            }
        }
        if let Some(s) = &self.train {
            lines.push(("data", rows(s)));
        }
        if let Some(s) = &self.eval {
            lines.push(("evaluation", rows(s)));
        }
        if let Some(steps) = self.steps {
            let (batch, micro) = (recipe.run.batch_rows, recipe.run.micro_rows);
            let micro =
                if micro.is_auto() { "as many as is fastest".into() } else { micro.count().to_string() };
            lines.push(("steps", format!("{steps} of {batch} rows, {micro} at a time")));
        }
        if let Some((cuda, dtype)) = &self.compute {
            let name = if *cuda { "CUDA" } else { "CPU" };
            lines.push(("runs on", format!("{name}, {}", dtype.as_str())));
        }
        lines.push(("writes to", recipe.run.output.display().to_string()));
        if self.weights {
            lines.push(("weights", "names and shapes of all tensors fit".into()));
        }
        lines.extend(unchecked.iter().map(|what| ("not checked", what.clone())));
        lines.into_iter().map(|(name, text)| format!("{name:<12} {text}\n")).collect()
    }
}

fn rows(s: &Stats) -> String {
    let left = match s.drops.total() {
        0 => String::new(),
        n => format!(" ({n} left out)"),
    };
    format!("{} samples{left} in {} rows, {} tokens, {} supervised", s.examples, s.rows, s.tokens, s.targets)
}

/// Modules of one group trained in the same way.
struct TrainedGroup {
    group: Group,
    method: String,
    modules: usize,
    parameters: u64,
}

/// One line per module group and training method.
fn groups(s: &Selection) -> Vec<String> {
    let mut sizes: HashMap<String, u64> = HashMap::new();
    for t in s.trained() {
        *sizes.entry(t.module.clone()).or_default() += t.elements() as u64;
    }
    let mut found: Vec<TrainedGroup> = Vec::new();
    for (m, choice) in &s.modules {
        let Some(method) = method(choice) else { continue };
        let parameters = sizes.get(&m.name).copied().unwrap_or(0);
        match found.iter_mut().find(|f| f.group == m.group && f.method == method) {
            Some(f) => {
                f.modules += 1;
                f.parameters += parameters;
            }
            None => found.push(TrainedGroup { group: m.group, method, modules: 1, parameters }),
        }
    }
    found.sort_by_key(|f| f.group);
    let line = |TrainedGroup { group, method, modules, parameters }: &TrainedGroup| {
        let modules = plural(*modules, "module");
        format!("  {}: {modules}, {method}, {}", group.name(), count(*parameters))
    };
    found.iter().map(line).collect()
}

/// Training method of a module in words; `None` if frozen.
fn method(choice: &Choice) -> Option<String> {
    Some(match choice {
        Choice::Freeze => return None,
        Choice::Full { .. } => "full".to_string(),
        Choice::Rows { count: 1, .. } => "the row of a token".to_string(),
        Choice::Rows { count, .. } => format!("the rows of {count} tokens"),
        Choice::Lora { spec, .. } => {
            let kind = if spec.dora { "DoRA" } else { "LoRA" };
            let rs = if spec.rslora { ", rank-stabilised" } else { "" };
            format!("{kind} rank {}, alpha {}{rs}", spec.rank, spec.alpha)
        }
    })
}
