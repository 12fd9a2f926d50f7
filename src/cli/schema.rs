//! `ft schema`: the JSON schema of recipes, on stdout.

use crate::recipe;
use std::io::{self, Write};

/// Prints the JSON schema of recipes to `out`.
///
/// # Errors
/// Those of writing to `out`.
pub fn show(out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, &recipe::schema())?;
    writeln!(out)
}

/// The verb: prints to stdout.
///
/// # Errors
/// A stdout that takes no more; a reader that goes away (`ft schema | head`) is no error.
pub fn run() -> Result<(), crate::Error> {
    Ok(recipe::Error::of_print(show(&mut io::stdout().lock()))?)
}
