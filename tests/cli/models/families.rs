//! Answers of the newer families: chat, the server and evaluation by generation say the same.

use crate::server::Server;
use crate::world::{World, recipe, repository};
use serde_json::{Map, Value, json};

const FAMILIES: [&str; 13] = [
    "gemma3",
    "gemma4",
    "gemma4-joint",
    "gemma4-moe",
    "glm4",
    "gpt-oss",
    "ministral",
    "olmo2",
    "olmo3",
    "phi3",
    "phi3-long",
    "qwen35-moe",
    "smollm3",
];

/// A model of a fixture's config with the tiny tokenizer and random weights, trained for a step in full.
fn model(w: &World, family: &str) {
    w.tokenizer("tiny");
    let path = repository().join("tests/fixtures/families").join(family).join("model/config.json");
    let mut raw: Map<String, Value> =
        serde_json::from_slice(&std::fs::read(path).expect("read")).expect("JSON");
    let text = match raw.get_mut("text_config") {
        Some(Value::Object(text)) => text,
        _ => &mut raw,
    };
    let per_layer = text.contains_key("vocab_size_per_layer_input");
    text.insert("vocab_size".into(), json!(285));
    if per_layer {
        text.insert("vocab_size_per_layer_input".into(), json!(285));
    }
    w.write("tiny/config.json", Value::Object(raw).to_string());
    w.write("r.toml", recipe("[[train]]\nmodules = [\"/.*/\"]\nmethod = \"full\"\n"));
    w.ok(&["run", "r.toml", "run.output=a", "run.steps=1"]);
}

#[test]
fn chat_the_server_and_evaluation_say_the_same() {
    for family in FAMILIES {
        let w = World::new();
        model(&w, family);
        let question = "What colour is the sky?";
        let said = w.ok(&["chat", "a/model", "--prompt", question, "--max-tokens", "6"]).out;
        let s = Server::of(&w, "a/model", &[]);
        let asked =
            json!({"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 6});
        let (status, answer) = s.post("/v1/chat/completions", asked);
        assert_eq!(status, 200, "{family}: {answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default();
        // A terminal sees control characters as escapes.
        let seen = |c: char| match c {
            '\n' | '\t' => c.to_string(),
            c if c.is_control() => format!("\\u{:04x}", c as u32),
            c => c.to_string(),
        };
        let text: String = text.chars().map(seen).collect();
        assert_eq!(text.trim_end(), said.trim_end(), "{family}");
        s.interrupt();
        let row = json!({"messages": [
            {"role": "user", "content": question}, {"role": "assistant", "content": said.trim_end()}
        ]});
        w.write("asked.jsonl", row.to_string() + "\n");
        let r = w.ok(&[
            "eval",
            "r.toml",
            "--json",
            "model.source=a/model",
            "model.weights=load",
            "generate.samples=1",
            "generate.max_new_tokens=6",
            "data.max_length=256",
            "data.eval=[{ source = \"asked.jsonl\", format = \"messages\" }]",
        ]);
        let scored = r.json();
        assert_eq!(scored["generated_samples"], 1, "{family}: {scored}");
    }
}
