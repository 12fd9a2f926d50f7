//! The copies of the model: each answers one question at a time, out of one queue.

use super::model::Followed;
use super::request::Question;
use ft_data::Tokenizer;
use ft_base::error::ExitCode;
use ft_base::terminal::{panics, warn};
use ft_engine::model::Decoder;
use ft_engine::walk::generate::{self, Reader};
use candle_core::Device;
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;
use tokio::sync::mpsc;

/// Time between two looks at a run while nobody asks.
const LOOK: Duration = Duration::from_secs(1);

/// A question, and where its answer goes.
pub(super) struct Job {
    pub question: Question,
    pub answer: mpsc::UnboundedSender<Event>,
}

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    /// The model ended it, or a text that the client named.
    Stop,
    /// No more tokens were asked for.
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

/// A part of an answer.
pub(super) enum Event {
    /// The first: of a run, the step whose weights answer.
    Begin(Option<u64>),
    Text(String),
    /// The last: why it ended, and tokens of the reply.
    End(Finish, usize),
    /// The last: what went wrong.
    Failed(String),
}

/// A copy of the model, as the API tells of it.
pub(super) struct Told {
    /// Its device.
    pub device: String,
    /// Of a run, the step whose weights answer.
    step: Option<AtomicU64>,
    /// Whether it answers no more.
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

/// What can answer.
pub(super) trait Answers {
    /// Of a run, the step whose weights answer.
    fn step(&self) -> Option<u64>;
    /// Takes up newer weights where there are any.
    fn look(&mut self);
    /// Answers; `hear` gets the text piece by piece, and says whether to go on.
    fn reply(&mut self, q: Question, hear: &mut dyn FnMut(String) -> bool) -> ft_base::Result<(Finish, usize)>;
    /// Computes a little, after an answer that failed.
    fn probe(&mut self) -> ft_base::Result<()>;
}

/// Where the copies take questions.
pub(super) struct Desk<'a> {
    jobs: Receiver<Job>,
    /// Whether no more is to be answered.
    stop: &'a AtomicBool,
    /// Whose turn it is to take up a checkpoint: the others answer meanwhile.
    turn: Mutex<()>,
}

impl<'a> Desk<'a> {
    pub fn new(jobs: Receiver<Job>, stop: &'a AtomicBool) -> Self {
        Self { jobs, stop, turn: Mutex::new(()) }
    }

    /// Answers with a copy until nobody can ask any more, or the copy cannot compute. Of a run, each question with the newest
    /// checkpoint that there is when its turn comes, unless another copy is taking one up.
    ///
    /// # Errors
    /// Why it cannot compute.
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
            // whoever asked may have gone while it waited
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

/// Lets copies answer at once, the last of them on this thread. One that fails while others answer is told.
///
/// # Errors
/// Why the one failed that was left.
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

/// A copy that computes.
pub(super) struct Answering<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    tokenizer: &'a Tokenizer,
    run: Option<Followed>,
    /// A conversation that goes on is not read again: it begins with what was read.
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

    /// Forgets what was read.
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
            // it was read with other weights
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
        // what it has read is not known
        self.forget();
        let read = self.reader.read(&[0]);
        self.forget();
        match read {
            // the weights are to blame, and other ones may come
            Err(e) if e.exit_code() != ExitCode::NonFinite => Err(e),
            _ => Ok(()),
        }
    }
}

/// Finds the texts that end a reply, and holds back what may be the beginning of one.
struct Stops {
    texts: Vec<String>,
    held: String,
    /// Whether one came.
    hit: bool,
}

impl Stops {
    fn new(texts: Vec<String>) -> Self {
        Self { texts, held: String::new(), hit: false }
    }

    /// What can be said after this piece, and whether to go on.
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
        // the longest end that begins one of the texts
        let begins = |at: &usize| self.texts.iter().any(|t| t.starts_with(&self.held[*at..]));
        let mut ends = self.held.char_indices().map(|(at, _)| at);
        let keep = ends.find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), true)
    }

    /// What was held back at the end.
    fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
#[path = "work_tests.rs"]
mod tests;
