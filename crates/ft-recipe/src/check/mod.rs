//! Checks of single keys: names, kinds and ranges.

mod checker;
mod describe;
mod foreign;
mod meant;
mod parse;
mod suggestions;
mod unsupported;
pub(crate) mod values;

pub(crate) use checker::Checker;
pub(crate) use describe::expected;
pub use foreign::Foreign;
pub(crate) use meant::meant;
pub use suggestions::nearest;
pub(crate) use unsupported::find as find_unsupported;
pub use values::module_regex;
