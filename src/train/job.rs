//! From a recipe to what it names: device, model folder, config, tokenizer, selection, data.

use super::{Error, quantize};
use crate::adapt::adapter::Adapter;
use crate::adapt::build::{Base, Build};
use crate::adapt::{self, Params, Selection};
use crate::data::{Dataset, Tokenizer};
use crate::hub::{self, ModelDir, Want};
use crate::kernel::cuda;
use crate::model::{Config, Decoder};
use crate::recipe::{self, Device as DeviceName, Dtype, Quantize, Recipe, Weights};
use crate::store::TensorFiles;
use candle_core::{DType, Device};
use std::path::PathBuf;

/// A recipe with everything it names, but not the weights.
pub struct Job {
    /// The recipe.
    pub recipe: Recipe,
    /// Where to compute.
    pub device: Device,
    /// Compute dtype.
    pub dtype: DType,
    /// The model's folder.
    pub model: ModelDir,
    /// Its config, overrides applied.
    pub config: Config,
    /// Its tokenizer, where it has one.
    pub tokenizer: Option<Tokenizer>,
    /// What trains.
    pub selection: Selection,
    /// The adapter to go on from.
    pub adapter: Option<Adapter>,
}

/// The device that a recipe names.
///
/// # Errors
/// CUDA asked for and not there.
pub fn device(name: DeviceName) -> Result<Device, Error> {
    match name {
        DeviceName::Cpu => Ok(Device::Cpu),
        DeviceName::Cuda => cuda::open(0).map_err(Error::Device),
        DeviceName::Auto => Ok(cuda::open(0).unwrap_or(Device::Cpu)),
    }
}

impl Job {
    /// Resolves a recipe. `want` says how much of the model must be there; downloads it if need be.
    ///
    /// # Errors
    /// A device that is not there, a model that cannot be found or is not supported, a rule that matches
    /// nothing, an adapter that does not fit.
    pub fn open(recipe: Recipe, want: Want, progress: bool) -> crate::Result<Self> {
        let device = device(recipe.run.device)?;
        let dtype = match (recipe.model.dtype, &device) {
            (Some(Dtype::Bf16), _) => DType::BF16,
            (Some(Dtype::F16), _) => DType::F16,
            (Some(Dtype::F32), _) => DType::F32,
            (None, Device::Cpu) => DType::F32,
            (None, _) => DType::BF16,
        };
        let want = if recipe.model.weights == Weights::Random && want == Want::Weights {
            Want::Tokenizer
        } else {
            want
        };
        let source = recipe.resolve(&recipe.model.source);
        let source = if source.exists() { source.display().to_string() } else { recipe.model.source.clone() };
        let model = hub::fetch_model(&source, &recipe.model.revision, want, progress)?;
        let config = Config::load(&model.dir, &recipe.model.overrides)?;
        if config.moe.is_some() {
            return Err(crate::model::Error::Key {
                file: model.dir.join("config.json").display().to_string(),
                key: "model_type".into(),
                why: format!("not built yet: {}", config.family.model_type),
            }
            .into());
        }
        for key in &config.unknown {
            eprintln!(
                "warning: {}: {key}: ft does not know this key and leaves it alone",
                model.dir.join("config.json").display()
            );
        }
        let tokenizer = match want {
            Want::Config => None,
            _ => {
                let template =
                    recipe.data.chat_template.as_ref().map(|p| recipe.resolve(&p.display().to_string()));
                Tokenizer::load(&model.dir, template.as_deref())?
            }
        };
        let adapter = match &recipe.lora.init {
            None => None,
            Some(source) => {
                let path = recipe.resolve(source);
                let source = if path.exists() { path.display().to_string() } else { source.clone() };
                Some(Adapter::open(&hub::fetch_adapter(&source, "main", progress)?)?)
            }
        };
        let selection = match (&adapter, recipe.train.is_empty()) {
            (Some(a), true) => Selection::from_peft(&config, &a.config)?,
            _ => Selection::from_rules(&config, &recipe.train)?,
        };
        if selection.trained().is_empty() {
            return Err(adapt::Error::Nothing { place: recipe.place("train").to_string() }.into());
        }
        Ok(Self { recipe, device, dtype, model, config, tokenizer, selection, adapter })
    }

    /// Peak learning rate: the recipe's, or the default for what trains.
    pub fn learning_rate(&self) -> f64 {
        self.recipe.optimizer.lr.unwrap_or(if self.selection.anything_full() { 1e-5 } else { 2e-4 })
    }

    fn resolver(&self) -> impl Fn(&str) -> PathBuf + '_ {
        |s| self.recipe.resolve(s)
    }

    /// The training rows.
    pub fn train_data(&self) -> crate::Result<Dataset> {
        let d = &self.recipe.data;
        let (seed, vocab) = (self.recipe.run.seed, self.config.vocab);
        Ok(Dataset::load(&d.train, d, &self.resolver(), self.tokenizer.as_ref(), vocab, seed)?)
    }

    /// The evaluation rows, if the recipe names any.
    pub fn eval_data(&self) -> crate::Result<Option<Dataset>> {
        if self.recipe.data.eval.is_empty() {
            return Ok(None);
        }
        let (seed, vocab) = (self.recipe.run.seed, self.config.vocab);
        let tokenizer = self.tokenizer.as_ref();
        Ok(Some(Dataset::load_eval(&self.recipe.data, &self.resolver(), tokenizer, vocab, seed)?))
    }

    /// The files of the base's weights; `None` for random ones.
    pub fn weights(&self) -> crate::Result<Option<TensorFiles>> {
        match self.recipe.model.weights {
            Weights::Random => Ok(None),
            Weights::Load => Ok(Some(TensorFiles::open_model(&self.model.dir)?)),
        }
    }

    /// Loads the model; with `train`, allocates gradients and moments.
    pub fn build(&self, train: bool, progress: &dyn Fn(u64)) -> crate::Result<(Decoder, Params)> {
        let mut files = self.weights()?;
        if let (Some(a), Some(f)) = (&self.adapter, &files) {
            a.check_base(f, self.config.tied)?;
        }
        let mut config = self.config.clone();
        if let Some(dir) = quantize::cached(self)? {
            config = Config::load(&dir, &self.recipe.model.overrides)?;
            files = Some(TensorFiles::open_model(&dir)?);
        }
        let base = match &files {
            Some(f) => Base::Files(f),
            None => Base::Random(self.recipe.run.seed),
        };
        Build {
            config: &config,
            selection: &self.selection,
            base,
            adapter: self.adapter.as_ref(),
            quantize: self.recipe.model.quantize == Quantize::Nf4,
            dtype: self.dtype,
            device: &self.device,
            seed: self.recipe.run.seed,
            train,
            progress,
        }
        .run()
    }

    /// Layers to recompute, of those that backward walks through.
    pub fn recompute(&self) -> usize {
        match self.recipe.memory.recompute {
            recipe::Recompute::Auto | recipe::Recompute::All => self.config.layers,
            recipe::Recompute::None => 0,
            recipe::Recompute::Layers(n) => n,
        }
    }
}
