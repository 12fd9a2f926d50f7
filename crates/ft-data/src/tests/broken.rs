//! Error messages for a corpus of broken files.

use super::*;
use ft_base::error::Failure;
use std::io::Write;

fn format_of(name: &str) -> Format {
    match name.split('-').next().unwrap() {
        "messages" => Format::Messages,
        "alpaca" => Format::Alpaca,
        "completion" => Format::Completion,
        "text" => Format::Text,
        "tokens" => Format::Tokens,
        other => panic!("{other}"),
    }
}

#[test]
fn every_broken_file_says_where_and_why() {
    let dir = fixture("broken-data");
    let mut names: Vec<String> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.contains(".json"))
        .collect();
    names.sort();
    assert!(names.len() >= 60);
    let (t, cfg) = (tiny(), data(64));
    let mut out = String::new();
    for name in &names {
        let sources = [source(name, format_of(name))];
        let resolve = |s: &str| dir.join(s);
        let checked = Dataset::check(&of(&sources, &cfg), &resolve, Some(&t), 285, 0, 10);
        out += &format!("{name}\n");
        if let Some(d) = &checked.train {
            out += &format!("  {} of {} rows\n", d.samples.len(), d.stats.rows_read);
        }
        for p in &checked.problems {
            out += &format!("  {}\n", p.to_string().replace(&format!("{}/", dir.display()), ""));
            assert_eq!(p.exit_code(), ft_base::ExitCode::Data);
        }
        // a run stops at the first problem
        let stopped = Dataset::load(Part::Train, &of(&sources, &cfg), &resolve, Some(&t), 285, 0);
        match (checked.problems.first(), stopped) {
            (None, Ok(d)) => assert!(!d.rows.is_empty()),
            (Some(p), Err(e)) => {
                let place = |e: &Error| e.to_string().lines().next().unwrap().to_string();
                assert_eq!(place(p), place(&e));
            }
            (p, s) => panic!("{name}: {p:?} {:?}", s.err()),
        }
    }
    insta::assert_snapshot!(out);
}

#[test]
fn bad_rows_before_the_broken_end_of_a_file_are_told_first() {
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(b"{\"text\": \"Hello\"}\n{}\n{\"text\": 1}\n").unwrap();
    let bytes = gz.finish().unwrap();
    let files = Files::new(&[]);
    // all rows, and half of the check sum
    std::fs::write(files.0.path().join("a.jsonl.gz"), &bytes[..bytes.len() - 6]).unwrap();
    let resolve = |s: &str| files.0.path().join(s);
    let cfg = of(&[source("a.jsonl.gz", Format::Text)], &data(64));
    let checked = Dataset::check(&cfg, &resolve, Some(&tiny()), 285, 0, 10);
    let told: Vec<String> = checked.problems.iter().map(|p| p.to_string()).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told[0].contains("a.jsonl.gz:2") && told[1].contains("a.jsonl.gz:3"), "{told:?}");
    let stopped = Dataset::load(Part::Train, &cfg, &resolve, Some(&tiny()), 285, 0).unwrap_err();
    assert!(stopped.to_string().contains("a.jsonl.gz:2"), "{stopped}");
}

#[test]
fn skipping_counts_and_a_source_of_bad_rows_alone_is_refused() {
    let dir = fixture("broken-data");
    let cfg = ft_recipe::Data { on_bad_row: OnBadRow::Skip, ..data(64) };
    let load = |name: &str| load_in(&dir, &[source(name, format_of(name))], &cfg, &tiny());
    let d = load("messages-invalid-utf8.jsonl").unwrap();
    assert_eq!((d.samples.len(), d.stats.drops.bad, d.stats.rows_read), (2, 1, 3));
    assert!(d.stats.left_out[0].contains("messages-invalid-utf8.jsonl:2:"), "{:?}", d.stats.left_out);
    assert_eq!(nth(&d, 1).line, 3);
    let error = load("messages-no-assistant.jsonl").unwrap_err().to_string();
    assert!(error.contains("none of its 1 rows can be trained on"), "{error}");
    assert!(load("messages-empty.jsonl").is_err());
}

#[test]
fn collected_problems_are_capped_and_counted() {
    let rows: Vec<String> = (0..50u8).map(|i| format!("{{\"{}\": 1}}\n", char::from(b'A' + i))).collect();
    let files = Files::new(&[("a.jsonl", &rows.concat())]);
    let resolve = |s: &str| files.0.path().join(s);
    let checked =
        Dataset::check(&of(&[source("a.jsonl", Format::Text)], &data(8)), &resolve, Some(&tiny()), 285, 0, 7);
    assert_eq!((checked.problems.len(), checked.more), (7, 43));
    assert!(checked.train.is_none());
    // equal problems are one, with their first places
    let files = Files::new(&[("a.jsonl", &"{}\n".repeat(50))]);
    let resolve = |s: &str| files.0.path().join(s);
    let cfg = of(&[source("a.jsonl", Format::Text)], &data(8));
    let checked = Dataset::check(&cfg, &resolve, Some(&tiny()), 285, 0, 7);
    assert_eq!((checked.problems.len(), checked.more), (1, 0));
    let told = checked.problems[0].to_string().replace(&format!("{}/", files.0.path().display()), "");
    insta::assert_snapshot!(told);
}

proptest::proptest! {
    /// Arbitrary bytes yield a dataset or problems, never a panic.
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200), array: bool, cut in 0usize..90) {
        let dir = tempfile::tempdir().unwrap();
        let name = if array { "a.json" } else { "a.jsonl" };
        let mut file = b"[{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\"}]}]"[..].to_vec();
        file.truncate(cut);
        file.extend(&bytes);
        std::fs::write(dir.path().join(name), &file).unwrap();
        let resolve = |s: &str| dir.path().join(s);
        let checked = Dataset::check(&of(&[source(name, Format::Messages)], &data(8)), &resolve, Some(&tiny()), 285, 0, 7);
        assert!(checked.train.is_some() || !checked.problems.is_empty());
    }
}
