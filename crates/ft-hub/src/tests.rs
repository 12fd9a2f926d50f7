//! Tests of local folders, and of a minimal hub server that records requests.

use ft_base::error::Failure;
use std::fs;
use std::path::Path;

use crate::*;
use ft_base::ExitCode;

fn settings(home: &Path, endpoint: &str) -> Settings {
    Settings::from_lookup(|name| match name {
        "HOME" | "HF_HOME" => Some(home.display().to_string()),
        "HF_ENDPOINT" => Some(endpoint.to_string()),
        // Never sent anywhere except to the test server.
        "HF_TOKEN" => Some("hf_test_secret".to_string()),
        _ => None,
    })
}

#[test]
fn local_folders_are_used_as_they_are() {
    let home = tempfile::tempdir().unwrap();
    let s = settings(home.path(), "http://127.0.0.1:1");
    let model = home.path().join("my model");
    fs::create_dir(&model).unwrap();
    let fetch = |source: &str| fetch_model_with(&s, source, "main", Want::Weights, false);
    let path = model.display().to_string();
    let error = fetch(&path).unwrap_err();
    assert!(error.to_string().contains("has no config.json"), "{error}");
    fs::write(model.join("config.json"), "{}").unwrap();
    for source in [path.as_str(), "~/my model"] {
        let found = fetch(source).unwrap();
        assert_eq!((found.dir, found.revision), (model.clone(), None));
        assert_eq!(found.source, source);
    }
    let error = fetch(&format!("{path}/config.json")).unwrap_err();
    assert!(matches!(error, Error::NotAFolder { .. }), "{error}");
    // A nonexistent path never causes a request.
    for source in ["./no/where", "/no/where", "~/no", "no/where/", "a/b/c", "no\\where", "gpt2", ""] {
        let error = fetch(source).unwrap_err();
        assert!(matches!(error, Error::Missing { .. }), "{source}: {error}");
        assert_eq!(error.exit_code(), ExitCode::Model);
    }
    for (source, revision) in [("a/b c", "main"), ("a/..", "main"), ("a/b", "../../x"), ("a/b", "")] {
        let error = fetch_model_with(&s, source, revision, Want::Config, false).unwrap_err();
        let refused = matches!(error, Error::BadName { .. } | Error::Missing { .. });
        assert!(refused, "{source} {revision}: {error}");
    }
}

#[test]
fn local_adapters_need_their_two_files() {
    let dir = tempfile::tempdir().unwrap();
    let s = settings(dir.path(), "http://127.0.0.1:1");
    let source = dir.path().display().to_string();
    let fetch = || fetch_adapter_with(&s, &source, "main", false);
    assert!(fetch().unwrap_err().to_string().contains("adapter_config.json"));
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert!(fetch().unwrap_err().to_string().contains("a model, not an adapter"));
    fs::write(dir.path().join("adapter_config.json"), "{}").unwrap();
    assert!(fetch().unwrap_err().to_string().contains("adapter_model.safetensors"));
    fs::write(dir.path().join("adapter_model.bin"), "").unwrap();
    assert!(matches!(fetch(), Err(Error::PickleOnly { .. })));
    fs::write(dir.path().join("adapter_model.safetensors"), "").unwrap();
    assert_eq!(fetch().unwrap(), dir.path());
}

/// The folder of a run has its result in a subfolder.
#[test]
fn the_folder_of_a_run_leads_to_its_result() {
    let dir = tempfile::tempdir().unwrap();
    let s = settings(dir.path(), "http://127.0.0.1:1");
    let source = dir.path().display().to_string();
    let told = || {
        let model = fetch_model_with(&s, &source, "main", Want::Config, false).unwrap_err();
        let adapter = fetch_adapter_with(&s, &source, "main", false).unwrap_err();
        [model.to_string(), adapter.to_string()]
    };
    assert!(told().iter().all(|error| !error.contains("hint:")), "{:?}", told());
    for (folder, config, said) in [
        ("adapter", "adapter_config.json", ["folder adapter has an adapter", "folder adapter has one"]),
        ("model", "config.json", ["folder model has one", "folder model has a model"]),
    ] {
        fs::create_dir(dir.path().join(folder)).unwrap();
        fs::write(dir.path().join(folder).join(config), "{}").unwrap();
        assert!(told().iter().zip(said).all(|(error, said)| error.contains(said)), "{:?}", told());
        fs::remove_dir_all(dir.path().join(folder)).unwrap();
    }
}

#[cfg(not(feature = "hub"))]
#[test]
fn a_hub_id_without_the_hub_feature_says_so() {
    let home = tempfile::tempdir().unwrap();
    let s = settings(home.path(), "http://127.0.0.1:1");
    let error = fetch_model_with(&s, "owner/name", "main", Want::Config, false).unwrap_err();
    assert!(error.to_string().contains("without the hub feature"), "{error}");
}

#[cfg(feature = "hub")]
mod remote {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, SystemTime};

    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    /// Response behavior of the test hub.
    #[derive(Clone, Copy, PartialEq)]
    enum Mood {
        Serves,
        /// Answers every request with this status and `X-Error-Code`.
        Refuses(u16, &'static str),
        /// Lists files, but sends error pages as file bodies.
        SendsErrorPages,
    }

    struct Shared {
        files: BTreeMap<String, Vec<u8>>,
        mood: Mood,
        /// Requests to answer with status 503 first.
        busy: usize,
        /// File bodies to cut in half first.
        cut: usize,
        /// `METHOD file` of file requests, and the `Authorization` header of the last one.
        asked: Vec<String>,
        authorization: String,
        /// Path and body of every `POST`.
        posted: Vec<(String, String)>,
    }

    /// A hub with one model, `owner/name`, at one commit.
    struct Hub {
        endpoint: String,
        shared: Arc<Mutex<Shared>>,
    }

    impl Hub {
        fn new(files: &[(&str, &[u8])]) -> Hub {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("http://{}", listener.local_addr().unwrap());
            let files = files.iter().map(|(n, b)| (n.to_string(), b.to_vec())).collect();
            let shared = Shared {
                files,
                mood: Mood::Serves,
                busy: 0,
                cut: 0,
                asked: Vec::new(),
                authorization: String::new(),
                posted: Vec::new(),
            };
            let shared = Arc::new(Mutex::new(shared));
            let state = shared.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let state = state.clone();
                    // A disconnecting client is not a test failure.
                    std::thread::spawn(move || answer(stream, &state).ok());
                }
            });
            Hub { endpoint, shared }
        }

        fn mood(&self, mood: Mood) {
            self.shared.lock().unwrap().mood = mood;
        }

        /// Files downloaded since the last call, sorted.
        fn got(&self) -> Vec<String> {
            let asked = std::mem::take(&mut self.shared.lock().unwrap().asked);
            let mut got: Vec<_> =
                asked.iter().filter_map(|a| a.strip_prefix("GET ")).map(str::to_string).collect();
            got.sort();
            got
        }
    }

    fn answer(mut stream: TcpStream, state: &Mutex<Shared>) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut request = String::new();
        reader.read_line(&mut request)?;
        let mut shared = state.lock().unwrap();
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line)?;
            if line.trim().is_empty() {
                break;
            }
            if let Some(value) = line.to_lowercase().strip_prefix("authorization:") {
                shared.authorization = value.trim().to_string();
            }
            if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut words = request.split(' ');
        let (method, target) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let path = target.split('?').next().unwrap_or("");
        if method == "POST" {
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            shared.posted.push((path.to_string(), String::from_utf8(body).unwrap()));
        }
        let (status, headers, body) = respond(&mut shared, method, path);
        let head = format!(
            "HTTP/1.1 {status} x\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        if method == "GET" && shared.cut > 0 && path.contains("/resolve/") {
            shared.cut -= 1;
            stream.write_all(&body[..body.len() / 2])?;
        } else if method != "HEAD" {
            stream.write_all(&body)?;
        }
        stream.flush()?;
        // Wait for the client to close, so the response is not cut off.
        stream.shutdown(std::net::Shutdown::Write)?;
        reader.read_to_end(&mut Vec::new())?;
        Ok(())
    }

    fn respond(shared: &mut Shared, method: &str, path: &str) -> (u16, String, Vec<u8>) {
        if let Mood::Refuses(status, code) = shared.mood {
            return (status, format!("X-Error-Code: {code}\r\n"), b"{\"error\": \"a policy\"}".to_vec());
        }
        if shared.busy > 0 {
            shared.busy -= 1;
            return (503, String::new(), Vec::new());
        }
        let json = |value: serde_json::Value| {
            (200, "Content-Type: application/json\r\n".into(), value.to_string().into_bytes())
        };
        if method == "POST" {
            let (_, body) = shared.posted.last().unwrap();
            return match path.trim_start_matches("/api/models/owner/name/").split('/').next() {
                Some("preupload") => {
                    let asked: serde_json::Value = serde_json::from_str(body).unwrap();
                    let files = asked["files"].as_array().unwrap().iter();
                    let mode = |f: &serde_json::Value| serde_json::json!({ "path": f["path"], "uploadMode": "regular" });
                    json(serde_json::json!({ "files": files.map(mode).collect::<Vec<_>>() }))
                }
                _ => json(serde_json::json!({ "url": "http://hub/owner/name" })),
            };
        }
        if path == "/api/models/owner/name" && !shared.files.is_empty() {
            return json(serde_json::json!({ "id": "owner/name" }));
        }
        let revision = path.strip_prefix("/api/models/owner/name/revision/");
        if revision.is_some_and(|r| ["main", COMMIT].contains(&r)) {
            return json(serde_json::json!({ "id": "owner/name", "sha": COMMIT }));
        }
        if path == "/api/datasets/owner/name/revision/main" {
            let configs = serde_json::json!([{"config_name": "main", "data_files": [
                {"split": "train", "path": "rows/train-*"}, {"split": "test", "path": "rows/test.jsonl"}]}]);
            return json(
                serde_json::json!({ "id": "owner/name", "sha": COMMIT, "cardData": { "configs": configs } }),
            );
        }
        if ["models", "datasets"].iter().any(|kind| path == format!("/api/{kind}/owner/name/tree/{COMMIT}")) {
            let entry = |(name, bytes): (&String, &Vec<u8>)| serde_json::json!({ "type": "file", "oid": "0", "size": bytes.len(), "path": name });
            return json(shared.files.iter().map(entry).collect());
        }
        let path = path.strip_prefix("/datasets").unwrap_or(path);
        if let Some(file) = path.strip_prefix(&format!("/owner/name/resolve/{COMMIT}/"))
            && let Some(bytes) = shared.files.get(file)
        {
            shared.asked.push(format!("{method} {file}"));
            let headers = format!("ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n", blake3::hash(bytes));
            if method == "GET" && shared.mood == Mood::SendsErrorPages {
                return (403, headers, b"<html>denied</html>".to_vec());
            }
            return (200, headers, bytes.clone());
        }
        (404, "X-Error-Code: RevisionNotFound\r\n".into(), b"{}".to_vec())
    }

    fn pushed(dir: &Path) -> Push {
        fs::write(dir.join("adapter_config.json"), "{\"r\": 8}").unwrap();
        Push {
            repository: "owner/name".into(),
            revision: "dev".into(),
            private: true,
            message: "it is done".into(),
            files: vec![("adapter_config.json".into(), dir.join("adapter_config.json"))],
            texts: vec![("README.md".into(), "# card".into())],
        }
    }

    #[test]
    fn a_push_is_one_commit_of_all_files() {
        let hub = Hub::new(&[]);
        let home = tempfile::tempdir().unwrap();
        let address = push_with(&settings(home.path(), &hub.endpoint), &pushed(home.path())).unwrap();
        assert_eq!(address, format!("{}/owner/name/tree/dev", hub.endpoint));
        let shared = hub.shared.lock().unwrap();
        assert_eq!(shared.authorization, "bearer hf_test_secret");
        let paths: Vec<&str> = shared.posted.iter().map(|(path, _)| path.as_str()).collect();
        let of = |what: &str| format!("/api/models/owner/name/{what}/dev");
        assert_eq!(paths, ["/api/repos/create", &of("branch"), &of("preupload"), &of("commit")]);
        let made: serde_json::Value = serde_json::from_str(&shared.posted[0].1).unwrap();
        assert_eq!(
            (&made["organization"], &made["name"], &made["private"]),
            (&"owner".into(), &"name".into(), &true.into())
        );
        let lines: Vec<serde_json::Value> =
            shared.posted[3].1.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines[0]["value"]["summary"], "it is done");
        // base64
        assert_eq!(lines[1]["value"]["path"], "adapter_config.json");
        assert_eq!(lines[1]["value"]["content"], "eyJyIjogOH0=");
        assert_eq!(
            (&lines[2]["value"]["path"], &lines[2]["value"]["content"]),
            (&"README.md".into(), &"IyBjYXJk".into())
        );
    }

    #[test]
    fn a_push_to_a_repository_that_is_there_creates_none() {
        let hub = Hub::new(&[("README.md", b"# card")]);
        let home = tempfile::tempdir().unwrap();
        push_with(&settings(home.path(), &hub.endpoint), &pushed(home.path())).unwrap();
        let shared = hub.shared.lock().unwrap();
        let paths: Vec<&str> = shared.posted.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths[0], "/api/models/owner/name/branch/dev", "{paths:?}");
    }

    #[test]
    fn a_push_that_the_hub_refuses_says_why_and_never_the_token() {
        let hub = Hub::new(&[]);
        let home = tempfile::tempdir().unwrap();
        let online = settings(home.path(), &hub.endpoint);
        let refused = |s: &Settings| push_with(s, &pushed(home.path())).unwrap_err();
        for (status, says) in [(401, "role write"), (403, "role write"), (400, "answered 400")] {
            hub.mood(Mood::Refuses(status, ""));
            let error = refused(&online).to_string();
            assert!(error.contains("owner/name") && error.contains(says), "{status}: {error}");
            assert!(error.contains(": a policy"), "{status}: {error}");
            assert!(!error.contains("hf_test_secret"), "{error}");
        }
        let asked = hub.shared.lock().unwrap().posted.len();
        let error = refused(&Settings { token: None, ..online.clone() }).to_string();
        assert!(error.contains("no token") && error.contains("HF_TOKEN"), "{error}");
        let error = refused(&Settings { offline: true, ..online.clone() }).to_string();
        assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
        assert_eq!(hub.shared.lock().unwrap().posted.len(), asked, "nothing was sent");
        let error = refused(&settings(home.path(), "http://127.0.0.1:1"));
        assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    }

    /// The files of a model in two shards of one tensor each.
    fn model() -> Vec<(String, Vec<u8>)> {
        let name = |i: usize| format!("model-{:05}-of-00002.safetensors", i + 1);
        let shard = |i: usize| {
            let header = format!(r#"{{"w{i}":{{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}}}"#);
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.extend([0; 32]);
            (name(i), bytes)
        };
        let index = serde_json::json!({"weight_map": {"w0": name(0), "w1": name(1)}});
        vec![shard(0), shard(1), (ft_base::store::INDEX.into(), index.to_string().into_bytes())]
    }

    #[test]
    fn a_model_comes_as_far_as_wanted_and_then_from_the_cache() {
        let weights = model();
        let mut files: Vec<(&str, &[u8])> = vec![
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"t\": 1}"),
            ("chat_template.jinja", b"{{ messages }}"),
            ("README.md", b"# no"),
            ("consolidated.safetensors", b"the same again"),
            ("pytorch_model.bin", b"pickle"),
        ];
        files.extend(weights.iter().map(|(n, b)| (n.as_str(), b.as_slice())));
        let hub = Hub::new(&files);
        let home = tempfile::tempdir().unwrap();
        let online = settings(home.path(), &hub.endpoint);
        let offline = Settings { offline: true, ..online.clone() };
        let get = |s: &Settings, want| fetch_model_with(s, "owner/name", "main", want, true);

        let error = get(&offline, Want::Config).unwrap_err();
        assert!(error.to_string().contains("config.json of owner/name"), "{error}");
        assert_eq!(hub.got(), Vec::<String>::new());

        let found = get(&online, Want::Config).unwrap();
        assert_eq!(found.revision.as_deref(), Some(COMMIT));
        assert!(found.notes.is_empty());
        assert_eq!(hub.got(), ["config.json"]);
        assert_eq!(hub.shared.lock().unwrap().authorization, "bearer hf_test_secret");
        let error = get(&offline, Want::Tokenizer).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json"), "{error}");

        get(&online, Want::Tokenizer).unwrap();
        assert_eq!(hub.got(), ["chat_template.jinja", "tokenizer.json"]);
        let error = get(&offline, Want::Weights).unwrap_err();
        assert!(error.to_string().contains("hf download owner/name"), "{error}");

        let found = get(&online, Want::Weights).unwrap();
        assert_eq!(
            hub.got(),
            [
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
            ]
        );
        for (name, bytes) in &weights {
            assert_eq!(&fs::read(found.dir.join(name)).unwrap(), bytes);
        }

        // Repeated, offline, by commit, and without a hub: nothing is downloaded.
        assert_eq!(get(&online, Want::Weights).unwrap(), found);
        assert_eq!(get(&offline, Want::Weights).unwrap(), found);
        let by_commit = fetch_model_with(&online, "owner/name", COMMIT, Want::Weights, false);
        assert_eq!(by_commit.unwrap().dir, found.dir);
        assert_eq!(hub.got(), Vec::<String>::new());
        let gone = settings(home.path(), "http://127.0.0.1:1");
        let cached = get(&gone, Want::Weights).unwrap();
        assert_eq!(cached.dir, found.dir);
        assert!(cached.notes[0].contains("cannot reach the hub"), "{:?}", cached.notes);

        // A shard missing from the cache is named offline, and downloaded online.
        fs::remove_file(found.dir.join("model-00002-of-00002.safetensors")).unwrap();
        let error = get(&offline, Want::Weights).unwrap_err();
        assert!(error.to_string().contains("model-00002-of-00002.safetensors"), "{error}");
        get(&online, Want::Weights).unwrap();
        get(&offline, Want::Weights).unwrap();
    }

    /// A branch may have moved since.
    #[test]
    fn a_hub_that_fails_or_refuses_the_token_leaves_the_cache() {
        let files: [(&str, &[u8]); 3] =
            [("config.json", b"{}"), ("model.safetensors", b"x"), ("rows/train-0.jsonl", b"{}\n")];
        let hub = Hub::new(&files);
        let (home, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let s = settings(home.path(), &hub.endpoint);
        let get = || fetch_model_with(&s, "owner/name", "main", Want::Weights, false);
        let rows = || {
            let name = DatasetName { id: "owner/name", revision: "main", config: None, split: Some("train") };
            fetch_dataset_with(&s, Some(kept.path()), name, false)
        };
        let (model, data) = (get().unwrap(), rows().unwrap());
        for (status, said) in [(401, "HF_TOKEN"), (429, "answered 429"), (500, "500"), (503, "503")] {
            hub.mood(Mood::Refuses(status, ""));
            let (again, same) = (get().unwrap(), rows().unwrap());
            assert_eq!((&again.dir, &same.files), (&model.dir, &data.files), "{status}");
            for note in [&again.notes[0], &same.notes[0]] {
                assert!(note.contains(said) && note.contains("from the cache"), "{note}");
            }
        }
        for (status, code) in [(404, "RevisionNotFound"), (418, "")] {
            hub.mood(Mood::Refuses(status, code));
            assert!(get().is_err() && rows().is_err(), "{status}");
        }
    }

    #[test]
    fn a_connection_that_breaks_is_made_again() {
        let hub = Hub::new(&[("config.json", b"{\"model_type\": \"qwen2\"}")]);
        let fetch = |cut: usize| {
            let home = tempfile::tempdir().unwrap();
            let s = settings(home.path(), &hub.endpoint);
            hub.shared.lock().unwrap().cut = cut;
            let found = fetch_model_with(&s, "owner/name", "main", Want::Config, false);
            assert!(s.cache.join(".locks/models--owner--name/ft.lock").is_file());
            (found.map(|found| fs::read(found.dir.join("config.json")).unwrap()), hub.got().len())
        };
        let (text, requests) = fetch(3);
        assert_eq!((text.unwrap().as_slice(), requests), (&b"{\"model_type\": \"qwen2\"}"[..], 4));
        let (none, requests) = fetch(9);
        assert!(matches!(none, Err(Error::Unreachable { .. })) && requests == 4, "{none:?}");
    }

    #[test]
    fn a_silent_hub_is_left_for_the_cache() {
        // connections come about, and wait
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let home = tempfile::tempdir().unwrap();
        let s = Settings { timeout: Duration::from_millis(20), ..settings(home.path(), &endpoint) };
        let dir = s.cache.join("models--owner--name/snapshots").join(COMMIT);
        fs::create_dir_all(&dir).unwrap();
        for name in ["config.json", "tokenizer.json"] {
            fs::write(dir.join(name), "{}").unwrap();
        }
        let found = fetch_model_with(&s, "owner/name", COMMIT, Want::Tokenizer, false).unwrap();
        assert!(found.dir == dir && found.notes[0].contains("cannot reach the hub"), "{found:?}");
    }

    #[test]
    fn a_dataset_s_split_comes_and_then_from_the_cache() {
        let files: [(&str, &[u8]); 4] = [
            ("README.md", b"---"),
            ("rows/test.jsonl", b"{\"text\": \"c\"}\n"),
            ("rows/train-0.jsonl", b"{\"text\": \"a\"}\n"),
            ("rows/train-1.jsonl", b"{\"text\": \"b\"}\n"),
        ];
        let hub = Hub::new(&files);
        let (home, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let online = settings(home.path(), &hub.endpoint);
        let offline = Settings { offline: true, ..online.clone() };
        let get = |s: &Settings, split| {
            let name = DatasetName { id: "owner/name", revision: "main", config: None, split: Some(split) };
            fetch_dataset_with(s, Some(kept.path()), name, false)
        };
        assert!(matches!(get(&offline, "train"), Err(Error::NotCached { .. })));
        let found = get(&online, "train").unwrap();
        assert_eq!(hub.got(), ["rows/train-0.jsonl", "rows/train-1.jsonl"]);
        let text: Vec<u8> = found.files.iter().flat_map(|f| fs::read(f).unwrap()).collect();
        assert_eq!(text, [files[2].1, files[3].1].concat());
        assert!(found.files[0].starts_with(online.cache.join("datasets--owner--name")));
        // repeated, offline, and without a hub: nothing is downloaded
        assert_eq!(get(&online, "train").unwrap(), found);
        assert_eq!(get(&offline, "train").unwrap(), found);
        let gone = settings(home.path(), "http://127.0.0.1:1");
        let cached = get(&gone, "train").unwrap();
        assert!(
            cached.files == found.files && cached.notes[0].contains("cannot reach the hub"),
            "{cached:?}"
        );
        assert_eq!(hub.got(), Vec::<String>::new());
        assert!(matches!(get(&offline, "test"), Err(Error::NotCached { .. })));
        let error = get(&online, "validation").unwrap_err();
        assert!(error.to_string().contains("it has test, train"), "{error}");
        assert_eq!(error.exit_code(), ExitCode::Data);
        assert_eq!(hub.got(), Vec::<String>::new());
    }

    /// The cache was filled by `hf download --repo-type dataset`, whose snapshots are links.
    #[test]
    fn a_dataset_that_another_program_has_downloaded_is_found_offline() {
        let home = tempfile::tempdir().unwrap();
        let s = Settings { offline: true, ..settings(home.path(), "http://127.0.0.1:1") };
        let folder = s.cache.join("datasets--owner--name");
        let dir = folder.join("snapshots").join(COMMIT);
        for inner in [dir.join("rows"), folder.join("refs"), folder.join("blobs")] {
            fs::create_dir_all(inner).unwrap();
        }
        fs::write(folder.join("refs/main"), COMMIT).unwrap();
        let get = |s: &Settings, split| {
            let name = DatasetName { id: "owner/name", revision: "main", config: None, split: Some(split) };
            fetch_dataset_with(s, None, name, false)
        };
        let error = get(&s, "train").unwrap_err();
        assert!(matches!(error, Error::NotCached { .. }), "{error}");
        assert!(error.to_string().contains("owner/name --repo-type dataset --revision main"), "{error}");
        for name in ["rows/a.jsonl", "rows/train-0-of-2.jsonl", "rows/train-1-of-2.jsonl"] {
            let blob = folder.join("blobs").join(name.replace('/', "-"));
            fs::write(&blob, "{}").unwrap();
            std::os::unix::fs::symlink(&blob, dir.join(name)).unwrap();
        }
        // by the names of the files, then by the card
        let found = get(&s, "train").unwrap();
        let shards = ["rows/train-0-of-2.jsonl", "rows/train-1-of-2.jsonl"].map(|f| dir.join(f));
        assert_eq!(found.files, shards);
        assert!(found.notes[0].contains(COMMIT), "{:?}", found.notes);
        let card =
            "---\nconfigs:\n- config_name: x\n  data_files:\n  - {split: train, path: rows/a.jsonl}\n---\n";
        fs::write(dir.join("README.md"), card).unwrap();
        assert_eq!(get(&s, "train").unwrap().files, [dir.join("rows/a.jsonl")]);
        let gone = get(&Settings { offline: false, ..s.clone() }, "train").unwrap();
        assert!(gone.notes[0].contains("cannot reach the hub"), "{:?}", gone.notes);
        let error = get(&s, "test").unwrap_err().to_string();
        assert!(error.contains("in the cache") && error.contains("it has train"), "{error}");
        fs::write(dir.join("README.md"), "---\nlicense: mit\nconfigs:\n- *x\n---\n").unwrap();
        let error = get(&s, "train").unwrap_err().to_string();
        assert!(error.contains("README.md: line 4: "), "{error}");
        fs::remove_file(dir.join("README.md")).unwrap();
        fs::remove_file(&shards[0]).unwrap();
        let error = get(&s, "train").unwrap_err();
        assert!(matches!(error, Error::NotCached { .. }), "{error}");
        assert!(error.to_string().contains("train-*-of-2"), "{error}");
    }

    /// The layout is of an earlier commit, which lacks a config and is gone later.
    #[test]
    fn a_later_commit_is_used_for_what_the_layout_lacks() {
        let hub = Hub::new(&[("rows/train-0.jsonl", b"{}\n")]);
        let (home, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let online = settings(home.path(), &hub.endpoint);
        let offline = Settings { offline: true, ..online.clone() };
        let get = |s: &Settings, config| {
            let name = DatasetName { id: "owner/name", revision: "main", config, split: Some("train") };
            fetch_dataset_with(s, Some(kept.path()), name, false)
        };
        let first = get(&online, None).unwrap();
        let error = get(&offline, Some("new")).unwrap_err().to_string();
        assert!(error.contains("it has no config \"new\""), "{error}");
        let folder = online.cache.join("datasets--owner--name");
        let later = "89abcdef".repeat(5);
        let dir = folder.join("snapshots").join(&later);
        for inner in [&dir, &folder.join("refs")] {
            fs::create_dir_all(inner).unwrap();
        }
        fs::write(folder.join("refs/main"), &later).unwrap();
        fs::write(dir.join("a.jsonl"), "{}\n").unwrap();
        let card = "---\nconfigs:\n- config_name: new\n  data_files: a.jsonl\n---\n";
        fs::write(dir.join("README.md"), card).unwrap();
        let reference = fs::File::options().write(true).open(folder.join("refs/main")).unwrap();
        let lacks =
            || get(&offline, Some("new")).unwrap_err().to_string().contains("it has no config \"new\"");
        reference.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(lacks(), "the other commit is older");
        reference.set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
        assert_eq!(get(&offline, Some("new")).unwrap().files, [dir.join("a.jsonl")]);
        fs::write(dir.join("README.md"), "---\nconfigs:\n- *x\n---\n").unwrap();
        assert!(lacks(), "the other commit has a broken card");
        fs::write(dir.join("README.md"), card).unwrap();
        assert_eq!(get(&offline, None).unwrap(), first);
        fs::remove_dir_all(folder.join("snapshots").join(COMMIT)).unwrap();
        assert_eq!(get(&offline, None).unwrap().files, [dir.join("a.jsonl")]);
    }

    #[test]
    fn a_repository_without_a_tokenizer_is_whole_offline_too() {
        let hub = Hub::new(&[("config.json", b"{}"), ("model.safetensors", b"x")]);
        let home = tempfile::tempdir().unwrap();
        let online = settings(home.path(), &hub.endpoint);
        let offline = Settings { offline: true, ..online.clone() };
        fetch_model_with(&online, "owner/name", "main", Want::Weights, false).unwrap();
        fetch_model_with(&offline, "owner/name", "main", Want::Weights, false).unwrap();
    }

    /// The cache was filled by a program that did not ask for them.
    #[test]
    fn optional_files_of_a_pinned_commit_come_once() {
        let files: [(&str, &[u8]); 5] = [
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"t\": 1}"),
            ("model.safetensors", b"x"),
            ("chat_template.jinja", b"{{ messages }}"),
            ("additional_chat_templates/tool_use.jinja", b"{{ tools }}"),
        ];
        let hub = Hub::new(&files);
        let home = tempfile::tempdir().unwrap();
        let online = settings(home.path(), &hub.endpoint);
        let dir = online.cache.join("models--owner--name/snapshots").join(COMMIT);
        fs::create_dir_all(&dir).unwrap();
        for (name, bytes) in &files[..3] {
            fs::write(dir.join(name), bytes).unwrap();
        }
        let get = |s: &Settings| fetch_model_with(s, "owner/name", COMMIT, Want::Weights, false).unwrap();
        assert_eq!(get(&Settings { offline: true, ..online.clone() }).dir, dir);
        assert_eq!(get(&settings(home.path(), "http://127.0.0.1:1")).dir, dir);
        // a hub that is busy is asked again
        hub.shared.lock().unwrap().busy = 2;
        assert_eq!(get(&online).dir, dir);
        assert_eq!(hub.got(), [files[4].0, files[3].0]);
        // from now on without a request
        hub.mood(Mood::Refuses(500, ""));
        assert_eq!(get(&online).dir, dir);
    }

    /// The cache was filled by a program that leaves no markers of absent files, on a machine without the network.
    #[test]
    fn a_pinned_commit_waits_once_for_a_hub_that_is_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("https://{}", listener.local_addr().unwrap());
        let connections = Arc::new(Mutex::new(0));
        let counted = connections.clone();
        // Connections are closed before TLS: none comes about.
        std::thread::spawn(move || listener.incoming().for_each(|_| *counted.lock().unwrap() += 1));
        let home = tempfile::tempdir().unwrap();
        let s = settings(home.path(), &endpoint);
        let dir = s.cache.join("models--owner--name/snapshots").join(COMMIT);
        fs::create_dir_all(&dir).unwrap();
        for name in ["config.json", "tokenizer.json", "model.safetensors"] {
            fs::write(dir.join(name), "{}").unwrap();
        }
        for want in [Want::Tokenizer, Want::Weights] {
            let found = fetch_model_with(&s, "owner/name", COMMIT, want, false).unwrap();
            assert!(found.dir == dir && found.notes[0].contains("cannot reach the hub"), "{found:?}");
            assert_eq!(*connections.lock().unwrap(), 1);
        }
    }

    /// The cache was filled by a program that knows neither processors nor ft's files.
    #[test]
    fn a_pinned_commit_with_the_files_of_its_tokens_needs_no_request() {
        let hub = Hub::new(&[]);
        hub.mood(Mood::Refuses(418, ""));
        let home = tempfile::tempdir().unwrap();
        let online = settings(home.path(), &hub.endpoint);
        let of_model = online.cache.join("models--owner--name");
        let (dir, absent) =
            (of_model.join("snapshots").join(COMMIT), of_model.join(".no_exist").join(COMMIT));
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(absent.join("additional_chat_templates")).unwrap();
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"] {
            fs::write(dir.join(name), "{}").unwrap();
        }
        for name in [
            "generation_config.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "chat_template.json",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
        ] {
            fs::write(absent.join(name), "").unwrap();
        }
        let get = |want| fetch_model_with(&online, "owner/name", COMMIT, want, false).unwrap();
        let of_tokens = get(Want::Tokenizer);
        assert_eq!((of_tokens.dir, of_tokens.notes), (dir, Vec::new()));
        // a result takes processors along
        let is_asked = |want| get(want).notes.iter().any(|note| note.contains("answered 418"));
        assert!(is_asked(Want::Weights));
        fs::remove_file(absent.join("chat_template.jinja")).unwrap();
        assert!(is_asked(Want::Tokenizer));
    }

    #[test]
    fn refusals_say_what_to_do_and_never_the_token() {
        let hub = Hub::new(&[]);
        let home = tempfile::tempdir().unwrap();
        let with_token = settings(home.path(), &hub.endpoint);
        let without = Settings { token: None, ..with_token.clone() };
        let cases = [
            (401, "GatedRepo", &without, "accept its license"),
            (403, "GatedRepo", &with_token, "has no access"),
            (401, "RepoNotFound", &without, "set HF_TOKEN"),
            (401, "", &with_token, "HF_TOKEN is valid"),
            (404, "RepoNotFound", &with_token, "is not on the hub"),
            (404, "RevisionNotFound", &with_token, "no revision \"main\""),
            (418, "", &with_token, "418"),
        ];
        for (status, code, settings, wanted) in cases {
            hub.mood(Mood::Refuses(status, code));
            let error = fetch_model_with(settings, "owner/name", "main", Want::Config, false).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(wanted) && text.contains("owner/name"), "{status} {code}: {text}");
            assert!(status == 404 || text.contains(": a policy"), "{status} {code}: {text}");
            assert!(!format!("{text}{error:?}").contains("hf_test_secret"), "{error:?}");
            assert_eq!(error.exit_code(), ExitCode::Model);
        }
        let gone = settings(home.path(), "http://127.0.0.1:1");
        let error = fetch_model_with(&gone, "owner/name", "main", Want::Config, false).unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error}");
        assert_eq!(error.exit_code(), ExitCode::Model);
        let foreign = settings(home.path(), "http://b\u{fc}cher.example");
        let error = fetch_model_with(&foreign, "owner/name", "main", Want::Config, false).unwrap_err();
        assert!(error.to_string().contains("HF_ENDPOINT") && error.to_string().contains("xn--"), "{error}");
    }

    #[test]
    fn repositories_without_what_is_needed_say_what_they_have() {
        let home = tempfile::tempdir().unwrap();
        let ask = |files: &[(&str, &[u8])]| {
            let hub = Hub::new(files);
            let s = settings(home.path(), &hub.endpoint);
            let error = fetch_model_with(&s, "owner/name", "main", Want::Weights, false);
            assert_eq!(hub.got(), Vec::<String>::new(), "nothing is fetched in vain");
            error.unwrap_err().to_string()
        };
        let text = ask(&[("config.json", b"{}"), ("pytorch_model.bin", b"x")]);
        assert!(text.contains("pickle") && text.contains("pytorch_model.bin"), "{text}");
        assert!(ask(&[("adapter_config.json", b"{}")]).contains("lora.init"));
        assert!(ask(&[("m.gguf", b"")]).contains("GGUF"));
        assert!(ask(&[("config.json", b"{}")]).contains("model.safetensors"));
    }

    #[test]
    fn an_error_page_does_not_stay_in_the_cache() {
        let hub = Hub::new(&[("config.json", b"{\"model_type\": \"qwen2\"}")]);
        let home = tempfile::tempdir().unwrap();
        let s = settings(home.path(), &hub.endpoint);
        let fetch = || fetch_model_with(&s, "owner/name", "main", Want::Config, false);
        hub.mood(Mood::SendsErrorPages);
        let error = fetch().unwrap_err();
        assert!(matches!(error, Error::Incomplete { got: 19, wanted: 23, .. }), "{error}");
        hub.mood(Mood::Serves);
        let found = fetch().unwrap();
        assert_eq!(fs::read(found.dir.join("config.json")).unwrap(), b"{\"model_type\": \"qwen2\"}");
    }

    #[test]
    fn adapters_come_from_the_hub() {
        let home = tempfile::tempdir().unwrap();
        let hub = Hub::new(&[
            ("adapter_config.json", b"{}"),
            ("adapter_model.safetensors", b"x"),
            ("adapter_model.bin", b"pickle"),
            // files of equal content come once
            ("tokenizer.json", b"{\"t\": 1}"),
            ("tokenizer_config.json", b"{\"chat_template\": \"{{ messages }}\"}"),
            ("chat_template.json", b"{\"chat_template\": \"\"}"),
        ]);
        let s = settings(home.path(), &hub.endpoint);
        let dir = fetch_adapter_with(&s, "owner/name", "main", false).unwrap();
        assert_eq!(
            hub.got(),
            [
                "adapter_config.json",
                "adapter_model.safetensors",
                "chat_template.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ]
        );
        let as_model = |s: &Settings| fetch_model_with(s, "owner/name", "main", Want::Weights, false);
        assert!(matches!(as_model(&s).unwrap_err(), Error::IsAdapter { .. }));
        let offline = Settings { offline: true, ..s };
        assert_eq!(fetch_adapter_with(&offline, "owner/name", "main", false).unwrap(), dir);
        assert!(matches!(as_model(&offline).unwrap_err(), Error::IsAdapter { .. }));

        let home = tempfile::tempdir().unwrap();
        let hub = Hub::new(&[("adapter_config.json", b"{}"), ("adapter_model.bin", b"pickle")]);
        let s = settings(home.path(), &hub.endpoint);
        let error = fetch_adapter_with(&s, "owner/name", "main", false).unwrap_err();
        assert!(matches!(error, Error::PickleOnly { .. }), "{error}");
    }
}
