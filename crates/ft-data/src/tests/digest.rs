//! Guards the version in the cache key: tokens of a fixed corpus change only together with the version.

use super::chat::read;
use super::*;
use crate::token_cache::cache::{MINIJINJA, TOKENIZERS, VERSION};
use crate::tokenize::encode::mask;
use serde_json::{Map, Value, json};

/// The version in the cache key, and the digest of the corpus under this version. If a change of the code
/// changes the digest, raise `VERSION` and update both: old caches would otherwise keep outdated tokens.
const DIGEST: (u32, &str) = (13, "925e5773aca3ac82f98d6fb93e76f6ea");

/// Hashes ids, labels and line of every sample.
fn add(hasher: &mut blake3::Hasher, ids: &[u32], labels: impl Iterator<Item = i32>, line: usize) {
    hasher.update(&(ids.len() as u64).to_le_bytes()).update(&(line as u64).to_le_bytes());
    ids.iter().for_each(|id| {
        hasher.update(&id.to_le_bytes());
    });
    labels.for_each(|label| {
        hasher.update(&label.to_le_bytes());
    });
}

#[test]
fn tokens_change_only_with_the_version_of_the_cache() -> anyhow::Result<()> {
    let mut hasher = blake3::Hasher::new();
    let skip = ft_recipe::Data { on_bad_row: OnBadRow::Skip, cache: false, ..data(64) };
    for format in [Format::Alpaca, Format::Completion, Format::Messages, Format::Text, Format::Tokens] {
        for folder in ["tables", "broken-data"] {
            let mut paths: Vec<PathBuf> =
                std::fs::read_dir(fixture(folder))?.map(|e| Ok(e?.path())).collect::<std::io::Result<_>>()?;
            paths.sort();
            let prefix = format.word();
            let is_of = |p: &PathBuf| {
                p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix))
                    && p.extension().is_some_and(|e| e == "jsonl" || e == "json")
            };
            for path in paths.iter().filter(|p| is_of(p)) {
                let cfg = of(&[source(&path.display().to_string(), format)], &skip);
                let dataset = Dataset::load(Part::Train, &cfg, &|s| s.into(), Some(&tiny()), 285, 11);
                let samples = dataset.map(|d| all(&d)).unwrap_or_default();
                hasher.update(&(samples.len() as u64).to_le_bytes());
                for e in samples {
                    add(&mut hasher, &e.ids, e.labels.into_iter(), e.line);
                }
            }
        }
    }
    let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(fixture("chat/expected.json"))?)?;
    for row in rows {
        let template = fixture("chat").join(row["template"].as_str().unwrap_or_default());
        let t = Tokenizer::load(&fixture("tiny-tokenizer"), Some(&template))?.expect("a tokenizer");
        let mut vars: Map<String, Value> = row["variables"].as_object().cloned().unwrap_or_default();
        vars.extend(row["options"].as_object().cloned().unwrap_or_default());
        vars.shift_remove("add_generation_prompt");
        let chat = json!({"messages": row["messages"], "tools": row["tools"]});
        let Ok((text, spans, _)) = read(&t, &chat, &vars) else { continue };
        let encoded = t.encode_first(&text, usize::MAX, &spans)?;
        let supervised = mask(&encoded, &spans).into_iter().map(i32::from);
        add(&mut hasher, &encoded.ids, supervised, 0);
        for span in spans {
            hasher.update(&[span.start.to_le_bytes(), span.end.to_le_bytes()].concat());
        }
    }
    let digest = hasher.finalize().to_hex();
    assert_eq!((VERSION, &digest[..32]), DIGEST, "raise VERSION in cache.rs, and update DIGEST");
    Ok(())
}

#[test]
fn the_cache_key_has_the_versions_of_the_libraries_that_make_tokens() -> anyhow::Result<()> {
    let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock"))?;
    for (name, version) in [("tokenizers", TOKENIZERS), ("minijinja", MINIJINJA)] {
        let entry = format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n");
        assert!(lock.contains(&entry), "{name} is not at {version}: update the constant in cache.rs");
    }
    Ok(())
}
