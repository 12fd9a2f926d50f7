//! `ft run` as a launcher: starts the processes of `parallel.local`, passes signals on, and ends as they end.
//!
//! Processes inherit command line, environment and terminal; rank 0 speaks. Every process has a separate process group:
//! Ctrl-C comes to it once, from here.

use crate::infer::usage;
use crate::train::check_ranks;
use crate::train::signals::{self, Signals};
use ft_base::ExitCode;
use ft_base::terminal::{tell, warn};
use ft_engine::ranks::{KEY_VARIABLE, random_key};
use ft_kernels::cuda;
use ft_recipe::{Device, Launch, Recipe, Refused, Start};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Environment variable of a started process: the id of the parent.
const PARENT: &str = "FT_STARTED_BY";
/// Time for processes to end after one has failed. They hear of the failure at once, unless they hang.
const GRACE: Duration = Duration::from_secs(30);

/// The processes of a recipe on this machine; `None` if this process runs by itself, or was launched.
///
/// # Errors
/// Conflicting variables or keys; as [`check_ranks`].
pub fn wanted(recipe: &Recipe) -> ft_base::Result<Option<Start>> {
    let refused = |r: Refused| match r.key {
        Some(key) => usage(format!("{}: {}", recipe.place(key), r.why)),
        None => usage(r.why),
    };
    let Some(start) = Start::of(recipe).map_err(refused)? else { return Ok(None) };
    let cuda = match recipe.run.device {
        Device::Auto => cuda::count() > 0 && cuda::all_too_old().is_none(),
        device => device == Device::Cuda,
    };
    check_ranks(recipe, cuda, Some(start.local))?;
    Ok(Some(start))
}

/// Takes the signals of the launching process, a byte each on stdin. Ends this process, as by SIGTERM, after any end of
/// the launching one: the pipe then closes.
///
/// # Errors
/// The system refuses a thread.
pub(super) fn follow_parent() -> ft_base::Result<()> {
    if std::env::var_os(PARENT).is_none() {
        return Ok(());
    }
    let watch = || {
        std::io::stdin().lock().bytes().map_while(Result::ok).for_each(|signal| signals::pass(signal.into()));
        let _ = kill_process(getpid(), Signal::TERM);
    };
    let watching = std::thread::Builder::new().name("parent".into()).spawn(watch);
    watching.map_err(|e| usage(format!("parallel.local: a process cannot follow its launcher: {e}")))?;
    Ok(())
}

enum Event {
    Ended(usize, ExitStatus),
    Signal(i32),
}

/// Starts the processes, and waits until all have ended. Returns the exit code: of the lowest rank with an error, or of
/// a lost rank.
///
/// # Errors
/// No free port; the system refuses more processes or threads.
pub(super) fn start(start: &Start) -> ft_base::Result<u8> {
    let fail = |e: std::io::Error| usage(format!("parallel.local: processes cannot be started: {e}"));
    let (sender, events) = channel();
    let mut signals = signal_hook::iterator::Signals::new(Signals::numbers()).map_err(fail)?;
    let (handle, to) = (signals.handle(), sender.clone());
    let told = std::thread::Builder::new().name("signals".into()).spawn(move || {
        signals.forever().take_while(|s| to.send(Event::Signal(*s)).is_ok()).for_each(drop);
    });
    told.map_err(fail)?;
    let mut processes = Processes {
        first: start.first,
        running: Vec::new(),
        ended: Vec::new(),
        pipes: Vec::new(),
        passed: None,
        killed: false,
    };
    let started = processes.spawn(start, &sender);
    if started.is_err() {
        processes.kill();
    }
    // the threads that wait keep senders
    drop(sender);
    let outcome = processes.wait(&events, start);
    handle.close();
    started.map_err(fail)?;
    Ok(outcome)
}

/// A free port of loopback for rank 0. The system chooses higher ones for sockets without a port: none takes this one
/// before rank 0 listens.
fn free_port() -> std::io::Result<u16> {
    let is_free = |port: &u16| TcpListener::bind((Launch::LOOPBACK, *port)).is_ok();
    let any = TcpListener::bind((Launch::LOOPBACK, 0))?.local_addr()?.port();
    Ok((10_000 + any % 9_000..20_000).find(is_free).unwrap_or(any))
}

/// Started processes, by their number on this machine.
struct Processes {
    /// Rank of number 0.
    first: usize,
    running: Vec<(usize, Pid)>,
    ended: Vec<(usize, ExitStatus)>,
    /// Pipes for signals, closed with this process.
    pipes: Vec<ChildStdin>,
    /// The last signal passed on.
    passed: Option<i32>,
    /// Whether this process has killed those still running.
    killed: bool,
}

impl Processes {
    fn spawn(&mut self, start: &Start, to: &Sender<Event>) -> std::io::Result<()> {
        let program = std::env::current_exe()?;
        let (host, port) = match &start.rendezvous {
            Some(rendezvous) => rendezvous.clone(),
            None => (Launch::LOOPBACK.into(), free_port()?),
        };
        // on one machine, the ranks need no file for their key
        let has_key = std::env::var_os(KEY_VARIABLE).is_some_and(|key| !key.is_empty());
        let key = (start.local == start.world && !has_key).then(random_key).transpose();
        let key = key.map_err(std::io::Error::other)?;
        for number in 0..start.local {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1)).stdin(Stdio::piped()).process_group(0);
            let numbers = [
                ("RANK", start.first + number),
                ("WORLD_SIZE", start.world),
                ("LOCAL_RANK", number),
                ("LOCAL_WORLD_SIZE", start.local),
                ("MASTER_PORT", port.into()),
                (PARENT, std::process::id() as usize),
            ];
            command.envs(numbers.map(|(name, n)| (name, n.to_string()))).env("MASTER_ADDR", &host);
            command.envs(key.iter().map(|key| (KEY_VARIABLE, key)));
            self.follow(number, command.spawn()?, to.clone())?;
        }
        Ok(())
    }

    /// Waits for a process on a thread.
    fn follow(&mut self, number: usize, mut child: Child, to: Sender<Event>) -> std::io::Result<()> {
        let (pipe, pid) = (child.stdin.take(), Pid::from_raw(child.id() as i32));
        let name = format!("process {number}");
        let waiting = std::thread::Builder::new().name(name).spawn(move || {
            let status = child.wait().unwrap_or_else(|_| ExitStatus::from_raw(0));
            let _ = to.send(Event::Ended(number, status));
        });
        if waiting.is_err() {
            // nothing waits for it
            let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
        }
        waiting?;
        self.pipes.extend(pipe);
        self.running.extend(pid.map(|pid| (number, pid)));
        Ok(())
    }

    fn pass(&mut self, signal: i32) {
        self.passed = Some(signal);
        let byte = u8::try_from(signal).unwrap_or_default();
        for pipe in &mut self.pipes {
            // one that has ended hears nothing
            let _ = pipe.write_all(&[byte]);
        }
    }

    fn kill(&mut self) {
        self.killed = true;
        for (_, pid) in &self.running {
            let _ = kill_process(*pid, Signal::KILL);
        }
    }

    fn wait(&mut self, events: &Receiver<Event>, start: &Start) -> u8 {
        let mut end = None;
        while !self.running.is_empty() {
            let left =
                end.map_or(Duration::MAX, |end: Instant| end.saturating_duration_since(Instant::now()));
            match events.recv_timeout(left) {
                Ok(Event::Signal(signal)) => self.pass(signal),
                Ok(Event::Ended(number, status)) => {
                    self.running.retain(|(n, _)| *n != number);
                    self.ended.push((number, status));
                    if !status.success() {
                        self.loss(number, status, start.world).iter().for_each(|loss| tell(loss));
                        end.get_or_insert_with(|| Instant::now() + GRACE);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    let ranks: Vec<_> =
                        self.running.iter().map(|(n, _)| (self.first + n).to_string()).collect();
                    warn(&format!(
                        "ranks {} go on after another has failed, and are ended",
                        ranks.join(", ")
                    ));
                    self.kill();
                    end = None;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.code()
    }

    /// Report of a process ended by a signal of another program; the process itself is silent.
    fn loss(&self, number: usize, status: ExitStatus, world: usize) -> Option<String> {
        let killed = self.killed.then_some(Signal::KILL.as_raw());
        let signal = status.signal().filter(|s| self.passed != Some(*s) && killed != Some(*s))?;
        let rank = self.first + number;
        let hint = match signal {
            9 => "\nhint: for want of memory the system ends a process so: its log says \"Out of memory\"",
            _ => "",
        };
        Some(format!("error: rank {rank} of {world}: its process was ended by signal {signal}{hint}"))
    }

    /// Code of the lowest rank with an error; of a lost rank if signals ended the failed ones. After a signal to all,
    /// a rank may lose a peer to it: the code is then the signal's.
    fn code(&mut self) -> u8 {
        self.ended.sort_unstable_by_key(|(number, _)| *number);
        let failed: Vec<_> = self.ended.iter().map(|(_, s)| *s).filter(|s| !s.success()).collect();
        let by_passed = |s: ExitStatus| s.signal().filter(|n| self.passed == Some(*n)).map(|n| 128 + n);
        let codes: Vec<i32> = failed.iter().filter_map(|s| s.code().or_else(|| by_passed(*s))).collect();
        let after_signal = codes.iter().find(|c| self.passed.is_some() && **c != ExitCode::LostRank as i32);
        match after_signal.or(codes.first()) {
            Some(code) => ExitCode::of(u8::try_from(*code).unwrap_or_default()) as u8,
            None if failed.is_empty() => ExitCode::Done as u8,
            None => ExitCode::LostRank as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes(passed: Option<i32>, killed: bool, ends: &[i32]) -> Processes {
        let ended = ends.iter().map(|raw| ExitStatus::from_raw(*raw)).enumerate().collect();
        Processes { first: 0, running: Vec::new(), ended, pipes: Vec::new(), passed, killed }
    }

    #[test]
    fn a_signal_of_this_process_is_no_loss() {
        let told = |passed, killed, signal| {
            processes(passed, killed, &[]).loss(1, ExitStatus::from_raw(signal), 2).is_some()
        };
        assert!(told(None, false, 9) && told(None, false, 15) && told(Some(15), false, 9));
        assert!(told(None, true, 11), "of another one");
        assert!(!told(None, true, 9) && !told(Some(15), false, 15));
    }

    #[test]
    fn a_signal_to_all_has_its_code() {
        let code = |passed, ends: &[i32]| processes(passed, false, ends).code();
        let [full, lost, stopped] = [5 << 8, 7 << 8, 143 << 8];
        assert_eq!(code(Some(15), &[15, 15]), 143);
        assert_eq!(code(Some(15), &[lost, 15]), 143);
        assert_eq!(code(Some(15), &[lost, stopped]), 143);
        assert_eq!(code(Some(15), &[full, stopped]), 5, "a failure goes first");
        assert_eq!(code(Some(15), &[lost, 9]), 7);
        assert_eq!(code(None, &[15, 15]), 7);
        assert_eq!(code(None, &[15, lost]), 7);
        assert_eq!(code(Some(15), &[0, 0]), 0);
    }

    #[test]
    fn the_port_of_rank_0_is_none_that_the_system_chooses() {
        for _ in 0..20 {
            let port = free_port().expect("a port");
            assert!((10_000..20_000).contains(&port), "{port}");
        }
    }
}
