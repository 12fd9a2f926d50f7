//! Panic handling. A panic in a library while it parses an untrusted file becomes an error about the
//! file; any other panic is a bug, and ends the process with a one-line message.

use super::screen::tell;
use crate::error::ExitCode;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};

thread_local! {
    /// Whether this thread is inside [`caught`].
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Installs a panic hook that prints one line instead of a trace, and nothing inside [`caught`].
pub fn install() {
    set_hook(Box::new(|info| {
        if !CATCHING.get() {
            let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
            let said = message(info.payload());
            if is_memory(said) {
                tell(&format!("error: out of memory: {said}"));
            } else {
                tell(&format!("error: {said}{place}; this is a bug in ft"));
            }
        }
    }));
}

/// The message of a panic.
fn message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// Calls `f` and turns a panic into an error.
pub fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let before = CATCHING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(before);
    outcome.map_err(|payload| message(payload.as_ref()).to_string())
}

/// Whether the standard library panicked because a new thread got no memory.
fn is_memory(said: &str) -> bool {
    said.contains("Cannot allocate memory")
}

/// Calls `f` and turns a panic into an exit code.
///
/// # Errors
/// The exit code of a panic, already reported by the hook of [`install`].
pub fn told<T>(f: impl FnOnce() -> T) -> Result<T, ExitCode> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| {
        if is_memory(message(payload.as_ref())) { ExitCode::DoesNotFit } else { ExitCode::Internal }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(caught(|| 3), Ok(3));
        assert_eq!(caught(|| -> u8 { panic!("number {}", 4) }), Err("number 4".into()));
        assert_eq!(caught(|| -> u8 { std::panic::panic_any(5) }), Err("a panic".into()));
        assert_eq!(told(|| 3), Ok(3));
        assert_eq!(told(|| -> u8 { panic!("number {}", 4) }), Err(ExitCode::Internal));
        let thread = || -> u8 { panic!("failed to spawn thread: Cannot allocate memory (os error 12)") };
        assert_eq!(told(thread), Err(ExitCode::DoesNotFit));
    }
}
