//! Whom and what `ft serve` refuses, and how.

use crate::server::{Server, answer, request};
use crate::world::World;
use serde_json::{Value, json};
use std::io::Read;

fn refused((status, text): (u16, String)) -> (u16, String) {
    let v: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{status} {e}: {text}"));
    let e = &v["error"];
    assert!(e["message"].is_string() && e["type"].is_string(), "{text}");
    (status, e["code"].as_str().unwrap_or_default().to_string())
}

#[test]
fn web_pages_of_strangers_are_refused_without_a_key() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    let port = s.address.rsplit(':').next().expect("a port");
    let body = json!({"model": s.model, "prompt": "a", "max_tokens": 1}).to_string();
    let asked = |headers: &str| answer(s.send(&request("POST", "/v1/completions", headers, body.as_bytes())));
    let json = "Content-Type: application/json\r\n";
    for own in [
        format!("Host: {}\r\n{json}", s.address),
        format!("Host: localhost:{port}\r\n{json}"),
        format!("host: LOCALHOST\r\nOrigin: http://LOCALHOST\r\n{json}"),
        "Host: [::1]:9\r\ncontent-type: Application/JSON; charset=utf-8\r\n".to_string(),
        format!("Host: {0}\r\nOrigin: http://{0}\r\n{json}", s.address),
    ] {
        assert_eq!(asked(&own).0, 200, "{own}");
    }
    for (headers, wanted) in [
        (format!("Host: example.com\r\n{json}"), (403, "foreign_host")),
        (
            format!("Host: example.com:{port}\r\nOrigin: http://example.com:{port}\r\n{json}"),
            (403, "foreign_host"),
        ),
        (format!("Host: localhost.example.com\r\n{json}"), (403, "foreign_host")),
        (json.to_string(), (403, "foreign_host")),
        (format!("Host: localhost\r\nHost: example.com\r\n{json}"), (403, "foreign_host")),
        (format!("Host: {}\r\nOrigin: http://example.com\r\n{json}", s.address), (403, "foreign_origin")),
        (format!("Host: {}\r\nOrigin: http://localhost:1\r\n{json}", s.address), (403, "foreign_origin")),
        (format!("Host: {}\r\nOrigin: null\r\n{json}", s.address), (403, "foreign_origin")),
        (format!("Host: {}\r\n", s.address), (415, "")),
        (format!("Host: {}\r\nContent-Type: text/plain\r\n", s.address), (415, "")),
        (format!("Host: {}\r\nContent-Type: application/x-www-form-urlencoded\r\n", s.address), (415, "")),
        (format!("Host: {}\r\n{json}Content-Type: text/plain\r\n", s.address), (415, "")),
    ] {
        let (status, code) = refused(asked(&headers));
        assert_eq!((status, code.as_str()), wanted, "{headers}");
    }
    for path in ["/health", "/v1/models", "/nothing"] {
        let (status, _) = refused(answer(s.send(&request("GET", path, "Host: example.com\r\n", b""))));
        assert_eq!(status, 403, "{path}");
    }
    let target = format!(
        "GET http://example.com/v1/models HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        s.address
    );
    assert_eq!(refused(answer(s.send(target.as_bytes()))).0, 403);
}

#[test]
fn a_key_opens_all_and_health_needs_none() {
    let w = World::new();
    let s = Server::start(&w, &["--host", "0.0.0.0", "--key", "secret", "--name", "mine"]);
    let own = Server {
        address: s.address.replace("0.0.0.0", "127.0.0.1"),
        child: std::process::Command::new("true").spawn().expect("started"),
        model: "mine".into(),
    };
    let asked = |path: &str, headers: &str| answer(own.send(&request("GET", path, headers, b"")));
    let key = "Authorization: Bearer secret\r\n";
    // With a key, a name of the network and a web page of one's own are welcome.
    let (status, text) =
        asked("/v1/models", &format!("Host: gpu.example.com\r\nOrigin: http://ui.example.com\r\n{key}"));
    assert!(status == 200 && text.contains("\"id\":\"mine\""), "{text}");
    assert_eq!(asked("/v1/models/mine", &format!("Host: x\r\n{key}")).0, 200);
    let (status, text) = asked("/health", "Host: x\r\n");
    assert_eq!((status, text.as_str()), (200, "{\"status\":\"ok\"}"));
    for path in
        ["/v1/models", "/v1/models/mine", "/v1/chat/completions", "/nothing", "/health/", "/v1/../health"]
    {
        for wrong in [
            "",
            "Authorization: Bearer secre\r\n",
            "Authorization: Bearer secret2\r\n",
            "Authorization: Bearer \r\n",
            "Authorization: Bearer\r\n",
            "Authorization: Bearer s\u{e9}cret\r\n",
        ] {
            let (status, code) = refused(asked(path, &format!("Host: x\r\n{wrong}")));
            assert_eq!((status, code.as_str()), (401, "invalid_api_key"), "{path} {wrong}");
        }
    }
}

/// A browser asks before it sends the key of a page, and shows the page only answers that allow it.
#[test]
fn web_pages_with_the_key_are_answered() {
    let w = World::new();
    let s = Server::start(&w, &["--api-key", "secret", "--name", "mine"]);
    let head = |method: &str, path: &str, headers: &str| {
        let headers = format!("Host: x\r\nOrigin: http://ui.example.com\r\n{headers}");
        let mut text = String::new();
        s.send(&request(method, path, &headers, b"")).read_to_string(&mut text).expect("an answer");
        text.split_once("\r\n\r\n").expect("a head").0.to_lowercase()
    };
    let asked = "Access-Control-Request-Method: POST\r\n\
                 Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n";
    let preflight = head("OPTIONS", "/v1/chat/completions", asked);
    for line in [
        "http/1.1 204",
        "access-control-allow-origin: *",
        "access-control-allow-methods: get, post",
        "access-control-allow-headers: authorization,content-type,x-stainless-os",
    ] {
        assert!(preflight.contains(line), "no {line:?} in {preflight}");
    }
    for (path, key, status) in [
        ("/v1/models", "Authorization: Bearer secret\r\n", 200),
        ("/v1/models", "", 401),
        ("/health", "", 200),
    ] {
        let head = head("GET", path, key);
        assert!(head.starts_with(&format!("http/1.1 {status}")), "{head}");
        assert!(head.contains("access-control-allow-origin: *"), "{head}");
    }
    assert!(head("OPTIONS", "/v1/models", "").starts_with("http/1.1 401"), "no preflight");
}

#[test]
fn other_machines_need_a_key() {
    let w = World::new();
    let refused = |args: &[&str], what: &str| {
        let r = w.ft(&[&["serve", "nothing", "--port", "0"], args].concat());
        assert!(r.code == 2 && r.err.contains(what), "{args:?}: {} {}", r.code, r.err);
    };
    refused(&["--host", "0.0.0.0"], "--host 0.0.0.0: whoever reaches this machine could use the model");
    refused(&["--host", "::"], "hint: --api-key KEY, or FT_API_KEY");
    refused(&["--host", "box"], "an address is wanted: 127.0.0.1, ");
    refused(&["--api-key", ""], "a key is one word");
    refused(&["--api-key", "a b"], "a key is one word");
    refused(&["--name", ""], "--name");
    refused(&["--max-tokens", "0"], "--max-tokens");
}

#[test]
fn each_refusal_is_json() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    for (method, path, wanted) in [
        ("GET", "/v1/models/%ff", 400),
        ("GET", "/v1/models/%", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/", 404),
        ("GET", "//", 404),
        ("GET", "/%ff", 404),
        ("GET", "/v1/models?a=%ff", 200),
        ("GET", "/v1/completions", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("DELETE", "/v1/models/x", 405),
        ("BREW", "/health", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions", 400),
        ("OPTIONS", "*", 404),
    ] {
        let (status, text) = s.ask(method, path, "", b"");
        assert_eq!(status, wanted, "{method} {path}: {text}");
        if status != 200 {
            refused((status, text));
        }
    }
    // Too many headers, and too large ones, before there is a request to answer.
    let many: String = (0..80).map(|i| format!("X-{i}: 1\r\n")).collect();
    assert_eq!(s.ask("GET", "/health", &many, b"").0, 431);
    let large = format!("X: {}\r\n", "x".repeat(20 << 10));
    assert_eq!(s.ask("GET", "/health", &large, b"").0, 431);
    assert_eq!(s.ask("GET", "/health", "", b"").0, 200);
    assert_eq!(s.interrupt(), Some(130));
}
