//! `ft serve`: a model behind the API that OpenAI's clients speak.
//!
//! ```text
//! request   what a client asks: JSON -> a question that is checked
//! http      the addresses, the key, answers whole and as server-sent events
//! work      the model: one question at a time, out of a queue with a bound
//! ```
//!
//! The thread that loaded the model computes; the connections are another runtime's. A client that goes away closes its
//! channel, which ends the computation at the next token.

mod http;
mod request;
mod work;

use super::chat::{self, Loading};
use super::given::Given;
use crate::data::{Form, Tokenizer, Trained};
use crate::hub;
use crate::log::{tell, unix_time, warn};
use crate::recipe::Device as DeviceName;
use crate::train::job;
use serde_json::{Map, Value};
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use tokio::sync::mpsc;

/// Questions that wait; one more is told to come again.
const QUEUE: usize = 64;

/// Arguments of `ft serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a folder (of a model, of an adapter, whose base is found by its config, of a run or of a checkpoint), or
    /// a hub id
    model: String,
    /// A PEFT adapter over it, unmerged: a folder, or a hub id
    #[arg(long, value_name = "DIR")]
    adapter: Option<String>,
    /// Address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Key that clients must send; else that of FT_API_KEY, else none is asked for
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Most tokens of a reply, and what a request gets that names no number
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_tokens: usize,
    #[command(flatten)]
    loading: Loading,
    /// A chat template to use instead of that of the training, or the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// A variable for the chat template: enable_thinking=false
    #[arg(long, value_name = "KEY=VALUE")]
    template: Vec<String>,
}

/// What every request needs to know.
struct Served {
    /// The model's name in the API.
    name: String,
    /// Seconds after 1970 at which it was loaded.
    created: u64,
    key: Option<String>,
    tokenizer: Arc<Tokenizer>,
    form: Form,
    variables: Map<String, Value>,
    /// The model's folder, where its own way to draw stands.
    dir: PathBuf,
    max_tokens: usize,
    max_positions: usize,
    /// Rows of the embedding.
    vocab: usize,
    queue: mpsc::Sender<work::Job>,
}

/// Loads the model, prints the address, and answers until it is interrupted.
///
/// # Errors
/// An address that cannot be had; a model or adapter that cannot be found or used.
pub fn run(args: &Args) -> crate::Result<()> {
    let address = (args.host, args.port);
    let fail = |e: std::io::Error| {
        super::usage(format!(
            "--host {}, --port {}: {e}\n  hint: another port, or 0 for a free one",
            args.host, args.port
        ))
    };
    // first: it would be a pity to load a model in vain
    let listener = TcpListener::bind(address).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let local = listener.local_addr().map_err(fail)?;
    let mut variables = chat::variables(&args.template)?;
    let device = DeviceName::from_word(&args.loading.device).unwrap_or(DeviceName::Auto);
    let device = job::device(device)?;
    let model = Given::find(&args.model)?;
    let named = args.adapter.as_deref().map(Given::find).transpose()?;
    let (model, adapter) = chat::find(&model, named.as_ref())?;
    let trained = Trained::open(adapter.as_ref().map_or(&model.dir, |a| &a.dir))?;
    let form = match &args.chat_template {
        Some(_) => Form::Chat,
        None => trained.as_ref().map_or(Form::Chat, |t| t.form),
    };
    for (key, value) in trained.into_iter().flat_map(|t| t.template) {
        variables.entry(key).or_insert(value);
    }
    let template = chat::template(args.chat_template.as_ref(), adapter.as_ref());
    let added = job::added(adapter.as_ref())?;
    let Some(tokenizer) = Tokenizer::load_with(&model.dir, template.as_deref(), &added)? else {
        return Err(hub::Error::NoLocalFile { dir: model.dir, file: "tokenizer.json", hint: "" }.into());
    };
    let decoder = chat::load(&args.loading, &model, adapter.as_ref(), &device)?;

    let key = args.api_key.clone().or_else(|| std::env::var("FT_API_KEY").ok()).filter(|k| !k.is_empty());
    if !args.host.is_loopback() && key.is_none() {
        warn("whoever reaches this machine can use the model\n  hint: --api-key, or FT_API_KEY");
    }
    let (queue, mut jobs) = mpsc::channel(QUEUE);
    let tokenizer = Arc::new(tokenizer);
    let served = Arc::new(Served {
        name: args.adapter.clone().unwrap_or_else(|| args.model.clone()),
        created: unix_time(),
        key,
        form,
        variables,
        dir: model.dir.clone(),
        max_tokens: args.max_tokens,
        max_positions: decoder.config.max_positions,
        vocab: decoder.config.vocab,
        tokenizer: tokenizer.clone(),
        queue,
    });
    let stop = Arc::new(AtomicBool::new(false));
    let web = http::start(listener, served, stop.clone()).map_err(fail)?;
    super::print(&format!("http://{local}/v1\n"))?;
    tell("ctrl-c ends it");
    work::work(&decoder, &device, &tokenizer, &mut jobs, &stop);
    match web.join() {
        Ok(outcome) => outcome.map_err(fail),
        // a panic was told
        Err(_) => Err(super::usage("the server ended")),
    }
}
