//! The model: one question at a time.

use super::model::Followed;
use super::request::Question;
use crate::data::Tokenizer;
use crate::model::Decoder;
use crate::walk::generate::{self, Reader};
use candle_core::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
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

/// What answers.
pub(super) struct Answering<'a> {
    pub decoder: &'a Decoder,
    pub device: &'a Device,
    pub tokenizer: &'a Tokenizer,
    /// Whether no more is to be answered.
    pub stop: &'a AtomicBool,
}

impl Answering<'_> {
    /// Answers until nobody can ask any more, or is to be answered. Of a `run`, each question with the newest checkpoint that
    /// there is when its turn comes; its step is told.
    pub fn work(&self, jobs: &Receiver<Job>, mut run: Option<(Followed, Arc<AtomicU64>)>) {
        // a conversation that goes on is not read again: it begins with what was read
        let mut reader = Reader::new(self.decoder, self.device);
        loop {
            let next = match run {
                Some(_) => match jobs.recv_timeout(LOOK) {
                    Err(RecvTimeoutError::Disconnected) => return,
                    next => next.ok(),
                },
                None => match jobs.recv() {
                    Err(_) => return,
                    next => next.ok(),
                },
            };
            if let Some((run, step)) = &mut run
                && run.look()
            {
                step.store(run.step(), Ordering::Relaxed);
                // what it has read was read with other weights
                reader = Reader::new(self.decoder, self.device);
            }
            let Some(Job { question, answer }) = next else { continue };
            // whoever asked may have gone while it waited
            if answer.is_closed() || self.stop.load(Ordering::Relaxed) {
                continue;
            }
            let _ = answer.send(Event::Begin(run.as_ref().map(|(run, _)| run.step())));
            let last = self.reply(&mut reader, question, &answer);
            if last.is_err() {
                // what it has read is not known
                reader = Reader::new(self.decoder, self.device);
            }
            let _ = answer.send(last.unwrap_or_else(|e| Event::Failed(e.to_string())));
        }
    }

    fn reply(
        &self,
        reader: &mut Reader<'_>,
        mut question: Question,
        answer: &mpsc::UnboundedSender<Event>,
    ) -> crate::Result<Event> {
        let mut texts = Stops::new(question.stop);
        let (prompt, most) = (&question.prompt, question.max_tokens);
        let mut say = |piece: &str| {
            let (text, go_on) = texts.push(piece);
            let heard = text.is_empty() || answer.send(Event::Text(text)).is_ok();
            go_on && heard && !answer.is_closed() && !self.stop.load(Ordering::Relaxed)
        };
        let sampler = &mut question.sampler;
        let reply = generate::answer(reader, self.tokenizer, prompt, most, sampler, &mut say)?;
        let rest = texts.rest();
        if !rest.is_empty() {
            let _ = answer.send(Event::Text(rest));
        }
        let finish = if reply.ended || texts.hit { Finish::Stop } else { Finish::Length };
        Ok(Event::End(finish, reply.tokens))
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
mod tests {
    use super::*;

    fn through(texts: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stops = Stops::new(texts.iter().map(|t| t.to_string()).collect());
        let mut out = String::new();
        for piece in pieces {
            let (text, go_on) = stops.push(piece);
            out += &text;
            if !go_on {
                break;
            }
        }
        out += &stops.rest();
        (out, stops.hit)
    }

    #[test]
    fn a_stop_is_found_across_pieces_and_never_said() {
        assert_eq!(through(&["END"], &["a E", "N", "D b"]), ("a ".into(), true));
        assert_eq!(through(&["END"], &["a E", "N", "x"]), ("a ENx".into(), false));
        assert_eq!(through(&["aab"], &["a", "a", "a", "b", "c"]), ("a".into(), true));
        assert_eq!(through(&["\n\n", "x"], &["é\n", "é", "x\n\n"]), ("é\né".into(), true));
        assert_eq!(through(&[], &["a", "b"]), ("ab".into(), false));
        assert_eq!(through(&["END"], &["a EN"]), ("a EN".into(), false));
    }
}
