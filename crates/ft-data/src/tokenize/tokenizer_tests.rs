use super::*;
use ft_base::rng::{Purpose, Stream};
use serde_json::json;

/// The fixture tokenizer with another pre-tokenizer.
fn with(pre_tokenizer: Value) -> Tokenizer {
    changed(|file| {
        if !pre_tokenizer.is_null() {
            file["pre_tokenizer"] = pre_tokenizer;
        }
    })
}

/// The fixture tokenizer with a change of its file.
fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
    loaded(change).unwrap().unwrap()
}

fn loaded(change: impl FnOnce(&mut Value)) -> Result<Option<Tokenizer>, Error> {
    let fixture =
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/fixtures/tiny-tokenizer");
    let mut file: Value =
        serde_json::from_slice(&std::fs::read(fixture.join("tokenizer.json")).unwrap()).unwrap();
    change(&mut file);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::load(dir.path(), None)
}

#[test]
fn a_template_that_adds_many_tokens_is_refused() {
    let load = |marks: usize| {
        let load = loaded(|file| {
            let text = json!({"Sequence": {"id": "A", "type_id": 0}});
            let mark = json!({"SpecialToken": {"id": "x", "type_id": 0}});
            let single = [vec![text], vec![mark; marks]].concat();
            let x = json!({"id": "x", "ids": [1], "tokens": ["x"]});
            let template = json!({"single": single, "pair": [], "special_tokens": {"x": x}});
            file["post_processor"] = template;
            file["post_processor"]["type"] = json!("TemplateProcessing");
        });
        load.map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(load(200), Ok(()));
    let why = "post_processor: it makes 301 tokens of one, more than 256";
    assert!(load(300).is_err_and(|e| e.contains(why)));
}

/// In Llama 2 a line break is a byte, and text before bytes that make no character.
#[test]
fn bytes_without_a_character_do_not_end_a_stream() {
    let t = changed(|file| {
        let vocab = json!({"<|endoftext|>": 0, "<0x0A>": 1, "<0xE2>": 2, "<0x9C>": 3, "\u{2581}ok": 4});
        file["added_tokens"] = json!([]);
        (file["normalizer"], file["pre_tokenizer"], file["post_processor"]) = Default::default();
        file["model"] = json!({"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true});
        let space = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let decoders = [space, json!({"type": "ByteFallback"}), json!({"type": "Fuse"}), strip];
        file["decoder"] = json!({"type": "Sequence", "decoders": decoders});
    });
    let text = |ids: &[u32]| -> String {
        let mut decoder = t.decoder(true);
        ids.iter().filter_map(|id| decoder.step(*id).unwrap()).collect()
    };
    assert_eq!(text(&[1, 2, 3, 4, 1, 4]), "\n\u{fffd}\u{fffd} ok\n ok");
    // the space of a word that follows
    assert_eq!(text(&[1, 2, 4, 4]), "\n\u{fffd} ok ok");
    let mut decoder = t.decoder(true);
    let steps = [4, 2, 2].map(|id| decoder.step(id).unwrap());
    assert_eq!((steps, decoder.held()), ([Some("ok".into()), None, None], 2));
    assert_eq!((decoder.flush().unwrap(), decoder.held()), ("\u{fffd}\u{fffd}".into(), 0));
    assert_eq!(decoder.step(4).unwrap(), Some(" ok".into()));
}

/// Old and pruned models name such ids.
#[test]
fn end_tokens_outside_the_vocabulary_are_left_out() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny-tokenizer/tokenizer.json");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(file, dir.path().join("tokenizer.json")).unwrap();
    let cases: [(Value, &[u32]); 3] = [
        (json!({"vocab_size": 300, "eos_token_id": [2, 300, -1]}), &[2]),
        (json!({"text_config": {"vocab_size": 300, "eos_token_id": 999}}), &[]),
        (json!({"eos_token_id": 999}), &[999]),
    ];
    for (config, want) in cases {
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let t = Tokenizer::load(dir.path(), None).unwrap().unwrap();
        assert_eq!(t.eos(), want, "{config}");
    }
}

/// Random concatenations of strings relevant to pre-tokenizers.
fn texts() -> Vec<String> {
    let parts = [
        "a",
        "It's",
        "word",
        "WORD",
        "camelCase",
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        ".",
        ",",
        "'s",
        "'",
        "1",
        "2345",
        "中文",
        "字",
        "。",
        "，",
        "é",
        "e\u{301}",
        "\u{301}",
        "<|im_end|>",
        "<|im_start|>",
        "_x",
        "/",
        "\u{a0}",
        "Σ",
    ];
    let draw = |t: u64| {
        let order = Stream::new(t, Purpose::Mix, 0, 0).permutation(parts.len() as u32 * 4);
        order.into_iter().map(|i| parts[i as usize % parts.len()]).collect::<String>()
    };
    (0..200).map(draw).collect()
}

#[test]
fn pieces_make_the_tokens_of_the_whole() {
    let split = |regex: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]})
    };
    let mut all = vec![Value::Null];
    all.extend(pipeline::WORDS.iter().map(|r| split(r)));
    let mut cuts = 0;
    for pre_tokenizer in all {
        let t = with(pre_tokenizer.clone());
        assert!(t.can_cut, "{pre_tokenizer}");
        for text in texts() {
            let whole = t.inner.encode(text.as_str(), false).unwrap();
            let pieces = t.encode_pieces(&text, 1, usize::MAX, &[]).unwrap();
            assert_eq!(pieces.ids, whole.get_ids(), "{pre_tokenizer} {text:?}");
            let starts: Vec<usize> = whole.get_offsets().iter().map(|o| o.0).collect();
            assert_eq!(
                pieces.offsets.iter().map(|o| o.0).collect::<Vec<_>>(),
                starts,
                "{pre_tokenizer} {text:?}"
            );
            cuts += usize::from(pipeline::cut(&text, 1).is_some());
            // keeps only as many tokens as requested, and counts the rest
            let first = t.encode_pieces(&text, 1, 5, std::slice::from_ref(&(0..text.len()))).unwrap();
            assert_eq!((first.ids.len(), first.total), (5, pieces.ids.len()));
            assert!(first.more_within);
        }
    }
    assert!(cuts > 500, "{cuts}");
}

/// With dropout 1 the library merges nothing.
#[test]
fn dropout_of_merges_is_off() {
    let (plain, random) = (with(Value::Null), changed(|file| file["model"]["dropout"] = json!(1.0)));
    for text in texts() {
        assert_eq!(random.encode(&text).unwrap(), plain.encode(&text).unwrap(), "{text:?}");
    }
}

/// With an unknown pre-tokenizer, a text is never cut, and has a length limit.
#[test]
fn texts_that_cannot_be_cut_are_bounded() {
    let t = with(json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}));
    assert!(!t.can_cut);
    let long = "word ".repeat(1 << 20);
    assert!(t.encode(&long).unwrap_err().to_string().contains("4 MiB"));
}
