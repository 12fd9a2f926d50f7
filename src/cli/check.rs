//! `ft check`: all problems of a recipe, the model and the data at once, without loading weights.

use super::RecipeArgs;
use crate::train::{job, rows, server, sources};
use candle_core::{DType, Device};
use ft_base::error::Error;
use ft_base::store;
use ft_base::terminal::warn;
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_data::{Dataset, Stats, Tokenizer};
use ft_engine::adapt::build::check_full;
use ft_engine::adapt::{Adapter, Choice, Selection, initial, learning_rates};
use ft_engine::load::Base;
use ft_engine::model::Config;
use ft_engine::model::modules::{Group, parameters};
use ft_plan::source;
use ft_recipe::{Part, Quantize, Recipe, Source, Weights};
use std::collections::HashSet;
use std::fmt::Write;

/// Most data problems shown.
const SHOWN: usize = 20;

/// Arguments of `ft check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
}

/// Runs all checks, and prints a summary if they pass. Returns the problems in order.
pub fn run(args: &Args) -> Vec<Error> {
    let mut recipe = match Recipe::load(&args.recipe.recipe, &args.recipe.set) {
        Ok(recipe) => recipe,
        Err(e) => return vec![e.into()],
    };
    let unsettled = sources::resolve(&Settings::from_env(), &mut recipe, true);
    let rows = unsettled.is_empty();
    let mut check = Check { recipe: &recipe, rows, errors: Vec::new(), unchecked: Vec::new() };
    for e in unsettled {
        check.reach::<()>("the rows", Err(e));
    }
    let found = check.all();
    for what in check.unchecked.iter().filter(|_| !check.errors.is_empty()) {
        warn(&format!("not checked: {what}"));
    }
    if check.errors.is_empty()
        && let Err(e) = super::print(&found.summary(&recipe, &check.unchecked))
    {
        check.errors.push(e);
    }
    // training and evaluation data may report the same problem
    let mut told = HashSet::new();
    check.errors.retain(|e| told.insert(e.to_string()));
    check.errors
}

/// State of a check.
struct Check<'a> {
    recipe: &'a Recipe,
    /// Whether all data sources were resolved.
    rows: bool,
    errors: Vec<Error>,
    /// Checks not possible, with reasons.
    unchecked: Vec<String>,
}

/// Results of the checks; failed or skipped parts are `None`.
#[derive(Default)]
struct Found {
    compute: Option<(Device, DType)>,
    model: Option<ModelDir>,
    config: Option<Config>,
    selection: Option<Selection>,
    train: Option<Stats>,
    eval: Option<Stats>,
    steps: Option<usize>,
    weights: bool,
}

impl Check<'_> {
    /// Records an error, or returns the value.
    fn keep<T>(&mut self, outcome: ft_base::Result<T>) -> Option<T> {
        outcome.map_err(|e| self.errors.push(e)).ok()
    }

    /// Like [`Check::keep`], but an unreachable hub is recorded as "not checked" instead of an error.
    fn reach<T>(&mut self, what: &str, outcome: ft_base::Result<T>) -> Option<T> {
        match outcome {
            Err(e)
                if matches!(
                    e.of(),
                    Some(
                        hub::Error::Unreachable { .. }
                            | hub::Error::NotCached { .. }
                            | hub::Error::WithoutHub { .. }
                    )
                ) =>
            {
                let why = e.to_string();
                self.unchecked.push(format!("{what}: {}", why.lines().next().unwrap_or_default()));
                None
            }
            outcome => self.keep(outcome),
        }
    }

    fn all(&mut self) -> Found {
        let recipe = self.recipe;
        let settings = Settings::from_env();
        let device = self.keep(job::device(recipe.run.device).map_err(Error::from));
        if let Some(device) = &device {
            let program = std::env::current_exe().ok();
            self.keep(server::check(recipe, device.is_cuda(), program.as_deref()).map_err(Error::from));
        }
        let output = &recipe.run.output;
        if output.exists() && !output.is_dir() {
            let why = std::io::ErrorKind::NotADirectory.into();
            self.errors.push(store::Error::write("create", output, None, why).into());
        }
        let compute = device.map(|d| (d.clone(), job::dtype(recipe.model.dtype, &d)));
        let mut found = Found { compute, ..Found::default() };
        let adapter_outcome = job::adapter(&settings, recipe, true);
        let adapter = self.reach("the adapter", adapter_outcome).flatten();
        let adapter_lost = adapter.is_none() && recipe.lora.init.adapter().is_some();

        let model = job::model(&settings, recipe, Want::Config, true);
        let known = self.keep(source::built_in(&recipe.model).map_err(Error::from)).flatten();
        found.model = match known {
            Some(_) => self.reach("the model's files", model),
            None => self.keep(model),
        };
        found.config = match (&found.model, known) {
            (Some(model), _) => self.keep(job::config(&model.dir, &recipe.model.overrides)),
            (None, known) => known.map(|(config, _)| config),
        };
        let Some(config) = &found.config else {
            self.unchecked.push("what trains, tokenizer and rows, which need the model's config".into());
            self.sources();
            return found;
        };
        self.keep(job::check_routers(recipe, config).map_err(Error::from));
        // without rules, the adapter determines the trained modules
        if !(adapter_lost && recipe.train.is_empty()) {
            found.selection = self.keep(job::selection(recipe, config, adapter.as_ref()));
        }
        let tokenizer = self.tokenizer(&settings, adapter.as_ref());
        if let (Some(tokenizer), Some(selection)) = (&tokenizer, &mut found.selection) {
            self.keep(selection.look_up(config, tokenizer.as_ref()).map_err(Error::from));
        }
        if let Some(tokenizer) = &tokenizer {
            self.keep(job::sample(recipe, tokenizer.as_ref()));
        }
        match &tokenizer {
            Some(tokenizer) if self.rows => self.data(&mut found, tokenizer.as_ref()),
            _ => self.sources(),
        }
        self.weights(&settings, &mut found, adapter.as_ref());
        found
    }

    /// The tokenizer; the outer `Option` is `None` if it cannot be fetched, the inner if the model has
    /// none.
    fn tokenizer(&mut self, settings: &Settings, adapter: Option<&Adapter>) -> Option<Option<Tokenizer>> {
        let recipe = self.recipe;
        let model = job::model(settings, recipe, Want::Tokenizer, true);
        let model = self.reach("tokenizer, chat template and rows", model)?;
        self.keep(job::tokenizer(recipe, &model.dir, adapter))
    }

    /// Without a tokenizer, checks only that the data files exist.
    fn sources(&mut self) {
        let d = &self.recipe.data;
        let sources = d.train.iter().chain(&d.eval);
        let here = |s: &&Source| ft_data::is_hub_id(&s.source).is_none() || !s.fetched.is_empty();
        let problems =
            sources.filter(here).filter_map(|s| ft_data::find(s, &|s| self.recipe.resolve(s)).err());
        let problems: Vec<Error> = problems.map(Error::from).collect();
        self.errors.extend(problems);
    }

    fn data(&mut self, found: &mut Found, tokenizer: Option<&Tokenizer>) {
        let Some(config) = &found.config else { return };
        let (recipe, vocab) = (self.recipe, config.vocab);
        let resolve = |s: &str| recipe.resolve(s);
        let mut trained_on = None;
        for part in [Part::Train, Part::Eval] {
            let train = part == Part::Train;
            if recipe.data.sources(part).is_empty() {
                continue;
            }
            let checked =
                Dataset::check(part, &recipe.data, &resolve, tokenizer, vocab, recipe.run.seed, SHOWN);
            let bad = !checked.problems.is_empty();
            self.errors.extend(checked.problems.into_iter().map(Error::from));
            if checked.more > 0 {
                warn(&format!("{} more problems in the data are not shown", checked.more));
            }
            let Some(dataset) = checked.dataset else { continue };
            self.keep(rows::tell_data(part.key(&recipe.data), &dataset, config));
            if train && !bad {
                rows::tell_few(recipe, &dataset);
                found.steps = self.keep(rows::batches(recipe, &dataset)).map(|b| b.steps());
            }
            if let Some(train) = &trained_on {
                self.keep(rows::tell_shared(train, &dataset));
            }
            *(if train { &mut found.train } else { &mut found.eval }) = Some(dataset.stats.clone());
            if train {
                trained_on = Some(dataset);
            }
        }
    }

    /// Checks names and shapes of the weights' tensors, if they are on this machine.
    fn weights(&mut self, settings: &Settings, found: &mut Found, adapter: Option<&Adapter>) {
        let (Some(config), recipe) = (&found.config, self.recipe) else { return };
        if let (Some(adapter), Some(selection)) = (adapter, &found.selection) {
            self.keep(adapter.check_against(selection, &selection.trained()));
            self.keep(adapter.check_values());
        }
        // 4-bit weights of the checkpoint itself are unknown before it is downloaded
        if let Some(selection) = &found.selection {
            let quantize = recipe.model.quantize == Quantize::Nf4;
            let initials = self.keep(initial::initials(recipe, selection).map_err(Error::from)).flatten();
            let base = Base::random(config.clone(), 0).in_nf4(quantize).with_initials(initials);
            let outcome = check_full(&base, selection, adapter);
            self.keep(outcome.map_err(Error::from));
        }
        if recipe.model.weights == Weights::Random {
            return;
        }
        let cached = Settings { offline: true, ..settings.clone() };
        let model = match job::model(&cached, recipe, Want::Weights, false) {
            Err(e) if matches!(e.of(), Some(hub::Error::NotCached { .. })) => {
                self.unchecked.push("the weights, which are not downloaded yet".into());
                return;
            }
            outcome => self.keep(outcome),
        };
        let Some(model) = model else { return };
        let opened = Base::open(config.clone(), &model.dir).map_err(Error::from);
        let Some(base) = self.keep(opened) else { return };
        self.keep(base.check().map_err(Error::from));
        if let Some(selection) = &found.selection {
            let outcome = check_full(&base, selection, adapter);
            self.keep(outcome.map_err(Error::from));
        }
        if let (Some(adapter), Some(files)) = (adapter, base.files()) {
            self.keep(adapter.check_base(files, config.tied));
        }
        found.weights = true;
    }
}

impl Found {
    fn summary(&self, recipe: &Recipe, unchecked: &[String]) -> String {
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
            let at_a_time = match recipe.run.micro_rows.is_auto() {
                true => "as many as is fastest".to_string(),
                false => recipe.run.micro_rows.count().to_string(),
            };
            lines
                .push(("steps", format!("{steps} of {} rows, {at_a_time} at a time", recipe.run.batch_rows)));
        }
        if let Some((device, dtype)) = &self.compute {
            let name = if device.is_cpu() { "CPU" } else { "CUDA" };
            lines.push(("runs on", format!("{name}, {}", dtype.as_str())));
        }
        lines.push(("writes to", recipe.run.output.display().to_string()));
        if self.weights {
            lines.push(("weights", "names and shapes of all tensors fit".into()));
        }
        lines.extend(unchecked.iter().map(|what| ("not checked", what.clone())));
        let mut out = String::new();
        for (name, text) in lines {
            let _ = writeln!(out, "{name:<12} {text}");
        }
        out
    }
}

fn rows(s: &Stats) -> String {
    let left = match s.drops.total() {
        0 => String::new(),
        n => format!(" ({n} left out)"),
    };
    format!("{} samples{left} in {} rows, {} tokens, {} supervised", s.examples, s.rows, s.tokens, s.targets)
}

/// One line per module group and training method.
fn groups(s: &Selection) -> Vec<String> {
    let mut sizes = std::collections::HashMap::new();
    for t in s.trained() {
        *sizes.entry(t.module.clone()).or_insert(0u64) += t.elements() as u64;
    }
    let mut found: Vec<(Group, String, usize, u64)> = Vec::new();
    for (m, choice) in &s.modules {
        let how = match choice {
            Choice::Freeze => continue,
            Choice::Full { .. } => "full".to_string(),
            Choice::Rows { count: 1, .. } => "the row of a token".to_string(),
            Choice::Rows { count, .. } => format!("the rows of {count} tokens"),
            Choice::Lora { spec, .. } => {
                let kind = if spec.dora { "DoRA" } else { "LoRA" };
                let rs = if spec.rslora { ", rank-stabilised" } else { "" };
                format!("{kind} rank {}, alpha {}{rs}", spec.rank, spec.alpha)
            }
        };
        let size = sizes.get(&m.name).copied().unwrap_or(0);
        match found.iter_mut().find(|(g, h, _, _)| *g == m.group && *h == how) {
            Some((_, _, modules, total)) => {
                *modules += 1;
                *total += size;
            }
            None => found.push((m.group, how, 1, size)),
        }
    }
    found.sort_by_key(|(g, ..)| *g);
    let line = |(g, how, modules, size): &(Group, String, usize, u64)| {
        let plural = if *modules == 1 { "" } else { "s" };
        format!("  {}: {modules} module{plural}, {how}, {}", g.name(), count(*size))
    };
    found.iter().map(line).collect()
}

fn count(n: u64) -> String {
    match n {
        0..10_000 => n.to_string(),
        10_000..1_000_000 => format!("{:.1} k", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} billion", n as f64 / 1e9),
    }
}
