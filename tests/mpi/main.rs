//! The binary under `mpirun`: processes compute the same as threads, resume runs of threads and vice
//! versa, and end together.
//!
//! Requires Open MPI's `mpirun`. Takes about two minutes on two cores.

#![allow(clippy::disallowed_methods, clippy::too_many_lines, reason = "tests write files, and list cases")]

#[allow(dead_code)] // shared with the tests of the binary
#[path = "../cli/split.rs"]
mod split;
#[allow(dead_code)] // shared with the tests of the binary
#[path = "../cli/world.rs"]
mod world;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use split::{CASES, CUT, LATE, MIXTURE, ends};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use world::{Dice, FT, FULL, Ran, World, few, kills, ran};

/// The command for `ft` on `ranks` processes.
fn mpirun(w: &World, ranks: usize, args: &[&str]) -> Command {
    let own = w.command(&[]);
    let mut c = Command::new("mpirun");
    c.args(["--oversubscribe", "--allow-run-as-root", "-n", &ranks.to_string(), FT]).args(args);
    for (key, value) in own.get_envs() {
        match value {
            Some(value) => c.env(key, value),
            None => c.env_remove(key),
        };
    }
    c.current_dir(own.get_current_dir().expect("a folder"));
    c
}

/// Runs `ft run` with settings on `ranks` processes.
fn ft(w: &World, ranks: usize, run: &str, set: &[&str]) -> Ran {
    let own = [format!("run.output={run}"), format!("parallel.data={ranks}")];
    let args = [&["run", "r.toml", &own[0], &own[1], "parallel.comm=mpi"], set].concat();
    ran(mpirun(w, ranks, &args).output().expect("mpirun is there"))
}

/// Like [`ft`], for a run that must succeed; returns the bytes of the result.
#[track_caller]
fn bits(w: &World, ranks: usize, run: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let r = ft(w, ranks, run, set);
    assert_eq!(r.code, 0, "{ranks} ranks, {set:?}: {}", r.err);
    ends(w, run)
}

/// Like [`bits`], with ranks as threads of one process.
#[track_caller]
fn threads(w: &World, ranks: usize, run: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let own = [format!("run.output={run}"), format!("parallel.data={ranks}")];
    w.ok(&[&["run", "r.toml", &own[0], &own[1]], set].concat());
    ends(w, run)
}

/// For every ZeRO stage, on two and four processes. All ranks but 0 write messages to a file.
#[test]
fn processes_have_the_bits_of_threads() {
    for (rules, set) in CASES {
        let w = split::world(rules);
        let want = threads(&w, 2, "threads", set);
        for (ranks, zero) in [(2, 0), (2, 1), (2, 2), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3)] {
            let run = format!("run-{ranks}-{zero}");
            let got = bits(&w, ranks, &run, &[set, &[&*format!("parallel.zero={zero}")]].concat());
            assert!(got == want, "{set:?}: {ranks} processes, stage {zero}");
            let told = |kind: &str, run: &str| {
                w.events(run, kind).iter().map(|e| e["loss"].to_string()).collect::<Vec<_>>()
            };
            assert_eq!(told("eval", &run), told("eval", "threads"));
            assert!(ranks != 2 || told("step", &run) == told("step", "threads"), "{set:?}: stage {zero}");
            assert_eq!(w.events(&run, "start")[0]["ranks"], ranks);
            let wire = |run: &str| w.events(run, "step")[0]["wire_bytes"].clone();
            assert!((ranks, zero) != (2, 0) || wire(&run) == wire("threads"), "{}", wire(&run));
            let logs = (1..ranks).filter(|r| w.path(&run).join(format!("rank-{r}.log")).is_file());
            assert_eq!(logs.count(), ranks - 1);
        }
    }
}

/// Tokens of a row and experts over processes, with the bits of threads.
#[test]
fn tokens_experts_and_matrices_have_the_bits_of_threads() {
    let packed = ["data.pack=true", "data.max_length=384", "run.batch_rows=2", "parallel.context=2"];
    let experts = ["memory.recompute=2", "parallel.expert=2"];
    let matrices = ["memory.recompute=1", "parallel.tensor=2"];
    for (rules, data, ranks, set) in
        [(FULL, 1, 2, &packed[..]), (MIXTURE, 2, 2, &experts), (CUT, 1, 2, &matrices)]
    {
        let w = split::world(rules);
        if rules == FULL {
            w.config("tiny", json!({"max_position_embeddings": 384}));
        }
        let data = format!("parallel.data={data}");
        let set = [set, &[&*data, "run.steps=2"]].concat();
        w.ok(&[&["run", "r.toml", "run.output=threads"], &set[..]].concat());
        let args = [&["run", "r.toml", "run.output=processes", "parallel.comm=mpi"], &set[..]].concat();
        let r = ran(mpirun(&w, ranks, &args).output().expect("mpirun is there"));
        assert_eq!(r.code, 0, "{set:?}: {}", r.err);
        assert!(ends(&w, "processes") == ends(&w, "threads"), "{set:?}");
    }
}

/// A run continued in turn by processes and threads has the same result as an uninterrupted one.
#[test]
fn a_run_goes_on_with_threads_and_back() {
    for rules in [FULL, MIXTURE] {
        let w = split::world(rules);
        let whole = threads(&w, 2, "whole", &["parallel.zero=1"]);
        let cut = |keep: usize| {
            for name in &w.checkpoints("again")[keep..] {
                std::fs::remove_dir_all(w.path(&format!("again/checkpoints/{name}"))).expect("removed");
            }
        };
        // From 2 to 4 processes, 4 processes to 2 threads, stage 3 to 0; and back.
        bits(&w, 2, "again", &["parallel.zero=3"]);
        cut(1);
        assert!(bits(&w, 4, "again", &["--resume", "parallel.zero=2"]) == whole);
        cut(2);
        assert!(threads(&w, 2, "again", &["--resume", "parallel.zero=0"]) == whole);
        cut(1);
        assert!(bits(&w, 4, "again", &["--resume", "parallel.zero=3"]) == whole);
        // Nothing is left to do, on any process.
        assert_eq!(ft(&w, 2, "again", &["--resume"]).code, 0);
        // Down to one process: the loaded state is the saved state.
        cut(1);
        bits(&w, 1, "again", &["--resume"]);
        let first = |run: &str| w.read(&format!("{run}/checkpoints/step-00000004/weights.safetensors"));
        assert!(first("again") == first("whole"));
    }
}

/// An error on one rank ends all ranks with the same exit code, and is printed once.
#[test]
fn an_error_on_one_rank_ends_all() {
    let w = split::world(FULL);
    let said = |r: &Ran, code: i32, words: &str| {
        assert_eq!((r.code, r.err.matches("error: ").count()), (code, 1), "{}", r.err);
        assert!(r.err.contains(words), "{}", r.err);
    };
    for zero in ["parallel.zero=2", "parallel.zero=3"] {
        let r = ft(&w, 2, "bad", &[zero, "optimizer.lr=1e30", "run.clip=0", "--overwrite"]);
        said(&r, 6, "no weight was updated");
    }
    let two = |set: &[&str]| {
        let args = [&["run", "r.toml", "--overwrite"], set].concat();
        ran(mpirun(&w, 2, &args).output().expect("mpirun is there"))
    };
    said(&two(&["run.output=bad", "parallel.data=4", "parallel.comm=mpi"]), 2, "mpirun -n 4");
    said(&ft(&w, 2, "bad", &["data.train.0.source=none.jsonl", "--overwrite"]), 3, "none.jsonl");
    said(&ft(&w, 2, "bad", &["run.stepz=3"]), 2, "stepz");
    said(&two(&["run.output=bad", "parallel.data=2", "parallel.comm=threads"]), 2, "is for the ranks of one");
    // Launched processes form one world by default.
    assert_eq!(two(&["run.output=good", "parallel.data=2", "run.epochs=0.2"]).code, 0);
    assert!(w.path("good/model").exists());
    // A different recipe on one rank.
    let run = ["run", "r.toml", "run.output=bad", "parallel.data=2", "parallel.comm=mpi", "--overwrite"];
    let mut c = mpirun(&w, 1, &run);
    c.args([":", "-n", "1", FT]).args(run).arg("run.seed=7");
    said(&ran(c.output().expect("mpirun")), 2, "rank 1 of 2 has another recipe: run.seed than rank 0");
    // A different data file on one rank.
    w.write("other/rows.jsonl", world::rows(40, 9));
    let mut c = mpirun(&w, 1, &run);
    c.args([":", "-n", "1", FT]).args(run).arg("data.train.0.source=other/rows.jsonl");
    said(&ran(c.output().expect("mpirun")), 2, "rank 1 of 2 has another");
    assert!(!w.path("bad/model").exists());
}

/// Finds the process of a rank by the environment; `None` if `mpirun` has ended.
fn process(w: &World, child: &mut Child, run: &str, rank: usize) -> Option<Pid> {
    let (run, rank) = (format!("run.output={run}"), format!("OMPI_COMM_WORLD_RANK={rank}"));
    // Other tests of this machine have runs of the same name.
    let cache = format!("FT_CACHE={}", w.path("cache").display());
    let end = Instant::now() + LATE;
    while Instant::now() < end && child.try_wait().expect("a child").is_none() {
        for p in std::fs::read_dir("/proc").expect("processes").flatten() {
            let has = |file: &str, word: &str| {
                let bytes = std::fs::read(p.path().join(file)).unwrap_or_default();
                bytes.split(|b| *b == 0).any(|w| w == word.as_bytes())
            };
            let number = p.file_name().to_str().and_then(|n| n.parse().ok());
            if let Some(number) = number
                && has("cmdline", &run)
                && has("environ", &rank)
                && has("environ", &cache)
            {
                return Pid::from_raw(number);
            }
        }
    }
    None
}

/// Starts a long run and waits for the first checkpoint.
fn begun(w: &World, run: &str, set: &[&str]) -> Child {
    let own = format!("run.output={run}");
    let long = ["run", "r.toml", &own, "parallel.data=4", "parallel.comm=mpi", "run.epochs=4000"];
    let mut c = mpirun(w, 4, &[&long, set].concat());
    // Seconds that the other ranks have to report a death before mpirun ends them.
    c.env("OMPI_MCA_odls_base_sigkill_timeout", "5");
    let mut child = c.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("mpirun");
    split::wait_for_a_checkpoint(w, run, std::slice::from_mut(&mut child));
    child
}

/// A dead rank ends all ranks at once, a stopped one after the timeout. Messages name the rank, machine
/// and last collective. The run can be resumed from the last checkpoint.
#[test]
fn a_lost_rank_ends_all() {
    let w = split::world(FULL);
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let cases = [
        (Signal::KILL, 2, "its process is gone", "parallel.timeout=600"),
        (Signal::KILL, 0, "its process is gone", "parallel.timeout=600"),
        (Signal::STOP, 1, "within 20 s", "parallel.timeout=20"),
        (Signal::STOP, 0, "within 20 s", "parallel.timeout=20"),
    ];
    for (signal, rank, says, timeout) in cases.into_iter().take(few(3)) {
        let run = format!("lost-{}-{rank}", signal.as_raw());
        let mut child = begun(&w, &run, &["parallel.zero=3", timeout, "run.save_every=2"]);
        let lost = process(&w, &mut child, &run, rank).expect("a process");
        kill_process(lost, signal).expect("signalled");
        let r = ran(child.wait_with_output().expect("an end"));
        let name = format!("error: rank {rank} of 4 on {host}: ");
        for words in [&*name, says, "its last collective: "] {
            assert!(r.err.contains(words), "{words:?} is not in {}", r.err);
        }
        // mpirun returns the exit code of the first rank to end, possibly the killed one.
        assert!(r.code == 7 || (r.code == 137 && signal == Signal::KILL), "{}: {}", r.code, r.err);
        for other in (1..4).filter(|r| *r != rank) {
            let log = w.read(&format!("{run}/rank-{other}.log"));
            let log = [String::from_utf8_lossy(&log).into_owned(), r.err.clone()].concat();
            assert!(log.contains(&name), "rank {other} does not say it: {log}");
        }
        // After a death, rank 0 ends within a second, whether it has written this or not.
        if rank != 0 && signal == Signal::STOP {
            assert_eq!(w.events(&run, "stopped")[0]["code"], 7);
        }
        let whole = w.checkpoints(&run);
        let newest = whole.last().expect("a checkpoint").trim_start_matches("step-");
        let step: usize = newest.parse().expect("a number");
        // The run can be resumed.
        let epochs = format!("run.epochs={}", step.div_ceil(10) + 1);
        let accept = ["--resume", "--accept-change", "run.epochs", &epochs];
        assert_eq!(ft(&w, 2, &run, &accept).code, 0, "{accept:?}");
    }
}

/// A run has the same result as an uninterrupted one if ranks are killed at random moments, and the run
/// is resumed with different numbers of ranks, ZeRO stages, and processes or threads. `FT_KILLS` sets
/// the number of kills.
#[test]
fn a_run_killed_at_any_moment_ends_the_same() {
    let w = split::world(FULL);
    let longer = ["run.epochs=4", "run.save_every=1", "parallel.timeout=30"];
    let ranks = |round: usize| match round % 4 {
        0 => (2, "parallel.zero=3"),
        1 => (4, "parallel.zero=1"),
        2 => (2, "parallel.zero=0"),
        _ => (4, "parallel.zero=2"),
    };
    let whole = threads(&w, 2, "whole", &longer);
    let kills = kills(2) as usize;
    let (mut dice, mut done) = (Dice(5), 0);
    for round in 0..100 + 2 * kills {
        if done == kills {
            break;
        }
        let (n, zero) = ranks(round);
        let data = format!("parallel.data={n}");
        let run = ["run", "r.toml", "run.output=killed", "--resume", &data, zero, "parallel.comm=mpi"];
        let steps = w.events("killed", "step").len();
        let mut c = mpirun(&w, n, &[&run[..], &longer].concat());
        let mut child = c.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("mpirun");
        let lost = process(&w, &mut child, "killed", dice.below(n as u64) as usize);
        // Some kills happen during startup, the rest in or after a step.
        let later = if round % 3 == 2 { 0 } else { steps + 1 + dice.below(4) as usize };
        let begun = Instant::now();
        while w.events("killed", "step").len() < later && child.try_wait().expect("a child").is_none() {
            assert!(begun.elapsed() < LATE, "it does not come to step {later}");
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_micros(dice.below(12_000)));
        // A process that has already ended cannot be killed.
        let killed = lost.is_some_and(|p| kill_process(p, Signal::KILL).is_ok());
        if child.wait().expect("an end").success() {
            assert!(ends(&w, "killed") == whole);
            std::fs::remove_dir_all(w.path("killed")).expect("a folder");
        } else {
            assert!(killed, "it fails by itself in round {round}");
            done += 1;
        }
    }
    assert_eq!(done, kills, "the run is over before it can be killed");
    let set = [&["--resume"], &longer[..]].concat();
    assert!(threads(&w, 4, "killed", &set) == whole);
}
