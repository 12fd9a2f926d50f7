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

/// A run that measures if it is the first.
fn run(w: &World, cache: &str, set: &[&str]) -> Ran {
    let args = [&TINY[..], set].concat();
    let r = ran(w.command(&args).env_remove("FT_PROBE").env("FT_CACHE", cache).output().expect("started"));
    assert_eq!(r.code, 0, "{}", r.err);
    r
}

/// Bits of the steps, and most bytes on the device, in use and held.
fn outcome(w: &World) -> Value {
    let end = &w.events("out", "end")[0];
    json!([w.steps("out"), end["peak_device_bytes"], end["reserved_device_bytes"]])
}

#[test]
fn plans_take_the_rates_of_the_probe_and_say_so() {
    if !device() {
        return;
    }
    let w = world();
    let plan = |args: &[&str]| w.ok(&[&["plan", "r.toml"], args].concat()).out;
    assert!(!plan(&[]).contains("measured on"));
    let probe = w.ok(&["bench", "--probe", "--json"]).json();
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
    let (same, cache) = (outcome(&w), w.path("cache"));
    let cache = cache.to_str().expect("UTF-8");
    // a file that is not one of rates
    w.write("cache/probes.json", "{");
    let err = run(&w, cache, &[]).err;
    for said in ["measuring the rates of", "probes.json: no measured rates of", "the rates are kept in"] {
        assert!(err.contains(said), "{err}");
    }
    assert_eq!(outcome(&w), same);
    let err = run(&w, cache, &[]).err;
    assert!(!err.contains("rates of"), "{err}");
    assert_eq!(outcome(&w), same);
}

#[test]
fn a_first_start_goes_on_without_a_cache_folder() {
    if !device() {
        return;
    }
    let w = world();
    // the plan of an f32 run takes no rates of bf16
    let err = run(&w, "/dev/null", &["model.dtype=f32"]).err;
    assert!(!err.contains("the rates"), "{err}");
    let err = run(&w, "/dev/null", &[]).err;
    assert!(err.contains("warning: the rates are not kept: "), "{err}");
}
