//! Progress on stderr: bars on a terminal, plain lines in a pipe.

use super::{moves_cursor, tell, width};
use console::truncate_str;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// Smallest width, in columns, for a bar with rate and numbers.
const ROOMY: usize = 60;

/// A progress bar over bytes (loading, writing, fetching); hidden if stderr is not a terminal.
pub fn bytes_bar(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), target());
    let template = if width() < ROOMY {
        "{prefix} {percent}% {eta} left"
    } else {
        "{prefix:>10} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} left"
    };
    bar.set_style(style(template));
    bar.set_prefix(truncate_str(what, 20, "..").into_owned());
    bar
}

/// A counter of rows read, without a total; hidden if stderr is not a terminal.
pub fn rows_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, target());
    bar.set_style(style("   reading {human_pos} rows, {per_sec}"));
    bar
}

/// A style. The templates are constants; the fallback is never used.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
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

/// The line of a progress bar, within `width` columns. Figures are added in order, as long as they fit.
fn bar_line(width: usize, (step, total): (u64, u64), t: &StepFigures, left: Duration) -> String {
    const BAR: std::ops::RangeInclusive<usize> = 5..=30;
    let count = format!("{step}/{total}");
    let figures = [
        format!("loss {:.4}", t.loss),
        format!("{} left", brief(left)),
        format!("{:.0} tokens/s", t.rate),
        format!("grad norm {:.3}", t.grad_norm),
        format!("lr {:.2e}", t.lr),
    ];
    // A terminal breaks a line that fills it.
    let mut room = width.saturating_sub(count.len() + 1);
    let bar = BAR.start() + 4;
    let mut shown = String::new();
    for figure in figures {
        let text = if shown.is_empty() { figure } else { format!("  {figure}") };
        if text.len() + bar > room {
            break;
        }
        room -= text.len();
        shown.push_str(&text);
    }
    if room < bar {
        return count.chars().take(width.saturating_sub(1)).collect();
    }
    let cells = (room - 4).clamp(*BAR.start(), *BAR.end());
    let done = (cells as u64 * step / total.max(1)).min(cells as u64) as usize;
    let (full, head) = if done == cells { (done, "") } else { (done, ">") };
    let empty = cells - full - head.len();
    format!("{count} [{}{head}{}] {shown}", "=".repeat(full), " ".repeat(empty))
}

/// A duration in its two largest units.
fn brief(time: Duration) -> String {
    let s = time.as_secs_f64().round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {:02}m", s / 3600, s / 60 % 60),
        _ => format!("{}d {:02}h", s / 86_400, s / 3600 % 24),
    }
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
            bar.set_style(style("{msg}"));
            bar
        });
        Self { bar, total, last_line: None, started: Instant::now(), first }
    }

    /// Reports a finished step.
    pub fn step(&mut self, step: u64, t: StepFigures) {
        let done = step.saturating_sub(self.first).max(1) as f64;
        let left = self.started.elapsed().as_secs_f64() / done * self.total.saturating_sub(step) as f64;
        let left = Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX);
        match &self.bar {
            Some(bar) => {
                bar.set_message(bar_line(width(), (step, self.total), &t, left));
                bar.set_position(step);
            }
            None => {
                let due = self.last_line.is_none_or(|l| l.elapsed() >= Self::QUIET);
                if due || step == self.total {
                    self.last_line = Some(Instant::now());
                    tell(&format!(
                        "step {step}/{}  loss {:.4}  grad norm {:.3}  lr {:.2e}  {:.0} tokens/s  {} left",
                        self.total,
                        t.loss,
                        t.grad_norm,
                        t.lr,
                        t.rate,
                        brief(left)
                    ));
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

#[cfg(test)]
mod tests {
    use super::*;

    const FIGURES: StepFigures = StepFigures { loss: 2.10344, grad_norm: 0.5134, lr: 2e-4, rate: 512.4 };

    #[test]
    fn a_progress_bar_is_one_line_within_the_width() {
        let line = |width, step| bar_line(width, (step, 100), &FIGURES, Duration::from_secs(67));
        assert_eq!(line(40, 12), "12/100 [>    ] loss 2.1034  1m 07s left");
        assert_eq!(
            line(80, 50),
            "50/100 [=======>      ] loss 2.1034  1m 07s left  512 tokens/s  grad norm 0.513"
        );
        assert!(line(120, 100).ends_with("grad norm 0.513  lr 2.00e-4") && line(120, 100).contains("=]"));
        for width in 1..200 {
            for (step, total) in [(0, 0), (1, 1), (7, 9), (3, u64::MAX), (u64::MAX / 64, u64::MAX)] {
                let line = bar_line(width, (step, total), &FIGURES, Duration::from_secs(1 << 40));
                assert!(line.len() < width.max(2), "{width}: {line:?}");
            }
        }
    }

    #[test]
    fn durations_have_two_units() {
        let shown = [0, 59, 60, 3599, 3600, 90_061].map(|s| brief(Duration::from_secs(s)));
        assert_eq!(shown, ["0s", "59s", "1m 00s", "59m 59s", "1h 00m", "1d 01h"]);
    }
}
