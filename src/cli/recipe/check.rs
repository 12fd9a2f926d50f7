//! `ft check`: all problems of a recipe, the model and the data at once, without loading weights.

use super::summary::Found;
use crate::cli::args::RecipeArgs;
use crate::cli::console::print_wrapped;
use crate::cli::train::processes;
use crate::train::{self, Job, job, log, reference_model, rows, server, sources};
use ft_base::error::{Error, ExitCode};
use ft_base::terminal::warn;
use ft_data::Tokenizer;
use ft_engine::adapters::{Adapter, initial};
use ft_engine::load::Base;
use ft_engine::params::build::check_full;
use ft_hub::{Settings, Want};
use ft_kernels::cuda;
use ft_plan::{Plan, Resolved, Target, Workload, Workloads, resolve, source};
use ft_recipe::{Device, Part, Recipe, Source, Weights};
use std::collections::HashSet;
use std::sync::Arc;

/// Arguments of `ft check`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    recipe: RecipeArgs,
}

/// Runs all checks, and prints a summary if they pass. Returns the problems in order.
pub fn run(args: &Args) -> Vec<Error> {
    let mut recipe = match args.recipe.load() {
        Ok(recipe) => recipe,
        Err(e) => return vec![e],
    };
    let (mut errors, (found, unchecked)) = all(&mut recipe, Settings::from_env());
    for what in unchecked.iter().filter(|_| !errors.is_empty()) {
        warn(&format!("not checked: {what}"));
    }
    if errors.is_empty()
        && let Err(e) = print_wrapped(&found.summary(&recipe, &unchecked))
    {
        errors.push(e);
    }
    errors
}

/// Runs all checks: the problems; the findings, and what could not be checked.
pub(super) fn all(recipe: &mut Recipe, settings: Settings) -> (Vec<Error>, (Found, Vec<String>)) {
    let unsettled = sources::resolve(&settings, recipe, true);
    let rows = unsettled.is_empty();
    let (mut errors, mut unchecked) = (Vec::new(), Vec::new());
    // the processes are those of the recipe before a layout is chosen
    let written = recipe.clone();
    match train::choose_layout(recipe, false) {
        Err(e) if e.exit_code() == ExitCode::Usage && job::device(recipe.run.device).is_ok() => {
            errors.push(e)
        }
        Err(e) => unchecked.push(format!("the layout of parallel = \"auto\": {}", first_line(&e))),
        Ok(()) => {}
    }
    let mut check = Check { recipe, written: &written, settings: &settings, rows, errors, unchecked };
    for e in unsettled {
        check.reach::<()>("the rows", Err(e));
    }
    let found = check.all();
    // training and evaluation data may report the same problem
    let mut seen = HashSet::new();
    check.errors.retain(|e| seen.insert(e.to_string()));
    (check.errors, (found, check.unchecked))
}

/// State of a check.
struct Check<'a> {
    recipe: &'a Recipe,
    /// The recipe before a layout is chosen.
    written: &'a Recipe,
    settings: &'a Settings,
    /// Whether all data sources were resolved.
    rows: bool,
    errors: Vec<Error>,
    /// Checks not possible, with reasons.
    unchecked: Vec<String>,
}

impl Check<'_> {
    /// Records an error, or returns the value.
    fn keep<T, E: Into<Error>>(&mut self, outcome: Result<T, E>) -> Option<T> {
        outcome.map_err(|e| self.errors.push(e.into())).ok()
    }

    /// Like [`Check::keep`], but an unreachable hub is recorded as "not checked" instead of an error.
    fn reach<T>(&mut self, what: &str, outcome: ft_base::Result<T>) -> Option<T> {
        match outcome {
            Err(e) if is_out_of_reach(&e) => {
                self.unchecked.push(format!("{what}: {}", first_line(&e)));
                None
            }
            outcome => self.keep(outcome),
        }
    }

    fn all(&mut self) -> Found {
        let recipe = self.recipe;
        let (cuda, device) = self.machine();
        let before = self.errors.len();
        let compute = cuda.map(|cuda| (cuda, resolve::dtype(recipe.model.dtype, cuda)));
        let mut found = Found { compute, ..Found::default() };
        let adapter = self.reach("the adapter", job::adapter(self.settings, recipe, true)).flatten();
        let adapter_lost = adapter.is_none() && recipe.lora.init.adapter().is_some();

        self.model(&mut found);
        if let (Some(config), Some(adapter)) = (&mut found.config, &adapter) {
            adapter.config.set_layout(config);
        }
        job::tell_idle(recipe, compute, found.config.as_ref(), self.rows);
        let Some(config) = &found.config else {
            self.unchecked.push("what trains, tokenizer and rows, which need the model's config".into());
            self.sources();
            return found;
        };
        self.keep(job::check_model(recipe, config));
        self.keep(resolve::check_experts(recipe, config));
        self.keep(resolve::check_stages(recipe, config));
        // without rules, the adapter determines the trained modules
        if !(adapter_lost && recipe.train.is_empty()) {
            found.selection = self.keep(job::selection(recipe, config, adapter.as_ref()));
        }
        if let Some(cuda) = cuda.filter(|_| self.errors.len() == before) {
            self.keep(self.plan(&found, cuda, device.as_ref()));
        }
        let tokenizer = self.tokenizer(adapter.as_ref());
        if let (Some(tokenizer), Some(selection)) = (&tokenizer, &mut found.selection) {
            self.keep(job::token_rows(selection, config, tokenizer.as_ref()));
        }
        if let Some(tokenizer) = &tokenizer {
            self.keep(job::samples(recipe, tokenizer.as_ref()));
        }
        match &tokenizer {
            Some(tokenizer) if self.rows => self.data(&mut found, tokenizer.as_ref()),
            _ => self.sources(),
        }
        self.weights(&mut found, adapter.as_ref());
        if let Some(device) = device {
            self.reference(&found, device, (adapter, tokenizer.flatten()));
        }
        found
    }

    /// Plans what was found, since a plan refuses settings too. Whether it fits this machine is a matter of `ft plan`;
    /// too small a budget of the recipe gives a warning.
    fn plan(&self, found: &Found, cuda: bool, device: Option<&candle_core::Device>) -> ft_base::Result<()> {
        let (Some(config), Some(selection)) = (&found.config, &found.selection) else { return Ok(()) };
        device.map_or(Ok(()), |device| job::check_products(self.recipe, device))?;
        let target = device.map_or_else(|| Target::from(cuda), Target::of);
        let (dir, workloads) = (found.model.as_ref().map(|m| &*m.dir), Workloads::new(Workload::of_recipe));
        let inputs = Resolved::inputs(self.recipe, (config, selection), (target, dir), &workloads, None)?;
        let plan = Plan::new(&inputs)?;
        if self.recipe.memory.budget.is_some() && !plan.fits_device() {
            warn(&format!("memory.budget: {}", plan.verdict()));
        }
        Ok(())
    }

    /// Checks devices and the output folder; whether the run is on CUDA, and its device if one is here.
    fn machine(&mut self) -> (Option<bool>, Option<candle_core::Device>) {
        let recipe = self.recipe;
        let absent = recipe.run.device == Device::Cuda && cuda::count() == 0;
        let device = if absent {
            let how = "memory and libraries of the CUDA device: none is here, and ft run needs one";
            self.unchecked.push(how.into());
            None
        } else {
            self.keep(job::device(recipe.run.device))
        };
        if let Some(device) = &device {
            let program = std::env::current_exe().ok();
            self.keep(server::check(recipe, device.is_cuda(), program.as_deref()));
        }
        let cuda = device.as_ref().map(|d| d.is_cuda()).or(absent.then_some(true));
        let ranks = match &device {
            Some(device) => processes::wanted(self.written).and_then(|started| match started {
                Some(_) => Ok(()),
                None => Ok(train::check_ranks(recipe, device.is_cuda(), None)?),
            }),
            None => cuda.map_or(Ok(()), |cuda| Ok(train::check_comm(recipe, cuda)?)),
        };
        self.keep(ranks);
        self.keep(log::check(recipe));
        self.keep(train::check_writable(recipe));
        (cuda, device)
    }

    /// Finds the model and its config.
    fn model(&mut self, found: &mut Found) {
        let model = job::model(self.settings, self.recipe, Want::Config, true);
        let known = self.keep(source::built_in(&self.recipe.model)).flatten();
        found.model = match known {
            Some(_) => self.reach("the model's files", model),
            None => self.keep(model),
        };
        let config = match (&found.model, known) {
            (Some(model), _) => self.keep(job::config(&model.dir, &self.recipe.model.overrides)),
            (None, known) => known.map(|(config, _)| config),
        };
        found.config = config.and_then(|c| self.keep(job::of_task(self.recipe, c.clone())).or(Some(c)));
    }

    /// The tokenizer; the outer `Option` is `None` if it cannot be fetched, the inner if the model has
    /// none.
    fn tokenizer(&mut self, adapter: Option<&Adapter>) -> Option<Option<Tokenizer>> {
        let recipe = self.recipe;
        let model = job::model(self.settings, recipe, Want::Tokenizer, true);
        let model = self.reach("tokenizer, chat template and rows", model)?;
        self.keep(job::tokenizer(recipe, &model.dir, adapter))
    }

    /// Without a tokenizer, checks only that the data files exist.
    fn sources(&mut self) {
        let recipe = self.recipe;
        let sources = recipe.data.all_sources();
        let here = |s: &&Source| ft_data::is_hub_id(&s.source).is_none() || !s.fetched.is_empty();
        let find = |s| ft_data::find(s, &|s| recipe.resolve(s));
        self.errors.extend(sources.filter(here).filter_map(|s| find(s).err()).map(Error::from));
    }

    fn data(&mut self, found: &mut Found, tokenizer: Option<&Tokenizer>) {
        let Some(config) = &found.config else { return };
        let recipe = self.recipe;
        let mut data = recipe.data.clone();
        sources::settle_forms(&mut data, tokenizer.is_some_and(Tokenizer::has_template), true);
        let checked = rows::check(recipe, &data, tokenizer, config.vocab);
        let bad = !checked.problems.is_empty();
        self.errors.extend(checked.problems.into_iter().map(Error::from));
        let parts = [(Part::Train, &checked.train), (Part::Eval, &checked.eval)];
        for part in parts.into_iter().filter_map(|(part, data)| Some((part, data.as_ref()?))) {
            self.keep(train::check_taught(recipe, tokenizer, part));
        }
        if !bad {
            self.keep(train::check_questions(recipe, tokenizer, checked.eval.as_ref()));
        }
        if let Some(train) = &checked.train {
            self.keep(rows::tell_data(Part::Train.key(&data), train, config));
            if !bad {
                rows::tell_few(recipe, train);
                let batches = self.keep(rows::batches(recipe, train));
                batches.iter().for_each(|b| rows::tell_steps(recipe, b));
                found.steps = batches.map(|b| b.steps());
            }
        }
        // held-out samples are part of the training data: told already
        if let Some(eval) = checked.eval.as_ref().filter(|_| data.eval_share == 0.0) {
            self.keep(rows::tell_data(Part::Eval.key(&data), eval, config));
        }
        if let (Some(train), Some(eval)) = (&checked.train, &checked.eval) {
            self.keep(rows::tell_shared(train, eval));
            rows::tell_single(recipe, eval);
        }
        found.train = checked.train.map(|d| d.stats);
        found.eval = checked.eval.map(|d| d.stats);
    }

    /// Checks names and shapes of the weights' tensors, if they are on this machine.
    fn weights(&mut self, found: &mut Found, adapter: Option<&Adapter>) {
        let (Some(config), recipe) = (&found.config, self.recipe) else { return };
        if let (Some(adapter), Some(selection)) = (adapter, &found.selection) {
            self.keep(adapter.check_against(selection, &selection.trained()));
            self.keep(adapter.check_values());
            self.keep(job::tell_init_quantize(recipe, config, adapter));
        }
        if recipe.model.weights == Weights::Random {
            return;
        }
        let cached = Settings { offline: true, ..self.settings.clone() };
        let model = match job::model(&cached, recipe, Want::Weights, false) {
            Err(e) if matches!(e.of(), Some(ft_hub::Error::NotCached { .. })) => {
                self.unchecked.push("the weights, which are not downloaded yet".into());
                return;
            }
            outcome => self.keep(outcome),
        };
        let Some(model) = model else { return };
        let Some(base) = self.keep(Base::open(config.clone(), &model.dir)) else { return };
        self.keep(base.check());
        if let Some(selection) = &found.selection {
            let prepared = initial::prepared(base.clone(), recipe, selection);
            self.keep(prepared.and_then(|base| check_full(&base, selection, adapter)));
        }
        if let (Some(adapter), Some(files)) = (adapter, base.files()) {
            self.keep(adapter.check_base(files, config));
        }
        found.weights = true;
    }

    /// Checks another model as reference, if it is on this machine.
    fn reference(
        &mut self,
        found: &Found,
        device: candle_core::Device,
        (adapter, tokenizer): (Option<Adapter>, Option<Tokenizer>),
    ) {
        let (Some(model), Some(config), Some(selection)) = (&found.model, &found.config, &found.selection)
        else {
            return;
        };
        let Some(other) = reference_model::recipe_of(self.recipe) else { return };
        let cached = Settings { offline: true, ..self.settings.clone() };
        let files = job::model(&cached, &other, Want::Weights, false);
        if files.as_ref().is_err_and(is_out_of_reach) {
            self.reach("the reference", files);
            return;
        }
        let job = Job {
            recipe: self.recipe.clone(),
            dtype: job::dtype(self.recipe.model.dtype, &device),
            device,
            model: model.clone(),
            config: config.clone(),
            tokenizer: tokenizer.map(Arc::new),
            selection: selection.clone(),
            adapter: adapter.map(Arc::new),
        };
        self.keep(reference_model::check(&job));
    }
}

fn first_line(e: &Error) -> String {
    e.to_string().lines().next().unwrap_or_default().into()
}

/// Whether an error means that the hub cannot be asked.
fn is_out_of_reach(e: &Error) -> bool {
    use ft_hub::Error::{NotCached, Unreachable, WithoutHub};
    matches!(e.of(), Some(Unreachable { .. } | NotCached { .. } | WithoutHub { .. }))
}
