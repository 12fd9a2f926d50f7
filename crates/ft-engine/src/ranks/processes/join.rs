//! Start of a process group.

use super::group::Processes;
#[cfg(feature = "mpi")]
use super::key::Key;
use super::key::Source;
use super::listener::{self, Listener};
use super::monitor::Monitor;
use super::rendezvous::{self, Connections, Registration};
use super::tcp;
use crate::ranks::comm::{CollectiveId, Comm, Error};
use ft_base::error::ExitCode;
use ft_recipe::{Launch, Rendezvous};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum timeout for process startup.
const MEET: Duration = Duration::from_secs(60);
/// Time for rank 0 to name the cause of a broken connection.
const CAUSE: Duration = Duration::from_secs(2);
const START: CollectiveId = CollectiveId::all("the start");

/// Processes on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Neighbors {
    /// Processes on this machine.
    pub here: usize,
    /// Processes with the same CPU affinity mask as this one.
    pub on_processors: usize,
}

impl Neighbors {
    /// Counts the processes like `rank`; `about` has host and CPU affinity mask of each rank, by line.
    fn count(about: &[String], rank: usize) -> Self {
        let (mine, host) = (&about[rank], host_of(&about[rank]));
        Self {
            here: about.iter().filter(|a| host_of(a) == host).count(),
            on_processors: about.iter().filter(|a| *a == mine).count(),
        }
    }
}

fn host_of(about: &str) -> &str {
    about.split_once('\n').map_or(about, |(host, _)| host)
}

/// Raises the limit of open files as far as permitted, for a connection to every other process.
fn open_more_files() {
    let limit = getrlimit(Resource::Nofile);
    // if refused, a failed connection tells the cause
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Joins the process group of the launcher. A collective fails after `timeout`.
///
/// # Errors
/// MPI was initialized before; unreachable peers; a launcher without an address to meet at.
pub fn join(launch: Option<&Launch>, timeout: Duration) -> Result<(Processes, Neighbors), Error> {
    open_more_files();
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let about = format!("{host}\n{}", processors());
    let (rank, world) = launch.map_or((0, 1), |l| (l.rank, l.world));
    let fail = |why: String, code| Error::new((rank, world), host.clone(), START, why, code);
    match launch.map(|l| (l, &l.rendezvous)) {
        Some((launch, Rendezvous::At(host, port))) => {
            let lost = |why: String| fail(why, ExitCode::LostRank);
            let joined = meet(launch, (host, *port), about, timeout.max(MEET), &fail)?;
            let monitor = Arc::new(Monitor::new((rank, world), timeout));
            monitor.know_hosts(joined.hosts);
            let known = Arc::clone(&monitor);
            let done = move |round| known.done(round);
            let known = Arc::clone(&monitor);
            let broken = move |peer: usize, e: std::io::Error| {
                // The first cause is kept: rank 0 reports a dead process, or the error of a live one.
                known.wait_for_failure(CAUSE);
                let why = format!("its connection for values to rank {rank} broke: {e}");
                known.fail(known.error(peer, why, ExitCode::LostRank), false);
            };
            let transport = tcp::start(joined.values, done, broken);
            let all = Processes::new(monitor, transport.map_err(|e| lost(e.to_string()))?);
            begin(&all, joined.monitors)?;
            Ok((all, joined.neighbors))
        }
        Some((_, Rendezvous::Nowhere(why))) => {
            let why =
                format!("{world} processes were started, and they do not find one another\n  hint: {why}");
            Err(fail(why, ExitCode::Usage))
        }
        #[cfg(feature = "mpi")]
        _ => by_mpi(about, timeout, &|why| fail(why, ExitCode::Usage)),
        #[cfg(not(feature = "mpi"))]
        _ => Err(fail(
            "this ft was built without MPI (cargo build --release --features mpi)".into(),
            ExitCode::Usage,
        )),
    }
}

/// Starts the monitor of a group.
fn begin(all: &Processes, monitors: Connections) -> Result<(), Error> {
    // Every rank has a monitoring connection before any rank can be reported as lost.
    all.exchange((&all.everyone(), START), &[], false)?;
    let begun = all.monitor.begin(monitors);
    begun.map_err(|e| all.monitor.error(all.monitor.rank, e.to_string(), ExitCode::LostRank))
}

/// Result of a rendezvous.
struct Joined {
    /// Connections for liveness messages.
    monitors: Connections,
    /// Connections for values.
    values: Connections,
    hosts: Vec<String>,
    neighbors: Neighbors,
}

/// Rendezvous at the host and port of the launcher.
fn meet(
    &Launch { rank, world, .. }: &Launch,
    (host, port): (&str, u16),
    about: String,
    timeout: Duration,
    fail: &dyn Fn(String, ExitCode) -> Error,
) -> Result<Joined, Error> {
    let end = Instant::now() + timeout;
    let lost = |why| fail(why, ExitCode::LostRank);
    let to = rendezvous::resolve(host, port, if rank == 0 { Instant::now() } else { end });
    let (to, one_machine) = to.map_err(lost)?;
    let source = Source::find(port, one_machine).map_err(|why| fail(why, ExitCode::Usage))?;
    let joined = || -> Result<Joined, String> {
        let listener = listener::listen(to, if rank == 0 { port } else { 0 }, one_machine)?;
        let (monitors, roster, mut listener, source) = if rank == 0 {
            // Only the process with the port writes the file of the key, and removes it.
            let (key, issued) = source.issue()?;
            let mut listener = Listener::new(listener, key, world);
            let _issued = issued;
            let own = Registration::new(rank, world, port, about);
            let (monitors, roster) = rendezvous::register_all(own, &mut listener, to, end)?;
            (monitors, roster, listener, Source::Given(key))
        } else {
            let own_port = listener.local_addr().map_err(|e| e.to_string())?.port();
            let own = Registration::new(rank, world, own_port, about);
            let (monitors, roster, key) = rendezvous::register(own, &source, (host, port), end)?;
            (monitors, roster, Listener::new(listener, key, world), Source::Given(key))
        };
        let values =
            rendezvous::connect_pairs((&roster, &monitors), rank, (host, &source), &mut listener, end)?;
        let about = roster.about();
        let hosts = about.iter().map(|a| host_of(a).into()).collect();
        Ok(Joined { monitors, values, hosts, neighbors: Neighbors::count(&about, rank) })
    };
    joined().map_err(lost)
}

/// Implements [`join`] over MPI.
#[cfg(feature = "mpi")]
fn by_mpi(
    about: String,
    timeout: Duration,
    fail: &dyn Fn(String) -> Error,
) -> Result<(Processes, Neighbors), Error> {
    let monitor = Arc::new(std::sync::OnceLock::<Arc<Monitor>>::new());
    let known = Arc::clone(&monitor);
    let done = move |round| {
        if let Some(monitor) = known.get() {
            monitor.done(round);
        }
    };
    let (transport, rank, world) = super::mpi::start(done).map_err(fail)?;
    let monitor = Arc::clone(monitor.get_or_init(|| Arc::new(Monitor::new((rank, world), timeout))));
    let all = Processes::new(monitor, transport);
    let ranks = all.exchange((&all.everyone(), START), about.as_bytes(), false)?;
    let ranks: Vec<String> = ranks.iter().map(|a| String::from_utf8_lossy(a).into_owned()).collect();
    let hosts: Vec<String> = ranks.iter().map(|a| host_of(a).into()).collect();
    all.monitor.know_hosts(hosts.clone());
    if world > 1 {
        let lost = |why: String| all.monitor.error(rank, why, ExitCode::LostRank);
        begin(&all, monitors(&all, &hosts, about)?.map_err(lost)?)?;
    }
    Ok((all, Neighbors::count(&ranks, rank)))
}

/// Monitoring connections under MPI: rank 0 broadcasts its port and a key over MPI, and all other ranks
/// connect to it.
#[cfg(feature = "mpi")]
fn monitors(all: &Processes, hosts: &[String], about: String) -> Result<Result<Connections, String>, Error> {
    use std::net::{Ipv4Addr, SocketAddr};
    let (rank, world, end) = (all.monitor.rank, all.monitor.world, Instant::now() + MEET);
    if rank > 0 {
        let said = all.exchange((&all.everyone(), START), &[], false)?;
        let met =
            said[0].split_first_chunk().map(|(port, key)| (u16::from_ne_bytes(*port), Key::of_bytes(key)));
        let Some((port, Some(key))) = met else { return Ok(Err("the first says nothing".into())) };
        let host = if hosts[rank] == hosts[0] { "127.0.0.1" } else { &hosts[0] };
        let own = Registration::new(rank, world, 0, about);
        let met = rendezvous::register(own, &Source::Given(key), (host, port), end);
        return Ok(met.map(|(connections, ..)| connections));
    }
    let one_machine = hosts.iter().all(|h| *h == hosts[0]);
    let to = SocketAddr::from((if one_machine { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED }, 0));
    let key = Key::random();
    let opened =
        key.and_then(|key| Ok((Listener::new(listener::listen(to, 0, one_machine)?, key, world), key)));
    let opened = opened.and_then(|(listener, key)| Ok((listener.port()?, listener, key)));
    let (port, mut listener, key) = match opened {
        Ok(opened) => opened,
        Err(why) => return Ok(Err(why)),
    };
    all.exchange((&all.everyone(), START), &[&port.to_ne_bytes(), key.bytes()].concat(), false)?;
    let own = Registration::new(rank, world, port, about);
    Ok(rendezvous::register_all(own, &mut listener, to, end).map(|(connections, _)| connections))
}

/// CPU affinity mask of this process, as `/proc` prints it.
fn processors() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed:"));
    mask.map_or(String::new(), |m| m.trim().into())
}
