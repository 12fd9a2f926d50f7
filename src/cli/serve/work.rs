//! Copies of the model: each answers one question at a time from a shared queue.

use super::model::Followed;
use super::request::Question;
use candle_core::Device;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use ft_base::error::ExitCode;
use ft_base::terminal::{panics, warn};
use ft_data::Tokenizer;
use ft_engine::model::Decoder;
use ft_engine::walk::generate::{self, Reader};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;
use tokio::sync::mpsc;

/// Interval of checkpoint checks while idle.
const LOOK: Duration = Duration::from_secs(1);

/// A question, and the channel for the answer.
pub(super) struct Job {
    pub question: Question,
    pub answer: mpsc::UnboundedSender<Event>,
}

/// Finish reason of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// End-of-text token or a stop string.
    Stop,
    /// Token limit.
    Length,
}

impl Finish {
    pub fn word(self) -> &'static str {
        match self {
            Finish::Stop => "stop",
            Finish::Length => "length",
        }
    }
}

/// Part of an answer.
pub(super) enum Event {
    /// First event: the step of the weights, if serving a run.
    Begin(Option<u64>),
    Text(String),
    /// Last event: finish reason, and tokens of the reply.
    End(Finish, usize),
    /// Last event: error message.
    Failed(String),
}

/// Public state of a copy.
pub(super) struct Told {
    pub device: String,
    /// Step of the loaded weights, if serving a run.
    step: Option<AtomicU64>,
    /// Whether the copy has stopped.
    gone: AtomicBool,
}

impl Told {
    pub fn new(device: String, step: Option<u64>) -> Self {
        Self { device, step: step.map(AtomicU64::new), gone: AtomicBool::new(false) }
    }

    pub fn step(&self) -> Option<u64> {
        self.step.as_ref().map(|s| s.load(Relaxed))
    }

    pub fn is_gone(&self) -> bool {
        self.gone.load(Relaxed)
    }
}

/// A backend for answers.
pub(super) trait Answers {
    /// Step of the loaded weights, if serving a run.
    fn step(&self) -> Option<u64>;
    /// Loads newer weights if available.
    fn look(&mut self);
    /// Generates a reply; `hear` receives the text in pieces and returns whether to continue.
    fn reply(
        &mut self,
        q: Question,
        hear: &mut dyn FnMut(String) -> bool,
    ) -> ft_base::Result<(Finish, usize)>;
    /// Computes a little, to test the device after a failed answer.
    fn probe(&mut self) -> ft_base::Result<()>;
}

/// Shared queue of the copies.
pub(super) struct Desk<'a> {
    jobs: Receiver<Job>,
    /// Whether to stop answering.
    stop: &'a AtomicBool,
    /// Held while a copy loads a checkpoint, so that the rest keep answering.
    turn: Mutex<()>,
}

impl<'a> Desk<'a> {
    pub fn new(jobs: Receiver<Job>, stop: &'a AtomicBool) -> Self {
        Self { jobs, stop, turn: Mutex::new(()) }
    }

    /// Answers with one copy until the queue closes or the copy fails. When serving a run, checks for a
    /// newer checkpoint before each question, unless another copy is loading one.
    ///
    /// # Errors
    /// A device failure.
    pub fn attend(&self, copy: &mut impl Answers, told: &Told) -> ft_base::Result<()> {
        loop {
            let next = match told.step {
                Some(_) => self.jobs.recv_timeout(LOOK),
                None => self.jobs.recv().map_err(RecvTimeoutError::from),
            };
            if matches!(next, Err(RecvTimeoutError::Disconnected)) {
                return Ok(());
            }
            if let Some(step) = &told.step {
                let turn = self.turn.try_lock();
                if !matches!(turn, Err(TryLockError::WouldBlock)) {
                    copy.look();
                    step.store(copy.step().unwrap_or(0), Relaxed);
                }
            }
            let Ok(Job { question, answer }) = next else { continue };
            // the client may have disconnected in the meantime
            if answer.is_closed() || self.stop.load(Relaxed) {
                continue;
            }
            let _ = answer.send(Event::Begin(copy.step()));
            let mut hear = |text: String| {
                let heard = text.is_empty() || answer.send(Event::Text(text)).is_ok();
                heard && !answer.is_closed() && !self.stop.load(Relaxed)
            };
            match copy.reply(question, &mut hear) {
                Ok((finish, tokens)) => {
                    let _ = answer.send(Event::End(finish, tokens));
                }
                Err(e) => {
                    let _ = answer.send(Event::Failed(e.to_string()));
                    copy.probe()?;
                }
            }
        }
    }
}

/// Runs all copies in parallel, the last on this thread. A failing copy is only a warning while another
/// remains.
///
/// # Errors
/// The error of the last remaining copy.
pub(super) fn together<W>(mut copies: Vec<(&Told, W)>) -> ft_base::Result<()>
where
    W: FnOnce() -> ft_base::Result<()> + Send,
{
    let left = AtomicUsize::new(copies.len());
    let ended = |told: &Told, outcome: ft_base::Result<()>| {
        told.gone.store(true, Relaxed);
        let others = left.fetch_sub(1, Relaxed) - 1;
        if others == 0 {
            return outcome;
        }
        outcome.or_else(|e| {
            warn(&format!("{} answers no more: {e}", told.device));
            Ok(())
        })
    };
    let attend = &|told: &Told, work: W| {
        let bug = |why| candle_core::Error::Msg(format!("{why}; this is a bug in ft")).into();
        ended(told, panics::caught(work).unwrap_or_else(|why| Err(bug(why))))
    };
    let here = copies.pop();
    std::thread::scope(|s| {
        let mut threads = Vec::new();
        for (told, work) in copies {
            let thread = std::thread::Builder::new().name(told.device.clone());
            match thread.spawn_scoped(s, move || attend(told, work)) {
                Ok(thread) => threads.push(thread),
                Err(e) => ended(told, Err(candle_core::Error::from(e).into()))?,
            }
        }
        let here = here.map_or(Ok(()), |(told, work)| attend(told, work));
        threads.into_iter().map(|t| t.join().unwrap_or(Ok(()))).fold(here, Result::and)
    })
}

/// A copy with a real model.
pub(super) struct Answering<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    tokenizer: &'a Tokenizer,
    run: Option<Followed>,
    /// Key-value cache; a continued conversation reuses its prefix.
    reader: Reader<'a>,
}

impl<'a> Answering<'a> {
    pub fn new(
        decoder: &'a Decoder,
        device: &'a Device,
        tokenizer: &'a Tokenizer,
        run: Option<Followed>,
    ) -> Self {
        Self { decoder, device, tokenizer, run, reader: Reader::new(decoder, device) }
    }

    /// Clears the cache.
    fn forget(&mut self) {
        self.reader = Reader::new(self.decoder, self.device);
    }
}

impl Answers for Answering<'_> {
    fn step(&self) -> Option<u64> {
        self.run.as_ref().map(Followed::step)
    }

    fn look(&mut self) {
        if self.run.as_mut().is_some_and(Followed::look) {
            // cached with the old weights
            self.forget();
        }
    }

    fn reply(
        &mut self,
        mut q: Question,
        hear: &mut dyn FnMut(String) -> bool,
    ) -> ft_base::Result<(Finish, usize)> {
        let mut texts = Stops::new(q.stop);
        let mut say = |piece: &str| {
            let (text, go_on) = texts.push(piece);
            hear(text) && go_on
        };
        let (tokenizer, sampler) = (self.tokenizer, &mut q.sampler);
        let reply =
            generate::answer(&mut self.reader, tokenizer, &q.prompt, q.max_tokens, sampler, &mut say)?;
        hear(texts.rest());
        let finish = if reply.ended || texts.hit { Finish::Stop } else { Finish::Length };
        Ok((finish, reply.tokens))
    }

    fn probe(&mut self) -> ft_base::Result<()> {
        // the cache is in an unknown state
        self.forget();
        let read = self.reader.read(&[0]);
        self.forget();
        match read {
            // caused by the weights; newer ones may work
            Err(e) if e.exit_code() != ExitCode::NonFinite => Err(e),
            _ => Ok(()),
        }
    }
}

/// Detects stop strings, holding back a possible beginning of one.
struct Stops {
    texts: Vec<String>,
    held: String,
    /// Whether a stop string occurred.
    hit: bool,
}

impl Stops {
    fn new(texts: Vec<String>) -> Self {
        Self { texts, held: String::new(), hit: false }
    }

    /// Text ready to send after this piece, and whether to continue.
    fn push(&mut self, piece: &str) -> (String, bool) {
        if self.hit {
            return (String::new(), false);
        }
        self.held.push_str(piece);
        if let Some(at) = self.texts.iter().filter_map(|t| self.held.find(t.as_str())).min() {
            self.hit = true;
            let text = self.held[..at].to_string();
            self.held.clear();
            return (text, false);
        }
        // longest suffix able to begin a stop string
        let begins = |at: &usize| self.texts.iter().any(|t| t.starts_with(&self.held[*at..]));
        let mut ends = self.held.char_indices().map(|(at, _)| at);
        let keep = ends.find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), true)
    }

    /// Text still held back at the end.
    fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
