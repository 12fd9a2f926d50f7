//! Processes that `ft run` starts itself: `parallel.local`, and the variables of pods.

use crate::split::{self, all, ends, rendezvous};
use crate::world::{FULL, Ran, World, ran};
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Child, Stdio};

const OWN: [&str; 4] = ["run", "r.toml", "parallel.data=2", "parallel.local=2"];

fn start(w: &World, args: &[&str], env: &[(&str, &str)]) -> Child {
    let mut c = w.command(args);
    c.envs(env.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started")
}

/// Children of a process that starts them on one thread, in the order of their start.
fn children(parent: u32) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).expect("tasks").flatten();
    let lists = tasks.filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    let numbers = lists.flat_map(|l| l.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<_>>());
    numbers.filter_map(Pid::from_raw).collect()
}

/// A long run with a checkpoint, and its processes.
fn long(w: &World, name: &str) -> (Child, Vec<Pid>) {
    let output = format!("run.output={name}");
    let set = [output.as_str(), "run.save_every=2", "run.epochs=4000", "parallel.zero=2"];
    let mut child = start(w, &[&OWN[..], &set].concat(), &[]);
    split::wait_for_a_checkpoint(w, name, std::slice::from_mut(&mut child));
    let ranks = children(child.id());
    assert_eq!(ranks.len(), 2);
    (child, ranks)
}

fn end(child: Child) -> Ran {
    ran(child.wait_with_output().expect("an end"))
}

#[test]
fn processes_of_its_own_have_the_bits_of_threads() {
    let w = split::world(FULL);
    w.ok(&["run", "r.toml", "parallel.data=2", "run.output=threads"]);
    let r = w.ok(&[&OWN[..], &["run.output=local", "parallel.zero=3"]].concat());
    assert!(ends(&w, "local") == ends(&w, "threads"));
    assert!(w.path("local/rank-1.log").is_file());
    assert_eq!(r.out.lines().count(), 1, "{}", r.out);
    assert!(r.out.trim_end().ends_with("local/model"), "{}", r.out);
}

/// Four ranks on two "machines": loopback addresses, and the variables of each kind of pod.
#[test]
fn pods_meet_by_their_numbers() {
    let w = split::world(FULL);
    w.ok(&["run", "r.toml", "parallel.data=4", "run.output=threads"]);
    let want = ends(&w, "threads");
    for [nodes, number, host, port] in [
        ["NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"],
        ["NNODES", "JOB_COMPLETION_INDEX", "MASTER_ADDR", "MASTER_PORT"],
        ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"],
    ] {
        let (at, output) = (rendezvous(), format!("run.output={number}"));
        let pod = |n| {
            let env = [(nodes, "2"), (number, n), (host, &at.0), (port, &at.1)];
            start(&w, &["run", "r.toml", "parallel.data=4", &output], &env)
        };
        for (n, r) in all(vec![pod("0"), pod("1")]).iter().enumerate() {
            assert_eq!(r.code, 0, "{number}: machine {n}: {}", r.err);
            assert!(n == 0 || r.err.is_empty() && r.out.is_empty(), "machine 1 speaks: {}", r.err);
        }
        assert!(ends(&w, number) == want, "{number}");
        assert!(w.path(number).join("rank-3.log").is_file());
    }
}

/// Kubeflow counts pods in RANK and WORLD_SIZE.
#[test]
fn kubeflow_variables_count_pods_and_not_ranks() {
    let w = split::world(FULL);
    let at = rendezvous();
    let pod = |n| {
        let env = [
            ("PET_NNODES", "2"),
            ("PET_NODE_RANK", n),
            ("PET_NPROC_PER_NODE", "2"),
            ("RANK", n),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", &at.0),
            ("MASTER_PORT", &at.1),
        ];
        start(&w, &["run", "r.toml", "parallel.data=4", "run.output=pods", "run.epochs=1"], &env)
    };
    for r in all(vec![pod("0"), pod("1")]) {
        assert_eq!(r.code, 0, "{}", r.err);
    }
    assert!(w.path("pods/rank-3.log").is_file());
}

/// The processes of a pod choose one layout.
#[test]
fn a_pod_takes_the_fastest_layout() {
    let w = split::world(FULL);
    let pod = [("NNODES", "1"), ("NPROC_PER_NODE", "2")];
    let checked = end(start(&w, &["check", "r.toml", "parallel=auto"], &pod));
    assert_eq!(checked.code, 0, "{}", checked.err);
    let r = end(start(&w, &["run", "r.toml", "parallel=auto", "run.output=pod", "run.epochs=1"], &pod));
    assert!(r.code == 0 && r.err.contains("parallel = \"auto\" is parallel."), "{}", r.err);
    assert!(w.path("pod/rank-1.log").is_file());
}

#[test]
fn a_lost_process_is_named() {
    let w = split::world(FULL);
    for lost in [1, 0] {
        let (child, ranks) = long(&w, &format!("lost-{lost}"));
        kill_process(ranks[lost], Signal::KILL).expect("killed");
        let r = end(child);
        assert_eq!(r.code, 7, "{}", r.err);
        let by = format!("error: rank {lost} of 2: its process was ended by signal 9\nhint: ");
        assert!(r.err.contains(&by), "{}", r.err);
        assert!(
            r.err.contains("its process is gone") && r.err.contains("its last collective: "),
            "{}",
            r.err
        );
    }
}

#[test]
fn a_signal_goes_to_all_processes() {
    let w = split::world(FULL);
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::USR1, 138)] {
        let name = format!("told-{code}");
        let (child, _) = long(&w, &name);
        kill_process(Pid::from_raw(child.id() as i32).expect("a number"), signal).expect("signalled");
        let r = end(child);
        assert!(r.code == code && r.err.contains("a checkpoint is written"), "{}: {}", r.code, r.err);
        assert_eq!(w.events(&name, "stopped")[0]["code"], code);
    }
}

/// A signal to a control group reaches the launcher, which passes it on, and each process by itself.
#[test]
fn a_signal_to_launcher_and_processes_counts_once() {
    let w = split::world(FULL);
    for (name, launcher_first) in [("launcher", true), ("processes", false)] {
        let (child, mut all) = long(&w, name);
        all.push(Pid::from_raw(child.id() as i32).expect("a number"));
        if launcher_first {
            all.reverse();
        }
        for pid in all {
            kill_process(pid, Signal::TERM).expect("signalled");
        }
        let r = end(child);
        assert!(r.code == 143 && r.err.contains("a checkpoint is written"), "{}: {}", r.code, r.err);
        let last = w.events(name, "step").pop().expect("a step")["step"].as_u64().expect("a number");
        assert_eq!(w.events(name, "stopped")[0]["step"].as_u64(), Some(last));
        assert_eq!(w.checkpoints(name).pop().expect("a checkpoint"), format!("step-{last:08}"));
    }
}

/// Whether a process has ended; process 1 may leave it as a zombie.
fn is_gone(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, state)| state.starts_with('Z'))
}

/// Whether all threads of a process are stopped.
fn is_stopped(pid: Pid) -> bool {
    let mut tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("tasks").flatten();
    let stat = |t: std::fs::DirEntry| std::fs::read_to_string(t.path().join("stat")).unwrap_or_default();
    tasks.all(|t| stat(t).rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T')))
}

/// Signals that a process has not yet taken from the pipe of its launcher.
fn passed(pid: Pid) -> u64 {
    let pipe = std::fs::File::open(format!("/proc/{pid}/fd/0")).expect("a pipe");
    rustix::io::ioctl_fionread(pipe).expect("a number of bytes")
}

/// The first signal cannot end the run: its checkpoint needs a stopped process. The second one ends all.
#[test]
fn a_second_signal_to_the_launcher_ends_all_at_once() {
    let w = split::world(FULL);
    let set = ["run.output=twice", "run.save_every=0", "run.epochs=4000", "parallel.zero=2"];
    let mut child = start(&w, &[&OWN[..], &set].concat(), &[]);
    let id = child.id();
    let launcher = Pid::from_raw(id as i32).expect("a number");
    let started = std::slice::from_mut(&mut child);
    split::wait_until(started, "step", || !w.events("twice", "step").is_empty());
    let ranks = children(id);
    assert_eq!(ranks.len(), 2);
    kill_process(ranks[1], Signal::STOP).expect("stopped");
    split::wait_until(started, "stop", || is_stopped(ranks[1]));
    kill_process(launcher, Signal::TERM).expect("signalled");
    // passed to rank 0 before
    split::wait_until(started, "first signal", || passed(ranks[1]) == 1);
    assert!(!is_gone(ranks[0]));
    // copies of the first signal do not count
    split::wait_until(started, "end of rank 0", || {
        kill_process(launcher, Signal::TERM).expect("signalled");
        is_gone(ranks[0])
    });
    // after 30 s, the launcher has ended it
    let _ = kill_process(ranks[1], Signal::CONT);
    let r = end(child);
    assert!(r.code == 143 && !r.err.contains("a checkpoint is written"), "{}: {}", r.code, r.err);
    assert!(w.events("twice", "stopped").is_empty() && w.checkpoints("twice").is_empty());
    assert!(ranks.into_iter().all(is_gone));
}

/// The ranks have their key from the launcher, and need no folder for it.
#[test]
fn processes_meet_without_a_cache_folder() {
    let w = split::world(FULL);
    let below_a_file = w.path("r.toml").join("cache").display().to_string();
    let args = [&OWN[..], &["run.output=met", "run.epochs=1"]].concat();
    let r = end(start(&w, &args, &[("FT_CACHE", &below_a_file)]));
    assert_eq!(r.code, 0, "{}", r.err);
}

/// Processes do not outlive the one that started them.
#[test]
fn processes_end_with_the_one_that_started_them() {
    let w = split::world(FULL);
    let (mut child, ranks) = long(&w, "orphans");
    child.kill().and_then(|()| child.wait()).expect("gone");
    for pid in ranks {
        split::wait_until(&mut [], "end", || is_gone(pid));
    }
    assert_eq!(w.events("orphans", "stopped")[0]["code"], 143);
}

#[test]
fn processes_that_cannot_be_started_are_refused() {
    let w = split::world(FULL);
    for (set, env, says) in [
        (&["parallel.data=4"][..], None, "the recipe has 4 ranks, and one machine has 2 processes"),
        (
            &["parallel.data=2", "parallel.comm=threads"],
            None,
            "parallel.comm = \"threads\" is for the ranks of one process",
        ),
        (&["parallel.data=2"], Some(("NNODES", "2:4")), "NNODES=2:4: a number of machines from 1 on"),
    ] {
        let args = ["run", "r.toml", "parallel.local=2", "run.output=none"];
        let r = end(start(&w, &[&args[..], set].concat(), &env.into_iter().collect::<Vec<_>>()));
        assert!(r.code == 2 && r.err.contains("hint: "), "{}", r.err);
        assert!(r.err.contains(says), "{says}: {}", r.err);
        assert_eq!(r.err.matches("error: ").count(), 1, "{}", r.err);
    }
    // The number of a launcher goes first.
    let env = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "4")];
    let at = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    let args = ["run", "r.toml", "parallel.data=4", "parallel.local=2", "run.output=none"];
    let r = end(start(&w, &args, &[&env[..], &at].concat()));
    assert!(r.code == 2 && r.err.contains("the launcher started 4 processes"), "{}", r.err);
    assert!(!w.path("none").exists());
}
