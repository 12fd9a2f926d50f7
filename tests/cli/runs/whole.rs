//! Atomicity: results and folders are replaced only on request, are whole or absent after a crash, and
//! derived files are invalidated with the model.

use crate::split::wait_until;
use crate::world::{Dice, World, content, kills, recipe, reference};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeMap;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

const RULES: &str = "[[train]]\nmodules = [\"attention\", \"experts\"]\nrank = 4\nalpha = 16\n";

const IN_FULL: &str =
    "train=[{modules=['attention','experts','router','norms','embedding','head'],method='full'}]";

/// A world with a recipe for LoRA on a small mixture of experts, and the folder of the model.
fn world() -> (World, String) {
    let w = World::new();
    let model = reference("mixtral/model");
    let source = format!("source = {model:?}");
    w.write("r.toml", recipe(RULES).replace("source = \"tiny\"\nweights = \"random\"", &source));
    (w, model)
}

/// Contents of a folder by relative path; `None` if it does not exist.
fn folder(w: &World, name: &str) -> Option<BTreeMap<String, Vec<u8>>> {
    let dir = w.path(name);
    dir.symlink_metadata().ok()?;
    let inside = |p: &Path| p.strip_prefix(&dir).expect("inside").display().to_string();
    Some(content(&dir).into_iter().map(|(path, bytes)| (inside(&path), bytes)).collect())
}

/// Files and folders that no command may leave behind.
fn litter(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(d) = open.pop() {
        for e in std::fs::read_dir(&d).into_iter().flatten().flatten() {
            let name = e.file_name().to_string_lossy().into_owned();
            if [".ft-", ".lock", ".draft-", ".old-"].iter().any(|p| name.starts_with(p)) {
                found.push(e.path().display().to_string());
            }
            if e.file_type().is_ok_and(|t| t.is_dir()) {
                open.push(e.path());
            }
        }
    }
    found
}

fn code(child: &mut Child) -> i32 {
    child.wait().expect("an end").code().unwrap_or(-1)
}

/// The run folder is locked while the model loads, so its contents are checked under the lock.
#[test]
fn a_loading_run_locks_its_folder() {
    let (w, _) = world();
    w.write("many.jsonl", crate::world::rows(20_000, 3));
    let many = "data.train=[{source=\"many.jsonl\",format=\"tokens\"}]";
    let mut first = w.start(&["run", "r.toml", many, "run.output=o", "run.steps=100000"]);
    // A lock file with contents is locked; an empty one may not be locked yet.
    let note = format!("process {}\n", first.id());
    wait_until(std::slice::from_mut(&mut first), "lock", || {
        std::fs::read(w.path("o/.lock")).is_ok_and(|text| text == note.as_bytes())
    });
    // Pauses the process during loading.
    let pid = Pid::from_raw(first.id() as i32).expect("a process");
    kill_process(pid, Signal::STOP).expect("stopped");
    for more in [&[][..], &["--resume"], &["--overwrite"]] {
        let r = w.ft(&[&["run", "r.toml", "run.output=o"][..], more].concat());
        assert_eq!(r.code, 5, "{more:?}: {}", r.err);
        assert!(r.err.contains("another ft process"), "{}", r.err);
    }
    first.kill().expect("killed");
    first.wait().expect("an end");
    // A killed run does not block a later one.
    w.ok(&["run", "r.toml", "run.output=o"]);
    assert!(litter(&w.path("o")).is_empty(), "{:?}", litter(&w.path("o")));
}

/// Any part of a result counts as a result, and only `--overwrite` replaces it.
#[test]
fn a_result_is_replaced_only_by_overwrite() {
    let (w, _) = world();
    w.ok(&["run", "r.toml", "run.output=o"]);
    let adapter = folder(&w, "o/adapter");
    let refused = |more: &[&str]| {
        let before = folder(&w, "o");
        let r = w.ft(&[&["run", "r.toml", "run.output=o", "run.seed=1"][..], more].concat());
        assert_eq!(r.code, 2, "{more:?}: {}", r.err);
        assert!(before == folder(&w, "o"), "{more:?}: something changed");
    };
    refused(&[]);
    // Renamed by a process killed while it saved a step again.
    std::fs::rename(w.path("o/checkpoints/step-00000006"), w.path("o/checkpoints/.old-00000006"))
        .expect("moved");
    refused(&[]);
    std::fs::remove_dir_all(w.path("o/checkpoints")).expect("removed");
    refused(&[]);
    refused(&["--resume"]);
    std::fs::rename(w.path("o/adapter"), w.path("elsewhere")).expect("moved");
    symlink("../elsewhere", w.path("o/adapter")).expect("a link");
    refused(&[]);
    std::fs::remove_file(w.path("o/adapter")).expect("removed");
    refused(&[]);
    refused(&["--resume"]);
    // Only the log of an unfinished run.
    w.write("o/metrics.jsonl", "{\"event\":\"start\"}\n");
    std::fs::create_dir(w.path("o/adapter")).expect("a folder");
    w.ok(&["run", "r.toml", "run.output=o"]);
    assert!(folder(&w, "o/adapter") == adapter);
    w.write("o/notes.txt", "mine");
    w.write("o/adapter/README.md", "mine");
    w.ok(&["run", "r.toml", "run.output=o", "run.seed=1", "--overwrite"]);
    let mut now = folder(&w, "o/adapter").expect("an adapter");
    assert_eq!(now.remove("README.md").as_deref(), Some(&b"mine"[..]));
    assert!(Some(now) != adapter);
    assert_eq!(w.read("o/notes.txt"), b"mine");
    // A result of another kind is removed.
    w.ok(&["run", "r.toml", IN_FULL, "run.output=o", "--overwrite"]);
    assert!(w.path("o/model/config.json").exists() && !w.path("o/adapter").exists());
    assert!(litter(&w.path("o")).is_empty(), "{:?}", litter(&w.path("o")));
}

/// A refused run creates no folder, and changes nothing in an existing one.
#[test]
fn refused_runs_and_verbs_write_nothing() {
    let (w, model) = world();
    w.ok(&["run", "r.toml", "run.output=a"]);
    for set in ["memory.budget=1KiB", "data.train.0.source=gone.jsonl", "train.0.modules=['x']"] {
        let r = w.ft(&["run", "r.toml", "run.output=new/deep", set]);
        assert_ne!(r.code, 0, "{set}");
        assert!(!w.path("new").exists(), "{set}");
    }
    w.write("full/notes.txt", "mine");
    let before = folder(&w, "full");
    for verb in [&["merge", "a/adapter"][..], &["export", "a/adapter", "--to", "vllm"], &["quantize", &model]]
    {
        let into = |out: &str| w.ft(&[verb, &["--out", out]].concat());
        let r = into("full");
        assert!(
            r.code == 2
                && r.err.contains("full: is there already, and is no empty folder")
                && r.err.contains("hint: "),
            "{}",
            r.err
        );
        for odd in [".", "..", "/", "full/notes.txt", "full/notes.txt/x"] {
            assert_ne!(into(odd).code, 0, "{verb:?} {odd}");
        }
        assert!(folder(&w, "full") == before, "{verb:?}");
    }
    w.write("broken/config.json", "{}");
    assert_ne!(w.ft(&["quantize", "broken", "--out", "q/deep"]).code, 0);
    assert_ne!(w.ft(&["merge", "broken", "--out", "q/deep"]).code, 0);
    assert!(!w.path("q").exists());
    assert!(litter(&w.path(".")).is_empty(), "{:?}", litter(&w.path(".")));
}

/// Of several runs with one folder, one wins, the rest fail with a message, and the result is whole.
#[test]
fn of_several_writers_of_a_folder_one_succeeds() {
    let (w, model) = world();
    w.ok(&["run", "r.toml", "run.output=a"]);
    for verb in [&["export", "a/adapter", "--to", "vllm"][..], &["merge", "a/adapter"], &["quantize", &model]]
    {
        let args = |out: &'static str| [verb, &["--out", out]].concat();
        w.ok(&args("whole"));
        let mut children: Vec<Child> = (0..4).map(|_| w.start(&args("m"))).collect();
        let mut codes: Vec<i32> = children.iter_mut().map(code).collect();
        codes.sort_unstable();
        assert_eq!(codes[0], 0, "{verb:?}: {codes:?}");
        assert!(codes[1..].iter().all(|c| [2, 5].contains(c)), "{verb:?}: {codes:?}");
        assert!(folder(&w, "m") == folder(&w, "whole"), "{verb:?}");
        assert!(litter(&w.path(".")).is_empty(), "{:?}", litter(&w.path(".")));
        for out in ["m", "whole"] {
            std::fs::remove_dir_all(w.path(out)).expect("removed");
        }
    }
}

/// Three runs with one cache all train, and the cache is whole.
#[test]
fn three_runs_make_one_cache() {
    let (w, _) = world();
    let run = |out: &str, cache: &str| {
        let (out, cache) = (format!("run.output={out}"), format!("model.cache={cache}"));
        let set = ["run", "r.toml", "model.quantize=nf4", &out, &cache];
        w.start(&set)
    };
    assert_eq!(code(&mut run("o", "whole")), 0);
    for round in 0..3 {
        let cache = format!("mc{round}");
        let mut children: Vec<Child> = (0..3).map(|i| run(&format!("o{round}{i}"), &cache)).collect();
        let codes: Vec<i32> = children.iter_mut().map(code).collect();
        assert_eq!(codes, [0, 0, 0]);
        assert!(folder(&w, &cache) == folder(&w, "whole"));
        for i in 0..3 {
            assert!(folder(&w, &format!("o{round}{i}/adapter")) == folder(&w, "o/adapter"));
        }
    }
    assert!(litter(&w.path(".")).is_empty(), "{:?}", litter(&w.path(".")));
}

fn flip(path: &Path, at: u64) {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("a file");
    let times = file.metadata().expect("times");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("written");
    // As if nothing had happened.
    file.set_modified(times.modified().expect("a time")).expect("set");
}

/// A 4-bit cache is used exactly as written, or not at all.
#[test]
fn a_changed_cache_is_made_again() {
    let (w, model) = world();
    let run = |out: &str| {
        let out = format!("run.output={out}");
        w.ok(&["run", "r.toml", "model.quantize=nf4", "model.cache=mc", "run.steps=2", &out, "--overwrite"])
    };
    run("first");
    let (cache, steps) = (folder(&w, "mc"), w.steps("first"));
    let inode = || std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(w.path("mc")).expect("a folder"));
    let same = |made_again: bool, said: bool, what: &str, before: u64| {
        let r = run("again");
        assert!(w.steps("again") == steps, "{what}: other numbers");
        assert_eq!(inode() != before, made_again, "{what}");
        assert_eq!(r.err.contains("it is made again"), said, "{what}: {}", r.err);
        assert!(folder(&w, "mc") == cache, "{what}");
    };
    same(false, false, "untouched", inode());
    let weights = "mc/model.safetensors";
    let size = std::fs::metadata(w.path(weights)).expect("a file").len();
    for at in [size / 2, size - 1, 20] {
        flip(&w.path(weights), at);
        same(true, true, "a flipped bit", inode());
    }
    flip(&w.path("mc/config.json"), 3);
    same(true, true, "its config", inode());
    std::fs::File::options()
        .write(true)
        .open(w.path(weights))
        .expect("a file")
        .set_len(size / 2)
        .expect("cut");
    same(true, true, "cut short", inode());
    std::fs::remove_file(w.path(weights)).expect("removed");
    same(true, true, "removed", inode());
    w.write("mc/ft-cache.json", "{");
    same(true, true, "its marker", inode());
    let marker = w.text("mc/ft-cache.json");
    w.write("mc/ft-cache.json", marker.replace("\"version\": 2", "\"version\": 1"));
    same(true, false, "of another version", inode());
    // Another model of the same shape, with one tensor different in one bit.
    for file in ["config.json", "model.safetensors"] {
        w.write(&format!("other/{file}"), std::fs::read(format!("{model}/{file}")).expect("a file"));
    }
    let size = std::fs::metadata(w.path("other/model.safetensors")).expect("a file").len();
    let with = |cache: &[&str]| {
        let set =
            ["run", "r.toml", "model.source=other", "model.quantize=nf4", "run.output=x", "run.steps=2"];
        w.ok(&[&set[..], &["--overwrite"], cache].concat());
        w.steps("x")
    };
    let plain = with(&[]);
    assert_eq!(with(&["model.cache=mc"]), plain);
    for at in [size / 3, size / 2, size - 2] {
        flip(&w.path("other/model.safetensors"), at);
        let changed = with(&[]);
        assert_eq!(with(&["model.cache=mc"]), changed, "at {at} the cache is stale");
    }
}

/// A base modified in place, with restored timestamps, is another base.
#[test]
fn a_resume_refuses_a_changed_base() {
    let (w, model) = world();
    for file in ["config.json", "model.safetensors"] {
        w.write(&format!("m/{file}"), std::fs::read(format!("{model}/{file}")).expect("a file"));
    }
    let run = ["run", "r.toml", "model.source=m", "run.output=o", "run.steps=4", "run.save_every=1"];
    w.ok(&run);
    let size = std::fs::metadata(w.path("m/model.safetensors")).expect("a file").len();
    std::fs::remove_dir_all(w.path("o/checkpoints/step-00000004")).expect("removed");
    for at in [size / 2, size - 1] {
        flip(&w.path("m/model.safetensors"), at);
        let r = w.ft(&[&run[..], &["--resume"]].concat());
        assert!(r.code == 2 && r.err.contains("hash.model"), "{}", r.err);
        flip(&w.path("m/model.safetensors"), at);
    }
    w.ok(&[&run[..], &["--resume"]].concat());
}

/// In prepared folders, links are never followed for writing, and foreign files never enter the output.
#[test]
fn links_are_not_followed_for_writing() {
    let (w, model) = world();
    w.write("notes.txt", "mine");
    w.write("out/x", "");
    symlink("../notes.txt", w.path("out/.lock")).expect("a link");
    let r = w.ft(&["run", "r.toml", "run.output=out"]);
    assert!(r.code == 5 && r.err.contains(".lock"), "{}", r.err);
    w.write("victim/.lock", "mine");
    for name in [".ft-q.tmp", ".ft-adapter.tmp"] {
        symlink("victim", w.path(name)).expect("a link");
    }
    let r = w.ft(&["quantize", &model, "--out", "q"]);
    assert!(r.code == 5 && r.err.contains(".ft-q.tmp"), "{}", r.err);
    assert!(!w.path("q").exists());
    assert_eq!((w.read("notes.txt"), w.read("victim/.lock")), (b"mine".to_vec(), b"mine".to_vec()));

    // Refused before training.
    w.write("trap/notes.txt", "mine");
    symlink("../victim", w.path("trap/.ft-adapter.tmp")).expect("a link");
    let r = w.ft(&["run", "r.toml", "run.output=trap"]);
    assert!(r.code == 5 && r.err.contains(".ft-adapter.tmp"), "{}", r.err);
    assert!(!w.path("trap/metrics.jsonl").exists());
    assert_eq!(w.read("victim/.lock"), b"mine");

    // A private key in a model folder, under the name of a tokenizer file.
    w.ok(&["run", "r.toml", "run.output=a"]);
    w.write("key", "secret");
    w.write("m/config.json", std::fs::read(format!("{model}/config.json")).expect("a file"));
    w.write("m/model.safetensors", std::fs::read(format!("{model}/model.safetensors")).expect("a file"));
    let absolute = w.path("key").display().to_string();
    for to in ["../key", &absolute] {
        symlink(to, w.path("m/merges.txt")).expect("a link");
        for verb in
            [&["merge", "a/adapter", "--base", "m", "--out", "u"][..], &["quantize", "m", "--out", "u"]]
        {
            let r = w.ft(verb);
            assert!(r.code == 4 && r.err.contains("merges.txt"), "{verb:?}: {}", r.err);
            assert!(!w.path("u").exists());
        }
        let r = w.ft(&["run", "r.toml", "model.source=m", IN_FULL, "run.output=f", "run.steps=1"]);
        assert!(r.code == 4 && !w.path("f/model").exists(), "{}", r.err);
        std::fs::remove_dir_all(w.path("f")).expect("removed");
        std::fs::remove_file(w.path("m/merges.txt")).expect("removed");
    }
    // Links inside the folder, and in the cache of the hub, work like files.
    w.write("m/added", "a b");
    symlink("added", w.path("m/merges.txt")).expect("a link");
    w.ok(&["quantize", "m", "--out", "u"]);
    assert_eq!(w.read("u/merges.txt"), b"a b");
    assert!(!w.path("u/merges.txt").symlink_metadata().expect("there").is_symlink());
    let repository = "hf/hub/models--some--one";
    w.write(&format!("{repository}/blobs/aa"), "a b c");
    let snapshot = w.path(repository).join("snapshots/0123456789012345678901234567890123456789");
    std::fs::create_dir_all(&snapshot).expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(w.path("m").join(file), snapshot.join(file)).expect("copied");
    }
    symlink("../../blobs/aa", snapshot.join("merges.txt")).expect("a link");
    w.ok(&["quantize", &snapshot.display().to_string(), "--out", "v"]);
    assert_eq!(w.read("v/merges.txt"), b"a b c");
}

/// A failed command leaves no drafts, tested with a full disk if one can be mounted.
#[test]
fn failed_commands_leave_no_drafts() {
    let (w, model) = world();
    w.ok(&["run", "r.toml", "run.output=a"]);
    let nan = "model.layers.1.self_attn.q_proj.weight";
    let files = ft::files::TensorFiles::open_model(model.as_ref()).expect("a model");
    let tensors: Vec<(String, candle_core::Tensor)> = files
        .names()
        .map(|n| {
            let t = files.tensor(n, candle_core::DType::F32, &candle_core::Device::Cpu).expect("a tensor");
            (n.to_string(), if n == nan { (t / 0.0).expect("infinite") } else { t })
        })
        .collect();
    w.write("bad/config.json", std::fs::read(format!("{model}/config.json")).expect("a config"));
    ft::files::write_file(&w.path("bad/model.safetensors"), &tensors, &[]).expect("written");
    assert_ne!(w.ft(&["quantize", "bad", "--out", "q"]).code, 0);
    assert_ne!(w.ft(&["merge", "a/adapter", "--base", "bad", "--out", "q"]).code, 0);
    assert_ne!(w.ft(&["export", "a/adapter", "--base", "bad", "--to", "vllm", "--out", "q"]).code, 0);
    assert!(!w.path("q").exists() && litter(&w.path(".")).is_empty(), "{:?}", litter(&w.path(".")));

    std::fs::create_dir(w.path("small")).expect("a folder");
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(w.path("small"));
    if !mount.output().is_ok_and(|m| m.status.success()) {
        eprintln!("skipped: no tmpfs can be mounted here");
        return;
    }
    let r = w.ft(&["quantize", &model, "--out", "small"]);
    assert!(r.code == 2 && r.err.contains("nor a mount"), "{}", r.err);
    let mut codes = Vec::new();
    for verb in [
        &["merge", "a/adapter", "--out", "small/q"][..],
        &["export", "a/adapter", "--to", "vllm", "--out", "small/q"],
        &["quantize", &model, "--out", "small/q"],
    ] {
        codes.push(w.ft(verb).code);
        let left: Vec<_> =
            std::fs::read_dir(w.path("small")).expect("listed").flatten().map(|e| e.file_name()).collect();
        assert!(left.is_empty() || *codes.last().expect("a code") == 0, "{verb:?}: {left:?}");
        let _ = std::fs::remove_dir_all(w.path("small/q"));
    }
    // another program may look into a new disk
    let unmount = std::process::Command::new("umount").arg("--lazy").arg(w.path("small")).status();
    assert!(unmount.expect("ran").success());
    assert!(codes.contains(&5) && codes.iter().all(|c| [0, 5].contains(c)), "{codes:?}");
}

/// Commands are killed at seeded random moments. A final path then has the old or the new contents, byte
/// for byte; the same command succeeds afterwards and leaves no drafts. `FT_KILLS` sets the number of
/// kills.
#[test]
fn killed_anywhere_everything_is_whole_or_absent() {
    let (w, model) = world();
    let kills = kills(7);
    let seed = std::env::var("FT_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(11);
    w.ok(&["run", "r.toml", "run.output=a"]);
    w.ok(&["run", "r.toml", "run.output=b", "run.seed=7"]);
    // Command without the output argument, subfolder of the result, and an earlier command for the same
    // output.
    let saves = ["run", "r.toml", "run.save_every=1", "--resume"];
    type Case<'a> = (&'a [&'a str], &'a str, Option<&'a [&'a str]>);
    let cases: [Case<'_>; 7] = [
        (&["merge", "a/adapter", "--overwrite", "--out"], "", Some(&["merge", "b/adapter", "--out"])),
        (&["merge", "a/adapter", "--out"], "", None),
        (&["export", "a/adapter", "--to", "vllm", "--out"], "", None),
        (&["quantize", &model, "--out"], "", None),
        (&["run", "r.toml", "--overwrite"], "adapter", Some(&["run", "r.toml", "run.seed=7"])),
        (&saves, "adapter", None),
        (&["run", "r.toml", "model.quantize=nf4", "run.output=c", "--overwrite"], "cache", None),
    ];
    // Output argument, and folder to check.
    let words = |i: usize, name: &str| match (cases[i].0[0], cases[i].1) {
        ("run", "cache") => (format!("model.cache={name}"), name.to_string()),
        ("run", result) => (format!("run.output={name}"), format!("{name}/{result}")),
        _ => (name.to_string(), name.to_string()),
    };
    let command = |i: usize, name: &str| {
        let (word, _) = words(i, name);
        cases[i].0.iter().map(|s| s.to_string()).chain([word]).collect::<Vec<_>>()
    };
    let run = |args: &[String]| {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        w.ft(&args)
    };
    let (mut wholes, mut times, mut olds) = (Vec::new(), Vec::new(), Vec::new());
    for (i, (_, _, before)) in cases.iter().enumerate() {
        let begun = Instant::now();
        let r = run(&command(i, &format!("whole{i}")));
        assert_eq!(r.code, 0, "{}", r.err);
        times.push(begun.elapsed().as_micros() as u64);
        wholes.push(folder(&w, &words(i, &format!("whole{i}")).1).expect("a result"));
        olds.push(before.map(|before| {
            let word = words(i, &format!("old{i}")).0;
            let args: Vec<String> = before.iter().map(|s| s.to_string()).chain([word]).collect();
            assert_eq!(run(&args).code, 0);
            folder(&w, &words(i, &format!("old{i}")).1).expect("a result")
        }));
    }
    let mut dice = Dice(seed);
    let mut killed = 0;
    for round in 0..kills {
        let i = (round % cases.len() as u64) as usize;
        let name = format!("k{round}");
        let (word, shown) = words(i, &name);
        if let Some(before) = cases[i].2 {
            let args: Vec<String> = before.iter().map(|s| s.to_string()).chain([word.clone()]).collect();
            assert_eq!(run(&args).code, 0);
            w.write(&format!("{shown}/notes.txt"), "mine");
        }
        // Some commands are killed a second time during recovery.
        for _ in 0..1 + dice.below(2) {
            let args = command(i, &name);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let mut child = w.start(&args);
            std::thread::sleep(Duration::from_micros(dice.below(times[i] * 11 / 10)));
            child.kill().expect("killed");
            killed += u64::from(child.wait().expect("an end").code().is_none());
            let what = format!("round {round}: {} {word}", cases[i].0.join(" "));
            let Some(mut now) = folder(&w, &shown) else {
                assert!(olds[i].is_none(), "{what}: the old one is gone");
                continue;
            };
            if !now.contains_key("notes.txt") && olds[i].is_some() {
                // The file is being moved to the new folder; checked below.
                assert!(now == wholes[i], "{what}: the notes went before the new one came");
            }
            now.remove("notes.txt");
            assert!(now == wholes[i] || olds[i].as_ref() == Some(&now), "{what}: {:?}", now.keys());
        }
        let done = folder(&w, &shown).as_ref() == Some(&wholes[i]) && olds[i].is_none();
        if done && cases[i].0[0] != "run" {
            // Killed after the rename: the next command refuses, and removes drafts.
            assert_eq!(run(&command(i, &name)).code, 2);
        } else {
            let r = run(&command(i, &name));
            assert_eq!(r.code, 0, "round {round}: {}", r.err);
        }
        let mut now = folder(&w, &shown).expect("a result");
        if olds[i].is_some() {
            assert_eq!(now.remove("notes.txt").as_deref(), Some(&b"mine"[..]), "round {round}");
        }
        assert!(now == wholes[i], "round {round}: {:?}", now.keys());
        assert!(litter(&w.path(".")).is_empty(), "round {round}: {:?}", litter(&w.path(".")));
        let top = shown.split('/').next().expect("a name");
        std::fs::remove_dir_all(w.path(top)).expect("removed");
    }
    assert!(killed > 0, "all were over before they could be killed");
}

/// A finished run returns without reading data, model and checkpoints again, unless one of them changed.
#[test]
fn a_finished_run_answers_at_once() {
    let (w, model) = world();
    for file in ["config.json", "model.safetensors"] {
        w.write(&format!("m/{file}"), std::fs::read(format!("{model}/{file}")).expect("a file"));
    }
    let run = ["run", "r.toml", "model.source=m", "run.output=o"];
    // Files modified just before the run may change again within one clock tick.
    std::thread::sleep(Duration::from_secs(3));
    w.ok(&run);
    let resume = |more: &[&str]| w.ft(&[&run[..], &["--resume"], more].concat());
    // Reading the checkpoint detects the damage.
    let weights = w.path("o/checkpoints/step-00000006/weights.safetensors");
    flip(&weights, 1000);
    let before = folder(&w, "o");
    for _ in 0..2 {
        let r = resume(&[]);
        assert!(r.code == 0 && r.err.contains("finished already") && r.out == "o/adapter\n", "{}", r.err);
    }
    assert!(folder(&w, "o") == before);
    assert_eq!(resume(&["run.seed=3"]).code, 5, "another recipe");
    flip(&weights, 1000);
    // An input changed, with restored timestamps.
    flip(&w.path("m/model.safetensors"), 5000);
    let r = resume(&[]);
    assert!(r.code == 2 && r.err.contains("hash.model"), "{}", r.err);
    flip(&w.path("m/model.safetensors"), 5000);
    w.write("rows.jsonl", crate::world::rows(40, 9));
    let r = resume(&[]);
    assert!(r.code == 2 && r.err.contains("hash.data"), "{}", r.err);
    // Without a result, the run resumes to write one.
    w.write("rows.jsonl", crate::world::rows(40, 1));
    let adapter = folder(&w, "o/adapter");
    std::fs::remove_dir_all(w.path("o/adapter")).expect("removed");
    assert_eq!(resume(&[]).code, 0);
    assert!(folder(&w, "o/adapter") == adapter);
}

/// With the model inside the run folder, `--overwrite` keeps the inputs of the run.
#[test]
fn overwriting_keeps_the_inputs_of_the_run() {
    let (w, model) = world();
    for file in ["config.json", "model.safetensors"] {
        w.write(&format!("o/model/{file}"), std::fs::read(format!("{model}/{file}")).expect("a file"));
    }
    let before = folder(&w, "o/model");
    let run = ["run", "r.toml", "model.source=o/model", "run.output=o"];
    w.ok(&run);
    w.ok(&[&run[..], &["--overwrite"]].concat());
    assert!(folder(&w, "o/model") == before);
    std::fs::remove_dir_all(w.path("o/checkpoints")).expect("removed");
    std::fs::remove_dir_all(w.path("o/adapter")).expect("removed");
    std::fs::remove_file(w.path("o/metrics.jsonl")).expect("removed");
    let r = w.ft(&[&run[..], &[IN_FULL]].concat());
    assert!(r.code == 2 && folder(&w, "o/model") == before, "{}", r.err);
}
