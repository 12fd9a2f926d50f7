//! Helpers for tests of sharding.

use super::world::{FULL, LORA, Ran, World, mixture, ran, recipe};
use candle_core::{DType, Device, Tensor};
use ft::files::TensorFiles;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::Read;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Time limit for events: far more than anything takes here, and less than the 600 s after which waiting
/// ranks give up.
pub const LATE: Duration = Duration::from_secs(500);

/// Experts and routers in full, on a 4-bit base, with LoRA on attention, a router loss, and states on the
/// host.
pub const MIXTURE: &str = r#"
quantize = "nf4"
[lora]
rank = 2
[[train]]
modules = ["attention"]
[[train]]
modules = ["experts"]
experts = [0, 1]
method = "full"
[[train]]
modules = ["router"]
method = "full"
[router]
aux_loss = 0.01
z_loss = 0.001
"#;

/// DoRA in combination with LoRA, which gets neutral magnitudes; also on weights shared by units.
pub const ADAPTERS: &str = r#"
[lora]
rank = 2
[[train]]
modules = ["attention"]
dora = true
[[train]]
modules = ["mlp", "head"]
"#;

/// LoRA with dropout, drawn by the column of the whole input.
pub const CUT: &str = r#"
[lora]
rank = 3
dropout = 0.2
[[train]]
modules = ["attention"]
[[train]]
modules = ["mlp"]
rank = 2
rslora = true
[[train]]
modules = ["norms"]
method = "full"
"#;

/// Rules and settings for ranks in processes.
pub const CASES: [(&str, &[&str]); 4] = [
    (FULL, &[]),
    (LORA, &["memory.recompute=1", "memory.offload=['optimizer']"]),
    (MIXTURE, &["memory.recompute=2", "model.dtype=bf16"]),
    (ADAPTERS, &["model.dtype=bf16", "model.quantize=nf4"]),
];

/// As [`world_of`], of a mixture for the rules [`MIXTURE`], else of a model with a tied head.
pub fn world(rules: &str) -> World {
    world_of(rules, if rules == MIXTURE { mixture() } else { json!({"tie_word_embeddings": true}) })
}

/// A world with a recipe of 12 steps: four micro-batches per step and two in the last one, with clipping that bites.
pub fn world_of(rules: &str, config: Value) -> World {
    let w = World::new();
    w.config("tiny", config);
    let run = "epochs = 1.15\nsave_every = 4\nkeep = 9\nclip = 0.5";
    let text = recipe(rules).replace("steps = 6", run).replace("micro_rows = 2", "micro_rows = 1");
    w.write("r.toml", text.replace("max_length = 32", "max_length = 32\npack = false"));
    w
}

/// A model on disk, trained in full for one step, and evaluated before and after.
pub fn on_files(rules: &str, config: Value) -> World {
    let w = World::new();
    w.config("start", config);
    let all = "[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"\n";
    let text =
        recipe(all).replace("source = \"tiny\"", "source = \"start\"").replace("steps = 6", "steps = 1");
    w.write("start.toml", text);
    w.ok(&["run", "start.toml", "run.output=made"]);
    let text = recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", "source = \"made/model\"");
    w.write("r.toml", text.replace("steps = 6", "steps = 6\neval_at_start = true\nsave_every = 3\nkeep = 9"));
    w
}

/// Runs r.toml with settings, from the start unless they resume. Returns the run's [`ends`].
#[track_caller]
pub fn bits(w: &World, run: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let anew: &[&str] = if set.contains(&"--resume") { &[] } else { &["--overwrite"] };
    w.ok(&[&["run", "r.toml", &format!("run.output={run}")], anew, set].concat());
    ends(w, run)
}

/// As [`bits`], by `ranks` processes.
#[track_caller]
pub fn processes(w: &World, ranks: usize, run: &str, set: &[&str]) -> Vec<Vec<u8>> {
    let numbers: Vec<usize> = (0..ranks).collect();
    let output = format!("run.output={run}");
    let args = [&["run", "r.toml", &output, "--overwrite"], set].concat();
    for (rank, r) in all(launch(w, &numbers, ranks, &args)).iter().enumerate() {
        assert_eq!(r.code, 0, "{set:?}: rank {rank} of {ranks}: {}", r.err);
    }
    ends(w, run)
}

/// Checks that a command on r.toml refuses settings, with these words and a hint, and makes no folder.
#[track_caller]
pub fn refused(w: &World, verb: &str, set: &[&str], says: &str) {
    let r = w.ft(&[&[verb, "r.toml", "run.output=none"][..], set].concat());
    assert!(r.code == 2 && r.err.contains(says) && r.err.contains("hint: "), "{verb} {set:?}: {}", r.err);
    assert!(!w.path("none").exists(), "{verb} {set:?}");
}

/// Settings of `[parallel]`: ranks of `data` and of another axis, and the ZeRO stage.
pub fn layout(axis: &str, data: usize, ranks: usize, zero: u8) -> [String; 3] {
    [("data", data), (axis, ranks), ("zero", zero.into())].map(|(key, n)| format!("parallel.{key}={n}"))
}

/// Settings of a layout, and further ones.
pub fn with<'a>(layout: &'a [String], set: &[&'a str]) -> Vec<&'a str> {
    layout.iter().map(String::as_str).chain(set.iter().copied()).collect()
}

/// Removes all checkpoints of a run but the first.
pub fn keep_first(w: &World, run: &str) {
    for name in &w.checkpoints(run)[1..] {
        std::fs::remove_dir_all(w.path(&format!("{run}/checkpoints/{name}"))).expect("removed");
    }
}

/// Checks a count of bytes between ranks in the first step against the plan, to a hundredth: `wire_bytes` or
/// `wire_bytes_exchanged`.
#[track_caller]
pub fn as_planned(w: &World, run: &str, key: &str, what: &str) {
    let planned = if key == "wire_bytes" { "wire_bytes_a_step" } else { key };
    let planned = w.events(run, "start")[0]["plan"][planned].as_f64().expect("planned");
    let came = w.events(run, "step")[0][key].as_f64().expect("counted");
    let far = came / planned - 1.0;
    assert!(far.abs() <= 0.01, "{what}: {key}: {planned} planned, {came} came");
}

/// A number in each event of a kind that has it.
pub fn told(w: &World, run: &str, event: &str, key: &str) -> Vec<f64> {
    w.events(run, event).iter().filter_map(|e| e[key].as_f64()).collect()
}

/// Evaluation losses of a run.
#[track_caller]
pub fn evals(w: &World, run: &str) -> Vec<f64> {
    w.events(run, "eval").iter().map(|e| e["loss"].as_f64().expect("a loss")).collect()
}

/// Result, and weights and moments of the last checkpoint.
pub fn ends(w: &World, run: &str) -> Vec<Vec<u8>> {
    let newest = w.checkpoints(run).pop().expect("a checkpoint");
    let of = |f: &str| w.read(&format!("{run}/checkpoints/{newest}/{f}"));
    let result = ["adapter/adapter_model.safetensors", "model/model.safetensors"];
    let result = result.into_iter().find(|r| w.path(run).join(r).is_file()).expect("a result");
    vec![of("weights.safetensors"), of("optimizer.safetensors"), w.read(&format!("{run}/{result}"))]
}

/// As [`gradients_of`], of the only checkpoint.
pub fn gradients(w: &World, run: &str) -> Vec<(String, Tensor)> {
    gradients_of(w, run, &w.checkpoints(run).pop().expect("a checkpoint"))
}

/// First moments after one step, by tensor: gradients times a constant.
pub fn gradients_of(w: &World, run: &str, checkpoint: &str) -> Vec<(String, Tensor)> {
    let path = w.path(&format!("{run}/checkpoints/{checkpoint}/optimizer.safetensors"));
    let files = TensorFiles::open_file(&path).expect("moments");
    let mut names: Vec<String> =
        files.names().map(|n| n.to_string()).filter(|n| n.ends_with(".exp_avg")).collect();
    names.sort();
    let get = |n: String| (n.clone(), files.tensor(&n, DType::F32, &Device::Cpu).expect("values"));
    names.into_iter().map(get).collect()
}

/// Relative L2 distance of all gradients together. Those of a tensor are within 5e-6.
#[track_caller]
pub fn gradients_apart(got: &[(String, Tensor)], want: &[(String, Tensor)], what: &str) -> f64 {
    assert!(!want.is_empty() && got.len() == want.len(), "{what}");
    let squares = |t: candle_core::Result<Tensor>| {
        let sum = t.and_then(|t| t.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>());
        sum.expect("a number")
    };
    let mut sums = [0.0; 2];
    for ((name, a), (other, b)) in got.iter().zip(want) {
        assert_eq!(name, other, "{what}");
        let (apart, all) = (squares(a - b), squares(Ok(b.clone())));
        // A norm of 16 values takes the rounding of sums over all tokens; softmax nearly cancels that of a key's bias.
        let bar = if name.contains("k_proj.bias") { 1e-3 } else { 5e-6 };
        assert!(apart.sqrt() <= bar * all.sqrt(), "{what}: {name}: {apart:.1e} of {all:.1e}");
        sums = [sums[0] + apart, sums[1] + all];
    }
    (sums[0] / sums[1]).sqrt()
}

/// Relative L2 distance of the f32 values in two files of the same layout.
pub fn apart(a: &[u8], b: &[u8]) -> f64 {
    assert_eq!(a.len(), b.len());
    let data = |f: &[u8]| -> Vec<f64> {
        let header = u64::from_le_bytes(f[..8].try_into().expect("eight")) as usize + 8;
        f[header..]
            .chunks_exact(4)
            .map(|c| f64::from(f32::from_le_bytes(c.try_into().expect("four"))))
            .collect()
    };
    let (a, b) = (data(a), data(b));
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

/// Address and port for a rendezvous. No other test or program uses the address: it is a loopback address made of
/// the process id.
pub fn rendezvous() -> (String, String) {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    let [_, a, b, c] = std::process::id().to_be_bytes();
    (format!("127.{}.{b}.{c}", 64 + a % 64), NEXT.fetch_add(1, Relaxed).to_string())
}

/// Starts `ranks` processes of a world of size `world`, like `torchrun`.
pub fn launch(w: &World, ranks: &[usize], world: usize, args: &[&str]) -> Vec<Child> {
    launch_with(w, ranks, world, args, &[])
}

/// As [`launch`], with additional environment variables for the first process.
pub fn launch_with(
    w: &World,
    ranks: &[usize],
    world: usize,
    args: &[&str],
    first: &[(&str, &str)],
) -> Vec<Child> {
    launch_at(w, &rendezvous(), (ranks, world), args, &|rank| {
        if rank == 0 { first.to_vec() } else { Vec::new() }
    })
}

/// As [`launch`], to meet at an address and port, with additional environment variables for each process.
pub fn launch_at<'a>(
    w: &World,
    (host, port): &(String, String),
    (ranks, world): (&[usize], usize),
    args: &[&str],
    variables: &dyn Fn(usize) -> Vec<(&'a str, &'a str)>,
) -> Vec<Child> {
    let start = |rank: &usize| {
        let mut c = w.command(args);
        c.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        c.env("WORLD_SIZE", world.to_string()).env("MASTER_ADDR", host).env("MASTER_PORT", port);
        c.envs(variables(*rank));
        c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started")
    };
    ranks.iter().map(start).collect()
}

/// Waits for an event of running processes. The end of one of them is the end of the wait, with its output.
#[track_caller]
pub fn wait_until(processes: &mut [Child], event: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + LATE;
    while !is() {
        if processes.iter_mut().any(|p| p.try_wait().expect("a status").is_some()) {
            panic!("no {event}: {}", ends_of(processes));
        }
        assert!(Instant::now() < end, "no {event} within {LATE:?}: {}", ends_of(processes));
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Status and stderr of each process. The others have some seconds after the end of one.
fn ends_of(processes: &mut [Child]) -> String {
    let end = Instant::now() + Duration::from_secs(10);
    while Instant::now() < end && processes.iter_mut().any(|p| matches!(p.try_wait(), Ok(None))) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let of = |p: &mut Child| {
        let killed = p.kill().and_then(|()| p.wait());
        let mut said = String::new();
        let read = p.stderr.as_mut().map(|e| e.read_to_string(&mut said));
        format!("{killed:?} {read:?}: {said}")
    };
    processes.iter_mut().map(of).collect::<Vec<_>>().join("\n")
}

/// Waits for the first checkpoint of a run.
#[track_caller]
pub fn wait_for_a_checkpoint(w: &World, run: &str, processes: &mut [Child]) {
    wait_until(processes, "checkpoint", || !w.checkpoints(run).is_empty());
}

/// Outcomes of all processes, by rank, after one is killed when the run has a checkpoint.
#[track_caller]
pub fn killed(w: &World, run: &str, mut processes: Vec<Child>, lost: usize) -> Vec<Ran> {
    wait_for_a_checkpoint(w, run, &mut processes);
    let pid = Pid::from_raw(processes[lost].id() as i32).expect("a number");
    kill_process(pid, Signal::KILL).expect("signalled");
    all(processes)
}

/// What the first of two processes says after the other one is killed, which it names. It ends with exit code 7.
#[track_caller]
pub fn lost(w: &World, set: &[&str]) -> String {
    let long = ["run.save_every=2", "run.steps=40000", "run.output=lost"];
    let processes = launch(w, &[0, 1], 2, &[&["run", "r.toml"][..], set, &long].concat());
    let first = killed(w, "lost", processes, 1).remove(0);
    assert!(first.code == 7 && first.err.contains("rank 1 of 2"), "{}", first.err);
    first.err
}

/// Outcomes of all processes, by rank.
pub fn all(processes: Vec<Child>) -> Vec<Ran> {
    // The output fits into the buffer of a pipe.
    processes.into_iter().map(|p| ran(p.wait_with_output().expect("an end"))).collect()
}
