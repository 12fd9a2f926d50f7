//! Progress on stderr: bars on a terminal, plain lines in a pipe.

use super::{moves_cursor, tell};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// A progress bar over bytes (loading, writing); hidden if stderr is not a terminal.
pub fn bytes_bar(what: &'static str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target());
    let style =
        ProgressStyle::with_template("{prefix:>10} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.set_prefix(what);
    bar
}

/// A counter of rows read, without a total; hidden if stderr is not a terminal.
pub fn rows_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target());
    let style = ProgressStyle::with_template("   reading {human_pos} rows, {per_sec}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Stderr, if it is a terminal.
fn target() -> ProgressDrawTarget {
    if moves_cursor() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

/// The figures of one step, as printed.
#[derive(Clone, Copy, Debug)]
pub struct StepFigures {
    /// Mean loss over the targets of the step.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens per second.
    pub rate: f64,
}

/// Progress of a run over the steps.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_line: Option<Instant>,
    started: Instant,
    first: u64,
}

impl Progress {
    /// Time between lines when stderr is not a terminal.
    const QUIET: Duration = Duration::from_secs(10);

    /// Starts after step `first` and runs to step `total`.
    pub fn new(first: u64, total: u64) -> Self {
        let bar = moves_cursor().then(|| {
            let bar = ProgressBar::new(total).with_position(first);
            let style = ProgressStyle::with_template("{pos}/{len} [{bar:30}] {msg} {elapsed} left {eta}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar
        });
        Self { bar, total, last_line: None, started: Instant::now(), first }
    }

    /// Reports a finished step.
    pub fn step(&mut self, step: u64, t: StepFigures) {
        let text = format!(
            "loss {:.4}  grad norm {:.3}  lr {:.2e}  {:.0} tokens/s",
            t.loss, t.grad_norm, t.lr, t.rate
        );
        match &self.bar {
            Some(bar) => {
                bar.set_message(text);
                bar.set_position(step);
            }
            None => {
                let due = self.last_line.is_none_or(|l| l.elapsed() >= Self::QUIET);
                if due || step == self.total {
                    self.last_line = Some(Instant::now());
                    let done = (step - self.first).max(1) as f64;
                    let left = self.started.elapsed().as_secs_f64() / done * (self.total - step) as f64;
                    tell(&format!("step {step}/{}  {text}  left {left:.0}s", self.total));
                }
            }
        }
    }

    /// Prints a line without disturbing the bar.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| tell(text)),
            None => tell(text),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
