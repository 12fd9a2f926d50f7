//! Files of other toolkits as flat lists of keys: YAML, JSON, command lines.

mod entries;
mod flags;
mod scalar;
mod yaml;

pub(super) use entries::{Entries, Entry};
pub(super) use flags::{FILE, is_command, is_file};
pub(super) use scalar::{is_expansion, is_off, number, text, truth, words};
pub use yaml::value as yaml_value;

/// Reads a configuration: a command line or script, else YAML or JSON.
///
/// # Errors
/// Syntax errors, with the line.
pub(super) fn read(text: &str) -> Result<Entries, String> {
    if is_command(text) { flags::read(text) } else { yaml::read(text) }
}
