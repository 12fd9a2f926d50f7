//! Detection of a multi-process launch from environment variables.
//!
//! Supported launchers: `torchrun` and compatible ones (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
//! `MASTER_PORT`), `mpirun` (the variables of Open MPI and PMI) and `srun` (`SLURM_*`).

use crate::keys::{Comm, Parallel};
use std::env::var;
use std::net::{SocketAddr, ToSocketAddrs};

/// The rendezvous of launched processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendezvous {
    /// Through MPI.
    Mpi,
    /// At the host and port of rank 0.
    At(String, u16),
    /// Unknown. The text explains how to set it.
    Nowhere(&'static str),
}

/// One process of a multi-process launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Global rank, from 0.
    pub rank: usize,
    /// World size.
    pub world: usize,
    /// Rank within the machine, if set by the launcher.
    pub local: Option<usize>,
    /// How the processes meet.
    pub rendezvous: Rendezvous,
}

/// Default rendezvous ports of Slurm jobs: (first port, count). The job and step numbers select one.
const PORTS: (u64, u64) = (20_000, 10_000);

impl Launch {
    /// Rendezvous host of ranks on one machine.
    pub const LOOPBACK: &str = "127.0.0.1";

    /// Environment variables marking a process as one of several.
    pub const VARIABLES: [&str; 5] =
        ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

    /// Number of processes on this machine, if the launcher sets it.
    pub fn of_machine() -> Option<usize> {
        Environment(&|key| var(key).ok()).of_machine()
    }

    /// The launch of this process, or `None` for a single process. Also `None` if [`Launch::check`] fails.
    pub fn of_env() -> Option<Self> {
        Self::read().ok().flatten()
    }

    /// Rejects inconsistent launch variables. Without this check, the processes would train separately.
    ///
    /// # Errors
    /// Names the rank and world size variables, with values.
    pub fn check() -> Result<(), String> {
        Self::read().map(|_| ())
    }

    fn read() -> Result<Option<Self>, String> {
        Self::detect(&|key| var(key).ok().filter(|v| !v.is_empty()), cfg!(feature = "mpi"))
    }

    fn detect(said: &dyn Fn(&str) -> Option<String>, mpi: bool) -> Result<Option<Self>, String> {
        let env = Environment(said);
        let launch = |Ranks { rank, world, local }, rendezvous| {
            let rendezvous = match rendezvous {
                // If all ranks are on this machine, none but this machine can reach them.
                Rendezvous::At(_, port) if env.of_machine() == Some(world) => {
                    Rendezvous::At(Self::LOOPBACK.into(), port)
                }
                other => other,
            };
            Ok(Some(Self { rank, world, local, rendezvous }))
        };
        let by_rank = env.ranks("RANK", "WORLD_SIZE", "LOCAL_RANK")?;
        if let (Some(ranks), Some(rendezvous)) = (by_rank, env.torchrun()) {
            return launch(ranks, rendezvous);
        }
        let open_mpi =
            env.ranks("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")?;
        let by_mpi = match open_mpi {
            None => env.ranks("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")?,
            open_mpi => open_mpi,
        };
        if let Some(ranks) = by_mpi.filter(|_| mpi) {
            return launch(ranks, Rendezvous::Mpi);
        }
        if let Some(ranks) = env.slurm_ranks()? {
            return launch(ranks, env.slurm());
        }
        let why = "mpirun started them: build with the `mpi` feature, or set RANK, WORLD_SIZE, \
            LOCAL_RANK, MASTER_ADDR and MASTER_PORT";
        if let Some(ranks) = by_mpi {
            return launch(ranks, Rendezvous::Nowhere(why));
        }
        // Otherwise all processes would train separately and write to the same folder.
        let why =
            "RANK and WORLD_SIZE are set: set MASTER_ADDR and MASTER_PORT too, or unset those to train alone";
        by_rank.map_or(Ok(None), |ranks| launch(ranks, Rendezvous::Nowhere(why)))
    }

    /// Resolves the address of rank 0; true for a loopback address.
    ///
    /// # Errors
    /// The host name cannot be resolved.
    pub fn address(host: &str, port: u16) -> Result<(SocketAddr, bool), String> {
        let mut all = (host, port).to_socket_addrs().map_err(|e| format!("{host}:{port}: {e}"))?;
        let first = all.next().ok_or_else(|| format!("{host}: no address"))?;
        Ok((first, first.ip().is_loopback()))
    }
}

/// A process among several, before the rendezvous is known.
#[derive(Clone, Copy)]
struct Ranks {
    rank: usize,
    world: usize,
    local: Option<usize>,
}

/// Environment variables, by name.
pub(crate) struct Environment<'a>(pub(crate) &'a dyn Fn(&str) -> Option<String>);

impl Environment<'_> {
    pub(crate) fn number(&self, key: &str) -> Option<usize> {
        self.0(key)?.trim().parse().ok()
    }

    pub(crate) fn of_machine(&self) -> Option<usize> {
        let names = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];
        // "8" or "8(x2)"; the first number is for the first machine.
        let slurm = || {
            let said = self.0("SLURM_STEP_TASKS_PER_NODE").or_else(|| self.0("SLURM_TASKS_PER_NODE"))?;
            said.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        names.iter().find_map(|k| self.number(k)).or_else(slurm)
    }

    pub(crate) fn port(&self, key: &str) -> Option<u16> {
        self.number(key).and_then(|p| u16::try_from(p).ok()).filter(|p| *p > 0)
    }

    /// The ranks in these variables; `None` for a lone process.
    fn ranks(&self, rank: &str, world: &str, local: &str) -> Result<Option<Ranks>, String> {
        let (Some(own), Some(all)) = (self.0(rank), self.0(world)) else { return Ok(None) };
        match (self.number(rank), self.number(world)) {
            (Some(own), Some(all)) if own < all => {
                Ok((all > 1).then(|| Ranks { rank: own, world: all, local: self.number(local) }))
            }
            (_, count) => Err(impossible((rank, &own), (world, &all), count)),
        }
    }

    /// The rendezvous of torchrun.
    fn torchrun(&self) -> Option<Rendezvous> {
        let (host, port) = self.0("MASTER_ADDR").zip(self.port("MASTER_PORT"))?;
        // torchrun itself listens on this port.
        let taken = self.0("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|w| w == "True");
        Some(match port.checked_add(u16::from(taken)) {
            Some(port) => Rendezvous::At(host, port),
            None => Rendezvous::Nowhere(
                "torchrun listens at MASTER_PORT, and no port is above it: set a lower one",
            ),
        })
    }

    fn slurm_ranks(&self) -> Result<Option<Ranks>, String> {
        let step = self.ranks("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")?;
        // A batch script has SLURM_PROCID too, but no `srun` started it.
        let in_step = ["SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"].iter().any(|k| self.0(k).is_some());
        match step {
            None if in_step => self.ranks("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
            step => Ok(step),
        }
    }

    /// The rendezvous of srun.
    fn slurm(&self) -> Rendezvous {
        let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"].iter().find_map(|k| self.0(k));
        let first = nodes.as_deref().and_then(first_node);
        let host = self.0("MASTER_ADDR").or(first).or(self.0("SLURM_LAUNCH_NODE_IPADDR"));
        let by_job = || {
            let (job, step) = (self.number("SLURM_JOB_ID")?, self.number("SLURM_STEP_ID").unwrap_or(0));
            u16::try_from(PORTS.0 + (job as u64 + step as u64) % PORTS.1).ok()
        };
        match host.zip(self.port("MASTER_PORT").or_else(by_job)) {
            Some((host, port)) => Rendezvous::At(host, port),
            None => Rendezvous::Nowhere("srun has told no host and no job: set MASTER_ADDR and MASTER_PORT"),
        }
    }
}

impl Parallel {
    /// Number of ranks run as threads of this process.
    pub fn in_process(&self) -> u64 {
        match self.comm {
            Comm::Mpi => 1,
            Comm::Auto | Comm::Nccl if self.local.is_some() || Launch::of_env().is_some() => 1,
            _ => self.ranks(),
        }
    }

    /// Number of ranks on the processors and the host memory of this process: its own, or all of the processes to
    /// start. A process under a launcher has its own part already.
    pub fn sharing(&self) -> u64 {
        match self.local {
            Some(local) if Launch::of_env().is_none() => local as u64,
            _ => self.in_process(),
        }
    }

    /// The setting with `ranks` ranks in all, by `data` if the other axes divide them.
    pub fn of_ranks(&self, ranks: usize) -> String {
        let others = self.ranks() / self.data as u64;
        match ranks as u64 / others {
            data if data > 0 && data * others == ranks as u64 => format!("parallel.data={data}"),
            _ => "another layout in [parallel], or parallel=auto".into(),
        }
    }

    /// Compute threads per rank, an even share of `all`.
    pub fn threads(&self, all: usize) -> usize {
        (all / self.sharing().max(1) as usize).max(1)
    }
}

/// The error for an invalid rank or world size. `own` and `all` are (variable, value).
fn impossible(own: (&str, &str), all: (&str, &str), count: Option<usize>) -> String {
    let should = match count {
        None | Some(0) => format!("{} is a number from 1 on", all.0),
        Some(1) => format!("{} is 0 where there is one process", own.0),
        Some(n) => format!("{} is a number from 0 to {}", own.0, n - 1),
    };
    format!(
        "{}={}, {}={}: {should}\nhint: what launches several processes sets both; unset them to train alone",
        own.0, own.1, all.0, all.1
    )
}

/// The first node of a Slurm node list: `n[01-04,9],other` gives `n01`.
fn first_node(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let Some(inside) = rest.strip_prefix('[') else {
        return Some(name.to_string()).filter(|n| !n.is_empty());
    };
    let number = &inside[..inside.find([',', '-', ']'])?];
    let behind = inside.split_once(']')?.1;
    let behind = &behind[..behind.find(',').unwrap_or(behind.len())];
    Some(format!("{name}{number}{behind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str, mpi: bool) -> Result<Option<Launch>, String> {
        let all: Vec<_> = text.split_whitespace().filter_map(|w| w.split_once('=')).collect();
        Launch::detect(&|key| all.iter().find(|(k, _)| *k == key).map(|(_, v)| v.to_string()), mpi)
    }

    fn of(text: &str, mpi: bool) -> Option<Launch> {
        told(text, mpi).unwrap_or_else(|why| panic!("{text}: {why}"))
    }

    fn at(rank: usize, world: usize, local: Option<usize>, host: &str, port: u16) -> Option<Launch> {
        Some(Launch { rank, world, local, rendezvous: Rendezvous::At(host.into(), port) })
    }

    #[test]
    fn ranks_are_read_from_the_variables_of_launchers() {
        let torch = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=h MASTER_PORT=29500";
        assert_eq!(of(torch, false), at(3, 4, Some(1), "h", 29_500));
        let local = |here| of(&format!("{torch} LOCAL_WORLD_SIZE={here}"), false);
        assert_eq!(local(4), at(3, 4, Some(1), "127.0.0.1", 29_500));
        assert_eq!(local(2), at(3, 4, Some(1), "h", 29_500));
        let agent = format!(
            "{torch} TORCHELASTIC_USE_AGENT_STORE=True OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4"
        );
        assert_eq!(of(&agent, true), at(3, 4, Some(1), "h", 29_501));
        // The agent holds the last port, and none is above it.
        let last = of(&agent.replace("29500", "65535"), true);
        assert!(
            matches!(last, Some(Launch { rendezvous: Rendezvous::Nowhere(why), .. }) if why.contains("MASTER_PORT"))
        );
        assert_eq!(of(&torch.replace("29500", "65535"), false), at(3, 4, Some(1), "h", 65_535));
        assert_eq!(of("RANK=0 WORLD_SIZE=1 MASTER_ADDR=h MASTER_PORT=1", true), None);
        for half in [
            "",
            "MASTER_ADDR=h",
            "MASTER_PORT=7",
            "MASTER_ADDR=h MASTER_PORT=70000",
            "MASTER_ADDR=h MASTER_PORT=0",
        ] {
            let alone = of(&format!("RANK=0 WORLD_SIZE=2 {half}"), true);
            assert!(matches!(alone, Some(Launch { rendezvous: Rendezvous::Nowhere(_), .. })), "{half}");
        }
        let open = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1";
        let mpi = Launch { rank: 1, world: 2, local: Some(1), rendezvous: Rendezvous::Mpi };
        assert_eq!(of(open, true), Some(mpi));
        assert!(matches!(of(open, false), Some(Launch { rendezvous: Rendezvous::Nowhere(_), .. })));
        let slurm = "SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_ID=20003 SLURM_STEP_ID=1";
        // From the job script, outside of any step.
        assert_eq!(of(slurm, false), None);
        let step = format!("{slurm} SLURM_STEP_NODELIST=n[07-09],m1");
        assert_eq!(of(&step, false), at(2, 4, Some(0), "n07", 20_004));
        let here = format!("{step} SLURM_STEP_TASKS_PER_NODE=4");
        assert_eq!(of(&here, false), at(2, 4, Some(0), "127.0.0.1", 20_004));
        let both = format!("{step} SLURM_STEP_TASKS_PER_NODE=2(x2)");
        assert_eq!(of(&both, false), at(2, 4, Some(0), "n07", 20_004));
        let launched = format!("{slurm} SLURM_LAUNCH_NODE_IPADDR=10.0.0.1 MASTER_PORT=7");
        assert_eq!(of(&launched, false), at(2, 4, Some(0), "10.0.0.1", 7));
    }

    #[test]
    fn impossible_ranks_are_refused() {
        let step = "SLURM_STEP_NODELIST=n1";
        for (rank, world, beside) in [
            ("RANK", "WORLD_SIZE", ""),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
            ("PMI_RANK", "PMI_SIZE", ""),
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
            ("SLURM_PROCID", "SLURM_NTASKS", step),
        ] {
            for (own, all, says) in [
                ("4", "4", format!("{rank} is a number from 0 to 3")),
                ("-1", "2", format!("{rank} is a number from 0 to 1")),
                ("one", "2", format!("{rank} is a number from 0 to 1")),
                ("1", "1", format!("{rank} is 0 where there is one process")),
                ("0", "0", format!("{world} is a number from 1 on")),
                ("0", "two", format!("{world} is a number from 1 on")),
            ] {
                for mpi in [false, true] {
                    let why = told(&format!("{rank}={own} {world}={all} {beside}"), mpi).expect_err(own);
                    assert!(why.starts_with(&format!("{rank}={own}, {world}={all}: {says}\n")), "{why}");
                }
            }
            // Without a world size, the process is alone.
            assert_eq!(of(&format!("{rank}=3"), true), None);
            assert_eq!(of(&format!("{rank}=0 {world}=1 {beside}"), true), None);
        }
    }

    #[test]
    fn the_first_node_of_a_list_is_found() {
        for (list, first) in [
            ("a", "a"),
            ("a,b", "a"),
            ("a[3,5-7]", "a3"),
            ("a[01-04]-ib,b", "a01-ib"),
            ("gpu-1.x,gpu-2.x", "gpu-1.x"),
        ] {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_node(""), None);
        assert_eq!(first_node("a[1"), None);
    }
}
