//! Datasets beyond the in-memory limits for samples and permutations.

use super::*;
use crate::rows::dataset::Loader;
use std::collections::BTreeMap;

/// `n` rows of tokens; the first two tokens encode the row number.
fn rows(n: usize, source: usize) -> String {
    let row = |i: usize| {
        let more = (0..i * 7 % 23).map(|k| format!(", {}", k % 60)).collect::<String>();
        format!("{{\"input_ids\": [{}, {}, {source}{more}]}}\n", i % 60, i / 60)
    };
    (0..n).map(row).collect()
}

fn files(n: usize) -> Files {
    Files::new(&[("a.jsonl", &rows(n, 0)), ("b.jsonl", &rows(n / 3, 1))])
}

/// Two sources, the second with a weight.
fn sources(weight: f64) -> [ft_recipe::Source; 2] {
    [source("a.jsonl", Format::Tokens), ft_recipe::Source { weight, ..source("b.jsonl", Format::Tokens) }]
}

/// Rows, counts, hash, and all samples.
type Seen = (Vec<Vec<u32>>, Stats, String, Vec<Example>);
/// Sources and lines.
type Places = Vec<(usize, usize)>;

struct Made {
    train: Dataset,
    eval: Option<Dataset>,
}

impl Made {
    fn seen(&self) -> Vec<Seen> {
        let of = |d: &Dataset| (lists(&d.rows), d.stats.clone(), d.hash.clone(), all(d));
        std::iter::once(&self.train).chain(&self.eval).map(of).collect()
    }
}

/// Loads with a cache, lists on disk above `few` bytes, and `held` samples per permutation.
fn made(files: &Files, cfg: &ft_recipe::Data, cache: &Path, few: usize, held: usize) -> Made {
    let resolve = |s: &str| files.0.path().join(s);
    let load = |part| {
        Loader::new(cfg, &resolve, None, 4096).with_cache(cache).with_limits(few, held).load(part, 3).unwrap()
    };
    Made { train: load(Part::Train), eval: (cfg.eval_share > 0.0).then(|| load(Part::Eval)) }
}

fn ways() -> Vec<ft_recipe::Data> {
    let plain = data(40);
    let mut all = Vec::new();
    for (pack, shuffle, eval_share, weight) in [
        (false, true, 0.0, 1.0),
        (false, false, 0.3, 2.4),
        (true, false, 0.0, 0.6),
        (true, true, 0.0, 1.0),
        (true, true, 0.2, 3.7),
    ] {
        all.push(ft_recipe::Data { pack, shuffle, eval_share, ..of(&sources(weight), &plain) });
    }
    all
}

/// The storage of lists has no visible effect.
#[test]
fn lists_on_disk_are_those_in_memory() {
    let files = files(400);
    for cfg in ways() {
        let off = ft_recipe::Data { cache: false, ..cfg.clone() };
        let own = tempfile::tempdir().unwrap();
        let plain = made(&files, &off, own.path(), usize::MAX, 1 << 20);
        for few in [1, 1000, usize::MAX] {
            let cache = tempfile::tempdir().unwrap();
            let kept = made(&files, &cfg, cache.path(), few, 1 << 20);
            assert_eq!(kept.seen(), plain.seen(), "{few}");
            assert!(few > 1 || kept.train.rows.resident() == 0);
        }
    }
}

/// Samples occur by weight, in training or evaluation, for any size of the permuted parts. Results are
/// independent of threads and cache.
#[test]
fn orders_in_parts_hold_the_same_samples() {
    let files = files(1200);
    for cfg in ways() {
        let cache = tempfile::tempdir().unwrap();
        let whole = made(&files, &cfg, cache.path(), 64, 1 << 20);
        let parts = made(&files, &cfg, cache.path(), 64, 200);
        let ids = |m: &Made| {
            let of = |d: &Dataset| all(d).into_iter().map(|e| (e.source, e.line)).collect::<Places>();
            (of(&m.train), m.eval.as_ref().map(of).unwrap_or_default())
        };
        let sorted = |(train, eval): (Places, Places)| {
            let mut both = [train, eval].concat();
            both.sort_unstable();
            both
        };
        assert_eq!((ids(&parts).0.len(), ids(&parts).1.len()), (ids(&whole).0.len(), ids(&whole).1.len()));
        assert_eq!(sorted(ids(&parts)), sorted(ids(&whole)));
        for m in [&whole, &parts] {
            let mut times: BTreeMap<u32, usize> = BTreeMap::new();
            lists(&m.train.rows).concat().into_iter().for_each(|i| *times.entry(i).or_default() += 1);
            let of_first = m.train.samples.ranges()[0].len();
            assert!((0..of_first as u32).all(|i| times.get(&i) == Some(&1)));
            assert_eq!(times.values().sum::<usize>(), lists(&whole.train.rows).concat().len());
            let weight = cfg.train[1].weight;
            let allowed = |n: &usize| (weight.floor() as usize..=weight.ceil() as usize).contains(n);
            assert!(
                (of_first as u32..m.train.samples.len() as u32).all(|i| allowed(times.get(&i).unwrap_or(&0)))
            );
            let lens = |r: &Vec<u32>| r.iter().map(|i| nth(&m.train, *i as usize).ids.len()).sum::<usize>();
            assert!(lists(&m.train.rows).iter().all(|r| !r.is_empty() && lens(r) <= 40));
        }
        if cfg.pack {
            assert!(parts.train.stats.fill > whole.train.stats.fill - 0.12, "{}", parts.train.stats.fill);
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let own = tempfile::tempdir().unwrap();
            let again = pool.install(|| made(&files, &cfg, own.path(), 64, 200));
            assert_eq!(again.seen(), parts.seen());
            assert_eq!(made(&files, &cfg, own.path(), usize::MAX, 200).seen(), parts.seen());
        }
        let off = ft_recipe::Data { cache: false, ..cfg.clone() };
        assert_eq!(made(&files, &off, cache.path(), 64, 200).seen(), parts.seen());
    }
}

/// Bytes in memory, as listed by a plan and measured in a run (`tests/cli/plan/memory`).
#[test]
fn memory_does_not_grow_with_the_samples() {
    for n in [100_000, 150_000] {
        let (files, cache) = (files(n), tempfile::tempdir().unwrap());
        for cfg in ways() {
            let m = made(&files, &cfg, cache.path(), 4096, 1000);
            assert!(m.train.samples.len() > n / 2);
            for d in std::iter::once(&m.train).chain(&m.eval) {
                assert_eq!((d.samples.resident(), d.rows.resident()), (0, 0));
            }
        }
    }
}
