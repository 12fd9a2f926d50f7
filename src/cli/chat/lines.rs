//! Line input: with editing and history on a terminal, plain from a pipe.

use ft_base::store;
use rustyline::config::Configurer;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{DefaultEditor, Editor};
use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

/// Most lines of saved history.
const MAX_HISTORY: usize = 1000;

/// Source of lines.
pub enum Lines {
    /// A terminal, and the history file.
    Terminal(Box<Editor<(), DefaultHistory>>, Option<PathBuf>),
    /// Any other stdin.
    Pipe(io::Lines<io::StdinLock<'static>>),
}

/// A line, or the reason for none.
pub enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupt,
    End,
}

impl Lines {
    /// Opens stdin. On a terminal, history is saved as `name` in the cache folder; lines starting with a
    /// space are not saved.
    ///
    /// # Errors
    /// A terminal setup error.
    pub fn open(name: &str) -> io::Result<Self> {
        // the prompt is drawn on stdout
        if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
            return Ok(Lines::Pipe(io::stdin().lock().lines()));
        }
        let mut editor = DefaultEditor::new().map_err(io::Error::other)?;
        editor.set_max_history_size(MAX_HISTORY).map_err(io::Error::other)?;
        editor.set_history_ignore_space(true);
        let history = store::cache_folder().map(|dir| dir.join(name));
        if let Some(history) = &history {
            // a missing or unreadable history is empty
            let _ = editor.load_history(history);
        }
        Ok(Lines::Terminal(Box::new(editor), history))
    }

    /// Whether input comes from a terminal.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Lines::Terminal(..))
    }

    /// The next line.
    ///
    /// # Errors
    /// A read error.
    pub fn next(&mut self, prompt: &str) -> io::Result<Line> {
        match self {
            Lines::Pipe(lines) => Ok(lines.next().transpose()?.map_or(Line::End, Line::Text)),
            Lines::Terminal(editor, history) => match editor.readline(prompt) {
                Ok(line) => {
                    let new = editor.add_history_entry(&line).unwrap_or(false);
                    if let Some(history) = history.as_ref().filter(|_| new && !line.trim().is_empty()) {
                        // a failure to save history is harmless
                        let _ = history.parent().map(std::fs::create_dir_all);
                        let _ = editor.append_history(history);
                    }
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupt),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Io(e)) => Err(e),
                Err(e) => Err(io::Error::other(e)),
            },
        }
    }
}
