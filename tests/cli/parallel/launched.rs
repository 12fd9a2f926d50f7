//! Ranks as processes of a launcher that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`,
//! without MPI.

use crate::split::{self, CASES, all, ends, launch, launch_at, rendezvous, wait_until};
use crate::world::{FULL, World};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, Write};
use std::net::{TcpListener, TcpStream};

fn run<'a>(own: &'a [String; 2], set: &[&'a str]) -> Vec<&'a str> {
    [&["run", "r.toml", &own[0], &own[1]], set].concat()
}

fn own(run: &str, ranks: usize) -> [String; 2] {
    [format!("run.output={run}"), format!("parallel.data={ranks}")]
}

/// Runs several processes and returns their outcomes.
#[track_caller]
fn bits(w: &World, ranks: usize, name: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let numbers: Vec<usize> = (0..ranks).collect();
    for (rank, r) in all(launch(w, &numbers, ranks, &run(&own(name, ranks), set))).iter().enumerate() {
        assert_eq!(r.code, 0, "{set:?}: rank {rank} of {ranks}: {}", r.err);
        assert!(rank == 0 || r.err.is_empty(), "rank {rank} speaks: {}", r.err);
    }
    ends(w, name)
}

#[test]
fn processes_have_the_bits_of_threads() {
    for (rules, set) in CASES {
        let w = split::world(rules);
        w.ok(&run(&own("threads", 2), set));
        let want = ends(&w, "threads");
        for (ranks, zero) in [(2, 0), (2, 3), (4, 1), (4, 2)] {
            let zero = format!("parallel.zero={zero}");
            let got = bits(&w, ranks, &format!("run-{ranks}"), &[set, &[&zero, "--overwrite"]].concat());
            assert!(got == want, "{set:?}: {ranks} processes, {zero}");
        }
        let wire = |run: &str| w.events(run, "step")[0]["wire_bytes"].clone();
        assert!(wire("run-2").as_u64() > Some(0));
        assert!(w.path("run-4/rank-3.log").is_file());
    }
}

/// The death of one process ends all other processes at once, before the timeout, with an error that names
/// it. The run resumes from the last checkpoint.
#[test]
fn a_process_that_dies_ends_all() {
    let w = split::world(FULL);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    for (signal, lost, says, timeout) in [
        (Signal::KILL, 2, "its process is gone", "parallel.timeout=600"),
        (Signal::KILL, 0, "its process is gone", "parallel.timeout=600"),
        (Signal::STOP, 1, "within 20 s", "parallel.timeout=20"),
    ] {
        let name = format!("lost-{}-{lost}", signal.as_raw());
        let long = ["parallel.zero=3", timeout, "run.save_every=2", "run.epochs=4000"];
        let mut processes = launch(&w, &[0, 1, 2, 3], 4, &run(&own(&name, 4), &long));
        split::wait_for_a_checkpoint(&w, &name, &mut processes);
        let pid = |rank: usize| Pid::from_raw(processes[rank].id() as i32).expect("a number");
        kill_process(pid(lost), signal).expect("signalled");
        let mut said = Vec::new();
        for (rank, p) in processes.into_iter().enumerate() {
            if rank == lost && signal == Signal::STOP {
                // The other processes have already ended.
                said.push(p);
                continue;
            }
            let r = crate::world::ran(p.wait_with_output().expect("an end"));
            assert!(rank == lost || r.code == 7, "rank {rank}: {}: {}", r.code, r.err);
            let log = if rank == 0 {
                r.err
            } else {
                let log = String::from_utf8_lossy(&w.read(&format!("{name}/rank-{rank}.log"))).into_owned();
                log + &r.err
            };
            for words in [&*format!("rank {lost} of 4 on {host}: "), says, "its last collective: "] {
                assert!(rank == lost || log.contains(words), "rank {rank}: {words:?} is not in {log}");
            }
        }
        for mut p in said {
            p.kill().and_then(|()| p.wait()).expect("gone");
        }
        let again = ["--resume", "parallel.zero=1", "run.epochs=4000", "run.save_every=2"];
        let steps = w.events(&name, "step").len();
        let mut child = w.start(&run(&own(&name, 2), &again));
        wait_until(std::slice::from_mut(&mut child), "further step", || {
            w.events(&name, "step").len() > steps + 2
        });
        child.kill().and_then(|()| child.wait()).expect("gone");
    }
}

/// A signal to any process stops all, after a checkpoint. A preempted machine only signals its own
/// processes.
#[test]
fn a_signal_to_any_process_stops_all() {
    let w = split::world(FULL);
    // The total number of steps does not affect earlier steps.
    let set = ["run.save_every=0", "optimizer.schedule=constant", "optimizer.warmup_steps=0"];
    let long = [&set[..], &["run.epochs=4000", "parallel.zero=2"]].concat();
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let name = format!("told-{code}");
        let mut processes = launch(&w, &[0, 1], 2, &run(&own(&name, 2), &long));
        wait_until(&mut processes, "step", || !w.events(&name, "step").is_empty());
        kill_process(Pid::from_raw(processes[1].id() as i32).expect("a number"), signal).expect("signalled");
        let ended = all(processes);
        assert_eq!(ended[0].code, code, "{}", ended[0].err);
        assert!(ended[0].err.contains("a checkpoint is written"), "{}", ended[0].err);
        assert_eq!(w.events(&name, "stopped")[0]["code"], code);
        let steps = w.events(&name, "step").len();
        assert_eq!(w.checkpoints(&name), [format!("step-{steps:08}")]);
        // The abandoned step is repeated in full.
        let epochs = format!("run.epochs={}", steps / 10 + 2);
        w.ok(&run(&own("whole", 2), &[&set[..], &[&epochs, "--overwrite"]].concat()));
        let resume = ["--resume", "--accept-change", "run.epochs", &epochs];
        w.ok(&run(&own(&name, 2), &[&set[..], &resume].concat()));
        assert!(ends(&w, &name) == ends(&w, "whole"), "{steps} steps");
    }
}

/// A process waiting for others at the start names the missing ranks.
#[test]
fn a_start_names_the_ranks_it_waits_for() {
    let w = split::world(FULL);
    for (rank, says) in [(0, "ranks {1} have not come to 127."), (1, "it does not reach 127.")] {
        let mut alone = launch(&w, &[rank], 2, &run(&own("alone", 2), &[]));
        let mut line = String::new();
        let err = alone[0].stderr.take().expect("a pipe");
        std::io::BufReader::new(err).read_line(&mut line).expect("a line");
        alone[0].kill().and_then(|()| alone[0].wait()).expect("gone");
        assert!(line.contains(says) && line.contains("it waits for "), "{line}");
    }
}

#[test]
fn incompatible_settings_of_launched_processes_are_refused() {
    let w = split::world(FULL);
    let both =
        |name: &str, ranks: usize, set: &[&str]| all(launch(&w, &[0, 1], 2, &run(&own(name, ranks), set)));
    let said = |all: &[crate::world::Ran], code: i32, words: &str| {
        assert!(all.iter().all(|r| r.code == code), "{}{}", all[0].err, all[1].err);
        assert_eq!(all[0].err.matches("error: ").count(), 1, "{}", all[0].err);
        assert!(all[0].err.contains(words), "{}", all[0].err);
    };
    said(&both("bad", 2, &["parallel.comm=threads"]), 2, "is for the ranks of one");
    said(&both("bad", 3, &["run.batch_rows=6"]), 2, "parallel.data=2");
    said(&both("bad", 2, &["parallel.tensor=2"]), 2, "(mpirun -n 4), or parallel.data=1");
    let one = both("bad", 1, &[]);
    said(&one, 2, "the recipe has 1 rank, and 2 processes were started");
    said(&one, 2, "hint: no launcher, or parallel.data=2");
    said(&both("bad", 1, &["parallel.tensor=4"]), 2, "(mpirun -n 4), or another layout");
    said(&both("bad", 2, &["parallel.comm=nccl"]), 2, "is for CUDA devices");
    said(&both("bad", 2, &["data.train.0.source=none.jsonl"]), 3, "none.jsonl");
    assert!(!w.path("bad/model").exists());
    let alone = w.ft(&["run", "r.toml", "run.output=bad", "parallel.comm=nccl"]);
    assert!(alone.code == 2 && alone.err.contains("is for CUDA devices"), "{}", alone.err);
}

/// A rank outside the world is refused. The process would otherwise train alone.
#[test]
fn a_rank_outside_the_world_is_refused() {
    let w = split::world(FULL);
    let env = [("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")];
    for own in ["2", "-1", "one"] {
        let mut c = w.command(&["run", "r.toml", "run.output=none"]);
        c.env("RANK", own).env("WORLD_SIZE", "2").envs(env);
        let r = crate::world::ran(c.output().expect("started"));
        assert!(r.code == 2 && r.err.contains(&format!("RANK={own}, WORLD_SIZE=2: ")), "{}", r.err);
        assert!(!w.path("none").exists());
    }
}

/// The first rank of each machine reports a recipe that its machine lacks; every rank if ranks of machines are not
/// known.
#[test]
fn a_machine_without_the_recipe_says_so() {
    let w = split::world(FULL);
    for (local, speaks) in [("0", true), ("1", false), ("", true)] {
        let variables = |_| vec![("LOCAL_RANK", local)];
        let args = ["run", "none.toml", "run.output=none"];
        let ended = all(launch_at(&w, &rendezvous(), (&[2], 4), &args, &variables));
        assert_eq!((ended[0].code, ended[0].err.contains("none.toml")), (2, speaks), "{}", ended[0].err);
    }
}

/// Strangers at the rendezvous port are dropped and reported, whatever they send or leave out.
#[test]
fn strangers_at_the_port_are_dropped() {
    let w = split::world(FULL);
    let at = rendezvous();
    let args = own("met", 2);
    let args = run(&args, &["run.epochs=1"]);
    let mut first = launch_at(&w, &at, (&[0], 2), &args, &|_| Vec::new());
    let address = format!("{}:{}", at.0, at.1);
    let mut connect = || {
        let mut stream = None;
        wait_until(&mut first, "listener", || {
            stream = TcpStream::connect(&address).ok();
            stream.is_some()
        });
        stream.expect("a connection")
    };
    let says: [&[u8]; 4] = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x40\0\0\0{\"Register\":{\"rank\":1000000000000000000",
        &u64::MAX.to_le_bytes(),
    ];
    let mut strangers: Vec<TcpStream> = says
        .iter()
        .cycle()
        .take(100)
        .map(|says| {
            let mut stranger = connect();
            let _ = stranger.write_all(says);
            stranger
        })
        .collect();
    let second = launch_at(&w, &at, (&[1], 2), &args, &|_| Vec::new());
    let ended = all(first.into_iter().chain(second).collect());
    for (rank, r) in ended.iter().enumerate() {
        assert_eq!(r.code, 0, "rank {rank}: {}", r.err);
    }
    let said =
        ended[0].err.split_once(" connections without the key of this run were dropped, the first from 127.");
    let dropped: Option<u32> =
        said.and_then(|(before, _)| before.split_whitespace().next_back()?.parse().ok());
    assert!(dropped >= Some(100), "{}", ended[0].err);
    strangers.clear();
    // The key is of no use any more.
    assert_eq!(std::fs::read_dir(w.path("cache/ranks")).map_or(0, Iterator::count), 0);
}

/// Several machines meet with `FT_KEY` only. The address of no machine in particular is none of loopback.
#[test]
fn several_machines_need_a_key() {
    let w = split::world(FULL);
    let launch = |name: &str, keys: [&'static str; 2]| {
        // Below the ports that the system chooses, and above those of services.
        let mut ports = 10_000 + (std::process::id() % 10_000) as u16..;
        let port = ports.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).expect("a free port");
        let at = ("0.0.0.0".to_string(), port.to_string());
        let args = own(name, 2);
        let variables = |rank: usize| vec![("FT_KEY", keys[rank])];
        launch_at(&w, &at, (&[0, 1], 2), &run(&args, &["run.epochs=1"]), &variables)
    };
    let (key, other) = ("0123456789abcdef", "0123456789abcdee");
    for r in all(launch("met", [key, key])) {
        assert_eq!(r.code, 0, "{}", r.err);
    }
    for (keys, says) in [
        (["", ""], "ranks on several machines meet with a key, and FT_KEY is not set"),
        (["short", "short"], "FT_KEY has fewer than 16 characters"),
    ] {
        for r in all(launch("none", keys)) {
            assert!(r.code == 2 && r.err.contains(says) && r.err.contains("openssl rand"), "{}", r.err);
        }
    }
    // Rank 0 goes on waiting for a rank with its key.
    let [mut waits, refused] = launch("other", [key, other]).try_into().expect("two");
    let r = crate::world::ran(refused.wait_with_output().expect("an end"));
    waits.kill().and_then(|()| waits.wait()).expect("gone");
    assert!(r.code == 7 && r.err.contains("who listens there has another key"), "{}", r.err);
    assert!(r.err.contains("hint: ") && r.err.contains("FT_KEY"), "{}", r.err);
    assert!(!w.path("other").exists() && !w.path("none").exists());
}

/// Another program has the port: every rank ends, and says so.
#[test]
fn a_port_in_use_ends_every_rank() {
    let w = split::world(FULL);
    let at = rendezvous();
    let _other = TcpListener::bind(format!("{}:{}", at.0, at.1)).expect("the address is of this test alone");
    let ended = all(launch_at(&w, &at, (&[0, 1], 2), &run(&own("none", 2), &[]), &|_| Vec::new()));
    for (r, says) in ended.iter().zip(["it cannot listen at port", "another program listens there"]) {
        assert!(r.code == 7 && r.err.contains(says), "{}: {}", r.code, r.err);
        assert!(r.err.contains("hint: another MASTER_PORT"), "{}", r.err);
    }
    assert!(!w.path("none").exists());
}

/// `rank-N.log` is a new file: a link of that name is replaced, and what it points to stays.
#[test]
fn logs_are_not_written_through_links() {
    let w = split::world(FULL);
    w.write("notes.txt", "mine");
    std::fs::create_dir(w.path("run")).expect("a folder");
    std::os::unix::fs::symlink("../notes.txt", w.path("run/rank-1.log")).expect("a link");
    bits(&w, 2, "run", &["run.epochs=1"]);
    assert_eq!(w.read("notes.txt"), b"mine");
    let log = String::from_utf8_lossy(&w.read("run/rank-1.log")).into_owned();
    assert!(log.contains("rank 1 has ended"), "{log}");
    assert!(!w.path("run/rank-1.log").symlink_metadata().expect("there").is_symlink());
}
