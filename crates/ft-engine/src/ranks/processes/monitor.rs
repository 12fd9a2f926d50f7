//! Failure detection: a TCP connection between rank 0 and every other rank, apart from the transport of
//! values.
//!
//! MPI does not report dead or stopped peers, and NCCL reports them too late. Each process announces every
//! collective it enters and sends a heartbeat every half second; the operating system closes the connection
//! of a dead process. Rank 0 decides which rank is lost and tells all; the other ranks monitor rank 0.

use super::transport::Round;
use crate::ranks::callbacks::{Callback, call_all};
use crate::ranks::comm::{CollectiveId, Error};
use ft_base::error::ExitCode;
use ft_base::terminal::tell;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Interval between heartbeats.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Interval between checks.
const CHECK: Duration = Duration::from_millis(100);
/// A gap between checks beyond this means that this process itself was stopped;
/// silence during the gap is ignored.
const STOPPED: Duration = Duration::from_secs(2);
/// Time a process may continue after a failure: without and with a dead process. The second is shorter,
/// because launchers kill the remaining processes one second later.
const GRACE: [Duration; 2] = [Duration::from_secs(5), Duration::from_millis(600)];
/// Time to wait for data sent by a failed rank before the failure.
const DRAIN: Duration = Duration::from_millis(500);
/// Additional time for other ranks to wait for the report of rank 0.
const AFTER_RANK_0: Duration = Duration::from_millis(250);

/// A message, sent as one line of JSON.
#[derive(Serialize, Deserialize)]
enum Message {
    Alive,
    /// The sender enters a collective.
    At(Collective),
    /// The sender timed out in its collective.
    Late,
    /// An [`Error`], and whether a process is gone.
    Failed {
        rank: usize,
        host: String,
        at: String,
        why: String,
        code: u8,
        hangs: bool,
        died: bool,
    },
    /// The sender leaves after completing all work.
    Bye,
}

/// The current collective of a rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Collective {
    /// Members of the group; empty for all ranks.
    members: Vec<usize>,
    /// Number of collectives of this group so far.
    number: u64,
    /// Name, as messages print it.
    name: String,
}

/// State of a peer.
struct Peer {
    /// Current or last collective.
    at: Collective,
    /// Number of collectives so far, by group.
    numbers: BTreeMap<Vec<usize>, u64>,
    /// Time of the last message.
    heard: Instant,
    /// The peer has left or died.
    gone: bool,
}

impl Peer {
    fn enter(&mut self, entered: Collective) {
        self.numbers.insert(entered.members.clone(), entered.number);
        self.at = entered;
    }

    /// Whether the peer has entered a collective, or has none to enter.
    fn has_come_to(&self, other: &Collective) -> bool {
        self.numbers.get(&other.members).unwrap_or(&0) >= &other.number
    }
}

struct State {
    peers: Vec<Peer>,
    /// A completed round, until taken.
    done: Option<Round>,
    /// Deadline of the current collective.
    deadline: Option<Instant>,
    /// A failure is being sent to the peers, or has been.
    is_failing: bool,
    /// Cause of the failure, time of the failure, and whether a process died.
    failed: Option<(Error, Instant, bool)>,
    /// Callbacks for a failure.
    when_failed: Vec<Callback>,
    /// This process is leaving.
    over: bool,
}

/// State of all processes as seen by one.
pub struct Monitor {
    /// Rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
    /// Timeout of a collective.
    timeout: Duration,
    hosts: OnceLock<Vec<String>>,
    /// Number of pipeline stages.
    stages: OnceLock<usize>,
    /// Connections by rank.
    lines: OnceLock<Vec<Option<Mutex<TcpStream>>>>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Monitor {
    /// Initial state, without connections.
    pub fn new((rank, world): (usize, usize), timeout: Duration) -> Self {
        let none = Collective { name: "none yet".into(), ..Collective::default() };
        let peer =
            |_| Peer { at: none.clone(), numbers: BTreeMap::new(), heard: Instant::now(), gone: false };
        let state = State {
            peers: (0..world).map(peer).collect(),
            done: None,
            deadline: None,
            is_failing: false,
            failed: None,
            when_failed: Vec::new(),
            over: false,
        };
        let (hosts, stages, lines) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Self { rank, world, timeout, hosts, stages, lines, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while holding this lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one listener thread per connection and the monitor thread; `lines` are the connections by rank.
    pub fn begin(self: &Arc<Self>, lines: Vec<Option<TcpStream>>) -> std::io::Result<()> {
        let start = |name: String, f: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name).stack_size(256 << 10).spawn(f).map(drop)
        };
        let mut heard = Vec::new();
        for (rank, line) in lines.iter().enumerate() {
            let Some(line) = line else { continue };
            line.set_nodelay(true)?;
            // a stopped process does not drain the socket
            line.set_write_timeout(Some(HEARTBEAT))?;
            heard.push((rank, line.try_clone()?));
        }
        // before any listener, which may have a failure to pass on
        let _ = self.lines.set(lines.into_iter().map(|l| l.map(Mutex::new)).collect());
        for (rank, line) in heard {
            let monitor = Arc::clone(self);
            start(format!("line {rank}"), Box::new(move || monitor.listen(rank, line)))?;
        }
        let monitor = Arc::clone(self);
        start("monitor".into(), Box::new(move || monitor.run()))
    }

    /// Sets the host names by rank.
    pub fn know_hosts(&self, hosts: Vec<String>) {
        let _ = self.hosts.set(hosts);
    }

    /// Sets the number of pipeline stages. Errors then name the stage of a lost rank.
    pub fn know_stages(&self, stages: usize) {
        let _ = self.stages.set(stages);
    }

    /// Cause of the failure, if any.
    pub fn failed(&self) -> Option<Error> {
        self.lock().failed.as_ref().map(|(e, ..)| e.clone())
    }

    /// Waits until the cause of a failure is known, at most for `limit`.
    pub fn wait_for_failure(&self, limit: Duration) {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, |s| s.failed.is_none());
        drop(waited);
    }

    /// Registers `f`, called on a separate thread when the run fails.
    pub fn when_failed(&self, f: Callback) {
        let mut s = self.lock();
        s.when_failed.push(f);
        if s.failed.is_some() {
            call_all(std::mem::take(&mut s.when_failed));
        }
    }

    /// Announces this rank's entry into a collective of `members`.
    ///
    /// # Errors
    /// The cause of the failure.
    pub fn enter(&self, members: &[usize], at: CollectiveId) -> Result<(), Error> {
        let members = if members.len() == self.world { Vec::new() } else { members.to_vec() };
        let mut s = self.lock();
        if let Some((e, ..)) = &s.failed {
            return Err(e.clone());
        }
        let own = &mut s.peers[self.rank];
        let number = own.numbers.get(&members).unwrap_or(&0) + 1;
        let entered = Collective { members, number, name: at.to_string() };
        own.enter(entered.clone());
        drop(s);
        self.send_all(&Message::At(entered));
        Ok(())
    }

    /// Name of the last collective of a rank.
    pub fn at(&self, rank: usize) -> String {
        self.lock().peers.get(rank).map_or(String::new(), |p| p.at.name.clone())
    }

    /// Marks a round as complete.
    pub fn done(&self, round: Round) {
        self.lock().done = Some(round);
        self.changed.notify_all();
    }

    /// Waits for the current round to complete, with a timeout if `timed`.
    ///
    /// # Errors
    /// The cause of the failure.
    pub fn wait(&self, timed: bool) -> Result<Round, Error> {
        let mut s = self.lock();
        s.deadline = timed.then(|| Instant::now().checked_add(self.timeout)).flatten();
        loop {
            if let Some(round) = s.done.take() {
                s.deadline = None;
                return Ok(round);
            }
            let left = match &s.failed {
                None => CHECK,
                // The failed rank has entered this collective, so its data may still arrive. Wait up to
                // `DRAIN`: with the data, this rank may meet and report the same error itself.
                Some((e, since, false))
                    if !e.hangs && s.peers[e.rank].has_come_to(&s.peers[self.rank].at) =>
                {
                    let left = (*since + DRAIN).saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(e.clone());
                    }
                    left
                }
                Some((e, ..)) => return Err(e.clone()),
            };
            s = self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Builds the error of a lost rank.
    pub fn error(&self, rank: usize, why: String, code: ExitCode) -> Error {
        let host = self.hosts.get().and_then(|h| h.get(rank)).cloned().unwrap_or_default();
        // leaks a name per reported failure: at most a few per peer
        let at = CollectiveId::all(self.at(rank).leak());
        self.staged(Error::new((rank, self.world), host, at, why, code))
    }

    fn staged(&self, e: Error) -> Error {
        e.with_stage_of(self.stages.get().copied().unwrap_or(1))
    }

    /// Ends the run for all ranks; the first cause is kept. Returns when the other ranks have been sent it, by this
    /// thread or another; does nothing after [`Monitor::leave`]. `died` says whether a process is gone.
    pub fn fail(&self, e: Error, died: bool) {
        let mut s = self.lock();
        if s.over {
            return;
        }
        if s.is_failing {
            while s.failed.is_none() {
                s = self.changed.wait(s).unwrap_or_else(PoisonError::into_inner);
            }
            return;
        }
        s.is_failing = true;
        drop(s);
        // Before the failure ends this process: peers that lost it first would name it as the cause.
        let Error { rank, host, at, why, code, hangs, .. } = e.clone();
        let (at, code) = (at.to_string(), code as u8);
        self.send_all(&Message::Failed { rank, host, at, why, code, hangs, died });
        let mut s = self.lock();
        s.failed = Some((e, Instant::now(), died));
        call_all(std::mem::take(&mut s.when_failed));
        drop(s);
        self.changed.notify_all();
    }

    /// Leaves after all work is done. The listeners of the peers end.
    pub fn leave(&self) {
        self.lock().over = true;
        self.send_all(&Message::Bye);
        for line in self.lines.get().into_iter().flatten().flatten() {
            let _ = line.lock().unwrap_or_else(PoisonError::into_inner).shutdown(Shutdown::Write);
        }
    }

    /// After a failure: waits until rank 0 has reported it. Returns whether this rank must report it,
    /// because rank 0 is the lost one.
    pub fn linger(&self) -> bool {
        if self.rank == 0 {
            return true;
        }
        let mut s = self.lock();
        let end = Instant::now() + GRACE[0];
        loop {
            match &s.failed {
                Some((e, _, true)) if e.rank == 0 => return true,
                Some((e, ..)) if e.rank == 0 && e.hangs => return true,
                _ => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if s.peers[0].gone || left.is_zero() {
                return false;
            }
            s = self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a message on all connections: rank 0 to all ranks, other ranks to rank 0.
    fn send_all(&self, what: &Message) {
        let Ok(mut text) = serde_json::to_string(what) else { return };
        text.push('\n');
        for line in self.lines.get().into_iter().flatten().flatten() {
            let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
            // A broken connection is handled by `listen`.
            let _ = line.write_all(text.as_bytes());
        }
    }

    fn listen(&self, rank: usize, line: TcpStream) {
        for text in BufReader::new(line).lines() {
            let Some(said) = text.ok().and_then(|t| serde_json::from_str(&t).ok()) else { break };
            let mut s = self.lock();
            s.peers[rank].heard = Instant::now();
            match said {
                Message::Alive => {}
                Message::At(entered) => s.peers[rank].enter(entered),
                Message::Late => {
                    drop(s);
                    self.judge(rank);
                }
                Message::Bye => {
                    s.peers[rank].gone = true;
                    self.changed.notify_all();
                }
                Message::Failed { rank: lost, host, at, why, code, hangs, died } => {
                    drop(s);
                    // Of other ranks, rank 0 alone knows the collective; of itself, a rank knows it best.
                    let at = if self.rank == 0 && lost != rank { self.at(lost) } else { at };
                    let at = CollectiveId::all(at.leak());
                    let e = Error::new((lost, self.world), host, at, why, ExitCode::of(code));
                    self.fail(self.staged(Error { hangs, ..e }), died);
                }
            }
        }
        let left = std::mem::replace(&mut self.lock().peers[rank].gone, true);
        if !left {
            let why = "it has died: its process is gone".to_string();
            self.fail(self.error(rank, why, ExitCode::LostRank), true);
        }
        self.changed.notify_all();
    }

    /// Decides on the rank to blame for a timeout of `rank` in a collective: the one awaited, or the last of a chain of
    /// ranks waiting for one another; a silent rank before these.
    fn judge(&self, rank: usize) {
        let s = self.lock();
        let (mut late, mut at) = (None, s.peers[rank].at.clone());
        for _ in 0..self.world {
            let members = if at.members.is_empty() { (0..self.world).collect() } else { at.members.clone() };
            let Some(next) = members.into_iter().find(|r| !s.peers[*r].has_come_to(&at)) else { break };
            late = Some((next, at));
            at = s.peers[next].at.clone();
        }
        // A stopped process is silent, and may block others in an earlier collective: it takes precedence.
        let others = (0..self.world).filter(|r| *r != self.rank && !s.peers[*r].gone);
        let silent = others.min_by_key(|r| s.peers[*r].heard);
        let silent = silent.filter(|r| s.peers[*r].heard.elapsed() > (self.timeout / 2).max(3 * HEARTBEAT));
        let waited = late.as_ref().map_or(&s.peers[rank].at, |(_, at)| at);
        let there = waited.name.clone();
        let (late, why) = match silent.or(late.as_ref().map(|(late, _)| *late)) {
            Some(late) if !s.peers[late].has_come_to(waited) => (late, format!("it has not come to {there}")),
            Some(late) => (late, format!("it has come to {there}, and goes no further")),
            None => (self.rank, format!("all have come to {there}, and what they give does not arrive")),
        };
        drop(s);
        self.hangs(late, why);
    }

    fn hangs(&self, rank: usize, why: String) {
        let seconds = self.timeout.as_secs_f64();
        let why = format!("{why} within {seconds} s\n  hint: parallel.timeout gives it longer");
        self.fail(Error { hangs: true, ..self.error(rank, why, ExitCode::LostRank) }, false);
    }

    /// Monitors the peers until this process leaves; after a failure, writes the cause and exits the process if it
    /// does not end in time.
    fn run(&self) {
        let (mut looked, mut beat) = (Instant::now(), Instant::now());
        loop {
            std::thread::sleep(CHECK);
            let now = Instant::now();
            let mut s = self.lock();
            if s.over {
                return;
            }
            if let Some((e, since, died)) = &s.failed {
                let first = self.rank == 0;
                let grace = GRACE[usize::from(*died)] + if first { Duration::ZERO } else { AFTER_RANK_0 };
                if now - *since > grace {
                    let say = first || e.rank == 0 && (*died || e.hangs);
                    let e = e.clone();
                    drop(s);
                    if say {
                        ft_base::terminal::to_terminal();
                    }
                    tell(&format!("error: {e}"));
                    e.code.end_process();
                }
                continue;
            }
            if now - looked > STOPPED {
                s.peers.iter_mut().for_each(|p| p.heard = now);
            }
            looked = now;
            // heartbeats come from a separate thread, independent of computation
            let silence = self.timeout.max(STOPPED);
            let watched = if self.rank == 0 { 1..self.world } else { 0..1 };
            let silent = watched.into_iter().find(|r| !s.peers[*r].gone && now - s.peers[*r].heard > silence);
            let late = s.deadline.is_some_and(|d| now > d);
            if late {
                // rank 0 decides; if it does not answer, it is detected as silent
                s.deadline = None;
            }
            drop(s);
            if now - beat > HEARTBEAT {
                beat = now;
                self.send_all(&Message::Alive);
            }
            match (silent, late) {
                (Some(rank), _) => self.hangs(rank, "it has given no sign of life".into()),
                (None, true) if self.rank == 0 => self.judge(0),
                (None, true) => self.send_all(&Message::Late),
                (None, false) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blamed rank and the error when `rank` times out, for peers given as (members of the current collective, its
    /// number, seconds since the last message).
    fn named(peers: &[(&[usize], u64, u64)], rank: usize) -> (usize, String) {
        let monitor = Monitor::new((0, peers.len()), Duration::from_secs(600));
        monitor.know_stages(2);
        for (peer, (members, number, ago)) in monitor.lock().peers.iter_mut().zip(peers) {
            peer.numbers.insert(Vec::new(), 6);
            let name = if members.is_empty() { format!("sum {number}") } else { format!("keys {number}") };
            peer.enter(Collective { members: members.to_vec(), number: *number, name });
            peer.heard = Instant::now().checked_sub(Duration::from_secs(*ago)).expect("a clock that long on");
        }
        monitor.judge(rank);
        let e = monitor.failed().expect("a failure");
        (e.rank, e.to_string())
    }

    #[test]
    fn a_second_failure_waits_until_the_first_is_sent() {
        let monitor = Arc::new(Monitor::new((0, 1), Duration::from_secs(600)));
        monitor.lock().is_failing = true;
        let e = monitor.error(0, "it fails".into(), ExitCode::LostRank);
        let (release, released) = std::sync::mpsc::channel();
        let (other, first) = (Arc::clone(&monitor), e.clone());
        let sender = std::thread::spawn(move || {
            released.recv().expect("released");
            other.lock().failed = Some((first, Instant::now(), false));
            other.changed.notify_all();
        });
        release.send(()).expect("a thread");
        monitor.fail(e, false);
        assert!(monitor.failed().is_some());
        sender.join().expect("no panic");
    }

    #[test]
    fn a_wait_for_a_failure_ends_with_it() {
        const LIMIT: Duration = Duration::from_secs(600);
        let monitor = Arc::new(Monitor::new((0, 1), LIMIT));
        monitor.wait_for_failure(Duration::ZERO);
        let (other, begun) = (Arc::clone(&monitor), Instant::now());
        let waiting = std::thread::spawn(move || other.wait_for_failure(LIMIT));
        monitor.fail(monitor.error(0, "it fails".into(), ExitCode::LostRank), true);
        waiting.join().expect("no panic");
        assert!(begun.elapsed() < LIMIT);
    }

    #[test]
    fn a_stopped_rank_is_named_before_ranks_that_wait_for_it() {
        const ALL: &[usize] = &[];
        let both = [(ALL, 6, 0), (ALL, 6, 600), (ALL, 7, 0), (ALL, 7, 0)];
        let ahead = [(ALL, 6, 0), (ALL, 7, 600), (ALL, 7, 0), (ALL, 7, 0)];
        let slow = [(ALL, 7, 0), (ALL, 7, 0), (ALL, 6, 0), (ALL, 7, 0)];
        let wire = [(ALL, 7, 0); 4];
        let group: &[usize] = &[2, 3];
        // Rank 3 waits for all, rank 0 among them, and rank 0 computes.
        let chain = [(ALL, 6, 0), (ALL, 7, 0), (group, 5, 0), (ALL, 7, 0)];
        for (peers, late, rank, says) in [
            (both, 2, 1, "stage 0: it has not come to sum 7 within 600 s"),
            (ahead, 1, 1, "stage 0: it has come to sum 7, and goes no further"),
            (slow, 0, 2, "stage 1: it has not come to sum 7"),
            (wire, 0, 0, "stage 0: all have come to sum 7"),
            (chain, 2, 0, "stage 0: it has not come to sum 7"),
        ] {
            let (named, said) = named(&peers, late);
            let starts = format!("rank {rank} of 4 on : {says}");
            assert!(named == rank && said.starts_with(&starts), "{peers:?}: rank {named}: {said}");
        }
    }
}
