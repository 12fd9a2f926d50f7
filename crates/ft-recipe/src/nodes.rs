//! Processes started by `ft run` itself: `parallel.local`, or the environment variables with the number of a pod.

use crate::keys::{Comm, Parallel, Recipe};
use crate::launch::{Environment, Launch};
use ft_base::terminal::plural;

/// Variables with the number of machines, and with this machine's number, in order of precedence.
const NODES: [(&str, &[&str]); 2] =
    [("PET_NNODES", &["PET_NODE_RANK", JOB_INDEX]), ("NNODES", &["NODE_RANK", "GROUP_RANK", JOB_INDEX])];
/// This pod's number in an indexed Job of Kubernetes.
const JOB_INDEX: &str = "JOB_COMPLETION_INDEX";
/// Rendezvous port of several machines without a variable for it, as torchrun's.
const PORT: u16 = 29_500;

/// Processes started by `ft run` on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// Rank of the first one.
    pub first: usize,
    /// Number of processes on this machine.
    pub local: usize,
    /// World size.
    pub world: usize,
    /// Host and port of rank 0; `None` for a free port of this machine.
    pub rendezvous: Option<(String, u16)>,
}

/// Why no processes can be started.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    /// Recipe key of the problem; `None` for an environment variable.
    pub key: Option<&'static str>,
    /// Reason, with a hint on the last line.
    pub why: String,
}

impl Start {
    /// The recipe's processes on this machine; `None` if this process runs by itself, or a launcher started it.
    ///
    /// # Errors
    /// `parallel.local` against the launcher, the number of ranks or `parallel.comm`; incomplete variables of a pod.
    pub fn of(recipe: &Recipe) -> Result<Option<Self>, Refused> {
        let launch = Launch::of_env();
        Self::detect(recipe, &|key| std::env::var(key).ok().filter(|v| !v.is_empty()), launch.as_ref())
    }

    fn detect(
        recipe: &Recipe,
        said: &dyn Fn(&str) -> Option<String>,
        launch: Option<&Launch>,
    ) -> Result<Option<Self>, Refused> {
        let env = Environment(said);
        let p = &recipe.parallel;
        let by_key = |why: String| Refused { key: Some("parallel.local"), why };
        let nodes = env.nodes(launch).map_err(|why| Refused { key: None, why })?;
        if let (Some(_), None, Some(local)) = (launch, &nodes, p.local) {
            return match env.of_machine() {
                Some(n) if n != local => Err(by_key(format!(
                    "parallel.local = {local}, and the launcher started {n} processes on this machine\n  hint: leave \
                        parallel.local out, or the launcher"
                ))),
                _ => Ok(None),
            };
        }
        let count = nodes.as_ref().map_or(1, |n| n.count);
        let variable = nodes.as_ref().and_then(|n| n.local);
        let ranks = match (recipe.auto_layout, variable, &nodes) {
            // the processes choose the layout
            (true, Some(local), _) => local.max(1).saturating_mul(count),
            (true, None, Some(nodes)) if count > 1 => {
                return Err(Refused { key: None, why: nodes.no_local() });
            }
            _ => usize::try_from(p.ranks()).unwrap_or(usize::MAX),
        };
        let local = match (p.local, variable) {
            (None, None) if count == 1 => return Ok(None),
            (None, None) => ranks / count,
            (key, variable) => key.or(variable).unwrap_or(1),
        };
        if local.checked_mul(count) != Some(ranks) {
            return Err(uneven(p, ranks, count, local, nodes.as_ref()));
        }
        let unlike = match p.comm {
            Comm::Threads => Some(("threads", "the ranks of one process")),
            Comm::Mpi => Some(("mpi", "processes that mpirun starts")),
            Comm::Auto | Comm::Nccl => None,
        };
        if ranks == 1 {
            return Ok(None);
        }
        if let Some((word, whose)) = unlike {
            let why = format!(
                "parallel.comm = \"{word}\" is for {whose}, and `ft run` starts {local} here\n  hint: leave \
                    parallel.comm out"
            );
            return Err(Refused { key: Some("parallel.comm"), why });
        }
        let first = nodes.as_ref().map_or(0, |n| n.rank * local);
        let rendezvous = match nodes.filter(|n| n.count > 1) {
            Some(nodes) => {
                let unknown = || Refused { key: None, why: nodes.no_address() };
                Some(nodes.rendezvous.clone().ok_or_else(unknown)?)
            }
            None => env.port("MASTER_PORT").map(|port| (Launch::LOOPBACK.to_string(), port)),
        };
        Ok(Some(Self { first, local, world: ranks, rendezvous }))
    }
}

/// The refusal of a number of processes other than the recipe's ranks.
fn uneven(p: &Parallel, ranks: usize, count: usize, local: usize, nodes: Option<&Nodes>) -> Refused {
    let (place, alone) = match nodes.filter(|_| count > 1) {
        Some(Nodes { variable, .. }) => {
            (format!("{variable}={count}"), format!(", or unset {variable} to train alone"))
        }
        None => ("one machine".into(), String::new()),
    };
    let has = plural(ranks, "rank");
    let processes = if local * count == 1 { "1 process" } else { &format!("{} processes", local * count) };
    let by_key = p.local.is_some();
    let hint = match (by_key, ranks.is_multiple_of(count) && ranks > 1) {
        (true, true) => format!("parallel.local={}", ranks / count),
        (_, true) => format!("parallel.local={}, or {}", ranks / count, p.of_ranks(local * count)),
        (_, false) => p.of_ranks(local.max(1) * count),
    };
    let why = format!("the recipe has {has}, and {place} has {processes}\n  hint: {hint}{alone}");
    Refused { key: by_key.then_some("parallel.local"), why }
}

/// Machines of a run, one process a machine so far.
struct Nodes {
    /// Variable with their number.
    variable: &'static str,
    count: usize,
    rank: usize,
    /// Processes of a machine, if a variable has them.
    local: Option<usize>,
    rendezvous: Option<(String, u16)>,
}

impl Nodes {
    fn no_address(&self) -> String {
        let prefix = if self.variable == NODES[0].0 { "PET_MASTER_ADDR or " } else { "" };
        format!(
            "{}={}, and {prefix}MASTER_ADDR is not set\n  hint: MASTER_ADDR, the host of machine 0",
            self.variable, self.count
        )
    }

    fn no_local(&self) -> String {
        let Self { variable, count, .. } = self;
        format!(
            "{variable}={count}, and parallel = \"auto\" needs the number of processes of a machine\n  hint: set \
                NPROC_PER_NODE to its number of GPUs"
        )
    }
}

impl Environment<'_> {
    /// The machines of a pod's variables; `None` under a launcher of all processes.
    fn nodes(&self, launch: Option<&Launch>) -> Result<Option<Nodes>, String> {
        // torchrun and srun number the processes of a machine. Kubeflow sets RANK to the pod's number.
        let processes = launch.is_some_and(|l| l.local.is_some()) || self.0("LOCAL_RANK").is_some();
        let found = NODES.iter().find(|(count, _)| self.0(count).is_some());
        let Some((variable, ranks)) = found.filter(|_| !processes) else { return Ok(None) };
        if launch.is_some() && *variable != NODES[0].0 {
            return Ok(None);
        }
        let text = self.0(variable).unwrap_or_default();
        let count = self.number(variable).filter(|n| *n > 0).ok_or_else(|| {
            let hint = "ranges (elastic jobs) are not supported";
            format!("{variable}={text}: a number of machines from 1 on\n  hint: {hint}")
        })?;
        let rank = match ranks.iter().find(|r| self.0(r).is_some()) {
            Some(name) => self.number(name).filter(|r| *r < count).ok_or_else(|| {
                let text = self.0(name).unwrap_or_default();
                let most = count - 1;
                let is = format!("{name} is a number from 0 to {most}");
                format!("{name}={text}, {variable}={count}: {is}\n  hint: a number for each machine")
            })?,
            None if count == 1 => 0,
            None => {
                let names = ranks.join(", ");
                return Err(format!(
                    "{variable}={count}, and this machine has no number\n  hint: set one of {names}"
                ));
            }
        };
        let local = ["PET_NPROC_PER_NODE", "NPROC_PER_NODE"].iter().find_map(|k| self.number(k));
        let host = self.0("PET_MASTER_ADDR").or_else(|| self.0("MASTER_ADDR"));
        let port = self.port("PET_MASTER_PORT").or_else(|| self.port("MASTER_PORT")).unwrap_or(PORT);
        Ok(Some(Nodes { variable, count, rank, local, rendezvous: host.map(|host| (host, port)) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::Rendezvous;

    fn start(set: &[&str], text: &str, launch: Option<&Launch>) -> Result<Option<Start>, Refused> {
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let recipe = Recipe::parse(crate::SHIPPED[0].text, "r.toml", &set).unwrap_or_else(|e| panic!("{e}"));
        let all: Vec<_> = text.split_whitespace().filter_map(|w| w.split_once('=')).collect();
        let said = |key: &str| all.iter().find(|(k, _)| *k == key).map(|(_, v)| v.to_string());
        Start::detect(&recipe, &said, launch)
    }

    fn found(set: &[&str], text: &str) -> Option<Start> {
        start(set, text, None).unwrap_or_else(|e| panic!("{text}: {}", e.why))
    }

    const FOUR: &[&str] = &["parallel.data=4", "run.batch_rows=8", "run.micro_rows=1"];

    #[test]
    fn a_machine_starts_its_part_of_the_ranks() {
        let at = |first, local, host: &str, port| {
            Some(Start { first, local, world: 4, rendezvous: Some((host.into(), port)) })
        };
        for text in ["", "NNODES=1", "PET_NNODES=1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=auto"] {
            assert_eq!(found(FOUR, text), None, "{text}");
        }
        let here = [FOUR, &["parallel.local=4"]].concat();
        assert_eq!(found(&here, ""), Some(Start { first: 0, local: 4, world: 4, rendezvous: None }));
        assert_eq!(found(&here, "MASTER_PORT=7"), at(0, 4, "127.0.0.1", 7));
        assert_eq!(found(FOUR, "PET_NNODES=1 PET_NPROC_PER_NODE=4").map(|s| s.local), Some(4));
        let two = [
            "NNODES=2 NODE_RANK=1 MASTER_ADDR=h MASTER_PORT=7",
            "NNODES=2 JOB_COMPLETION_INDEX=1 MASTER_ADDR=h MASTER_PORT=7",
            "PET_NNODES=2 PET_NODE_RANK=1 PET_MASTER_ADDR=h PET_MASTER_PORT=7 MASTER_ADDR=x",
            "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=2 MASTER_ADDR=h MASTER_PORT=7 RANK=1 WORLD_SIZE=2",
        ];
        for text in two {
            assert_eq!(found(FOUR, text), at(2, 2, "h", 7), "{text}");
        }
        assert_eq!(found(FOUR, "NNODES=4 NODE_RANK=3 MASTER_ADDR=h"), at(3, 1, "h", PORT));
        // a layout for all processes
        let auto = "NNODES=2 NODE_RANK=1 MASTER_ADDR=h NPROC_PER_NODE=2";
        assert_eq!(found(&["parallel=auto"], auto), at(2, 2, "h", PORT));
        assert_eq!(found(&["parallel=auto"], "NNODES=1 NPROC_PER_NODE=4").map(|s| s.world), Some(4));
        assert_eq!(found(&["parallel=auto"], "NNODES=1"), None);
    }

    #[test]
    fn a_launcher_of_all_processes_goes_first() {
        let launch = |local| Launch { rank: 1, world: 4, local, rendezvous: Rendezvous::At("h".into(), 7) };
        let pod = "PET_NNODES=2 PET_NODE_RANK=1 MASTER_ADDR=h";
        let under = |set: &[&str], text: &str, local| start(set, text, Some(&launch(local)));
        assert_eq!(under(FOUR, &format!("{pod} LOCAL_RANK=1"), Some(1)), Ok(None));
        assert_eq!(under(FOUR, "NNODES=2 NODE_RANK=1 RANK=1 WORLD_SIZE=4", None), Ok(None));
        let local = [FOUR, &["parallel.local=4"]].concat();
        assert_eq!(under(&local, "LOCAL_WORLD_SIZE=4", Some(1)), Ok(None));
        let e = under(&local, "LOCAL_WORLD_SIZE=2", Some(1)).expect_err("refused");
        assert!(e.key == Some("parallel.local") && e.why.contains("started 2 processes"), "{}", e.why);
    }

    #[test]
    fn impossible_numbers_of_processes_are_refused() {
        let one = "NODE_RANK=0 MASTER_ADDR=h";
        for (set, text, key, says) in [
            (
                &["parallel.local=2"][..],
                "",
                Some("parallel.local"),
                "4 ranks, and one machine has 2 processes\n  hint: parallel.local=4",
            ),
            (
                &[],
                "NNODES=3 NODE_RANK=0 MASTER_ADDR=h",
                None,
                "4 ranks, and NNODES=3 has 3 processes\n  hint: parallel.data=3, or unset NNODES",
            ),
            (
                &["parallel.data=1"],
                "NNODES=2 NODE_RANK=0 MASTER_ADDR=h",
                None,
                "1 rank, and NNODES=2 has 0 processes\n  hint: parallel.data=2",
            ),
            (
                &["parallel.local=4", "parallel.comm=threads"],
                "",
                Some("parallel.comm"),
                "the ranks of one process",
            ),
            (
                &["parallel.data=1", "parallel.pipeline=4"],
                "NNODES=3 NODE_RANK=0 MASTER_ADDR=h",
                None,
                "4 ranks, and NNODES=3 has 3 processes\n  hint: another layout in [parallel], or parallel=auto, or",
            ),
            (&[], "NNODES=1:4 NODE_RANK=0", None, "NNODES=1:4: a number of machines"),
            (
                &[],
                "NNODES=2 MASTER_ADDR=h",
                None,
                "no number\n  hint: set one of NODE_RANK, GROUP_RANK, JOB_COMPLETION_INDEX",
            ),
            (&[], "NNODES=2 NODE_RANK=2 MASTER_ADDR=h", None, "NODE_RANK is a number from 0 to 1"),
            (&[], "PET_NNODES=2 PET_NODE_RANK=0", None, "PET_MASTER_ADDR or MASTER_ADDR is not set"),
        ] {
            let given = |line: &&&str| set.iter().any(|s| s.split('=').next() == line.split('=').next());
            let four: Vec<&str> = FOUR.iter().filter(|line| !given(line)).copied().collect();
            let e = start(&[&four, set].concat(), text, None).expect_err(text);
            assert!(e.key == key && e.why.contains(says), "{one} {text}: {e:?}");
        }
        let e = start(&["parallel=auto"], &format!("NNODES=2 {one}"), None).expect_err("no number");
        assert!(e.key.is_none() && e.why.contains("hint: set NPROC_PER_NODE"), "{e:?}");
        assert!(start(&["parallel=auto"], "NNODES=1 NPROC_PER_NODE=0", None).is_err());
    }
}
