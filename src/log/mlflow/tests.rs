//! A small server records what arrives; others refuse, or say nothing.

use super::*;
use anyhow::{Context as _, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

/// Patience that no test uses up.
const LONG: Duration = Duration::from_secs(600);

/// The call of a request (`POST runs/create`) and its body.
type Call = (String, Value);

/// Reads a request.
fn request(stream: &TcpStream) -> Result<Call> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    reader.read_line(&mut first)?;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').context("a header")?;
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let call = first.replace("/api/2.0/", "").replace("mlflow/", "").replace(" HTTP/1.1", "");
    Ok((call.trim().to_string(), serde_json::from_slice(&body).unwrap_or_default()))
}

/// Starts a server; `answer` gives status and body of each call. Returns its address and the calls.
fn server(answer: impl Fn(&str) -> (u16, Value) + Send + 'static) -> Result<(String, Receiver<Call>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", listener.local_addr()?);
    let (sender, calls) = channel();
    std::thread::spawn(move || -> Result<()> {
        for stream in listener.incoming() {
            let mut stream = stream?;
            let call = request(&stream)?;
            let (status, body) = answer(&call.0);
            let body = body.to_string();
            let head = format!("HTTP/1.1 {status} OK\r\ncontent-length: {}\r\nconnection: close", body.len());
            sender.send(call)?;
            write!(stream, "{head}\r\n\r\n{body}")?;
        }
        Ok(())
    });
    Ok((url, calls))
}

fn run(url: &str, dir: &std::path::Path, resumes: bool) -> MlFlowRun {
    let params = (0..150).map(|i| (format!("key.{i}"), "v".repeat(600))).collect();
    let (experiment, name, file) = ("ft".into(), "pirate".into(), dir.join("mlflow.json"));
    MlFlowRun { url: url.into(), experiment, name, params, file, resumes }
}

fn step(step: u64) -> Value {
    json!({"event": "step", "step": step, "loss": 2.5, "lr": 0.1, "grad_norm": null})
}

#[test]
fn a_run_is_sent_whole_and_resumed_under_its_id() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (url, calls) = server(|call| match call {
        "POST experiments/create" => (400, json!({"error_code": "RESOURCE_ALREADY_EXISTS"})),
        "GET experiments/get-by-name?experiment_name=ft" => {
            (200, json!({"experiment": {"experiment_id": "7"}}))
        }
        "POST runs/create" => (200, json!({"run": {"info": {"run_id": "r1"}}})),
        _ => (200, json!({})),
    })?;
    let mut board = MlFlow::with_patience(run(&url, dir.path(), false), LONG);
    board.write(&json!({"event": "start", "versions": {"ft": "1"}, "device": "cpu"}))?;
    board.write(&step(1))?;
    board.write(&json!({"event": "eval", "step": 1, "loss": 0.0, "f1_C++ é": 0.5, "f1_a/": 0.25}))?;
    board.write(&json!({"event": "end", "step": 1}))?;
    board.close();
    assert_eq!((board.missing(), board.said), (0, false));
    drop(board);
    let all: Vec<Call> = calls.try_iter().collect();
    let find = |name: &str| all.iter().filter(|c| c.0 == name).map(|c| &c.1).collect::<Vec<_>>();
    let created = find("POST runs/create");
    assert_eq!((&created[0]["experiment_id"], &created[0]["run_name"]), (&json!("7"), &json!("pirate")));
    let tags = created[0]["tags"].as_array().context("tags")?;
    assert!(tags.contains(&json!({"key": "versions.ft", "value": "1"})), "{tags:?}");
    let logged = find("POST runs/log-batch");
    let count = |key: &str| logged.iter().filter_map(|l| l[key].as_array()).map(Vec::len).collect::<Vec<_>>();
    assert_eq!(count("params"), [100, 50]);
    assert_eq!(logged[0]["params"][0]["value"].as_str().map(str::len), Some(500));
    let metrics = logged.iter().filter_map(|l| l["metrics"].as_array()).flatten();
    let shown: Vec<(Value, Value, Value)> =
        metrics.map(|m| (m["key"].clone(), m["value"].clone(), m["step"].clone())).collect();
    let of_classes = [("eval/f1_C_2B_2B _C3_A9", 0.5), ("eval/f1_a_2F", 0.25)];
    let of_eval = [("eval/loss", 0.0), of_classes[0], of_classes[1], ("eval/perplexity", 1.0)];
    let wanted = [("train/loss", 2.5), ("train/lr", 0.1)].into_iter().chain(of_eval);
    assert_eq!(shown, wanted.map(|(k, v)| (json!(k), json!(v), json!(1))).collect::<Vec<_>>());
    let updated = find("POST runs/update");
    assert_eq!((updated.len(), &updated[0]["status"]), (1, &json!("FINISHED")));

    let mut board = MlFlow::with_patience(run(&url, dir.path(), true), LONG);
    board.write(&json!({"event": "resume", "step": 1}))?;
    board.write(&json!({"event": "stopped", "step": 1, "code": 143}))?;
    drop(board);
    let statuses: Vec<(String, Value, Value)> =
        calls.try_iter().map(|(call, b)| (call, b["run_id"].clone(), b["status"].clone())).collect();
    let update = |status: &str| ("POST runs/update".to_string(), json!("r1"), json!(status));
    assert_eq!(statuses, [update("RUNNING"), update("KILLED")]);
    Ok(())
}

/// The user may have no right to create one.
#[test]
fn an_experiment_is_created_only_if_it_is_missing() -> Result<()> {
    const LOOK: &str = "GET experiments/get-by-name?experiment_name=ft";
    const CREATE: &str = "POST experiments/create";
    let dir = tempfile::tempdir()?;
    for (missing, created, wanted) in [
        (0, (403, json!({"error_code": "PERMISSION_DENIED"})), vec![LOOK]),
        (9, (200, json!({"experiment_id": "7"})), vec![LOOK, CREATE]),
        // by another run, after the first look
        (1, (400, json!({"error_code": "RESOURCE_ALREADY_EXISTS"})), vec![LOOK, CREATE, LOOK]),
    ] {
        let looks = AtomicU64::new(0);
        let (url, calls) = server(move |call| match call {
            LOOK if looks.fetch_add(1, Ordering::Relaxed) < missing => {
                (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST"}))
            }
            LOOK => (200, json!({"experiment": {"experiment_id": "7"}})),
            CREATE => created.clone(),
            "POST runs/create" => (200, json!({"run": {"info": {"run_id": "r1"}}})),
            _ => (200, json!({})),
        })?;
        let mut board = MlFlow::with_patience(run(&url, dir.path(), false), LONG);
        board.write(&step(1))?;
        board.close();
        assert_eq!((board.missing(), board.said), (0, false));
        let all: Vec<Call> = calls.try_iter().collect();
        let asked: Vec<&str> =
            all.iter().map(|c| c.0.as_str()).filter(|c| c.contains("experiments/")).collect();
        assert_eq!(asked, wanted);
        let run = all.iter().find(|c| c.0 == "POST runs/create").context("a run")?;
        assert_eq!(run.1["experiment_id"], "7");
    }
    Ok(())
}

#[test]
fn the_status_of_a_run_is_that_of_its_end() {
    let stopped = |code: u64| status(&json!({"event": "stopped", "code": code}));
    assert_eq!([129, 130, 138, 143].map(stopped), [Some("KILLED"); 4]);
    assert_eq!([1, 6, 8].map(stopped), [Some("FAILED"); 3]);
}

/// A run that ends without a last event has failed; one that the server forgot is created anew.
#[test]
fn a_run_without_an_end_has_failed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (url, calls) = server(|call| match call {
        "POST runs/update" => (404, json!({"error_code": "RESOURCE_DOES_NOT_EXIST"})),
        "POST runs/create" => (200, json!({"run": {"info": {"run_id": "r2"}}})),
        _ => (200, json!({"experiment_id": "0"})),
    })?;
    std::fs::write(dir.path().join("mlflow.json"), json!({"server": url, "run_id": "r1"}).to_string())?;
    let mut board = MlFlow::with_patience(run(&url, dir.path(), true), LONG);
    board.write(&step(1))?;
    drop(board);
    let all: Vec<Call> = calls.try_iter().collect();
    assert_eq!((&all[0].1["run_id"], &all[0].1["status"]), (&json!("r1"), &json!("RUNNING")));
    let last = all.last().context("a call")?;
    assert_eq!((&last.1["run_id"], &last.1["status"]), (&json!("r2"), &json!("FAILED")));
    Ok(())
}

/// A failure after the creation of a run repeats the parameters, not the creation. A process that ends before the
/// server has them leaves no file of the run, so that a resumed run sends them.
#[test]
fn a_run_is_created_once() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (logged, file) = (AtomicU64::new(0), dir.path().join("mlflow.json"));
    let (tell, told) = channel();
    let (url, calls) = server(move |call| match call {
        "POST runs/create" => (200, json!({"run": {"info": {"run_id": "r1"}}})),
        "POST runs/log-batch" => {
            let _ = tell.send(file.exists());
            (if logged.fetch_add(1, Ordering::Relaxed) == 0 { 503 } else { 200 }, json!({}))
        }
        _ => (200, json!({"experiment_id": "0"})),
    })?;
    let mut board = MlFlow::with_patience(run(&url, dir.path(), false), LONG);
    board.write(&step(1))?;
    board.close();
    assert_eq!(board.missing(), 0);
    let all: Vec<Call> = calls.try_iter().collect();
    let count = |name: &str| all.iter().filter(|c| c.0 == name).count();
    // Two parts of the parameters, the first of them twice, and the metrics.
    assert_eq!((count("POST runs/create"), count("POST runs/log-batch")), (1, 4));
    assert_eq!(told.try_iter().collect::<Vec<_>>(), [false, false, false, true]);
    Ok(())
}

#[test]
fn a_server_that_refuses_or_is_gone_loses_events_by_number() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (denies, calls) = server(|_| (401, json!({"message": "who are you?"})))?;
    // No server listens on port 1.
    for url in [&*denies, "http://127.0.0.1:1"] {
        let mut board = MlFlow::with_patience(run(url, dir.path(), false), LONG);
        for n in 0..5 {
            board.write(&step(n))?;
        }
        board.close();
        assert_eq!((board.missing(), board.said), (5, true), "{url}");
    }
    assert_eq!(calls.try_iter().count(), 1, "a refusal is not asked for again");
    Ok(())
}

/// A server without an answer delays neither the steps nor, without patience, the end.
#[test]
fn a_silent_server_delays_no_step() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", listener.local_addr()?);
    let mut board = MlFlow::with_patience(run(&url, dir.path(), false), Duration::ZERO);
    let many = QUEUE as u64 + 500;
    for n in 0..many {
        board.write(&step(n))?;
    }
    board.close();
    assert_eq!(board.missing(), many);
    Ok(())
}

fn sample(step: u64, prompt: &str, reply: &str) -> Value {
    json!({"event": "sample", "step": step, "number": 1, "prompt": prompt, "reply": reply})
}

/// A server with one run; its artifacts are at `uri`, and the run has a table with one row.
fn with_artifacts(uri: &'static str) -> Result<(String, Receiver<Call>)> {
    server(move |call| match call {
        "POST runs/create" => (200, json!({"run": {"info": {"run_id": "r1"}}})),
        "GET runs/get?run_id=r1" => (200, json!({"run": {"info": {"artifact_uri": uri}}})),
        "GET artifacts/list?run_id=r1" => (200, json!({"files": [{"path": "samples.json"}]})),
        "GET mlflow-artifacts/artifacts/7/r1/artifacts/samples.json" => (
            200,
            json!({"columns": ["step", "prompt", "reply"], "data": [[0, "a", "old"], [1, "a", "older"]]}),
        ),
        _ => (200, json!({"experiment_id": "7"})),
    })
}

#[test]
fn answers_are_a_table_that_a_resume_extends() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for uri in ["mlflow-artifacts:/7/r1/artifacts", "mlflow-artifacts://host:1/7/r1/artifacts"] {
        let (url, calls) = with_artifacts(uri)?;
        let mut board = MlFlow::with_patience(run(&url, dir.path(), false), LONG);
        board.write(&step(1))?;
        board.write(&sample(1, "a", "x\ny"))?;
        board.write(&sample(1, "b", "é"))?;
        board.close();
        assert_eq!((board.missing(), board.said), (0, false));
        let all: Vec<Call> = calls.try_iter().collect();
        let last = |name: &str| all.iter().rfind(|c| c.0 == name).map(|c| c.1.clone()).unwrap_or_default();
        let table = last("PUT mlflow-artifacts/artifacts/7/r1/artifacts/samples.json");
        assert_eq!(table["columns"], json!(["step", "prompt", "reply"]));
        assert_eq!(table["data"], json!([[0, "a", "old"], [1, "a", "x\ny"], [1, "b", "é"]]), "{all:?}");
        assert_eq!(last("POST runs/set-tag")["key"], "mlflow.loggedArtifacts");
    }
    Ok(())
}

/// A server without a place for artifacts: one warning, and every number arrives.
#[test]
fn artifacts_elsewhere_lose_no_metrics() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (url, calls) = with_artifacts("s3://bucket/r1")?;
    let mut board = MlFlow::with_patience(run(&url, dir.path(), false), LONG);
    board.write(&sample(0, "a", "x"))?;
    board.write(&step(1))?;
    board.write(&sample(1, "a", "y"))?;
    board.write(&json!({"event": "end", "step": 1}))?;
    board.close();
    assert_eq!((board.missing(), board.said), (0, true));
    let all: Vec<Call> = calls.try_iter().collect();
    assert_eq!(all.iter().filter(|c| c.0.starts_with("GET runs/get")).count(), 1);
    assert!(!all.iter().any(|c| c.0.starts_with("PUT")), "{all:?}");
    assert!(all.iter().any(|c| c.1["status"] == "FINISHED"), "{all:?}");
    Ok(())
}
