//! Panics: those of a library that is fed a file from anywhere become errors about that file; any other is a bug, and
//! ends the process with one line.

use super::screen::tell;
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
            // the standard library panics where a new thread gets no memory
            match said.contains("Cannot allocate memory") {
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

/// Calls `f`; a panic in it has been told by [`install`]'s hook when this gives `None`.
pub fn told<T>(f: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(f)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error() {
        assert_eq!(caught(|| 3), Ok(3));
        assert_eq!(caught(|| -> u8 { panic!("number {}", 4) }), Err("number 4".into()));
        assert_eq!(caught(|| -> u8 { std::panic::panic_any(5) }), Err("a panic".into()));
    }
}
