//! Progress on stderr: bars on a terminal, plain lines in a pipe.

use super::{moves_cursor, tell};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// A bar over bytes (loading, writing); hidden where stderr is no terminal.
pub fn bytes_bar(what: &'static str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target());
    let style =
        ProgressStyle::with_template("{prefix:>10} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
    bar.set_prefix(what);
    bar
}

/// A count of rows that are read, of which nobody knows how many there are; hidden where stderr is no terminal.
pub fn rows_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target());
    let style = ProgressStyle::with_template("   reading {human_pos} rows, {per_sec}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Where bars are drawn, if anywhere.
fn target() -> ProgressDrawTarget {
    if moves_cursor() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() }
}

/// What one step has to tell.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Loss.
    pub loss: f64,
    /// Gradient norm before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Tokens a second.
    pub rate: f64,
}

/// Progress of a run over its steps.
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_line: Option<Instant>,
    started: Instant,
    first: u64,
}

impl Progress {
    /// Seconds between lines in a pipe.
    const QUIET: Duration = Duration::from_secs(10);

    /// Progress from step `first` (done already) to `total`.
    pub fn new(first: u64, total: u64) -> Self {
        let bar = moves_cursor().then(|| {
            let bar = ProgressBar::new(total).with_position(first);
            let style = ProgressStyle::with_template("{pos}/{len} [{bar:30}] {msg} {elapsed} left {eta}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "));
            bar
        });
        Self { bar, total, last_line: None, started: Instant::now(), first }
    }

    /// A step is done.
    pub fn step(&mut self, step: u64, t: Told) {
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

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
