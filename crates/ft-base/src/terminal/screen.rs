//! All printing. Messages, replies and file names contain text from files and models, and such text must
//! not control the terminal. All output passes through this module, which escapes control characters.

use super::wrap::{width, wrap};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

/// Destination of messages.
enum Messages {
    Stderr,
    /// Discarded: another process of this run prints the same messages.
    Nowhere,
    File(File),
}

static MESSAGES: Mutex<Messages> = Mutex::new(Messages::Stderr);

fn send(messages: Messages) {
    *MESSAGES.lock().unwrap_or_else(PoisonError::into_inner) = messages;
}

/// Discards all later messages of this process, and hides progress bars.
pub fn hush() {
    send(Messages::Nowhere);
}

/// Sends all later messages of this process to a file.
pub fn to_file(file: File) {
    send(Messages::File(file));
}

/// Sends messages to stderr again.
pub fn to_terminal() {
    send(Messages::Stderr);
}

/// Whether a character could move the cursor, change colors, or reorder or hide nearby text. Line breaks
/// and tabs are allowed.
fn is_control(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        // Bidirectional marks, embeddings, overrides and isolates; line separators honored by some terminals.
        '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => true,
        c => c.is_control(),
    }
}

/// Escapes control characters in `text` as in JSON (`\u001b`).
pub fn escape(text: &str) -> Cow<'_, str> {
    let Some(first) = text.find(is_control) else { return Cow::Borrowed(text) };
    let mut out = String::with_capacity(text.len() + 16);
    out.push_str(&text[..first]);
    for c in text[first..].chars() {
        if is_control(c) {
            out.push_str(&format!("\\u{:04x}", c as u32));
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// Quotes `word` for a shell if necessary.
pub fn shell_word(word: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_alphanumeric() || "/._-+:@%=,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return Cow::Borrowed(word);
    }
    Cow::Owned(format!("'{}'", word.replace('\'', r"'\''")))
}

/// A writer that escapes text. Each write must consist of whole characters, as `write!` guarantees.
pub struct Escaped<W>(pub W);

impl<W: Write> Write for Escaped<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        self.0.write_all(escape(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Whether stderr is a terminal with cursor control, as progress bars need.
pub fn moves_cursor() -> bool {
    let own = matches!(*MESSAGES.lock().unwrap_or_else(PoisonError::into_inner), Messages::Stderr);
    own && is_capable(&io::stderr())
}

fn is_capable(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

fn allows_color() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Whether messages on stderr may use color: a capable terminal, and `NO_COLOR` is unset or empty.
pub fn color_on_stderr() -> bool {
    moves_cursor() && allows_color()
}

/// Like [`color_on_stderr`], for stdout.
pub fn color_on_stdout() -> bool {
    is_capable(&io::stdout()) && allows_color()
}

/// Prints a line on stderr, wrapped on a terminal. Ignores errors: a closed stderr must not end a run, as it
/// would with `eprintln!`.
pub fn tell(text: &str) {
    tell_wrapped(&escape(text));
}

/// As [`tell_escaped`], wrapped on a terminal.
pub fn tell_wrapped(text: &str) {
    if moves_cursor() { tell_escaped(&wrap(text, width())) } else { tell_escaped(text) }
}

/// Like [`tell`], for text with intended color codes, already escaped.
pub fn tell_escaped(text: &str) {
    let _ = match &mut *MESSAGES.lock().unwrap_or_else(PoisonError::into_inner) {
        Messages::Stderr => writeln!(io::stderr(), "{text}"),
        Messages::Nowhere => Ok(()),
        Messages::File(file) => writeln!(file, "{text}"),
    };
}

/// Like [`tell`], prefixed with `warning: `.
pub fn warn(text: &str) {
    tell(&format!("warning: {text}"));
}

/// Prints on stdout and flushes.
///
/// # Errors
/// I/O errors, including a closed pipe.
pub fn print(text: &str) -> io::Result<()> {
    put(&escape(text))
}

fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Prints escaped text with color codes on stdout, wrapped on a terminal.
///
/// # Errors
/// I/O errors, including a closed pipe.
pub fn print_escaped(text: &str) -> io::Result<()> {
    if is_capable(&io::stdout()) { put(&wrap(text, width())) } else { put(text) }
}

/// As [`print()`], wrapped on a terminal.
///
/// # Errors
/// I/O errors, including a closed pipe.
pub fn print_wrapped(text: &str) -> io::Result<()> {
    print_escaped(&escape(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_spelled_and_text_is_not() {
        let plain = "tabs\tand\nlines, é, 😀, \u{200D}, עברית";
        assert!(matches!(escape(plain), Cow::Borrowed(t) if t == plain));
        let steering = "\u{1b}[31m\r\u{7}\u{0}\u{7f}\u{9b}2J\u{202e}\u{2066}\u{200f}";
        let spelled = "\\u001b[31m\\u000d\\u0007\\u0000\\u007f\\u009b2J\\u202e\\u2066\\u200f";
        assert_eq!(escape(steering), spelled);
        let mut out = Escaped(Vec::new());
        write!(out, "{steering}|{plain}").unwrap();
        assert_eq!(String::from_utf8(out.0).unwrap(), format!("{spelled}|{plain}"));
    }

    #[test]
    fn a_shell_reads_back_what_was_quoted() {
        for plain in ["runs/a-1.5_b", "/é/x", "C:@+"] {
            assert_eq!(shell_word(plain), plain);
        }
        for word in ["runs/rec ipe", "it's", "", "$HOME", "a;b", "*", "~", "\"`x`\"", "a\\b", "''"] {
            let script = format!("printf %s {}", shell_word(word));
            let out = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
            assert_eq!(String::from_utf8(out.stdout).unwrap(), word, "{script}");
        }
    }

    /// A JSON line keeps its meaning after escaping.
    #[test]
    fn escaped_json_keeps_its_meaning() {
        let value = serde_json::json!({ "a\u{9b}": "\u{1b}\u{202e}\u{7f}\\u001b" });
        let text = value.to_string();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escape(&text)).unwrap(), value);
    }
}
