//! `ft serve`: an OpenAI-compatible HTTP API for a model.
//!
//! ```text
//! request, parameters   JSON -> validated request
//! http, error           routes, API key, errors in OpenAI's format
//! response              answers, whole or as server-sent events
//! worker, stop          replicas: each answers one request at a time from a shared bounded queue
//! job, state            what requests and replicas share
//! ```
//!
//! Each replica computes on a thread of its own (the last on the main thread); connections run on a tokio
//! runtime. A disconnected client closes its channel, and generation stops at the next token. New
//! checkpoints are loaded between two answers, by one replica at a time: an answer uses one set of weights
//! throughout, and names the step.
//!
//! If an answer fails, the client gets an error, and the replica reads one token as a test. If this fails
//! too, the device counts as broken or occupied: the replica stops with a warning while the rest continue.
//! The server ends with the last replica.

mod error;
mod http;
mod job;
mod parameters;
mod request;
mod response;
mod state;
mod stop;
mod worker;

use super::args::{LoadArgs, TemplateArgs};
use super::console::print;
use crate::infer::{Follower, Model, ModelOptions, Replica, device, usage};
use crate::log::unix_time;
use ft_base::terminal::{tell, warn};
use ft_data::Tokenizer;
use job::ReplicaStatus;
use rustix::process::{Signal, getpid, kill_process};
use state::ServerState;
use std::io::Read;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use worker::{Generator, Queue};

/// Capacity of the queue; further requests get status 429.
const QUEUE: usize = 64;

/// Arguments of `ft serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a folder (of a model, of an adapter, whose base is found by its config, of a run or of a
    /// checkpoint), or
    /// a hub id. Of a run that has not ended the newest checkpoint answers, and each new one from when it
    /// is written; before
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
    /// Where to compute: auto (CUDA if there is one), cpu, cuda, or cuda:1, the second one. Of several
    /// (cuda:1,cuda:2) each
    /// has a copy of the model, and as many requests are answered at once
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_delimiter = ',', value_parser = device::parse)]
    device: Vec<String>,
    #[command(flatten)]
    load: LoadArgs,
    #[command(flatten)]
    template: TemplateArgs,
}

impl Args {
    fn model_options(&self) -> ft_base::Result<ModelOptions<'_>> {
        Ok(ModelOptions {
            model: &self.model,
            adapter: self.adapter.as_deref(),
            follow: !self.no_watch,
            load: self.load.options(),
            chat_template: self.template.chat_template.as_deref(),
            variables: self.template.variables()?,
        })
    }
}

/// Loads the model, prints the address, and serves until interrupted.
///
/// # Errors
/// An address already in use or not available; a model or adapter that cannot be found or loaded.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let fail = |e: std::io::Error| {
        usage(format!(
            "--host {}, --port {}: {e}\n  hint: another port, or 0 for a free one",
            args.host, args.port
        ))
    };
    // bind before the slow loading of the model
    let listener = TcpListener::bind((args.host, args.port)).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let local = listener.local_addr().map_err(fail)?;
    let devices = device::open_all(&args.device)?;
    let model = Model::load(args.model_options()?, &devices)?;
    let key = args.api_key.clone().or_else(|| std::env::var("FT_API_KEY").ok()).filter(|k| !k.is_empty());
    if !args.host.is_loopback() && key.is_none() {
        warn("whoever reaches this machine can use the model\n  hint: --api-key, or FT_API_KEY");
    }
    let Model { replicas, prompt, dir, files: _files } = model;
    let (queue, jobs) = crossbeam_channel::bounded(QUEUE);
    let status =
        |r: &Replica| ReplicaStatus::new(device::name(&r.device), r.run.as_ref().map(Follower::step));
    let status: Arc<Vec<ReplicaStatus>> = Arc::new(replicas.iter().map(status).collect());
    let (max_positions, vocab) = replicas.first().map_or((0, 0), |r| {
        let config = &r.decoder.config;
        (config.max_positions, config.vocab)
    });
    let prompt = Arc::new(prompt);
    let state = Arc::new(ServerState {
        name: args.adapter.clone().unwrap_or_else(|| args.model.clone()),
        created: unix_time(),
        key,
        prompt: prompt.clone(),
        dir,
        max_tokens: args.max_tokens,
        max_positions,
        vocab,
        replicas: status.clone(),
        queue,
    });
    let stop = Arc::new(AtomicBool::new(false));
    let web = http::start(listener, state, stop.clone()).map_err(fail)?;
    print(&format!("http://{local}/v1\n"))?;
    if args.until_eof {
        end_with_stdin().map_err(fail)?;
    } else {
        tell("ctrl-c ends it");
    }
    let outcome = answer(replicas, &status, &prompt.tokenizer, Queue::new(jobs, &stop));
    if outcome.is_err() {
        end();
    }
    match web.join() {
        Ok(ended) => outcome.and(ended.map_err(fail)),
        // the panic hook has reported it
        Err(_) => Err(usage("the server ended")),
    }
}

/// Answers requests of the queue with all replicas until it closes.
fn answer(
    replicas: Vec<Replica>,
    status: &[ReplicaStatus],
    tokenizer: &Tokenizer,
    queue: Queue<'_>,
) -> ft_base::Result<()> {
    let queue = &queue;
    let work = |(mut replica, status)| {
        (status, move || queue.work(&mut Generator::new(&mut replica, tokenizer), status))
    };
    worker::run_all(replicas.into_iter().zip(status).map(work).collect())
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
