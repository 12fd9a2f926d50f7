//! Model to serve: fixed model and adapter, or a run's newest checkpoint.

use super::Args;
use crate::cli::chat::{self, Opened};
use crate::cli::given::{Given, is_run};
use crate::cli::usage;
use crate::train::checkpoint::{self, CheckpointFollower, ModelOverrides, Reload};
use crate::train::job;
use candle_core::{Device, DeviceLocation};
use ft_base::terminal::{tell, warn};
use ft_data::hub;
use ft_data::{PromptConfig, PromptFormat, Tokenizer};
use ft_engine::adapt::Params;
use ft_engine::model::{Config, Decoder};
use ft_recipe::{OneDevice, Quantize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model with prompt settings, on all devices.
pub(super) struct Model {
    pub config: Config,
    /// One per device, CPU last.
    pub copies: Vec<Copy>,
    pub tokenizer: Arc<Tokenizer>,
    pub form: PromptFormat,
    pub variables: Map<String, Value>,
    /// Folder of the model.
    pub dir: PathBuf,
}

/// A copy of the model on one device.
pub(super) struct Copy {
    pub decoder: Decoder,
    pub device: Device,
    /// Source of newer weights, if serving a run.
    pub run: Option<Followed>,
}

/// A run, with the newest checkpoint loaded.
pub(super) struct Followed {
    latest: CheckpointFollower,
    params: Params,
    /// Device suffix for messages; empty with a single copy.
    on: String,
}

impl Followed {
    /// Step of the loaded weights; 0 before the first checkpoint.
    pub fn step(&self) -> u64 {
        self.latest.step()
    }

    /// Loads a newer checkpoint if one exists. Returns whether the weights changed.
    pub fn look(&mut self) -> bool {
        let Reload { changed, problems } = self.latest.reload(&self.params);
        if changed {
            tell(&format!("step {} answers{}", self.step(), self.on));
        }
        let was = if self.step() == 0 { "the base".into() } else { format!("step {}", self.step()) };
        for problem in problems {
            warn(&format!("not taken up, and {was} answers{}: {problem}", self.on));
        }
        changed
    }
}

/// Run folder to follow, if the arguments name an unfinished run.
fn followed(args: &Args) -> Option<&Path> {
    let dir = Path::new(&args.model);
    if args.no_watch || args.adapter.is_some() || !is_run(dir) {
        return None;
    }
    if let Some(step) = checkpoint::ended_at(dir) {
        tell(&format!("this run has ended: its result, of step {step}, answers"));
        return None;
    }
    Some(dir)
}

/// Devices of `--device`, CPU last.
fn devices(words: &[String]) -> ft_base::Result<Vec<Device>> {
    if let [one] = words {
        return Ok(vec![chat::device(one)?]);
    }
    let mut named = Vec::new();
    for word in words {
        let Some(device) = OneDevice::from_word(word) else {
            return Err(usage("--device auto is one device\n  hint: by number: --device cuda:0,cuda:1"));
        };
        if named.contains(&device) {
            let twice = format!("--device has {} twice: a device has one copy of the model", device.word());
            return Err(usage(twice));
        }
        named.push(device);
    }
    named.sort_by_key(|d| *d == OneDevice::Cpu);
    named.into_iter().map(|d| Ok(job::one_device(d)?)).collect()
}

/// A device in the spelling of `--device`.
pub(super) fn word(device: &Device) -> String {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => OneDevice::Cuda(gpu_id).word(),
        _ => OneDevice::Cpu.word(),
    }
}

/// Loads the model to serve.
///
/// # Errors
/// A missing, unusable or too large model or adapter.
pub(super) fn load(args: &Args) -> ft_base::Result<Model> {
    let devices = devices(&args.device)?;
    let variables = chat::variables(&args.template)?;
    match followed(args) {
        Some(run) => of_run(args, run, &devices, variables),
        None => fixed(args, &devices, variables),
    }
}

fn of_run(
    args: &Args,
    run: &Path,
    devices: &[Device],
    variables: Map<String, Value>,
) -> ft_base::Result<Model> {
    let how = ModelOverrides {
        dtype: args.loading.dtype(),
        quantize: args.loading.quantize(),
        chat_template: args.chat_template.clone(),
    };
    let (latest, job) = CheckpointFollower::open(run, &how)?;
    let nf4 = job.recipe.model.quantize == Quantize::Nf4;
    chat::fits(&job.config, (&job.selection, &job.model.dir), (nf4, job.recipe.model.dtype), devices)?;
    let tokenizer = job.tokenizer.clone().ok_or_else(|| no_tokenizer(job.model.dir.clone()))?;
    let (mut copies, mut none) = (Vec::new(), true);
    for device in devices {
        let (decoder, params) = job.on(device.clone()).load(false)?;
        let on = if devices.len() > 1 { format!(" on {}", word(device)) } else { String::new() };
        let mut run = Followed { latest: latest.another(), params, on };
        none &= !run.look();
        copies.push(Copy { decoder, device: device.clone(), run: Some(run) });
    }
    if none {
        tell("there is no checkpoint yet: the model answers as it was before the first step");
    }
    let trained = job.trained();
    Ok(Model {
        copies,
        tokenizer,
        form: if args.chat_template.is_some() { PromptFormat::Chat } else { trained.form },
        variables: with(variables, trained.template),
        dir: job.model.dir,
        config: job.config,
    })
}

fn fixed(args: &Args, devices: &[Device], variables: Map<String, Value>) -> ft_base::Result<Model> {
    let model = Given::find(&args.model)?;
    let named = args.adapter.as_deref().map(Given::find).transpose()?;
    let (model, adapter) = chat::find(&model, named.as_ref())?;
    let trained = PromptConfig::open(adapter.as_ref().map_or(&model.dir, |a| &a.dir))?;
    let form = match &args.chat_template {
        Some(_) => PromptFormat::Chat,
        None => trained.as_ref().map_or(PromptFormat::Chat, |t| t.form),
    };
    let template = chat::template(args.chat_template.as_ref(), adapter.as_ref());
    let added = job::added(adapter.as_ref())?;
    let tokenizer = Tokenizer::load_with(&model.dir, template.as_deref(), &added)?;
    let tokenizer = Arc::new(tokenizer.ok_or_else(|| no_tokenizer(model.dir.clone()))?);
    let opened = Opened::new(&args.loading, &model, adapter.as_ref(), devices)?;
    let copy =
        |device: &Device| Ok(Copy { decoder: opened.load(device)?, device: device.clone(), run: None });
    let copies = devices.iter().map(copy).collect::<ft_base::Result<_>>()?;
    let variables = with(variables, trained.map(|t| t.template).unwrap_or_default());
    let config = opened.config().clone();
    Ok(Model { copies, tokenizer, form, variables, dir: model.dir, config })
}

/// Template variables: explicit ones override the training's.
fn with(mut named: Map<String, Value>, trained: Map<String, Value>) -> Map<String, Value> {
    for (key, value) in trained {
        named.entry(key).or_insert(value);
    }
    named
}

fn no_tokenizer(dir: PathBuf) -> hub::Error {
    hub::Error::NoLocalFile { dir, file: "tokenizer.json", hint: "" }
}
