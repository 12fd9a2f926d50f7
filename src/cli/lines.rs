//! Lines that somebody types: edited and remembered on a terminal, as they come from a pipe.

use ft_base::store;
use rustyline::config::Configurer;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{DefaultEditor, Editor};
use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

/// Lines that are remembered from one time to the next.
const REMEMBERED: usize = 1000;

/// Where lines come from.
pub enum Lines {
    /// A terminal; what was typed is kept in the file.
    Terminal(Box<Editor<(), DefaultHistory>>, Option<PathBuf>),
    /// Anything else.
    Pipe(io::Lines<io::StdinLock<'static>>),
}

impl Lines {
    /// Those of stdin. What is typed is remembered in the cache folder as `name`; a line that begins with a space is not.
    ///
    /// # Errors
    /// A terminal that cannot be set up.
    pub fn open(name: &str) -> io::Result<Self> {
        // the prompt is drawn on stdout
        if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
            return Ok(Lines::Pipe(io::stdin().lock().lines()));
        }
        let mut editor = DefaultEditor::new().map_err(io::Error::other)?;
        editor.set_max_history_size(REMEMBERED).map_err(io::Error::other)?;
        editor.set_history_ignore_space(true);
        let kept = store::cache_folder().map(|dir| dir.join(name));
        if let Some(kept) = &kept {
            // none yet is as good as one that cannot be read
            let _ = editor.load_history(kept);
        }
        Ok(Lines::Terminal(Box::new(editor), kept))
    }

    /// Whether somebody sits there.
    pub fn typed(&self) -> bool {
        matches!(self, Lines::Terminal(..))
    }

    /// The next line; none at the end. A line that was given up (Ctrl-C) is empty.
    ///
    /// # Errors
    /// What the system says.
    pub fn next(&mut self, prompt: &str) -> io::Result<Option<String>> {
        match self {
            Lines::Pipe(lines) => lines.next().transpose(),
            Lines::Terminal(editor, kept) => match editor.readline(prompt) {
                Ok(line) => {
                    let new = editor.add_history_entry(&line).unwrap_or(false);
                    if let Some(kept) = kept.as_ref().filter(|_| new && !line.trim().is_empty()) {
                        // what cannot be remembered was said all the same
                        let _ = kept.parent().map(std::fs::create_dir_all);
                        let _ = editor.append_history(kept);
                    }
                    Ok(Some(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(ReadlineError::Io(e)) => Err(e),
                Err(e) => Err(io::Error::other(e)),
            },
        }
    }
}
