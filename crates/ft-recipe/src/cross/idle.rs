//! Keys made ineffective by other keys: one table for checks, plans, runs and the resolved recipe.

use super::context::Cross;
use crate::keys::{
    Dtype, Form, Format, Kind, Lora, Method, Offload, OverLength, Products, Quantize, Recipe, Recompute,
    Rule, Schedule, Task, Unset, Weights, find_key, first_entries,
};
use crate::syntax::{Table, parse_value};
use std::collections::BTreeSet;

/// Facts of model and machine, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// Whether a run computes on CUDA.
    pub cuda: Option<bool>,
    /// Whether layers compute in f32.
    pub in_f32: Option<bool>,
    /// Whether the checkpoint has 4-bit weights.
    pub four_bit: Option<bool>,
    /// Whether the model is a local folder.
    pub is_folder: Option<bool>,
    /// Whether sources were downloaded, if they are of the hub.
    pub resolved: bool,
}

/// A condition, with the list index of the key.
struct Case<'a> {
    r: &'a Recipe,
    facts: Facts,
    index: usize,
}

impl Case<'_> {
    fn rule(&self, is: impl Fn(&Rule) -> bool) -> bool {
        self.r.train.get(self.index).is_some_and(is)
    }

    /// Whether LoRA rules exist, and all differ from `[lora]`.
    fn lora_rules_differ(&self, differs: impl Fn(&Rule, &Lora) -> bool) -> bool {
        let mut rules = self.r.train.iter().filter(|r| r.is(Method::Lora));
        self.r.uses_lora_defaults() && rules.all(|r| differs(r, &self.r.lora))
    }

    fn one_rank(&self) -> bool {
        self.r.parallel.ranks() == 1
    }

    fn evaluates(&self) -> bool {
        self.r.data.evaluates()
    }
}

/// Keys, and when they have no effect.
struct Row {
    /// Dotted paths, entries of lists as 0.
    keys: &'static [&'static str],
    when: fn(&Case<'_>) -> bool,
    /// Keys and tables that `when` reads: with a problem in one, nothing is said.
    of: &'static [&'static str],
    /// The message, after the key.
    says: &'static str,
    hint: &'static str,
    /// Whether the recipe is refused. Otherwise it may be for another machine, launch or model, and is told.
    refused: bool,
}

macro_rules! rows {
    ($($how:ident [$($key:expr),+] if |$c:ident| $when:expr, of [$($of:expr),+]: $says:expr, $hint:expr;)+) => {
        &[$(Row {
            keys: &[$($key),+],
            when: |$c| $when,
            of: &[$($of),+],
            says: $says,
            hint: $hint,
            refused: rows!(@ $how),
        }),+]
    };
    (@ refuse) => { true };
    (@ tell) => { false };
}

const LORA: &str = " does nothing: no [[train]] rule has method = \"lora\"";
const OWN: &str = " does nothing: every rule with method = \"lora\" has another value of its own";
const FORM: &str = " does nothing: rows of this format have one form only";
const LABELS: &str =
    " does nothing: the labels of these rows say what is supervised; without labels, every token is";
const TASK: &str = " does nothing with this task";
const OUT: &str = "leave it out";
const NO_DATA: &str = " does nothing: there is nothing to evaluate on";
const EVALUATE: &str = "add [[data.eval]], or data.eval_share = 0.1, or leave it out";

const ROWS: &[Row] = rows! {
    refuse ["model.cache"] if |c| c.r.model.quantize == Quantize::None && c.facts.four_bit != Some(true),
        of ["model.quantize"]: " does nothing with quantize = \"none\"", "leave cache out, or write quantize = \"nf4\"";
    refuse ["model.cache"] if |c| c.r.model.weights == Weights::Random,
        of ["model.weights"]: " does nothing with weights = \"random\"", "leave cache out";
    tell ["model.revision"] if |c| c.facts.is_folder == Some(true),
        of ["model.source"]: " does nothing: the model is a folder of this machine", OUT;
    refuse ["lora.rank", "lora.alpha", "lora.dropout", "lora.rslora", "lora.dora"]
        if |c| c.r.train.is_empty(), of ["train"]: LORA,
        "without rules, the config of the adapter in lora.init decides";
    refuse ["lora.rank", "lora.alpha", "lora.dropout", "lora.rslora", "lora.dora", "optimizer.lr_scale_b"]
        if |c| !c.r.train.is_empty() && !c.r.uses_lora_defaults(), of ["train"]: LORA, OUT;
    tell ["lora.rank"] if |c| c.lora_rules_differ(|r, lora| r.rank != Some(lora.rank)), of ["train", "lora"]:
        OWN, "set it in the rules: train.0.rank = 8";
    tell ["lora.alpha"] if |c| c.lora_rules_differ(|r, lora| r.alpha != Some(lora.alpha)), of ["train", "lora"]:
        OWN, "set it in the rules: train.0.alpha = 16";
    tell ["lora.dropout"] if |c| c.lora_rules_differ(|r, lora| r.dropout != Some(lora.dropout)), of ["train", "lora"]:
        OWN, "set it in the rules: train.0.dropout = 0.1";
    tell ["lora.rslora"] if |c| c.lora_rules_differ(|r, lora| r.rslora != Some(lora.rslora)), of ["train", "lora"]:
        OWN, "set it in the rules: train.0.rslora = true";
    tell ["lora.dora"] if |c| c.lora_rules_differ(|r, lora| r.dora != Some(lora.dora)), of ["train", "lora"]:
        OWN, "set it in the rules: train.0.dora = true";
    refuse ["lora.init"] if |c| c.r.lora.init.decomposition().is_some() && !c.r.uses_lora_defaults(),
        of ["train", "lora"]: LORA, OUT;
    refuse ["train.0.rank", "train.0.alpha", "train.0.dropout", "train.0.rslora", "train.0.dora"]
        if |c| c.rule(|r| r.is(Method::Full)), of ["train.0.method", "train.0.modules"]:
        " does nothing with method = \"full\"", "leave it out, or write method = \"lora\"";
    refuse ["train.0.rank", "train.0.alpha", "train.0.dropout", "train.0.rslora", "train.0.dora", "train.0.lr_scale"]
        if |c| c.rule(|r| r.is(Method::Freeze)), of ["train.0.method", "train.0.modules"]:
        " does nothing with method = \"freeze\"", OUT;
    refuse ["train.0.tokens"] if |c| c.rule(|r| !r.is_of_tokens()), of ["train.0.modules"]:
        " does nothing without modules = [\"new_tokens\"]", "leave it out, or give the tokens a rule of their own";
    refuse ["train.0.method", "train.0.layers", "train.0.experts", "train.0.rank", "train.0.alpha", "train.0.dropout",
            "train.0.rslora", "train.0.dora"]
        if |c| c.rule(Rule::is_of_tokens), of ["train.0.modules"]:
        " does nothing with modules = [\"new_tokens\"]", "leave it out: the rows themselves train";
    refuse ["data.mask"] if |c| c.r.data.all_sources().all(|s| s.mask.is_some()),
        of ["data"]: " does nothing: every source has a mask of its own", OUT;
    tell ["data.mask"] if |c| c.r.data.all_sources().all(|s| s.format.is_some_and(has_labels)), of ["data"]:
        LABELS, OUT;
    tell ["data.train.0.mask"]
        if |c| c.r.data.mask.is_none()
            && c.r.data.train.get(c.index).and_then(|s| s.format).is_some_and(has_labels),
        of ["data.mask", "data.train.0.format"]: LABELS, OUT;
    tell ["data.eval.0.mask"]
        if |c| c.r.data.mask.is_none()
            && c.r.data.eval.get(c.index).and_then(|s| s.format).is_some_and(has_labels),
        of ["data.mask", "data.eval.0.format"]: LABELS, OUT;
    refuse ["data.chat_template", "data.template"]
        if |c| c.r.data.all_sources().all(|s| s.format.is_some_and(|f| match f {
            // the template of the teacher's rows
            Format::Tokens => c.r.task != Task::Distill,
            Format::Text => true,
            _ => f.has_forms() && s.form == Some(Form::Plain),
        })),
        of ["data"]: " does nothing: no source holds conversations", "leave it out, or set format = \"messages\"";
    refuse ["data.train.0.form"]
        if |c| c.r.data.train.get(c.index).and_then(|s| s.format).is_some_and(|f| !f.has_forms()),
        of ["data.train.0.format"]: FORM, OUT;
    refuse ["data.eval.0.form"]
        if |c| c.r.data.eval.get(c.index).and_then(|s| s.format).is_some_and(|f| !f.has_forms()),
        of ["data.eval.0.format"]: FORM, OUT;
    tell ["data.train.0.config", "data.train.0.revision"]
        if |c| c.facts.resolved && c.r.data.train.get(c.index).is_some_and(|s| s.fetched.is_empty()),
        of ["data"]: " does nothing: the rows are not of the hub", OUT;
    tell ["data.eval.0.config", "data.eval.0.revision"]
        if |c| c.facts.resolved && c.r.data.eval.get(c.index).is_some_and(|s| s.fetched.is_empty()),
        of ["data"]: " does nothing: the rows are not of the hub", OUT;
    refuse ["data.over_length"] if |c| c.r.data.over_length == OverLength::Split && c.r.task.has_objective(),
        of ["task"]: " = \"split\" divides documents, and this task reads each as a whole",
        "\"truncate\", \"drop\" or \"error\"";
    refuse ["preference.loss", "preference.beta"] if |c| !c.r.task.prefers(), of ["task"]: TASK, OUT;
    refuse ["preference.label_smoothing"]
        if |c| !c.r.task.prefers() || !c.r.preference.loss(c.r.task).smooths(),
        of ["task", "preference.loss"]: " does nothing with this loss", OUT;
    refuse ["preference.gamma"] if |c| c.r.task != Task::Simpo, of ["task"]: TASK, OUT;
    refuse ["preference.nll"] if |c| c.r.task != Task::Cpo, of ["task"]: TASK, OUT;
    refuse ["preference.desirable_weight", "preference.undesirable_weight"] if |c| c.r.task != Task::Kto,
        of ["task"]: TASK, OUT;
    refuse ["preference.reference"] if |c| !c.r.task.has_reference(), of ["task"]: TASK, OUT;
    refuse ["distill.temperature", "distill.alpha"] if |c| c.r.task != Task::Distill, of ["task"]: TASK, OUT;
    tell ["distill.temperature"] if |c| c.r.distill.alpha == 0.0, of ["distill.alpha"]:
        " does nothing with alpha = 0.0: the teacher has no weight", OUT;
    refuse ["classify.labels", "classify.num_labels"] if |c| c.r.task != Task::Classify, of ["task"]: TASK, OUT;
    refuse ["run.eval_every"] if |c| !c.evaluates() && c.r.log.samples.is_empty(),
        of ["data.eval", "data.eval_share", "log.samples"]: NO_DATA,
        "add [[data.eval]], data.eval_share = 0.1 or log.samples, or leave it out";
    refuse ["generate.samples"] if |c| !c.evaluates(), of ["data.eval", "data.eval_share"]: NO_DATA, EVALUATE;
    tell ["run.eval_at_start"] if |c| !c.evaluates(), of ["data.eval", "data.eval_share"]: NO_DATA, EVALUATE;
    refuse ["run.keep_best", "run.patience"] if |c| !(c.evaluates() && c.r.run.eval_every.recurs()),
        of ["data.eval", "data.eval_share", "run.eval_every"]: " does nothing: the run does not evaluate on its way",
        "set run.eval_every, with [[data.eval]] or data.eval_share";
    refuse ["run.best"] if |c| !c.r.run.keep_best && c.r.run.patience == 0, of ["run.keep_best", "run.patience"]:
        " does nothing without keep_best or patience", "keep_best = true keeps the best checkpoint";
    tell ["run.epochs"] if |c| c.r.run.steps.is_some(), of ["run.steps"]:
        " does nothing: run.steps is given", "leave one of them out";
    refuse ["generate.temperature", "generate.regex"] if |c| c.r.generate.samples == 0,
        of ["generate.samples"]: " does nothing: generate.samples is 0", "generate.samples = 100, or leave it out";
    tell ["generate.max_new_tokens"] if |c| c.r.generate.samples == 0,
        of ["generate.samples"]: " does nothing: generate.samples is 0", "generate.samples = 100, or leave it out";
    refuse ["optimizer.min_lr"] if |c| c.r.optimizer.schedule == Schedule::Constant,
        of ["optimizer.schedule"]: " does nothing with schedule = \"constant\"",
        "leave min_lr out, or choose \"cosine\" or \"linear\"";
    tell ["optimizer.min_lr", "optimizer.schedule"] if |c| c.r.optimizer.warmup_ratio == Some(1.0),
        of ["optimizer.warmup_ratio"]: " does nothing with warmup_ratio = 1.0: the rate rises to the end", OUT;
    tell ["optimizer.decay"] if |c| c.r.optimizer.weight_decay == 0.0,
        of ["optimizer.weight_decay"]: " does nothing with weight_decay = 0.0", OUT;
    // a score head and modules_to_save of an adapter train in full without a rule
    refuse ["optimizer.master"]
        if |c| !c.r.task.has_scores() && !c.r.train.is_empty() && c.r.train.iter().all(|r| !r.is(Method::Full)),
        of ["task", "train"]: " does nothing: it is for what trains in full, and no rule trains anything so",
        "leave it out: LoRA's master weights are small, and kept";
    tell ["optimizer.master"] if |c| c.r.model.dtype == Some(Dtype::F32) || c.facts.in_f32 == Some(true),
        of ["model.dtype"]: " does nothing where layers compute in f32: weights are their own masters", OUT;
    refuse ["optimizer.galore_rank", "optimizer.galore_gap", "optimizer.galore_scale"]
        if |c| !c.r.optimizer.name.projects(), of ["optimizer.name"]: " does nothing without GaLore",
        "leave it out, or write optimizer.name = \"galore\"";
    refuse ["memory.scale"] if |c| c.r.model.dtype != Some(Dtype::F16), of ["model.dtype"]:
        " does nothing: only training in f16 scales the loss", "leave it out, or write model.dtype = \"f16\"";
    refuse ["memory.products"] if |c| matches!(c.r.model.dtype, Some(Dtype::F32 | Dtype::F16))
            && c.r.memory.products == Products::Fp8,
        of ["model.dtype"]: " = \"fp8\" has bf16 results, and model.dtype is another",
        "leave it out, or write model.dtype = \"bf16\"";
    tell ["memory.dequantize"] if |c| c.r.model.quantize == Quantize::None && c.facts.four_bit == Some(false),
        of ["model.quantize"]: " does nothing: no weights have 4 bits",
        "leave it out, or write model.quantize = \"nf4\"";
    tell ["memory.offload"]
        if |c| c.r.memory.offloads(Offload::Activations) && c.r.memory.recompute == Recompute::None,
        of ["memory.recompute"]: ": \"activations\" does nothing with memory.recompute = \"none\": inputs of layers \
        that are computed again go to the host", "leave it out, or write memory.recompute = \"auto\"";
    tell ["memory.offload", "memory.pin"] if |c| c.facts.cuda == Some(false), of ["run.device"]:
        " does nothing on the CPU, where the host is the device", OUT;
    tell ["parallel.zero"] if |c| c.r.parallel.stage() == 1, of ["parallel"]:
        " does nothing with one rank", "leave it out, or write parallel.data = 2";
    tell ["parallel.timeout", "parallel.comm"] if |c| c.one_rank(), of ["parallel"]:
        " does nothing with one rank", "leave it out, or write parallel.data = 2";
    refuse ["log.mlflow_experiment"] if |c| c.r.log.mlflow.is_none(), of ["log.mlflow"]:
        " does nothing: log.mlflow is not set", "set log.mlflow, or leave it out";
    refuse ["serve.port"] if |c| c.r.serve.devices.is_empty(), of ["serve.devices"]:
        " does nothing: serve.devices is empty", "serve.devices = [\"cuda:1\"], or leave it out";
};

/// Whether rows mark their own targets.
fn has_labels(format: Format) -> bool {
    matches!(format, Format::Tokens | Format::Labeled)
}

/// A given key without effect.
struct Idle {
    path: String,
    message: String,
    hint: &'static str,
}

impl Recipe {
    /// Warnings about given keys without effect, now that `facts` are known, and about a reference without the
    /// continued adapter.
    pub fn warnings(&self, facts: Facts) -> Vec<String> {
        let all = self.idle_keys(facts, false, &|_| false);
        let line = |i: Idle| format!("{}: {}\n  hint: {}", self.place(&i.path), i.message, i.hint);
        all.into_iter().map(line).chain(self.reference_below_adapter()).collect()
    }

    /// Given keys without effect, each once; only of refused ones if `refused`. Skips rows with a `bad` key.
    fn idle_keys(&self, facts: Facts, refused: bool, bad: &dyn Fn(&str) -> bool) -> Vec<Idle> {
        let idle = |path: &String| {
            let row = self.idle_row(path, facts, refused, bad)?;
            Some(Idle { path: path.clone(), message: format!("{path}{}", row.says), hint: row.hint })
        };
        self.changed.iter().filter_map(idle).collect()
    }

    /// Whether the resolved recipe leaves out the key at `path`, because it would be refused.
    pub(crate) fn is_idle(&self, path: &str) -> bool {
        self.idle_row(path, Facts::default(), true, &|_| false).is_some()
    }

    fn idle_row(
        &self,
        path: &str,
        facts: Facts,
        refused: bool,
        bad: &dyn Fn(&str) -> bool,
    ) -> Option<&'static Row> {
        let (general, index) = first_index(path);
        let case = Case { r: self, facts, index };
        let here = |of: &str| of.replacen(".0.", &format!(".{index}."), 1);
        ROWS.iter().find(|row| {
            row.keys.contains(&general.as_str())
                && (row.refused || !refused)
                && !row.of.iter().chain([&path]).any(|of| bad(&here(of)))
                && (row.when)(&case)
        })
    }
}

impl Cross<'_, '_> {
    /// Refuses given keys without effect.
    pub(super) fn idle(&mut self, recipe: &Recipe) {
        let bad = |path: &str| {
            let touches = |b: &String| {
                let inside =
                    |a: &str, b: &str| a.strip_prefix(b).is_some_and(|r| r.is_empty() || r.starts_with('.'));
                inside(b, path) || inside(path, b)
            };
            self.checker.bad.iter().any(touches)
        };
        for i in recipe.idle_keys(Facts::default(), true, &bad) {
            self.report(&i.path, i.message, i.hint);
        }
    }
}

/// The dotted paths of given keys with another value than their default; of a rule, all.
pub(crate) fn changed(root: &Table) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    root.walk("", &mut |path, _| {
        let Some(key) = find_key(&path) else { return };
        let default = match key.default {
            Unset::Toml(text) if !path.starts_with("train.") => parse_value(text).map(|n| n.value),
            _ => None,
        };
        let table = matches!(key.kind, Kind::Table(_) | Kind::Tables(_));
        if !table && root.find(&path).map(|n| &n.value) != default.as_ref() {
            paths.insert(path);
        }
    });
    paths
}

/// A path with the list index as 0, and the index.
fn first_index(path: &str) -> (String, usize) {
    let index = path.split('.').find_map(|part| part.parse().ok()).unwrap_or(0);
    (first_entries(path), index)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row names existing keys.
    #[test]
    fn rows_of_idle_keys_name_existing_keys() {
        for row in ROWS {
            for key in row.keys.iter().chain(row.of) {
                assert!(find_key(key).is_some(), "{key}");
            }
            for key in row.keys.iter().filter(|key| !key.starts_with("train.")) {
                let default = find_key(key).map(|key| key.default);
                assert!(!matches!(default, Some(Unset::Required)), "{key}");
            }
            assert!(row.says.starts_with([' ', ':']) && !row.hint.is_empty(), "{}", row.says);
        }
    }
}
