//! `ft recipes`: the recipes that are built into the binary.

use crate::recipe::{self, SHIPPED, Shipped};
use std::io::{self, Write};

/// The verb: lists the shipped recipes, or prints the one called `name`, on stdout.
///
/// # Errors
/// A name that no shipped recipe has; a stdout that takes no more.
pub fn run(name: Option<&str>) -> Result<(), crate::Error> {
    let mut out = io::stdout().lock();
    let outcome = match name {
        Some(name) => out.write_all(Shipped::find(name)?.text.as_bytes()),
        None => list(&mut out),
    };
    Ok(recipe::Error::of_print(outcome)?)
}

/// One line a recipe: its name, and what it is.
fn list(out: &mut dyn Write) -> io::Result<()> {
    let width = SHIPPED.iter().map(|s| s.name.len()).max().unwrap_or(0);
    for s in SHIPPED {
        writeln!(out, "{:<width$}  {}", s.name, s.title())?;
    }
    Ok(())
}
