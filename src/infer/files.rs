//! A model and an optional adapter on disk, and the way to load them.

use super::base::{base_of, fetch_model, open_adapter, quantized, refuse_scores};
use super::{LoadOptions, Prompter, Source, usage};
use crate::train::job;
use candle_core::Device;
use ft_base::terminal::tell;
use ft_data::{PromptConfig, PromptFormat, Tokenizer, adapter_template};
use ft_engine::adapters::{Adapter, Selection};
use ft_engine::load::Base;
use ft_engine::model::Decoder;
use ft_engine::params::build::Build;
use ft_hub::{ModelDir, Want};
use ft_kernels::cuda;
use ft_plan::{InferenceMemory, InferenceModel};
use ft_recipe::{Dtype, Quantize};
use serde_json::{Map, Value};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most tokens of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextLimit {
    /// By the model.
    pub model: usize,
    /// By the model and by the memory of all devices.
    pub tokens: usize,
}

impl ContextLimit {
    /// Whether memory holds less than the model takes.
    pub fn is_of_memory(&self) -> bool {
        self.tokens < self.model
    }

    /// Lowers the limit to the memory of a device, if known. Returns whether that is the lowest so far.
    fn lower(&mut self, memory: Option<u64>) -> bool {
        let tokens = memory.and_then(|tokens| usize::try_from(tokens).ok());
        let lowest = tokens.filter(|tokens| *tokens < self.tokens);
        self.tokens = lowest.unwrap_or(self.tokens);
        lowest.is_some()
    }
}

impl fmt::Display for ContextLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, tokens } = self;
        match self.is_of_memory() {
            true => write!(f, "there is memory for about {tokens} tokens, the model is made for {model}"),
            false => write!(f, "the model is made for {model} tokens"),
        }
    }
}

/// A model with an optional unmerged adapter; the weights are not loaded yet.
pub struct ModelFiles {
    pub model: ModelDir,
    adapter: Option<Adapter>,
    /// Prompt format of the training, if recorded.
    pub trained: Option<PromptConfig>,
    /// Temporary folders of converted checkpoints.
    _sources: [Option<Source>; 2],
}

impl ModelFiles {
    /// Finds a model and an adapter. An adapter in place of the model stands for base and adapter.
    ///
    /// # Errors
    /// A missing or unusable model or adapter.
    pub fn open(model: &str, adapter: Option<&str>) -> ft_base::Result<Self> {
        let source = Source::find(model)?;
        let adapter_source = adapter.map(Source::find).transpose()?;
        let named = adapter_source.as_ref().map(|a| open_adapter(&a.name)).transpose()?;
        let name = &source.name;
        let (model, adapter) = match (fetch_model(name, "main", Want::Weights), named) {
            (Err(ft_hub::Error::IsAdapter { .. }), Some(_)) => {
                return Err(usage(format!("{name}: is an adapter, and --adapter names another")));
            }
            (Err(ft_hub::Error::IsAdapter { .. }), None) => {
                let adapter = open_adapter(name)?;
                let way = format!("BASE --adapter {}", source.shown);
                (base_of(&adapter, source.run.as_deref(), None, &way, Want::Weights)?, Some(adapter))
            }
            (model, named) => (model?, named),
        };
        let trained = PromptConfig::open(adapter.as_ref().map_or(&model.dir, |a| &a.dir))?;
        Ok(Self { model, adapter, trained, _sources: [Some(source), adapter_source] })
    }

    /// Loads the tokenizer, with `template` or the model's own chat template; `None` without a `tokenizer.json`.
    ///
    /// # Errors
    /// An unusable tokenizer.
    pub fn tokenizer(&self, template: Option<&Path>) -> ft_base::Result<Option<Tokenizer>> {
        job::tokenizer_of((&self.model.dir, self.adapter.as_ref()), template, [])
    }

    /// Loads the tokenizer. The chat template is `template`, the adapter's, or the model's; `variables`
    /// override the training's.
    ///
    /// # Errors
    /// A missing or unusable tokenizer; as [`Prompter::new`].
    pub fn prompt_format(
        &self,
        form: PromptFormat,
        template: Option<&Path>,
        variables: Map<String, Value>,
    ) -> ft_base::Result<Prompter> {
        let adapter = self.adapter.as_ref().filter(|_| template.is_none());
        let own = adapter.map(|a| adapter_template(&a.dir, &self.model.dir)).transpose()?.flatten();
        let own = own.map(|template| PathBuf::from(template.origin));
        let tokenizer = self.tokenizer(template.or(own.as_deref()))?;
        let tokenizer = Arc::new(tokenizer.ok_or_else(|| no_tokenizer(&self.model))?);
        let trained = self.trained.as_ref().map(|t| t.template.clone()).unwrap_or_default();
        Prompter::new(tokenizer, form, trained, variables)
    }

    /// Loads the model onto each device, if all have enough memory. Also returns the most tokens of a document.
    ///
    /// # Errors
    /// A mismatched adapter; too little memory; as [`Build::run`].
    pub fn load(
        &self,
        options: LoadOptions,
        devices: &[Device],
    ) -> ft_base::Result<(Vec<Decoder>, ContextLimit)> {
        let adapter = self.adapter.as_ref();
        let config = job::config(&self.model.dir, &Map::new())?;
        let config = adapter.map_or(Ok(config.clone()), |a| a.config_of(config))?;
        refuse_scores(&config)?;
        let base = Base::open(config, &self.model.dir)?;
        let selection = match adapter {
            None => Selection::frozen(&base.config),
            Some(a) => {
                if let Some(files) = base.files() {
                    a.check_base(files, &base.config)?;
                }
                a.selection(&base.config)?
            }
        };
        let nf4 = quantized(options.quantize, adapter, &base.config)?;
        let context = check_memory(
            InferenceModel {
                config: &base.config,
                selection: &selection,
                quantize: if nf4 { Quantize::Nf4 } else { Quantize::None },
                dtype: options.dtype,
                stored: Base::stored_width(&base.config, Some(&self.model.dir)),
            },
            devices,
        )?;
        let base = base.in_nf4(nf4);
        let load = |device: &Device| {
            let (dtype, shown) = (job::dtype(options.dtype, device), Some("loading"));
            let build = Build { adapter, dtype, device, shown, ..Build::new(&base, &selection) };
            Ok(build.run()?.0)
        };
        let decoders = devices.iter().map(load).collect::<ft_base::Result<Vec<_>>>()?;
        Ok((decoders, context))
    }
}

/// The error of a model without `tokenizer.json`.
pub(super) fn no_tokenizer(model: &ModelDir) -> ft_hub::Error {
    ft_hub::Error::NoLocalFile { dir: model.dir.clone(), file: "tokenizer.json", hint: "" }
}

/// Checks the model against the memory of all devices before loading. Returns the most tokens of a document, and prints
/// a message if memory sets them.
///
/// # Errors
/// A device with too little memory; the error lists options to save memory.
pub(super) fn check_memory(model: InferenceModel<'_>, devices: &[Device]) -> ft_base::Result<ContextLimit> {
    let most = model.config.max_positions;
    let mut limit = ContextLimit { model: most, tokens: most };
    let mut least = None;
    for device in devices {
        cuda::enter(device)?;
        let reading = InferenceMemory::new(model, device.is_cuda())?;
        if !reading.fits() {
            return Err(refusal(&reading, model, device)?);
        }
        if limit.lower(reading.tokens()) {
            least = Some(reading);
        }
    }
    if let Some(reading) = least {
        tell(&format!("{}: {limit}", reading.text()));
    }
    Ok(limit)
}

/// The error of a model too large for a device, with the memory of alternative options.
fn refusal(
    reading: &InferenceMemory,
    model: InferenceModel<'_>,
    device: &Device,
) -> ft_base::Result<ft_base::Error> {
    let cuda = device.is_cuda();
    let mut options = vec![("--quantize nf4", InferenceModel { quantize: Quantize::Nf4, ..model }, cuda)];
    if device.is_cpu() && model.dtype != Some(Dtype::Bf16) {
        options.push(("--dtype bf16", InferenceModel { dtype: Some(Dtype::Bf16), ..model }, false));
    }
    if cuda {
        options.push(("--device cpu", model, false));
    }
    let options =
        options.into_iter().map(|(option, model, cuda)| Ok((option, InferenceMemory::new(model, cuda)?)));
    Ok(reading.refusal(&options.collect::<ft_base::Result<Vec<_>>>()?).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The device with the least memory sets the limit; one of unknown memory sets none.
    #[test]
    fn the_least_memory_limits_the_context() {
        let mut limit = ContextLimit { model: 4096, tokens: 4096 };
        assert_eq!([None, Some(9000)].map(|memory| limit.lower(memory)), [false; 2]);
        assert_eq!(limit.to_string(), "the model is made for 4096 tokens");
        assert_eq!([Some(2000), Some(3000), None].map(|memory| limit.lower(memory)), [true, false, false]);
        assert_eq!((limit.tokens, limit.is_of_memory()), (2000, true));
    }
}
