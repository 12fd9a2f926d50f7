//! `ft serve`: an OpenAI-compatible HTTP API for a model.
//!
//! ```text
//! limits     what clients can occupy: connections, headers, bodies, time
//! state      shared by all requests
//! http       who may ask (auth); connections, which end in time; routes
//! api        requests and responses in OpenAI's format
//! generate   the queue; replicas (worker), each answers one request at a time; one reply: sampling (reply_stream),
//!            stop strings, log-probabilities (scores)
//! ```
//!
//! Replicas compute on threads of their own; connections run on a tokio runtime. A disconnected client
//! closes its channel, and generation stops at the next token. New checkpoints are loaded between two
//! answers, by one replica at a time: an answer uses one set of weights throughout, and names the step.
//!
//! If an answer fails, the client gets an error, and the replica reads one token as a test. If this fails
//! too, the device counts as broken or occupied: the replica stops with a warning while the rest continue.
//! The server ends with the last replica.
//!
//! A signal closes the port and the queue. Answers break off at the next token; connections and replicas have a
//! limited time, and the process ends even if a replica still computes.

mod api;
mod generate;
mod http;
mod limits;
mod state;

use super::args::TemplateArgs;
use super::console::print;
use crate::infer::{Follower, LoadOptions, Model, ModelOptions, Replica, device, usage};
use crate::log::unix_time;
use crate::train;
use crate::train::signals::Signals;
use clap::builder::RangedU64ValueParser;
use ft_base::ExitCode;
use ft_base::terminal::tell;
use generate::{Generator, Queue, ReplicaStatus};
use limits::Limits;
use state::ServerState;
use std::io::Read;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{Semaphore, mpsc};

/// Arguments of `ft serve`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: a folder (of a model, of an adapter, whose base is found by its config, of a run or of a checkpoint),
    /// or a hub id. For a run in progress: its newest checkpoint, replaced when a newer one is written; before the
    /// first, the model before training
    model: String,
    /// A PEFT adapter over it, unmerged: a folder, or a hub id
    #[arg(long, value_name = "DIR")]
    adapter: Option<String>,
    /// Address to listen on; 0.0.0.0 lets other machines in, and needs a key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", value_parser = host)]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// API key of all requests but those to /health; by default FT_API_KEY. Without a key only programs of this
    /// machine are answered, and no web pages
    #[arg(long, value_name = "KEY", visible_alias = "key")]
    api_key: Option<String>,
    /// Name of the model in the API; by default the adapter or the model as given here
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Limit of tokens per reply. Without this option: the request's own limit, else 1024
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    max_tokens: Option<usize>,
    /// Of a run: stay on what it has when the server starts
    #[arg(long)]
    no_watch: bool,
    /// End when stdin ends
    #[arg(long)]
    until_eof: bool,
    /// Where to compute: auto (CUDA if there is one), cpu, cuda, or cuda:1, the second one. Of several (cuda:1,cuda:2)
    /// each has a copy of the model, and as many requests are answered at once
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_delimiter = ',', value_parser = device::parse)]
    device: Vec<String>,
    #[command(flatten)]
    load: LoadOptions,
    #[command(flatten)]
    template: TemplateArgs,
}

impl Args {
    fn model_options(&self) -> ft_base::Result<ModelOptions<'_>> {
        Ok(ModelOptions {
            model: &self.model,
            adapter: self.adapter.as_deref(),
            follow: !self.no_watch,
            load: self.load,
            chat_template: self.template.chat_template.as_deref(),
            variables: self.template.variables()?,
        })
    }
}

/// An address to listen on; no name but localhost.
fn host(word: &str) -> Result<IpAddr, String> {
    let address = if word.eq_ignore_ascii_case("localhost") { "127.0.0.1" } else { word };
    address.parse().map_err(|_| "an address is wanted: 127.0.0.1, 0.0.0.0, ::1, or localhost".into())
}

/// Loads the model, prints the address, and serves until interrupted.
///
/// # Errors
/// An address already in use or not available; other machines let in without a key; a model or adapter that
/// cannot be found or loaded; a signal, after the start.
pub fn run(args: &Args) -> ft_base::Result<()> {
    let fail = |e: std::io::Error| {
        usage(format!(
            "--host {}, --port {}: {e}\n  hint: another port, or 0 for a free one",
            args.host, args.port
        ))
    };
    let signals = Signals::catch()?;
    let key = key(args)?;
    // bind before the slow loading of the model
    let listener = TcpListener::bind((args.host, args.port)).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let local = listener.local_addr().map_err(fail)?;
    let (serving, ending) = (Arc::new(AtomicBool::new(false)), mpsc::channel(1));
    if args.until_eof {
        end_with_stdin(serving.clone(), ending.0.clone()).map_err(fail)?;
    }
    let devices = device::open_all(&args.device)?;
    let mut model = Model::load(args.model_options()?, &devices)?;
    let replicas = std::mem::take(&mut model.replicas);
    let state = Arc::new(state(args, key, model, &replicas));

    let (over, outcome) = std::sync::mpsc::channel();
    let (shared, end) = (state.clone(), ending.0.clone());
    let work = move || {
        let _ = over.send(answer(replicas, &shared));
        let _ = end.try_send(());
    };
    let replicas = std::thread::Builder::new().name("replicas".into()).spawn(work).map_err(fail)?;
    let web = http::start(listener, state, ending).map_err(fail)?;
    // with both listeners ready, a signal or the end of stdin ends the server, and a second signal the process
    signals.hold();
    serving.store(true, Ordering::Relaxed);
    print(&format!("http://{local}/v1\n"))?;
    if !args.until_eof {
        tell("ctrl-c ends it");
    }
    if web.join().is_err() {
        // the panic hook has reported it
        return Err(usage("the server ended"));
    }
    let answered = outcome.recv_timeout(Limits::default().replica_time);
    let ended = match signals.seen() {
        Some((name, code)) => Err(train::Error::Signal { name, saved: "while serving".into(), code }.into()),
        None => Ok(()),
    };
    match answered {
        Ok(answered) => {
            let _ = replicas.join();
            answered.and(ended)
        }
        // a replica still computes
        Err(_) => ExitCode::of(super::exit(ended.err().as_slice())).end_process(),
    }
}

/// The key required of clients, if any.
fn key(args: &Args) -> ft_base::Result<Option<String>> {
    let own = || std::env::var("FT_API_KEY").ok().filter(|k| !k.is_empty());
    let key = args.api_key.clone().or_else(own);
    match &key {
        Some(key) if !http::auth::is_sendable(key) => Err(usage(
            "--api-key, FT_API_KEY: a key is one word of printable ASCII characters, without spaces",
        )),
        None if !args.host.to_canonical().is_loopback() => Err(usage(format!(
            "--host {}: whoever reaches this machine could use the model\n  hint: --api-key KEY, or FT_API_KEY",
            args.host
        ))),
        _ => Ok(key),
    }
}

fn state(args: &Args, key: Option<String>, model: Model, replicas: &[Replica]) -> ServerState {
    let vocab = replicas.first().map_or(0, |r| r.decoder.config.vocab);
    let status =
        |r: &Replica| ReplicaStatus::new(device::name(&r.device), r.run.as_ref().map(Follower::step));
    let limits = Limits::default();
    let name = args.name.as_ref().or(args.adapter.as_ref()).unwrap_or(&args.model);
    ServerState {
        name: name.clone(),
        created: unix_time(),
        key,
        prompt: model.prompt,
        generation: model.generation,
        max_tokens: args.max_tokens,
        context: model.context,
        vocab,
        replicas: replicas.iter().map(status).collect(),
        queue: Queue::new(limits.queue),
        limits,
        room: Arc::new(Semaphore::new(limits.bodies_bytes)),
    }
}

/// Answers requests of the queue with all replicas until it closes.
fn answer(mut replicas: Vec<Replica>, state: &ServerState) -> ft_base::Result<()> {
    let (queue, tokenizer) = (&state.queue, &*state.prompt.tokenizer);
    let work = |(replica, status)| {
        (status, move || generate::work(queue, &mut Generator::new(replica, tokenizer), status))
    };
    generate::run_all(replicas.iter_mut().zip(&state.replicas).map(work).collect())
}

/// Ends the server at the end of stdin; before it serves, the process.
fn end_with_stdin(serving: Arc<AtomicBool>, ending: mpsc::Sender<()>) -> std::io::Result<()> {
    let wait = move || {
        let mut stdin = std::io::stdin().lock();
        while matches!(stdin.read(&mut [0; 64]), Ok(1..)) {}
        if !serving.load(Ordering::Relaxed) {
            signal_hook::low_level::exit(0);
        }
        let _ = ending.try_send(());
    };
    std::thread::Builder::new().name("stdin".into()).spawn(wait).map(drop)
}
