//! `ft serve`: an OpenAI-compatible HTTP API for a model.
//!
//! ```text
//! model     model to serve: fixed, or a run's newest checkpoint; one copy per device
//! request   request parsing: JSON -> validated question
//! http      routes, API key, responses whole and as server-sent events
//! work      copies: each answers one question at a time from a shared bounded queue
//! ```
//!
//! Each copy computes on a thread of its own (the last on the main thread); connections run on a tokio
//! runtime. A disconnected client closes its channel, and generation stops at the next token. New
//! checkpoints are loaded between two questions, by one copy at a time: an answer uses one set of weights
//! throughout, and names the step.
//!
//! If an answer fails, the client gets an error, and the copy reads one token as a test. If this fails
//! too, the device counts as broken or occupied: the copy stops with a warning while the rest continue.
//! The server ends with the last copy.

mod http;
mod model;
mod request;
mod work;

use super::chat::{Loading, device_word};
use crate::log::unix_time;
use crossbeam_channel::Sender;
use ft_base::terminal::{tell, warn};
use ft_data::{PromptFormat, Tokenizer};
use model::{Copy, Followed, Model};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Map, Value};
use std::io::Read;
use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use work::{Answering, Desk, Told};

/// Capacity of the queue; further requests get status 429.
const QUEUE: usize = 64;

/// Arguments of `ft serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a folder (of a model, of an adapter, whose base is found by its config, of a run or of a checkpoint), or
    /// a hub id. Of a run that has not ended the newest checkpoint answers, and each new one from when it is written; before
    /// the first, the model as it was
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
    /// Of a run: stay on what it has when the server starts
    #[arg(long)]
    no_watch: bool,
    /// End when stdin ends
    #[arg(long)]
    until_eof: bool,
    /// Where to compute: auto (CUDA if there is one), cpu, cuda, or cuda:1, the second one. Of several (cuda:1,cuda:2) each
    /// has a copy of the model, and as many requests are answered at once
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_delimiter = ',', value_parser = device_word)]
    device: Vec<String>,
    #[command(flatten)]
    loading: Loading,
    /// A chat template to use instead of that of the training, or the model's own
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// A variable for the chat template: enable_thinking=false
    #[arg(long, value_name = "KEY=VALUE")]
    template: Vec<String>,
}

/// State shared by all requests.
struct Served {
    /// Model name in the API.
    name: String,
    /// Unix time of loading.
    created: u64,
    key: Option<String>,
    tokenizer: Arc<Tokenizer>,
    form: PromptFormat,
    variables: Map<String, Value>,
    /// Folder of the model, with `generation_config.json`.
    dir: PathBuf,
    max_tokens: usize,
    max_positions: usize,
    /// Embedding rows.
    vocab: usize,
    copies: Arc<Vec<Told>>,
    queue: Sender<work::Job>,
}

/// Loads the model, prints the address, and serves until interrupted.
///
/// # Errors
/// An address already in use or not available; a model or adapter that cannot be found or loaded.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let address = (args.host, args.port);
    let fail = |e: std::io::Error| {
        super::usage(format!(
            "--host {}, --port {}: {e}\n  hint: another port, or 0 for a free one",
            args.host, args.port
        ))
    };
    // bind before the slow loading of the model
    let listener = TcpListener::bind(address).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let local = listener.local_addr().map_err(fail)?;
    let Model { config, copies, tokenizer, form, variables, dir } = model::load(args)?;

    let key = args.api_key.clone().or_else(|| std::env::var("FT_API_KEY").ok()).filter(|k| !k.is_empty());
    if !args.host.is_loopback() && key.is_none() {
        warn("whoever reaches this machine can use the model\n  hint: --api-key, or FT_API_KEY");
    }
    let (queue, jobs) = crossbeam_channel::bounded(QUEUE);
    let told = |c: &Copy| Told::new(model::word(&c.device), c.run.as_ref().map(Followed::step));
    let told: Arc<Vec<Told>> = Arc::new(copies.iter().map(told).collect());
    let served = Arc::new(Served {
        name: args.adapter.clone().unwrap_or_else(|| args.model.clone()),
        created: unix_time(),
        key,
        form,
        variables,
        dir,
        max_tokens: args.max_tokens,
        max_positions: config.max_positions,
        vocab: config.vocab,
        tokenizer: tokenizer.clone(),
        copies: told.clone(),
        queue,
    });
    let stop = Arc::new(AtomicBool::new(false));
    let web = http::start(listener, served, stop.clone()).map_err(fail)?;
    super::print(&format!("http://{local}/v1\n"))?;
    if args.until_eof {
        end_with_stdin().map_err(fail)?;
    } else {
        tell("ctrl-c ends it");
    }
    let outcome = {
        let desk = Desk::new(jobs, &stop);
        let work = |(copy, told)| {
            let (desk, tokenizer) = (&desk, &*tokenizer);
            let work = move || {
                let Copy { decoder, device, run } = copy;
                desk.attend(&mut Answering::new(&decoder, &device, tokenizer, run), told)
            };
            (told, work)
        };
        work::together(copies.into_iter().zip(told.iter()).map(work).collect())
    };
    if outcome.is_err() {
        end();
    }
    match web.join() {
        Ok(ended) => outcome.and(ended.map_err(fail)),
        // the panic hook has reported it
        Err(_) => Err(super::usage("the server ended")),
    }
}

/// Shuts the server down by SIGTERM to this process.
fn end() {
    let _ = kill_process(getpid(), Signal::TERM);
}

/// Shuts the server down as soon as stdin reaches its end.
fn end_with_stdin() -> std::io::Result<()> {
    let wait = || {
        let mut stdin = std::io::stdin().lock();
        while matches!(stdin.read(&mut [0; 64]), Ok(1..)) {}
        end();
    };
    std::thread::Builder::new().name("stdin".into()).spawn(wait).map(drop)
}
