//! Metrics, recipe, answers to samples and end of a run on an MLflow server.
//!
//! A separate thread talks to the server. Training only puts events into a bounded queue; when the server is slower or
//! gone they are lost, counted, and said in a warning.

mod client;
mod samples;
#[cfg(test)]
mod tests;

use super::logger::{Logger, is_of_signal, scalars};
use client::{Client, Failure, Pairs, metric};
use ft_base::store;
use ft_base::terminal::warn;
use samples::Samples;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// Most events waiting for the server.
const QUEUE: usize = 10_000;
/// Most events of a call.
const BATCH: usize = 64;
/// Time before the first and the last repetition of a failed call.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Time that the end of a run waits for events on their way.
const PATIENCE: Duration = Duration::from_secs(10);
/// Largest `mlflow.json` in bytes.
const LARGEST: u64 = 1 << 16;

/// A run as the server knows it.
pub struct MlFlowRun {
    /// Address of the server.
    pub url: String,
    pub experiment: String,
    pub name: String,
    /// Keys of the recipe.
    pub params: Vec<(String, String)>,
    /// File with the id of the run.
    pub file: PathBuf,
    /// Whether the run goes on with the id in the file.
    pub resumes: bool,
}

/// State shared by the thread and the run.
#[derive(Default)]
struct Shared {
    /// Number of events on the server.
    delivered: AtomicU64,
    /// Cause of the first failed attempt of a call, until the run has warned of it.
    trouble: Mutex<Option<String>>,
}

impl Shared {
    /// Keeps the first failure, to be said.
    fn note(&self, failure: &Failure) {
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        trouble.get_or_insert_with(|| failure.to_string());
    }

    /// Notes a refusal for the warning, and continues.
    fn without_refusal(&self, outcome: Result<(), Failure>) -> Result<(), Failure> {
        outcome.or_else(|failure| match failure {
            Failure::Refused(..) => {
                self.note(&failure);
                Ok(())
            }
            gone => Err(gone),
        })
    }
}

/// The queue to a server. Dropping it waits for events on their way.
pub struct MlFlow {
    url: String,
    queue: Option<SyncSender<(Value, u64)>>,
    /// Dropped to end the pause before a repetition.
    closing: Option<Sender<()>>,
    done: Receiver<()>,
    shared: Arc<Shared>,
    /// Number of events offered.
    offered: u64,
    /// Whether a failure was said.
    said: bool,
    patience: Duration,
}

impl MlFlow {
    /// Starts the thread; connects at the first event.
    pub fn start(run: MlFlowRun) -> Self {
        Self::with_patience(run, PATIENCE)
    }

    fn with_patience(run: MlFlowRun, patience: Duration) -> Self {
        let (queue, events) = sync_channel(QUEUE);
        let (closing, closed) = channel();
        let (ended, done) = channel();
        let shared = Arc::<Shared>::default();
        let (url, seen) = (run.url.clone(), shared.clone());
        let work = move || {
            Worker {
                run,
                client: None,
                id: None,
                described: false,
                samples: None,
                ended: false,
                lost: false,
                closed,
                shared: seen,
            }
            .work(&events);
            let _ = ended.send(());
        };
        let started = std::thread::Builder::new().name("mlflow".into()).spawn(work);
        if let Err(e) = started {
            *shared.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(e.to_string());
        }
        Self {
            url,
            queue: Some(queue),
            closing: Some(closing),
            done,
            shared,
            offered: 0,
            said: false,
            patience,
        }
    }

    /// Warns of the first failure.
    fn say_trouble(&mut self) {
        let trouble = self.shared.trouble.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(why) = trouble.filter(|_| !self.said) {
            self.said = true;
            warn(&format!("log.mlflow: {}: {why}; training goes on", self.url));
        }
    }

    /// Number of events missing on the server.
    fn missing(&self) -> u64 {
        self.offered - self.shared.delivered.load(Ordering::Relaxed).min(self.offered)
    }

    /// Ends the queue, and waits for events on their way.
    fn close(&mut self) {
        drop((self.queue.take(), self.closing.take()));
        let _ = self.done.recv_timeout(self.patience);
        self.say_trouble();
    }
}

impl Logger for MlFlow {
    /// Queues an event; a full queue loses it.
    fn write(&mut self, event: &Value) -> Result<(), store::Error> {
        self.offered += 1;
        if let Some(queue) = &self.queue {
            let _ = queue.try_send((event.clone(), milliseconds()));
        }
        self.say_trouble();
        Ok(())
    }
}

impl Drop for MlFlow {
    fn drop(&mut self) {
        self.close();
        let missing = self.missing();
        if missing > 0 {
            let all = self.offered;
            warn(&format!(
                "log.mlflow: {missing} of {all} events are not on {}; metrics.jsonl has them",
                self.url
            ));
        }
    }
}

/// The thread that talks to the server.
struct Worker {
    run: MlFlowRun,
    client: Option<Client>,
    /// The run's id on the server.
    id: Option<String>,
    /// Whether the server has the parameters of the run, or has refused them.
    described: bool,
    /// The table of samples from the first one on; refused for good if the server has no place for it.
    samples: Option<Result<Samples, ()>>,
    /// Whether the server has the end of the run.
    ended: bool,
    /// Whether the server is given up.
    lost: bool,
    closed: Receiver<()>,
    shared: Arc<Shared>,
}

impl Worker {
    fn work(mut self, events: &Receiver<(Value, u64)>) {
        while let Ok(first) = events.recv() {
            let batch: Vec<_> = std::iter::once(first).chain(events.try_iter().take(BATCH - 1)).collect();
            if !self.lost && self.deliver(&batch) {
                self.shared.delivered.fetch_add(batch.len() as u64, Ordering::Relaxed);
            }
        }
        // A run that ends without an event has failed.
        if let (Some(client), Some(id), false, false) = (&self.client, &self.id, self.ended, self.lost) {
            let _ = client.update(id, "FAILED", Some(milliseconds()));
        }
    }

    /// Sends events until the server has them, refuses them, or is gone when the run ends.
    fn deliver(&mut self, batch: &[(Value, u64)]) -> bool {
        let (mut pause, most) = PAUSE;
        let mut last = false;
        loop {
            let failure = match self.send(batch) {
                Ok(()) => return true,
                Err(e) => e,
            };
            if pause == PAUSE.0 {
                self.shared.note(&failure);
            }
            if last || matches!(failure, Failure::Refused(..)) {
                // Without a run, later events have nowhere to go.
                self.lost = last || self.id.is_none();
                return false;
            }
            last = self.closed.recv_timeout(pause) != Err(RecvTimeoutError::Timeout);
            pause = (2 * pause).min(most);
        }
    }

    fn send(&mut self, batch: &[(Value, u64)]) -> Result<(), Failure> {
        let Some((first, _)) = batch.first() else { return Ok(()) };
        if self.client.is_none() {
            self.client = Some(Client::new(&self.run.url)?);
        }
        let Some(client) = &self.client else { return Ok(()) };
        let tags = tags(first);
        if self.id.is_none() {
            let (id, is_new) = self.run.open(client, &tags)?;
            (self.id, self.described) = (Some(id), !is_new);
        }
        let Some(id) = &self.id else { return Ok(()) };
        if !self.described {
            self.shared.without_refusal(client.describe(id, &self.run.params, &tags))?;
            self.run.keep(id);
            self.described = true;
        }
        let metrics = batch.iter().flat_map(|(event, time)| {
            let step = event["step"].as_u64().unwrap_or(0);
            scalars(event).into_iter().map(move |(key, value)| metric(&key, value, step, *time))
        });
        client.log(id, &metrics.collect::<Vec<_>>())?;
        let samples: Vec<&Value> = batch.iter().map(|(e, _)| e).filter(|e| e["event"] == "sample").collect();
        if !samples.is_empty() {
            let shown = show(&mut self.samples, client, id, &samples);
            if matches!(shown, Err(Failure::Refused(..))) {
                self.samples = Some(Err(()));
            }
            self.shared.without_refusal(shown)?;
        }
        if let Some((status, time)) =
            batch.iter().rev().find_map(|(event, time)| Some((status(event)?, *time)))
        {
            client.update(id, status, Some(time))?;
            self.ended = true;
        }
        Ok(())
    }
}

/// Adds sample events to the table of a run.
fn show(
    table: &mut Option<Result<Samples, ()>>,
    client: &Client,
    id: &str,
    events: &[&Value],
) -> Result<(), Failure> {
    if table.is_none() {
        *table = Some(Ok(Samples::open(client, id)?));
    }
    match table {
        Some(Ok(table)) => table.add(client, events),
        _ => Ok(()),
    }
}

impl MlFlowRun {
    /// Resumes the run of the file, or creates one. Returns the id, and whether the run is new.
    fn open(&self, client: &Client, tags: &Pairs) -> Result<(String, bool), Failure> {
        if let Some(id) = self.kept() {
            match client.update(&id, "RUNNING", None) {
                Err(Failure::Refused(code, _)) if code == "RESOURCE_DOES_NOT_EXIST" => {}
                outcome => return outcome.map(|()| (id, false)),
            }
        }
        Ok((client.create(&self.experiment, &self.name, tags, milliseconds())?, true))
    }

    /// Writes the id of a run whose parameters the server has.
    fn keep(&self, id: &str) {
        let text = json!({"server": self.url, "run_id": id}).to_string();
        // Without the file a resumed run is another one on the server.
        let _ = store::write_atomic(&self.file, text.as_bytes());
    }

    /// Id of the run to resume.
    fn kept(&self) -> Option<String> {
        let bytes = store::read_plain(&self.file, LARGEST).ok().filter(|_| self.resumes)?;
        let file: Value = serde_json::from_slice(&bytes).ok()?;
        file["run_id"].as_str().filter(|_| file["server"] == json!(self.url)).map(String::from)
    }
}

/// Status of a run after its last event.
fn status(event: &Value) -> Option<&'static str> {
    match (event["event"].as_str()?, event["code"].as_u64()) {
        ("end", _) => Some("FINISHED"),
        ("stopped", Some(code)) if is_of_signal(code) => Some("KILLED"),
        ("stopped", _) => Some("FAILED"),
        _ => None,
    }
}

/// Tags of a run, from its first event.
fn tags(start: &Value) -> Vec<(String, String)> {
    let mut out = vec![("mlflow.source.name".to_string(), "ft".to_string())];
    out.extend(std::env::var("USER").ok().map(|user| ("mlflow.user".to_string(), user)));
    for group in ["versions", "model", "hashes"] {
        let values = start[group].as_object().into_iter().flatten();
        out.extend(values.filter_map(|(k, v)| Some((format!("{group}.{k}"), v.as_str()?.to_string()))));
    }
    for key in ["device", "dtype", "ranks", "rows"] {
        if !start[key].is_null() {
            out.push((key.to_string(), start[key].to_string().trim_matches('"').to_string()));
        }
    }
    out
}

/// Milliseconds since 1970.
fn milliseconds() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
