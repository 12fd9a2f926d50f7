//! Resolves a recipe: device, model folder, config, tokenizer, selection, data.

use super::{Error, quantize, rows, sources};
use candle_core::{DType, Device};
use ft_base::memory;
use ft_base::terminal::{tell, warn};
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_data::{Added, Dataset, Form, Tokenizer, Trained};
use ft_engine::adapters::Adapter;
use ft_engine::adapters::{self, Choice, Selection};
use ft_engine::base::Base;
use ft_engine::comm::{self, Comm};
use ft_engine::model::{Config, Decoder};
use ft_engine::params::Allocate;
use ft_engine::params::Params;
use ft_engine::params::buffers::Shard;
use ft_engine::params::build::{Build, check_full};
use ft_engine::quant;
use ft_kernels::cuda;
use ft_kernels::gemm::pairs;
use ft_plan::{Allocation, Capacity, Inputs, Machine, Plan, Workload, Workloads};
use ft_recipe::{
    Device as DeviceName, Dtype, Launch, Method, Offload, OneDevice, Part, Quantize, Recipe, Rule, Token,
    Weights,
};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Chooses a selection from a recipe, a config and an adapter.
type Select<'a> = dyn Fn(&Recipe, &Config, Option<&Adapter>) -> ft_base::Result<Selection> + 'a;

/// A resolved recipe, without the weights.
#[derive(Clone)]
pub struct Job {
    /// The recipe.
    pub recipe: Recipe,
    /// Device to compute on.
    pub device: Device,
    /// Compute dtype.
    pub dtype: DType,
    /// Folder of the model.
    pub model: ModelDir,
    /// Config of the model, with `model.overrides` applied.
    pub config: Config,
    /// Tokenizer; `None` if the model has no `tokenizer.json`, or only the config is loaded.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// Choice per module: frozen, in full, LoRA, or token rows.
    pub selection: Selection,
    /// Adapter named in `lora.init`.
    pub adapter: Option<Arc<Adapter>>,
}

/// Opens the device of a recipe. On CUDA, this is device 0, or one device per process of a machine.
///
/// # Errors
/// CUDA is requested but missing, or lacks a required library; more processes than devices.
pub fn device(name: DeviceName) -> Result<Device, Error> {
    match (name, cuda::count()) {
        (DeviceName::Cpu, _) | (DeviceName::Auto, 0) => Ok(Device::Cpu),
        (_, count) => cuda::open(ordinal(count)?).map_err(Error::Device),
    }
}

/// Opens a device given by name and index.
///
/// # Errors
/// The device does not exist, or lacks a required library.
pub fn one_device(name: OneDevice) -> Result<Device, Error> {
    match (name, cuda::count()) {
        (OneDevice::Cpu, _) => Ok(Device::Cpu),
        (OneDevice::Cuda(n), count) if n > 0 && n >= count => {
            let are = if count == 1 { "is 1" } else { &format!("are {count}") };
            Err(Error::Usage(format!("cuda:{n}: there {are} of them, counted from 0\n  hint: --device cpu")))
        }
        (OneDevice::Cuda(n), _) => cuda::open(n).map_err(Error::Device),
    }
}

/// Index of the CUDA device of this process, out of `count`.
fn ordinal(count: usize) -> Result<usize, Error> {
    let Some(launch) = Launch::of_env() else { return Ok(0) };
    match launch.local {
        // The launcher already restricts every process to one device.
        _ if count <= 1 => Ok(0),
        None => Ok(launch.rank % count),
        Some(local) if local < count => Ok(local),
        Some(local) => Err(Error::Device(format!(
            "process {local} of this machine has no CUDA device: there are {count}\n\
             hint: no more than {count} processes on a machine"
        ))),
    }
}

/// Compute dtype: the one named, else f32 on the CPU and bf16 on CUDA.
pub fn dtype(named: Option<Dtype>, device: &Device) -> DType {
    match (named, device) {
        (Some(Dtype::Bf16), _) => DType::BF16,
        (Some(Dtype::F16), _) => DType::F16,
        (Some(Dtype::F32), _) => DType::F32,
        (None, Device::Cpu) => DType::F32,
        (None, _) => DType::BF16,
    }
}

/// Resolves a model source to an existing path, or returns it unchanged as a hub id.
pub fn source(recipe: &Recipe, written: &str) -> String {
    let path = recipe.resolve(written);
    if path.exists() { path.display().to_string() } else { written.into() }
}

/// Finds the folder of the model, and downloads missing files as far as `want` requires.
///
/// # Errors
/// The model cannot be found.
pub fn model(settings: &Settings, recipe: &Recipe, want: Want, progress: bool) -> ft_base::Result<ModelDir> {
    // Random weights replace the weight files.
    let random = recipe.model.weights == Weights::Random;
    let want = if random { want.min(Want::Tokenizer) } else { want };
    let source = source(recipe, &recipe.model.source);
    let model = hub::fetch_model_with(settings, &source, &recipe.model.revision, want, progress)?;
    model.notes.iter().for_each(|n| warn(n));
    Ok(model)
}

/// Reads the config of a model folder and applies overrides. Warns about unknown keys.
///
/// # Errors
/// Invalid config, or an unsupported model family.
pub fn config(dir: &Path, overrides: &Map<String, Value>) -> ft_base::Result<Config> {
    let config = Config::load(dir, overrides)?;
    let file = dir.join("config.json").display().to_string();
    for key in &config.unknown {
        warn(&format!("{file}: {key}: ft does not know this key and leaves it alone"));
    }
    Ok(config)
}

/// Refuses router losses for models without routers.
///
/// # Errors
/// A coefficient is not 0.
pub fn routers(recipe: &Recipe, config: &Config) -> Result<(), Error> {
    if config.moe.is_some() {
        return Ok(());
    }
    for (key, value) in [("router.aux_loss", recipe.router.aux_loss), ("router.z_loss", recipe.router.z_loss)]
    {
        if value != 0.0 {
            let (place, family) = (recipe.place(key), config.family.model_type);
            return Err(Error::Usage(format!(
                "{place}: {key} = {value}: {family} has no routers\n  hint: leave it out"
            )));
        }
    }
    Ok(())
}

/// Loads the tokenizer of a model folder, with the chat template of the recipe, and with the added tokens
/// of recipe and adapter. Returns `None` if the folder has no tokenizer.
///
/// # Errors
/// Unusable files.
pub fn tokenizer(
    recipe: &Recipe,
    dir: &Path,
    adapter: Option<&Adapter>,
) -> ft_base::Result<Option<Tokenizer>> {
    let template = recipe.data.chat_template.as_ref().map(|p| recipe.resolve(&p.display().to_string()));
    let rules = recipe.train.iter().filter(|r| r.is_of_tokens());
    let texts = rules.flat_map(|r| r.tokens.iter().flatten()).filter_map(|t| match t {
        Token::Text(text) => Some(text.as_str()),
        Token::Id(_) => None,
    });
    let tokenizer = Tokenizer::load_with(dir, template.as_deref(), &added(adapter)?.and(texts))?;
    if let Some((_, tokens)) = tokenizer.as_ref().and_then(Tokenizer::with_added) {
        let each: Vec<String> = tokens.iter().map(|(text, id)| format!("{text:?} (token {id})")).collect();
        tell(&format!("tokens beside the model's own: {}", each.join(", ")));
    }
    Ok(tokenizer)
}

/// Tokens of an adapter in addition to the vocabulary of the base.
///
/// # Errors
/// The tokenizer in the adapter folder is unusable.
pub fn added(adapter: Option<&Adapter>) -> ft_base::Result<Added> {
    match adapter.filter(|a| !a.config.tokens().is_empty()) {
        Some(a) => Ok(Added::of_adapter(&a.dir)?),
        None => Ok(Added::default()),
    }
}

/// Opens the adapter named in `lora.init`, and downloads it if necessary.
///
/// # Errors
/// The adapter cannot be found, or has unusable files.
pub fn adapter(settings: &Settings, recipe: &Recipe, progress: bool) -> ft_base::Result<Option<Adapter>> {
    let Some(written) = recipe.lora.init.adapter() else { return Ok(None) };
    let dir = hub::fetch_adapter_with(settings, &source(recipe, written), "main", progress)?;
    Ok(Some(Adapter::open(&dir)?))
}

/// Selects the trained modules by the rules of the recipe, or, without rules, as in the adapter. Warns
/// about rules without a match in the model.
///
/// # Errors
/// Rules or adapter do not fit the model; nothing is selected.
pub fn selection(recipe: &Recipe, config: &Config, adapter: Option<&Adapter>) -> ft_base::Result<Selection> {
    let selection = match adapter {
        Some(a) if recipe.train.is_empty() => a.selection(config)?,
        _ => Selection::from_rules(config, &recipe.train)?,
    };
    if selection.parts().is_empty() {
        return Err(adapters::Error::Nothing { place: recipe.place("train").to_string() }.into());
    }
    selection.notes.iter().for_each(|n| warn(n));
    selection.check_learning_rates(recipe)?;
    Ok(selection)
}

/// Tokenizes the prompt of `log.sample` in the same format as the training data.
///
/// # Errors
/// Tokenizer missing; empty prompt.
pub fn sample(recipe: &Recipe, tokenizer: Option<&Tokenizer>) -> ft_base::Result<Option<Vec<u32>>> {
    let Some(prompt) = &recipe.log.sample else { return Ok(None) };
    let fail = |why: &str| Error::Usage(format!("{}: log.sample: {why}", recipe.place("log.sample")));
    let Some(tokenizer) = tokenizer else {
        let why = "the model has no tokenizer.json, so it cannot be asked\n  hint: leave it out";
        return Err(fail(why).into());
    };
    let form = Form::of(&recipe.data.train, Some(tokenizer));
    let ids = form.prompt(tokenizer, None, prompt, &recipe.data.template)?;
    if ids.is_empty() {
        return Err(fail("the prompt is empty\n  hint: a text to go on from").into());
    }
    Ok(Some(ids))
}

impl Job {
    /// Resolves a recipe and downloads missing files. `want` selects the required files of the model.
    ///
    /// # Errors
    /// Missing device; model not found or not supported; rule without a match; adapter that does not fit.
    pub fn open(recipe: Recipe, want: Want, progress: bool) -> ft_base::Result<Self> {
        Self::with(recipe, want, progress, &selection)
    }

    /// Resolves a recipe for inference: all weights are frozen, and the adapter of `lora.init` is applied.
    /// Without an adapter, modules that the recipe trains in full are not quantized, so the model equals
    /// the one at the start of training.
    ///
    /// # Errors
    /// As [`Job::open`].
    pub fn open_frozen(recipe: Recipe, want: Want, progress: bool) -> ft_base::Result<Self> {
        Self::with(recipe, want, progress, &|recipe, config, adapter| {
            let in_full = |r: &Rule| r.is(Method::Full);
            match adapter {
                Some(a) => a.selection(config),
                None if recipe.model.quantize == Quantize::Nf4
                    && !config.four_bit
                    && recipe.train.iter().any(in_full) =>
                {
                    let mut s = Selection::from_rules(config, &recipe.train)?;
                    for (m, c) in &mut s.modules {
                        if !(matches!(c, Choice::Full { .. }) && quant::takes(m)) {
                            *c = Choice::Freeze;
                        }
                    }
                    Ok(s)
                }
                None => Ok(Selection::frozen(config)),
            }
        })
    }

    fn with(mut recipe: Recipe, want: Want, progress: bool, select: &Select<'_>) -> ft_base::Result<Self> {
        let settings = Settings::from_env();
        let device = device(recipe.run.device)?;
        let dtype = dtype(recipe.model.dtype, &device);
        if let Some(e) = sources::settle(&settings, &mut recipe, progress).into_iter().next() {
            return Err(e);
        }
        let model = model(&settings, &recipe, want, progress)?;
        let config = config(&model.dir, &recipe.model.overrides)?;
        routers(&recipe, &config)?;
        let adapter = adapter(&settings, &recipe, progress)?;
        let tokenizer = match want {
            Want::Config => None,
            _ => tokenizer(&recipe, &model.dir, adapter.as_ref())?,
        };
        let mut selection = select(&recipe, &config, adapter.as_ref())?;
        if want != Want::Config || selection.tokens.are_numbers() {
            selection.look_up(&config, tokenizer.as_ref())?;
        }
        let (tokenizer, adapter) = (tokenizer.map(Arc::new), adapter.map(Arc::new));
        Ok(Self { recipe, device, dtype, model, config, tokenizer, selection, adapter })
    }

    /// Implementation of bf16 products on the CPU; `None` for other devices and dtypes.
    ///
    /// # Errors
    /// The environment requests an unavailable implementation.
    pub fn products(&self) -> candle_core::Result<Option<pairs::Path>> {
        (self.device.is_cpu() && self.dtype == DType::BF16).then(pairs::path).transpose()
    }

    /// Describes device, compute dtype, and the implementation of bf16 products.
    ///
    /// # Errors
    /// As [`Job::products`].
    pub fn computes(&self) -> candle_core::Result<String> {
        let device = if self.device.is_cpu() { "CPU" } else { "CUDA" };
        let how = self.products()?.map_or(String::new(), |p| format!(" ({})", p.text()));
        Ok(format!("{device} {}{how}", format!("{:?}", self.dtype).to_lowercase()))
    }

    /// Copies the job to another device, with the compute dtype for that device.
    pub fn on(&self, device: Device) -> Self {
        Self { dtype: dtype(self.recipe.model.dtype, &device), device, ..self.clone() }
    }

    fn resolver(&self) -> impl Fn(&str) -> PathBuf + '_ {
        |s| self.recipe.resolve(s)
    }

    /// Loads the training rows.
    pub fn train_data(&self) -> ft_base::Result<Dataset> {
        self.part(Part::Train)
    }

    /// Loads the evaluation rows, if the recipe has any.
    pub fn eval_data(&self) -> ft_base::Result<Option<Dataset>> {
        self.recipe.data.evaluates().then(|| self.part(Part::Eval)).transpose()
    }

    fn part(&self, part: Part) -> ft_base::Result<Dataset> {
        let (d, seed) = (&self.recipe.data, self.recipe.run.seed);
        let (tokenizer, vocab) = (self.tokenizer.as_deref(), self.config.vocab);
        let data = Dataset::load(part, d, &self.resolver(), tokenizer, vocab, seed)?;
        rows::tell_data(part.key(d), &data, &self.config)?;
        Ok(data)
    }

    /// Loads training and evaluation rows.
    pub fn data(&self) -> ft_base::Result<(Dataset, Option<Dataset>)> {
        let (d, seed) = (&self.recipe.data, self.recipe.run.seed);
        let (tokenizer, vocab) = (self.tokenizer.as_deref(), self.config.vocab);
        let (train, eval) = Dataset::load_both(d, &self.resolver(), tokenizer, vocab, seed)?;
        rows::tell_data(Part::Train.key(d), &train, &self.config)?;
        rows::tell_few(&self.recipe, &train);
        if let Some(eval) = &eval {
            rows::tell_shared(&train, eval)?;
        }
        // Held-out samples are part of the training data, so warnings about them were printed already.
        if let Some(eval) = eval.as_ref().filter(|_| d.eval_share == 0.0) {
            rows::tell_data(Part::Eval.key(d), eval, &self.config)?;
        }
        Ok((train, eval))
    }

    /// Opens the base in the model folder, ignoring the 4-bit copy of `model.cache`.
    ///
    /// # Errors
    /// Missing or unusable weights.
    pub fn base(&self) -> ft_base::Result<Base> {
        let config = self.config.clone();
        let base = match self.recipe.model.weights {
            Weights::Random => Base::random(config, self.recipe.run.seed),
            Weights::Load => Base::open(config, &self.model.dir)?,
        };
        let base = base.in_nf4(self.recipe.model.quantize == Quantize::Nf4);
        Ok(base.beginning(adapters::initial::initials(&self.recipe, &self.selection)?))
    }

    /// Checks names and shapes of all tensors of base and adapter against config and selection, without
    /// loading the model. Called before anything is written.
    ///
    /// # Errors
    /// Missing, unexpected or misshaped tensors; an adapter for another base.
    pub fn check(&self) -> ft_base::Result<()> {
        let base = self.base()?;
        base.check()?;
        check_full(&base, &self.selection, self.adapter.as_deref())?;
        if let Some(a) = &self.adapter {
            a.check_against(&self.selection, &self.selection.trained())?;
            a.check_values()?;
            if let Some(files) = base.files() {
                a.check_base(files, self.config.tied)?;
            }
        }
        Ok(())
    }

    /// Prompt format of the training data, saved for later inference.
    pub fn trained(&self) -> Trained {
        let (data, tokenizer) = (&self.recipe.data, self.tokenizer.as_deref());
        Trained { form: Form::of(&data.train, tokenizer), template: data.template.clone() }
    }

    /// Loads the model with a progress bar, from the 4-bit copy of `model.cache` if configured. With
    /// `train`, also allocates gradients and moments.
    ///
    /// # Errors
    /// As [`Build::run`]; the 4-bit copy cannot be written.
    pub fn load(&self, train: bool) -> ft_base::Result<(Decoder, Params)> {
        self.load_shard(&self.base_to_load()?, train, Shard::default(), &comm::alone())
    }

    /// Opens the base to load weights from, with the 4-bit copy of `model.cache` if configured.
    ///
    /// # Errors
    /// As [`Job::base`]; the 4-bit copy is damaged or cannot be written.
    pub fn base_to_load(&self) -> ft_base::Result<Base> {
        let base = self.base()?;
        Ok(match quantize::cached(self)? {
            Some((config, copy)) => base.with_copy(config, copy),
            None => base,
        })
    }

    /// As [`Job::load`], for the shard of one rank. All ranks must call it together. Only the first shows a
    /// progress bar.
    ///
    /// # Errors
    /// As [`Build::run`]; lost rank.
    pub fn load_shard(
        &self,
        base: &Base,
        train: bool,
        shard: Shard,
        comm: &dyn Comm,
    ) -> ft_base::Result<(Decoder, Params)> {
        let memory = &self.recipe.memory;
        let offload = memory.offloads(Offload::Optimizer);
        // Inference reads weights in place.
        let offload_weights = train && memory.offloads(Offload::Params);
        let pin = memory.pin;
        let o = &self.recipe.optimizer;
        let eight_bit = o.name.eight_bit();
        let project = if o.name.projects() { o.galore_rank } else { 0 };
        let in_backward = self.recipe.optimizer.in_backward;
        let rounding = (!o.keeps_master(self.dtype == DType::F32)).then_some(self.recipe.run.seed);
        let build = Build::new(base, &self.selection)
            .adapter(self.adapter.as_deref())
            .on(self.dtype, &self.device)
            .seed(self.recipe.run.seed)
            .allocate(Allocate {
                train,
                in_backward,
                offload,
                offload_weights,
                pin,
                eight_bit,
                rounding,
                project,
                shard,
            })
            .among(comm);
        if shard.rank == 0 { build.shown("loading").run() } else { build.run() }
    }

    fn inputs<'a>(&'a self, workloads: &'a Workloads<'a>) -> Inputs<'a> {
        let cuda = self.device.is_cuda();
        let threads = self.recipe.parallel.threads(rayon::current_num_threads());
        let width = self.dtype.size_in_bytes() as u64;
        let machine = Machine { cuda, width, stored: width, threads: threads as u64 };
        let machine = ft_plan::stored(machine, &self.recipe, &self.config, Some(&self.model.dir));
        // An error here shows up again in the plan itself.
        let server =
            ft_plan::Server::of(&self.recipe, &self.config, &self.selection, machine.stored).ok().flatten();
        let server = server.map_or(0, |s| s.on_host);
        Inputs {
            recipe: &self.recipe,
            config: &self.config,
            selection: &self.selection,
            machine,
            workloads,
            budget: ft_plan::budget(
                &self.recipe,
                machine,
                &workloads.of(&self.recipe, self.recipe.run.micro_rows.count()),
                (memory::reach_bytes(), server),
            ),
            host: ft_plan::beside_device(&self.recipe, machine, (memory::reach_bytes(), server)),
        }
    }

    /// Plans this job. `count` computes the workload for a recipe, as [`Workload::of_data`] does.
    pub fn plan(&self, count: impl Fn(&Recipe) -> Workload) -> ft_base::Result<Plan> {
        self.planned(&Workloads::new(count), true)
    }

    /// Plans the same workload with less memory than `plan`, by one sixteenth if possible. Returns `None`
    /// if no execution needs less.
    pub fn smaller(&self, plan: &Plan) -> Option<Plan> {
        let workload = plan.workload;
        let workloads = Workloads::new(|_| workload);
        let less = plan.total() - plan.total() / 16;
        let found = Plan::new(&Inputs { budget: Some(less), ..self.inputs(&workloads) }).ok()?;
        // The new plan may offload layer inputs to the host.
        let (budget, mut space) = (plan.budget, plan.space.clone());
        space.host.clone_from(&found.space.host);
        (found.total() < plan.total()).then_some(Plan { budget, space, hints: Vec::new(), ..found })
    }

    /// As [`Job::plan`], for runs that write neither checkpoints nor a result.
    pub fn plan_without_files(&self, count: impl Fn(&Recipe) -> Workload) -> ft_base::Result<Plan> {
        self.planned(&Workloads::new(count), false)
    }

    fn planned(&self, workloads: &Workloads<'_>, writes: bool) -> ft_base::Result<Plan> {
        let inputs = self.inputs(workloads);
        let mut plan = Plan::new(&inputs)?;
        if !writes {
            plan.space.files.clear();
        }
        plan.space.model(&self.recipe, &self.config, &self.selection, true);
        plan.look(&self.recipe, &Capacity::of(inputs.machine));
        Ok(plan)
    }

    /// Lists the planned allocations by phase and unit.
    pub fn allocations(&self, plan: &Plan) -> Vec<Allocation> {
        let planned = plan.workload;
        // Only used in out-of-memory reports, so errors of the plan are ignored.
        ft_plan::allocations(&self.inputs(&Workloads::new(|_| planned)), &plan.execution).unwrap_or_default()
    }
}
