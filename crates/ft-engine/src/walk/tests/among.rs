//! Ranks as threads, and comparisons of their gradients with those of one rank.

use super::*;
use crate::ranks;
use ft_base::error::ExitCode;
use ft_base::memory::place;
use std::time::Duration;

/// Runs `rank` on so many ranks; the results by rank.
pub(super) fn on_ranks<T: Send>(count: usize, rank: impl Fn(ranks::Threads) -> T + Sync) -> Vec<T> {
    let run = &|comm: ranks::Threads| {
        place::follow();
        rank(comm)
    };
    std::thread::scope(|s| {
        let group = ranks::group(count, Duration::from_secs(100)).into_iter();
        let started: Vec<_> = group.map(|comm| s.spawn(move || run(comm))).collect();
        started.into_iter().map(|t| t.join().expect("no panic")).collect()
    })
}

/// The largest relative distance of a tensor's gradient, by the tensors' names, and that of all gradients together.
pub(super) fn gradients_apart(got: &[Vec<f64>], want: &[Vec<f64>], names: &[&str]) -> [f64; 2] {
    let mut most = 0_f64;
    for ((got, want), name) in got.iter().zip(want).zip(names) {
        // Softmax nearly cancels the gradient of a key bias.
        let far = if want.iter().any(|x| *x != 0.0) { distance(got, want) } else { 0.0 };
        most = most.max(if name.ends_with("k_proj.bias") { far / 10.0 } else { far });
    }
    [most, distance(&got.concat(), &want.concat())]
}

/// All ranks but the last of four have heard that it is lost, with the name of its last collective.
pub(super) fn assert_heard(lost: &[Option<ranks::Error>], at: &str) -> Result<()> {
    for (i, lost) in lost.iter().enumerate().take(3) {
        let lost = lost.as_ref().with_context(|| format!("rank {i} has not heard of it"))?;
        let told = (lost.rank, lost.code, lost.at.to_string());
        assert_eq!(told, (3, ExitCode::LostRank, at.to_string()), "{lost}");
    }
    Ok(())
}
