//! Signals that stop a run: SIGINT, SIGTERM, SIGHUP, and SIGUSR1, sent by schedulers before a time limit.
//!
//! During training, the first signal sets a flag, checked between micro-batches, and the second signal, SIGUSR1
//! not counted, ends the process at once. Before and after training, when nothing is unsaved, the first signal
//! ends the process; before training, a message says so, within five seconds.
//!
//! Signals within a second count as one: `timeout` signals a process and then its group. The parent process forwards
//! its own signals through a pipe ([`pass`]). A signal to both, as from a control group, also counts once: only a
//! second signal from the same origin ends the process.

use crate::train::Error;
use ft_base::error::ExitCode;
use ft_base::terminal::tell;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Handled signals, with names and exit codes.
const SIGNALS: [(i32, &str, ExitCode); 4] = [
    (SIGINT, "SIGINT", ExitCode::Interrupted),
    (SIGTERM, "SIGTERM", ExitCode::Terminated),
    (SIGHUP, "SIGHUP", ExitCode::HungUp),
    (SIGUSR1, "SIGUSR1", ExitCode::Requested),
];

/// Interval after the first signal during which further signals count as duplicates.
const TOGETHER: Duration = Duration::from_secs(1);
/// Maximum time of a message before the end of a process.
const REPORTING: Duration = Duration::from_secs(5);

/// Handlers are global to the process, so they are registered once.
static HANDLERS: OnceLock<Handlers> = OnceLock::new();

#[derive(Clone, Default)]
struct Handlers {
    /// True if a signal other than SIGUSR1 ends the process at once: outside training, and from [`TOGETHER`] after the
    /// first signal on.
    at_once: Arc<AtomicBool>,
    /// True if SIGUSR1 ends the process at once: outside training.
    on_request: Arc<AtomicBool>,
    /// Index in [`SIGNALS`] of the latest signal, plus 1; 0 for none.
    seen: Arc<AtomicUsize>,
    /// Time of the first passed-on signal other than SIGUSR1.
    passed: Arc<Mutex<Option<Instant>>>,
    /// True after a passed-on signal, or one first received by another rank.
    told: Arc<AtomicBool>,
    /// True before training, if a message reports the signal that ends the process.
    early: Arc<AtomicBool>,
}

/// Signal handling of a run. Dropping it calls [`Signals::release`].
pub struct Signals {
    handlers: Handlers,
}

impl Signals {
    /// Registers the handlers. A signal ends the process with its exit code until [`Signals::hold`] is
    /// called.
    pub fn catch() -> ft_base::Result<Self> {
        let handlers = match HANDLERS.get() {
            Some(there) => there.clone(),
            None => {
                let new = Handlers::default();
                new.end_at_once(true);
                new.register().map_err(|e| Error::Usage(format!("signals cannot be caught: {e}")))?;
                HANDLERS.get_or_init(|| new).clone()
            }
        };
        handlers.seen.store(0, Ordering::Relaxed);
        *handlers.passed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        handlers.told.store(false, Ordering::Relaxed);
        handlers.end_at_once(true);
        Ok(Self { handlers })
    }

    /// Has the first signal before [`Signals::hold`] reported as it ends the process.
    pub fn reported(self) -> Self {
        self.handlers.early.store(true, Ordering::SeqCst);
        self.handlers.end_at_once(false);
        self
    }

    /// Defers the first signal from here on, to be read by [`Signals::seen`].
    pub fn hold(&self) {
        self.handlers.early.store(false, Ordering::SeqCst);
        self.handlers.end_at_once(false);
    }

    /// Restores immediate exit on a signal, unless one was received: a copy of it, or of another rank's signal, must
    /// not cut the last write or the report short. After a direct SIGUSR1, other signals end the process at once.
    pub fn release(&self) {
        if self.handlers.told.load(Ordering::SeqCst) {
            return;
        }
        match self.seen() {
            None => self.handlers.end_at_once(true),
            Some((_, ExitCode::Requested)) => self.handlers.at_once.store(true, Ordering::SeqCst),
            Some(_) => {}
        }
    }

    /// Name and exit code of the signal received, if any.
    pub fn seen(&self) -> Option<(&'static str, ExitCode)> {
        let place = self.handlers.seen.load(Ordering::Relaxed).checked_sub(1)?;
        SIGNALS.get(place).map(|(_, name, code)| (*name, *code))
    }

    /// Numbers of the handled signals.
    pub fn numbers() -> impl Iterator<Item = i32> {
        handled().map(|(_, signal, _)| signal)
    }

    /// Signal received, as a number to share between ranks; 0 for none.
    pub fn asked(&self) -> u64 {
        self.handlers.seen.load(Ordering::Relaxed) as u64
    }

    /// Records a signal received by another rank, unless this process received one.
    pub fn hear(&self, asked: u64) {
        let place = usize::try_from(asked).unwrap_or_default();
        let heard = self.handlers.seen.compare_exchange(0, place, Ordering::Relaxed, Ordering::Relaxed);
        self.handlers.told.fetch_or(heard.is_ok(), Ordering::Relaxed);
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handlers.early.store(false, Ordering::SeqCst);
        self.release();
    }
}

/// Takes a signal passed on by the parent process. It acts like a direct one, and both together act like one.
pub fn pass(signal: i32) {
    let Some((place, _, code)) = handled().find(|(_, number, _)| *number == signal) else { return };
    let handlers = HANDLERS.get();
    handlers.iter().for_each(|handlers| handlers.end_early(place));
    // without handlers, nothing has begun
    if handlers.is_none_or(|handlers| handlers.pass(place, signal, Instant::now())) {
        code.end_process();
    }
}

impl Handlers {
    /// Sets both conditions for immediate exit.
    fn end_at_once(&self, so: bool) {
        self.at_once.store(so, Ordering::SeqCst);
        self.on_request.store(so, Ordering::SeqCst);
    }

    /// Condition for immediate exit on this signal.
    fn condition(&self, signal: i32) -> &Arc<AtomicBool> {
        if signal == SIGUSR1 { &self.on_request } else { &self.at_once }
    }

    /// Before training, reports a signal, once, and ends the process: after [`REPORTING`] at the latest, because stderr
    /// may be a full pipe.
    fn end_early(&self, place: usize) {
        if !self.early.swap(false, Ordering::SeqCst) {
            return;
        }
        let (_, name, code) = SIGNALS[place];
        let saved = "before training began: there is nothing to save\nhint: the same command starts again; data \
                     sources that were tokenized to their end are in the token cache, unless data.cache = false";
        let text = format!("error: {}", Error::Signal { name, saved: saved.into(), code });
        let (reported, report) = channel();
        let write = move || {
            tell(&text);
            let _ = reported.send(());
        };
        // without the thread, the exit code is the report
        let _ = std::thread::Builder::new().name("report".into()).spawn(write);
        let _ = report.recv_timeout(REPORTING);
        code.end_process();
    }

    /// Records a passed-on signal. Returns true if it ends the process.
    fn pass(&self, place: usize, signal: i32, now: Instant) -> bool {
        let mut first = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let is_second = signal != SIGUSR1 && *first.get_or_insert(now) + TOGETHER <= now;
        // With `at_once` of a direct signal, that signal is seen.
        let at_once = self.at_once.load(Ordering::SeqCst) && self.seen.load(Ordering::SeqCst) == 0;
        // before `seen`, which may end the run
        self.told.store(true, Ordering::SeqCst);
        self.seen.store(place + 1, Ordering::SeqCst);
        is_second || at_once
    }

    fn register(&self) -> std::io::Result<()> {
        use signal_hook::flag;
        for (i, signal, code) in handled() {
            flag::register_conditional_shutdown(signal, code as i32, Arc::clone(self.condition(signal)))?;
            flag::register_usize(signal, Arc::clone(&self.seen), i + 1)?;
        }
        let mut signals = iterator::Signals::new(Signals::numbers())?;
        let handlers = self.clone();
        let follow = move || signals.forever().for_each(|signal| handlers.follow(signal));
        std::thread::Builder::new().name("signals".into()).spawn(follow)?;
        Ok(())
    }

    /// Handles a direct signal: reports it, or arms the immediate exit. SIGUSR1 does not arm it: a scheduler may send
    /// SIGUSR1 to all processes of a job, and SIGTERM later. Signals of an earlier run in this process are ignored.
    fn follow(&self, signal: i32) {
        let is_of_now = || self.seen.load(Ordering::SeqCst) > 0;
        let of = handled().find(|(_, number, _)| *number == signal && is_of_now());
        of.into_iter().for_each(|(place, ..)| self.end_early(place));
        if signal != SIGUSR1 {
            std::thread::sleep(TOGETHER);
            self.at_once.fetch_or(is_of_now(), Ordering::SeqCst);
        }
    }
}

/// Handled signals, with index in [`SIGNALS`] and exit code; without an ignored SIGHUP, as under `nohup`.
fn handled() -> impl Iterator<Item = (usize, i32, ExitCode)> {
    let all = SIGNALS.into_iter().enumerate();
    all.filter(|(_, (signal, name, _))| *name != "SIGHUP" || !ignored(*signal))
        .map(|(i, (signal, _, code))| (i, signal, code))
}

/// Returns true if the process started with this signal ignored. Returns false if `/proc` is unavailable.
fn ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).map(str::trim);
    mask.and_then(|m| u64::from_str_radix(m, 16).ok()).is_some_and(|m| m >> (signal - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Handlers of this test alone, which no signal reaches.
    fn held() -> (Signals, Arc<AtomicBool>) {
        let handlers = Handlers::default();
        let at_once = Arc::clone(&handlers.at_once);
        (Signals { handlers }, at_once)
    }

    /// The signal of all ranks may come to a rank after the others have told of it, and leaves it time to report.
    #[test]
    fn a_signal_told_by_another_rank_is_awaited() {
        let (signals, at_once) = held();
        signals.hear(2);
        assert_eq!(signals.seen(), Some(("SIGTERM", ExitCode::Terminated)));
        drop(signals);
        assert!(!at_once.load(Ordering::Relaxed));
        let (signals, at_once) = held();
        signals.handlers.seen.store(2, Ordering::Relaxed);
        signals.hear(1);
        assert_eq!(signals.seen(), Some(("SIGTERM", ExitCode::Terminated)), "its own came first");
        drop(signals);
        assert!(!at_once.load(Ordering::Relaxed), "a copy may follow");
    }

    /// A copy of a signal cuts neither the result nor the report short.
    #[test]
    fn a_copy_of_a_signal_ends_nothing() {
        for (place, [term, request]) in
            [(0, [true; 2]), (1, [false; 2]), (2, [false; 2]), (3, [false; 2]), (4, [true, false])]
        {
            let (signals, _) = held();
            let handlers = signals.handlers.clone();
            let ends = || [SIGTERM, SIGUSR1].map(|signal| handlers.condition(signal).load(Ordering::SeqCst));
            handlers.seen.store(place, Ordering::SeqCst);
            signals.release();
            assert_eq!(ends(), [term, request], "{place}");
            drop(signals);
            assert_eq!(ends(), [term, request], "{place}");
        }
    }

    #[test]
    fn a_request_is_no_second_signal() {
        let (signals, _) = held();
        let handlers = &signals.handlers;
        handlers.seen.store(2, Ordering::SeqCst);
        handlers.follow(SIGTERM);
        let ends = |signal| handlers.condition(signal).load(Ordering::SeqCst);
        assert!(ends(SIGTERM) && ends(SIGINT) && ends(SIGHUP) && !ends(SIGUSR1));
    }

    /// A signal received directly and through the pipe, in either order, counts once; duplicates need an interval.
    #[test]
    fn a_signal_of_both_ways_is_one() {
        let direct = |handlers: &Handlers| {
            let ends = handlers.at_once.load(Ordering::SeqCst);
            handlers.seen.store(2, Ordering::SeqCst);
            handlers.follow(SIGTERM);
            ends
        };
        let now = Instant::now();
        for direct_first in [true, false] {
            let (signals, _) = held();
            let handlers = &signals.handlers;
            let ends = match direct_first {
                true => direct(handlers) || handlers.pass(1, SIGTERM, now),
                false => handlers.pass(1, SIGTERM, now) || direct(handlers),
            };
            assert!(!ends, "{direct_first}");
            assert_eq!(signals.seen(), Some(("SIGTERM", ExitCode::Terminated)));
            assert!(!handlers.pass(1, SIGTERM, now + TOGETHER / 2), "a copy");
            assert!(handlers.pass(1, SIGTERM, now + TOGETHER) && direct(handlers), "a second one");
            assert!(handlers.told.load(Ordering::SeqCst));
        }
        let (signals, _) = held();
        assert!(
            !signals.handlers.pass(3, SIGUSR1, now) && !signals.handlers.pass(1, SIGTERM, now + TOGETHER)
        );
        let (signals, _) = held();
        signals.release();
        assert!(signals.handlers.pass(1, SIGTERM, now), "nothing is unsaved");
    }
}
