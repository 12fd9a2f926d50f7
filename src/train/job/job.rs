//! A resolved recipe: device, model folder, config, tokenizer, selection.

use super::device::{device, dtype};
use super::{cache_4bit, lookup, sources};
use candle_core::{DType, Device};
use ft_base::terminal::tell;
use ft_data::{PromptConfig, PromptFormat, Tokenizer};
use ft_engine::adapters::{Adapter, Choice, Selection, initial};
use ft_engine::load::Base;
use ft_engine::model::modules::Module;
use ft_engine::model::{Config, Decoder};
use ft_engine::params::Allocate;
use ft_engine::params::Params;
use ft_engine::params::buffers::Split;
use ft_engine::params::build::{Build, check_full};
use ft_engine::quant;
use ft_engine::ranks::{self, Comm};
use ft_hub::{ModelDir, Settings, Want};
use ft_kernels::gemm::pairs;
use ft_plan::{InferenceModel, Resolved};
use ft_recipe::{Method, Offload, Products, Quantize, Recipe, Rule, Weights};
use std::sync::Arc;

/// Chooses a selection from a recipe, a config and an adapter.
type Select<'a> = dyn Fn(&Recipe, &Config, Option<&Adapter>) -> ft_base::Result<Selection> + 'a;

/// A resolved recipe, without the weights.
#[derive(Clone)]
pub struct Job {
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

impl Job {
    /// Resolves a recipe and downloads missing files. `want` selects the required files of the model.
    ///
    /// # Errors
    /// Missing device; model not found or not supported; rule without a match; adapter that does not fit.
    pub fn open(recipe: Recipe, want: Want, progress: bool) -> ft_base::Result<Self> {
        Self::with(recipe, (want, progress), true, &lookup::selection)
    }

    /// Resolves a recipe for inference: all weights are frozen, and the adapter of `lora.init` is applied.
    /// Without an adapter, modules trained in full by the recipe are not quantized, so the model equals the one at the
    /// start of training.
    pub fn open_frozen(recipe: Recipe, want: Want, progress: bool) -> ft_base::Result<Self> {
        Self::with(recipe, (want, progress), false, &|recipe, config, adapter| {
            let in_full = |r: &Rule| r.is(Method::Full);
            match adapter {
                Some(a) => a.selection(config),
                None if recipe.model.quantize == Quantize::Nf4
                    && !config.is_bitsandbytes()
                    && recipe.train.iter().any(in_full) =>
                {
                    let mut s = Selection::from_rules(config, &recipe.train)?;
                    for (m, c) in &mut s.modules {
                        if !(matches!(c, Choice::Full { .. }) && quant::applies_to(m)) {
                            *c = Choice::Freeze;
                        }
                    }
                    Ok(s)
                }
                None => Ok(Selection::frozen(config)),
            }
        })
    }

    fn with(
        mut recipe: Recipe,
        (want, progress): (Want, bool),
        trains: bool,
        select: &Select<'_>,
    ) -> ft_base::Result<Self> {
        let settings = Settings::from_env();
        let device = device(recipe.run.device)?;
        let dtype = dtype(recipe.model.dtype, &device);
        if let Some(e) = sources::resolve(&settings, &mut recipe, progress).into_iter().next() {
            return Err(e);
        }
        let model = lookup::model(&settings, &recipe, want, progress)?;
        let config = lookup::config(&model.dir, &recipe.model.overrides)?;
        let (mut adapter, mut tokenizer) = (None, None);
        let select = |config: &mut Config| {
            adapter = lookup::adapter(&settings, &recipe, progress)?;
            if let Some(adapter) = &adapter {
                adapter.config.set_layout(config);
            }
            if want != Want::Config {
                tokenizer = lookup::tokenizer(&recipe, &model.dir, adapter.as_ref())?;
            }
            select(&recipe, config, adapter.as_ref())
        };
        let resolved = match trains {
            true => Resolved::new(&recipe, config, select),
            false => Resolved::frozen(&recipe, config, select),
        };
        let Resolved { config, mut selection } = resolved?;
        if want != Want::Config {
            let template = tokenizer.as_ref().is_some_and(Tokenizer::has_template);
            sources::settle_forms(&mut recipe.data, template, progress);
        }
        if want != Want::Config || selection.tokens.are_numbers() {
            lookup::token_rows(&mut selection, &config, tokenizer.as_ref())?;
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
    pub fn computes(&self) -> candle_core::Result<String> {
        let device = if self.device.is_cpu() { "CPU" } else { "CUDA" };
        let how = self.products()?.map_or(String::new(), |p| format!(" ({})", p.text()));
        Ok(format!("{device} {}{how}", format!("{:?}", self.dtype).to_lowercase()))
    }

    /// The model for a plan of inference.
    pub fn inference_model(&self) -> InferenceModel<'_> {
        InferenceModel {
            config: &self.config,
            selection: &self.selection,
            quantize: self.recipe.model.quantize,
            dtype: self.recipe.model.dtype,
            stored: Base::stored_width(&self.config, Some(&self.model.dir)),
        }
    }

    /// Copies the job to another device, with the compute dtype for that device.
    pub fn on(&self, device: Device) -> Self {
        Self { dtype: dtype(self.recipe.model.dtype, &device), device, ..self.clone() }
    }

    /// Opens the base in the model folder, ignoring the 4-bit copy of `model.cache`.
    pub fn base(&self) -> ft_base::Result<Base> {
        let config = self.config.clone();
        let base = match self.recipe.model.weights {
            Weights::Random => Base::random(config, self.recipe.run.seed),
            Weights::Load => Base::open(config, &self.model.dir)?,
        };
        Ok(initial::prepared(base.seeded(self.recipe.run.seed), &self.recipe, &self.selection)?)
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
                a.check_base(files, &self.config)?;
            }
        }
        Ok(())
    }

    /// Prompt format of the training data, saved for later inference.
    pub fn trained(&self) -> PromptConfig {
        let (data, tokenizer) = (&self.recipe.data, self.tokenizer.as_deref());
        let all = PromptFormat::all_of(&data.train, tokenizer.is_some_and(Tokenizer::has_template));
        let also = all.into_iter().skip(1).collect();
        PromptConfig { form: PromptFormat::of(&data.train, tokenizer), also, template: data.template.clone() }
    }

    /// Loads the model with a progress bar, from the 4-bit copy of `model.cache` if configured. With
    /// `train`, also allocates gradients and moments.
    pub fn load(&self, train: bool) -> ft_base::Result<(Decoder, Params)> {
        self.load_shard(&self.base_to_load()?, train, Split::default(), &ranks::alone())
    }

    /// Opens the base to load weights from, with the 4-bit copy of `model.cache` if configured.
    pub fn base_to_load(&self) -> ft_base::Result<Base> {
        let base = self.base()?;
        Ok(match cache_4bit::open_or_write(&self.recipe, &self.config, &self.model.dir)? {
            Some((config, copy)) => base.with_copy(config, copy),
            None => base,
        })
    }

    /// Says that a score head begins as random numbers, if neither base nor adapter has one.
    fn tell_new_head(&self, base: &Base) {
        let new = |(m, _): &&(Module, Choice)| {
            base.lacks(m) && !self.adapter.as_ref().is_some_and(|a| a.replaces(&m.name))
        };
        let Some((head, _)) = self.selection.modules.iter().find(new) else { return };
        tell(&format!(
            "{}: the model has no score head; its {} begin as random numbers, normal(0, {}), by run.seed = {}",
            head.name,
            if head.rows() == 1 { "weights".into() } else { format!("{} outputs", head.rows()) },
            self.config.initializer_range,
            self.recipe.run.seed
        ));
    }

    /// As [`Job::load`], for the shard of one rank. All ranks must call it together. Only the first shows a
    /// progress bar.
    pub fn load_shard(
        &self,
        base: &Base,
        train: bool,
        split: Split,
        comm: &dyn Comm,
    ) -> ft_base::Result<(Decoder, Params)> {
        let (memory, o) = (&self.recipe.memory, &self.recipe.optimizer);
        let allocate = Allocate {
            train,
            in_backward: o.in_backward,
            offload: memory.offloads(Offload::Optimizer),
            // Inference reads weights in place.
            offload_weights: train && memory.offloads(Offload::Params),
            pin: memory.pin,
            eight_bit: o.name.eight_bit(),
            rounding: (!o.keeps_master(self.dtype == DType::F32)).then_some(self.recipe.run.seed),
            project: if o.name.projects() { o.galore_rank } else { 0 },
            split,
        };
        if split.rank == 0 {
            self.tell_new_head(base);
        }
        let build = Build {
            adapter: self.adapter.as_deref(),
            dtype: self.dtype,
            device: &self.device,
            seed: self.recipe.run.seed,
            allocate,
            comm: Some(comm),
            shown: (split.rank == 0).then_some("loading"),
            fp8: train && self.recipe.memory.products == Products::Fp8,
            ..Build::new(base, &self.selection)
        };
        build.run()
    }
}
