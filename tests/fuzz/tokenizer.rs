//! Variants of tokenizer.json with every kind of component and odd parameters.

use super::dice::Dice;
use super::mutate;
use serde_json::{Value, json};

/// The tokenizer `seed` with one to three components replaced, and sometimes another model.
pub fn with_components(d: &mut Dice, seed: &[u8]) -> Vec<u8> {
    let mut t: Value = serde_json::from_slice(seed).expect("a tokenizer");
    for _ in 0..1 + d.below(3) {
        let (slot, all) = match d.below(7) {
            0 => ("normalizer", normalizers(d)),
            1 => ("pre_tokenizer", pre_tokenizers(d)),
            2 => ("post_processor", post_processors(d)),
            3 => ("decoder", decoders(d)),
            4 => ("model", models(d)),
            5 => ("added_tokens", added(d)),
            _ => ("truncation", truncations(d)),
        };
        // The new model gets the vocabulary of the seed.
        let vocab = t["model"]["vocab"].clone();
        let mut one = d.pick(&all).clone();
        if slot == "model" && one["vocab"].is_null() && one["type"] != "Unigram" {
            one["vocab"] = vocab;
        }
        let keys = if slot == "truncation" { d.pick(&["truncation", "padding"]) } else { &slot };
        t[*keys] = match d.once_in(3) {
            true => json!({"type": "Sequence", slot_list(slot): [one, d.pick(&all)]}),
            false => one,
        };
    }
    match d.once_in(3) {
        true => mutate::json(d, &t, &json!(0)),
        false => t.to_string().into_bytes(),
    }
}

/// Name of the list in a sequence of such components.
fn slot_list(slot: &str) -> &'static str {
    match slot {
        "normalizer" => "normalizers",
        "pre_tokenizer" => "pretokenizers",
        "decoder" => "decoders",
        _ => "processors",
    }
}

fn pattern(d: &mut Dice) -> Value {
    let text = mutate::odd_text(d);
    match d.below(6) {
        0 => json!({"Regex": ""}),
        1 => json!({"String": ""}),
        2 => {
            json!({"Regex": *d.pick(&["(a+)+$", "(?:a?){3000}", "(?<=a)b", "\\p{L}+| ?[^\\s]+", ".", "^", "$", "|", "(?s).*", "a{1000}{1000}", "(", "(?i)[^\r\n\\p{L}]?+"])})
        }
        3 => json!({"Regex": text}),
        _ => json!({"String": text}),
    }
}

fn size(d: &mut Dice) -> Value {
    serde_json::from_str(d.word(mutate::NUMBERS)).unwrap_or(Value::Null)
}

fn normalizers(d: &mut Dice) -> Vec<Value> {
    let charsmap = ["", "A", "AAAA", "AAAAAAAA", "////////////////", "BAAAAAAAAAA=", "CAAAAAEAAAACAAAA", "!"];
    vec![
        json!({"type": "NFC"}),
        json!({"type": "NFD"}),
        json!({"type": "NFKC"}),
        json!({"type": "NFKD"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Strip", "strip_left": d.once_in(2), "strip_right": true}),
        json!({"type": "StripAccents"}),
        json!({"type": "Nmt"}),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
        json!({"type": "Replace", "pattern": pattern(d), "content": mutate::odd_text(d)}),
        json!({"type": "Replace", "pattern": pattern(d), "content": ""}),
        json!({"type": "Prepend", "prepend": mutate::odd_text(d)}),
        json!({"type": "ByteLevel"}),
        json!({"type": "Precompiled", "precompiled_charsmap": *d.pick(&charsmap)}),
    ]
}

fn pre_tokenizers(d: &mut Dice) -> Vec<Value> {
    let behavior = *d.pick(&["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]);
    let scheme = *d.pick(&["first", "never", "always"]);
    vec![
        json!({"type": "ByteLevel", "add_prefix_space": d.once_in(2), "trim_offsets": true, "use_regex": d.once_in(2)}),
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "Whitespace"}),
        json!({"type": "WhitespaceSplit"}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "Metaspace", "replacement": *d.pick(&["▁", "a", "", "ab"]), "prepend_scheme": scheme, "split": d.once_in(2)}),
        json!({"type": "CharDelimiterSplit", "delimiter": *d.pick(&["a", "", " ", "ab"])}),
        json!({"type": "Split", "pattern": pattern(d), "behavior": behavior, "invert": d.once_in(2)}),
        json!({"type": "Punctuation", "behavior": behavior}),
        json!({"type": "Digits", "individual_digits": d.once_in(2)}),
        json!({"type": "FixedLength", "length": size(d)}),
    ]
}

fn post_processors(d: &mut Dice) -> Vec<Value> {
    let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
    let a = json!({"Sequence": {"id": "A", "type_id": 0}});
    let token = mutate::odd_text(d);
    vec![
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "BertProcessing", "sep": ["<|im_end|>", size(d)], "cls": [token, 1]}),
        json!({"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", size(d)], "trim_offsets": true, "add_prefix_space": true}),
        json!({"type": "TemplateProcessing", "single": [special("<|im_end|>"), a], "pair": [a], "special_tokens": {}}),
        json!({"type": "TemplateProcessing", "single": [special("x"), a], "pair": [a], "special_tokens": {"x": {"id": "x", "ids": [size(d)], "tokens": ["x"]}}}),
        json!({"type": "TemplateProcessing", "single": [special("x"), a], "pair": [a], "special_tokens": {"x": {"id": "x", "ids": [], "tokens": [token]}}}),
        json!({"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}),
    ]
}

fn decoders(d: &mut Dice) -> Vec<Value> {
    let text = mutate::odd_text(d);
    vec![
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
        json!({"type": "WordPiece", "prefix": text, "cleanup": d.once_in(2)}),
        json!({"type": "BPEDecoder", "suffix": text}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        json!({"type": "Strip", "content": *d.pick(&[" ", "a", ""]), "start": size(d), "stop": size(d)}),
        json!({"type": "Replace", "pattern": pattern(d), "content": text}),
        json!({"type": "CTC", "pad_token": text, "word_delimiter_token": "", "cleanup": true}),
    ]
}

fn models(d: &mut Dice) -> Vec<Value> {
    let text = mutate::odd_text(d);
    let merges = [
        json!([]),
        json!(["a b"]),
        json!(["t h", "th e"]),
        json!([["a", "b"]]),
        json!([""]),
        json!(["a"]),
        json!(["a b c"]),
        json!(["t h", "t h"]),
        json!([["", ""]]),
        json!(["zz zz"]),
    ];
    let merges = d.pick(&merges);
    let unk = d.pick(&[Value::Null, json!("<unk>"), json!("a"), json!(text)]).clone();
    let number = size(d);
    vec![
        json!({"type": "BPE", "merges": merges, "dropout": number, "unk_token": unk, "continuing_subword_prefix": null, "fuse_unk": false}),
        json!({"type": "BPE", "merges": ["t h"], "unk_token": unk, "continuing_subword_prefix": text, "end_of_word_suffix": null}),
        json!({"type": "BPE", "merges": ["t h"], "end_of_word_suffix": text, "byte_fallback": true, "ignore_merges": true}),
        json!({"type": "BPE", "merges": [], "vocab": {"a": number, "b": 0, "": 1}}),
        json!({"type": "BPE", "merges": [], "vocab": {}}),
        json!({"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": text, "max_input_chars_per_word": number}),
        json!({"type": "WordLevel", "unk_token": unk}),
        json!({"type": "WordLevel", "unk_token": "a", "vocab": {"a": number}}),
        json!({"type": "Unigram", "unk_id": number, "vocab": [["a", -1.0], ["b", 0.0], ["", 1e300]], "byte_fallback": d.once_in(2)}),
        json!({"type": "Unigram", "unk_id": 0, "vocab": [[text, number]]}),
        json!({"type": "Unigram", "unk_id": null, "vocab": []}),
        json!({"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1e308], ["aa", 1e308], ["▁", -2.0]]}),
    ]
}

fn added(d: &mut Dice) -> Vec<Value> {
    let one = |id: Value, content: &str, normalized: bool| json!({"id": id, "content": content, "single_word": !normalized, "lstrip": true, "rstrip": true, "normalized": normalized, "special": !normalized});
    let (text, number) = (mutate::odd_text(d), size(d));
    vec![
        json!([]),
        json!([one(json!(282), "", false)]),
        json!([one(number.clone(), "<|im_end|>", false)]),
        json!([one(json!(0), &text, true)]),
        json!([one(json!(283), "a", true), one(json!(283), "b", false)]),
        json!([one(json!(400), &text, false), one(json!(400), &text, true)]),
        json!([one(number, "é", true), one(json!(1), "\n", false), one(json!(2), " ", true)]),
    ]
}

fn truncations(d: &mut Dice) -> Vec<Value> {
    let (a, b) = (size(d), size(d));
    vec![
        json!({"direction": "Left", "max_length": a, "strategy": "OnlyFirst", "stride": b}),
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 3}),
        json!({"strategy": {"Fixed": a}, "direction": "Left", "pad_to_multiple_of": b, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}),
        json!({"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 0, "pad_id": a, "pad_type_id": 0, "pad_token": ""}),
    ]
}
