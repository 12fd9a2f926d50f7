//! What is printed. Messages, replies and file names hold text that came from a file or from a model, and such text
//! must not steer a terminal: whatever is printed goes through here, and control characters come out spelled.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Where messages go.
enum Messages {
    Stderr,
    /// Nowhere: another process of this run says the same.
    Nowhere,
    File(File),
}

static MESSAGES: Mutex<Messages> = Mutex::new(Messages::Stderr);

fn send(messages: Messages) {
    *MESSAGES.lock().unwrap_or_else(PoisonError::into_inner) = messages;
}

/// From here on messages of this process go nowhere, and nothing moves the cursor.
pub fn hush() {
    send(Messages::Nowhere);
}

/// From here on messages of this process go to a new file.
///
/// # Errors
/// A file that cannot be written.
pub fn to_file(path: &Path) -> io::Result<()> {
    File::create(path).map(|f| send(Messages::File(f)))
}

/// From here on they go to stderr again.
pub fn to_terminal() {
    send(Messages::Stderr);
}

/// Whether a character could move the cursor, change colours, or reorder and hide what stands around it. Line breaks
/// and tabs are only text.
fn is_control(c: char) -> bool {
    match c {
        '\n' | '\t' => false,
        // marks, embeddings, overrides and isolates of right-to-left text; separators that some terminals break at
        '\u{61C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}' => true,
        c => c.is_control(),
    }
}

/// `text` with its control characters spelled as JSON spells them (`\u001b`).
pub fn escape(text: &str) -> Cow<'_, str> {
    let Some(first) = text.find(is_control) else { return Cow::Borrowed(text) };
    let mut out = String::with_capacity(text.len() + 16);
    out.push_str(&text[..first]);
    for c in text[first..].chars() {
        match is_control(c) {
            true => out.push_str(&format!("\\u{:04x}", c as u32)),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// `word` as a shell takes it: in quotes where it has to be.
pub fn shell_word(word: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_alphanumeric() || "/._-+:@%=,".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => Cow::Borrowed(word),
        false => Cow::Owned(format!("'{}'", word.replace('\'', r"'\''"))),
    }
}

/// A writer for text that escapes it on the way. What is written must be whole characters, as `write!` writes them.
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

/// Whether stderr is a terminal that moves its cursor: progress bars are for those.
pub fn moves_cursor() -> bool {
    let own = matches!(*MESSAGES.lock().unwrap_or_else(PoisonError::into_inner), Messages::Stderr);
    own && io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
}

/// Whether messages on stderr may be coloured: a terminal that can, and `NO_COLOR` is unset or empty.
pub fn color_on_stderr() -> bool {
    moves_cursor() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// As [`color_on_stderr`], on stdout.
pub fn color_on_stdout() -> bool {
    let can = io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
    can && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// Prints a line on stderr. A stderr that nobody reads any more must not end a run, as `eprintln!` would.
pub fn tell(text: &str) {
    tell_escaped(&escape(text));
}

/// As [`tell`], for a text that holds colours of our own and is escaped already.
pub fn tell_escaped(text: &str) {
    let _ = match &mut *MESSAGES.lock().unwrap_or_else(PoisonError::into_inner) {
        Messages::Stderr => writeln!(io::stderr(), "{text}"),
        Messages::Nowhere => Ok(()),
        Messages::File(file) => writeln!(file, "{text}"),
    };
}

/// As [`tell`], with `warning: ` in front.
pub fn warn(text: &str) {
    tell(&format!("warning: {text}"));
}

/// Prints on stdout, at once.
///
/// # Errors
/// What the system says; a reader that has gone away among it.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(escape(text).as_bytes())?;
    out.flush()
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

    /// A JSON line stays JSON with the same meaning.
    #[test]
    fn json_means_the_same_afterwards() {
        let value = serde_json::json!({ "a\u{9b}": "\u{1b}\u{202e}\u{7f}\\u001b" });
        let text = value.to_string();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escape(&text)).unwrap(), value);
    }
}
