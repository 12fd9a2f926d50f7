//! TOML with source positions: the tree, overrides from the command line, and diagnostics.

mod diagnostic;
mod overrides;
mod tree;

pub use diagnostic::{Diagnostic, Problems};
pub(crate) use diagnostic::{MAX_PROBLEMS, SourceText, Span};
pub(crate) use overrides::apply_overrides;
pub(crate) use tree::{Entry, Node, Table, Value, enclosing, join, parse_value, quote, quote_key, read};
