//! Budgets of one rendering: bytes read or made, and CPU time.
//!
//! Fuel counts instructions, but a single instruction may double a string or compare values of any size.
//! Operations that create or traverse a value therefore spend a cost estimate first ([`super::guard`]
//! inserts the calls); a rendering over budget ends with an error. The budget is independent of the
//! machine. The limit on CPU time is a second line of defense, for operations with underestimated cost.

use minijinja::value::{DynObject, ObjectRepr, Value};
use minijinja::{Error, ErrorKind};
use rustix::time::{ClockId, clock_gettime};
use std::cell::{Cell, RefCell};

/// Byte budget of a rendering, and additional budget per byte of the conversation.
const BUDGET: (u64, u64) = (128 << 20, 16);
/// CPU time limit in seconds, and bytes of conversation per additional second.
const SECONDS: (f64, f64) = (2.0, 4e6);
/// Cost of a value in addition to the text: about the size of an entry in a list or map, in bytes.
const NODE: u64 = 64;
/// Maximum nesting depth of lists and maps.
const DEEPEST: usize = 200;
/// Number of operations between two clock checks.
const TICKS: u32 = 64;

thread_local! {
    /// Remaining budget of the rendering on this thread, in bytes.
    static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
    /// Deadline, in seconds of this thread's CPU time.
    static END: Cell<f64> = const { Cell::new(f64::INFINITY) };
    static TICK: Cell<u32> = const { Cell::new(0) };
    /// The conversation, until measured by [`weigh_conversation`].
    static UNWEIGHED: RefCell<Vec<Value>> = const { RefCell::new(Vec::new()) };
}

/// Starts the budget for rendering a conversation.
pub(crate) fn begin(conversation: &[&Value]) {
    UNWEIGHED.replace(conversation.iter().map(|v| (*v).clone()).collect());
    LEFT.set(BUDGET.0);
    END.set(f64::INFINITY);
    TICK.set(0);
}

/// Adds the budget for the conversation's size, and starts the clock. Deferred, as most renderings finish
/// before.
///
/// # Errors
/// A conversation nested too deeply.
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

/// Whether the conversation has not been measured yet.
fn is_new() -> bool {
    UNWEIGHED.with_borrow(|c| !c.is_empty())
}

/// Whether the rendering on this thread ran out of budget, even if a filter swallowed the error.
pub(crate) fn stopped() -> bool {
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
pub(super) fn spend(bytes: usize) -> Result<(), Error> {
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
pub(super) fn spend_product(a: usize, b: usize) -> Result<(), Error> {
    spend(a.saturating_mul(b))
}

/// Checks the clock from time to time.
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

/// Spends the cost of traversing a value; shared children count repeatedly.
///
/// # Errors
/// An exhausted budget, or nesting deep enough to overflow the stack.
pub(super) fn weigh(value: &Value) -> Result<(), Error> {
    walk(value, 0, false)
}

/// As [`weigh`], for values stored in a namespace. Refuses namespaces and loops, since cycles or chains of
/// them would be unbounded.
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
        // by index, since iteration would empty a generator
        ObjectRepr::Iterable => {
            for i in 0usize.. {
                let Some(value) = object.get_value(&Value::from(i)) else { break };
                walk(&value, depth + 1, data)?;
            }
        }
        // other objects enumerate the values that they hold
        _ => {
            for value in object.try_iter().into_iter().flatten() {
                walk(&value, depth + 1, data)?;
            }
        }
    }
    Ok(())
}

/// Whether an object of the template engine is mutable.
fn holds_others(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}
