//! Calls of MLflow's REST API, version 2.0.

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::error::Error;
use std::time::Duration;

/// Time limit of a call; that of tests is never reached.
const LIMIT: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 10 });
/// Most parameters or tags of a call.
const MOST: usize = 100;
/// Most metrics of a call.
const MOST_METRICS: usize = 1000;
/// Longest value of a parameter stored by all servers, in characters.
const LONGEST: usize = 500;

/// A failed call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Failure {
    /// The server did not answer, or could not just then.
    #[error("{0}")]
    Unreachable(String),
    /// The server refused the call: error code and message.
    #[error("{0}: {1}")]
    Refused(String, String),
}

/// Keys and values of parameters or tags.
pub type Pairs = [(String, String)];

/// A number at a step; `time` is in milliseconds since 1970.
pub fn metric(key: &str, value: f64, step: u64, time: u64) -> Value {
    json!({"key": allowed(key), "value": value, "timestamp": time, "step": step.min(i64::MAX as u64)})
}

/// A connection to a server.
pub struct Client {
    http: reqwest::Client,
    runtime: tokio::runtime::Runtime,
    /// Address without a slash at the end.
    url: String,
}

impl Client {
    /// Prepares calls to the server at `url`; connects to nothing yet.
    ///
    /// # Errors
    /// The TLS library or the runtime cannot start.
    pub fn new(url: &str) -> Result<Self, Failure> {
        let fail = |e: &dyn Error| Failure::Unreachable(innermost(e));
        let mut http = reqwest::Client::builder().timeout(LIMIT);
        let host = url.split('/').nth(2).unwrap_or_default();
        // A proxy leads elsewhere than to this machine.
        if ["localhost", "127.", "[::1]"].iter().any(|own| host.starts_with(own)) {
            http = http.no_proxy();
        }
        let http = http.build().map_err(|e| fail(&e))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        Ok(Self { http, runtime: runtime.map_err(|e| fail(&e))?, url: url.trim_end_matches('/').to_string() })
    }

    /// Creates a run with the first tags, and the experiment if missing. Returns the id of the run;
    /// [`Client::describe`] follows.
    pub fn create(&self, experiment: &str, name: &str, tags: &Pairs, time: u64) -> Result<String, Failure> {
        let experiment = match self.experiment(experiment) {
            Err(Failure::Refused(code, _)) if code == "RESOURCE_DOES_NOT_EXIST" => {
                match self.post("experiments/create", &json!({"name": experiment})) {
                    // by another run since
                    Err(Failure::Refused(code, _)) if code == "RESOURCE_ALREADY_EXISTS" => {
                        self.experiment(experiment)?
                    }
                    created => created?["experiment_id"].clone(),
                }
            }
            found => found?,
        };
        let tags = pairs(tags.chunks(MOST).next().unwrap_or_default());
        let run = json!({"experiment_id": experiment, "run_name": name, "start_time": time, "tags": tags});
        let answer = self.post("runs/create", &run)?;
        let id = answer["run"]["info"]["run_id"].as_str();
        id.map(String::from).ok_or_else(|| Failure::Unreachable("its answer names no run".into()))
    }

    /// Id of an experiment.
    fn experiment(&self, name: &str) -> Result<Value, Failure> {
        let query = [("experiment_name", name)];
        let call = self.call(Method::GET, "mlflow/experiments/get-by-name").query(&query);
        Ok(self.send(call)?["experiment"]["experiment_id"].clone())
    }

    /// Adds further tags and the parameters to a run. May be repeated.
    pub fn describe(&self, id: &str, params: &Pairs, tags: &Pairs) -> Result<(), Failure> {
        for part in tags.chunks(MOST).skip(1) {
            self.post("runs/log-batch", &json!({"run_id": id, "tags": pairs(part)}))?;
        }
        for part in params.chunks(MOST) {
            self.post("runs/log-batch", &json!({"run_id": id, "params": pairs(part)}))?;
        }
        Ok(())
    }

    /// Adds metrics to a run, as [`metric`] makes them.
    pub fn log(&self, id: &str, metrics: &[Value]) -> Result<(), Failure> {
        for part in metrics.chunks(MOST_METRICS) {
            self.post("runs/log-batch", &json!({"run_id": id, "metrics": part}))?;
        }
        Ok(())
    }

    /// Sets the status of a run, and the end if given.
    pub fn update(&self, id: &str, status: &str, end: Option<u64>) -> Result<(), Failure> {
        let mut body = json!({"run_id": id, "status": status});
        if let Some(time) = end {
            body["end_time"] = json!(time);
        }
        self.post("runs/update", &body).map(drop)
    }

    /// Path of a run's artifacts on the server.
    ///
    /// # Errors
    /// A failed call, or artifacts that clients write elsewhere, to a disk or a bucket.
    pub fn artifacts(&self, id: &str) -> Result<String, Failure> {
        let answer = self.send(self.call(Method::GET, "mlflow/runs/get").query(&[("run_id", id)]))?;
        let uri = answer["run"]["info"]["artifact_uri"].as_str().unwrap_or_default();
        let path = uri.strip_prefix("mlflow-artifacts:").map(|rest| match rest.strip_prefix("//") {
            Some(with_host) => with_host.split_once('/').map_or("", |(_, path)| path),
            None => rest.trim_start_matches('/'),
        });
        path.map(String::from).ok_or_else(|| {
            let why = format!("the server keeps artifacts at {uri}: samples are in metrics.jsonl alone");
            Failure::Refused("artifacts".into(), why)
        })
    }

    /// Names of a run's artifacts.
    pub fn list(&self, id: &str) -> Result<Vec<String>, Failure> {
        let answer = self.send(self.call(Method::GET, "mlflow/artifacts/list").query(&[("run_id", id)]))?;
        let files = answer["files"].as_array().into_iter().flatten();
        Ok(files.filter_map(|f| f["path"].as_str().map(String::from)).collect())
    }

    /// An artifact, as JSON.
    pub fn artifact(&self, path: &str) -> Result<Value, Failure> {
        self.send(self.call(Method::GET, &format!("mlflow-artifacts/artifacts/{path}")))
    }

    /// Writes an artifact.
    pub fn write_artifact(&self, path: &str, content: &Value) -> Result<(), Failure> {
        let call = self.call(Method::PUT, &format!("mlflow-artifacts/artifacts/{path}"));
        self.send(call.body(content.to_string())).map(drop)
    }

    /// Sets a tag of a run.
    pub fn tag(&self, id: &str, key: &str, value: &str) -> Result<(), Failure> {
        self.post("runs/set-tag", &json!({"run_id": id, "key": key, "value": value})).map(drop)
    }

    fn post(&self, what: &str, body: &Value) -> Result<Value, Failure> {
        self.send(self.call(Method::POST, &format!("mlflow/{what}")).json(body))
    }

    /// A call, with the login of MLflow's environment variables.
    fn call(&self, method: Method, what: &str) -> reqwest::RequestBuilder {
        let call = self.http.request(method, format!("{}/api/2.0/{what}", self.url));
        let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        if let Some(token) = given("MLFLOW_TRACKING_TOKEN") {
            return call.bearer_auth(token);
        }
        match given("MLFLOW_TRACKING_USERNAME") {
            Some(user) => call.basic_auth(user, given("MLFLOW_TRACKING_PASSWORD")),
            None => call,
        }
    }

    fn send(&self, call: reqwest::RequestBuilder) -> Result<Value, Failure> {
        let answer = self.runtime.block_on(async {
            let answer = call.send().await?;
            Ok((answer.status(), answer.bytes().await?))
        });
        let (status, body) = answer.map_err(|e: reqwest::Error| Failure::Unreachable(innermost(&e)))?;
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        if status.is_success() {
            return Ok(value);
        }
        let text = |key: &str| value[key].as_str().unwrap_or_default().to_string();
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            return Err(Failure::Unreachable(format!("{status} {}", text("message")).trim_end().into()));
        }
        let code = Some(text("error_code")).filter(|c| !c.is_empty());
        Err(Failure::Refused(code.unwrap_or_else(|| status.to_string()), text("message")))
    }
}

/// Parameters or tags for a call.
fn pairs(list: &Pairs) -> Vec<Value> {
    let cut = |text: &str| text.chars().take(LONGEST).collect::<String>();
    list.iter().map(|(key, value)| json!({"key": key, "value": cut(value)})).collect()
}

/// A metric name valid on all servers. After the group (`eval/`), every byte other than ASCII letters, digits, `_`,
/// `-`, `.` and space becomes `_` and two hexadecimal digits.
fn allowed(name: &str) -> String {
    let (group, own) = name.split_at(name.find('/').map_or(0, |at| at + 1));
    let byte = |b: u8| match b.is_ascii_alphanumeric() || b"_-. ".contains(&b) {
        true => char::from(b).to_string(),
        false => format!("_{b:02X}"),
    };
    own.bytes().fold(group.to_string(), |name, b| name + &byte(b))
}

/// The cause of an error: "Connection refused" in place of the request.
fn innermost(mut e: &dyn Error) -> String {
    while let Some(cause) = e.source() {
        e = cause;
    }
    e.to_string()
}
