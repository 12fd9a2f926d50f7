//! `ft run` as a launcher: starts the processes of `parallel.local`, passes signals on, and ends as they end.
//!
//! Processes inherit command line, environment and terminal; rank 0 speaks. Every process has a process group of its
//! own, so that Ctrl-C comes to it once, from here.

use crate::infer::usage;
use crate::train::check_ranks;
use crate::train::signals::Signals;
use ft_base::ExitCode;
use ft_base::terminal::{tell, warn};
use ft_kernels::cuda;
use ft_recipe::{Device, Launch, Recipe, Refused, Start};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Environment variable of a started process: the id of the one that started it.
const PARENT: &str = "FT_STARTED_BY";
/// Time for processes to end after one has failed. They hear of the failure at once, unless they hang.
const GRACE: Duration = Duration::from_secs(30);

/// The processes of a recipe on this machine; `None` if this process runs by itself, or was launched.
///
/// # Errors
/// Variables or keys that do not go together; as [`check_ranks`].
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

/// Ends this process, as by SIGTERM, after any end of the launching one: the pipe on stdin then closes.
pub(super) fn follow_parent() {
    if std::env::var_os(PARENT).is_none() {
        return;
    }
    let watch = || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = kill_process(getpid(), Signal::TERM);
    };
    // Without the thread, the process goes on alone.
    let _ = std::thread::Builder::new().name("parent".into()).spawn(watch);
}

enum Event {
    Ended(usize, ExitStatus),
    Signal(i32),
}

/// Starts the processes, and waits until all have ended. Returns the exit code: of the first rank that failed by
/// itself, or that of a lost rank.
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
    let mut processes =
        Processes { first: start.first, running: Vec::new(), ended: Vec::new(), pipes: Vec::new() };
    let started = processes.spawn(start, &sender);
    if started.is_err() {
        processes.signal(Signal::KILL);
    }
    // the threads that wait keep senders
    drop(sender);
    let outcome = processes.wait(&events, start);
    handle.close();
    started.map_err(fail)?;
    Ok(outcome)
}

/// A free port of loopback for rank 0. The system chooses higher ones for sockets that name none: none of them takes
/// this port before rank 0 listens.
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
    /// Pipes that close with this process.
    pipes: Vec<ChildStdin>,
}

impl Processes {
    fn spawn(&mut self, start: &Start, to: &Sender<Event>) -> std::io::Result<()> {
        let program = std::env::current_exe()?;
        let (host, port) = match &start.rendezvous {
            Some(rendezvous) => rendezvous.clone(),
            None => (Launch::LOOPBACK.into(), free_port()?),
        };
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

    fn signal(&self, signal: Signal) {
        for (_, pid) in &self.running {
            // one that has just ended hears nothing
            let _ = kill_process(*pid, signal);
        }
    }

    fn wait(&mut self, events: &Receiver<Event>, start: &Start) -> u8 {
        let mut end = None;
        while !self.running.is_empty() {
            let left =
                end.map_or(Duration::MAX, |end: Instant| end.saturating_duration_since(Instant::now()));
            match events.recv_timeout(left) {
                Ok(Event::Signal(signal)) => {
                    Signal::from_named_raw(signal).into_iter().for_each(|s| self.signal(s))
                }
                Ok(Event::Ended(number, status)) => {
                    self.running.retain(|(n, _)| *n != number);
                    self.ended.push((number, status));
                    if !status.success() {
                        self.tell(number, status, start);
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
                    self.signal(Signal::KILL);
                    end = None;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        self.code()
    }

    /// Reports a process that a signal has ended; it could not do so itself.
    fn tell(&self, number: usize, status: ExitStatus, start: &Start) {
        let Some(signal) = status.signal() else { return };
        let (rank, world) = (self.first + number, start.world);
        let hint = match signal {
            9 => "\nhint: for want of memory the system ends a process so: its log says \"Out of memory\"",
            _ => "",
        };
        tell(&format!("error: rank {rank} of {world}: its process was ended by signal {signal}{hint}"));
    }

    /// The code of the lowest rank that reports an error; that of a lost rank if signals ended them.
    fn code(&mut self) -> u8 {
        self.ended.sort_unstable_by_key(|(number, _)| *number);
        let failed = || self.ended.iter().filter(|(_, status)| !status.success());
        let told = failed().find_map(|(_, status)| status.code());
        match (told, failed().next()) {
            (Some(code), _) => ExitCode::of(u8::try_from(code).unwrap_or_default()) as u8,
            (None, Some(_)) => ExitCode::LostRank as u8,
            (None, None) => ExitCode::Done as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_rank_0_is_none_that_the_system_chooses() {
        for _ in 0..20 {
            let port = free_port().expect("a port");
            assert!((10_000..20_000).contains(&port), "{port}");
        }
    }
}
