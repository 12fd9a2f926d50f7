//! Measured rates of a card in plans, from the file that keeps them.

use crate::world::World;
use serde_json::{Value, json};

/// Rates of an H100 as `ft bench --probe` keeps them.
fn probes() -> Value {
    json!({"H100": {
        "device": "NVIDIA H100 PCIe", "driver": 13000, "ft": "0.1.0", "date": "2026-11-26T10:00:00Z",
        "rates": {"products": 500e12, "attention": [250e12, 150e12], "grouped": 150e12, "dequantize": 8e11,
                  "fp8": 0.8, "copy": 1.5e12, "crossing": [25e9, 12e9], "launch": 4e-6},
    }})
}

#[test]
fn plans_of_a_card_take_its_measured_rates() {
    let w = World::new();
    let plan = |card: &str| w.ok(&["plan", "qwen3-8b-qlora", "--gpu", card]);
    let sheet = plan("H100").out;
    assert!(sheet.contains("tokens a second, by the data sheet of H100"), "{sheet}");
    w.write("cache/probes.json", probes().to_string());
    let of_h100 = plan("H100").out;
    assert!(of_h100.contains("by rates measured on NVIDIA H100 PCIe on 2026-11-26"), "{of_h100}");
    assert!(!of_h100.contains("data sheet"), "{of_h100}");
    let json = w.ok(&["plan", "qwen3-8b-qlora", "--gpu", "H100", "--json"]).json();
    assert_eq!((&json["time"]["probe"], &json["time"]["data_sheet"]), (&probes()["H100"], &Value::Null));
    let of = |i: usize| json["time"]["step_seconds"][i].as_f64().expect("seconds");
    assert!((of(1) / of(0) - 1.3 / 0.7).abs() < 1e-9, "{json}");
    let layouts = w.ok(&["plan", "qwen3-8b-qlora", "--gpu", "H100", "--devices", "2"]).out;
    let rate = "500.0 TFLOP a second (by rates measured on NVIDIA H100 PCIe on 2026-11-26)";
    assert!(layouts.contains(rate), "{layouts}");
    assert!(plan("A100-80").out.contains("by the data sheet of A100-80"));
}

/// A card that dequantizes slowly keeps a whole layer, as the plan says.
#[test]
fn a_layer_is_dequantized_once_where_that_is_slow() {
    let w = World::new();
    let mut probes = probes();
    for (rate, held) in [(8e11, "per_matmul"), (5e10, "per_layer")] {
        probes["H100"]["rates"]["dequantize"] = rate.into();
        w.write("cache/probes.json", probes.to_string());
        let plan = ["plan", "qwen3-8b-qlora", "--gpu", "H100", "memory.recompute=all", "--json"];
        let choice = w.ok(&plan).json()["choices"]["dequantize"].clone();
        let reason = choice["reason"].as_str().unwrap_or_default();
        assert_eq!(choice["value"], held, "{choice}");
        assert_eq!(
            reason.starts_with("auto: dequantizing a layer once saves "),
            held == "per_layer",
            "{choice}"
        );
    }
}

#[test]
fn a_broken_file_of_rates_is_named_and_the_data_sheet_taken() {
    let w = World::new();
    w.write("cache/probes.json", probes().to_string().replace("1500000000000.0", "-1.0"));
    let r = w.ok(&["plan", "qwen3-8b-qlora", "--gpu", "H100"]);
    assert!(r.out.contains("by the data sheet of H100"), "{}", r.out);
    let said = r.err.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        said.contains("probes.json: no measured rates of H100: a rate is not a positive number"),
        "{said}"
    );
    assert!(said.contains("hint: ft bench --probe"), "{said}");
}

#[test]
fn a_probe_without_a_card_is_refused() {
    let w = World::new();
    let r = crate::world::ran(
        w.command(&["bench", "--probe"]).env("CUDA_VISIBLE_DEVICES", "").output().expect("started"),
    );
    assert_eq!((r.code, r.out.as_str()), (2, ""), "{}", r.err);
    assert!(r.err.contains("error: --probe: ") && !r.err.contains("run.device"), "{}", r.err);
    assert!(!w.path("cache/probes.json").exists());
}
