//! Log-probabilities, echoes, lists of prompts, and sampling parameters of `ft serve`.

use crate::server::Server;
use crate::world::{World, repository};
use candle_core::{DType, Device};
use ft::data::Tokenizer;
use ft::infer::{LoadOptions, ModelFiles};
use ft::walk::generate::Reader;
use serde_json::{Value, json};
use std::io::Read;

const TEXT: &str = "The sky is blue, the sea is green.";

/// Log-probabilities of all tokens after a prompt, by a forward pass of that prompt alone.
fn after(prompt: &[u32]) -> Vec<f64> {
    let model = repository().join("data/model").display().to_string();
    let files = ModelFiles::open(&model, None).expect("a model");
    let options = LoadOptions { dtype: None, quantize: None };
    let (decoders, _) = files.load(options, &[Device::Cpu]).expect("loaded");
    let logits = Reader::new(&decoders[0], &Device::Cpu).read(prompt).expect("logits");
    let logits: Vec<f64> = logits.to_dtype(DType::F64).and_then(|l| l.to_vec1()).expect("numbers");
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let norm = most + logits.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
    logits.iter().map(|x| x - norm).collect()
}

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&repository().join("data/model"), None).expect("read").expect("a tokenizer")
}

fn list(v: &Value) -> &[Value] {
    v.as_array().unwrap_or_else(|| panic!("{v} is no list"))
}

/// Logits are sums of 128 f32 products below 20 in absolute value; their order depends on the number of rows.
fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 128.0 * 20.0 * f64::from(f32::EPSILON) / 2.0
}

#[test]
fn log_probabilities_are_those_of_the_model() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    let tokenizer = tokenizer();
    let ids = tokenizer.encode(TEXT).expect("ids");
    let body = |prompt: Value, tokens: usize| json!({"prompt": prompt, "echo": true, "logprobs": 3, "max_tokens": tokens, "temperature": 0});
    let (status, scored) = s.post("/v1/completions", body(json!(TEXT), 0));
    assert_eq!(status, 200, "{scored}");
    let choice = &scored["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(TEXT), &json!("length")));
    assert_eq!(
        scored["usage"],
        json!({"prompt_tokens": ids.len(), "completion_tokens": 0, "total_tokens": ids.len()})
    );
    let l = &choice["logprobs"];
    let (tokens, own, top, offsets) =
        (list(&l["tokens"]), list(&l["token_logprobs"]), list(&l["top_logprobs"]), list(&l["text_offset"]));
    assert!([own, top, offsets].iter().all(|l| l.len() == ids.len()) && tokens.len() == ids.len());
    assert!(own[0].is_null() && top[0].is_null());
    let mut offset = 0;
    for i in 0..ids.len() {
        let token = tokens[i].as_str().expect("a text");
        assert_eq!(offsets[i], offset);
        assert_eq!(&TEXT[offset..offset + token.len()], token);
        offset += token.len();
        if i == 0 {
            continue;
        }
        let all = after(&ids[..i]);
        assert!(
            close(own[i].as_f64().expect("a number"), all[ids[i] as usize]),
            "{i}: {} {}",
            own[i],
            all[ids[i] as usize]
        );
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|a, b| all[*b].total_cmp(&all[*a]));
        let said = top[i].as_object().expect("an object");
        let mut count = 0;
        for id in order[..3].iter().copied().chain([ids[i] as usize]) {
            let text = tokenizer.token_text(id as u32).expect("a text").0;
            assert!(
                said.get(&text).and_then(Value::as_f64).is_some_and(|x| close(x, all[id])),
                "{i} {text:?}: {said:?}"
            );
            count += 1;
        }
        assert!(said.len() <= count, "{said:?}");
    }

    // Token ids are the same prompt, and a list has one choice each. What is generated is scored too.
    let (_, of_ids) = s.post("/v1/completions", body(json!(ids), 0));
    assert_eq!(of_ids["choices"], scored["choices"]);
    let (status, both) = s.post("/v1/completions", body(json!([TEXT, "The sky"]), 2));
    assert_eq!(status, 200, "{both}");
    let choices = list(&both["choices"]);
    assert_eq!([&choices[0]["index"], &choices[1]["index"]], [0, 1]);
    let numbers = list(&choices[0]["logprobs"]["token_logprobs"]);
    assert_eq!(numbers[..ids.len()], own[..]);
    assert!(numbers.len() > ids.len(), "an end-of-text token is scored too");
    let greedy = after(&ids).into_iter().fold(f64::NEG_INFINITY, f64::max);
    assert!(close(numbers[ids.len()].as_f64().expect("a number"), greedy), "{numbers:?} {greedy}");
    let (_, ids_too) =
        s.post("/v1/completions", body(json!([ids, tokenizer.encode("The sky").expect("ids")]), 2));
    assert_eq!(ids_too["choices"], both["choices"]);

    // One prompt's stream is the same in parts.
    let mut streamed = body(json!("The sky"), 2);
    (streamed["stream"], streamed["model"]) = (json!(true), json!(s.model));
    let (_, text) = s.ask("POST", "/v1/completions", "", streamed.to_string().as_bytes());
    let parts: Vec<Value> =
        text.lines().filter_map(|l| serde_json::from_str(l.strip_prefix("data: ")?).ok()).collect();
    for key in ["tokens", "token_logprobs", "text_offset"] {
        let said: Vec<Value> =
            parts.iter().flat_map(|p| list(&p["choices"][0]["logprobs"][key]).to_vec()).collect();
        assert_eq!(json!(said), choices[1]["logprobs"][key], "{key}");
    }
    assert_eq!(s.interrupt(), Some(130));
}

#[test]
fn a_conversation_is_scored_in_openais_form() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    let body = json!({"messages": [{"role": "user", "content": "What colour is the sky?"}], "temperature": 0, "logprobs": true, "top_logprobs": 2});
    let (status, answer) = s.post("/v1/chat/completions", body.clone());
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    let content = list(&choice["logprobs"]["content"]);
    let text: String = content.iter().map(|t| t["token"].as_str().expect("a text")).collect();
    // The end-of-text token is scored, and not said.
    let said = choice["message"]["content"].as_str().expect("a text");
    assert!(
        text.starts_with(said)
            && content.len() as u64 == answer["usage"]["completion_tokens"].as_u64().expect("a count") + 1,
        "{answer}"
    );
    for token in content {
        let top = list(&token["top_logprobs"]);
        assert_eq!(
            (top.len(), &top[0]["logprob"], &top[0]["token"]),
            (2, &token["logprob"], &token["token"]),
            "greedy"
        );
        assert_eq!(token["bytes"], json!(token["token"].as_str().map(str::as_bytes)));
        assert!(top[1]["logprob"].as_f64() <= top[0]["logprob"].as_f64());
    }
    // A stop string cuts the tokens too.
    let word = said.split(' ').nth(2).expect("three words");
    let mut stopped = body;
    stopped["stop"] = json!(word);
    let (_, answer) = s.post("/v1/chat/completions", stopped);
    let said = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    let content = list(&answer["choices"][0]["logprobs"]["content"]);
    let tokens: Vec<&str> = content.iter().map(|t| t["token"].as_str().expect("a text")).collect();
    let before = tokens[..tokens.len() - 1].concat();
    assert!(tokens.concat().starts_with(said) && before.len() < said.len(), "{tokens:?} {said:?}");
}

/// An answer that is not streamed is one JSON value in memory.
#[test]
fn log_probabilities_of_a_whole_answer_are_bounded() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    // 256 prompts, 20 alternatives: 65536 / 21 / 256 tokens each
    let mut body = json!({"prompt": vec!["a"; 256], "logprobs": 20, "max_tokens": 13, "model": s.model});
    let (status, e) = s.post("/v1/completions", body.clone());
    let message = e["error"]["message"].as_str().unwrap_or_default();
    assert!(
        status == 400 && e["error"]["param"] == "max_tokens" && message.contains("at most 12 tokens"),
        "{e}"
    );
    body["max_completion_tokens"] = body["max_tokens"].take();
    let (status, e) = s.post("/v1/completions", body.clone());
    let message = e["error"]["message"].as_str().unwrap_or_default();
    let (key, param) = ("max_completion_tokens", &e["error"]["param"]);
    assert!(status == 400 && param == key && message.starts_with(key), "{e}");
    // 2^19 / 21 tokens of prompts, streamed too
    for stream in [false, true] {
        let echoed = json!({"prompt": vec![vec![5; 500]; 50], "echo": true, "logprobs": 20, "max_tokens": 0, "stream": stream});
        let (status, e) = s.post("/v1/completions", echoed);
        let message = e["error"]["message"].as_str().unwrap_or_default();
        let is_of_echo = e["error"]["param"] == "logprobs" && message.contains("at most 24966 tokens");
        assert!(status == 400 && is_of_echo, "{e}");
    }
    body["stream"] = json!(true);
    let mut head = [0; 12];
    s.open("POST", "/v1/completions", "", body.to_string().as_bytes()).read_exact(&mut head).expect("a head");
    assert_eq!(&head, b"HTTP/1.1 200");
}

/// A change of the model's folder has no effect on a server, and broken settings end the next start.
#[test]
fn sampling_settings_of_the_model_are_read_at_the_start() {
    let w = World::new();
    for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        w.write(
            &format!("m/{file}"),
            std::fs::read(repository().join("data/model").join(file)).expect("a file"),
        );
    }
    w.write("m/generation_config.json", "{\"repetition_penalty\": 1.5}");
    let s = Server::of(&w, "m", &[]);
    let answer = || s.post("/v1/completions", json!({"prompt": "The sky", "max_tokens": 8}));
    let (status, before) = answer();
    assert_eq!(status, 200, "{before}");
    w.write("m/generation_config.json", "{\"repetition_penalty\": 0}");
    assert_eq!(answer().1["choices"], before["choices"]);
    let r = w.ft(&["serve", "m", "--port", "0"]);
    assert!(r.code == 4 && r.err.contains("repetition_penalty is not above 0"), "{}: {}", r.code, r.err);
}

#[test]
fn sampling_parameters_have_their_effect() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    let said = |more: Value| {
        let mut body = json!({"prompt": "The sky", "max_tokens": 24, "temperature": 2, "seed": 3});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, answer) = s.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().expect("a text").to_string()
    };
    let (drawn, greedy) = (said(json!({})), said(json!({"temperature": 0})));
    assert_ne!(drawn, greedy);
    assert_eq!(said(json!({"top_k": 1})), greedy);
    assert_eq!(
        [said(json!({"top_k": 0})), said(json!({"top_k": -1})), said(json!({"repetition_penalty": 1}))],
        [&drawn; 3].map(Clone::clone)
    );
    assert_ne!(said(json!({"seed": 4})), drawn);
    // A large penalty forbids each token that has occurred.
    let ids = tokenizer().encode(&said(json!({"temperature": 0, "repetition_penalty": 1e30}))).expect("ids");
    let mut once = ids.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), ids.len());
    // A list is answered in order, each as if alone.
    let list = json!({"prompt": ["The sky", "a", "The sky"], "max_tokens": 8, "temperature": 2, "seed": 3});
    let (_, answer) = s.post("/v1/completions", list);
    let text = |i: usize| answer["choices"][i]["text"].as_str().expect("a text").to_string();
    assert_eq!([text(0), text(2)], [said(json!({"max_tokens": 8})), text(0)]);
    assert_eq!(text(1), said(json!({"prompt": "a", "max_tokens": 8})));
    // A long prompt in a list leaves less of the context to its own reply alone.
    let ids = tokenizer().encode("The sky").expect("ids");
    let list = json!({"prompt": [vec![5; 510], ids], "max_tokens": 24, "temperature": 2, "seed": 3});
    let (status, answer) = s.post("/v1/completions", list);
    assert_eq!((status, answer["choices"][1]["text"].as_str()), (200, Some(drawn.as_str())), "{answer}");
    // Without a seed, each reply of a list is drawn anew.
    let equal = json!({"prompt": vec!["The sky"; 8], "max_tokens": 24, "temperature": 2});
    let (_, answer) = s.post("/v1/completions", equal);
    let first = &answer["choices"][0]["text"];
    assert!((1..8).any(|i| answer["choices"][i]["text"] != *first), "{answer}");
}

/// Variables of one request change its text alone.
#[test]
fn a_template_takes_variables_of_a_request() {
    let w = World::new();
    let template = "{{ mood }}{{ reasoning_effort or '' }}{% for m in messages %}{{ m.content }}{% endfor %}";
    w.write("t.jinja", template);
    let s = Server::start(&w, &["--chat-template", "t.jinja", "--template", "mood=good"]);
    let tokens = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, answer) = s.post("/v1/chat/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens"].as_u64().expect("a count")
    };
    let own = tokens(json!({}));
    let other = tokens(json!({"chat_template_kwargs": {"mood": "a very long mood that has many tokens"}}));
    assert!(other > own + 4, "{own} {other}");
    assert_eq!(tokens(json!({"chat_template_kwargs": {}})), own);
    let effort = "an effort that has many tokens";
    assert!(tokens(json!({"reasoning_effort": effort})) > own + 4);
    let same = json!({"reasoning_effort": effort, "chat_template_kwargs": {"reasoning_effort": effort}});
    assert!(tokens(same) > own + 4);
    for (name, value) in
        [("reasoning_effort", json!(1)), ("chat_template_kwargs", json!({"reasoning_effort": "low"}))]
    {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "reasoning_effort": effort});
        body[name] = value;
        let (status, e) = s.post("/v1/chat/completions", body);
        assert!(status == 400 && e["error"]["param"] == "reasoning_effort", "{e}");
    }
    let body = json!({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mod": 1}});
    let (status, e) = s.post("/v1/chat/completions", body);
    let message = e["error"]["message"].as_str().expect("a message");
    assert!(status == 400 && message.contains("reads no \"mod\"") && message.contains("mood"), "{e}");
}

#[test]
fn prompts_that_cannot_be_answered_are_refused_by_name() {
    let w = World::new();
    let s = Server::start(&w, &[]);
    for (name, value) in [
        ("prompt", json!([])),
        ("prompt", json!("")),
        ("prompt", json!(["a", ""])),
        ("prompt", json!([["a"]])),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([9_999_999])),
        ("prompt", json!(7)),
        ("prompt", json!(vec!["a"; 257])),
        ("prompt", json!(vec![vec![5; 500]; 200])),
        ("logprobs", json!(21)),
        ("logprobs", json!(true)),
        ("echo", json!(1)),
        ("best_of", json!(2)),
        ("suffix", json!("b")),
        ("n", json!(2)),
        ("max_tokens", json!(0)),
        ("top_logprobs", json!(1)),
        ("messages", json!([])),
        ("chat_template_kwargs", json!({})),
        ("min_p", json!(0.1)),
    ] {
        let mut body = json!({"prompt": "a"});
        body[name] = value;
        let (status, e) = s.post("/v1/completions", body.clone());
        assert!(status == 400 && e["error"]["param"] == name, "{body}: {status} {e}");
    }
    let (status, e) =
        s.post("/v1/completions", json!({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}));
    assert!(
        status == 400 && e["error"]["message"].as_str().is_some_and(|m| m.contains("contradicts")),
        "{e}"
    );
    // A prompt as long as the context can be scored, and not continued.
    let full = json!({"prompt": vec![5; 512], "echo": true, "logprobs": 0, "max_tokens": 0});
    let (status, scored) = s.post("/v1/completions", full.clone());
    assert_eq!((status, list(&scored["choices"][0]["logprobs"]["tokens"]).len()), (200, 512));
    for (key, value) in [("max_tokens", json!(1)), ("prompt", json!(vec![5; 513]))] {
        let mut body = full.clone();
        body[key] = value;
        let (status, e) = s.post("/v1/completions", body);
        assert!(status == 400 && e["error"]["code"] == "context_length_exceeded", "{e}");
    }
}
