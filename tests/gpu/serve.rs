//! `ft serve` on one device, and with one copy of the model on each of several.

use super::server::{Server, ask, until};
use super::world::{World, repository};
use ft::kernel::cuda;
use serde_json::{Value, json};
use std::io::Read;

/// Returns true if there are enough devices; otherwise prints a note.
fn devices(n: usize) -> bool {
    let there = cuda::count();
    if there < n {
        eprintln!("not run: {n} CUDA devices are needed, and there are {there}");
    }
    there >= n
}

/// Device and step of the copies in `/v1/models`.
fn copies(address: &str) -> Vec<(String, Option<u64>)> {
    let (status, models) = ask(address, "GET", "/v1/models", &Value::Null).expect("an answer");
    assert_eq!(status, 200, "{models}");
    let copies = models["data"][0]["copies"].as_array().expect("copies").clone();
    copies.iter().map(|c| (c["device"].as_str().expect("a device").into(), c["step"].as_u64())).collect()
}

/// The answers of one device are those of the CPU.
#[test]
fn a_device_answers_as_the_cpu_does() {
    if !devices(1) {
        return;
    }
    let w = World::new();
    let [want, got] = ["cpu", "cuda:0"].map(|device| {
        let s = Server::start(&w, &["--device", device, "--dtype", "f32"]);
        let body = json!({"model": s.model, "prompt": "a", "temperature": 0, "max_tokens": 8});
        let (status, answer) = s.post("/v1/completions", body);
        assert_eq!(status, 200, "{device}: {answer}");
        assert_eq!(s.interrupt(), Some(130), "{device}");
        (answer["choices"].clone(), answer["usage"].clone())
    });
    assert_eq!(got, want);
}

#[test]
fn each_device_answers_a_request_at_the_same_time() {
    if !devices(3) {
        return;
    }
    let w = World::new();
    let s = Server::start(&w, &["--device", "cuda:1,cuda:2", "--dtype", "f32", "--max-tokens", "100000"]);
    assert_eq!(copies(&s.address), [("cuda:1".to_string(), None), ("cuda:2".to_string(), None)]);
    let body = |tokens: u64, stream: bool| json!({"model": s.model, "prompt": "a", "temperature": 2, "seed": 1, "max_tokens": tokens, "stream": stream});
    // An answer that continues until the client disconnects.
    let mut long = s.open("POST", "/v1/completions", "", body(100_000, true).to_string().as_bytes());
    long.read_exact(&mut [0; 200]).expect("it has begun");
    for _ in 0..2 {
        let (status, answer) = s.post("/v1/completions", body(1, false));
        assert_eq!((status, &answer["usage"]["completion_tokens"]), (200, &json!(1)), "{answer}");
    }
    long.read_exact(&mut [0; 200]).expect("it goes on");
    drop(long);
    assert_eq!(s.interrupt(), Some(130));
}

#[test]
fn each_copy_takes_up_the_checkpoints_of_a_run_beside_it() {
    if !devices(3) {
        return;
    }
    let w = World::new();
    let text = std::fs::read_to_string(repository().join("recipes/quickstart.toml")).expect("a recipe");
    w.write("q.toml", text.replace("\"data/", &format!("\"{}/data/", repository().display())));
    let set = ["run.device=cuda", "run.steps=100000", "run.save_every=1", "run.eval_at_start=false"];
    let serve = [
        "serve.devices=['cuda:1', 'cuda:2']",
        "serve.port=0",
        "run.output=o",
        "run.batch_rows=1",
        "run.micro_rows=1",
    ];
    let taken = w.ft(&["check", "q.toml", "run.device=cuda", "serve.devices=['cuda:0', 'cuda:1']"]);
    assert!(
        taken.code == 2 && taken.err.contains("\"cuda:0\"]: this is the one that trains"),
        "{}",
        taken.err
    );
    let many = cuda::count();
    let all = [format!("parallel.data={many}"), format!("run.batch_rows={many}"), "run.micro_rows=1".into()];
    let all = all.each_ref().map(String::as_str);
    let taken =
        w.ft(&[&["check", "q.toml", "run.device=cuda", "serve.devices=['cuda:0']"][..], &all].concat());
    let hint = "hint: serve.devices=[\"cpu\"], or ranks on fewer devices";
    assert!(taken.code == 2 && taken.err.contains(hint), "{}", taken.err);
    let mut run = w.start(&[&["run", "q.toml"], &set[..], &serve].concat());
    let event = until("server", || w.events("o", "serving").into_iter().next());
    let address = event["address"].as_str().expect("an address");
    let address = address.trim_start_matches("http://").trim_end_matches("/v1");
    let step = || copies(address).iter().map(|c| c.1.expect("a step")).min().filter(|s| *s > 0);
    let first = until("checkpoint on both devices", step);
    until("later one on both devices", || step().filter(|s| *s > first));
    run.kill().expect("killed");
    run.wait().expect("ended");
}
