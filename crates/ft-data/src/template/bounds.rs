//! What one rendering may do: bytes and values that it reads or makes, and processor time.
//!
//! Fuel counts instructions, but one instruction may double a string, or compare two values of any size. So each
//! operation that makes or walks a value first spends what it will cost from here ([`super::guard`] sees to that),
//! and a rendering that has spent its budget ends with an error. The budget does not depend on the machine. The limit
//! of processor time stands behind it, for what costs more than it was counted for.

use minijinja::value::{DynObject, ObjectRepr, Value};
use minijinja::{Error, ErrorKind};
use rustix::time::{ClockId, clock_gettime};
use std::cell::{Cell, RefCell};

/// Bytes that a rendering may read or make, and for each byte of its conversation as many more.
const BUDGET: (u64, u64) = (128 << 20, 16);
/// Seconds of processor time, and bytes of the conversation that are worth another one.
const SECONDS: (f64, f64) = (2.0, 4e6);
/// What a value counts beside its text: as much as it takes in a list or a map.
const NODE: u64 = 64;
/// Levels of lists and maps inside each other.
const DEEPEST: usize = 200;
/// How often the clock is looked at.
const TICKS: u32 = 64;

thread_local! {
    /// What the rendering on this thread may still spend.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    /// When it has to be done, in seconds of this thread's processor time.
    static END: Cell<f64> = const { Cell::new(f64::INFINITY) };
    static TICK: Cell<u32> = const { Cell::new(0) };
    /// The conversation that is rendered, until it is known what may be spent on it.
    static UNWEIGHED: RefCell<Vec<Value>> = const { RefCell::new(Vec::new()) };
}

/// Begins a rendering of a conversation.
pub(super) fn begin(conversation: &[&Value]) {
    UNWEIGHED.replace(conversation.iter().map(|v| (*v).clone()).collect());
    LEFT.set(BUDGET.0);
    END.set(f64::INFINITY);
    TICK.set(0);
}

/// Gives a rendering what its conversation adds, and starts its clock: most end before they need either.
///
/// # Errors
/// A conversation that is nested too deeply.
#[cold]
fn weigh_conversation() -> Result<(), Error> {
    let left = LEFT.replace(u64::MAX);
    for v in &UNWEIGHED.take() {
        weigh(v)?;
    }
    let size = u64::MAX - LEFT.get();
    LEFT.set(left + BUDGET.1 * size);
    END.set(now() + SECONDS.0 + size as f64 / SECONDS.1);
    Ok(())
}

/// Whether nothing is known of the conversation yet.
fn is_new() -> bool {
    UNWEIGHED.with_borrow(|c| !c.is_empty())
}

/// Whether the rendering on this thread was stopped, even where a filter took the error for something else.
pub(super) fn stopped() -> bool {
    LEFT.get() == 0
}

fn now() -> f64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

#[cold]
fn stop() -> Error {
    LEFT.set(0);
    Error::new(ErrorKind::OutOfFuel, "it takes more time or memory than a rendering may")
}

/// Spends `bytes`.
pub(crate) fn spend(bytes: usize) -> Result<(), Error> {
    let bytes = bytes as u64;
    if bytes >= LEFT.get() && is_new() {
        weigh_conversation()?;
    }
    match LEFT.get().checked_sub(bytes) {
        Some(left) if left > 0 => LEFT.set(left),
        _ => return Err(stop()),
    }
    tick()
}

/// Spends `a * b` bytes.
pub(crate) fn spend_product(a: usize, b: usize) -> Result<(), Error> {
    spend(a.saturating_mul(b))
}

/// Looks at the clock now and then.
pub(super) fn tick() -> Result<(), Error> {
    let n = TICK.get().wrapping_add(1);
    TICK.set(n);
    if !n.is_multiple_of(TICKS) {
        return Ok(());
    }
    if is_new() {
        weigh_conversation()?;
    }
    if now() > END.get() { Err(stop()) } else { Ok(()) }
}

/// Spends what walking over a value costs: a list that holds one list twice counts it twice.
///
/// # Errors
/// A budget that is spent; nesting that would overflow the stack of what walks over it.
pub(crate) fn weigh(value: &Value) -> Result<(), Error> {
    walk(value, 0, false)
}

/// As [`weigh`], for what a namespace will hold: one that holds itself, or a chain of them, has no end.
pub(super) fn weigh_data(value: &Value) -> Result<(), Error> {
    walk(value, 0, true)
}

fn walk(value: &Value, depth: usize, data: bool) -> Result<(), Error> {
    let Some(object) = value.as_object() else {
        let text = value.as_str().map(str::len).or_else(|| value.as_bytes().map(<[u8]>::len));
        return spend(NODE as usize / 2 + text.unwrap_or(0));
    };
    if depth == DEEPEST {
        return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested deeper than 200 levels"));
    }
    if data && holds_others(object) {
        return Err(Error::new(ErrorKind::InvalidOperation, "a namespace cannot hold a namespace or a loop"));
    }
    spend(NODE as usize)?;
    match object.repr() {
        ObjectRepr::Map => {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                walk(&key, depth + 1, data)?;
                walk(&value, depth + 1, data)?;
            }
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            for value in object.try_iter().into_iter().flatten() {
                walk(&value, depth + 1, data)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Whether an object of the template engine can change what it holds after it was made.
fn holds_others(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}

/// A value as it may be kept: what is computed only when it is asked for becomes a list, so that no chain of such
/// values grows; and what it holds is spent.
pub(super) fn made(value: Value) -> Result<Value, Error> {
    match value.as_object() {
        Some(o) if o.repr() == ObjectRepr::Iterable => {
            let mut list = Vec::new();
            for item in value.try_iter()?.checked() {
                let item = item?;
                weigh(&item)?;
                list.push(item);
            }
            Ok(Value::from(list))
        }
        _ => {
            weigh(&value)?;
            Ok(value)
        }
    }
}
