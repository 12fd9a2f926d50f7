//! `ft plan --devices N`: layouts of ranks, by predicted time.

use crate::split::{all, launch};
use crate::world::{FULL, World, ran, recipe};
use serde_json::Value;

fn json(w: &World, args: &[&str]) -> Value {
    w.ok(&[&["plan"][..], args, &["--json"]].concat()).json()
}

/// Memory and bytes of each layout are those of its plan, and the settings are what `ft plan` takes.
#[test]
fn layouts_are_plans_in_the_order_of_time() {
    let w = World::new();
    let args = ["qwen3-8b-qlora", "--gpu", "24GB"];
    let found = json(&w, &[&args[..], &["--devices", "8", "--link", "pcie"]].concat());
    let layouts = found["layouts"].as_array().expect("a list");
    assert!(
        !layouts.is_empty() && layouts.len() as u64 <= found["allowed"].as_u64().unwrap_or(0),
        "{found:#}"
    );
    let time = |l: &Value| l["step_seconds"].as_f64().expect("seconds");
    assert!(layouts.windows(2).all(|l| time(&l[0]) <= 1.02 * time(&l[1])), "{found:#}");
    for layout in layouts.iter().take(5) {
        let set: Vec<&str> = layout["set"].as_str().expect("settings").split(' ').collect();
        let plan = json(&w, &[&args[..], &set].concat());
        assert_eq!(plan["device"]["total"], layout["memory"], "{layout}");
        assert_eq!(plan["wire_bytes_a_step"], layout["wire_bytes_a_step"], "{layout}");
        assert_eq!((plan["ranks"].as_u64(), plan["fits"].as_bool()), (Some(8), Some(true)), "{layout}");
        // to paste
        let lines = layout["recipe"].as_str().expect("lines");
        assert!(lines.starts_with("[parallel]\n") && layout["limited_by"].is_string(), "{layout}");
    }
    let text = w.ok(&[&["plan"][..], &args, &["--devices", "8"]].concat()).out;
    for words in [
        "layouts, the fastest that fit 8 CUDA cards of 22.35 GiB",
        "links of 20.0 GB a second to each device (assumed for PCIe links)",
        "[parallel]\ndata = ",
    ] {
        assert!(text.contains(words), "{words:?}: {text}");
    }
}

/// A slow link prefers layouts that exchange less.
#[test]
fn a_slower_link_takes_longer_and_never_prefers_more_bytes() {
    let w = World::new();
    let of = |link| {
        json(&w, &["qwen3-8b-full", "--gpu", "80GB", "--devices", "8", "--link", link])["layouts"][0].clone()
    };
    let [fast, slow] = ["nvlink", "tcp"].map(of);
    assert!(slow["step_seconds"].as_f64() > fast["step_seconds"].as_f64(), "{slow} {fast}");
    assert!(slow["wire_bytes_a_step"].as_u64() <= fast["wire_bytes_a_step"].as_u64(), "{slow} {fast}");
}

#[test]
fn a_model_that_no_layout_fits_ends_with_a_hint() {
    let w = World::new();
    let r = w.ft(&["plan", "llama-3.1-8b-full", "--gpu", "8GB", "--devices", "2"]);
    assert!(
        r.code == 8 && r.err.contains("no layout of 2 devices fits") && r.err.contains("hint: "),
        "{}",
        r.err
    );
    assert!(r.out.starts_with("0 of "), "{}", r.out);
}

/// On the CPU, ranks share the host; rows that do not divide are named.
#[test]
fn layouts_of_the_cpu_share_the_host() {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", recipe(FULL));
    let found = json(&w, &["r.toml", "--devices", "3"]);
    assert_eq!(found["device_kind"], "cpu");
    let reasons = found["others"].as_array().expect("a list");
    assert!(
        reasons.iter().any(|r| r["reason"].as_str().is_some_and(|r| r.contains("batch_rows = 4"))),
        "{found:#}"
    );
}

/// `parallel = "auto"` is the plan's first choice for the started processes: on the screen and in the resolved recipe.
#[test]
fn the_fastest_layout_is_taken_and_written() {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", recipe(FULL));
    w.write("auto.toml", format!("parallel = \"auto\"\n{}", recipe(FULL)));
    let best = json(&w, &["r.toml", "--devices", "2"])["layouts"][0]["set"].clone();
    let said =
        format!("auto.toml:1:12: parallel = \"auto\" is {}: links of ", best.as_str().expect("settings"));
    let set = ["run", "auto.toml", "run.output=o", "run.steps=1"];
    let ranks = all(launch(&w, &[0, 1], 2, &set));
    assert!(ranks.iter().all(|r| r.code == 0) && ranks[0].err.contains(&said), "{said}: {}", ranks[0].err);
    let written = w.text("o/recipe.toml");
    let table = &toml::from_str::<toml::Table>(&written).expect("a recipe")["parallel"];
    for set in best.as_str().into_iter().flat_map(|set| set.split(' ')) {
        if let Some((key, n)) = set.strip_prefix("parallel.").and_then(|set| set.split_once('=')) {
            assert_eq!(table[key].as_integer(), n.parse().ok(), "{key}: {written}");
        }
    }
    // alone on the CPU
    for verb in ["check", "run"] {
        let alone = w.ok(&[verb, "auto.toml", "run.output=p", "run.steps=1"]);
        assert!(alone.err.contains("parallel = \"auto\" is one rank"), "{verb}: {}", alone.err);
    }
}

/// A resumed run takes the layout of its run folder, even if another one is faster by now.
#[test]
fn a_resumed_run_keeps_its_layout() {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("auto.toml", format!("parallel = \"auto\"\n{}", recipe(FULL)));
    let run = |more: &[&str]| {
        let set = ["run", "auto.toml", "run.output=o", "run.steps=2", "run.save_every=1", "run.keep=9"];
        for r in all(launch(&w, &[0, 1], 2, &[&set[..], more].concat())) {
            assert_eq!(r.code, 0, "{}", r.err);
        }
        toml::from_str::<toml::Table>(&w.text("o/recipe.toml")).expect("a recipe")
    };
    let mut written = run(&[]);
    let stages = written["parallel"].get("pipeline").and_then(toml::Value::as_integer);
    let (key, other) = if stages == Some(2) { ("data", "data = 2") } else { ("pipeline", "pipeline = 2") };
    written.insert("parallel".into(), toml::from_str(other).expect("a table"));
    w.write("o/recipe.toml", toml::to_string(&written).expect("a recipe"));
    for folder in ["checkpoints/step-00000002", "model"] {
        std::fs::remove_dir_all(w.path("o").join(folder)).expect("removed");
    }
    assert_eq!(run(&["--resume"])["parallel"][key].as_integer(), Some(2));
}

/// A plan of `parallel = "auto"` needs neither the hub nor the card; for another card it is that of one.
#[test]
fn a_layout_is_planned_without_hub_and_card() {
    let w = World::new();
    let plan = |set: &[&str]| w.ft(&[&["plan", "qwen3-8b-qlora", "parallel=auto"][..], set].concat());
    let here = plan(&["run.device=cpu", "memory.budget=1TiB", "memory.host_budget=1TiB"]);
    assert!(here.err.contains("parallel = \"auto\" is one rank"), "{}", here.err);
    let far = &["run.device=cuda", "memory.budget=22GiB"][..];
    for set in [&["--gpu", "24GB"][..], far] {
        if set != far || ft::kernel::cuda::count() == 0 {
            let r = plan(set);
            assert!(r.code == 0 && r.err.contains("this plan is of one card"), "{set:?}: {}", r.err);
        }
    }
}

/// Keys of the layout, in the recipe or not, give way to the search, and are named; defaults are not.
#[test]
fn a_layout_that_the_search_replaces_is_named() {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", recipe(FULL));
    w.write("two.toml", format!("{}[parallel]\ndata = 2\nzero = 0\n", recipe(FULL)));
    let line = w.text("two.toml").lines().position(|l| l == "data = 2").map_or(0, |n| n + 1);
    let place = format!("two.toml:{line}:");
    let own = "parallel.data = 2 is not used: --devices 2 searches all layouts of 2 ranks";
    let zero = "parallel.zero = 3 is not used: --devices 2";
    for (args, said) in [
        (&["two.toml"][..], &[&*place, own][..]),
        (&["r.toml", "parallel.data=2", "parallel.zero=3"], &[own, zero]),
        (&["r.toml", "parallel.data=1"], &[]),
    ] {
        let r = w.ok(&[&["plan"][..], args, &["--devices", "2"]].concat());
        assert!(said.iter().all(|said| r.err.contains(said)), "{said:?}: {}", r.err);
        let named = ["parallel.data", "parallel.zero"].map(|key| r.err.contains(&format!("{key} = ")));
        assert_eq!(named, [!said.is_empty(), said.contains(&zero)], "{}", r.err);
    }
}

#[test]
fn plans_use_the_measured_links() {
    let w = World::new();
    w.config("tiny", serde_json::json!({}));
    w.write("r.toml", recipe(FULL));
    let measured = w.ok(&["bench", "--ranks", "2", "--json"]).json();
    assert!(
        ["gather", "sum", "exchange"].iter().all(|rate| measured[rate].as_f64() > Some(0.0)),
        "{measured}"
    );
    let source = measured["source"].as_str().expect("words");
    let day = source.strip_prefix("measured by ft bench --ranks 2 on ");
    let day = day.and_then(|day| day.strip_suffix(", threads"));
    assert!(day.is_some_and(|day| day.len() == 10 && day.split('-').count() == 3), "{source}");
    assert_eq!(json(&w, &["r.toml", "--devices", "2"])["link"], measured);
    let named = json(&w, &["r.toml", "--devices", "2", "--link", "tcp"]);
    assert_eq!(named["link"]["gather"], 1e9);
    // without a cache folder, rates are shown alone
    for of in [&["--ranks", "2"][..], &["r.toml", "--steps", "1"]] {
        let mut bench = w.command(&[&["bench", "--json"], of].concat());
        let r = ran(bench.env("FT_CACHE", "/dev/null").output().expect("started"));
        assert!(r.code == 0 && r.err.contains("the rates are not kept: "), "{of:?}: {}", r.err);
        assert!(r.json().is_object(), "{of:?}: {}", r.out);
    }
}
