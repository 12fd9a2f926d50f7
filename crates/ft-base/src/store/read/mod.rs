//! Reading untrusted files: safe names, plain files, size limits, strict JSON.

pub mod index;
mod input;
pub mod json;
mod path;

pub use input::{LARGEST, open_plain, read_given, read_plain, read_plain_text};
pub use path::{check_name, open_inside, read_if_there, read_inside};
