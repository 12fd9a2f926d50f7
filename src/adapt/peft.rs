//! PEFT's adapter folders: `adapter_config.json` in and out.
//!
//! A key that changes numbers and is not honoured is refused by name.

use super::Error;
use super::selection::{Choice, Selection, whole};
use crate::model::modules::{Group, Kind, Module};
use crate::recipe::LoraSpec;
use regex::Regex;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::path::Path;

/// What stands in front of every key of an adapter file.
pub const PREFIX: &str = "base_model.model.";

/// An `adapter_config.json`.
#[derive(Clone, Debug)]
pub struct PeftConfig {
    /// Path, for messages.
    pub file: String,
    raw: Map<String, Value>,
}

/// Which modules an adapter's LoRA sits on.
pub struct Targets {
    target: Target,
    exclude: Option<Target>,
    layers: Option<(Vec<usize>, Option<Vec<String>>)>,
}

enum Target {
    Regex(Regex),
    List(Vec<String>),
    AllLinear,
}

impl Target {
    fn matches(&self, m: &Module) -> bool {
        match self {
            Target::Regex(r) => r.is_match(&m.name),
            Target::List(l) => l.iter().any(|t| m.name == *t || m.name.ends_with(&format!(".{t}"))),
            Target::AllLinear => matches!(m.kind, Kind::Linear { .. }) && m.group != Group::Head,
        }
    }
}

impl Targets {
    /// Whether a module is chosen, as `peft.tuners.tuners_utils.check_target_module_exists` decides it.
    pub fn matches(&self, m: &Module) -> bool {
        if self.exclude.as_ref().is_some_and(|e| e.matches(m)) || !self.target.matches(m) {
            return false;
        }
        let Some((indices, patterns)) = &self.layers else { return true };
        match &self.target {
            Target::Regex(_) => true,
            // an exact name is taken whatever its layer
            Target::List(list) if list.contains(&m.name) => true,
            _ => layer_index(&m.name, patterns.as_deref()).is_some_and(|l| indices.contains(&l)),
        }
    }
}

/// The number that PEFT takes for a module's layer: the one after `.PATTERN.`, or, without patterns, the last
/// number in its name (an expert's, where there is one).
fn layer_index(name: &str, patterns: Option<&[String]>) -> Option<usize> {
    let find = |pattern: &str| {
        let r = Regex::new(&format!(r"^.*\.{pattern}\.(\d+)\.")).ok()?;
        r.captures(name)?.get(1)?.as_str().parse().ok()
    };
    match patterns {
        None => find("[^.]*"),
        Some(p) => p.iter().find_map(|p| find(p)),
    }
}

/// Keys of LoraConfig that do not change the numbers of an adapter that is loaded.
const HARMLESS: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Keys that are honoured.
const READ: &[&str] = &[
    "alpha_pattern",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "r",
    "rank_pattern",
    "target_modules",
    "use_dora",
    "use_rslora",
];

impl PeftConfig {
    /// Reads `adapter_config.json` of an adapter folder.
    pub fn load(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("adapter_config.json");
        let file = path.display().to_string();
        let text = crate::store::read_plain_text(&path, crate::store::LARGEST)
            .map_err(|e| Error::Peft { file: file.clone(), why: format!("cannot be read: {e}") })?;
        let value: Value = serde_json::from_str(&text)
            .map_err(|e| Error::Peft { file: file.clone(), why: e.to_string() })?;
        let Value::Object(raw) = value else {
            return Err(Error::Peft { file, why: "not a JSON object".into() });
        };
        Self::parse(file, raw)
    }

    /// The config of a JSON object; `file` names it in messages.
    pub fn parse(file: String, raw: Map<String, Value>) -> Result<Self, Error> {
        let c = Self { file, raw };
        if let Some(t) = c.get("peft_type")
            && t.as_str() != Some("LORA")
        {
            return Err(c.bad("peft_type", format!("{t}; LORA is what ft reads")));
        }
        for (key, v) in &c.raw {
            let neutral = v.is_null()
                || *v == json!(false)
                || v.as_array().is_some_and(Vec::is_empty)
                || v.as_object().is_some_and(Map::is_empty)
                || (key == "bias" && *v == json!("none"));
            if !neutral && !HARMLESS.contains(&key.as_str()) && !READ.contains(&key.as_str()) {
                return Err(c.bad(key, format!("{v}; it changes the numbers and is not built")));
            }
        }
        Ok(c)
    }

    /// The base that the adapter was trained on, and its revision on the hub.
    pub fn base(&self) -> Option<(&str, Option<&str>)> {
        let text = |key| self.get(key).and_then(Value::as_str).filter(|s| !s.is_empty());
        Some((text("base_model_name_or_path")?, text("revision")))
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.raw.get(key).filter(|v| !v.is_null())
    }

    fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::Peft { file: self.file.clone(), why: format!("{key}: {}", why.into()) }
    }

    fn strings(&self, key: &str) -> Result<Option<Vec<String>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(vec![s.clone()])),
            Some(v) => serde_json::from_value(v.clone())
                .map(Some)
                .map_err(|_| self.bad(key, format!("{v}; a list of names is wanted"))),
        }
    }

    fn target(&self, key: &str) -> Result<Option<Target>, Error> {
        Ok(match self.get(key) {
            None => None,
            Some(Value::String(s)) if s.eq_ignore_ascii_case("all-linear") => Some(Target::AllLinear),
            Some(Value::String(s)) => {
                Some(Target::Regex(whole(s).map_err(|e| self.bad(key, e.to_string()))?))
            }
            Some(_) => self.strings(key)?.map(Target::List),
        })
    }

    /// Which modules have LoRA.
    pub fn targets(&self) -> Result<Targets, Error> {
        let layers = match self.get("layers_to_transform") {
            None => None,
            Some(Value::Number(n)) => {
                Some(vec![n.as_u64().ok_or_else(|| self.bad("layers_to_transform", n.to_string()))? as usize])
            }
            Some(v) => Some(
                serde_json::from_value(v.clone())
                    .map_err(|_| self.bad("layers_to_transform", format!("{v}; layer numbers are wanted")))?,
            ),
        };
        let layers = match layers {
            None => None,
            Some(l) => Some((l, self.strings("layers_pattern")?.filter(|p| !p.is_empty()))),
        };
        Ok(Targets {
            target: self.target("target_modules")?.unwrap_or(Target::List(Vec::new())),
            exclude: self.target("exclude_modules")?,
            layers,
        })
    }

    /// Whether a module is saved whole (`modules_to_save`): PEFT goes by the end of its name, or of that of a
    /// module around it.
    pub fn saves(&self, name: &str) -> bool {
        let Ok(Some(list)) = self.strings("modules_to_save") else { return false };
        let mut around = Some(name);
        while let Some(n) = around {
            if list.iter().any(|t| n.ends_with(t.as_str())) {
                return true;
            }
            around = n.rsplit_once('.').map(|(a, _)| a);
        }
        false
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_f64().map(Some).ok_or_else(|| self.bad(key, format!("{v}; a number is wanted"))),
        }
    }

    /// The value that `rank_pattern` or `alpha_pattern` gives a module: the first key that matches the end of
    /// its name (`peft.utils.other.get_pattern_key`).
    fn pattern(&self, key: &str, name: &str) -> Result<Option<f64>, Error> {
        let Some(Value::Object(map)) = self.get(key) else { return Ok(None) };
        for (pattern, v) in map {
            let r = whole(&format!(r"(?:.*\.)?(?:{pattern})")).map_err(|e| self.bad(key, e.to_string()))?;
            if r.is_match(name) {
                return v.as_f64().map(Some).ok_or_else(|| self.bad(key, format!("{v}; a number is wanted")));
            }
        }
        Ok(None)
    }

    /// Rank, alpha and the rest for a module.
    pub fn spec(&self, name: &str) -> Result<LoraSpec, Error> {
        let r = match self.pattern("rank_pattern", name)? {
            Some(r) => r,
            None => self.number("r")?.unwrap_or(8.0),
        };
        if r < 1.0 || r.fract() != 0.0 || r > 1e6 {
            return Err(self.bad("r", format!("{r}; a whole number above 0 is wanted")));
        }
        let alpha = match self.pattern("alpha_pattern", name)? {
            Some(a) => a,
            None => self.number("lora_alpha")?.unwrap_or(8.0),
        };
        let flag = |key: &str| self.get(key).and_then(Value::as_bool).unwrap_or(false);
        Ok(LoraSpec {
            rank: r as usize,
            alpha,
            dropout: self.number("lora_dropout")?.unwrap_or(0.0),
            rslora: flag("use_rslora"),
            dora: flag("use_dora"),
        })
    }
}

/// The `adapter_config.json` of a selection.
///
/// `r` and `lora_alpha` are those of the most modules; the rest go to `rank_pattern` and `alpha_pattern`. With
/// rsLoRA on some modules only, the others' alpha is scaled so that `alpha / sqrt(rank)` is right for all.
pub fn config_json(selection: &Selection, base: &str, revision: Option<&str>) -> Value {
    let loras: Vec<(&Module, LoraSpec)> = selection
        .modules
        .iter()
        .filter_map(|(m, c)| match c {
            Choice::Lora { spec, .. } => Some((m, *spec)),
            _ => None,
        })
        .collect();
    let rslora = loras.iter().all(|(_, s)| s.rslora) && !loras.is_empty();
    // alpha as PEFT must read it to get our scale
    let alpha = |s: &LoraSpec| {
        let scale = scale(s);
        if rslora {
            s.alpha
        } else if s.rslora {
            scale * s.rank as f64
        } else {
            s.alpha
        }
    };
    let most = |value: &dyn Fn(&LoraSpec) -> f64| -> f64 {
        let mut counts: Vec<(f64, usize)> = Vec::new();
        for (_, s) in &loras {
            let v = value(s);
            match counts.iter_mut().find(|(x, _)| *x == v) {
                Some((_, n)) => *n += 1,
                None => counts.push((v, 1)),
            }
        }
        counts.iter().rev().max_by_key(|(_, n)| *n).map_or(8.0, |(v, _)| *v)
    };
    let (rank, common_alpha) = (most(&|s| s.rank as f64), most(&alpha));
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    for (m, s) in &loras {
        let key = format!("^{}", regex::escape(&m.name));
        if s.rank as f64 != rank {
            ranks.insert(key.clone(), json!(s.rank));
        }
        if alpha(s) != common_alpha {
            alphas.insert(key, number(alpha(s)));
        }
    }
    let save: Vec<String> = saved_modules(selection);
    json!({
        "alpha_pattern": alphas,
        "auto_mapping": null,
        "base_model_name_or_path": base,
        "bias": "none",
        "exclude_modules": null,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": null,
        "layers_to_transform": null,
        "lora_alpha": number(common_alpha),
        "lora_bias": false,
        "lora_dropout": loras.iter().map(|(_, s)| s.dropout).fold(0.0, f64::max),
        "modules_to_save": if save.is_empty() { Value::Null } else { json!(save) },
        "peft_type": "LORA",
        "r": rank as u64,
        "rank_pattern": ranks,
        "revision": revision,
        "target_modules": target_modules(selection, &loras),
        "task_type": "CAUSAL_LM",
        "use_dora": loras.iter().any(|(_, s)| s.dora),
        "use_rslora": rslora,
    })
}

fn number(x: f64) -> Value {
    if x.fract() == 0.0 && x.abs() < 1e15 { json!(x as i64) } else { json!(x) }
}

/// LoRA's factor: alpha / rank, or alpha / sqrt(rank) with rsLoRA.
pub fn scale(s: &LoraSpec) -> f64 {
    if s.rslora { s.alpha / (s.rank as f64).sqrt() } else { s.alpha / s.rank as f64 }
}

/// The shortest names that are exact: last components where every module of that name has LoRA, full names
/// otherwise.
fn target_modules(selection: &Selection, loras: &[(&Module, LoraSpec)]) -> Value {
    if loras.is_empty() {
        return json!("dummy-target-modules");
    }
    // last components of which a module has no LoRA
    let partial: HashSet<&str> = selection
        .modules
        .iter()
        .filter(|(_, c)| !matches!(c, Choice::Lora { .. }))
        .map(|(m, _)| m.last())
        .collect();
    let (mut out, mut seen) = (Vec::new(), HashSet::new());
    for (m, _) in loras {
        let name = if partial.contains(m.last()) { m.name.as_str() } else { m.last() };
        if seen.insert(name) {
            out.push(name);
        }
    }
    json!(out)
}

/// Names for `modules_to_save`: the shortest ends of names that no other module shares.
fn saved_modules(selection: &Selection) -> Vec<String> {
    let full: Vec<&Module> =
        selection.modules.iter().filter(|(_, c)| matches!(c, Choice::Full { .. })).map(|(m, _)| m).collect();
    // names backwards and sorted: those that share an end stand side by side
    let mut backwards: Vec<String> =
        selection.modules.iter().map(|(m, _)| m.name.chars().rev().collect()).collect();
    backwards.sort();
    let shared = |end: &str| {
        let end: String = end.chars().rev().collect();
        let first = backwards.partition_point(|n| *n < end);
        backwards[first..].iter().take(2).filter(|n| n.starts_with(&end)).count() > 1
    };
    full.iter()
        .map(|m| {
            let parts: Vec<&str> = m.name.split('.').collect();
            for from in (0..parts.len()).rev() {
                let end = parts[from..].join(".");
                // an index alone could end another stack's name
                if !shared(&end) && !end.starts_with(|c: char| c.is_ascii_digit()) {
                    return end;
                }
            }
            m.name.clone()
        })
        .collect()
}
