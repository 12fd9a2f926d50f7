//! A plan as text, as JSON, and as the refusal of a run.

mod json;
mod place;
mod shortage;
mod text;

pub use crate::units::{bytes, count};
pub use place::{place, place_of};
