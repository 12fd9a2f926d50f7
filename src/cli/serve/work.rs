//! The model: one question at a time.

use super::request::Question;
use crate::data::Tokenizer;
use crate::model::Decoder;
use crate::walk::generate::{self, Reader};
use candle_core::Device;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

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
    Text(String),
    /// The last: why it ended, and tokens of the reply.
    End(Finish, usize),
    /// The last: what went wrong.
    Failed(String),
}

/// Answers until nobody can ask any more, or `stop` is set.
pub(super) fn work(
    decoder: &Decoder,
    device: &Device,
    tokenizer: &Tokenizer,
    jobs: &mut mpsc::Receiver<Job>,
    stop: &AtomicBool,
) {
    // a conversation that goes on is not read again: it begins with what was read
    let mut reader = Reader::new(decoder, device);
    while let Some(Job { question, answer }) = jobs.blocking_recv() {
        if stop.load(Ordering::Relaxed) {
            continue;
        }
        // whoever asked may have gone while it waited
        if !answer.is_closed() {
            let last = reply(&mut reader, tokenizer, question, &answer, stop);
            if last.is_err() {
                // what it has read is not known
                reader = Reader::new(decoder, device);
            }
            let _ = answer.send(last.unwrap_or_else(|e| Event::Failed(e.to_string())));
        }
    }
}

fn reply(
    reader: &mut Reader<'_>,
    tokenizer: &Tokenizer,
    mut question: Question,
    answer: &mpsc::UnboundedSender<Event>,
    stop: &AtomicBool,
) -> crate::Result<Event> {
    let mut texts = Stops::new(question.stop);
    let (prompt, most) = (&question.prompt, question.max_tokens);
    let mut say = |piece: &str| {
        let (text, go_on) = texts.push(piece);
        let heard = text.is_empty() || answer.send(Event::Text(text)).is_ok();
        go_on && heard && !answer.is_closed() && !stop.load(Ordering::Relaxed)
    };
    let reply = generate::answer(reader, tokenizer, prompt, most, &mut question.sampler, &mut say)?;
    let rest = texts.rest();
    if !rest.is_empty() {
        let _ = answer.send(Event::Text(rest));
    }
    let finish = if reply.ended || texts.hit { Finish::Stop } else { Finish::Length };
    Ok(Event::End(finish, reply.tokens))
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
