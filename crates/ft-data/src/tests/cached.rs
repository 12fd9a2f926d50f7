//! Token cache: results equal those without a cache, and entries become invalid when an input changes.

use super::*;
use crate::rows::dataset::{Loader, cached_rows_in};
use ft_recipe::Recipe;
use serde_json::json;

/// `n` rows of 3 to 40 tokens.
fn ready(n: usize) -> String {
    (0..n).map(|i| json!({"input_ids": vec![i % 60; 3 + i * 11 % 38]}).to_string() + "\n").collect()
}

/// A folder with a source of tokens, one of texts, and one of conversations including bad rows.
fn world() -> Files {
    let chat = |i: usize| {
        json!({"id": i, "messages": [{"role": "user", "content": format!("q{i}")}, {"role": "assistant", "content": "a"}]})
            .to_string()
    };
    let chats = format!("{}\n{{}}\n{}\nnone\n{}\n", chat(1), chat(2), chat(1));
    let texts = "{\"text\": \"Hello the world\"}\n{\"text\": \"a\"}\n";
    Files::new(&[("a.jsonl", &ready(30)), ("b.jsonl", &ready(7)), ("chat.jsonl", &chats), ("t.jsonl", texts)])
}

/// Everything a command reads from a dataset.
fn seen(d: &Dataset) -> (Vec<Example>, Vec<Vec<u32>>, Stats, String, Vec<String>) {
    (all(d), lists(&d.rows), d.stats.clone(), d.hash.clone(), d.warnings(9).unwrap())
}

fn files_of(cache: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cache.join("tokens")).into_iter().flatten().flatten();
    let mut all: Vec<PathBuf> =
        entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e != "lock")).collect();
    all.sort();
    all
}

#[test]
fn kept_tokens_make_the_data_that_reading_makes() {
    let files = world();
    let resolve = |s: &str| files.0.path().join(s);
    let sources = [
        source("a.jsonl", Format::Tokens),
        source("chat.jsonl", Format::Messages),
        ft_recipe::Source { weight: 2.5, ..source("t.jsonl", Format::Text) },
    ];
    let skip = ft_recipe::Data { on_bad_row: OnBadRow::Skip, ..of(&sources, &data(16)) };
    for cfg in [
        skip.clone(),
        ft_recipe::Data { pack: true, shuffle: true, ..skip.clone() },
        ft_recipe::Data { eval_share: 0.2, ..skip.clone() },
        ft_recipe::Data { over_length: OverLength::Drop, ..skip.clone() },
        ft_recipe::Data { over_length: OverLength::Split, ..skip.clone() },
        // no truncation
        ft_recipe::Data { max_length: 64, ..skip.clone() },
    ] {
        let cache = tempfile::tempdir().unwrap();
        let t = tiny();
        let loader = |cfg| Loader::new(cfg, &resolve, Some(&t), 285);
        let off = ft_recipe::Data { cache: false, ..cfg.clone() };
        for part in [Part::Train, Part::Eval] {
            if cfg.sources(part).is_empty() {
                continue;
            }
            let plain = seen(&loader(&off).load(part, 3).unwrap());
            assert_eq!(plain.2.drops.bad, 2);
            let first = loader(&cfg).with_cache(cache.path()).load(part, 3).unwrap();
            assert_eq!(seen(&first), plain);
            assert_eq!(files_of(cache.path()).len(), 6, "two a source");
            // a cache hit: data files are not read, cache files not rewritten
            let second = loader(&cfg).with_cache(cache.path()).load(part, 3).unwrap();
            assert_eq!(seen(&second), plain);
            // only the index is in memory, for all samples of a source and any part of them
            assert!(second.samples.resident() <= 56 * plain.2.rows_read.max(plain.2.examples) as u64);
            // independent of the number of threads
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let own = tempfile::tempdir().unwrap();
                let made = pool.install(|| loader(&cfg).with_cache(own.path()).load(part, 3).unwrap());
                assert_eq!(seen(&made), plain, "{threads} threads");
            }
        }
        // two bad rows were skipped: strict loading and checking must read the files
        let strict = ft_recipe::Data { on_bad_row: OnBadRow::Error, ..cfg.clone() };
        let stopped = |l: Loader<'_>| l.load(Part::Train, 3).unwrap_err().to_string();
        let error = stopped(loader(&strict).with_cache(cache.path()));
        assert!(error.contains("chat.jsonl:2"), "{error}");
        let strict_off = ft_recipe::Data { cache: false, ..strict.clone() };
        assert_eq!(error, stopped(loader(&strict_off)));
        let check = Dataset::check(&strict_off, &resolve, Some(&t), 285, 3, 9);
        let again = loader(&strict).with_cache(cache.path()).collecting(9).check(3);
        let text = |c: &Checked| c.problems.iter().map(|p| p.to_string()).collect::<Vec<_>>();
        assert_eq!((text(&again).len(), text(&again)), (2, text(&check)));
        assert_eq!(seen(&again.train.unwrap()), seen(&check.train.unwrap()));
        // with on_bad_row = "skip", a check takes what a run takes
        assert!(Dataset::check(&off, &resolve, Some(&t), 285, 3, 9).problems.is_empty());
    }
}

/// The cache verifies tokens before use, and replaces damaged files.
#[test]
fn damaged_cache_files_are_named_and_rewritten() {
    let files = world();
    let resolve = |s: &str| files.0.path().join(s);
    let cfg = of(&[source("a.jsonl", Format::Tokens)], &data(64));
    let cache = tempfile::tempdir().unwrap();
    let load =
        || Loader::new(&cfg, &resolve, None, 285).with_cache(cache.path()).load(Part::Train, 0).unwrap();
    let plain = seen(&load());
    let whole: Vec<Vec<u8>> = files_of(cache.path()).iter().map(|f| std::fs::read(f).unwrap()).collect();
    for (i, file) in files_of(cache.path()).into_iter().enumerate() {
        for damage in 0..4 {
            let mut bytes = whole[i].clone();
            let at = bytes.len() / 2;
            match damage {
                0 => bytes[at] ^= 4,
                1 => bytes.truncate(at),
                2 => bytes.extend(b"more"),
                _ => bytes.clear(),
            }
            std::fs::write(&file, bytes).unwrap();
            assert_eq!(seen(&load()), plain, "{} {damage}", file.display());
            assert_eq!(std::fs::read(&file).unwrap(), whole[i], "made anew");
        }
        std::fs::remove_file(&file).unwrap();
        assert_eq!(seen(&load()), plain);
        assert_eq!(std::fs::read(&file).unwrap(), whole[i], "made anew");
    }
    // damage is detected at any byte of the index
    let index =
        files_of(cache.path()).into_iter().find(|f| f.extension().is_some_and(|e| e == "index")).unwrap();
    let whole = std::fs::read(&index).unwrap();
    for at in (0..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        std::fs::write(&index, bytes).unwrap();
        assert_eq!(seen(&load()), plain, "byte {at}");
    }
}

#[test]
fn cached_places_have_the_current_names_of_files() {
    let files = world();
    let cache = tempfile::tempdir().unwrap();
    let cfg = ft_recipe::Data {
        on_bad_row: OnBadRow::Skip,
        ..of(&[source("chat.jsonl", Format::Messages)], &data(64))
    };
    let load = |dir: &Path| {
        let resolve = |s: &str| dir.join(s);
        let t = tiny();
        Loader::new(&cfg, &resolve, Some(&t), 285).with_cache(cache.path()).load(Part::Train, 0).unwrap()
    };
    let first = load(files.0.path());
    let other = world();
    let moved = load(other.0.path());
    assert_eq!(files_of(cache.path()).len(), 2, "the same bytes, the same tokens");
    let name = |d: &Files| d.0.path().display().to_string();
    let renamed =
        |all: Vec<String>| all.iter().map(|l| l.replace(&name(&files), &name(&other))).collect::<Vec<_>>();
    assert_eq!(renamed(first.stats.left_out.clone()), moved.stats.left_out);
    assert_eq!(renamed(first.warnings(99).unwrap()), moved.warnings(99).unwrap());
    assert!(moved.stats.left_out[0].starts_with(&name(&other)));
}

#[test]
fn a_folder_that_cannot_be_written_leaves_the_tokens_in_memory() {
    let files = world();
    let resolve = |s: &str| files.0.path().join(s);
    let cfg = of(&[source("a.jsonl", Format::Tokens)], &data(64));
    let load =
        |cache: &Path| Loader::new(&cfg, &resolve, None, 285).with_cache(cache).load(Part::Train, 0).unwrap();
    let d = load(Path::new("/dev/null"));
    let tokens: usize = all(&d).iter().map(|e| e.ids.len()).sum();
    assert!(d.samples.resident() >= 4 * tokens as u64);
    let cache = tempfile::tempdir().unwrap();
    assert_eq!(seen(&d), seen(&load(cache.path())));
}

/// Whatever the format, if a template may write the time of day.
#[test]
fn tokens_that_depend_on_the_time_are_not_kept() -> anyhow::Result<()> {
    let row = "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}\n";
    let template = "{% set hour = strftime_now('%H') %}{{ messages }}";
    let (files, cache) = (Files::new(&[("a.jsonl", row), ("t.jinja", template)]), tempfile::tempdir()?);
    let resolve = |s: &str| files.0.path().join(s);
    let cfg = of(&[source("a.jsonl", Format::Preference)], &data(64));
    for (template, kept) in [(Some("t.jinja"), 0), (None, 2)] {
        let t = Tokenizer::load(&fixture("tiny-tokenizer"), template.map(resolve).as_deref())?;
        Loader::new(&cfg, &resolve, t.as_ref(), 285).with_cache(cache.path()).load(Part::Train, 0)?;
        assert_eq!(files_of(cache.path()).len(), kept);
    }
    Ok(())
}

fn plan_recipe(dir: &Path, set: &[&str]) -> anyhow::Result<Recipe> {
    let text = "[model]\nsource = \"m\"\n[[train]]\nmodules = [\"mlp\"]\n[data]\nmax_length = 64\n\
        [[data.train]]\nsource = \"a.jsonl\"\nformat = \"tokens\"\n\
        [[data.train]]\nsource = \"b.jsonl\"\nformat = \"tokens\"\n[run]\nbatch_rows = 4\nmicro_rows = 2\n";
    let path = dir.join("r.toml");
    std::fs::write(&path, text)?;
    Ok(Recipe::load(&path, &set.iter().map(|s| s.to_string()).collect::<Vec<_>>())?)
}

fn load(r: &Recipe, cache: &Path) -> anyhow::Result<Dataset> {
    let resolve = |s: &str| r.resolve(s);
    Ok(Loader::new(&r.data, &resolve, None, 64).with_cache(cache).load(Part::Train, r.run.seed)?)
}

#[test]
fn a_plan_knows_the_rows_that_the_data_makes() -> anyhow::Result<()> {
    let (files, cache) = (world(), tempfile::tempdir()?);
    let dir = files.0.path();
    load(&plan_recipe(dir, &[])?, cache.path())?;
    for set in [
        &[][..],
        &["data.pack=false"],
        &["data.shuffle=false", "run.steps=5"],
        &["run.seed=9", "run.micro_rows=4"],
        &["data.eval_share=0.3"],
        // nothing was cut at 64; the longest row has 40 tokens
        &["data.max_length=200"],
        &["data.max_length=40"],
    ] {
        let r = plan_recipe(dir, set)?;
        let (samples, rows) = cached_rows_in(cache.path(), &r, None, 64, Part::Train).expect("kept");
        let own = tempfile::tempdir()?;
        let d = load(&r, own.path())?;
        assert_eq!((lists(&rows), samples.len()), (lists(&d.rows), d.samples.len()), "{set:?}");
    }
    // 20 cuts some rows, so the entry for 64 does not apply
    let short = plan_recipe(dir, &["data.max_length=20"])?;
    let found = |r: &Recipe| cached_rows_in(cache.path(), r, None, 64, Part::Train).is_some();
    assert!(!found(&short));
    load(&short, cache.path())?;
    assert!(found(&short));
    // the entry for 64 still exists
    assert!(found(&plan_recipe(dir, &[])?));
    assert!(!found(&plan_recipe(dir, &["data.cache=false"])?));
    Ok(())
}

#[test]
fn changed_inputs_invalidate_the_token_cache() -> anyhow::Result<()> {
    let (files, cache) = (world(), tempfile::tempdir()?);
    let dir = files.0.path();
    let r = plan_recipe(dir, &[])?;
    load(&r, cache.path())?;
    let found = |r: &Recipe, model: Option<&Path>, vocab| {
        cached_rows_in(cache.path(), r, model, vocab, Part::Train).is_some()
    };
    assert!(found(&r, None, 64));
    assert!(!found(&r, None, 65), "another vocabulary");
    let named = plan_recipe(dir, &["data.train.0.fields.input_ids=ids"])?;
    assert!(!found(&named, None, 64), "another field");

    // rewriting the same bytes keeps the entry, changing a byte invalidates it
    let a = dir.join("a.jsonl");
    let bytes = std::fs::read(&a)?;
    std::fs::write(&a, &bytes)?;
    assert!(found(&r, None, 64));
    let mut other = bytes.clone();
    let digit = other.iter().position(u8::is_ascii_digit).expect("a digit");
    other[digit] ^= 1;
    std::fs::write(&a, &other)?;
    assert!(!found(&r, None, 64), "other data");
    std::fs::write(&a, &bytes)?;
    assert!(found(&r, None, 64));

    // the tokenizer and template matter for text, not for token rows
    let model = tempfile::tempdir()?;
    let fields = "tokenizer.json tokenizer_config.json";
    for f in fields.split(' ') {
        std::fs::copy(fixture("tiny-tokenizer").join(f), model.path().join(f))?;
    }
    let text = plan_recipe(dir, &["data.train.0.source=t.jsonl", "data.train.0.format=text"])?;
    let t = Tokenizer::load(model.path(), None)?.expect("a tokenizer");
    let resolve = |s: &str| text.resolve(s);
    Loader::new(&text.data, &resolve, Some(&t), 64 + 300).with_cache(cache.path()).load(Part::Train, 0)?;
    assert!(found(&text, Some(model.path()), 364));
    assert!(!found(&text, None, 364), "without a model nobody knows its tokenizer");
    std::fs::write(model.path().join("chat_template.jinja"), "{{ messages }}")?;
    assert!(!found(&text, Some(model.path()), 364));
    assert!(found(&r, Some(model.path()), 64));
    Ok(())
}
