//! Products in 8-bit floats: against their rounded operands, runs beside bf16, and refusals.

use super::world::{LORA, Ran, World, few, nightly, ran, recipe};
use super::{device, emulated};
use serde_json::json;

const FP8: &str = "memory.products=fp8";

fn world() -> World {
    let w = World::new();
    let config = json!({"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 16});
    w.config("tiny", config);
    w.write("r.toml", recipe(LORA).replace("steps = 6", if nightly() { "steps = 2" } else { "steps = 1" }));
    w
}

/// Runs the recipe on a device of a compute capability, as an emulator has it.
fn on(w: &World, arch: &str, set: &[&str]) -> Ran {
    let args = ["run", "r.toml", "run.device=cuda", "run.output=run", "--overwrite"];
    ran(w.command(&[&args, set].concat()).env("EMU_ARCH", arch).output().expect("started"))
}

/// Step, loss, gradient norm and learning rate, as bits.
type Step = (u64, u64, u64, u64);

fn steps(w: &World, arch: &str, set: &[&str]) -> Vec<Step> {
    let r = on(w, arch, set);
    assert_eq!(r.code, 0, "{arch} {set:?}: {}", r.err);
    w.steps("run")
}

#[test]
fn products_are_those_of_the_rounded_operands() {
    if !device() {
        return;
    }
    let device = ft::kernel::cuda::open(0).expect("the device");
    let mut report = super::report::Report::default();
    super::fp8_products::check(&device, &mut report).expect("products");
    assert_eq!(report.over, 0, "{} checks", report.checks);
}

/// Losses and gradient norms near those of bf16, with a scale a row (9.0) and one for all (8.9), for dense and 4-bit
/// weights (at a push for a step of 4-bit ones on 9.0); recomputing changes no bit.
#[test]
fn runs_are_near_those_in_bf16() {
    if !device() {
        return;
    }
    let w = world();
    for base in ["model.quantize=nf4", "model.quantize=none"].into_iter().take(few(1)) {
        let exact = steps(&w, "90", &[base, "memory.recompute=none"]);
        for arch in ["90", "89"].into_iter().take(few(1)) {
            let ours = steps(&w, arch, &[base, FP8, "memory.recompute=none"]);
            for (a, b) in ours.iter().zip(&exact) {
                let apart = |a, b| super::apart(f64::from_bits(a), f64::from_bits(b));
                let (loss, norm) = (apart(a.1, b.1), apart(a.2, b.2));
                assert!(loss < 0.01 && norm < 0.15, "{base} {arch}: {loss:.1e}, {norm:.1e}");
                assert!(loss > 0.0, "{base} {arch}: the products of bf16");
            }
            assert_eq!(steps(&w, arch, &[base, FP8, "memory.recompute=all"]), ours, "{base} {arch}");
        }
    }
}

/// With a scale a row, a row does not depend on the others of its micro-batch.
#[test]
fn rows_do_not_depend_on_their_micro_batch() {
    if !device() {
        return;
    }
    let w = world();
    let loss = |rows| f64::from_bits(steps(&w, "90", &[FP8, "run.steps=1", "run.batch_rows=4", rows])[0].1);
    let apart = super::apart(loss("run.micro_rows=1"), loss("run.micro_rows=4"));
    assert!(apart < 1e-6, "{apart:.1e}");
}

#[test]
fn older_cards_and_the_cpu_are_refused() {
    if !device() || !emulated() {
        return;
    }
    let w = world();
    let fails = |r: &Ran, words: &[&str]| {
        assert_eq!(r.code, 2, "{}", r.err);
        for word in words.iter().chain(&["memory.products", "hint: "]) {
            assert!(r.err.contains(word), "no {word:?}: {}", r.err);
        }
    };
    fails(&on(&w, "80", &[FP8]), &["compute capability 8.0"]);
    let mut check = w.command(&["check", "r.toml", "run.device=cuda", FP8]);
    fails(&ran(check.env("EMU_ARCH", "80").output().expect("started")), &["compute capability 8.0"]);
    fails(&on(&w, "90", &[FP8, "model.dtype=f16"]), &["model.dtype"]);
    let cpu = ["run", "r.toml", "run.device=cpu", FP8];
    fails(&ran(w.command(&cpu).output().expect("started")), &["CPU"]);
}

/// The bench says how far products are from bf16.
#[test]
fn the_bench_says_the_error() {
    if !device() || !emulated() {
        return;
    }
    let w = world();
    let args = ["bench", "r.toml", "run.device=cuda", "--steps", "1", "--json", FP8];
    for (arch, scales) in [("90", "row"), ("89", "tensor")] {
        let r = ran(w.command(&args).env("EMU_ARCH", arch).output().expect("started"));
        assert_eq!(r.code, 0, "{}", r.err);
        let said = r.json();
        let of = |key: &str| said["fp8"][key].as_f64().unwrap_or(f64::NAN);
        assert_eq!(said["fp8"]["scales"], scales);
        assert!((0.02..0.045).contains(&of("forward")), "{said:#}");
        assert!((0.03..0.07).contains(&of("backward")), "{said:#}");
        assert!(of("loss") < 0.01 && of("grad_norm") < 0.15, "{said:#}");
    }
}
