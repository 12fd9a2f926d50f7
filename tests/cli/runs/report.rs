//! `ft report` on real runs, and output of `ft bench`.

use crate::world::{LORA, World};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

#[track_caller]
fn says(page: &str, what: &[&str]) {
    for w in what {
        assert!(page.contains(w), "{w:?} is not in the page");
    }
}

#[test]
fn report_of_a_run() {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml", "run.eval_every=2"]);
    let r = w.ok(&["report", "runs/r"]);
    assert_eq!((r.out.as_str(), r.err.as_str()), ("runs/r/report.html\n", ""));
    let html = w.text("runs/r/report.html");
    says(&html, &["finished: 6 steps", "evaluation loss", "weights that train", "moments", "run r.toml"]);
    // Recorded memory: every group is planned and measured, and close to the plan.
    let start = w.events("runs/r", "start").remove(0);
    for key in ["command", "time", "threads", "system", "name"] {
        assert!(!start[key].is_null(), "no {key}");
    }
    let end = w.events("runs/r", "end").remove(0);
    let sum = |v: &Value| v.as_object().expect("a table").values().filter_map(Value::as_u64).sum::<u64>();
    assert_eq!(sum(&end["memory"]["planned"]), end["planned_peak_bytes"].as_u64().unwrap_or(0));
    assert_eq!(sum(&end["memory"]["measured"]), end["peak_device_bytes"].as_u64().unwrap_or(0));
    for exact in ["weights_that_train", "gradients", "moments"] {
        assert!(end["memory"]["planned"][exact].as_u64().is_some_and(|b| b > 0));
        assert_eq!(end["memory"]["planned"][exact], end["memory"]["measured"][exact], "{exact}");
    }
    let r = w.ok(&["report", "runs/r", "--out", "page.html"]);
    assert_eq!((r.out.as_str(), w.text("page.html")), ("page.html\n", html));
    let r = w.ok(&["report", "runs/r/metrics.jsonl"]);
    assert_eq!((r.out.as_str(), r.err.as_str()), ("runs/r/report.html\n", ""));

    for (args, said) in
        [(["report", "gone"], "gone/metrics.jsonl"), (["report", "tiny"], "tiny/metrics.jsonl")]
    {
        let r = w.ft(&args);
        assert!(r.code == 5 && r.err.contains(said) && r.err.contains("hint:"), "{} {}", r.code, r.err);
    }
}

/// A run that stops by itself records the reason; a resume clears it.
#[test]
fn report_of_a_run_that_stopped() {
    let w = World::tiny(LORA);
    let set = ["run", "r.toml", "run.save_every=1", "run.clip=0.0", "optimizer.warmup_steps=0"];
    w.ok(&[&set[..], &["run.steps=2"]].concat());
    let before = w.steps("runs/r");
    let broken = ["run.steps=4", "optimizer.lr=1e38", "--resume"];
    let accept = ["run.steps", "optimizer.lr"].map(|k| ["--accept-change", k]).concat();
    let r = w.ft(&[&set[..], &broken[..], &accept].concat());
    assert_eq!(r.code, 6, "{}", r.err);
    let stopped = w.events("runs/r", "stopped").remove(0);
    assert_eq!((&stopped["code"], stopped["step"].as_u64()), (&json!(6), Some(3)));
    assert!(r.err.contains(stopped["why"].as_str().expect("a text").lines().next().expect("a line")));
    w.ok(&["report", "runs/r"]);
    says(
        &w.text("runs/r/report.html"),
        &[
            "stopped by the guard against numbers that are not finite after step 3 of 4",
            "Resumed 1 time, from step 2.",
        ],
    );
    assert_eq!(w.steps("runs/r")[..2], before[..]);
}

#[test]
fn bench_shows_time_and_memory_by_part() {
    let w = World::tiny(LORA);
    let run = |args: &[&str]| {
        let mut c = w.command(args);
        c.env("FT_CACHE", w.path("cache"));
        let r = crate::world::ran(c.output().expect("started"));
        assert_eq!(r.code, 0, "{}", r.err);
        r.out
    };
    let j: Value = serde_json::from_str(&run(&["bench", "r.toml", "--steps", "2", "--json"])).expect("JSON");
    let number = |v: &Value| v.as_f64().unwrap_or(f64::NAN);
    let names = ["data", "forward", "head", "recompute", "backward", "step"];
    assert_eq!(j["parts"].as_object().expect("parts").keys().collect::<Vec<_>>(), names);
    let sum: f64 = names.iter().map(|n| number(&j["parts"][n])).sum();
    assert!((sum / number(&j["step_seconds"]) - 1.0).abs() < 1e-6, "{j}");
    for part in ["forward", "head", "backward", "step"] {
        assert!(number(&j["shares"][part]) > 0.0, "{part}: {j}");
    }
    assert!(j["shares"]["data"].is_null() && number(&j["copy_bytes_per_second"]) > 0.0, "{j}");
    assert!(number(&j["fastest_step_seconds"]) <= number(&j["step_seconds"]));
    let share =
        number(&j["flops_per_step"]) / number(&j["fastest_step_seconds"]) / number(&j["matmul_flops"]);
    assert!((number(&j["share_of_matmul"]) / share - 1.0).abs() < 1e-9);
    // A model this small is far below the speed of a large product.
    assert!(share > 0.0 && share < 1.0, "{share}");
    let sum = |side: &str| -> u64 {
        j["memory"][side].as_object().expect("a table").values().filter_map(Value::as_u64).sum()
    };
    assert_eq!(sum("planned"), j["planned_peak_bytes"].as_u64().unwrap_or(0));
    assert_eq!(sum("measured"), j["peak_device_bytes"].as_u64().unwrap_or(0));
    // An entry of another version of ft stays, and hides no other.
    let mut rates = w.json("cache/rates.json");
    rates["other"] = json!({"speed": 1});
    w.write("cache/rates.json", rates.to_string());
    let text = run(&["bench", "r.toml", "--steps", "1"]);
    assert_eq!(w.json("cache/rates.json")["other"]["speed"], 1);
    for said in ["of the fastest product", "moments", "at its peak"] {
        assert!(text.contains(said), "{said:?} is not in\n{text}");
    }
    // a plan of the same family takes the rate as measured; one of another family says so
    let plan = ["plan", "r.toml", "run.device=cpu"];
    let of_another = "measured by ft bench, on a model of another family";
    let text = run(&plan);
    assert!(text.contains("tokens a second") && !text.contains(of_another), "{text}");
    let rates = w.json("cache/rates.json");
    let date = rates.as_object().expect("rates").values().find_map(|rate| rate["date"].as_str());
    let day = date.and_then(|date| date.split('T').next()).expect("a date");
    let text = run(&[&plan[..], &["--devices", "2"]].concat());
    assert!(text.contains(&format!("(measured by ft bench on {day})")), "{text}");
    w.config("tiny", json!({"model_type": "llama", "attention_bias": false, "mlp_bias": false}));
    let text = run(&[&plan[..], &["model.weights=random"]].concat());
    assert!(text.contains(of_another), "{text}");
    let text = run(&[&plan[..], &["model.weights=random", "--json"]].concat());
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["time"]["other_family"], true, "{}", json["time"]);
}

/// A live page of a run follows its metrics, and ends on a signal at once, a half request or not.
#[test]
fn a_live_report_ends_on_a_signal() {
    let w = World::tiny(LORA);
    w.ok(&["run", "r.toml"]);
    assert_eq!(w.ft(&["report", "--live", "gone", "--port", "0"]).code, 5);
    let mut command = w.command(&["report", "--live", "runs/r", "--port", "0"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("started");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("an address");
    let address = line.trim().trim_start_matches("http://").trim_end_matches('/').to_string();
    let ask = || {
        let mut stream = TcpStream::connect(&address).expect("connected");
        write!(stream, "GET / HTTP/1.1\r\nhost: {address}\r\n\r\n").expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    };
    assert!(ask().contains("finished: 6 steps"));
    w.ok(&["run", "r.toml", "run.steps=9", "--resume", "--accept-change", "run.steps"]);
    assert!(ask().contains("finished: 9 steps"));
    let mut half = TcpStream::connect(&address).expect("connected");
    half.write_all(b"GET / HTTP/1.1\r\nhost: ").expect("sent");
    Command::new("kill").arg(child.id().to_string()).status().expect("sent");
    assert_eq!(child.wait().expect("ended").code(), Some(143));
}
