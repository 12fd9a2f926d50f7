//! All keys of a recipe, their kinds, and the types of their values.

mod checked;
mod data_words;
mod derived;
mod field;
mod interval;
mod kind;
mod macros;
mod sets;
mod size;
mod tables;
mod walk;
mod words;

pub(crate) use checked::{Checked, Section};
pub use data_words::*;
pub use derived::{LoraSpec, Part};
pub use field::Json;
pub(crate) use field::{Formatted, Keys, inline, of_json};
pub use interval::Interval;
pub use kind::*;
pub use sets::*;
pub(crate) use size::{SMALLEST_BARE, UNITS};
pub use tables::*;
pub use walk::all_keys;
pub(crate) use walk::{find_key, first_entries};
pub use words::*;
