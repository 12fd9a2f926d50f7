//! Malicious inputs: endless templates and tokenizers, unbounded rows, terminal escape sequences, pipes and
//! devices in place of files, closed outputs. Every case ends with the right exit code.

use crate::world::{LORA, Ran, World, ran, recipe, repository};
use assert_cmd::Command;
use serde_json::{Value, json};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// A world with the quickstart model in `m`, and a recipe that trains on two conversations.
fn world() -> World {
    let w = World::new();
    w.copy(repository().join("data/model"), "m");
    let row = json!({"messages": [
        {"role": "user", "content": "What colour is the sky?"}, {"role": "assistant", "content": "Blue it is."}
    ]});
    w.write("chat.jsonl", format!("{row}\n{row}\n"));
    let r = recipe("[[train]]\nmodules = [\"attention\"]\n")
        .replace("source = \"tiny\"\nweights = \"random\"", "source = \"m\"");
    let r = r.replace("\"rows.jsonl\", format = \"tokens\"", "\"chat.jsonl\", format = \"messages\"");
    w.write(
        "r.toml",
        r.replace("eval = [{ source = \"eval.jsonl\", format = \"tokens\" }]", "")
            .replace("steps = 6", "steps = 1")
            .replace("max_length = 32", "max_length = 256"),
    );
    w
}

/// Runs a command. The limit only ends a hanging test.
fn ends(command: std::process::Command) -> Ran {
    ran(Command::from_std(command).timeout(Duration::from_secs(600)).output().expect("started"))
}

/// Runs `ft`, with the limit of [`ends`].
fn within(w: &World, args: &[&str]) -> Ran {
    ends(w.command(args))
}

fn edit(w: &World, file: &str, pointer: &str, value: Value) {
    let mut json = w.json(file);
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    json.pointer_mut(parent).expect("a parent")[key] = value;
    w.write(file, json.to_string());
}

#[test]
fn templates_without_end_are_errors_of_the_rows_or_the_model() {
    let w = world();
    let messages = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
    for (code, template) in [
        (3, "{% set ns = namespace(d=[]) %}{% for i in range(60) %}{% set ns.d = [ns.d, ns.d] %}{% endfor %}{{ ns.d|string }}".to_string()),
        (3, "{% set n = 5000000 %}{% set a = 'a' * n %}{% for i in range(99999) %}{{ a|length }}{% endfor %}".into()),
        (3, "{% set ns = namespace(x=1) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}".into()),
        (4, format!("{{{{ 1{} }}}}", "+1".repeat(50_000))),
    ] {
        w.write("t.jinja", format!("{messages}{template}"));
        let r = within(&w, &["check", "r.toml", "data.chat_template=t.jinja"]);
        assert_eq!(r.code, code, "{template:.80}\n{}", r.err);
        assert!(r.err.contains("t.jinja"), "{}", r.err);
    }
}

#[test]
fn a_tokenizer_that_makes_its_library_panic_is_an_error_with_its_name() {
    let text = |t: &str| json!({"String": t});
    let cases: [(&str, Value); 9] = [
        ("/pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        ("/normalizer", json!({"type": "Replace", "pattern": text(""), "content": "a"})),
        ("/normalizer", json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "a"})),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "////////////////"})),
        (
            "/post_processor",
            json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {}}),
        ),
        ("/model/continuing_subword_prefix", json!("################################")),
        ("/decoder", json!({"type": "Strip", "content": ",", "start": 10, "stop": 10})),
        (
            "/normalizer",
            json!({"type": "Sequence", "normalizers":
            vec![json!({"type": "Replace", "pattern": text("e"), "content": "ee"}); 40]}),
        ),
    ];
    for (pointer, value) in cases {
        let w = world();
        edit(&w, "m/tokenizer.json", pointer, value.clone());
        let verbs: [&[&str]; 2] =
            [&["data", "r.toml"], &["chat", "m", "--prompt", "hello", "--max-tokens", "3"]];
        for args in verbs {
            let r = within(&w, args);
            assert!(
                r.code == 4 && r.err.contains("tokenizer.json"),
                "{args:?} {value}: {} {}",
                r.code,
                r.err
            );
            assert!(!r.err.contains("panicked"), "{}", r.err);
        }
    }
}

/// Memory grows only with the kept part of a row.
#[test]
fn long_rows_are_cut_or_refused_in_bounded_memory() {
    let w = world();
    let words = "some words that are cut into tokens one after the other ".repeat(180_000);
    let text = |t: &str| json!({"text": t}).to_string() + "\n";
    let limited = |args: &str| {
        let line = format!("ulimit -v 1500000; exec {} {args}", crate::world::FT);
        let mut sh = std::process::Command::new("sh");
        sh.args(["-c", &line]).current_dir(w.path("")).env("RAYON_NUM_THREADS", "2");
        crate::world::same_variables(&mut sh, &w.command(&[]));
        ends(sh)
    };
    let args = "data r.toml --rows 0 'data.train=[{source=\"long.jsonl\",format=\"text\"}]' data.mask=none data.max_length=64";
    w.write("long.jsonl", text(&words) + &text("and a short one"));
    let r = limited(args);
    assert_eq!(r.code, 0, "{}", r.err);
    assert!(r.out.contains("examples     2, 1 cut to data.max_length"), "{}", r.out);
    // No place to cut; too long for a row; too many values.
    for row in [
        text(&"x".repeat(20 << 20)),
        text(&words.repeat(4)),
        json!({"text": "a", "b": vec![0; 9 << 20]}).to_string(),
    ] {
        w.write("long.jsonl", row);
        let r = limited(args);
        assert_eq!(r.code, 3, "{}", r.err);
        assert!(r.err.contains("long.jsonl:1"), "{}", r.err);
    }
}

/// Neither stdout nor stderr may contain terminal escape sequences.
#[test]
fn escape_sequences_in_inputs_never_reach_the_terminal() {
    let evil = "\u{1b}[31m\u{9b}2J\u{202e}\r\u{7}";
    let is_evil = |c: char| (c.is_control() && c != '\n' && c != '\t') || c == '\u{202e}';
    let clean = |what: &str, r: Ran| {
        assert!(!r.out.contains(is_evil) && !r.err.contains(is_evil), "{what}: {:?} {:?}", r.out, r.err);
        assert!(
            r.out.to_lowercase().contains("1b") || r.err.to_lowercase().contains("1b"),
            "{what}: nothing is spelled: {} {}",
            r.out,
            r.err
        );
        r
    };
    let escaped = json!(evil).to_string();
    let w = world();
    w.write(
        "t.jinja",
        format!("{{{{ raise_exception({escaped}) }}}}")
            .replace("\\u001b", "\u{1b}")
            .replace("\\u0007", "\u{7}"),
    );
    clean("raise_exception", within(&w, &["check", "r.toml", "data.chat_template=t.jinja"]));
    let name = format!("run.batch_rows={evil}");
    clean("a recipe's value", within(&w, &["check", "r.toml", &name]));
    w.write(&format!("{evil}.toml"), "x = 1");
    clean("a file's name", within(&w, &["check", &format!("{evil}.toml")]));
    edit(&w, "m/config.json", "/model_type", json!(evil));
    clean("config.json", within(&w, &["check", "r.toml"]));
    let w = world();
    w.write("chat.jsonl", json!({"messages": [{"role": evil, "content": evil}]}).to_string());
    clean("a row", within(&w, &["check", "r.toml"]));
    let row =
        json!({"messages": [{"role": "user", "content": evil}, {"role": "assistant", "content": evil}]});
    w.write("chat.jsonl", row.to_string());
    clean("data", within(&w, &["data", "r.toml"]));
    w.write("a/adapter_config.json", json!({"peft_type": evil, "base_model_name_or_path": evil}).to_string());
    w.write("a/adapter_model.safetensors", "");
    clean("an adapter", within(&w, &["chat", "m", "--adapter", "a", "--prompt", "x"]));
    let decoder = json!({"type": "Sequence", "decoders": [{"type": "ByteLevel", "add_prefix_space": true,
        "trim_offsets": true, "use_regex": true}, {"type": "Replace", "pattern": {"String": " "}, "content": evil}]});
    edit(&w, "m/tokenizer.json", "/decoder", decoder);
    let r = clean(
        "a reply",
        within(&w, &["chat", "m", "--prompt", "What colour is the sky?", "--max-tokens", "12"]),
    );
    assert_eq!(r.code, 0, "{}", r.err);
}

#[test]
fn pipes_and_devices_in_place_of_files_are_refused() {
    let put = |w: &World, name: &str, pipe: bool| {
        let path = w.path(name);
        let _ = std::fs::remove_file(&path);
        match pipe {
            true => rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::from_raw_mode(0o600))
                .expect("a pipe"),
            false => std::os::unix::fs::symlink("/dev/zero", &path).expect("a link"),
        }
    };
    for pipe in [true, false] {
        for (name, code, set) in [
            ("chat.jsonl", 3, ""),
            ("all.json", 3, "data.train.0.source=all.json"),
            ("m/tokenizer.json", 4, ""),
            ("m/tokenizer_config.json", 4, ""),
            ("m/special_tokens_map.json", 4, ""),
            ("m/generation_config.json", 4, ""),
            ("m/chat_template.jinja", 4, ""),
            ("m/chat_template.json", 4, ""),
            ("t.jinja", 4, "data.chat_template=t.jinja"),
            ("m/config.json", 4, ""),
            ("m/model.safetensors", 4, ""),
            ("r.toml", 2, ""),
        ] {
            let w = world();
            put(&w, name, pipe);
            let mut args = vec!["run", "r.toml"];
            args.extend(Some(set).filter(|s| !s.is_empty()));
            let r = within(&w, &args);
            assert_eq!(r.code, code, "{name}, a pipe: {pipe}: {}", r.err);
            assert!(r.err.contains(name.rsplit('/').next().expect("a name")), "{name}: {}", r.err);
        }
        let w = World::tiny(LORA);
        w.ok(&["run", "r.toml", "run.output=o", "run.save_every=3", "run.keep=9"]);
        let whole = w.checkpoints("o");
        let last = format!("o/checkpoints/{}", whole.last().expect("a checkpoint"));
        for file in ["COMPLETE", "manifest.json"] {
            put(&w, &format!("{last}/{file}"), pipe);
            let r = within(&w, &["run", "r.toml", "run.output=o", "--resume"]);
            assert_eq!(r.code, 0, "{file}: {}", r.err);
        }
    }
}

/// A closed reader is not an error; a full disk is a storage error.
#[test]
fn a_closed_reader_is_no_error_and_a_full_disk_is_a_storage_error() {
    let w = world();
    let mut n = 0;
    for verb in [
        "recipes",
        "schema",
        "check r.toml",
        "plan r.toml",
        "plan r.toml --json",
        "data r.toml",
        "bench r.toml --steps 1",
        "eval r.toml data.eval='[{source=\"chat.jsonl\",format=\"messages\"}]'",
        "run r.toml --overwrite",
        "chat m --prompt hello --max-tokens 4",
        "quantize m --out q$N",
        "--help",
        "nonsense",
    ] {
        for (to, codes) in [
            (">/dev/full", &[0, 2, 5][..]),
            ("2>/dev/full", &[0, 2]),
            (">&-", &[0, 2]),
            ("2>&-", &[0, 2]),
            (">/dev/full 2>&1", &[0, 2, 5]),
            ("| true", &[0]),
            ("2>&1 >/dev/null | true", &[0]),
        ] {
            n += 1;
            let line = format!("{} {verb} {to}", crate::world::FT).replace("$N", &n.to_string());
            let mut sh = std::process::Command::new("bash");
            // Of the processes in a pipe, the status of `ft` counts.
            sh.args(["-c", &format!("{line}; exit ${{PIPESTATUS[0]}}")]).current_dir(w.path(""));
            sh.env("FT_CACHE", w.path("cache")).env("HF_HUB_OFFLINE", "1").env("HF_HOME", w.path("hf"));
            let r = ends(sh);
            let fine = codes.contains(&r.code) || (verb == "nonsense" && r.code == 2);
            assert!(fine, "{line}: {} {}", r.code, r.err);
        }
    }
}

#[test]
fn folder_names_need_not_be_utf_8() {
    let w = world();
    let odd = w.path("").join(std::ffi::OsStr::from_bytes(b"od\xffd"));
    std::fs::create_dir(&odd).expect("a folder");
    let copy = |from: &Path, to: &Path| {
        std::fs::create_dir_all(to).expect("a folder");
        for e in std::fs::read_dir(from).expect("a folder").flatten().filter(|e| e.path().is_file()) {
            std::fs::copy(e.path(), to.join(e.file_name())).expect("copied");
        }
    };
    copy(&w.path(""), &odd);
    copy(&w.path("m"), &odd.join("m"));
    for args in [
        &["check", "r.toml"][..],
        &["plan", "r.toml"],
        &["data", "r.toml"],
        &["run", "r.toml"],
        &["run", "r.toml", "--resume"],
        &["merge", "runs/r/adapter", "--base", "m", "--out", "M"],
        &["chat", "m", "--adapter", "runs/r/adapter", "--prompt", "hello", "--max-tokens", "2"],
        &["quantize", "m", "--out", "q"],
        &["report", "runs/r"],
        &["bench", "r.toml", "--steps", "1"],
    ] {
        let mut c = w.command(args);
        c.current_dir(&odd);
        let r = ends(c);
        assert_eq!(r.code, 0, "{args:?}: {}", r.err);
    }
}

#[test]
fn options_out_of_range_are_errors() {
    let w = world();
    let chat = |more: &[&str]| {
        let base = ["chat", "m", "--prompt", "What colour is the sky?", "--max-tokens", "8"];
        within(&w, &[&base[..], more].concat())
    };
    let likeliest = chat(&["--temperature", "0"]);
    for cold in ["1e-320", "1e-40", "1e-9"] {
        let r = chat(&["--temperature", cold]);
        assert_eq!((r.code, &r.out), (0, &likeliest.out), "{cold}: {}", r.err);
    }
    assert_eq!(chat(&["--temperature", "1e-5"]).code, 0);
    assert_eq!(chat(&["--temperature", "1e300"]).code, 0);
    for wrong in [
        "--temperature=nan",
        "--temperature=-1",
        "--temperature=inf",
        "--top-p=nan",
        "--top-p=0",
        "--top-p=1.5",
        "--top-p=-1",
    ] {
        assert_eq!(chat(&[wrong]).code, 2, "{wrong}");
    }
    w.write("empty.jinja", "");
    assert_eq!(chat(&["--chat-template", "empty.jinja"]).code, 4);
    assert_eq!(chat(&["--chat-template", "none.jinja"]).code, 3);
    w.ok(&["run", "r.toml", "run.output=o"]);
    let resume =
        |more: &[&str]| within(&w, &[&["run", "r.toml", "run.output=o", "--resume"][..], more].concat()).code;
    assert_eq!(resume(&["--accept-change", "optimiser.lr"]), 2);
    assert_eq!(resume(&["optimizer.lr=1e-3"]), 2);
    assert_eq!(resume(&["optimizer.lr=1e-3", "--accept-change", "optimizer.lr"]), 0);
    assert_eq!(within(&w, &["run", "r.toml", "run.output=p", "--accept-change", "optimizer.lr"]).code, 2);
}
