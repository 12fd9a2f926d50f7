//! `ft chat`: chats with a model in the format of the training data.

use super::base::{base_of, quantized};
use super::given::Given;
use super::lines::Lines;
use super::words;
use crate::train::job;
use candle_core::Device;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use ft_base::store;
use ft_base::terminal::{print, tell, warn};
use ft_data::hub::{self, ModelDir, Settings, Want};
use ft_data::{PromptConfig, PromptFormat, Tokenizer};
use ft_engine::adapt::build::Build;
use ft_engine::adapt::{Adapter, Selection};
use ft_engine::load::Base;
use ft_engine::model::{Config, Decoder};
use ft_engine::walk::generate::{self, Reader};
use ft_kernels::cuda;
use ft_plan::{Loaded, Reading};
use ft_recipe::{Device as DeviceName, Dtype, OneDevice, Quantize};
use serde_json::{Map, Value, json};
use std::io;
use std::path::{Path, PathBuf};
use std::slice;

/// Arguments of `ft chat`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a folder (of a model, of an adapter, whose base is found by its config, of a run or of a checkpoint), or
    /// a hub id
    model: String,
    /// A PEFT adapter over it, unmerged: a folder, or a hub id
    #[arg(long, value_name = "DIR")]
    adapter: Option<String>,
    /// A first message that says how to answer
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Answer this and end
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Sampling temperature; 0 is greedy. Default: the model's own
    #[arg(long, value_name = "X")]
    temperature: Option<f64>,
    /// Nucleus sampling: draw from the most likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Draw from the K most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Most tokens of a reply
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_tokens: usize,
    /// Where to compute: auto (CUDA if there is one), cpu, cuda, or cuda:1, the second one
    #[arg(long, default_value = "auto", value_parser = device_word)]
    device: String,
    #[command(flatten)]
    loading: Loading,
    /// How a prompt becomes text; by default as the training data was written, else by the chat template. With alpaca and
    /// text, each prompt stands alone
    #[arg(long, value_parser = words(PromptFormat::WORDS))]
    form: Option<String>,
    /// Continue each prompt as it is, the same as --form text
    #[arg(long, conflicts_with = "form")]
    raw: bool,
    /// A chat template to use instead of that of the training, or the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// A variable for the chat template: enable_thinking=false
    #[arg(long, value_name = "KEY=VALUE")]
    template: Vec<String>,
}

/// How a model that answers is loaded.
#[derive(Debug, clap::Args)]
pub struct Loading {
    /// Compute dtype; by default bf16 on CUDA, f32 on the CPU
    #[arg(long, value_parser = words(Dtype::WORDS))]
    dtype: Option<String>,
    /// Quantization of the base's linears; by default that of the adapter's run
    #[arg(long, value_parser = words(Quantize::WORDS))]
    quantize: Option<String>,
}

/// Parses a value of `--device`.
pub(super) fn device_word(word: &str) -> Result<String, String> {
    match word == DeviceName::Auto.word() || OneDevice::from_word(word).is_some() {
        true => Ok(word.into()),
        false => Err("auto, cpu, cuda, or cuda:1 by number".into()),
    }
}

/// Opens the device of a `--device` value.
///
/// # Errors
/// A device not present.
pub(super) fn device(word: &str) -> ft_base::Result<Device> {
    Ok(match OneDevice::from_word(word).filter(|_| word != DeviceName::Cuda.word()) {
        Some(device) => job::one_device(device)?,
        None => job::device(DeviceName::from_word(word).unwrap_or(DeviceName::Auto))?,
    })
}

impl Loading {
    /// Compute dtype, if given.
    pub(super) fn dtype(&self) -> Option<Dtype> {
        self.dtype.as_deref().and_then(Dtype::from_word)
    }

    /// Quantization, if given.
    #[cfg(feature = "serve")]
    pub(super) fn quantize(&self) -> Option<Quantize> {
        self.quantize.as_deref().and_then(Quantize::from_word)
    }
}

/// Answers one prompt, or every line of stdin until the end or `/exit`.
///
/// # Errors
/// A missing or unusable model or adapter; a template that rejects the conversation.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let mut variables = variables(&args.template)?;
    let device = device(&args.device)?;
    let model = Given::find(&args.model)?;
    let named = args.adapter.as_deref().map(Given::find).transpose()?;
    let (model, adapter) = find(&model, named.as_ref())?;
    let trained = match &adapter {
        Some(adapter) => PromptConfig::open(&adapter.dir)?,
        None => PromptConfig::open(&model.dir)?,
    };
    let form = form(args, trained.as_ref())?;
    for (key, value) in trained.into_iter().flat_map(|t| t.template) {
        variables.entry(key).or_insert(value);
    }
    let template = template(args.chat_template.as_ref(), adapter.as_ref());
    let added = job::added(adapter.as_ref())?;
    let Some(tokenizer) = Tokenizer::load_with(&model.dir, template.as_deref(), &added)? else {
        return Err(hub::Error::NoLocalFile { dir: model.dir, file: "tokenizer.json", hint: "" }.into());
    };
    if form == PromptFormat::Chat && !tokenizer.has_template() {
        let what = &model.source;
        return Err(super::usage(format!(
            "{what}: has no chat template\n  hint: --chat-template FILE.jinja, or --raw to continue a text"
        )));
    }
    let mut sampler = sampler((args.temperature, args.top_p, args.top_k, args.seed), &model.dir)?;
    let decoder =
        Opened::new(&args.loading, &model, adapter.as_ref(), slice::from_ref(&device))?.load(&device)?;
    let mut chat = Chat {
        reader: Reader::new(&decoder, &device),
        tokenizer: &tokenizer,
        form,
        system: args.system.as_deref(),
        first: args.system.iter().map(|s| json!({"role": "system", "content": s})).collect(),
        messages: Vec::new(),
        variables,
        max_tokens: args.max_tokens,
        max_positions: decoder.config.max_positions,
    };
    chat.messages.clone_from(&chat.first);
    match &args.prompt {
        Some(prompt) => chat.answer(prompt, &mut sampler).map(|_| ()),
        None => talk(&mut chat, &mut sampler),
    }
}

/// Commands in place of a message.
const COMMANDS: &str = "/clear begins anew, /exit ends";

/// Reads and answers prompts line by line.
fn talk(chat: &mut Chat<'_>, sampler: &mut LogitsProcessor) -> ft_base::Result<()> {
    let fail = |e: io::Error| super::usage(format!("stdin: {e}"));
    let mut lines = Lines::open("chat-history").map_err(fail)?;
    if lines.typed() {
        tell(&format!("one line a message; {COMMANDS}"));
    }
    while let Some(line) = lines.next("> ").map_err(fail)? {
        match line.trim() {
            "" => continue,
            "/exit" => break,
            "/clear" => chat.messages.clone_from(&chat.first),
            other if is_command(&line) => {
                warn(&format!(
                    "no command is called {other}: {COMMANDS}\n  hint: a space before it makes it a message"
                ));
            }
            // keep the white space of a text to continue
            trimmed => {
                let prompt = if chat.form == PromptFormat::Text { line.as_str() } else { trimmed };
                if !chat.answer(prompt, sampler)? {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Whether a line looks like a command: a slash followed by letters.
fn is_command(line: &str) -> bool {
    let word = line.trim_end().strip_prefix('/');
    word.is_some_and(|w| !w.is_empty() && w.bytes().all(|b| b.is_ascii_alphabetic()))
}

/// A conversation and its key-value cache.
struct Chat<'a> {
    reader: Reader<'a>,
    tokenizer: &'a Tokenizer,
    form: PromptFormat,
    system: Option<&'a str>,
    /// Initial messages of every conversation.
    first: Vec<Value>,
    messages: Vec<Value>,
    variables: Map<String, Value>,
    max_tokens: usize,
    max_positions: usize,
}

impl Chat<'_> {
    /// Streams the answer to stdout. Returns whether stdout is still open.
    fn answer(&mut self, prompt: &str, sampler: &mut LogitsProcessor) -> ft_base::Result<bool> {
        self.messages.push(json!({"role": "user", "content": prompt}));
        let ids = if self.form == PromptFormat::Chat {
            let messages = Value::Array(self.messages.clone());
            self.tokenizer.encode(&self.tokenizer.render(&messages, None, true, &self.variables)?)?
        } else {
            self.form.prompt(self.tokenizer, self.system, prompt, &self.variables)?
        };
        if ids.is_empty() {
            return Err(super::usage("the prompt is empty, and there is nothing to go on from"));
        }
        let mut listening = Ok(());
        let mut say = |piece: &str| {
            listening = print(piece);
            listening.is_ok()
        };
        let reply =
            generate::answer(&mut self.reader, self.tokenizer, &ids, self.max_tokens, sampler, &mut say)?;
        say("\n");
        if self.reader.len() > self.max_positions {
            warn(&format!(
                "the conversation has {} tokens, the model is made for {}: /clear begins anew",
                self.reader.len(),
                self.max_positions
            ));
        }
        self.messages.push(json!({"role": "assistant", "content": reply.text}));
        let gone = listening.is_err();
        ft_recipe::Error::of_print(listening)?;
        Ok(!gone)
    }
}

/// Prompt form: from the options, or from the training.
fn form(args: &Args, trained: Option<&PromptConfig>) -> ft_base::Result<PromptFormat> {
    let named = if args.raw {
        Some(PromptFormat::Text)
    } else {
        args.form.as_deref().and_then(PromptFormat::from_word)
    };
    let template =
        [("--chat-template", args.chat_template.is_some()), ("--template", !args.template.is_empty())];
    let only_chat = template.into_iter().find(|o| o.1).map(|o| o.0);
    if let (Some(option), Some(form)) = (only_chat, named.filter(|f| *f != PromptFormat::Chat)) {
        return Err(super::usage(format!("{option} and the form {}: it has no chat template", form.word())));
    }
    let trained = trained.map(|t| t.form).filter(|_| only_chat.is_none());
    let form = named.or(trained).unwrap_or(PromptFormat::Chat);
    if form == PromptFormat::Text && args.system.is_some() {
        let why =
            "--system: a text that is continued has no system message\n  hint: begin the prompt with it";
        return Err(super::usage(why));
    }
    if form != PromptFormat::Chat {
        let by =
            if named.is_some() { "" } else { ", as in its training (--form chat: by the chat template)" };
        let what = PromptFormat::WORDS.iter().find(|w| w.0 == form.word()).map_or("", |w| w.1);
        tell(&format!("each prompt stands alone, as {what}{by}"));
    }
    Ok(form)
}

/// Fetches the model with its weights, and opens the adapter.
pub(super) fn find(model: &Given, adapter: Option<&Given>) -> ft_base::Result<(ModelDir, Option<Adapter>)> {
    let settings = Settings::from_env();
    let named = match adapter {
        None => None,
        Some(a) => Some(Adapter::open(&hub::fetch_adapter_with(&settings, &a.name, "main", true)?)?),
    };
    let model = model.name.as_str();
    let dir = Path::new(model);
    if dir.join("adapter_config.json").is_file() && !dir.join("config.json").is_file() {
        if named.is_some() {
            return Err(super::usage(format!("{model}: is an adapter, and --adapter names another")));
        }
        let adapter = Adapter::open(dir)?;
        return Ok((base_of(&settings, &adapter, None, Want::Weights)?, Some(adapter)));
    }
    let model = hub::fetch_model_with(&settings, model, "main", Want::Weights, true)?;
    model.notes.iter().for_each(|n| warn(n));
    Ok((model, named))
}

/// Chat template to use instead of the base's own: the given one, or the adapter's.
pub(super) fn template(named: Option<&PathBuf>, adapter: Option<&Adapter>) -> Option<PathBuf> {
    let beside = adapter.map(|a| a.dir.join("chat_template.jinja")).filter(|p| p.is_file());
    named.cloned().or(beside)
}

/// A model with an unmerged adapter, checked to fit the devices.
pub(super) struct Opened<'a> {
    base: Base,
    selection: Selection,
    adapter: Option<&'a Adapter>,
    dtype: Option<Dtype>,
}

impl<'a> Opened<'a> {
    /// Opens a model for the given devices.
    ///
    /// # Errors
    /// An unusable model or adapter, or one too large for a device.
    pub fn new(
        args: &Loading,
        model: &ModelDir,
        adapter: Option<&'a Adapter>,
        devices: &[Device],
    ) -> ft_base::Result<Self> {
        let config = job::config(&model.dir, &Map::new())?;
        let base = Base::open(config, &model.dir)?;
        let selection = match adapter {
            None => Selection::frozen(&base.config),
            Some(a) => {
                if let Some(files) = base.files() {
                    a.check_base(files, base.config.tied)?;
                }
                a.selection(&base.config)?
            }
        };
        let nf4 = quantized(args.quantize.as_deref(), adapter, &base.config)?;
        let dtype = args.dtype();
        fits(&base.config, (&selection, &model.dir), (nf4, dtype), devices)?;
        Ok(Self { base: base.in_nf4(nf4), selection, adapter, dtype })
    }

    #[cfg(feature = "serve")]
    pub fn config(&self) -> &Config {
        &self.base.config
    }

    /// Loads the model onto a device.
    ///
    /// # Errors
    /// As [`Build::run`].
    pub fn load(&self, device: &Device) -> ft_base::Result<Decoder> {
        let build = Build::new(&self.base, &self.selection).adapter(self.adapter);
        Ok(build.on(job::dtype(self.dtype, device), device).shown("loading").run()?.0)
    }
}

/// Checks the model against the memory of all devices before loading. Prints a message if memory limits
/// the context length.
pub(super) fn fits(
    config: &Config,
    (selection, dir): (&Selection, &Path),
    (nf4, dtype): (bool, Option<Dtype>),
    devices: &[Device],
) -> ft_base::Result<()> {
    let quantize = if nf4 { Quantize::Nf4 } else { Quantize::None };
    let of = Loaded { config, selection, quantize, dtype, stored: Base::stored_width(config, Some(dir)) };
    let mut least: Option<Reading> = None;
    for device in devices {
        cuda::enter(device)?;
        let reading = Reading::new(of, device.is_cuda())?;
        if !reading.fits() {
            let mut others =
                vec![("--quantize nf4", Loaded { quantize: Quantize::Nf4, ..of }, device.is_cuda())];
            if device.is_cpu() && dtype != Some(Dtype::Bf16) {
                others.push(("--dtype bf16", Loaded { dtype: Some(Dtype::Bf16), ..of }, false));
            }
            if device.is_cuda() {
                others.push(("--device cpu", of, false));
            }
            let others = others.into_iter().map(|(option, of, cuda)| Ok((option, Reading::new(of, cuda)?)));
            return Err(reading.refusal(&others.collect::<ft_base::Result<Vec<_>>>()?).into());
        }
        if least.as_ref().is_none_or(|l| reading.tokens() < l.tokens()) {
            least = Some(reading);
        }
    }
    let cut = |r: &Reading| r.tokens().filter(|t| *t < config.max_positions as u64);
    if let Some((reading, tokens)) = least.as_ref().and_then(|r| Some((r, cut(r)?))) {
        let (text, most) = (reading.text(), config.max_positions);
        tell(&format!("{text}: there is memory for about {tokens} tokens, the model is made for {most}"));
    }
    Ok(())
}

/// Parses `KEY=VALUE` template variables; values are TOML, bare words are strings.
pub(super) fn variables(set: &[String]) -> ft_base::Result<Map<String, Value>> {
    let mut out = Map::new();
    for text in set {
        let Some((key, value)) = text.split_once('=').filter(|(k, _)| !k.trim().is_empty()) else {
            return Err(super::usage(format!("--template {text:?}: KEY=VALUE is wanted")));
        };
        out.insert(key.trim().to_string(), ft_recipe::loose_value(value));
    }
    Ok(out)
}

/// Temperatures below this sample greedily: dividing by them would overflow f32.
const COLDEST: f64 = 1e-6;

/// Sampling from explicit options, with the model's `generation_config.json` for missing ones; greedy by
/// default.
pub(super) fn sampler(
    (temperature, top_p, top_k, seed): (Option<f64>, Option<f64>, Option<usize>, u64),
    dir: &Path,
) -> ft_base::Result<LogitsProcessor> {
    let path = dir.join("generation_config.json");
    let own: Value = store::read_plain(&path, store::LARGEST)
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or(Value::Null);
    let own = if own["do_sample"] == json!(true) { own } else { Value::Null };
    let warm = if own.is_null() { 0.0 } else { 1.0 };
    let valid = |t: Option<f64>, p: Option<f64>| {
        t.is_none_or(|t| t >= 0.0 && t.is_finite()) && p.is_none_or(|p| p > 0.0 && p <= 1.0)
    };
    let (own_temperature, own_p) = (own["temperature"].as_f64(), own["top_p"].as_f64());
    if !valid(temperature, top_p) {
        return Err(super::usage("--temperature is 0 or more, --top-p above 0 and at most 1"));
    }
    if !valid(own_temperature, own_p) {
        let message = "temperature is not 0 or more, or top_p not above 0 and at most 1".to_string();
        return Err(ft_data::Error::Tokenizer { path, message }.into());
    }
    let temperature = temperature.or(own_temperature).unwrap_or(warm);
    let p = top_p.or(own_p).filter(|p| *p < 1.0);
    let k = top_k.or(own["top_k"].as_u64().map(|k| k as usize)).filter(|k| *k > 0);
    let sampling = match (temperature, k, p) {
        (..COLDEST, _, _) => Sampling::ArgMax,
        (temperature, None, None) => Sampling::All { temperature },
        (temperature, Some(k), None) => Sampling::TopK { k, temperature },
        (temperature, None, Some(p)) => Sampling::TopP { p, temperature },
        (temperature, Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
    };
    Ok(LogitsProcessor::from_sampling(seed, sampling))
}
