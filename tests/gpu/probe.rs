//! Rates of the card: measured by `ft bench --probe` or at the first start, and taken by plans.

use super::device;
use super::world::{FULL, Ran, World, ran, recipe};
use serde_json::{Value, json};

const TINY: [&str; 4] = ["run", "r.toml", "--overwrite", "run.output=out"];

/// A tiny model in bf16 for two steps, in which a plan has nothing to choose.
fn world() -> World {
    let w = World::new();
    w.config("tiny", json!({}));
    let fixed = "device = \"cuda\"\n\n[memory]\nrecompute = \"none\"";
    w.write("r.toml", recipe(FULL).replace("device = \"cpu\"", fixed).replace("steps = 6", "steps = 2"));
    w
}

/// A run that measures if it is the first, with its memory and the bits of its steps.
fn first(w: &World, cache: &str, set: &[&str]) -> (Ran, Value, Vec<(u64, u64, u64, u64)>) {
    let args = [&TINY[..], set].concat();
    let r = ran(w.command(&args).env_remove("FT_PROBE").env("FT_CACHE", cache).output().expect("started"));
    assert_eq!(r.code, 0, "{}", r.err);
    (r, memory(w), w.steps("out"))
}

fn memory(w: &World) -> Value {
    let end = &w.events("out", "end")[0];
    json!([end["peak_device_bytes"], end["reserved_device_bytes"]])
}

#[test]
fn plans_take_the_rates_of_the_probe_and_say_so() {
    if !device() {
        return;
    }
    let w = world();
    let plan = |args: &[&str]| w.ok(&[&["plan", "r.toml"], args].concat()).out;
    assert!(!plan(&[]).contains("measured on"));
    let probe: Value = serde_json::from_str(&w.ok(&["bench", "--probe", "--json"]).out).expect("JSON");
    for key in ["products", "attention", "grouped", "dequantize", "copy", "crossing", "launch"] {
        let all =
            probe["rates"][key].as_array().cloned().unwrap_or_else(|| vec![probe["rates"][key].clone()]);
        assert!(all.iter().all(|x| x.as_f64().is_some_and(|x| x > 0.0)), "{key}: {probe}");
    }
    let day = &probe["date"].as_str().expect("a date")[..10];
    let said = format!("by rates measured on {} on {day}", probe["device"].as_str().expect("a name"));
    assert!(plan(&[]).contains(&said), "{}", plan(&[]));
    let json: Value = serde_json::from_str(&plan(&["--json"])).expect("JSON");
    assert_eq!((&json["time"]["probe"], &json["time"]["data_sheet"]), (&probe, &Value::Null));
    // no rates of f32
    assert!(!plan(&["model.dtype=f32"]).contains("measured on"));
}

#[test]
fn a_first_start_measures_once_and_trains_the_same() {
    if !device() {
        return;
    }
    let w = world();
    w.ok(&TINY);
    let (same, steps) = (memory(&w), w.steps("out"));
    let (begins, cache) = ("measuring the rates of", w.path("cache"));
    let cache = cache.to_str().expect("UTF-8");
    // a file that is not one of rates
    w.write("cache/probes.json", "{");
    let (r, used, bits) = first(&w, cache, &[]);
    assert!(r.err.contains(begins) && r.err.contains("probes.json: no measured rates of"), "{}", r.err);
    assert!(r.err.contains("the rates are kept in"), "{}", r.err);
    assert_eq!((&used, &bits), (&same, &steps));
    let (r, used, bits) = first(&w, cache, &[]);
    assert!(!r.err.contains("rates of"), "{}", r.err);
    assert_eq!((&used, &bits), (&same, &steps));
}

#[test]
fn a_first_start_goes_on_without_a_cache_folder() {
    if !device() {
        return;
    }
    let w = world();
    // the plan of an f32 run takes no rates of bf16
    let (r, ..) = first(&w, "/dev/null", &["model.dtype=f32"]);
    assert!(!r.err.contains("the rates"), "{}", r.err);
    let (r, ..) = first(&w, "/dev/null", &[]);
    assert!(r.err.contains("warning: the rates are not kept: "), "{}", r.err);
}
