//! The built-in small model in 4 bits, end to end, and the cache.

use super::*;
use crate::train::tests::{ROOT, events, quickstart};
use crate::train::{self, Options, Outcome};
use anyhow::{Context as _, Result};
use ft_engine::load::quantize;
use ft_recipe::Recipe;
use std::path::PathBuf;

/// Trains the quickstart for a few steps. Returns the losses and the run folder.
fn run(dir: &Path, name: &str, kind: &str, set: &[&str]) -> Result<(Vec<f64>, PathBuf)> {
    let (out, kind) = (dir.join(name), format!("model.quantize={kind}"));
    let own = ["run.steps=4", "optimizer.warmup_steps=0", kind.as_str()];
    let recipe = quickstart(&out, &[&own[..], set].concat())?;
    let Outcome::Done { result } = train::run(recipe, &Options::default())? else {
        anyhow::bail!("not done")
    };
    assert!(result.join("adapter_model.safetensors").is_file());
    let losses = events(&out, "step")?.iter().filter_map(|e| e["loss"].as_f64()).collect();
    Ok((losses, out))
}

/// Regression: a cache that another process put in place between two looks at its folder was taken for a folder with
/// other contents.
#[test]
fn a_cache_that_appears_between_two_looks_is_taken() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let [ready, cache] = ["ready", "cache"].map(|name| dir.path().join(name));
    std::fs::create_dir(&ready)?;
    std::fs::write(ready.join(CACHE_MARKER), "{}")?;
    let marker = Marker::new("a model".into());
    std::thread::scope(|s| {
        let moves = s.spawn(|| -> std::io::Result<()> {
            for _ in 0..2000 {
                std::fs::rename(&ready, &cache)?;
                std::fs::rename(&cache, &ready)?;
            }
            Ok(())
        });
        while !moves.is_finished() {
            marker.find(&cache, &Map::new())?;
        }
        Ok(moves.join().expect("no panic")?)
    })
}

#[test]
fn the_quickstart_trains_in_4_bits_with_and_without_a_cache() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let cache = dir.path().join("cache");
    let cached = format!("model.cache={}", cache.display());
    let (plain, _) = run(dir.path(), "plain", "nf4", &[])?;
    assert!(plain.len() == 4 && plain[3] < plain[0], "{plain:?}");
    let (dense, _) = run(dir.path(), "dense", "none", &[])?;
    assert!(dense != plain && (dense[0] - plain[0]).abs() < 0.3, "{dense:?} {plain:?}");
    let (first, _) = run(dir.path(), "first", "nf4", &[&cached])?;
    let marker = cache.join(CACHE_MARKER);
    let made = std::fs::metadata(&marker)?.modified()?;
    let (second, out) = run(dir.path(), "second", "nf4", &[&cached])?;
    assert!(first == plain && second == plain, "{plain:?} {first:?} {second:?}");
    assert_eq!(std::fs::metadata(&marker)?.modified()?, made, "it was made again");
    // The resolved recipe keeps the cache, so a resume needs no extra option.
    assert!(Recipe::load(&out.join("recipe.toml"), &[])?.model.cache.is_some());

    // A cache of another model or a truncated cache is replaced; any other folder is left alone.
    let mut marks: Value = serde_json::from_slice(&std::fs::read(&marker)?)?;
    marks["source"] = json!("another");
    std::fs::write(&marker, marks.to_string())?;
    assert!(run(dir.path(), "third", "nf4", &[&cached])?.0 == plain);
    assert!(std::fs::metadata(&marker)?.modified()? > made);
    let weights = cache.join("model.safetensors");
    let bytes = std::fs::read(&weights)?;
    std::fs::write(&weights, &bytes[..bytes.len() - 9])?;
    assert!(run(dir.path(), "fourth", "nf4", &[&cached])?.0 == plain);
    assert!(std::fs::read(&weights)? == bytes);
    std::fs::remove_file(&marker)?;
    let error = run(dir.path(), "fifth", "nf4", &[&cached]).err().context("it ran")?.to_string();
    assert!(error.contains("is not empty and has no ft-cache.json"), "{error}");
    let left: Vec<_> = std::fs::read_dir(dir.path())?.flatten().map(|e| e.file_name()).collect();
    assert!(!left.iter().any(|n| n.to_string_lossy().starts_with(".ft-")), "{left:?}");
    Ok(())
}

/// A draft of a killed process is removed, and the output is whole.
#[test]
fn a_draft_of_a_killed_process_is_removed() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let draft = dir.path().join(".ft-out.tmp");
    std::fs::create_dir(&draft)?;
    std::fs::write(draft.join("model-00001-of-00002.safetensors"), b"half")?;
    let source = Path::new(ROOT).join("data/model");
    let config = Config::load(&source, &serde_json::Map::new())?;
    let out = dir.path().join("out");
    let report = quantize(&config, &source, &out, true)?;
    assert_eq!(report.linears, 6 * 7);
    // Per quantization block of 64: 8 bits; per 256 blocks: 32 bits. In a small tensor, the last group is
    // partial.
    assert!((4.125..4.14).contains(&report.bits), "{report:?}");
    let names: Vec<_> = std::fs::read_dir(&out)?.flatten().map(|e| e.file_name()).collect();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        assert!(names.iter().any(|n| n == name), "{names:?}");
    }
    assert!(!names.iter().any(|n| n == ".lock" || n == "model-00001-of-00002.safetensors"), "{names:?}");
    assert!(!draft.exists());
    Ok(())
}
