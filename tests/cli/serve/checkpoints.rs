//! `ft serve` on a run in progress, and beside it: each new checkpoint is taken up.

use super::chunks;
use crate::server::{Server, ask, until};
use crate::world::{World, quickstart, repository};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Child;

/// A sampled answer of a run, to tell weights apart, and the reported step.
fn answer(s: &Server) -> (String, String) {
    let body = json!({"prompt": "The sky", "temperature": 2, "seed": 5, "max_tokens": 15});
    let (status, answer) = s.post("/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    let text = |v: &Value| v.as_str().expect("a text").to_string();
    (text(&answer["choices"][0]["text"]).trim_end().to_string(), text(&answer["model"]))
}

/// The same with `ft chat`.
fn said_by(w: &World, model: &str) -> String {
    let how = ["--raw", "--prompt", "The sky", "--temperature", "2", "--seed", "5", "--max-tokens", "15"];
    w.ok(&[&["chat", model][..], &how].concat()).out.trim_end().to_string()
}

/// A quickstart run with distinguishable checkpoints, and the folder `live` of a run that has just begun.
fn begun(w: &World, full: bool) {
    quickstart(w);
    if full {
        let text = w.text("q.toml");
        let text = text.replace("[lora]\nrank = 8\nalpha = 16\n", "").replace("\"lora\"", "\"full\"");
        w.write("q.toml", text);
    }
    let lr = if full { "optimizer.lr=1e-3" } else { "optimizer.lr=0.02" };
    let run = ["run", "q.toml", "run.steps=6", "run.save_every=2", "run.keep=9", "run.output=o"];
    w.ok(&[&run[..], &["run.batch_rows=2", "run.micro_rows=2", lr, "optimizer.schedule=constant"]].concat());
    let metrics = w.text("o/metrics.jsonl");
    w.write("live/recipe.toml", w.read("o/recipe.toml"));
    w.write("live/metrics.jsonl", format!("{}\n", metrics.lines().next().expect("a start")));
}

fn checkpoint(step: u64) -> String {
    format!("checkpoints/step-{step:08}")
}

/// Copies a checkpoint into the new run, with the completion marker last.
fn save(w: &World, step: u64) {
    let (from, to) = (format!("o/{}", checkpoint(step)), format!("live/{}", checkpoint(step)));
    let files = ["state.json", "weights.safetensors", "optimizer.safetensors", "manifest.json"];
    files.iter().for_each(|f| w.write(&format!("{to}/{f}"), w.read(&format!("{from}/{f}"))));
    // The server must not see the marker before its content.
    w.write("marker", w.read(&format!("{from}/COMPLETE")));
    std::fs::rename(w.path("marker"), w.path(&format!("{to}/COMPLETE"))).expect("renamed");
}

#[test]
fn each_new_checkpoint_of_a_run_is_taken_up() {
    let w = World::new();
    begun(&w, false);
    let base = said_by(&w, &repository().join("data/model").display().to_string());
    let [two, four, six] = [2, 4, 6].map(|step| said_by(&w, &format!("o/{}", checkpoint(step))));
    assert!(base != two && two != four && four != six, "{base} {two} {four} {six}");
    let s = Server::of(&w, "live", &["--max-tokens", "300"]);
    let is = |text: &str, step: u64| {
        let (answer, model) = answer(&s);
        assert_eq!((answer.as_str(), model), (text, format!("live:step-{step}")));
        let (_, models) = s.ask("GET", "/v1/models", "", b"");
        assert!(
            models.contains(&format!("\"step\":{step}")) && models.contains("\"id\":\"live\""),
            "{models}"
        );
    };
    is(&base, 0);
    save(&w, 2);
    is(&two, 2);

    // A request may name the loaded step, as answers do.
    let named = |model: &str, stream: bool| {
        let body = json!({"model": model, "prompt": "a", "max_tokens": 2, "stream": stream});
        s.ask("POST", "/v1/completions", "", body.to_string().as_bytes())
    };
    let refused = |(status, body): (u16, String), step: u64| {
        let said = format!("is served, at step {step}\"");
        assert!(status == 404 && body.contains("model_not_found") && body.contains(&said), "{status} {body}");
    };
    for stream in [false, true] {
        let (status, body) = named("live:step-2", stream);
        assert!(status == 200 && body.contains("\"model\":\"live:step-2\""), "{status} {body}");
        assert_eq!(stream, body.contains("[DONE]"), "{body}");
        for other in ["live:step-0", "live:step-4", "live:step-", "x:step-2"] {
            refused(named(other, stream), 2);
        }
    }
    assert_eq!(s.ask("GET", "/v1/models/live:step-2", "", b"").0, 200);
    refused(s.ask("GET", "/v1/models/live:step-0", "", b""), 2);

    // An answer ends with the weights it began with.
    let body = json!({"model": "live", "prompt": "a", "temperature": 2, "seed": 1, "stream": true, "max_tokens": 200});
    let stream = || s.open("POST", "/v1/completions", "", body.to_string().as_bytes());
    let text = |body: &str| {
        let parts = chunks(body);
        assert!(parts.iter().all(|p| p["model"] == "live:step-2"), "{body}");
        parts.iter().filter_map(|p| p["choices"][0]["text"].as_str()).collect::<String>()
    };
    let mut whole = String::new();
    stream().read_to_string(&mut whole).expect("an answer");
    let mut under_way = stream();
    let mut first = vec![0; 400];
    under_way.read_exact(&mut first).expect("it has begun");
    save(&w, 4);
    let mut rest = String::new();
    under_way.read_to_string(&mut rest).expect("the rest");
    assert_eq!(text(&(String::from_utf8(first).expect("text") + &rest)), text(&whole));
    // A newer checkpoint is looked for before a named step is compared.
    refused(named("live:step-2", true), 4);
    is(&four, 4);

    // A broken checkpoint is reported, and the loaded one stays; older ones are not loaded again.
    let weights = format!("{}/weights.safetensors", checkpoint(6));
    let flip = || {
        let name = format!("o/{weights}");
        let mut bytes = w.read(&name);
        *bytes.last_mut().expect("weights") ^= 1;
        w.write(&name, bytes);
    };
    flip();
    save(&w, 6);
    is(&four, 4);
    let remove = |step: u64| {
        std::fs::remove_dir_all(w.path(&format!("live/{}", checkpoint(step)))).expect("removed");
    };
    remove(4);
    is(&four, 4);
    remove(2);
    let said = w.text("said");
    assert_eq!(said.matches("not taken up, and step 4 answers").count(), 1, "{said}");
    assert!(said.contains("its hash differs") && said.contains("step 4 answers"), "{said}");
    // A checkpoint deleted during reading is skipped.
    std::fs::remove_file(w.path(&format!("live/{weights}"))).expect("removed");
    is(&four, 4);
    remove(6);
    is(&four, 4);
    flip();
    save(&w, 6);
    is(&six, 6);

    // For a finished run, the step of the result.
    save(&w, 4);
    is(&six, 6);
    let metrics = w.text("live/metrics.jsonl");
    w.write("live/metrics.jsonl", format!("{metrics}{}\n", json!({"event": "end", "of_step": 4})));
    is(&four, 4);

    // Another run in the same folder is another model.
    let recipe = w.text("live/recipe.toml");
    w.write(
        "live/recipe.toml",
        recipe.replace("alpha   = 16", "alpha   = 17").replace("alpha    = 16", "alpha    = 17"),
    );
    w.write("live/metrics.jsonl", metrics);
    is(&four, 4);
    let said = w.text("said");
    assert!(said.contains("that of another run now"), "{said}");
    assert_eq!(s.interrupt(), Some(130));
}

#[test]
fn checkpoints_in_full_are_taken_up_unless_no_watch_is_set() {
    let w = World::new();
    begun(&w, true);
    save(&w, 2);
    let [two, six] = [2, 6].map(|step| said_by(&w, &format!("o/{}", checkpoint(step))));
    assert_ne!(two, six);
    let (s, fixed) = (Server::of(&w, "live", &[]), Server::of(&w, "live", &["--no-watch"]));
    save(&w, 6);
    assert_eq!(answer(&s), (six, "live:step-6".to_string()));
    assert_eq!(answer(&fixed), (two, "live".to_string()));
    drop((s, fixed));

    // A finished run serves the result. A server may end with its parent.
    let mut ended = Server::of(&w, "o", &["--until-eof"]);
    assert_eq!(answer(&ended).1, "o");
    drop(ended.child.stdin.take());
    assert_eq!(ended.child.wait().expect("ended").code(), Some(0));
    for (device, why) in [
        ("cuda:x", "cuda:1 by number"),
        ("cpu,cpu", "--device has cpu twice"),
        ("cuda,cpu,cuda:0", "--device has cuda:0 twice"),
        ("auto,cpu", "--device auto is one device"),
        ("cpu,cuda:99", "cuda:99: there are"),
    ] {
        let wrong = w.ft(&["serve", "live", "--port", "0", "--device", device]);
        assert!(wrong.code == 2 && wrong.err.contains(why), "{device}: {}", wrong.err);
    }
}

/// A quickstart run with a server: address and process id.
fn beside(w: &World, set: &[&str]) -> (Child, String, u32) {
    quickstart(w);
    let run = [
        "run",
        "q.toml",
        "run.output=o",
        "run.batch_rows=2",
        "run.micro_rows=2",
        "run.device=cpu",
        "log.samples=[\"a\"]",
    ];
    let child = w.start(&[&run[..], &["serve.devices=[\"cpu\"]", "serve.port=0"], set].concat());
    let event = until("server", || w.events("o", "serving").into_iter().next());
    let address = event["address"].as_str().expect("an address");
    let address = address.trim_start_matches("http://").trim_end_matches("/v1").to_string();
    (child, address, event["process"].as_u64().expect("a number") as u32)
}

#[test]
fn a_server_beside_a_run_answers_with_each_checkpoint_and_may_die() {
    let w = World::new();
    let set = ["run.steps=100000", "run.save_every=5", "run.eval_every=1000000"];
    let (mut run, address, server) = beside(&w, &set);
    let step = || {
        let body = json!({"model": "o", "prompt": "a", "max_tokens": 3, "temperature": 0});
        let (status, answer) = ask(&address, "POST", "/v1/completions", &body).expect("an answer");
        assert_eq!(status, 200, "{answer}");
        let model = answer["model"].as_str().expect("a name").to_string();
        model.strip_prefix("o:step-").expect("a step").parse::<u64>().expect("a number")
    };
    let first = until("checkpoint", || Some(step()).filter(|s| *s > 0));
    assert_eq!(first % 5, 0);
    let later = until("later checkpoint", || Some(step()).filter(|s| *s > first));
    assert_eq!(later % 5, 0);
    // Failures of the server are reported, and the run continues.
    std::process::Command::new("kill").args(["-9", &server.to_string()]).status().expect("sent");
    let ended = until("end of the server", || w.events("o", "serving_ended").into_iter().next());
    assert!(ended["why"].as_str().expect("why").contains("signal: 9"), "{ended}");
    let at = ended["step"].as_u64().expect("a step");
    until("further step", || {
        w.events("o", "step").last().filter(|e| e["step"].as_u64() > Some(at)).map(|_| ())
    });
    std::process::Command::new("kill").args(["-TERM", &run.id().to_string()]).status().expect("sent");
    assert_eq!(run.wait().expect("ended").code(), Some(143));
}

#[test]
fn a_server_beside_a_run_ends_with_it() {
    let w = World::new();
    let (mut run, address, _) = beside(&w, &["run.steps=100000", "run.save_every=50"]);
    assert_eq!(ask(&address, "GET", "/v1/models", &Value::Null).expect("an answer").0, 200);
    // For any kind of end.
    // A client with half a request does not hold it up.
    let mut half = TcpStream::connect(&address).expect("connected");
    half.write_all(b"GET /v1/models HTTP/1.1\r\nHo").expect("sent");
    run.kill().expect("killed");
    run.wait().expect("ended");
    until("end of the server", || TcpStream::connect(&address).is_err().then_some(()));
    let said = w.text("o/serve.log");
    assert!(!said.contains("error"), "{said}");
    // An address in use is reported, and the run completes.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = format!("serve.port={}", taken.local_addr().expect("one").port());
    let set = [
        "run",
        "q.toml",
        "--overwrite",
        "run.output=p",
        "run.batch_rows=2",
        "run.micro_rows=2",
        "run.device=cpu",
        "serve.devices=[\"cpu\"]",
        &port,
    ];
    // The run may end before a server that starts slowly.
    let run = |steps| w.ok(&[&set[..], &[steps]].concat()).err;
    let mut said = ["run.steps=150", "run.steps=1000", "run.steps=5000"].into_iter().map(run);
    let ends = "the server ended, and training goes on without it: exit status: 2";
    let said = said.find(|said| said.contains(ends)).expect("the end of the server");
    assert!(said.contains("run.save_every = 0: until the run ends"), "{said}");
    assert!(said.contains("another port") || said.contains("--port"), "{said}");
    assert!(w.path("p/adapter").is_dir());
}

#[test]
fn server_devices_that_are_missing_or_too_small_are_refused() {
    let w = World::new();
    quickstart(&w);
    let refused = |set: &[&str], what: &str| {
        let r = w.ft(&[&["check", "q.toml"], set].concat());
        assert!(r.code == 2 && r.err.contains(what), "{set:?}: {}{}", r.err, r.out);
    };
    refused(&["serve.devices=[\"cuda:1\", \"cuda:1\"]"], "serve.devices has \"cuda:1\" twice");
    refused(&["serve.devices=[\"gpu\"]"], "\"cuda:1\", by number");
    refused(&["serve.devices=[\"cuda:01\"]"], "\"cuda:1\", by number");
    refused(&["serve.devices=cpu"], "write [\"cpu\"]");
    refused(&["serve.port=80"], "serve.port does nothing");
    refused(&["serve.port=70000"], "from 0 to 65535");
    if w.ft(&["check", "q.toml", "run.device=cuda"]).code != 0 {
        let none = "there is no cuda:0, no cuda:1: there are 0 CUDA devices";
        refused(&["run.device=cpu", "serve.devices=[\"cuda\", \"cpu\", \"cuda:1\"]"], none);
    }
    w.ok(&["check", "q.toml", "serve.devices=[\"cpu\"]"]);

    // The plan includes the server.
    let plan = ["plan", "q.toml", "--json", "run.device=cpu", "memory.host_budget=16GiB"];
    let json = |set: &[&str]| w.ft(&[&plan[..], set].concat()).json();
    let (with, without) = (json(&["serve.devices=[\"cpu\"]"]), json(&[]));
    let bytes = with["host"]["server"].as_u64().expect("bytes");
    assert_eq!(with["server"]["host_bytes"], bytes);
    let total = |p: &Value| p["host"]["total"].as_u64().expect("bytes");
    assert!(bytes > 128 << 20 && total(&with) == total(&without) + bytes, "{with}");
    let lost = without["device"]["budget"].as_u64().zip(with["device"]["budget"].as_u64());
    assert!(lost.is_some_and(|(a, b)| a == b + bytes), "{lost:?}");
    let short = w.ft(&[
        "plan",
        "q.toml",
        "run.device=cpu",
        "memory.budget=100MiB",
        "memory.host_budget=350MiB",
        "serve.devices=[\"cpu\"]",
    ]);
    assert!(
        short.code == 8 && short.err.contains("server ") && short.err.contains("serve.devices"),
        "{}",
        short.err
    );
    let on_cuda = |devices: &str, budget: &str| {
        let devices = format!("serve.devices={devices}");
        w.ft(&["plan", "q.toml", "--json", "run.device=cuda", budget, "memory.host_budget=64GiB", &devices])
    };
    let other = on_cuda("['cuda:1', 'cuda:2']", "memory.budget=500MiB");
    assert!(other.code == 8 && other.err.contains("the server beside it needs"), "{}", other.err);
    assert!(other.err.contains(" on each of cuda:1 and cuda:2, "), "{}", other.err);
    // Every device has a copy.
    let server = |devices: &str| {
        let r = on_cuda(devices, "memory.budget=8GiB");
        let plan = r.json();
        assert_eq!(plan["server"]["host_bytes"], plan["host"]["server"]);
        plan["server"].clone()
    };
    let (one, two) = (server("['cuda:1']"), server("['cuda:1', 'cuda:2']"));
    let mixed = server("['cpu', 'cuda:1', 'cuda:2']");
    assert_eq!((&two["devices"], &two["device_bytes"]), (&json!(["cuda:1", "cuda:2"]), &one["device_bytes"]));
    let on_host = |server: &Value| server["host_bytes"].as_u64().expect("bytes");
    let process = 2 * on_host(&one) - on_host(&two);
    assert!(process > 0 && on_host(&two) > on_host(&one), "{one} {two}");
    // Memory of a server on the CPU, without its process.
    assert_eq!(on_host(&mixed), on_host(&two) + bytes - process);
}
