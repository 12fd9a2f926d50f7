//! `ft chat`: chats with a model in the format of the training data.

mod lines;

use super::args::TemplateArgs;
use crate::infer::sampling::{GenerationConfig, Sampler, SamplingOptions};
use crate::infer::{ContextLimit, LoadOptions, ModelFiles, Prompter, device, usage, words};
use clap::builder::RangedU64ValueParser;
use ft_base::terminal::{print, tell, warn};
use ft_data::{PromptConfig, PromptFormat};
use ft_engine::walk::generate::{self, Reader, Writer};
use ft_kernels::Real;
use lines::{Line, Lines};
use serde_json::{Map, Value, json};
use std::io;
use std::slice;

/// Arguments of `ft chat`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a folder (of a model, of an adapter, whose base is found by its config, of a run or of a checkpoint),
    /// or a hub id
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
    #[command(flatten)]
    sampling: SamplingOptions,
    /// Most tokens of a reply
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1024,
        value_parser = RangedU64ValueParser::<usize>::new().range(1..)
    )]
    max_tokens: usize,
    /// Where to compute: auto (CUDA if there is one), cpu, cuda, or cuda:1, the second one
    #[arg(long, default_value = "auto", value_parser = device::parse)]
    device: String,
    #[command(flatten)]
    load: LoadOptions,
    /// How a prompt becomes text; by default as the training data was written, else by the chat template.
    /// With alpaca and text, each prompt stands alone
    #[arg(long, value_parser = words(PromptFormat::WORDS, PromptFormat::from_word))]
    form: Option<PromptFormat>,
    /// Continue the text of a prompt, without a template: the same as --form text
    #[arg(long, conflicts_with = "form")]
    raw: bool,
    #[command(flatten)]
    template: TemplateArgs,
}

/// Answers one prompt, or every line of stdin until the end or `/exit`.
///
/// # Errors
/// A missing or unusable model or adapter; a template that rejects the conversation.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let variables = args.template.variables()?;
    let device = device::open(&args.device)?;
    let files = ModelFiles::open(&args.model, args.adapter.as_deref())?;
    let form = form(args, files.trained.as_ref())?;
    let prompt = files.prompt_format(form, args.template.chat_template.as_deref(), variables)?;
    if form == PromptFormat::Chat && !prompt.tokenizer.has_template() {
        let source = &files.model.source;
        return Err(usage(format!(
            "{source}: has no chat template\n  hint: --chat-template FILE.jinja, or --raw to continue a text"
        )));
    }
    let mut sampler = args.sampling.sampler(&GenerationConfig::read(&files.model.dir)?)?;
    let (decoders, context) = files.load(args.load, slice::from_ref(&device))?;
    // removes a converted checkpoint; an end by Ctrl-C would leave it
    drop(files);
    let Some(decoder) = decoders.first() else { return Ok(()) };
    let system = args.system.as_deref();
    let first: Vec<Value> = system.iter().map(|s| json!({"role": "system", "content": s})).collect();
    let mut chat = Chat {
        cache: Reader::new(decoder, &device),
        prompt,
        system,
        messages: first.clone(),
        first,
        max_tokens: args.max_tokens,
        context,
        once: args.prompt.is_some(),
    };
    match &args.prompt {
        Some(prompt) => chat.answer(prompt, &mut sampler).map(|_| ()),
        None => talk(&mut chat, &mut sampler),
    }
}

/// Commands in place of a message.
const COMMANDS: &str = "/clear begins anew, /exit ends";

/// Reads and answers prompts line by line.
fn talk(chat: &mut Chat<'_>, sampler: &mut Sampler) -> ft_base::Result<()> {
    let fail = |e: io::Error| usage(format!("stdin: {e}"));
    let mut lines = Lines::open("chat-history").map_err(fail)?;
    if lines.is_terminal() {
        tell(&format!("one line a message; {COMMANDS}"));
    }
    let mut interrupted = false;
    loop {
        let line = match lines.next("> ").map_err(fail)? {
            Line::Text(line) => line,
            Line::Interrupt if !interrupted => {
                tell("ctrl-c again ends, as ctrl-d and /exit do");
                interrupted = true;
                continue;
            }
            Line::Interrupt | Line::End => break,
        };
        interrupted = false;
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
                let prompt = if chat.prompt.form == PromptFormat::Text { line.as_str() } else { trimmed };
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

/// A conversation and its KV cache.
struct Chat<'a> {
    cache: Reader<'a>,
    prompt: Prompter,
    system: Option<&'a str>,
    /// Initial messages of every conversation.
    first: Vec<Value>,
    messages: Vec<Value>,
    max_tokens: usize,
    context: ContextLimit,
    /// Whether the conversation has one prompt.
    once: bool,
}

impl Chat<'_> {
    /// The message on a conversation of more tokens than the context has.
    fn beyond(&self, tokens: usize) -> Option<String> {
        let anew = if self.once { "" } else { ": /clear begins anew" };
        let why = || format!("the conversation has {tokens} tokens, {}{anew}", self.context);
        (tokens > self.context.tokens).then(why)
    }

    /// Streams the answer to stdout. Returns whether stdout is still open. Beyond the context, a message of several has
    /// a warning in place of an answer, and a single one is an error.
    fn answer(&mut self, prompt: &str, sampler: &mut Sampler) -> ft_base::Result<bool> {
        self.messages.push(json!({"role": "user", "content": prompt}));
        let ids = if self.prompt.form == PromptFormat::Chat {
            self.prompt.conversation(self.messages.clone(), Map::new())?
        } else {
            self.prompt.single(self.system, prompt)?
        };
        if ids.is_empty() {
            return Err(usage("the prompt is empty, and there is nothing to go on from"));
        }
        match self.beyond(ids.len()) {
            Some(why) if self.once => return Err(usage(why)),
            Some(why) => {
                warn(&why);
                self.messages.pop();
                return Ok(true);
            }
            None => {}
        }
        let logits = self.cache.read_document(&ids)?;
        let tokenizer = &self.prompt.tokenizer;
        let (text, mut speech) = (tokenizer.decoder(true), Speech { sampler, seen: ids, listening: Ok(()) });
        let reply = generate::reply(&mut self.cache, tokenizer, logits, text, self.max_tokens, &mut speech)?;
        let listening = speech.listening.and(print("\n"));
        if let Some(why) = self.beyond(self.cache.len()) {
            warn(&why);
        }
        self.messages.push(json!({"role": "assistant", "content": reply.text}));
        let gone = listening.is_err();
        ft_recipe::Error::of_print(listening)?;
        Ok(!gone)
    }
}

/// Draws and prints the tokens of a reply.
struct Speech<'a> {
    sampler: &'a mut Sampler,
    /// Tokens of prompt and reply.
    seen: Vec<u32>,
    /// Outcome of the last output.
    listening: io::Result<()>,
}

impl Writer for Speech<'_> {
    fn choose(&mut self, logits: &Real) -> ft_base::Result<u32> {
        Ok(self.sampler.draw(logits, &mut self.seen)?)
    }

    fn write(&mut self, piece: &str) -> bool {
        if !piece.is_empty() {
            self.listening = print(piece);
        }
        self.listening.is_ok()
    }
}

/// Prompt form: from the options, or from the training.
fn form(args: &Args, trained: Option<&PromptConfig>) -> ft_base::Result<PromptFormat> {
    let named = if args.raw { Some(PromptFormat::Text) } else { args.form };
    let TemplateArgs { chat_template, template } = &args.template;
    let options = [("--chat-template", chat_template.is_some()), ("--template", !template.is_empty())];
    let chat_option = options.into_iter().find(|o| o.1).map(|o| o.0);
    if let (Some(option), Some(form)) = (chat_option, named.filter(|f| *f != PromptFormat::Chat)) {
        return Err(usage(format!("{option} and the form {}: it has no chat template", form.word())));
    }
    let trained = trained.map(|t| t.form).filter(|_| chat_option.is_none());
    let form = named.or(trained).unwrap_or(PromptFormat::Chat);
    if form == PromptFormat::Text && args.system.is_some() {
        let why =
            "--system: a text that is continued has no system message\n  hint: begin the prompt with it";
        return Err(usage(why));
    }
    if form != PromptFormat::Chat {
        let by =
            if named.is_some() { "" } else { ", as in its training (--form chat: by the chat template)" };
        let what = PromptFormat::WORDS.iter().find(|w| w.0 == form.word()).map_or("", |w| w.1);
        tell(&format!("each prompt stands alone, as {what}{by}"));
    }
    Ok(form)
}
