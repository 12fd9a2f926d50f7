//! Model to serve: fixed model and adapter, or a run's newest checkpoint.

use super::base::refuse_scores;
use super::files::{check_memory, no_tokenizer};
use super::follow::{self, FollowedRun, Follower};
use super::sampling::GenerationConfig;
use super::{ContextLimit, LoadOptions, ModelFiles, Prompter, device};
use crate::train::layout::is_run;
use candle_core::Device;
use ft_base::terminal::tell;
use ft_data::PromptFormat;
use ft_engine::model::Decoder;
use serde_json::{Map, Value};
use std::path::Path;

/// Model and adapter to serve, and how to load them.
pub struct ModelOptions<'a> {
    /// Folder or hub id of a model, an adapter, a run or a checkpoint.
    pub model: &'a str,
    pub adapter: Option<&'a str>,
    /// Whether to follow the checkpoints of a run.
    pub follow: bool,
    pub load: LoadOptions,
    pub chat_template: Option<&'a Path>,
    /// Variables of the chat template, in addition to the training's.
    pub variables: Map<String, Value>,
}

/// A model with prompt settings, on all devices.
pub struct Model {
    /// One per device, CPU last.
    pub replicas: Vec<Replica>,
    pub prompt: Prompter,
    /// Most tokens of a document.
    pub context: ContextLimit,
    /// The model's own sampling settings.
    pub generation: GenerationConfig,
}

/// A copy of the model on one device.
pub struct Replica {
    pub decoder: Decoder,
    pub device: Device,
    /// Source of newer weights, if serving a run.
    pub run: Option<Follower>,
}

impl Model {
    /// Loads the model onto the devices.
    ///
    /// # Errors
    /// A missing, unusable or too large model or adapter.
    pub fn load(options: ModelOptions<'_>, devices: &[Device]) -> ft_base::Result<Self> {
        match run_to_follow(&options) {
            Some(run) => Self::of_run(run, options, devices),
            None => Self::fixed(options, devices),
        }
    }

    fn of_run(run: &Path, options: ModelOptions<'_>, devices: &[Device]) -> ft_base::Result<Self> {
        let (run, job) = FollowedRun::open(run, options.load, options.chat_template)?;
        refuse_scores(&job.config)?;
        let context = check_memory(job.inference_model(), devices)?;
        let tokenizer = job.tokenizer.clone().ok_or_else(|| no_tokenizer(&job.model))?;
        let trained = job.trained();
        let form = if options.chat_template.is_some() { PromptFormat::Chat } else { trained.form };
        let prompt = Prompter::new(tokenizer, form, trained.template, options.variables)?;
        let generation = GenerationConfig::read(&job.model.dir)?;
        let (mut replicas, mut has_checkpoint) = (Vec::new(), false);
        for device in devices {
            let (decoder, params) = job.on(device.clone()).load(false)?;
            let on = if devices.len() > 1 { format!(" on {}", device::name(device)) } else { String::new() };
            let mut run = run.follower(params, on);
            has_checkpoint |= run.poll();
            replicas.push(Replica { decoder, device: device.clone(), run: Some(run) });
        }
        if !has_checkpoint {
            tell("there is no checkpoint yet: the model answers as it was before the first step");
        }
        Ok(Self { replicas, prompt, context, generation })
    }

    fn fixed(options: ModelOptions<'_>, devices: &[Device]) -> ft_base::Result<Self> {
        // removed at the end, with a converted checkpoint: a server whose replica hangs runs no destructors
        let files = ModelFiles::open(options.model, options.adapter)?;
        let trained = files.trained.as_ref().filter(|_| options.chat_template.is_none());
        let form = trained.map_or(PromptFormat::Chat, |t| t.form);
        let prompt = files.prompt_format(form, options.chat_template, options.variables)?;
        let generation = GenerationConfig::read(&files.model.dir)?;
        let replica =
            |(decoder, device): (_, &Device)| Replica { decoder, device: device.clone(), run: None };
        let (decoders, context) = files.load(options.load, devices)?;
        let replicas = decoders.into_iter().zip(devices).map(replica).collect();
        Ok(Self { replicas, prompt, context, generation })
    }
}

/// Run folder to follow, if the options name an unfinished run.
fn run_to_follow<'a>(options: &ModelOptions<'a>) -> Option<&'a Path> {
    let dir = Path::new(options.model);
    if !options.follow || options.adapter.is_some() || !is_run(dir) {
        return None;
    }
    if let Some(step) = follow::ended_at(dir) {
        tell(&format!("this run has ended: its result, of step {step}, answers"));
        return None;
    }
    Some(dir)
}
