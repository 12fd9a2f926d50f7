//! Download progress on stderr: a bar on a terminal, plain lines otherwise.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
use indicatif::ProgressBar;

use ft_base::store::human_bytes;
use ft_base::terminal::{bytes_bar, escape, moves_cursor, tell};

/// Progress of one download of several files.
pub(super) struct Report {
    what: String,
    total: u64,
    /// `None` if stderr is not a terminal.
    bar: Option<ProgressBar>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: HashMap<String, u64>,
    /// Bytes of files from the hub's chunk storage, reported only in aggregate.
    together: u64,
    /// Last tenth reported by a plain line.
    tenth: u64,
}

impl Report {
    /// Announces a download of `files` files with `total` bytes.
    pub(super) fn new(what: &str, files: usize, total: u64) -> Report {
        let bar = moves_cursor().then(|| bytes_bar(&escape(what), total));
        if bar.is_none() {
            tell(&format!("fetching {what}: {files} files, {}", human_bytes(total)));
        }
        Report { what: what.to_string(), total, bar, state: Mutex::default() }
    }

    fn advance(&self, state: &mut State) {
        // The counts can overlap: a completed file is included in both.
        let done = state.files.values().sum::<u64>().max(state.together).min(self.total);
        match &self.bar {
            Some(bar) => bar.set_position(done.max(bar.position())),
            None => {
                let tenth = (done * 10).checked_div(self.total).unwrap_or(10);
                if tenth > state.tenth {
                    state.tenth = tenth;
                    let (done, total) = (human_bytes(done), human_bytes(self.total));
                    tell(&format!("fetching {}: {tenth}0 % ({done} of {total})", self.what));
                }
            }
        }
    }
}

impl ProgressHandler for Report {
    fn on_progress(&self, event: &ProgressEvent) {
        let ProgressEvent::Download(event) = event else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            DownloadEvent::Progress { files } => {
                for file in files {
                    state.files.insert(file.filename.clone(), file.bytes_completed);
                }
                self.advance(&mut state);
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                state.together = *bytes_completed;
                self.advance(&mut state);
            }
            // Per-file start events; the totals are already known.
            _ => {}
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
