//! Faults of devices and drivers, as an emulator can inject them: words, exit codes, and runs that go on.

use super::device;
use super::world::{FULL, LORA, Ran, World, few, ran};

/// A world on a device that injects faults, else none with a note.
fn world(rules: &str) -> Option<World> {
    if !device() {
        return None;
    }
    let w = World::tiny(rules);
    let report = w.path("report");
    w.command(&["doctor"]).env("EMU_REPORT", &report).output().expect("started");
    if !report.exists() {
        eprintln!("not run: the device injects no faults");
        return None;
    }
    Some(w)
}

/// Runs two steps on the device with a fault.
fn run(w: &World, fault: (&str, &str), set: &[&str]) -> Ran {
    let args = ["run", "r.toml", "run.device=cuda", "run.steps=2", "run.output=run", "--overwrite"];
    // A captured backtrace is no part of a message.
    let mut command = w.command(&[&args, set].concat());
    ran(command.env(fault.0, fault.1).env("RUST_BACKTRACE", "1").output().expect("started"))
}

#[track_caller]
fn fails(r: &Ran, code: i32, words: &[&str]) {
    assert_eq!(r.code, code, "{}", r.err);
    for word in words {
        assert!(r.err.contains(word), "no {word:?}: {}", r.err);
    }
    for none in ["DriverError(", "CublasError(", "candle_core", "panicked", "stack backtrace"] {
        assert!(!r.err.contains(none), "{none:?}: {}", r.err);
    }
}

/// Without page-locked memory, one warning, and the same numbers.
#[test]
fn pinning_falls_back_to_pageable_memory() {
    let host = "memory.offload=['params', 'activations', 'optimizer']";
    let cases = [(FULL, &["memory.recompute=all", host][..]), (LORA, &["memory.offload=['activations']"])];
    for (rules, set) in cases {
        let Some(w) = world(rules) else { return };
        let locked = run(&w, ("EMU_PIN", ""), set);
        assert!(locked.code == 0 && !locked.err.contains("page-locked"), "{}", locked.err);
        let steps = w.steps("run");
        assert_eq!(steps.len(), 2);
        let (on, off) = ("memory.pin=true", "memory.pin=false");
        let faults = [("refuse", on), ("none", off), ("refuse", off), ("none", on)];
        for (fault, pin) in faults.into_iter().take(few(2)) {
            let pageable = run(&w, ("EMU_PIN", fault), &[set, &[pin]].concat());
            assert_eq!(pageable.code, 0, "{}", pageable.err);
            assert_eq!(pageable.err.matches("cannot be page-locked").count(), 1, "{}", pageable.err);
            assert_eq!(w.steps("run"), steps, "{fault}, {pin}");
        }
    }
}

/// A product without memory: recomputed if that takes less, else an error with the plan's figures.
#[test]
fn a_library_out_of_memory_is_told() {
    let Some(w) = world(LORA) else { return };
    let all = run(&w, ("EMU_CUBLAS_FAIL", "60"), &["memory.recompute=all"]);
    fails(
        &all,
        8,
        &["out of memory", "CUDA device 0 (", "CUBLAS_STATUS_ALLOC_FAILED", "the plan had said", "hint: "],
    );
    let less = run(&w, ("EMU_CUBLAS_FAIL", "60"), &[]);
    assert_eq!(less.code, 0, "{}", less.err);
    assert!(less.err.contains("out of memory in step 1: it begins anew recomputing"), "{}", less.err);
    let eval = w.command(&["eval", "r.toml", "run.device=cuda"]).env("EMU_CUBLAS_FAIL", "1").output();
    fails(
        &ran(eval.expect("started")),
        8,
        &["CUDA device 0 (", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"],
    );
}

/// A device with less memory than the recipe says.
#[test]
fn a_device_out_of_memory_is_told() {
    let Some(w) = world(FULL) else { return };
    w.config("tiny", serde_json::json!({"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 8000}));
    let r = run(&w, ("EMU_MEMORY", "96M"), &["memory.budget=40GiB"]);
    fails(
        &r,
        8,
        &["out of memory", "CUDA device 0 (", "CUDA_ERROR_OUT_OF_MEMORY", "the plan had said", "hint: "],
    );
    let warned = ["keeps within memory.budget = 40.00 GiB, but only ", " are available here"];
    assert!(warned.iter().all(|words| r.err.contains(words)), "{}", r.err);
}

/// Without a budget, a run that needs more than the whole card is refused; one that needs more than its free part, by
/// an estimate, is warned of.
#[test]
fn a_run_larger_than_the_card_is_refused_before_it_downloads() {
    let Some(w) = world(FULL) else { return };
    let hub = ["run", "qwen3-32b-qlora", "run.device=cuda"];
    let hub = ran(w.command(&hub).env("EMU_MEMORY", "12G").output().expect("started"));
    for refused in [hub, run(&w, ("EMU_MEMORY", "96M"), &[])] {
        fails(&refused, 8, &["error: this run needs ", " is available", "hint: "]);
    }
    assert!(!w.path("runs").exists() && !w.path("run").exists());
    // of a tiny model, all but the context
    let warned = run(&w, ("EMU_MEMORY", "630M"), &[]);
    fails(&warned, 0, &["warning: this run needs "]);
}

/// A card before compute capability 8.0: refused at opening, and `auto` is the CPU.
#[test]
fn an_old_card_is_refused_and_auto_takes_the_cpu() {
    let Some(w) = world(LORA) else { return };
    let on = |args: &[&str]| ran(w.command(args).env("EMU_ARCH", "75").output().expect("started"));
    let run = ["run", "r.toml", "run.steps=1", "run.output=run", "--overwrite"];
    let old = "has compute capability 7.5, and ft needs 8.0 or later";
    fails(
        &on(&[&run[..], &["run.device=cuda"]].concat()),
        2,
        &["CUDA device 0 (", old, "hint: run.device=cpu"],
    );
    let auto = on(&[&run[..], &["run.device=auto"]].concat());
    assert_eq!(auto.code, 0, "{}", auto.err);
    assert_eq!(auto.err.matches(old).count(), 1, "{}", auto.err);
    assert!(auto.err.contains("run.device = \"auto\" is the CPU"), "{}", auto.err);
    let doctor = on(&["doctor"]);
    let said = doctor.out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(said.contains(old) && said.contains("auto: cpu"), "{said}");
}

#[test]
fn an_old_driver_is_named_with_what_replaces_it() {
    let Some(w) = world(LORA) else { return };
    for device in ["run.device=cuda", "run.device=auto"] {
        let run = w.command(&["run", "r.toml", "run.steps=1", device]).env("EMU_DRIVER", "12020").output();
        let words = ["driver here supports CUDA 12.2", "ft needs 12.4", "hint: NVIDIA's driver 550"];
        fails(&ran(run.expect("started")), 2, &words);
    }
}

/// With the oldest driver, which compiles no newer PTX, the same numbers as with the newest.
#[test]
fn the_oldest_driver_computes_the_same() {
    let cases = [(FULL, &[][..]), (LORA, &["model.quantize=nf4"]), (LORA, &["model.dtype=f32"])];
    for (rules, set) in cases.into_iter().take(few(2)) {
        let Some(w) = world(rules) else { return };
        let mut steps = Vec::new();
        for version in ["12040", "13000"] {
            let r = run(&w, ("EMU_DRIVER", version), set);
            assert_eq!(r.code, 0, "{version}: {}", r.err);
            steps.push(w.steps("run"));
        }
        assert!(!steps[0].is_empty() && steps[0] == steps[1], "{steps:?}");
    }
}

/// Each of several ranks is told by its own device.
#[test]
fn a_rank_out_of_memory_is_told_with_its_device() {
    let Some(w) = world(FULL) else { return };
    if !super::ranks::devices(2) {
        return;
    }
    let set = ["memory.recompute=all", "run.micro_rows=1", "parallel.data=2"];
    let r = run(&w, ("EMU_CUBLAS_FAIL", "60"), &set);
    fails(&r, 8, &["CUDA device ", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"]);
}
