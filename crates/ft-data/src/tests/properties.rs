//! Property tests of packing, batches and micro-batches.

use super::*;
use ft_recipe::{Device, Interval, Length, Run};
use proptest::prelude::*;

fn run(length: Length, batch_rows: usize, seed: u64) -> Run {
    Run {
        seed,
        epochs: if let Length::Epochs(x) = length { x } else { 1.0 },
        steps: if let Length::Steps(n) = length { Some(n) } else { None },
        batch_rows,
        micro_rows: 1.into(),
        clip: 1.0,
        eval_every: 0.into(),
        eval_at_start: false,
        save_every: 0.into(),
        keep: 2,
        keep_best: false,
        best: ft_recipe::Best::Loss,
        patience: 0,
        output: PathBuf::new(),
        device: Device::Cpu,
    }
}

fn dataset(lengths: &[usize], rows: Vec<Vec<usize>>) -> Dataset {
    let example = |(i, n): (usize, &usize)| Example {
        ids: (0..*n as u32).map(|k| i as u32 * 1000 + k).collect(),
        labels: (0..*n).map(|k| if k % 3 == 0 { IGNORE_INDEX } else { (i * 1000 + k) as i32 }).collect(),
        line: i + 1,
        ..Example::default()
    };
    let examples: Vec<Example> = lengths.iter().enumerate().map(example).collect();
    Dataset::of(&examples, &rows).unwrap()
}

/// The random stream of packing.
fn order_of(seed: u64) -> ft_base::rng::Stream {
    ft_base::rng::Stream::new(seed, ft_base::rng::Purpose::Pack, 0, 0)
}

/// Straightforward best-fit, for comparison.
fn best_fit(lengths: &[usize], max: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut rows: Vec<(usize, Vec<usize>)> = Vec::new();
    // rows, most recently used last
    let mut order: Vec<usize> = Vec::new();
    for i in order_of(seed).permutation(lengths.len() as u32) {
        let i = i as usize;
        let fits = |r: &&usize| rows[**r].0 >= lengths[i].max(1);
        let row = match order.iter().filter(fits).min_by_key(|r| rows[**r].0).copied() {
            Some(row) => {
                order.retain(|r| *r != row);
                row
            }
            None => {
                rows.push((max, Vec::new()));
                rows.len() - 1
            }
        };
        rows[row].0 -= lengths[i];
        rows[row].1.push(i);
        order.insert(0, row);
    }
    rows.into_iter().map(|r| r.1).collect()
}

fn items(lengths: &[usize]) -> Vec<Item> {
    let item =
        |(i, n): (usize, &usize)| Item { sample: i as u32, tokens: *n as u32, targets: 0, ..Item::default() };
    lengths.iter().enumerate().map(item).collect()
}

proptest! {
    #[test]
    fn packing_holds_each_sample_once_and_no_row_too_long(
        lengths in prop::collection::vec(1usize..50, 0..200), seed: u64, ordered: bool,
    ) {
        let order: Vec<usize> = (0..lengths.len()).collect();
        let (items, mut rows) = (items(&lengths), Vec::new());
        let mut each = |row: &[Item]| {
            rows.push(row.iter().map(|i| i.sample as usize).collect::<Vec<_>>());
            Ok(())
        };
        if ordered {
            crate::rows::pack::in_order(items.into_iter().map(Ok), 50, &mut each).unwrap();
        } else {
            crate::rows::pack::best_fit(&items, 50, order_of(seed), &mut each).unwrap();
        }
        let mut all: Vec<usize> = rows.iter().flatten().copied().collect();
        prop_assert!(rows.iter().all(|r| !r.is_empty() && r.iter().map(|i| lengths[*i]).sum::<usize>() <= 50));
        if ordered {
            prop_assert!(all.is_sorted());
            // a row is closed only if the next sample does not fit
            for pair in rows.windows(2) {
                prop_assert!(pair[0].iter().chain(&pair[1][..1]).map(|i| lengths[*i]).sum::<usize>() > 50);
            }
        } else {
            prop_assert_eq!(&rows, &best_fit(&lengths, 50, seed));
            // best-fit leaves at most one row half empty
            let half = rows.iter().filter(|r| r.iter().map(|i| lengths[*i]).sum::<usize>() <= 25).count();
            prop_assert!(half <= 1);
        }
        all.sort_unstable();
        prop_assert_eq!(all, order);
    }

    #[test]
    fn every_epoch_holds_every_row_once(rows in 1usize..40, batch in 1usize..17, epochs in 1usize..4, seed: u64, shuffle: bool) {
        let b = Batches::new(rows, &run(Length::Epochs(epochs as f64), batch, seed), shuffle);
        prop_assert_eq!(b.steps(), (rows * epochs).div_ceil(batch));
        let all: Vec<usize> = (0..b.steps()).flat_map(|s| b.rows(s)).collect();
        prop_assert_eq!(all.len(), rows * epochs);
        for epoch in all.chunks(rows) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            prop_assert_eq!(&sorted, &(0..rows).collect::<Vec<_>>());
            prop_assert!(shuffle || epoch.is_sorted());
        }
        prop_assert!(b.rows(b.steps()).is_empty());
        // results do not depend on the order of queries, as needed for resuming
        let again = Batches::new(rows, &run(Length::Epochs(epochs as f64), batch, seed), shuffle);
        for step in (0..b.steps()).rev() {
            prop_assert_eq!(again.rows(step), b.rows(step));
        }
        // a longer run takes the same steps
        let longer = Batches::new(rows, &run(Length::Steps(b.steps() + 5), batch, seed), shuffle);
        prop_assert_eq!(longer.steps(), b.steps() + 5);
        for step in 0..longer.steps() {
            prop_assert_eq!(longer.rows(step).len(), batch);
            prop_assert!(longer.rows(step).starts_with(&b.rows(step)));
        }
    }

    #[test]
    fn micro_batches_never_cross_documents(lengths in prop::collection::vec(1usize..9, 1..12), packed: bool) {
        let n = lengths.len();
        let rows = if packed { vec![(0..n).collect(), vec![0]] } else { (0..n).map(|i| vec![i]).chain([vec![0]]).collect() };
        let d = dataset(&lengths, rows);
        let m = Micro::collate(&d, &(0..d.rows.len()).collect::<Vec<_>>()).unwrap();
        let mut expected = lengths.clone();
        expected.push(lengths[0]);
        prop_assert_eq!(&m.docs, &expected);
        let samples = || lists(&d.rows).concat().into_iter().map(|i| nth(&d, i as usize));
        let mut at = 0usize;
        let mut targets = Vec::new();
        for (doc, e) in m.docs.iter().zip(samples()) {
            prop_assert_eq!(&m.ids[at..at + doc], &e.ids[..]);
            for k in 0..*doc {
                prop_assert_eq!(m.positions[at + k] as usize, k);
                if k + 1 < *doc && e.labels[k + 1] != IGNORE_INDEX {
                    targets.push(((at + k) as u32, e.labels[k + 1] as u32));
                }
            }
            at += doc;
        }
        prop_assert_eq!(m.ids.len(), at);
        prop_assert_eq!(&m.targets, &targets);
        prop_assert_eq!(m.targets.len(), samples().map(|e| e.targets()).sum::<usize>());
    }
}

#[test]
fn intervals_end_after_steps_shares_and_epochs() {
    let due = |rows, length, batch, every| {
        let b = Batches::new(rows, &run(length, batch, 0), false);
        let due: Vec<_> = (1..=b.steps()).filter(|done| b.is_due(every, *done)).collect();
        assert_eq!(b.recurs(every), due.len() > 1, "{every:?}");
        due
    };
    let (two, ten) = (Length::Epochs(2.0), Length::Steps(10));
    for (rows, length, batch, every, expected) in [
        (10, two, 2, Interval::Steps(0), &[10][..]),
        (10, two, 2, Interval::Steps(4), &[4, 8, 10]),
        (10, two, 2, Interval::Percent(25.0), &[3, 6, 9, 10]),
        (10, two, 2, Interval::Percent(0.1), &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (10, two, 2, Interval::Epoch(1), &[5, 10]),
        // the halves end after 5, 10, 15 and 20 rows
        (10, two, 2, Interval::Epoch(2), &[3, 5, 8, 10]),
        (10, two, 3, Interval::Epoch(1), &[4, 7]),
        (10, two, 16, Interval::Epoch(4), &[1, 2]),
        (10, ten, 4, Interval::Epoch(1), &[3, 5, 8, 10]),
        (300, ten, 4, Interval::Epoch(1), &[10]),
        (0, two, 2, Interval::Epoch(1), &[]),
    ] {
        assert_eq!(due(rows, length, batch, every), expected, "{rows} {length:?} {batch} {every:?}");
    }
}

#[test]
fn fractional_epochs_round_to_steps_and_wrap_around() {
    let steps =
        |rows, epochs, batch| Batches::new(rows, &run(Length::Epochs(epochs), batch, 0), true).steps();
    assert_eq!([steps(10, 0.5, 2), steps(10, 1.25, 4), steps(10, 0.001, 4), steps(0, 1.0, 4)], [3, 4, 1, 0]);
    let b = Batches::new(10, &run(Length::Epochs(1.25), 4, 0), false);
    assert_eq!(b.rows(3), [2]);
    assert_eq!(b.rows(2), [8, 9, 0, 1]);
    // a batch larger than the dataset wraps around several times
    assert_eq!(Batches::new(2, &run(Length::Steps(1), 5, 0), false).rows(0), [0, 1, 0, 1, 0]);
    let shuffled = Batches::new(100, &run(Length::Epochs(2.0), 100, 3), true);
    assert_ne!(shuffled.rows(0), shuffled.rows(1));
}

#[test]
fn packing_a_million_samples_is_dense() {
    let lengths: Vec<usize> = {
        let s = ft_base::rng::Stream::new(5, ft_base::rng::Purpose::Test, 0, 0);
        (0..1_000_000).map(|i| 20 + (s.uniform(i).powi(3) * 2000.0) as usize).collect()
    };
    let mut rows = 0;
    let mut each = |_: &[Item]| {
        rows += 1;
        Ok(())
    };
    crate::rows::pack::best_fit(&items(&lengths), 2048, order_of(1), &mut each).unwrap();
    let fill = lengths.iter().sum::<usize>() as f64 / (rows * 2048) as f64;
    assert!(fill > 0.97, "{fill}");
}

#[test]
fn percentiles_of_lengths_are_by_nearest_rank() {
    let of = |all: Vec<usize>| {
        let mut counts = Counts::default();
        all.into_iter().for_each(|n| counts.add(n, 1));
        counts.lengths()
    };
    let l = of((1..=100).rev().collect());
    assert_eq!(l, Lengths { min: 1, median: 50, p95: 95, max: 100 });
    assert_eq!(of(vec![]), Lengths::default());
    assert_eq!(of(vec![7]).p95, 7);
}
