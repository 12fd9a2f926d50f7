//! Early ends of a run: signals, kills during evaluation, non-finite numbers, system limits; and metrics
//! modified by other programs.

use crate::world::{LORA, Ran, World, content, few, ran, recipe, reference, rows};
use candle_core::{DType, Device, Tensor};
use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::fs::OpenOptions;
use std::io::{ErrorKind, PipeReader, Write};
use std::net::TcpListener;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Waits for a condition. Returns false if the process ended before.
pub fn until(child: &mut Child, so: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    // The limit only ends a hanging test.
    while begun.elapsed() < Duration::from_secs(600) {
        if so() {
            return true;
        }
        if child.try_wait().expect("a child").is_some() {
            return so();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("it does not come to it");
}

/// Sends a signal to a process.
pub fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).expect("a process"), signal).expect("signalled");
}

/// Interferes with a run at a moment, and returns its exit code. If the moment has passed at the end of the run, because
/// the test was late, the run starts over in a new folder.
#[track_caller]
pub fn at_a_moment(
    w: &World,
    (run, args): (&str, &[&str]),
    is_it: impl Fn() -> bool,
    interfere: impl Fn(&Child),
) -> Option<i32> {
    for _ in 0..20 {
        let mut child = w.start(args);
        if until(&mut child, &is_it) {
            interfere(&child);
        }
        let code = child.wait().expect("an end").code();
        if is_it() {
            return code;
        }
        std::fs::remove_dir_all(w.path(run)).expect("removed");
    }
    panic!("the moment of {args:?} is always missed");
}

/// Steps, evaluations and adapter of a run.
type End = (Vec<(u64, u64, u64, u64)>, Vec<Value>, Vec<u8>);

/// Steps, losses, evaluations and result of a run.
fn end(w: &World, run: &str) -> End {
    let evals = w.events(run, "eval").iter().map(|e| json!([e["step"], e["loss"]])).collect();
    (w.steps(run), evals, w.read(&format!("{run}/adapter/adapter_model.safetensors")))
}

/// A kill in the last evaluation loses no step. The evaluation alone is repeated, and recorded once.
#[test]
fn a_kill_in_the_last_evaluation_loses_nothing() {
    let w = World::tiny(LORA);
    w.write("eval.jsonl", rows(4000, 2));
    w.ok(&["run", "r.toml", "run.output=whole"]);
    for signal in [Signal::KILL, Signal::TERM] {
        let args = ["run", "r.toml", "run.output=cut", "--resume"];
        let evaluates = || w.checkpoints("cut") == ["step-00000006"] && w.events("cut", "eval").is_empty();
        let code = at_a_moment(&w, ("cut", &args), evaluates, |child| send(child, signal));
        assert_eq!(code, if signal == Signal::KILL { None } else { Some(143) });
        assert!(!w.path("cut/adapter").exists());
        let r = w.ok(&args);
        assert!(r.err.contains("step 6 of 6"), "{}", r.err);
        assert!(end(&w, "cut") == end(&w, "whole"), "{signal:?}");
        assert_eq!(w.events("cut", "eval").len(), 1);
        std::fs::remove_dir_all(w.path("cut")).expect("removed");
    }
}

/// An evaluation due at a checkpoint runs once, whether the run died before or after it.
#[test]
fn an_evaluation_due_at_a_checkpoint_runs_once() {
    let w = World::tiny(LORA);
    let args = ["run", "r.toml", "run.output=a", "run.eval_every=3", "run.save_every=3"];
    w.ok(&args);
    let whole = end(&w, "a");
    let metrics = w.text("a/metrics.jsonl");
    for keep_eval in [true, false] {
        std::fs::remove_dir_all(w.path("a/checkpoints/step-00000006")).expect("removed");
        let lines = metrics.lines().filter(|l| keep_eval || !l.contains("\"eval\""));
        w.write("a/metrics.jsonl", lines.map(|l| format!("{l}\n")).collect::<String>());
        w.ok(&[&args[..], &["--resume"]].concat());
        assert!(end(&w, "a") == whole, "{keep_eval}");
    }
}

/// True if this process ignores SIGHUP, as under `nohup`, because children inherit that.
pub fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).is_some_and(|m| m & 1 == 1)
}

/// SIGHUP works like SIGTERM, even in the middle of a long step. The step is abandoned, and the resumed run
/// ends like an uninterrupted one.
#[test]
fn signals_do_not_wait_for_a_step() {
    let w = World::tiny(LORA);
    // The second step has a thousand micro-batches.
    let set = ["run.batch_rows=1000", "run.micro_rows=1", "data.pack=false", "run.steps=2"];
    let args = |output: &'static str| [&["run", "r.toml", output, "--resume"][..], &set].concat();
    w.ok(&args("run.output=whole"));
    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::INT, 130), (Signal::USR1, 138)]
        .into_iter()
        .take(few(1))
    {
        if signal == Signal::HUP && hangups_are_ignored() {
            continue;
        }
        let second_step = || w.events("cut", "step").len() == 1;
        let ended = at_a_moment(&w, ("cut", &args("run.output=cut")), second_step, |c| send(c, signal));
        assert_eq!(ended, Some(code));
        assert_eq!(w.checkpoints("cut"), ["step-00000001"]);
        let stopped = w.events("cut", "stopped");
        assert_eq!((stopped[0]["step"].as_u64(), stopped[0]["code"].as_i64()), (Some(1), Some(code.into())));
        w.ok(&args("run.output=cut"));
        assert!(end(&w, "cut") == end(&w, "whole"), "{signal:?}");
        std::fs::remove_dir_all(w.path("cut")).expect("removed");
    }
    // Before the first step, there is nothing to save, and the same command starts over.
    let plain = [&["run", "r.toml", "run.output=cut"][..], &set].concat();
    let first_step = || !w.events("cut", "start").is_empty() && w.events("cut", "step").is_empty();
    let ended = at_a_moment(&w, ("cut", &plain), first_step, |child| send(child, Signal::TERM));
    assert_eq!(ended, Some(143));
    assert!(w.checkpoints("cut").is_empty());
    w.ok(&plain);
    assert!(end(&w, "cut") == end(&w, "whole"));
}

/// Fills a pipe, so that its other writers wait.
fn fill(pipe: &PipeReader) {
    // opened anew: the other writers share no flag
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let mut writer = options.open(format!("/proc/self/fd/{}", pipe.as_raw_fd())).expect("a pipe");
    let full = std::iter::repeat_with(|| writer.write_all(b"\n")).find_map(Result::err);
    assert_eq!(full.map(|e| e.kind()), Some(ErrorKind::WouldBlock));
}

/// Only a second signal ends a run whose message is not read, and SIGUSR1 is none, nor are copies of the first.
#[test]
fn a_request_after_a_signal_ends_nothing() {
    let w = World::tiny(LORA);
    let (unread, stderr) = std::io::pipe().expect("a pipe");
    let mut c = w.command(&["run", "r.toml", "run.output=cut", "run.steps=100000"]);
    let mut child = c.stdout(Stdio::null()).stderr(stderr).spawn().expect("started");
    assert!(until(&mut child, || !w.events("cut", "step").is_empty()));
    fill(&unread);
    send(&child, Signal::TERM);
    while child.try_wait().expect("a child").is_none() {
        // the interval ends in the pause, most likely, and SIGUSR1 comes first
        send(&child, Signal::USR1);
        send(&child, Signal::TERM);
        std::thread::sleep(Duration::from_millis(2));
    }
    assert_eq!(child.wait().expect("an end").code(), Some(143));
}

/// Stops a run before training, as it waits for the hub.
fn stopped_early(w: &World, stderr: impl Into<Stdio>, stop: impl Fn(&Child)) -> Ran {
    let hub = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut c = w.command(&["run", "r.toml", "run.output=cut", "model.source=some/model"]);
    c.env("HF_ENDPOINT", format!("http://{}", hub.local_addr().expect("an address")))
        .env("HF_HUB_OFFLINE", "0");
    c.env("NO_PROXY", "*").env("no_proxy", "*");
    let mut child = c.stdout(Stdio::null()).stderr(stderr).spawn().expect("started");
    hub.set_nonblocking(true).expect("a listener");
    let asked = RefCell::new(None);
    if until(&mut child, || hub.accept().is_ok_and(|request| asked.replace(Some(request)).is_none())) {
        stop(&child);
        until(&mut child, || false);
    }
    ran(child.wait_with_output().expect("an end"))
}

/// A signal before training ends the run with a message.
#[test]
fn a_signal_before_training_is_reported() {
    let r = stopped_early(&World::tiny(LORA), Stdio::piped(), |child| send(child, Signal::TERM));
    let end = "error: stopped by SIGTERM before training began: there is nothing to save\nhint: ";
    assert!(r.code == 143 && r.err.contains(end), "{}: {}", r.code, r.err);
}

/// The end does not wait for a message that is not read.
#[test]
fn signals_before_training_do_not_wait_for_stderr() {
    let (unread, stderr) = std::io::pipe().expect("a pipe");
    let twice = |child: &Child| {
        fill(&unread);
        send(child, Signal::TERM);
        send(child, Signal::TERM);
    };
    assert_eq!(stopped_early(&World::tiny(LORA), stderr, twice).code, 143);
}

/// An exploding loss ends the run with exit code 6 and a message, and no bad file under a final name.
#[test]
fn a_diverged_run_stops() {
    for (rules, result) in [(LORA, "adapter"), (crate::world::FULL, "model")] {
        for eval in [true, false] {
            for (lr, steps) in [("1e10", 10), ("1e20", 2), ("1e38", 1), ("1e10", 2)] {
                let w = World::tiny(LORA);
                w.write("r.toml", recipe(rules));
                let (lr, steps) = (format!("optimizer.lr={lr}"), format!("run.steps={steps}"));
                let mut args = vec!["run", "r.toml", &lr, &steps, "run.clip=0", "optimizer.warmup_steps=0"];
                if !eval {
                    args.push("data.eval=[]");
                }
                let r = w.ft(&args);
                assert_eq!(r.code, 6, "{args:?}: {}", r.err);
                assert!(
                    !r.err.contains("bug in ft") && r.err.contains("optimizer.lr"),
                    "{args:?}: {}",
                    r.err
                );
                assert!(!w.path("runs/r").join(result).exists(), "{args:?}");
                let stopped = w.events("runs/r", "stopped");
                assert_eq!((stopped.len(), &stopped[0]["code"]), (1, &json!(6)), "{args:?}");
                w.ok(&["report", "runs/r"]);
                let page = w.text("runs/r/report.html");
                assert!(!page.contains("still going"), "{args:?}");
            }
        }
    }
}

/// Copies a fixture model to `to` with some values replaced. Returns the tensor names.
fn model(w: &World, to: &str, set: &[(&str, usize, f32)]) {
    let from = reference("llama-embed-head/model");
    w.write(&format!("{to}/config.json"), std::fs::read(format!("{from}/config.json")).expect("a config"));
    tensors(w, &format!("{from}/model.safetensors"), &format!("{to}/model.safetensors"), set);
}

/// Copies a tensor file with some values replaced: name, index, value.
fn tensors(w: &World, from: &str, to: &str, set: &[(&str, usize, f32)]) {
    let files = ft::files::TensorFiles::open_file(from.as_ref()).expect("tensors");
    let changed = |name: &str| {
        let t = files.tensor(name, DType::F32, &Device::Cpu).expect("a tensor");
        let mut values: Vec<f32> = t.flatten_all().and_then(|t| t.to_vec1()).expect("values");
        for (_, i, x) in set.iter().filter(|s| name.ends_with(s.0)) {
            values[*i] = *x;
        }
        (name.to_string(), Tensor::from_vec(values, t.dims(), &Device::Cpu).expect("a tensor"))
    };
    let all: Vec<_> = files.names().map(changed).collect();
    std::fs::create_dir_all(w.path(to).parent().expect("a parent")).expect("a folder");
    ft::files::write_file(&w.path(to), &all, &[("format", "pt")]).expect("written");
}

fn with_weights(rules: &str) -> World {
    let w = World::new();
    w.write("r.toml", recipe(rules).replace("source = \"tiny\"\nweights = \"random\"", "source = \"m\""));
    model(&w, "m", &[]);
    w
}

/// Valid steps with a failing evaluation: exit code 6, a checkpoint, no adapter. A resume with other
/// evaluation data succeeds.
#[test]
fn an_evaluation_without_a_number_ends_the_run() {
    let w = with_weights(LORA);
    w.ok(&["run", "r.toml", "run.output=whole"]);
    // A token absent from the training data.
    let at = 100 * 32;
    model(&w, "m", &[("embed_tokens.weight", at, 1e30)]);
    w.write("bad.jsonl", "{\"input_ids\": [1, 2, 100, 3, 4]}\n");
    let bad = "data.eval=[{source='bad.jsonl',format='tokens'}]";
    let r = w.ft(&["run", "r.toml", "run.output=a", bad]);
    assert_eq!(r.code, 6, "{}", r.err);
    assert!(r.err.contains("evaluation after step 6") && !w.path("a/adapter").exists(), "{}", r.err);
    assert_eq!(w.checkpoints("a"), ["step-00000006"]);
    let evals = w.events("a", "eval");
    assert!(evals.len() == 1 && evals[0]["loss"].is_null(), "{evals:?}");
    assert_eq!(w.events("a", "stopped")[0]["code"], 6);
    // Again, and recorded once.
    assert_eq!(w.ft(&["run", "r.toml", "run.output=a", bad, "--resume"]).code, 6);
    assert_eq!(w.events("a", "eval").len(), 1);
    w.ok(&["run", "r.toml", "run.output=a", "--resume"]);
    assert!(end(&w, "a") == end(&w, "whole"));
    // Evaluations between steps, and before the first step.
    let r = w.ft(&["run", "r.toml", "run.output=b", bad, "run.eval_every=2"]);
    assert_eq!((r.code, w.checkpoints("b")), (6, vec!["step-00000002".to_string()]));
    let r = w.ft(&["run", "r.toml", "run.output=c", bad, "run.eval_at_start=true"]);
    assert!(r.code == 6 && w.checkpoints("c").is_empty(), "{}", r.err);
}

/// A non-finite value in any input: exit code 4, with file and tensor name, for every subcommand.
#[test]
fn values_that_are_no_numbers_are_named() {
    let w = with_weights("[[train]]\nmodules = [\"attention\"]\n");
    w.ok(&["run", "r.toml", "run.output=a"]);
    let refused = |r: Ran, tensor: &str, verb: &str| {
        assert_eq!(r.code, 4, "{verb}: {}", r.err);
        assert!(r.err.contains(".safetensors") && r.err.contains(tensor), "{verb}: {}", r.err);
        assert!(!r.err.contains("bug"), "{verb}: {}", r.err);
    };
    let good = w.path("a/adapter/adapter_model.safetensors").display().to_string();
    w.write("bad/adapter_config.json", w.read("a/adapter/adapter_config.json"));
    for (tensor, x) in
        [("layers.1.self_attn.k_proj.lora_B.weight", f32::NAN), ("q_proj.lora_A.weight", f32::INFINITY)]
    {
        tensors(&w, &good, "bad/adapter_model.safetensors", &[(tensor, 3, x)]);
        for verb in ["check", "run"] {
            let r = w.ft(&[verb, "r.toml", "lora.init=bad", "run.output=b"]);
            refused(r, tensor, verb);
            assert!(!w.path("b").exists());
        }
        refused(w.ft(&["eval", "r.toml", "--adapter", "bad"]), tensor, "eval");
        refused(w.ft(&["merge", "bad", "--out", "o"]), tensor, "merge");
        refused(w.ft(&["export", "bad", "--to", "vllm", "--out", "p"]), tensor, "export");
    }
    // Trained, frozen, and norm weights of the base.
    for (tensor, x) in [
        ("layers.1.mlp.up_proj.weight", f32::NAN),
        ("layers.0.input_layernorm.weight", f32::NEG_INFINITY),
        ("layers.0.self_attn.q_proj.weight", f32::INFINITY),
        ("lm_head.weight", f32::NAN),
    ] {
        model(&w, "m", &[(tensor, 5, x)]);
        refused(w.ft(&["run", "r.toml", "run.output=c"]), tensor, "run");
        refused(w.ft(&["eval", "r.toml"]), tensor, "eval");
        refused(w.ft(&["merge", "a/adapter", "--out", "o"]), tensor, "merge");
        refused(w.ft(&["quantize", "m", "--out", "q"]), tensor, "quantize");
        assert!(!w.path("q").exists());
        let nf4 = ["run", "r.toml", "run.output=d", "model.quantize=nf4"];
        refused(w.ft(&nf4), tensor, "run in NF4");
    }
}

/// Finite inputs with non-finite results: exit code 6, without a request for a bug report.
#[test]
fn an_overflow_is_not_called_a_bug() {
    let w = with_weights("[[train]]\nmodules = [\"attention\"]\n");
    w.ok(&["run", "r.toml", "run.output=a"]);
    let good = w.path("a/adapter/adapter_model.safetensors").display().to_string();
    w.write("huge/adapter_config.json", w.read("a/adapter/adapter_config.json"));
    tensors(&w, &good, "huge/adapter_model.safetensors", &[("v_proj.lora_B.weight", 3, 1e36)]);
    for args in [
        &["eval", "r.toml", "--adapter", "huge"][..],
        &["merge", "huge", "--out", "o"],
        &["export", "huge", "--to", "vllm", "--out", "p"],
        &["run", "r.toml", "lora.init=huge", "run.output=b"],
    ] {
        let r = w.ft(args);
        assert!(r.code == 6 && !r.err.contains("bug"), "{args:?}: {} {}", r.code, r.err);
    }
    // All-zero logits are valid.
    let zeros: Vec<_> = (0..128 * 32).map(|i| ("lm_head.weight", i, 0.0)).collect();
    model(&w, "m", &zeros);
    w.ok(&["merge", "a/adapter", "--out", "o2"]);
    w.ok(&["export", "a/adapter", "--to", "vllm", "--out", "p2"]);
}

/// Metrics modified by other programs do not end a run, and cause a warning.
#[test]
fn damaged_or_missing_metrics_are_a_warning() {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml", "run.output=a", "run.save_every=3"]);
    let whole = end(&w, "a");
    std::fs::remove_dir_all(w.path("a/checkpoints/step-00000006")).expect("removed");
    let text = w.read("a/metrics.jsonl");
    w.write(
        "a/metrics.jsonl",
        [&b"{\"event\": \"step\", \"step\": \"\xff\"}\n"[..], &text, b"\xfe\xff\n"].concat(),
    );
    let r = w.ok(&["run", "r.toml", "run.output=a", "run.save_every=3", "--resume"]);
    assert!(r.err.contains("warning: ") && r.err.contains("metrics.jsonl"), "{}", r.err);
    assert!(end(&w, "a") == whole);

    // A path that is not a file is a storage error, not a model error.
    std::fs::remove_dir_all(w.path("a/checkpoints/step-00000006")).expect("removed");
    std::fs::remove_file(w.path("a/metrics.jsonl")).expect("removed");
    std::fs::create_dir(w.path("a/metrics.jsonl")).expect("a folder");
    let r = w.ft(&["run", "r.toml", "run.output=a", "run.save_every=3", "--resume"]);
    assert_eq!(r.code, 5, "{}", r.err);
    assert!(r.err.contains("metrics.jsonl: it is a folder") && r.err.contains("hint: "), "{}", r.err);

    let args = ["run", "r.toml", "run.output=b", "run.steps=400"];
    let has_steps = || w.events("b", "step").len() > 3;
    let remove = |_: &Child| std::fs::remove_file(w.path("b/metrics.jsonl")).expect("removed");
    assert_eq!(at_a_moment(&w, ("b", &args), has_steps, remove), Some(0));
    let steps: Vec<u64> = w.steps("b").iter().map(|s| s.0).collect();
    assert_eq!(steps, (1..=400).collect::<Vec<_>>());
    assert_eq!((w.events("b", "start").len(), w.events("b", "end").len()), (1, 1));
}

/// Runs a command under `ulimit`.
fn limited(w: &World, limit: &str, env: &[(&str, &str)], args: &[&str]) -> Ran {
    let ft = w.command(args);
    let mut c = std::process::Command::new("sh");
    c.arg("-c").arg(format!("{limit}; exec \"$0\" \"$@\"")).arg(ft.get_program()).args(ft.get_args());
    crate::world::same_variables(&mut c, &ft);
    ran(c.current_dir(w.path(".")).envs(env.iter().copied()).output().expect("started"))
}

/// System limits have their own messages and exit codes.
#[test]
fn system_limits_have_their_own_messages() {
    let w = World::tiny(LORA);
    w.config("tiny", json!({"hidden_size": 256, "intermediate_size": 512}));
    // In blocks of 512 bytes: more than the metrics take, less than a checkpoint.
    let r = limited(&w, "ulimit -f 400", &[], &["run", "r.toml", "run.steps=2"]);
    assert_eq!(r.code, 5, "{}{}", r.out, r.err);
    assert!(r.err.contains("error: ") && r.err.contains("ulimit -f"), "{}", r.err);
    assert!(w.checkpoints("runs/r").is_empty());
    let left = content(&w.path("runs/r/checkpoints"));
    assert!(left.is_empty(), "{left:?}");
    w.ok(&["run", "r.toml", "run.steps=2", "--resume"]);
    for (threads, code, said) in [
        ("1000", 8, "error: threads cannot start"),
        ("30000", 2, "error: RAYON_NUM_THREADS: 30000; at most "),
    ] {
        let r = limited(&w, "ulimit -v 1000000", &[("RAYON_NUM_THREADS", threads)], &["check", "r.toml"]);
        assert_eq!(r.code, code, "{}{}", r.out, r.err);
        assert!(r.err.contains(said) && !r.err.contains("bug in ft"), "{}", r.err);
    }
}
