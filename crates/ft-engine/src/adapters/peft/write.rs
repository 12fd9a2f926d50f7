//! Writes PEFT's `adapter_config.json`; [`super::config`] reads it.

use super::format::{current, scale};
use crate::adapters::{Choice, Selection};
use crate::model::TOWERS;
use crate::model::modules::Module;
use ft_recipe::LoraSpec;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Key of the dropout of all LoRA.
pub(super) const DROPOUT: &str = "lora_dropout";

/// Builds the `adapter_config.json` of a selection.
///
/// `r` and `lora_alpha` are the most common values; exceptions go to `rank_pattern` and `alpha_pattern`. If
/// only some modules use rsLoRA, `use_rslora` is false and their alpha is adjusted so that `alpha / rank`
/// yields the correct scale.
pub fn config_json(selection: &Selection, base: &str, revision: Option<&str>) -> Value {
    let loras: Vec<(&Module, LoraSpec)> = selection.loras().map(|(m, spec)| (m, *spec)).collect();
    let rslora = loras.iter().all(|(_, s)| s.rslora) && !loras.is_empty();
    // Alpha for PEFT to arrive at our scale.
    let alpha = |s: &LoraSpec| if s.rslora && !rslora { scale(s) * s.rank as f64 } else { s.alpha };
    let rank = |s: &LoraSpec| s.rank as f64;
    let common = |value: &dyn Fn(&LoraSpec) -> f64| most_common(loras.iter().map(|(_, s)| value(s)));
    let (common_rank, common_alpha) = (common(&rank), common(&alpha));
    let exceptions = |value: &dyn Fn(&LoraSpec) -> f64, common: f64| -> Map<String, Value> {
        let others = loras.iter().filter(|(_, s)| value(s) != common);
        others
            .map(|(m, s)| (format!("^{}", regex::escape(&current(target_name(m)))), number(value(s))))
            .collect()
    };
    let save: Vec<String> = saved_modules(selection);
    let parameters = target_parameters(selection);
    let linears: Vec<_> = loras.iter().filter(|(m, _)| m.parameter.is_none()).copied().collect();
    let mut config = json!({
        "alpha_pattern": exceptions(&alpha, common_alpha),
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": others_of(selection),
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": number(common_alpha),
        "lora_bias": false,
        // PEFT takes no dropout beside parameters; it matters in training only.
        DROPOUT: if parameters.is_empty() {
            loras.iter().map(|(_, s)| s.dropout).fold(0.0, f64::max)
        } else {
            0.0
        },
        "modules_to_save": if save.is_empty() { Value::Null } else { json!(save) },
        "peft_type": "LORA",
        "r": common_rank as u64,
        "rank_pattern": exceptions(&rank, common_rank),
        "revision": revision,
        "target_modules": target_modules(selection, &linears, !parameters.is_empty()),
        "task_type": if selection.scores.is_some() { "SEQ_CLS" } else { "CAUSAL_LM" },
        "use_dora": loras.iter().any(|(_, s)| s.dora),
        "use_rslora": rslora,
    });
    if !parameters.is_empty() {
        config["target_parameters"] = json!(parameters);
    }
    if selection.tied_in_full() {
        // Otherwise PEFT trains on copies of the table, apart.
        config["ensure_weight_tying"] = json!(true);
    }
    let tokens: Map<String, Value> =
        selection.tokens.modules().map(|(m, ids)| (last_component(m).into(), json!(ids))).collect();
    if !tokens.is_empty() {
        config["trainable_token_indices"] = Value::Object(tokens);
    }
    config
}

/// Most common value, the first of several; PEFT's default of 8 without values.
fn most_common(values: impl Iterator<Item = f64>) -> f64 {
    let mut counts: Vec<(f64, usize)> = Vec::new();
    for v in values {
        match counts.iter_mut().find(|(x, _)| *x == v) {
            Some((_, n)) => *n += 1,
            None => counts.push((v, 1)),
        }
    }
    counts.iter().rev().max_by_key(|(_, n)| *n).map_or(8.0, |(v, _)| *v)
}

fn last_component(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}

/// Shortest unambiguous names: the last component if all modules of that name have LoRA, full names
/// otherwise.
fn target_modules(selection: &Selection, loras: &[(&Module, LoraSpec)], beside: bool) -> Value {
    if loras.is_empty() {
        return if beside { json!([]) } else { json!("dummy-target-modules") };
    }
    // Last components of modules without LoRA.
    let partial: HashSet<&str> = selection
        .modules
        .iter()
        .filter(|(m, c)| !matches!(c, Choice::Lora { .. }) && m.parameter.is_none())
        .map(|(m, _)| m.last())
        .collect();
    let (mut out, mut seen) = (Vec::new(), HashSet::new());
    for (m, _) in loras {
        let name = if partial.contains(m.last()) { current(&m.name) } else { m.last().into() };
        if seen.insert(name.clone()) {
            out.push(name);
        }
    }
    json!(out)
}

/// Name of a module in PEFT's targets.
fn target_name(m: &Module) -> &str {
    m.parameter.as_ref().map_or(&m.name, |p| &p.name)
}

/// Names for `target_parameters`: without the layer if those of all layers have LoRA, full names otherwise.
fn target_parameters(selection: &Selection) -> Vec<String> {
    let short =
        |name: &str| name.split_once(".layers.").and_then(|(_, n)| Some(n.split_once('.')?.1.to_string()));
    let is_lora = |c: &Choice| matches!(c, Choice::Lora { .. });
    let adapted = |(m, c): &&(Module, Choice)| m.parameter.is_some() && is_lora(c);
    // Weights of other linears could be parameters too.
    let name = |m: &Module| m.parameter.as_ref().map_or_else(|| short(&m.weight_name()), |p| short(&p.name));
    let others = selection.modules.iter().filter(|one| !adapted(one));
    let partial: HashSet<String> = others.filter_map(|(m, _)| name(m)).collect();
    let (mut out, mut seen) = (Vec::new(), HashSet::new());
    for p in selection.modules.iter().filter(adapted).filter_map(|(m, _)| m.parameter.as_ref()) {
        let name = short(&p.name).filter(|n| !partial.contains(n));
        let name = name.unwrap_or_else(|| current(&p.name).into_owned());
        if seen.insert(name.clone()) {
            out.push(name);
        }
    }
    out
}

/// Names for `modules_to_save`: the shortest unique suffixes, or full names in checkpoints with towers, where suffixes
/// are ambiguous.
fn saved_modules(selection: &Selection) -> Vec<String> {
    let full: Vec<&Module> =
        selection.modules.iter().filter(|(_, c)| matches!(c, Choice::Full { .. })).map(|(m, _)| m).collect();
    if is_nested(selection) {
        return full.iter().map(|m| current(m.adapted_name()).into_owned()).collect();
    }
    // Reversed and sorted, names with a common suffix are adjacent.
    let mut backwards: Vec<String> =
        selection.modules.iter().map(|(m, _)| m.adapted_name().chars().rev().collect()).collect();
    backwards.sort();
    let shared = |end: &str| {
        let end: String = end.chars().rev().collect();
        let first = backwards.partition_point(|n| *n < end);
        backwards[first..].iter().take(2).filter(|n| n.starts_with(&end)).count() > 1
    };
    full.iter()
        .map(|m| {
            let parts: Vec<&str> = m.adapted_name().split('.').collect();
            for from in (0..parts.len()).rev() {
                let end = parts[from..].join(".");
                // An index alone could be the suffix of a name in another module list.
                if !shared(&end) && !end.starts_with(|c: char| c.is_ascii_digit()) {
                    return end;
                }
            }
            m.adapted_name().to_string()
        })
        .collect()
}

/// Whether the text model is within a vision checkpoint.
fn is_nested(selection: &Selection) -> bool {
    selection.modules.iter().any(|(m, _)| m.name.contains("language_model."))
}

/// Modules of the towers of a vision checkpoint: some have the names of the text model's linears.
fn others_of(selection: &Selection) -> Value {
    if is_nested(selection) { json!(format!(r".*\.({})\..*", TOWERS.join("|"))) } else { Value::Null }
}
