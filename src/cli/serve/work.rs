//! The copies of the model: each answers one question at a time, out of one queue.

use super::model::Followed;
use super::request::Question;
use crate::data::Tokenizer;
use crate::error::ExitCode;
use crate::log::{panics, warn};
use crate::model::Decoder;
use crate::walk::generate::{self, Reader};
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
    fn reply(&mut self, q: Question, hear: &mut dyn FnMut(String) -> bool) -> crate::Result<(Finish, usize)>;
    /// Computes a little, after an answer that failed.
    fn probe(&mut self) -> crate::Result<()>;
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
    pub fn attend(&self, copy: &mut impl Answers, told: &Told) -> crate::Result<()> {
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
pub(super) fn together<W>(mut copies: Vec<(&Told, W)>) -> crate::Result<()>
where
    W: FnOnce() -> crate::Result<()> + Send,
{
    let left = AtomicUsize::new(copies.len());
    let ended = |told: &Told, outcome: crate::Result<()>| {
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
    ) -> crate::Result<(Finish, usize)> {
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

    fn probe(&mut self) -> crate::Result<()> {
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
mod tests {
    use super::*;
    use crossbeam_channel::{Sender, bounded, unbounded};

    /// What a copy without a model comes to, and waits for.
    #[derive(Clone, Debug, PartialEq, Eq)]
    enum At {
        Answer(u32),
        Look,
    }

    /// A copy without a model: it says where it is, and goes on when it is let.
    struct Scripted {
        name: usize,
        step: Option<u64>,
        works: bool,
        at: Sender<(usize, At)>,
        go: Receiver<()>,
    }

    impl Scripted {
        fn stand(&self, at: At) {
            let _ = self.at.send((self.name, at));
            let _ = self.go.recv();
        }
    }

    impl Answers for Scripted {
        fn step(&self) -> Option<u64> {
            self.step
        }

        fn look(&mut self) {
            self.stand(At::Look);
            self.step = self.step.map(|s| s + 1);
        }

        fn reply(
            &mut self,
            q: Question,
            hear: &mut dyn FnMut(String) -> bool,
        ) -> crate::Result<(Finish, usize)> {
            self.stand(At::Answer(q.prompt[0]));
            self.probe()?;
            hear(self.name.to_string());
            Ok((Finish::Stop, 1))
        }

        fn probe(&mut self) -> crate::Result<()> {
            if self.works { Ok(()) } else { Err(candle_core::Error::Msg("the device is lost".into()).into()) }
        }
    }

    /// Two copies that answer, and what they are asked with.
    struct Two {
        queue: Sender<Job>,
        at: Receiver<(usize, At)>,
        go: [Sender<()>; 2],
    }

    impl Two {
        fn ask(&self, number: u32) -> mpsc::UnboundedReceiver<Event> {
            let (answer, events) = mpsc::unbounded_channel();
            let sampler = generate::greedy();
            let question = Question {
                prompt: vec![number],
                max_tokens: 1,
                stop: Vec::new(),
                sampler,
                stream: false,
                usage: false,
            };
            self.queue.send(Job { question, answer }).expect("a copy is there");
            events
        }

        fn at(&self) -> (usize, At) {
            self.at.recv_timeout(Duration::from_secs(60)).expect("a copy comes somewhere")
        }

        fn go(&self, name: usize) {
            self.go[name].send(()).expect("a copy waits");
        }
    }

    /// What a client got: the step that answered and the name of the copy, or what went wrong.
    fn got(mut events: mpsc::UnboundedReceiver<Event>) -> (Option<u64>, String) {
        let (mut of, mut said) = (None, String::from("nobody answered"));
        while let Some(event) = events.blocking_recv() {
            match event {
                Event::Begin(step) => of = step,
                Event::Text(text) => said = text,
                Event::End(..) => break,
                Event::Failed(why) => said = why,
            }
        }
        (of, said)
    }

    /// Two copies, of a run or not, of which some work; ends when the queue is dropped.
    fn two(
        step: Option<u64>,
        works: [bool; 2],
        test: impl FnOnce(Two, &[Told; 2]) + Send,
    ) -> crate::Result<()> {
        let (queue, jobs) = bounded(64);
        let (sender, at) = unbounded();
        let (stop, told) = (AtomicBool::new(false), ["cuda:1", "cuda:2"].map(|d| Told::new(d.into(), step)));
        let (desk, gates) = (Desk::new(jobs, &stop), [unbounded(), unbounded()]);
        let copies = [0, 1].map(|name| Scripted {
            name,
            step,
            works: works[name],
            at: sender.clone(),
            go: gates[name].1.clone(),
        });
        let two = Two { queue, at, go: gates.map(|g| g.0) };
        std::thread::scope(|s| {
            let (desk, told) = (&desk, &told);
            let work = |(told, mut copy): (_, Scripted)| (told, move || desk.attend(&mut copy, told));
            let works = told.iter().zip(copies).map(work).collect();
            let tested = s.spawn(move || test(two, told));
            let outcome = together(works);
            assert!(tested.join().is_ok());
            outcome
        })
    }

    #[test]
    fn as_many_are_answered_at_once_as_there_are_copies_and_the_rest_in_order() -> crate::Result<()> {
        two(None, [true; 2], |two, told| {
            let mut answers: Vec<_> = (0..5).map(|n| Some(two.ask(n))).collect();
            let mut begun = [two.at(), two.at()];
            begun.sort_by_key(|(_, at)| at == &At::Answer(1));
            assert_eq!(begun.clone().map(|b| b.1), [At::Answer(0), At::Answer(1)]);
            let (slow, quick) = (begun[0].0, begun[1].0);
            for (n, next) in [(1, Some(2)), (2, Some(3)), (3, Some(4)), (4, None)] {
                two.go(quick);
                let answer = answers[n].take().expect("asked");
                assert_eq!(got(answer), (None, quick.to_string()));
                if let Some(next) = next {
                    assert_eq!(two.at(), (quick, At::Answer(next)));
                }
            }
            two.go(slow);
            assert_eq!(got(answers[0].take().expect("asked")), (None, slow.to_string()));
            assert!(!told.iter().any(Told::is_gone));
        })
    }

    #[test]
    fn a_copy_that_cannot_compute_leaves_the_rest_to_the_other() -> crate::Result<()> {
        two(None, [false, true], |two, told| {
            let answers = [two.ask(0), two.ask(1)];
            let begun = [two.at(), two.at()];
            assert_ne!(begun[0].0, begun[1].0);
            two.go(0);
            two.go(1);
            let mut said = answers.map(|a| got(a).1);
            said.sort();
            assert_eq!(said, ["1", "the device is lost"]);
            for n in 2..6 {
                let answer = two.ask(n);
                assert_eq!(two.at(), (1, At::Answer(n)));
                two.go(1);
                assert_eq!(got(answer).1, "1");
            }
            assert!(told[0].is_gone() && !told[1].is_gone());
        })
    }

    #[test]
    fn the_last_copy_that_cannot_compute_ends_all() {
        let outcome = two(None, [false; 2], |two, _| {
            let (first, second, third) = (two.ask(0), two.ask(1), two.ask(2));
            let begun = [two.at(), two.at()];
            assert_ne!(begun[0].0, begun[1].0);
            two.go(0);
            two.go(1);
            assert_eq!([got(first).1, got(second).1], ["the device is lost", "the device is lost"]);
            drop(third);
        });
        assert!(outcome.is_err_and(|e| e.to_string().contains("the device is lost")));
    }

    #[test]
    fn one_copy_takes_up_a_checkpoint_while_the_other_answers() -> crate::Result<()> {
        two(Some(4), [true; 2], |two, told| {
            let (looks, at) = two.at();
            assert_eq!(at, At::Look);
            let (other, answer) = (1 - looks, two.ask(0));
            assert_eq!(two.at(), (other, At::Answer(0)));
            two.go(other);
            assert_eq!(got(answer), (Some(4), other.to_string()));
            assert_eq!(told[looks].step(), Some(4));
            two.go(looks);
            // that one of them looks again says that the first has it
            assert_eq!(two.at().1, At::Look);
            assert_eq!((told[looks].step(), told[other].step()), (Some(5), Some(4)));
        })
    }

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
