//! Panics: those of a library that is fed a file from anywhere become errors about that file; any other is a bug, and
//! ends the process with one line.

use super::screen::tell;
use crate::error::ExitCode;
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};

thread_local! {
    /// Whether this thread is inside of [`caught`].
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Makes a panic print one line instead of a trace, and those that are [`caught`] none.
pub fn install() {
    set_hook(Box::new(|info| {
        if !CATCHING.get() {
            let place = info.location().map(|l| format!(" at {}:{}", l.file(), l.line())).unwrap_or_default();
            let said = message(info.payload());
            match is_memory(said) {
                true => tell(&format!("error: out of memory: {said}")),
                false => tell(&format!("error: {said}{place}; this is a bug in ft")),
            }
        }
    }));
}

/// What a panic says.
fn message(payload: &dyn Any) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

/// Calls `f`; a panic in it is an error that says what the panic said.
///
/// # Errors
/// The panic's message.
pub fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let before = CATCHING.replace(true);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(before);
    outcome.map_err(|payload| message(payload.as_ref()).to_string())
}

/// Whether a panic is the standard library's where a new thread gets no memory.
fn is_memory(said: &str) -> bool {
    said.contains("Cannot allocate memory")
}

/// Calls `f`.
///
/// # Errors
/// The exit code of a panic, which [`install`]'s hook has told.
pub fn told<T>(f: impl FnOnce() -> T) -> Result<T, ExitCode> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| match is_memory(message(payload.as_ref())) {
        true => ExitCode::DoesNotFit,
        false => ExitCode::Internal,
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
