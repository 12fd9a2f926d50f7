//! Output to the terminal: messages, warnings, progress bars, panics.

pub mod panics;
mod progress;
mod screen;
mod wrap;

pub use progress::{Progress, StepFigures, bytes_bar, rows_bar};
pub use screen::{
    Escaped, color_on_stderr, color_on_stdout, escape, hush, moves_cursor, print, print_escaped,
    print_wrapped, shell_word, tell, tell_escaped, tell_wrapped, to_file, to_terminal, warn,
};
pub use wrap::{plural, width, wrap};
