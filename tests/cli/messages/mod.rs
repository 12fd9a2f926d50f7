//! Messages: errors, help, pages, and output on a terminal.

mod broken;
mod docs;
mod hostile;
mod terminal;
mod words;
